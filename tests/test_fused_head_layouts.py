"""A step through a real GPTModel whose head is fused is the step of its logits: loss, metrics and whole gradient, on any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import pool_of

from megatron_rl.config import PolicyLossConfig
from megatron_rl.testing.invariance import Layout, StepResult, StepSample, TinyGPT, steps_on_layout
from megatron_rl.testing.reference import (
    CLIPS,
    PARAMETERS,
    double_model,
    model_logits,
    ragged_samples,
    scores_of,
    with_anchors,
)

pytestmark = pytest.mark.megatron

# Two orders of float32 additions; a wrong or missing share, one token of 113, is 9e-3.
TOLERANCE = 1e-5
# 4 rows of 64 float32 columns, 10 of a half: several chunks in each micro-batch, and documents longer than one.
BUDGET = 1500
PLAIN = {"policy_metrics": "with_entropy"}
TERMS = {"policy_metrics": "none", "kl_coefficient": 0.3, "entropy_coefficient": 0.02}
# The head and the last layer below it are what this is about: two layers, where interleaved stages need no more.
UNTIED, TIED, DEEP = TinyGPT(num_layers=2), TinyGPT(num_layers=2, tie_embeddings=True), TinyGPT()


pool = pool_of(4)


def log_probs_on_rank(rank: int, samples: list[StepSample], tiny: TinyGPT) -> list[list[float]]:
    with torch.no_grad():
        logits = model_logits(double_model(tiny, samples), samples, tiny)
        return [of_one.log_probs.tolist() for of_one in scores_of(samples, logits)]


@pytest.fixture(scope="module")
def steps(pool):
    """policy loss -> a ragged step with ratios inside and outside the clip, none near an edge."""
    base = ragged_samples()
    log_probs = pool.run(log_probs_on_rank, base, UNTIED, world_size=1)[0]
    answers = {}
    for policy_loss in CLIPS:
        step = with_anchors(base, log_probs, policy_loss)
        answers[policy_loss] = [replace(sample, ref_log_probs=[v - 0.1 for v in sample.old_log_probs]) for sample in step]
    return answers


def config_of(policy_loss: str, is_fused: bool, **others) -> PolicyLossConfig:
    low, high = CLIPS[policy_loss] or (None, None)
    head = {"fused_lm_head_loss": True, "max_logits_bytes": BUDGET} if is_fused else {}
    parameters = PARAMETERS.get(policy_loss, {})
    return PolicyLossConfig(
        policy_loss=policy_loss, clip_ratio_low=low, clip_ratio_high=high, loss_parameters=parameters, **head, **others
    )


# test_generated_steps.py has the products; here Megatron's own layers, buffers and stages hand over what the head needs.
LAYOUTS = [
    pytest.param(Layout(num_microbatches=2, packed=True), TIED, id="FB-87 packed, tied: two micro-batches, one buffer"),
    pytest.param(Layout(tensor=2, sequence_parallel=True, num_microbatches=2), UNTIED, id="TP2+SP: shards of several rows"),
    pytest.param(
        Layout(tensor=2, context=2, sequence_parallel=True, packed=True, num_microbatches=2), TIED, id="TP2+SPxCP2, packed, tied"
    ),
    pytest.param(Layout(pipeline=2, num_microbatches=4), TIED, id="PP2, tied: the last stage has a copy"),
    pytest.param(Layout(pipeline=2, virtual_pipeline=2, num_microbatches=4), DEEP, id="PP2, interleaved stages"),
    pytest.param(Layout(data=2, distributed_optimizer=True, num_microbatches=3), UNTIED, id="DP2, distributed optimiser"),
]
# Losses and sets of terms in turn; each layout meets one of the others too.
FIRST = ("cispo", "grpo", "gspo")
OTHERS = [name for name in CLIPS if name not in FIRST]


def both_heads(policy_loss: str, step, **options) -> list[tuple]:
    """The steps of the logits' head and of the fused one."""
    return [(step, config_of(policy_loss, is_fused, **options)) for is_fused in (False, True)]


