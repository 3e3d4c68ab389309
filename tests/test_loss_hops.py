"""How many files a reader opens between a loss and its gradient, and how many frames lie between a loss and its kernels."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from helpers import CLIP, KERNEL_DEVICE, pool_of, random_batch, s_masks, without_needless_clip
from launches import counted_launches, watched_launches
from linear_cases import head_batch, run

import megatron_rl
from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import count_step
from megatron_rl.policy_loss import linear_grpo_loss, policy_loss
from megatron_rl.weights import sample_token_weights

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel
PACKAGE = os.path.dirname(megatron_rl.__file__) + os.sep
# Frames from the front door to the function that launches, both counted; the decorator that keeps torch.compile out is not.
MOST_FRAMES = {"policy_loss": 5, "ops": 4}  # of the kernels in policy_loss/ and of the row kernels in ops/
# (backend, metrics) -> the files that forward and backward enter, and the lines of these files together: the next hundred, so
# that a sentence in a docstring is no finding.
MOST = {
    ("torch", "none"): (10, 2900),
    ("torch", "basic"): (12, 3200),
    ("triton", "none"): (10, 3800),
    ("triton", "basic"): (15, 4500),
}
# The same of one call of other paths, without a GPU.
MOST_OF_PATHS = {
    "linear_grpo_loss": (11, 3900),
    "count_step and sample_token_weights": (3, 1200),
    "a step of Megatron": (26, 7800),
    "a step of Megatron with the fused head": (29, 9000),
}

pool = pool_of(1)


class Hops:
    """The package's frames below each kernel launch, and its files that are entered, those of an interpreted kernel too."""

    def __init__(self):
        self.frames: dict[str, set[tuple[str, ...]]] = {"policy_loss": set(), "ops": set()}
        self.files: set[str] = set()

    def __call__(self, frame, event: str, argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    @property
    def num_lines(self) -> int:
        return sum(len(Path(PACKAGE, file).read_text(encoding="utf-8").splitlines()) for file in self.files)

    def watching(self, launch):
        def run(kernel, *args, **kwargs):
            frame, below = sys._getframe(), []
            while (frame := frame.f_back) is not None:
                code = frame.f_code
                if code.co_filename.startswith(PACKAGE) and not code.co_qualname.startswith("runs_eagerly."):
                    below.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}")
            self.frames[below[0].split(os.sep)[0]].add(tuple(below))
            launch(kernel, *args, **kwargs)

        return run

    @contextmanager
    def entering(self) -> Iterator[None]:
        sys.setprofile(self)
        threading.setprofile(self)  # autograd's thread
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def hops_of_loss(name: str, backend: str = "triton", metrics: str = "basic") -> Hops:
    batch, hops = random_batch([1, 1], num_masked=(0, 0)), Hops()
    tensors = [x.float() if x.is_floating_point() else x for x in (batch.logits, *batch.arguments())]
    logits, *others = (x.to(KERNEL_DEVICE) for x in tensors)
    # Of two samples with a token each the advantages would be those of either: on a GPU nobody looks.
    options = {"backend": backend, "metrics": metrics, "advantages_per": "sample"}
    for entering in (nullcontext, hops.entering):  # what is imported and set up once is not entered by a step
        with watched_launches(hops.watching), entering():
            leaf = logits.detach().requires_grad_()
            output = without_needless_clip(policy_loss, name, leaf, *others, **options, **CLIP)
            output.loss.backward()
    return hops


def second_call(call: Callable[[], object]) -> tuple[list[str], int]:
    """The files that the second call enters, and their lines."""
    hops = Hops()
    call()
    with hops.entering():
        call()
    return sorted(hops.files), hops.num_lines


def run_head() -> None:
    run(linear_grpo_loss, head_batch(), backend="torch", advantages_per="sample")


def weigh_step() -> None:
    masks = s_masks()
    totals, counts, _, _ = count_step(masks)
    sample_token_weights("sample_mean", counts, totals)


def step_on_rank(rank: int, has_fused_head: bool) -> tuple[list[str], int]:
    import trainer_cases

    trainer = trainer_cases.tiny_trainer(
        PolicyLossConfig(fused_lm_head_loss=has_fused_head, clip_ratio_low=0.2, clip_ratio_high=0.3)
    )
    step = trainer_cases.with_shifted_old_log_probs(trainer, [trainer_cases.ragged_step()])
    return second_call(lambda: trainer.step(step))


# With a clip, of samples, with parameters, and with parameters and the sampler in the place of the old policy.
@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "dppo_kl"])
def test_few_frames_lie_between_a_loss_and_its_kernels(name):
    """Exactly as many as are written down: who needs fewer lowers the number. A launch that is not seen would have no hops."""
    with counted_launches() as launches:
        hops = hops_of_loss(name)
    launching = {stack[0] for stacks in hops.frames.values() for stack in stacks}
    assert len(launching) == len(set(launches)), (launching, launches)
    assert {room: max(map(len, stacks)) for room, stacks in hops.frames.items()} == MOST_FRAMES, hops.frames


@pytest.mark.skipif(torch.cuda.is_available(), reason="Python does not see which files a compiled kernel is made of")
@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize(("backend", "metrics"), MOST)
def test_few_files_lie_between_a_loss_and_its_gradient(name, backend, metrics):
    """Files and lines are at most those that are written down: who needs fewer lowers the number."""
    hops = hops_of_loss(name, backend, metrics)
    num_files, num_lines = MOST[backend, metrics]
    assert len(hops.files) <= num_files, sorted(hops.files)
    assert hops.num_lines <= num_lines, sorted(hops.files)


def check_path(path: str, files: list[str], num_lines: int) -> None:
    most_files, most_lines = MOST_OF_PATHS[path]
    assert len(files) <= most_files and num_lines <= most_lines, (path, len(files), num_lines, files)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the numbers are those of the CPU")
@pytest.mark.parametrize(("path", "call"), [("linear_grpo_loss", run_head), ("count_step and sample_token_weights", weigh_step)])
def test_few_files_are_entered_by_a_call(path, call):
    check_path(path, *second_call(call))


@pytest.mark.megatron
@pytest.mark.skipif(torch.cuda.is_available(), reason="the numbers are those of the CPU")
@pytest.mark.parametrize("has_fused_head", [False, True])
def test_few_files_are_entered_by_a_step_of_megatron(pool, has_fused_head):
    path = "a step of Megatron with the fused head" if has_fused_head else "a step of Megatron"
    [(files, num_lines)] = pool.run(step_on_rank, has_fused_head, world_size=1)
    check_path(path, files, num_lines)
