"""The promise: one step, any layout, one gradient. Real GPTModel, schedule, DDP, finalize_model_grads and optimiser.

EVERY_COMBINATION=1 runs each registered loss with each aggregation on each layout, which takes some minutes more.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from conftest import ROOT
from helpers import pool_of

from megatron_rl.config import PolicyLossConfig
from megatron_rl.metrics.further import ROLLOUT_METRICS
from megatron_rl.metrics.policy import METRICS, Reduction
from megatron_rl.testing.invariance import Layout, StepResult, StepSample, TinyGPT, step_on_layout, steps_on_layout
from megatron_rl.testing.layout_step import POLICY_VERSION
from megatron_rl.testing.reference import (
    CLIPS,
    DIVISOR,
    PARAMETERS,
    LossTruth,
    double_model,
    global_parameters,
    model_logits,
    ragged_samples,
)
from megatron_rl.testing.selftest import AGGREGATIONS, ROLLOUTS, truth_of_terms

pytestmark = pytest.mark.megatron

# A float32 gradient of this model lies 3e-7 to 6e-7 from the float64 truth on one rank already; a layout may double that, and the
# smallest wrong factor, one token too many in 113, moves it by 9e-3.
GRADIENT_TOLERANCE = 1e-5
# The loss is a sum of terms of both signs: its rounding scales with the sum of their absolute values.
LOSS_TOLERANCE = 1e-5

# They meet every layout.
CLIPPED_OBJECTIVES = ("grpo", "gspo")
FUSED = {"fused_lm_head_loss": True, "max_logits_bytes": 1500}
OTHER_LOSSES = [name for name in CLIPS if name not in CLIPPED_OBJECTIVES]

# The fast run has each kind of parallelism once.
SLOW = pytest.mark.slow
SP = {"tensor": 2, "sequence_parallel": True}
# Each row says what it would catch beside a wrong factor.
LAYOUTS = [
    pytest.param(Layout(num_microbatches=1), marks=SLOW, id="one rank, one micro-batch"),
    pytest.param(Layout(num_microbatches=4), id="FB-01 one rank, four unlike micro-batches: a mean of means"),
    pytest.param(Layout(data=2, num_microbatches=2), id="FB-03 DP2: groups straddle ranks"),
    pytest.param(Layout(data=4, num_microbatches=4), marks=SLOW, id="FB-25 DP4 M4: a rank with a fully masked micro-batch"),
    pytest.param(Layout(tensor=2, num_microbatches=2), marks=SLOW, id="TP2, tied: padded vocabulary on the last shard"),
    pytest.param(Layout(**SP, num_microbatches=2), id="TP2+SP: norms reduced over tp"),
    pytest.param(Layout(pipeline=2, num_microbatches=4), id="FB-03 PP2: the loss lives on one stage"),
    pytest.param(Layout(pipeline=2, tensor=2, num_microbatches=2), marks=SLOW, id="PP2xTP2, tied: a copy on the last stage"),
    pytest.param(Layout(context=2, num_microbatches=2), id="FB-21, FB-128 CP2: a cp factor; FB-22 ranks without tokens"),
    pytest.param(Layout(context=4, num_microbatches=1), marks=SLOW, id="FB-22 CP4: one-token responses leave three ranks idle"),
    pytest.param(Layout(context=2, data=2, num_microbatches=2), marks=SLOW, id="FB-28 CP2xDP2: cp ranks counted twice"),
    pytest.param(Layout(context=2, **SP, num_microbatches=2), marks=SLOW, id="FB-28 CP2xTP2+SP"),
    pytest.param(Layout(context=2, pipeline=2, num_microbatches=4), marks=SLOW, id="CP2xPP2"),
    pytest.param(Layout(pipeline=4, num_microbatches=4), marks=SLOW, id="PP4"),
    pytest.param(Layout(pipeline=2, virtual_pipeline=2, num_microbatches=4), marks=SLOW, id="PP2 with interleaved stages"),
    pytest.param(Layout(data=2, distributed_optimizer=True, num_microbatches=2), marks=SLOW, id="FB-03 DP2, distributed optimiser"),
    pytest.param(
        Layout(data=2, context=2, distributed_optimizer=True, num_microbatches=2), marks=SLOW, id="CP2xDP2, distributed optimiser"
    ),
    pytest.param(Layout(data=2, average_in_collective=True), marks=SLOW, id="FB-03 DP2, average_in_collective"),
    pytest.param(Layout(data=2, overlap_grad_reduce=True, num_microbatches=4), marks=SLOW, id="DP2, overlapped gradient reduction"),
    pytest.param(Layout(packed=True, num_microbatches=2), id="packed rows with a padding tail"),
    pytest.param(Layout(packed=True, context=2, **SP, num_microbatches=2), marks=SLOW, id="packed CP2xTP2+SP"),
    pytest.param(Layout(packed=True, pipeline=2, data=2, num_microbatches=2), marks=SLOW, id="packed PP2xDP2"),
]
# Context parallelism that changes inside the step.
CHANGING = [
    pytest.param(
        Layout(data=2, num_microbatches=2, context_sizes=(2, 1)), id="CP 2 and 1 in a step: the schedule divides by dp x cp"
    ),
    pytest.param(
        Layout(context=2, num_microbatches=2, context_sizes=(1, 2), packed=True),
        id="packed CP 1 and 2: positions of the static group",
    ),
    pytest.param(
        Layout(data=2, context=2, num_microbatches=3, context_sizes=(4, 2, 1), distributed_optimizer=True),
        marks=SLOW,
        id="CP 4, 2 and 1 in a step, distributed optimiser",
    ),
    pytest.param(
        Layout(context=2, **SP, num_microbatches=2, context_sizes=(2, 1), packed=True), marks=SLOW, id="packed CP 2 and 1, TP2+SP"
    ),
    pytest.param(Layout(pipeline=2, data=2, num_microbatches=4, context_sizes=(1, 2, 1, 2)), marks=SLOW, id="CP 1 and 2, PP2"),
]


# A layout's rows are one call.
pool = pool_of(4)


# The head's weight is the embedding's.
TIED = [Layout(tensor=2, num_microbatches=2), Layout(pipeline=2, tensor=2, num_microbatches=2)]


def model_of(layout: Layout) -> TinyGPT:
    """A layer for each stage; two for those of the plain pipeline. What a second layer of one stage does, the first did."""
    is_plain = layout == Layout(pipeline=2, num_microbatches=4)
    num_layers = 4 if is_plain else layout.pipeline * (layout.virtual_pipeline or 1)
    return TinyGPT(num_layers=num_layers, tie_embeddings=layout in TIED)


def truth_of_losses(samples: list[StepSample], tiny: TinyGPT, pairs: Iterable[tuple[str, str]]) -> dict[str, LossTruth]:
    """The step and truth of each loss without a term, under these aggregations, on a process whose layout is one rank. The model
    runs once, and back through it once a pair."""
    model = double_model(tiny, samples)
    rows = [(policy_loss, aggregation, term_of(policy_loss)) for policy_loss, aggregation in pairs]
    truths = truth_of_terms(samples, model_logits(model, samples, tiny), global_parameters(model), rows)
    return {policy_loss: truth for (policy_loss, _), truth in truths.items()}


def term_of(policy_loss: str) -> str:
    """The samples of grpo are rows of rollouts, whose siblings lie on other ranks and in other micro-batches."""
    return ROLLOUTS if policy_loss == "grpo" else ""


def truth_on_rank(rank: int, model: TinyGPT) -> dict[str, LossTruth]:
    """Of all pairs for the model of one stage, else of those that the layouts of the model meet."""
    met = [pair for row in ROWS if model_of(row.values[1]) == model for pair in pairs(row.values[0])]
    return truth_of_losses(ragged_samples(), model, itertools.product(CLIPS, AGGREGATIONS) if model == model_of(Layout()) else met)


@pytest.fixture(scope="module")
def truth_of(pool, shared):
    """model -> {policy loss: its step and, for each aggregation, loss and gradient of the float64 reference}."""

    def computed(model: TinyGPT) -> dict[str, LossTruth]:
        return shared(
            f"test_layouts {model.num_layers} {model.tie_embeddings}", lambda: pool.run(truth_on_rank, model, world_size=1)[0]
        )

    return functools.cache(computed)


@pytest.fixture(scope="module")
def truth(truth_of):
    return truth_of(model_of(Layout()))


def config_of(policy_loss: str, aggregation: str, **others) -> PolicyLossConfig:
    low, high = CLIPS.get(policy_loss) or (None, None)
    return PolicyLossConfig(
        policy_loss=policy_loss,
        loss_aggregation=aggregation,
        loss_aggregation_divisor=DIVISOR if aggregation == "constant" else None,
        clip_ratio_low=low,
        clip_ratio_high=high,
        **{"loss_parameters": PARAMETERS.get(policy_loss, {}), **others},
    )


# The kinds of parameters, by a part of the global name; the first that fits.
KINDS = (
    (".router.", "router"),
    (".shared_experts.", "shared expert"),
    (".experts.", "expert"),
    ("softmax_offset", "sink"),
    ("q_layernorm", "norm of queries and keys"),
    ("k_layernorm", "norm of queries and keys"),
    ("_up_proj.layer_norm", "norm of queries and keys"),
    ("kv_layernorm", "norm of queries and keys"),
    ("norm", "norm"),
    (".eh_proj.", "projection"),
    (".self_attention.", "attention"),
    (".mlp.", "dense MLP"),
    ("embedding", "embedding"),
    ("output_layer", "output layer"),
)


def parameter_kind(name: str) -> str:
    """By the global name: "attention", "attention bias", "MTP attention" of multi-token prediction."""
    kind = next(kind for part, kind in KINDS if part in name)
    is_bias = name.endswith(".bias") and "norm" not in kind
    return f"{'MTP ' if name.startswith('mtp.') else ''}{kind}{' bias' if is_bias else ''}"


def errors_by_kind(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    assert found.keys() == truth.keys()
    sums: dict[str, list[float]] = {}
    for name, value in truth.items():
        pair = sums.setdefault(parameter_kind(name), [0.0, 0.0])
        pair[0] += float((found[name] - value).square().sum())
        pair[1] += float(value.square().sum())
    return {kind: (difference / of_truth) ** 0.5 for kind, (difference, of_truth) in sums.items()}


def pairs(place: int) -> list[tuple[str, str]]:
    """Of the row with this number: GRPO and GSPO with another aggregation each, and one other loss, in turn. EVERY_COMBINATION=1:
    all. test_generated_steps.py has the products."""
    if os.environ.get("EVERY_COMBINATION") == "1":
        return list(itertools.product(CLIPS, AGGREGATIONS))
    names, chosen = list(AGGREGATIONS), [*CLIPPED_OBJECTIVES, OTHER_LOSSES[place % len(OTHER_LOSSES)]]
    return [(name, names[(place + turn) % len(names)]) for turn, name in enumerate(chosen)]


def assert_exact(pool, layout: Layout, model: TinyGPT, truths: dict[str, LossTruth], place: int) -> dict[str, float]:
    """The errors of each kind of parameter; one of three runs is through the fused head, in several chunks a micro-batch."""
    rows = pairs(place)
    heads = [{} if (place + turn) % 3 else FUSED for turn in range(len(rows))]
    runs = [(truths[row[0]].samples, config_of(*row, **head)) for row, head in zip(rows, heads, strict=True)]
    for row, head, result in zip(rows, heads, steps_on_layout(pool, layout, runs, model), strict=True):
        expected = truths[row[0]].by_aggregation[row[1]]
        errors = errors_by_kind(result.gradient, expected.gradient)
        assert max(errors.values()) < GRADIENT_TOLERANCE, (row, head, errors)
        # Of sum w m |l|: where l is a ratio times A, the step's ratios are above 0.7. Other values are larger.
        assert abs(result.loss - expected.loss) < LOSS_TOLERANCE * 0.7 * expected.loss_scale, (row, head)
        assert result.optimizer_norm == pytest.approx(expected.norm, rel=GRADIENT_TOLERANCE), (row, head)
    return errors


ROWS = [pytest.param(place, *row.values, marks=row.marks, id=row.id) for place, row in enumerate(LAYOUTS + CHANGING)]


@pytest.mark.parametrize(("place", "layout"), ROWS)
def test_the_step_gradient_is_the_one_process_float64_gradient(pool, truth_of, place, layout):
    """Catches any factor of cp, dp, M, T or N, any count taken after slicing, any collective that a layout leaves out. Of the
    fused head FB-80, FB-85, FB-87: a hidden gradient that is one shard's part or tp times the sum, rows in Megatron's order instead
    of the batch's, a weight gradient that reaches main_grad twice or not at all, and a tied embedding's share that is lost."""
    model = model_of(layout)
    assert_exact(pool, layout, model, truth_of(model), place)


FEW_SAMPLES = [
    pytest.param(Layout(data=2, packed=True), id="FB-29 DP2, packed: rank 1 has no sample"),
    pytest.param(Layout(data=2, num_microbatches=2), id="FB-29 DP2 M2: one micro-batch of four has a sample"),
    pytest.param(Layout(num_microbatches=2), id="one rank, an empty micro-batch"),
    pytest.param(Layout(data=2, num_microbatches=2, context_sizes=(1, 2)), id="CP 1 and 2: a micro-batch of both ranks is empty"),
    # Where each rank takes the length of its own longest row, gloo ends the process: one sends more than the other takes.
    pytest.param(Layout(data=2, num_microbatches=2, context_sizes=(1, 2), packed=True), id="CP 1 and 2, packed"),
]


@pytest.mark.parametrize("layout", FEW_SAMPLES)
def test_a_rank_without_any_sample_takes_part(pool, truth, layout):
    """One sample on two data-parallel ranks: catches a batch of no rows, which cannot be made, while others are in a collective."""
    step, config = truth["grpo"].samples[:1], config_of("grpo", "sample_mean")
    alone, result = (step_on_layout(pool, where, step, config, model_of(where)) for where in (Layout(), layout))
    # Zeros are added to the same numbers; packed rows are computed in other shapes.
    assert result.gradient_error(alone) < (GRADIENT_TOLERANCE if layout.packed else 1e-7)
    assert result.loss == pytest.approx(alone.loss, rel=1e-5)


def test_the_aggregations_train_different_gradients(truth):
    """Otherwise the table above could not tell them apart (FB-19: a chosen aggregation that is ignored)."""
    for policy_loss, of_loss in truth.items():
        results = {name: StepResult(t.loss, t.gradient, None, {}) for name, t in of_loss.by_aggregation.items()}
        pairs_apart = {*itertools.combinations(AGGREGATIONS, 2)}
        if term_of(policy_loss) != ROLLOUTS:
            pairs_apart -= {("sample_mean", "row_mean")}
        for first, second in pairs_apart:
            assert results[first].gradient_error(results[second]) > 0.01, (first, second)


METRIC_LAYOUTS = [
    pytest.param(Layout(data=2, num_microbatches=2), ["cispo"], id="DP2"),
    pytest.param(Layout(context=2, num_microbatches=2), ["grpo"], id="CP2"),
    pytest.param(Layout(**SP, num_microbatches=4), ["gspo"], id="TP2+SP"),
    pytest.param(Layout(pipeline=2, data=2, num_microbatches=2), ["gspo"], marks=SLOW, id="PP2xDP2"),
    pytest.param(
        Layout(data=2, num_microbatches=2, context_sizes=(2, 1)), ["gspo"], id="CP 2 and 1: staleness counted by cp ranks"
    ),
]


@pytest.mark.parametrize(("layout", "policy_losses"), METRIC_LAYOUTS)
def test_every_metric_is_that_of_one_rank(pool, truth_of, layout, policy_losses):
    """FB-45, FB-46, FB-48, FB-49, FB-51: sums, means, minima and maxima under micro-batching, dp, cp, tp and pp."""
    model, runs = model_of(layout), []
    for name in policy_losses:
        step = [known(index, sample) for index, sample in enumerate(truth_of(model)[name].samples)]
        runs.append((step, config_of(name, "prompt_mean", policy_metrics="with_entropy")))
    fused = [(step, replace(config, **FUSED)) for step, config in runs]
    on_one_rank, found = (steps_on_layout(pool, *given, model) for given in ((Layout(), runs), (layout, fused)))
    for policy_loss, alone, result in zip(policy_losses, on_one_rank, found, strict=True):
        assert result.gradient_error(alone) < GRADIENT_TOLERANCE, policy_loss
        whole, spread_out = alone.metrics, result.metrics
        assert whole.keys() == spread_out.keys() and len(whole) > 20
        for name, value in whole.items():
            assert spread_out[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (policy_loss, name)
        # Versions 0 to 9 and masked 5; a third of the 113 unmasked tokens got a placeholder.
        assert whole["policy/max_staleness"] == POLICY_VERSION and 10 < whole["policy/num_phantom_tokens"] < 60
        # What Megatron's train_step would log, from pairs of two elements and float32.
        # A minimum or a maximum is no quotient of sums.
        without = {f"policy/{row.name}" for row in METRICS if row.reduction != Reduction.SUM} | {"policy/effective_sample_size"}
        without |= {f"policy/{row.name}" for row in ROLLOUT_METRICS if row.is_reported}
        assert result.reported.keys() - {"policy/loss"} == whole.keys() - without
        for name in whole.keys() - without:
            assert result.reported[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), (policy_loss, name)


def known(index: int, sample: StepSample) -> StepSample:
    """The sample with a sampler's log-probabilities beside its own, a version, and a placeholder for every third old one."""
    old = sample.old_log_probs
    return replace(
        sample,
        rollout_log_probs=[value + 0.02 * (-1) ** t for t, value in enumerate(old)],
        policy_version=index % 10,
        old_log_probs=[0.0 if t % 3 == 2 else value for t, value in enumerate(old)],
    )


def test_the_picture_of_one_step_is_drawn_from_the_error_with_and_without_our_loss(monkeypatch):
    """Two layouts of docs/images/one_step.py, which draws all."""
    specification = spec_from_file_location("one_step", ROOT / "docs/images/one_step.py")
    one_step = module_from_spec(specification)
    monkeypatch.setattr(sys, "path", [*sys.path])
    specification.loader.exec_module(one_step)
    monkeypatch.setattr(one_step, "all_layouts", lambda: [Layout(num_microbatches=4), Layout(data=2, num_microbatches=2)])
    found = one_step.errors()
    assert max(found["megatron_rl"]) < GRADIENT_TOLERANCE
    assert min(found["a mean of means"]) > 0.1  # four micro-batches have 11 to 50 tokens
