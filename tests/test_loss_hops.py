"""How many files a reader opens between a loss and its kernels: frames on the stack, and files entered in one call."""

from __future__ import annotations

import os
import sys

import pytest
from helpers import CLIP, KERNEL_DEVICE, random_batch, without_needless_clip

import megatron_rl
from benchmarks.launches import counted_launches, watched_launches
from megatron_rl.losses import policy_loss

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel
PACKAGE = os.path.dirname(megatron_rl.__file__) + os.sep
# Frames from the front door to the function that launches, both counted; the decorator that keeps torch.compile out is not.
MOST_FRAMES = {"losses": 3, "ops": 4}  # of the kernels in losses/ and of the row kernels in ops/
MOST_FILES = {"losses": 7, "all": 11}


class Hops:
    """The package's frames below each kernel launch, and its files that one call enters. What runs inside a kernel is none."""

    def __init__(self):
        self.frames: dict[str, set[tuple[str, ...]]] = {"losses": set(), "ops": set()}
        self.files: set[str] = set()

    def __call__(self, frame, event: str, argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    def watching(self, launch):
        def run(kernel, *args, **kwargs):
            profile, frame, below = sys.getprofile(), sys._getframe(), []
            sys.setprofile(None)
            while (frame := frame.f_back) is not None:
                code = frame.f_code
                if code.co_filename.startswith(PACKAGE) and not code.co_qualname.startswith("runs_eagerly."):
                    below.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}")
            self.frames[below[0].split(os.sep)[0]].add(tuple(below))
            launch(kernel, *args, **kwargs)
            sys.setprofile(profile)

        return run


def hops_of_loss(name: str) -> Hops:
    batch, hops = random_batch([1, 1], num_masked=(0, 0)), Hops()
    tensors = [x.float() if x.is_floating_point() else x for x in (batch.logits, *batch.arguments())]
    arguments = [x.to(KERNEL_DEVICE) for x in tensors]
    for profile in (None, hops):  # what is imported and set up once is not entered by a step
        with watched_launches(hops.watching):
            sys.setprofile(profile)
            try:
                without_needless_clip(policy_loss, name, *arguments, backend="triton", metrics="basic", **CLIP)
            finally:
                sys.setprofile(None)
    return hops


# With a clip, of samples, with parameters, and with parameters and the sampler in the place of the old policy.
@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "dppo_kl"])
def test_few_files_lie_between_a_loss_and_its_kernels(name):
    """Exactly as many as are written down: who needs fewer lowers the number. A launch that is not seen would have no hops."""
    with counted_launches() as launches:
        hops = hops_of_loss(name)
    launching = {stack[0] for stacks in hops.frames.values() for stack in stacks}
    assert len(launching) == len(set(launches)), (launching, launches)
    assert {room: max(map(len, stacks)) for room, stacks in hops.frames.items()} == MOST_FRAMES, hops.frames
    of_losses = {path for path in hops.files if path.startswith(("losses", "loss_hub"))}
    assert {"losses": len(of_losses), "all": len(hops.files)} == MOST_FILES, sorted(hops.files)
