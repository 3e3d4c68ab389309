"""Rejected tokens that the forward pass alone knows leave the denominators: by hand, and the same on every layout."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import trainer_cases as cases
from helpers import pool_of
from torch import Tensor

from megatron_rl import CorrectionSettings
from megatron_rl.config import PolicyLossConfig
from megatron_rl.kept_counts import correction_of, counts_kept_before, divides_by_kept, other_choices
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.losses.api import loss_of_log_probs
from megatron_rl.megatron.batch import StepContext, weigh_samples
from megatron_rl.megatron.model import find_output_layer
from megatron_rl.step_counts import StepTotals
from megatron_rl.testing.invariance import Layout, StepSample, TinyGPT, steps_on_layout
from megatron_rl.testing.oracle import Scores
from megatron_rl.testing.reference import (
    CLIPS,
    PARAMETERS,
    double_model,
    global_parameters,
    loss_by_hand,
    model_logits,
    ragged_samples,
    scores_of,
)
from megatron_rl.testing.selftest import SEQUENCE_DELTA, step_of_term

OPSM = {"off_policy_sequence_delta": SEQUENCE_DELTA}
MASK = {"importance_correction": "mask", "importance_correction_low": 0.75, "importance_correction_high": 1.35}
# On any layout a float32 gradient of the tiny model is 3e-7 to 7e-7 from the float64 truth, as in the selftest; one kept token too
# many moves it by more than 1e-3.
TOLERANCE = 1e-6
ONE_LAYER, TWO_LAYERS = TinyGPT(num_layers=1), TinyGPT(num_layers=2)
pool = pool_of(4)


def config_of(loss: str, aggregation: str, **others) -> PolicyLossConfig:
    low, high = CLIPS[loss] or (None, None)
    of_loss = {"clip_ratio_low": low, "clip_ratio_high": high, "loss_parameters": PARAMETERS.get(loss, {})}
    return PolicyLossConfig(policy_loss=loss, loss_aggregation=aggregation, rejected_tokens="dropped", **of_loss, **others)


def test_token_mean_divides_by_the_tokens_that_are_kept():
    """Losses 1 to 8; 1, 3, 4, 7 and 8 are kept, in micro-batches of 3 and 5 tokens: 23 / 5 = 4.6. Counted it is 23 / 8 = 2.875, and
    the mean of the micro-batches' means is (8 / 3 + 15 / 2) / 2, no value of the step."""
    kept = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    config = config_of("reinforce", "token_mean", **MASK)
    assert divides_by_kept(config) and not counts_kept_before(config)
    sums, counts = [], []
    for part in (slice(0, 3), slice(3, 8)):
        log_probs = -torch.arange(1.0, 9.0, dtype=torch.float64)[part]  # at advantage 1 the loss of a token is -log_prob
        size = log_probs.numel()
        output = loss_of_log_probs(
            "reinforce",
            log_probs.clone().requires_grad_(),
            None,
            torch.ones(size, dtype=torch.float64),
            torch.ones(size, dtype=torch.bool),
            torch.tensor([0, size]),
            torch.ones(1, dtype=torch.float64),
            rollout_log_probs=log_probs - torch.where(kept[part], 0.0, 1.0),
            correction=correction_of(config),
            advantages_per="token",
        )
        sums.append(float(output.loss.detach()))
        counts.append(int(output.correction.is_kept.sum()))
    assert (sum(sums), sum(counts)) == (23.0, 5)
    assert sum(sums) / sum(counts) == pytest.approx(4.6, abs=1e-12)


