"""The models of the field in two layers: each kind of parameter has the float64 gradient of one process on every layout."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers import error_of, pool_of
from test_expert_layouts import LAYOUTS
from test_layouts import GRADIENT_TOLERANCE, LOSS_TOLERANCE, SP, config_of, errors_by_kind, parameter_kind

from megatron_rl.commands import selftest as command
from megatron_rl.megatron.model import find_gpt_model
from megatron_rl.megatron.rotary import Rotary
from megatron_rl.testing import selftest
from megatron_rl.testing.invariance import Layout, TinyGPT, step_on_layout
from megatron_rl.testing.layout_step import LayoutModel
from megatron_rl.testing.model_shapes import SHAPES, tiny_like
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.testing.reference import LossTruth, double_model, global_parameters, model_logits, mtp_loss_by_hand, ragged_samples
from megatron_rl.testing.selftest import RowResult, WholeSteps, chosen, run_selftest, table_of_shape, truth_of_terms, truths_of

pytestmark = pytest.mark.megatron

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


def truth_on_rank(rank: int, model: TinyGPT) -> LossTruth:
    samples = ragged_samples(num_samples=8)
    double = double_model(model, samples)
    rows, beside = [(LOSS, AGGREGATION, "")], mtp_loss_by_hand(double, samples, model)
    truths = truth_of_terms(samples, model_logits(double, samples, model), global_parameters(double), rows, beside)
    return truths[LOSS, ""]


@pytest.fixture(scope="module")
def truth_of(pool):
    return functools.cache(lambda model: pool.run(truth_on_rank, model, world_size=1)[0])


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
    truth = truth_of(model)
    result = step_on_layout(pool, layout, truth.samples, config_of(LOSS, AGGREGATION), model)
    expected = truth.by_aggregation[AGGREGATION]
    errors = errors_by_kind(result.gradient, expected.gradient)
    assert errors.keys() == KINDS[name] and max(errors.values()) < GRADIENT_TOLERANCE, errors
    assert abs(result.loss - expected.loss) < LOSS_TOLERANCE * 0.7 * expected.loss_scale
    assert result.optimizer_norm == pytest.approx(expected.norm, rel=GRADIENT_TOLERANCE)


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


# What makes a shape special; without it a layer has Megatron-Core's default. An expert bias goes with the scores that take one.
SPECIAL = (
    "qk_layernorm moe_router_topk_scaling_factor moe_router_score_function softmax_type window_size "
    "window_attn_skip_freq activation_func activation_func_clamp_value glu_linear_offset"
).split()


def changes_on_rank(rank: int, name: str) -> dict[str, float]:
    """How far each special option moves the logits, relative to them; and nothing moves them by 0."""
    samples, model = ragged_samples(num_samples=4), model_of(name, Layout())

    def logits(tiny: TinyGPT) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(model_logits(double_model(tiny, samples), samples, tiny))

    def without(option: str) -> TinyGPT:
        left_out = {option, "moe_router_enable_expert_bias"} if option == "moe_router_score_function" else {option}
        return replace(model, experts=tuple(pair for pair in model.experts if pair[0] not in left_out))

    others = {option: without(option) for option in SPECIAL if option in model.expert_options}
    if model.rotary != Rotary():
        others["rotary"] = replace(model, rotary=Rotary())
    if SHAPES[name].expert_groups > 1:
        others["groups"] = replace(model, experts=(*model.experts, ("moe_router_group_topk", SHAPES[name].expert_groups)))
    if "rope_type" in model.expert_options:
        others["rope_type"] = replace(model, experts=(*model.experts, ("rope_type", "rope")))
    whole = logits(model)
    assert torch.equal(whole, logits(model))
    return {option: float((logits(other) - whole).norm() / whole.norm()) for option, other in others.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_each_special_option_of_a_shape_acts_in_its_step(pool, name):
    """A clamp that no activation meets, a bias that changes no choice or a window longer than each sample would prove nothing."""
    changes = pool.run(changes_on_rank, name, world_size=1)[0]
    assert changes and min(changes.values()) > 1e-5, changes


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 2), (3, 6), (4, 1), (8, 16)])
def test_the_sizes_of_a_shape_fit_the_layout(name, tensor, expert):
    """Heads, keys, widths and experts are shared evenly, with a choice of experts within each group."""
    shape = SHAPES[name]
    tiny = tiny_like(shape, Layout(tensor=tensor, pipeline=2, expert=expert, expert_tensor=1))
    sizes, heads = tiny.expert_options, tiny.num_attention_heads
    assert heads % sizes.get("num_query_groups", heads) == 0 and sizes.get("num_query_groups", heads) % tensor == 0
    assert sizes["ffn_hidden_size"] % tensor == 0 and sizes["num_moe_experts"] % expert == 0 == sizes["num_moe_experts"] % 4
    chosen = sizes["moe_router_topk"] // sizes.get("moe_router_group_topk", 1)
    assert chosen < sizes["num_moe_experts"] // shape.expert_groups
    assert len(sizes["moe_layer_freq"]) == 4 and sizes["moe_layer_freq"][0] == (not shape.is_mixed)


# The selftest


def selftests_on_rank(rank: int) -> list[tuple[list[RowResult], str]]:
    """Rows and what is printed around them: gpt-oss on two context-parallel ranks, right and with a wrong gradient of sinks."""
    from megatron.core import parallel_state

    right, found, truths = LayoutModel.step, [], []

    def truths_once(*arguments):
        truths.append(truths[0] if truths else truths_of(*arguments))
        return truths[-1]

    for kind in (None, "sink"):

        def step(model, *arguments, kind=kind):
            answer = right(model, *arguments)
            for name, shard in ((name, shard) for chunk in answer.gradients for name, shard in chunk.items()):
                if kind == parameter_kind(name):
                    shard.gradient.mul_(0.5)
            return answer

        with mock.patch.object(LayoutModel, "step", step), mock.patch.object(selftest, "truths_of", truths_once):
            cases = chosen(table_of_shape(), "grpo", ["token_mean"])
            parallel_state.destroy_model_parallel()
            bench = WholeSteps(Layout(context=2, packed=True, expert_tensor=1), 2, cases, SHAPES["gpt-oss"])
            results = list(run_selftest(bench))
            found.append((results, command.header(bench) + command.closing(bench, results, 1.0)))
    return found


def test_the_selftest_runs_a_model_of_the_field_and_names_the_parameters_that_are_off():
    (rows, text), (of_sinks, _) = run_ranks(selftests_on_rank, 2)[0]
    _, *rows = rows
    contracts = [
        f"{head}, torch{contract}" for contract in ("", ", own cp groups", ", per-token") for head in ("logits", "fused head")
    ]
    assert [row.name for row in rows] == [f"grpo token_mean, {contract}" for contract in contracts]
    assert all(row.passed and 0 < row.gradient_error < 2e-6 for row in rows), rows
    assert "\n2 layers like openai/gpt-oss-20b\n" in text
    sinks = ", ".join(f"decoder.layers.{number}.self_attention.core_attention.softmax_offset" for number in range(2))
    for row in of_sinks[1:]:
        assert not row.passed and row.cause.startswith(f"{sinks}: gradient is 0.5 of expected = 1/cp: ")
