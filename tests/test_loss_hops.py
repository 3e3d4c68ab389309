"""How many files and lines of the package a reader opens between a call and its gradient: those that a second call enters."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import CLIP, pool_of, random_batch, s_masks, without_needless_clip
from linear_cases import head_batch, run

import megatron_rl
from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import count_step
from megatron_rl.policy_loss import linear_grpo_loss, policy_loss
from megatron_rl.weights import sample_token_weights

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Python does not see which files a compiled kernel is made of"),
]
PACKAGE = os.path.dirname(megatron_rl.__file__) + os.sep
CALLER = PACKAGE + "train" + os.sep  # the loop that asks for a step

pool = pool_of(1)


def files_of_second_call(call: Callable[[], object]) -> list[str]:
    """What is imported and set up once is not entered by it; an interpreted kernel is."""
    files: set[str] = set()

    def enter(frame, event: str, argument) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not file.startswith(CALLER):
            files.add(file.removeprefix(PACKAGE))

    call()
    sys.setprofile(enter)
    threading.setprofile(enter)  # autograd's thread
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(files)


def run_loss(name: str, backend: str) -> None:
    batch = random_batch([1, 1], num_masked=(0, 0))
    logits, *others = (x.float() if x.is_floating_point() else x for x in (batch.logits, *batch.arguments()))
    leaf = logits.detach().requires_grad_()
    # Of two samples with a token each the advantages would be those of either.
    options = {"backend": backend, "metrics": "none", "advantages_per": "sample"}
    without_needless_clip(policy_loss, name, leaf, *others, **options, **CLIP).loss.backward()


def run_head() -> None:
    run(linear_grpo_loss, head_batch(), backend="torch", advantages_per="sample")


def weigh_step() -> None:
    totals, counts, _, _ = count_step(s_masks())
    sample_token_weights("sample_mean", counts, totals)


def files_of_megatrons_step(rank: int, has_fused_head: bool) -> list[str]:
    import trainer_cases

    config = PolicyLossConfig(fused_lm_head_loss=has_fused_head, clip_ratio_low=0.2, clip_ratio_high=0.3)
    trainer = trainer_cases.tiny_trainer(config)
    step = trainer_cases.with_shifted_old_log_probs(trainer, [trainer_cases.ragged_step()])
    return files_of_second_call(lambda: trainer.step(step))


def assert_few(files: list[str], most_files: int, most_lines: int) -> None:
    lines = {file: len(Path(PACKAGE, file).read_text(encoding="utf-8").splitlines()) for file in files}
    assert 0 < len(files) <= most_files and sum(lines.values()) <= most_lines, f"{sum(lines.values())} lines: {lines}"


@pytest.mark.parametrize(
    ("call", "most_files", "most_lines"),
    [
        pytest.param(lambda: run_loss("grpo", "torch"), 8, 2450, id="GRPO in torch"),
        pytest.param(lambda: run_loss("gspo", "triton"), 9, 3360, id="GSPO in Triton"),
        pytest.param(run_head, 10, 3472, id="GRPO from hidden states"),
        pytest.param(weigh_step, 3, 1008, id="counts to weights"),
    ],
)
def test_few_files_are_entered_by_a_call(call, most_files, most_lines):
    """Who needs fewer lowers the numbers."""
    assert_few(files_of_second_call(call), most_files, most_lines)


@pytest.mark.megatron
@pytest.mark.parametrize(("has_fused_head", "most_files", "most_lines"), [(False, 24, 6600), (True, 26, 7650)])
def test_few_files_are_entered_by_a_step_of_megatron(pool, has_fused_head, most_files, most_lines):
    [files] = pool.run(files_of_megatrons_step, has_fused_head, world_size=1)
    assert_few(files, most_files, most_lines)
