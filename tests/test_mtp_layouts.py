"""Multi-token prediction trained beside the policy: the float64 gradient of one process on any layout, and what is refused."""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import error_of, pool_of
from test_expert_layouts import EXPERTS, LATENT, OF_THE_FIELD, error_of_whole
from test_layouts import GRADIENT_TOLERANCE, LOSS_TOLERANCE, SP, config_of, errors_by_kind

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.groups import SINGLE, ParallelGroups, resolve_groups
from megatron_rl.megatron.checks import contract_problems
from megatron_rl.megatron.forward_step import PolicyForwardStep
from megatron_rl.megatron.model import find_output_layer, transformer_config
from megatron_rl.megatron.samples import count_further_tokens
from megatron_rl.testing.invariance import Layout, TinyGPT, merged
from megatron_rl.testing.layout_step import LayoutModel, RankStep, StepSample, make_step_batches, row_length
from megatron_rl.testing.reference import (
    LossTruth,
    double_model,
    global_parameters,
    model_logits,
    mtp_loss_by_hand,
    ragged_samples,
)
from megatron_rl.testing.selftest import truth_of_terms

SLOW = pytest.mark.slow
megatron = pytest.mark.megatron
# Two layers, of a loss as large as the policy's.
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}


def model_of(num_layers: int = 2, *, tie_embeddings: bool = False, **options: object) -> TinyGPT:
    return TinyGPT(num_layers=num_layers, tie_embeddings=tie_embeddings, experts=tuple((MTP | options).items()))