@pytest.mark.parametrize("per", ["sample", "token"])
def test_sample_mean_weighs_by_the_tokens_that_are_kept(per):
    """Samples of 4, 2 and 3 tokens, N = 3. On-policy w = e^0.7 drops two tokens of the first sample and both of the second. The
    third has diverged: it is dropped where A < 0. Weights 1/(3 x 2), 0, and 0, or for its token of A = 2 alone 1/(3 x 1)."""
    log_probs = torch.full((9,), -1.0, dtype=torch.float64, requires_grad=True)
    gaps = torch.tensor([0.7, 0.7, 0, 0, 0.7, 0.7, -0.1, -0.1, -0.1])  # log(policy / sampler)
    of_samples, of_tokens = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1.0, 1, 1, 1, 1, 1, -1, 2, -1])
    output = loss_of_log_probs(
        "reinforce",
        log_probs,
        None,
        (of_samples if per == "sample" else of_tokens).double(),
        torch.ones(9, dtype=torch.bool),
        torch.tensor([0, 4, 6, 9]),
        1 / (3 * torch.tensor([4.0, 2, 3], dtype=torch.float64)),
        rollout_log_probs=log_probs.detach() - gaps,
        correction=CorrectionSettings(kind="mask", low=0.75, high=1.35, sequence_delta=0.05, keeps_sample_weight=True),
        advantages_per=per,
    )
    output.loss.backward()
    third = [0.0, 0.0, 0.0] if per == "sample" else [0.0, 2 / 3, 0.0]
    expected = torch.tensor([0, 0, 1 / 6, 1 / 6, 0, 0, *third], dtype=torch.float64)
    torch.testing.assert_close(-log_probs.grad, expected, rtol=1e-12, atol=0)


Run = tuple[list[StepSample], PolicyLossConfig, float, dict[str, Tensor]]  # and the truth: loss, gradient


def truths_on_rank(rank: int) -> list[Run]:
    """Of each loss under each aggregation, by a criterion of the sample or of the token; a loss that compares with the sampler has
    the first alone."""
    samples = ragged_samples()
    model = double_model(ONE_LAYER, samples)
    leaves, runs = global_parameters(model), []
    scores = scores_of(samples, model_logits(model, samples, ONE_LAYER))
    for loss in CLIPS:
        for aggregation, criterion in (("sample_mean", OPSM), ("token_mean", MASK), ("token_mean", OPSM), ("sample_mean", MASK)):
            if criterion is MASK and get_policy_loss(loss).anchor == "rollout":
                continue
            config = config_of(loss, aggregation, **criterion)
            step = by_hand = step_of_term(samples, scores, config)
            if criterion is MASK:
                by_hand = [on_policy(sample, *of_one) for of_one, sample in zip(enumerate(scores), step, strict=True)]
                step = [replace(sample, old_log_probs=None) for sample in by_hand]
            value = loss_by_hand(by_hand, scores, config)
            parts = torch.autograd.grad(value, [*leaves.values()], retain_graph=True, materialize_grads=True)
            runs.append((step, config, float(value.detach()), dict(zip(leaves, parts, strict=True))))
    return runs


def on_policy(sample: StepSample, place: int, scores: Scores) -> StepSample:
    """The policy in training is the old one. The sampler's ratio is outside of the bounds at a third of the tokens."""
    old = scores.log_probs.tolist()
    gaps = [0.5 if (place + t) % 3 == 0 else 0.1 * (-1) ** t for t in range(len(old))]
    return replace(sample, old_log_probs=old, rollout_log_probs=[one - gap for one, gap in zip(old, gaps, strict=True)])


@pytest.fixture(scope="module")
def truths(pool):
    return pool.run(truths_on_rank, world_size=1)[0]


