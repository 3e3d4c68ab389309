"""How many files a reader opens between a loss and its gradient, and how many frames lie between a loss and its kernels."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers import CLIP, KERNEL_DEVICE, random_batch, without_needless_clip

import megatron_rl
from benchmarks.launches import counted_launches, watched_launches
from megatron_rl.losses import policy_loss

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel
PACKAGE = os.path.dirname(megatron_rl.__file__) + os.sep
# Frames from the front door to the function that launches, both counted; the decorator that keeps torch.compile out is not.
MOST_FRAMES = {"losses": 3, "ops": 4}  # of the kernels in losses/ and of the row kernels in ops/
# (backend, metrics) -> the files that forward and backward enter, and the lines of these files together: the next hundred, so
# that a sentence in a docstring is no finding.
MOST = {
    ("torch", "none"): (13, 3700),
    ("torch", "basic"): (14, 4200),
    ("triton", "none"): (12, 4400),
    ("triton", "basic"): (12, 4400),
}


class Hops:
    """The package's frames below each kernel launch, and its files that are entered, those of an interpreted kernel too."""

    def __init__(self):
        self.frames: dict[str, set[tuple[str, ...]]] = {"losses": set(), "ops": set()}
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


def hops_of_loss(name: str, backend: str = "triton", metrics: str = "basic") -> Hops:
    batch, hops = random_batch([1, 1], num_masked=(0, 0)), Hops()
    tensors = [x.float() if x.is_floating_point() else x for x in (batch.logits, *batch.arguments())]
    logits, *others = (x.to(KERNEL_DEVICE) for x in tensors)
    # Of two samples with a token each the advantages would be those of either: on a GPU nobody looks.
    options = {"backend": backend, "metrics": metrics, "advantages_per": "sample"}
    for profile in (None, hops):  # what is imported and set up once is not entered by a step
        with watched_launches(hops.watching):
            sys.setprofile(profile)
            threading.setprofile(profile)  # autograd's thread
            try:
                leaf = logits.detach().requires_grad_()
                output = without_needless_clip(policy_loss, name, leaf, *others, **options, **CLIP)
                output.loss.backward()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return hops


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
    """The files are exactly as many as are written down, and their lines are no more: who needs fewer lowers the number."""
    hops = hops_of_loss(name, backend, metrics)
    num_files, num_lines = MOST[backend, metrics]
    assert len(hops.files) == num_files, sorted(hops.files)
    assert hops.num_lines <= num_lines, sorted(hops.files)
