"""The models of the field in two layers: each kind of parameter has the float64 gradient of one process on every layout.

Then multi-token prediction trained beside the policy: the same, and what is refused.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import error_of, pool_of
from test_expert_layouts import EXPERTS, LAYOUTS, OF_THE_FIELD, error_of_whole
from test_layouts import GRADIENT_TOLERANCE, LOSS_TOLERANCE, SP, config_of, errors_by_kind, parameter_kind

from megatron_rl.commands import selftest as command
from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.groups import SINGLE, ParallelGroups, resolve_groups
from megatron_rl.megatron.checks import contract_problems
from megatron_rl.megatron.forward_step import PolicyForwardStep
from megatron_rl.megatron.model import find_gpt_model, find_output_layer, transformer_config
from megatron_rl.megatron.samples import count_further_tokens
from megatron_rl.testing.comparison import Truth
from megatron_rl.testing.invariance import Layout, StepResult, TinyGPT, merged, step_on_layout
from megatron_rl.testing.layout_step import LayoutModel, RankStep, StepSample, make_step_batches, row_length
from megatron_rl.testing.model_shapes import SHAPES, tiny_like
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.testing.reference import LossTruth, double_model, global_parameters, model_logits, mtp_loss_by_hand, ragged_samples
from megatron_rl.testing.selftest import RowResult, WholeSteps, chosen, run_selftest, table_of_shape, truth_of_terms

pytestmark = pytest.mark.megatron
SLOW = pytest.mark.slow

LOSS, AGGREGATION = "grpo", "token_mean"
OF_ALL = {"embedding", "output layer", "norm", "attention", "router", "expert"}
OF_LAYER = ("norm", "norm of queries and keys", "attention", "router", "expert", "shared expert", "projection")
OF_MTP = {f"MTP {kind}" for kind in OF_LAYER}
# What a shape would silently lack if a kind were missing here.
KINDS = {
    "qwen3-moe": OF_ALL | {"norm of queries and keys"},
    "deepseek-v3": OF_ALL | OF_MTP | {"norm of queries and keys", "dense MLP", "shared expert"},
    "gpt-oss": OF_ALL | {"attention bias", "router bias", "expert bias", "sink"},
}
FAST = Layout(**SP, expert=2, expert_tensor=1, num_microbatches=2)
pool = pool_of(4)


def model_of(name: str, layout: Layout) -> TinyGPT:
    """One model for all layouts of as many pipeline stages: its sizes fit the widest."""
    return tiny_like(SHAPES[name], replace(layout, tensor=2, expert=4, expert_tensor=1))


def truth_on_rank(rank: int, model: TinyGPT, pairs: list[tuple[str, str]]) -> tuple[LossTruth, float]:
    """Of one loss under some aggregations, and the loss of multi-token prediction. One sample has a prompt of one token."""
    samples = ragged_samples(num_samples=8)
    double = double_model(model, samples)
    beside = mtp_loss_by_hand(double, samples, model)
    rows = [(*pair, "") for pair in pairs]
    [truth] = truth_of_terms(samples, model_logits(double, samples, model), global_parameters(double), rows, beside).values()
    return truth, 0.0 if beside is None else float(beside.detach())


@pytest.fixture(scope="module")
def truth_of(pool):
    return functools.cache(lambda model, *pairs: pool.run(truth_on_rank, model, pairs, world_size=1)[0])


def assert_exact(result: StepResult, expected: Truth) -> set[str]:
    """The kinds of its parameters. The loss is the policy's alone."""
    errors = errors_by_kind(result.gradient, expected.gradient)
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors
    assert abs(result.loss - expected.loss) < LOSS_TOLERANCE * 0.7 * expected.loss_scale
    assert result.optimizer_norm == pytest.approx(expected.norm, rel=GRADIENT_TOLERANCE)
    return {*errors}