LAYOUTS = [
    Layout(),
    Layout(num_microbatches=4),
    Layout(data=4),
    Layout(data=2, context=2, num_microbatches=2),
    Layout(tensor=2, context=2, sequence_parallel=True, packed=True, num_microbatches=2),
    Layout(data=2, context=2, distributed_optimizer=True, num_microbatches=2),
    Layout(data=2, overlap_grad_reduce=True, num_microbatches=4),
    Layout(data=2, num_microbatches=3, calculate_per_token_loss=True),
    Layout(context=4, packed=True, calculate_per_token_loss=True),
]
HEAD = {"fused_lm_head_loss": True, "max_logits_bytes": 16 * 1024}


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("head", [{}, HEAD], ids=["logits", "fused head"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_that_of_the_reference_on_every_layout(pool, truths, layout, head):
    """Each layout and head meets a seventh of the losses, aggregations and criteria, in turn, and each head all of them."""
    runs = [run for run in truths if run[1].loss_aggregation == "token_mean" or not layout.calculate_per_token_loss]
    if os.environ.get("EVERY_COMBINATION") != "1":
        runs = runs[(LAYOUTS.index(layout) + 3 * bool(head)) % 7 :: 7]
    results = steps_on_layout(pool, layout, [(step, replace(config, **head)) for step, config, *_ in runs], ONE_LAYER)
    for (_, config, loss, gradient), result in zip(runs, results, strict=True):
        what = f"{layout}, {config.policy_loss} {config.loss_aggregation}"
        norm = sum(float(part.square().sum()) for part in gradient.values()) ** 0.5
        error = sum(float((result.gradient[name] - part).square().sum()) for name, part in gradient.items()) ** 0.5
        assert error < TOLERANCE * norm, f"{what}: {error / norm}"
        assert result.loss == pytest.approx(loss, abs=1e-5), what  # of terms near 1
        assert result.optimizer_norm == pytest.approx(norm, rel=1e-5), f"{what}: it is clipped after the division"


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("is_per_token", [False, True])
def test_stages_of_a_pipeline_divide_by_the_same_tokens(pool, truths, is_per_token):
    """The stages before the last one see no loss."""
    runs = [
        (step, config) for step, config, *_ in truths if config.loss_aggregation == "token_mean" and config.policy_loss == "grpo"
    ]
    layout = Layout(pipeline=2, data=2, num_microbatches=4, calculate_per_token_loss=is_per_token)
    alone, found = (steps_on_layout(pool, one, runs, TWO_LAYERS) for one in (Layout(), layout))
    for expected, result in zip(alone, found, strict=True):
        assert result.gradient_error(expected) < TOLERANCE


def gradient_on_rank(rank: int, is_measured: bool) -> Tensor:
    """Of the output layer. is_measured: a pass without backward has read the same micro-batches before."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    trainer = cases.lively(cases.tiny_trainer(config_of("grpo", "token_mean", **MASK)))
    step = [sample for part in cases.with_shifted_old_log_probs(trainer, [cases.ragged_step()]) for sample in part]
    step = [
        replace(sample, rollout_log_probs=[value + 0.5 * (place % 2) for place, value in enumerate(sample.old_log_probs)])
        for sample in step
    ]
    samples, totals = weigh_samples(trainer.config, step, trainer.groups)
    batches = trainer._batches([samples[:2], samples[2:]], StepContext(totals=totals, num_microbatches=2))
    trainer.model.zero_grad_buffer()
    for forward_only in [True, False] if is_measured else [False]:
        get_forward_backward_func()(
            forward_step_func=trainer._forward_step,
            data_iterator=iter(batches),
            model=trainer.model,
            num_microbatches=2,
            seq_length=batches[0].tokens.shape[1],
            micro_batch_size=batches[0].tokens.shape[0],
            forward_only=forward_only,
        )
    return find_output_layer(trainer.model).weight.main_grad.clone()


@pytest.mark.megatron
def test_a_pass_that_only_measures_is_not_counted_in_the_step_after_it(pool):
    """Its kept tokens would be counted twice, and the gradient would be half."""
    alone, after = (pool.run(gradient_on_rank, is_measured, world_size=1)[0] for is_measured in (False, True))
    assert alone.abs().max() > 0 and torch.equal(alone, after)


@pytest.mark.parametrize(
    ("aggregation", "others", "num_rollouts", "aggregation_named"),
    [
        ("prompt_mean", {}, None, "sample_mean"),
        ("token_mean", {"kl_coefficient": 0.1}, None, "sample_mean"),
        ("sample_mean", {}, 2, "token_mean"),
        ("sample_mean", {"importance_ratio_unit": "turn"}, None, "token_mean"),
        ("sample_mean", {"kl_coefficient": 0.1}, 2, None),
        ("prompt_mean", {"importance_ratio_unit": "turn", "entropy_coefficient": 0.1}, None, None),
    ],
)
def test_an_aggregation_is_named_only_where_it_needs_no_count_before_the_step(aggregation, others, num_rollouts, aggregation_named):
    """sample_mean would be refused too for turns and for rollouts of several samples, token_mean beside another term."""
    config, totals = config_of("grpo", aggregation, **OPSM, **others), StepTotals(4, 2, 9, num_rollouts)
    assert counts_kept_before(config, totals)
    says = other_choices(config, totals)
    assert says == "--rejected-tokens counted" + (f", or --loss-aggregation {aggregation_named}" if aggregation_named else "")