@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_the_fused_step_is_the_step_of_the_logits(pool, steps, layout, model):
    """FB-80, FB-85, FB-87: catches a hidden gradient that is one shard's part or tp times the sum, rows in Megatron's order instead
    of the batch's, a weight gradient that reaches main_grad twice, scaled by another factor or not at all, and the embedding's
    share lost where it is tied."""
    place = [row.values for row in LAYOUTS].index((layout, model))
    rows = [(names[place % len(names)], (PLAIN, TERMS)[place // len(names) % 2]) for names in (FIRST, OTHERS)]
    runs = [run for name, options in rows for run in both_heads(name, steps[name], **options)]
    results = steps_on_layout(pool, layout, runs, model)
    for (policy_loss, _), plain, fused in zip(rows, results[::2], results[1::2], strict=True):
        check_same(policy_loss, plain, fused)
        for name, gradient in plain.gradient.items():
            # Each parameter for itself: a small one could be wrong under the norm of all.
            difference, size = (fused.gradient[name] - gradient).norm(), gradient.norm()
            assert difference < 10 * TOLERANCE * size + 1e-8, (policy_loss, name)


def check_same(policy_loss: str, plain: StepResult, fused: StepResult) -> None:
    assert fused.gradient_error(plain) < TOLERANCE, policy_loss
    assert fused.loss == pytest.approx(plain.loss, rel=TOLERANCE, abs=1e-6), policy_loss
    assert fused.metrics == pytest.approx(plain.metrics, rel=TOLERANCE, abs=1e-6), policy_loss


@pytest.mark.parametrize(
    "layout", [Layout(data=2, num_microbatches=2, calculate_per_token_loss=True), Layout(data=2, num_microbatches=3)], ids=str
)
def test_the_fused_head_keeps_the_schedule_s_contract(pool, steps, layout):
    """FB-15: the factor is T under the per-token contract; with a gradient divisor (FB-91) it is smaller by N."""
    options = {"loss_aggregation": "token_mean", "gradient_divisor": "num_samples"}
    plain, fused = steps_on_layout(pool, layout, both_heads("gspo", steps["gspo"], **options), UNTIED)
    assert fused.gradient_error(plain) < TOLERANCE


FP32_LAYOUTS = [
    pytest.param(Layout(tensor=2, sequence_parallel=True, packed=True, num_microbatches=2), False, id="TP2+SP, packed"),
    pytest.param(Layout(tensor=2, sequence_parallel=True, num_microbatches=2), True, id="TP2+SP, padded, tied"),
    pytest.param(Layout(pipeline=2, num_microbatches=2), True, id="PP2, tied"),
]


@pytest.mark.parametrize(("layout", "is_tied"), FP32_LAYOUTS)
def test_the_fp32_head_of_a_bf16_model_is_one_head_fused_or_not(pool, steps, layout, is_tied):
    """FB-85: through Float16Module, DDP with float32 buffers and the bf16 optimisers. Two different paths, float32 logits in both:
    the head's weight gradient, which is float32 on both, agrees to float32; so do loss and metrics, which plain bf16 logits do not.
    Below the head each path's hidden gradient is rounded to bf16 once more, and a rounding falls on the other side now and then."""
    model = TinyGPT(num_layers=2, bf16=True, tie_embeddings=is_tied)
    runs = [(steps["gspo"], config_of("gspo", False)), *both_heads("gspo", steps["gspo"], fp32_lm_head=True)]
    rounded, plain, fused = steps_on_layout(pool, layout, runs, model)
    assert fused.gradient_error(plain) < 1e-2
    assert fused.loss == pytest.approx(plain.loss, rel=1e-4, abs=1e-6)
    if not is_tied:
        found, truth, of_rounded = (step.gradient["output_layer.weight"] for step in (fused, plain, rounded))
        assert (found - truth).norm() < TOLERANCE * truth.norm()
        assert (of_rounded - truth).norm() > 100 * TOLERANCE * truth.norm()