def rows_of_shapes() -> list:
    """Each shape on the layout of the fast run, and one in turn of those that another may have. With EVERY_COMBINATION=1 all."""
    rows = []
    for turn, row in enumerate(LAYOUTS):
        (layout,) = row.values
        names = [
            name for name, shape in SHAPES.items() if "add_bias_linear" not in shape.options or layout.expert_tensor in (None, 1)
        ]
        if layout != FAST and os.environ.get("EVERY_COMBINATION") != "1":
            names = [names[turn % len(names)]]
        marks = () if layout == FAST else pytest.mark.slow
        rows += [pytest.param(name, layout, marks=marks, id=f"{name}, {row.id}") for name in names]
    return rows


@pytest.mark.parametrize(("name", "layout"), rows_of_shapes())
def test_a_shape_has_the_one_process_float64_gradient_on_every_layout(pool, truth_of, name, layout):
    model = model_of(name, layout)
    truth, _ = truth_of(model, (LOSS, AGGREGATION))
    result = step_on_layout(pool, layout, truth.samples, config_of(LOSS, AGGREGATION), model)
    assert assert_exact(result, truth.by_aggregation[AGGREGATION]) == KINDS[name]


def saved_sinks_on_rank(rank: int) -> list[tuple]:
    """(whole shape, this rank's place in it, copies) of the sinks of each layer, as a distributed checkpoint has them."""
    (chunk,) = LayoutModel(FAST, 16, model_of("gpt-oss", FAST)).models
    saved = find_gpt_model(chunk).sharded_state_dict()
    sinks = [tensor for tensor in saved.values() if getattr(tensor, "key", "").endswith("core_attention.softmax_offset")]
    return [(tensor.global_shape, tensor.global_offset, tensor.replica_id[1]) for tensor in sinks]


def test_a_distributed_checkpoint_has_the_sinks_of_all_tensor_parallel_ranks(pool):
    """Megatron takes the state of a layer that says nothing for copies, and would save the heads of one rank."""
    saved = pool.run(saved_sinks_on_rank, world_size=2, **FAST.model_parallel)
    heads = model_of("gpt-oss", FAST).num_attention_heads
    for rank, of_layers in enumerate(saved):
        assert len(of_layers) == 2
        for shape, offset, copy in of_layers:
            assert (shape[-1], offset[-1], copy) == (heads, rank * heads // 2, 0)


def refused_on_rank(rank: int, layout: Layout) -> str:
    return error_of(lambda: LayoutModel(layout, 16, model_of("gpt-oss", layout)))


def test_biases_of_experts_that_ranks_share_are_refused(pool):
    layout = Layout(**SP, expert_tensor=2)
    (message, _) = pool.run(refused_on_rank, layout, world_size=2, **layout.model_parallel)
    assert "add_bias_linear=True with experts and expert_tensor_parallel_size=2" in message


# The selftest


def selftest_on_rank(rank: int) -> tuple[list[RowResult], str]:
    """Rows and what is printed around them: gpt-oss on two context-parallel ranks, with half of the gradient of sinks."""
    from megatron.core import parallel_state

    right = LayoutModel.step

    def step(model, *arguments):
        answer = right(model, *arguments)
        for name, shard in ((name, shard) for chunk in answer.gradients for name, shard in chunk.items()):
            if parameter_kind(name) == "sink":
                shard.gradient.mul_(0.5)
        return answer

    cases = chosen(table_of_shape(), "grpo", ["token_mean"])
    parallel_state.destroy_model_parallel()
    bench = WholeSteps(Layout(context=2, packed=True, expert_tensor=1), 2, cases, SHAPES["gpt-oss"])
    with mock.patch.object(LayoutModel, "step", step):
        results = list(run_selftest(bench))
    return results, command.header(bench) + command.closing(bench, results, 1.0)


def test_the_selftest_runs_a_model_of_the_field_and_names_the_parameters_that_are_off():
    (_, *rows), text = run_ranks(selftest_on_rank, 2)[0]
    contracts = [
        f"{head}, torch{contract}" for contract in ("", ", own cp groups", ", per-token") for head in ("logits", "fused head")
    ]
    assert [row.name for row in rows] == [f"grpo token_mean, {contract}" for contract in contracts]
    assert "\n2 layers like openai/gpt-oss-20b\n" in text
    sinks = ", ".join(f"decoder.layers.{number}.self_attention.core_attention.softmax_offset" for number in range(2))
    for row in rows:
        assert not row.passed and row.cause.startswith(f"{sinks}: gradient is 0.5 of expected = 1/cp: ")


# Multi-token prediction

# Two layers, of a loss as large as the policy's.
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}