DENSE, TIED = model_of(), model_of(tie_embeddings=True)
OF_FIELD = model_of(**EXPERTS, **OF_THE_FIELD)
OF_DEEPSEEK = model_of(**EXPERTS, **LATENT, qk_layernorm=True, moe_router_score_function="sigmoid")
RECOMPUTED = model_of(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
PER_TOKEN = {"calculate_per_token_loss": True}
EP2 = {"expert": 2, "expert_tensor": 1}
# Each row says what it would catch.
ROWS = [
    pytest.param(
        Layout(data=2, distributed_optimizer=True, num_microbatches=2), DENSE, marks=SLOW, id="FB-103 DP2: a mean of means"
    ),
    pytest.param(Layout(**PER_TOKEN, context=2, packed=True, num_microbatches=2), DENSE, id="CP2, packed: labels of other slices"),
    pytest.param(Layout(context=2), DENSE, marks=SLOW, id="CP2, padded"),
    pytest.param(Layout(tensor=2, packed=True), DENSE, marks=SLOW, id="TP2 without sequence parallelism"),
    pytest.param(Layout(**SP, **PER_TOKEN, num_microbatches=2), RECOMPUTED, marks=SLOW, id="TP2+SP, layers recomputed"),
    pytest.param(Layout(pipeline=2, virtual_pipeline=2, num_microbatches=2), model_of(4), marks=SLOW, id="VPP2xPP2"),
    pytest.param(
        Layout(**SP, pipeline=2, packed=True, num_microbatches=2), OF_FIELD, marks=SLOW, id="PP2xTP2+SP, the field's layers"
    ),
    pytest.param(Layout(**SP, **EP2, num_microbatches=2), OF_FIELD, id="TP2+SP, EP2: experts of these layers"),
    pytest.param(Layout(**SP, **EP2, context=2), OF_DEEPSEEK, marks=SLOW, id="CP2xTP2+SP, EP2, latent attention"),
]
NUM_SAMPLES = 8  # one of them has a prompt of one token
pool = pool_of(4)


def recomputes_on_rank(rank: int) -> bool:
    """Megatron-Core 0.18 gives the recomputation of these layers an argument that it does not take."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as Layer

    given, taken = (inspect.signature(method).parameters for method in (Layer._get_embeddings, Layer._checkpointed_forward))
    return "padding_mask" not in given or "padding_mask" in taken


def truth_on_rank(rank: int, model: TinyGPT) -> tuple[LossTruth, float]:
    samples = ragged_samples(num_samples=NUM_SAMPLES)
    double = double_model(model, samples)
    beside = mtp_loss_by_hand(double, samples, model)
    rows = [("gspo", "sample_mean", ""), ("gspo", "token_mean", "")]
    truths = truth_of_terms(samples, model_logits(double, samples, model), global_parameters(double), rows, beside)
    return truths["gspo", ""], float(beside.detach())


@pytest.fixture(scope="module")
def truth_of(pool):
    return functools.cache(lambda model: pool.run(truth_on_rank, model, world_size=1)[0])


def steps_on_rank(rank: int, layout: Layout, model: TinyGPT, samples, configs: list[PolicyLossConfig]) -> list[RankStep]:
    """One model takes the steps."""
    built = LayoutModel(layout, row_length(samples, layout), model)
    return [built.step(config, samples) for config in configs]


def steps_of(pool, layout: Layout, model: TinyGPT, samples, configs) -> list[list[RankStep]]:
    """[step][rank]"""
    sizes = {"world_size": layout.world_size, **layout.model_parallel}
    return [list(of_ranks) for of_ranks in zip(*pool.run(steps_on_rank, layout, model, samples, configs, **sizes), strict=True)]


@megatron
@pytest.mark.parametrize(("layout", "model"), ROWS)
def test_each_parameter_has_the_one_process_float64_gradient(pool, truth_of, layout, model):
    """Of GSPO and both layers of MTP. The fused head has the same, and makes no logits of MTP."""
    if model == RECOMPUTED and not pool.run(recomputes_on_rank, world_size=1)[0]:
        pytest.skip("this Megatron-Core cannot recompute these layers")
    truth, of_mtp = truth_of(DENSE if model == RECOMPUTED else model)  # torch.autograd.grad knows no checkpoints
    aggregation = "token_mean" if layout.calculate_per_token_loss else "sample_mean"
    configs = [config_of("gspo", aggregation, fused_lm_head_loss=is_fused) for is_fused in (False, True)]
    expected = truth.by_aggregation[aggregation]
    for answers in steps_of(pool, layout, model, truth.samples, configs):
        result = merged(answers)
        assert max(errors_by_kind(result.gradient, expected.gradient).values()) < GRADIENT_TOLERANCE
        assert abs(result.loss - expected.loss) < LOSS_TOLERANCE * 0.7 * expected.loss_scale  # the policy's alone
        assert result.optimizer_norm == pytest.approx(expected.norm, rel=GRADIENT_TOLERANCE)
        reported = [answer.reported["policy/mtp_loss"] for answer in answers if answer.reported]
        assert reported and all(value * 0.7 == pytest.approx(of_mtp, rel=1e-5) for value in reported)


def tied_on_rank(rank: int, layout: Layout) -> list:
    """Without its loss, with it, and with the fused head. The last stage has a weight of its own beside the embedding's: nothing
    may read it."""
    samples, found = ragged_samples(), []
    for model, heads in ((model_of(tie_embeddings=True, mtp_loss_scaling_factor=0.0), [False]), (TIED, [False, True])):
        built = LayoutModel(layout, row_length(samples, layout), model)
        head = find_output_layer(built.models[-1])
        if head is not None and head.weight is not None:
            head.weight.data.fill_(math.nan)
        found += [built.step(config_of("reinforce", "token_mean", fused_lm_head_loss=is_fused), samples) for is_fused in heads]
    return found


@megatron
@pytest.mark.parametrize(
    "layout",
    [Layout(pipeline=2, num_microbatches=2), pytest.param(Layout(**SP, num_microbatches=2), marks=SLOW)],
    ids=str,
)
def test_a_tied_embedding_has_the_gradient_of_one_rank(pool, layout):
    """It is the head, the embedding of the first stage, and that of these layers: a fused head must not hide the last one."""
    answers = [
        [
            merged([*of_ranks])
            for of_ranks in zip(*pool.run(tied_on_rank, where, world_size=where.world_size, **where.model_parallel), strict=True)
        ]
        for where in (Layout(), layout)
    ]
    for one, other in zip(*answers, strict=True):
        assert error_of_whole(other.gradient, one.gradient) < GRADIENT_TOLERANCE
        assert other.optimizer_norm == pytest.approx(one.optimizer_norm, rel=GRADIENT_TOLERANCE)


# Losses of routers in these layers


@megatron
def test_exact_losses_of_routers_in_these_layers_leave_padding_out(pool):
    """Also where backward recomputes the layer: a z-loss on one rank with padded rows, and on packed rows without."""
    layers = {**EXPERTS, "moe_layer_freq": (1, 1), "moe_z_loss_coeff": 1.0}
    still = [replace(sample, advantage=0.0) for sample in ragged_samples()]
    config = config_of("reinforce", "token_mean", router_aux_loss="exact")
    (one,) = steps_of(pool, Layout(), model_of(**layers), still, [config])
    recomputed = model_of(**layers, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    packed = Layout(packed=True, num_microbatches=2)  # Megatron does not recompute these layers for packed rows
    others = [(packed, model_of(**layers))]
    if pool.run(recomputes_on_rank, world_size=1)[0]:
        others.append((Layout(num_microbatches=2), recomputed))
    for layout, model in others:
        (other,) = steps_of(pool, layout, model, still, [config])
        assert error_of_whole(merged(other).gradient, merged(one).gradient) < GRADIENT_TOLERANCE


# What is counted, and what a batch holds

ALONE = ParallelGroups(tp=SINGLE, cp=SINGLE, dp=SINGLE, dp_cp=SINGLE, pp=SINGLE)
MODEL = SimpleNamespace(mtp_num_layers=2, mtp_loss_scaling_factor=0.1)


def sample_of(prompt: int, mask: list[int]) -> StepSample:
    return StepSample(tokens=list(range(10, 10 + prompt + len(mask))), loss_mask=mask, prompt_id="0", advantage=1.0)


def test_the_tokens_that_each_layer_predicts_by_hand():
    """Layer 1 predicts no token with one token before it, layer 2 none with two either."""
    samples = [sample_of(1, [1, 1, 0, 1]), sample_of(2, [1, 1]), sample_of(5, [1])]
    # Layer 1: places 2 and 4 of 1, 2, 4 in the first; both in the second; the one of the third. Layer 2: 4; 3; 5.
    assert count_further_tokens(MODEL, samples, ALONE) == (2 + 2 + 1, 1 + 1 + 1)
    for config in (
        SimpleNamespace(mtp_num_layers=None, mtp_loss_scaling_factor=0.1),
        SimpleNamespace(mtp_num_layers=2, mtp_loss_scaling_factor=0.0),
    ):
        assert count_further_tokens(config, samples, ALONE) is None


# Switched off, and other forwards


def off_on_rank(rank: int) -> list:
    """The gradient without MTP, and with a factor of 0, in eval mode and without counts; then errors."""
    step, config = ragged_samples(), config_of("gspo", "token_mean")
    plain, switched_off = (
        LayoutModel(Layout(), row_length(step, Layout()), model)
        for model in (TinyGPT(num_layers=2), model_of(mtp_loss_scaling_factor=0.0))
    )
    of_plain, of_off = (model.step(config, step).gradients[0] for model in (plain, switched_off))
    is_equal = [torch.equal(shard.gradient, of_off[name].gradient) for name, shard in of_plain.items()]
    has_none = [not shard.gradient.any() for name, shard in of_off.items() if name.startswith("mtp")]
    trained = LayoutModel(Layout(), row_length(step, Layout()), DENSE)
    (batch,) = make_step_batches(config, Layout(), step, resolve_groups())
    forward_step = PolicyForwardStep(config, vocab_size=61)
    missing = error_of(lambda: forward_step(iter([batch]), trained.models[0]))
    trained.models[0].eval()
    logits = [forward_step(iter([batch]), model.models[0])[0] for model in (trained, plain)]
    bare = trained.models[0].module
    return [is_equal, has_none, missing, torch.equal(*logits), (bare.config.mtp_num_layers, bare.mtp_process)]


@megatron
def test_without_its_loss_nothing_of_it_runs(pool):
    is_equal, has_none, missing, has_equal_logits, restored = pool.run(off_on_rank, world_size=1)[0]
    assert all(is_equal) and len(is_equal) > 10 and all(has_none) and len(has_none) > 20
    assert "mtp_num_layers=2 needs the tokens of the whole step that its layers predict" in missing
    assert has_equal_logits and restored == (2, True)


def others_on_rank(rank: int) -> tuple[float, float, str]:
    """Of a step in which the policy's loss has no gradient: by how much a divisor of its gradient moves this one, and the report;
    then the error of a layer whose scores are not finite."""
    still = [replace(sample, advantage=0.0) for sample in ragged_samples()]
    model = LayoutModel(Layout(), row_length(still, Layout()), DENSE)
    steps = [model.step(config_of("reinforce", "token_mean", gradient_divisor=name), still) for name in ("none", "num_samples")]
    first, second = (torch.cat([shard.gradient.flatten() for shard in step.gradients[0].values()]) for step in steps)
    with torch.no_grad():
        model.models[0].module.mtp.layers[1].final_layernorm.weight.fill_(math.nan)
    error = error_of(lambda: model.step(config_of("reinforce", "token_mean"), ragged_samples()))
    return float((second - first).norm() / first.norm()), steps[0].reported["policy/loss"], error


@megatron
def test_the_divisor_of_the_policys_gradient_is_not_its_and_scores_that_are_not_finite_end_the_step(pool):
    difference, policy_loss, error = pool.run(others_on_rank, world_size=1)[0]
    assert difference < 1e-6 and policy_loss == 0.0 and "DataError" in error


# What is refused


def refusals_on_rank(rank: int) -> list[str]:
    sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "mtp_num_layers": 1}
    plain = config_of("grpo", "token_mean")
    config = transformer_config(**sizes)
    answers = ["".join(contract_problems(plain, config))]
    for name, value in (("use_mup", True), ("mtp_grad_scale_func", lambda: 2.0)):
        vars(config)[name] = value
        answers.append("".join(contract_problems(plain, config)))
        vars(config)[name] = None
    config.mtp_loss_scaling_factor, vars(config)["use_mup"] = 0.0, True
    return [*answers, "".join(contract_problems(plain, config))]


@megatron
def test_what_would_not_be_exact_is_refused_by_name(pool):
    fine, scaled, by_hand, switched_off = pool.run(refusals_on_rank, world_size=1)[0]
    assert fine == switched_off == ""
    assert "mtp_num_layers=1 with use_mup=True" in scaled and "with mtp_grad_scale_func in the model's config: nothing" in by_hand