def with_mtp(num_layers: int = 2, *, tie_embeddings: bool = False, **options: object) -> TinyGPT:
    return TinyGPT(num_layers=num_layers, tie_embeddings=tie_embeddings, experts=tuple((MTP | options).items()))


DENSE, TIED = with_mtp(), with_mtp(tie_embeddings=True)
OF_FIELD = with_mtp(**EXPERTS, **OF_THE_FIELD)
RECOMPUTED = with_mtp(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
PER_TOKEN = {"calculate_per_token_loss": True}
# Each row says what it would catch. DeepSeek's shape has such a layer beside latent attention and experts.
ROWS = [
    pytest.param(
        Layout(data=2, distributed_optimizer=True, num_microbatches=2), DENSE, marks=SLOW, id="FB-103 DP2: a mean of means"
    ),
    pytest.param(Layout(**PER_TOKEN, context=2, packed=True, num_microbatches=2), DENSE, id="CP2, packed: labels of other slices"),
    pytest.param(Layout(context=2), DENSE, marks=SLOW, id="CP2, padded"),
    pytest.param(Layout(tensor=2, packed=True), DENSE, marks=SLOW, id="TP2 without sequence parallelism"),
    pytest.param(Layout(**SP, **PER_TOKEN, num_microbatches=2), RECOMPUTED, marks=SLOW, id="TP2+SP, layers recomputed"),
    pytest.param(Layout(pipeline=2, virtual_pipeline=2, num_microbatches=2), with_mtp(4), marks=SLOW, id="VPP2xPP2"),
    pytest.param(
        Layout(**SP, pipeline=2, packed=True, num_microbatches=2), OF_FIELD, marks=SLOW, id="PP2xTP2+SP, the field's layers"
    ),
]
PAIRS = ("gspo", "sample_mean"), ("gspo", "token_mean")


def recomputes_on_rank(rank: int) -> bool:
    """Megatron-Core 0.18 gives the recomputation of these layers an argument that it does not take."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as Layer

    given, taken = (inspect.signature(method).parameters for method in (Layer._get_embeddings, Layer._checkpointed_forward))
    return "padding_mask" not in given or "padding_mask" in taken


def steps_on_rank(rank: int, layout: Layout, model: TinyGPT, samples, configs: list[PolicyLossConfig]) -> list[RankStep]:
    """One model takes the steps."""
    built = LayoutModel(layout, row_length(samples, layout), model)
    return [built.step(config, samples) for config in configs]


def steps_of(pool, layout: Layout, model: TinyGPT, samples, configs) -> list[list[RankStep]]:
    """[step][rank]"""
    sizes = {"world_size": layout.world_size, **layout.model_parallel}
    return [list(of_ranks) for of_ranks in zip(*pool.run(steps_on_rank, layout, model, samples, configs, **sizes), strict=True)]


@pytest.mark.parametrize(("layout", "model"), ROWS)
def test_each_parameter_has_the_one_process_float64_gradient(pool, truth_of, layout, model):
    """Of GSPO and both layers of MTP. The fused head has the same, and makes no logits of MTP."""
    if model == RECOMPUTED and not pool.run(recomputes_on_rank, world_size=1)[0]:
        pytest.skip("this Megatron-Core cannot recompute these layers")
    truth, of_mtp = truth_of(DENSE if model == RECOMPUTED else model, *PAIRS)  # torch.autograd.grad knows no checkpoints
    aggregation = "token_mean" if layout.calculate_per_token_loss else "sample_mean"
    configs = [config_of("gspo", aggregation, fused_lm_head_loss=is_fused) for is_fused in (False, True)]
    for answers in steps_of(pool, layout, model, truth.samples, configs):
        assert_exact(merged(answers), truth.by_aggregation[aggregation])
        reported = [answer.reported["policy/mtp_loss"] for answer in answers if answer.reported]
        assert reported and all(value * 0.7 == pytest.approx(of_mtp, rel=1e-5) for value in reported)


def tied_on_rank(rank: int, layout: Layout) -> list:
    """Without its loss, with it, and with the fused head. The last stage has a weight of its own beside the embedding's: nothing
    may read it."""
    samples, found = ragged_samples(), []
    for model, heads in ((with_mtp(tie_embeddings=True, mtp_loss_scaling_factor=0.0), [False]), (TIED, [False, True])):
        built = LayoutModel(layout, row_length(samples, layout), model)
        head = find_output_layer(built.models[-1])
        if head is not None and head.weight is not None:
            head.weight.data.fill_(math.nan)
        found += [built.step(config_of("reinforce", "token_mean", fused_lm_head_loss=is_fused), samples) for is_fused in heads]
    return found


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


def test_exact_losses_of_routers_in_these_layers_leave_padding_out(pool):
    """Also where backward recomputes the layer: a z-loss on one rank with padded rows, and on packed rows without."""
    layers = {**EXPERTS, "moe_layer_freq": (1, 1), "moe_z_loss_coeff": 1.0}
    still = [replace(sample, advantage=0.0) for sample in ragged_samples()]
    config = config_of("reinforce", "token_mean", router_aux_loss="exact")
    (one,) = steps_of(pool, Layout(), with_mtp(**layers), still, [config])
    recomputed = with_mtp(**layers, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    packed = Layout(packed=True, num_microbatches=2)  # Megatron does not recompute these layers for packed rows
    others = [(packed, with_mtp(**layers))]
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


def off_on_rank(rank: int) -> tuple[bool, str, bool]:
    """Whether a factor of 0 has the gradient without MTP, and none of MTP's own; the error of a step without counts; whether the
    logits in eval mode are those without MTP."""
    step, config = ragged_samples(), config_of("gspo", "token_mean")
    plain, switched_off, trained = (
        LayoutModel(Layout(), row_length(step, Layout()), model)
        for model in (TinyGPT(num_layers=2), with_mtp(mtp_loss_scaling_factor=0.0), DENSE)
    )
    of_plain, of_off = (model.step(config, step).gradients[0] for model in (plain, switched_off))
    is_equal = all(
        torch.equal(shard.gradient, of_plain[name].gradient) if name in of_plain else not shard.gradient.any()
        for name, shard in of_off.items()
    )
    (batch,) = make_step_batches(config, Layout(), step, resolve_groups())
    forward_step = PolicyForwardStep(config, vocab_size=61)
    missing = error_of(lambda: forward_step(iter([batch]), trained.models[0]))
    trained.models[0].eval()
    logits = [forward_step(iter([batch]), model.models[0])[0] for model in (trained, plain)]
    return is_equal, missing, torch.equal(*logits)


def test_without_its_loss_nothing_of_it_runs(pool):
    is_equal, missing, has_equal_logits = pool.run(off_on_rank, world_size=1)[0]
    assert is_equal and has_equal_logits
    assert "mtp_num_layers=2 needs the tokens of the whole step that its layers predict" in missing


def divided_on_rank(rank: int) -> float:
    """By how much a divisor of the policy's gradient moves that of a step in which the policy's loss has none."""
    still = [replace(sample, advantage=0.0) for sample in ragged_samples()]
    model = LayoutModel(Layout(), row_length(still, Layout()), DENSE)
    steps = [model.step(config_of("reinforce", "token_mean", gradient_divisor=name), still) for name in ("none", "num_samples")]
    first, second = (torch.cat([shard.gradient.flatten() for shard in step.gradients[0].values()]) for step in steps)
    return float((second - first).norm() / first.norm())


def test_the_divisor_of_the_policys_gradient_is_not_its(pool):
    assert pool.run(divided_on_rank, world_size=1)[0] < 1e-6


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


def test_what_would_not_be_exact_is_refused_by_name(pool):
    fine, scaled, by_hand, switched_off = pool.run(refusals_on_rank, world_size=1)[0]
    assert fine == switched_off == ""
    assert "mtp_num_layers=1 with use_mup=True" in scaled and "with mtp_grad_scale_func in the model's config: nothing" in by_hand
