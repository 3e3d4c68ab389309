"""The promise with a mixture of experts: one step, any expert layout, one gradient of routers, experts and all the rest.

Then the auxiliary losses of routers, what is said of them, and padding, which must not reach a router.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import error_of, pool_of
from test_layouts import FUSED, GRADIENT_TOLERANCE, SP, assert_exact, config_of, errors_by_kind, pairs, truth_of_losses

from megatron_rl.config import PolicyLossConfig
from megatron_rl.megatron import router_losses
from megatron_rl.megatron.checks import exact_problems
from megatron_rl.megatron.installed import expert_replicas_drift
from megatron_rl.megatron.routing import RouteLog, routers_of
from megatron_rl.testing.invariance import Layout, StepResult, StepSample, TinyGPT, merged, step_on_layout
from megatron_rl.testing.layout_step import LayoutModel, RankStep, row_length
from megatron_rl.testing.reference import LossTruth, double_model, model_logits, ragged_samples
from megatron_rl.testing.selftest import AGGREGATIONS

pytestmark = pytest.mark.megatron

SLOW = pytest.mark.slow
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "moe_layer_freq": (0, 1),  # a dense layer, then one of experts
    "moe_aux_loss_coeff": 0.0,
}
# What the large mixtures of experts have in common.
OF_THE_FIELD = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "num_query_groups": 2,
}


def model_of(layout: Layout, **experts: object) -> TinyGPT:
    """On each pipeline stage a layer with experts."""
    frequency = (0, 1) if layout.pipeline == 1 else (1, 1)
    return TinyGPT(num_layers=2, experts=tuple((EXPERTS | {"moe_layer_freq": frequency} | experts).items()))


def truth_on_rank(rank: int, model: TinyGPT, met: tuple[tuple[str, str], ...]) -> dict[str, LossTruth]:
    return truth_of_losses(ragged_samples(), model, met)


pool = pool_of(4)


@pytest.fixture(scope="module")
def truth_of(pool, shared):
    """model -> truth_on_rank of what its layouts meet, and of grpo: back through the model once a pair."""

    def computed(model: TinyGPT) -> dict[str, LossTruth]:
        rows = [row.values for row in ROWS]
        met = [pair for place, layout in rows if model_of(layout, **OF_THE_FIELD) == model for pair in pairs(place)]
        asked = tuple(dict.fromkeys([*met, *(("grpo", aggregation) for aggregation in AGGREGATIONS)]))
        number = zlib.crc32(re.sub(" at 0x[0-9a-f]+", "", repr(model)).encode())  # without addresses, which are a process's own
        return shared(f"test_expert_layouts {number}", lambda: pool.run(truth_on_rank, model, asked, world_size=1)[0])

    return functools.cache(computed)


def error_of_whole(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    step, expected = (StepResult(0.0, gradient, None, {}) for gradient in (found, truth))
    return step.gradient_error(expected)


Run = tuple[Layout, TinyGPT, Sequence[StepSample], PolicyLossConfig]


def run_on_rank(rank: int, runs: list[Run]) -> list[RankStep]:
    return [LayoutModel(layout, row_length(step, layout), model).step(config, step) for layout, model, step, config in runs]


def results_of(pool, runs: list[Run]) -> list[StepResult]:
    """Of layouts of one set of groups: the ranks and their groups are made once, which costs more than the steps."""
    first = runs[0][0]
    answers = pool.run(run_on_rank, runs, world_size=first.world_size, **first.model_parallel)
    return [merged(list(of_ranks)) for of_ranks in zip(*answers, strict=True)]


# Each row says what it would catch.
LAYOUTS = [
    pytest.param(Layout(data=2, expert=2, num_microbatches=2), id="FB-106, FB-107 DP2xEP2: experts averaged over too many ranks"),
    pytest.param(Layout(data=4, expert=2, num_microbatches=2), marks=SLOW, id="DP4xEP2: experts replicated and spread"),
    pytest.param(Layout(context=2, expert=2, expert_tensor=1), marks=SLOW, id="CP2xEP2: ep over context-parallel ranks"),
    pytest.param(Layout(**SP, expert=2, expert_tensor=1, num_microbatches=2), id="TP2+SP, EP2, ETP1"),
    pytest.param(Layout(**SP, expert_tensor=2, num_microbatches=2), marks=SLOW, id="TP2+SP, ETP2: experts sharded"),
    pytest.param(Layout(pipeline=2, data=2, expert=2, num_microbatches=2), marks=SLOW, id="PP2xDP2xEP2"),
    pytest.param(Layout(**SP, pipeline=2, expert=2, expert_tensor=1, num_microbatches=2), marks=SLOW, id="PP2xTP2+SP, EP2: a mask"),
    pytest.param(Layout(data=2, expert=2, distributed_optimizer=True, num_microbatches=2), marks=SLOW, id="DP2xEP2, distributed"),
    pytest.param(Layout(data=2, expert=2, average_in_collective=True), marks=SLOW, id="DP2xEP2, average_in_collective"),
    pytest.param(Layout(**SP, context=2, expert=2, expert_tensor=1, packed=True), marks=SLOW, id="CP2xTP2+SP, EP2, packed"),
]
ROWS = [pytest.param(place, *row.values, marks=row.marks, id=row.id) for place, row in enumerate(LAYOUTS)]


@pytest.mark.parametrize(("place", "layout"), ROWS)
def test_each_kind_of_parameter_has_the_one_process_float64_gradient(pool, truth_of, place, layout):
    model = model_of(layout, **OF_THE_FIELD)
    errors = assert_exact(pool, layout, model, truth_of(model), place)
    assert errors.keys() >= {"router", "expert", "shared expert", "norm", "attention"}


def refused_to_build(rank: int, layout: Layout, model: TinyGPT) -> str:
    return error_of(lambda: LayoutModel(layout, 16, model))


def test_latent_attention_that_cannot_be_exact_is_refused_by_name(pool):
    """Down projections are whole on each rank, whose gradient is then that of its own heads: replicas would drift apart."""
    model = TinyGPT(num_layers=2, experts=(("multi_latent_attention", True), ("rope_type", "rope"), ("add_bias_linear", False)))
    for error in pool.run(refused_to_build, Layout(tensor=2), model, world_size=2, tensor_model_parallel_size=2):
        assert "multi_latent_attention=True with tensor_model_parallel_size=2 needs sequence_parallel" in error


@pytest.mark.parametrize(
    ("size", "places", "packed"),
    [
        pytest.param(1, slice(0), True, id="FB-134 one sample, packed"),
        # Prompts are routed all the same.
        pytest.param(4, slice(1, None, 2), False, id="FB-134 each second sample is masked"),
    ],
)
def test_a_rank_without_any_sample_or_response_token_takes_part(pool, truth_of, size, places, packed):
    """Two ranks have half of the experts each: both wait in the exchange of tokens."""
    model, step = model_of(Layout()), list(truth_of(model_of(Layout()))["grpo"].samples[:size])
    step[places] = [replace(sample, loss_mask=[0] * len(sample.loss_mask)) for sample in step[places]]
    layouts = (Layout(), Layout(data=2, expert=2, packed=packed))
    alone, result = (step_on_layout(pool, where, step, config_of("grpo", "sample_mean"), model) for where in layouts)
    assert any(value.any() for value in alone.gradient.values())
    assert max(errors_by_kind(result.gradient, alone.gradient).values()) < GRADIENT_TOLERANCE


# Auxiliary losses

AUX_LAYOUTS = [
    pytest.param(Layout(data=2, expert=2, num_microbatches=2), id="FB-97 DP2xEP2 M2: a mean of means"),
    pytest.param(Layout(context=2, expert=2, expert_tensor=1), marks=SLOW, id="FB-97 CP2xEP2"),
    pytest.param(Layout(**SP, expert_tensor=2, num_microbatches=2), marks=SLOW, id="TP2+SP, ETP2, M2"),
    pytest.param(Layout(pipeline=2, data=2, expert=2, num_microbatches=2), marks=SLOW, id="PP2xDP2xEP2 M2"),
    pytest.param(Layout(data=2, expert=2, packed=True, num_microbatches=2), marks=SLOW, id="packed DP2xEP2 M2"),
]
COEFFICIENT = 3.0
BOTH = "aux_loss and z_loss"
LOSSES = {
    "z_loss": {"moe_z_loss_coeff": COEFFICIENT},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    BOTH: {
        "moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (COEFFICIENT, 0.0),
        "moe_z_loss_coeff": COEFFICIENT / 10,
    },
}
OF_ALL_TOKENS = ("z_loss", "seq_aux_loss")


def of_auxiliary_losses(pool, cases: list[tuple[Layout, list[StepSample], str, dict]]) -> list[dict[str, torch.Tensor]]:
    """The gradient of the losses alone, for each (layout, step, --router-aux-loss, options). Layouts of one set of process groups.

    All advantages are 0, so that the policy's loss has no gradient. FB-32: a divisor of it and its fused head move none of these.
    """
    runs = []
    for layout, step, mode, options in cases:
        aggregation = "token_mean" if layout.calculate_per_token_loss else "sample_mean"
        still = [replace(sample, advantage=0.0) for sample in step]
        of_policy = FUSED | {"gradient_divisor": "num_samples"} if mode == "exact" else {}
        config = config_of("reinforce", aggregation, router_aux_loss=mode, **of_policy)
        runs.append((layout, model_of(layout, **options), still, config))
    return [result.gradient for result in results_of(pool, runs)]


@pytest.fixture(scope="module")
def stock(pool):
    """What Megatron itself computes on one rank under the default contract, for a number of micro-batches; of a global_aux_loss of
    several, which it divides by another number, what exact computes there."""

    @functools.cache
    def of(pipeline: int, num_microbatches: int) -> dict[str, dict[str, torch.Tensor]]:
        layout = Layout(pipeline=pipeline, num_microbatches=num_microbatches)
        names = [name for name in LOSSES if name != BOTH]
        modes = {"global_aux_loss": "exact"} if num_microbatches > 1 else {}
        cases = [(layout, ragged_samples(), modes.get(name, "host"), LOSSES[name]) for name in names]
        return dict(zip(names, of_auxiliary_losses(pool, cases), strict=True))

    return of


def in_microbatches_of_one_rank(step: list[StepSample], layout: Layout) -> list[StepSample]:
    """The step in the order in which micro-batch m of all dp ranks together has the samples that micro-batch m of one rank has."""
    size, number = layout.data, layout.num_microbatches
    order = sorted(range(len(step)), key=lambda place: ((place // size) % number, place // (size * number), place % size))
    on_one = [sample for m in range(number) for sample in step[m::number]]
    reordered = list(step)
    for place, sample in zip(order, on_one, strict=True):
        reordered[place] = sample
    return reordered


@pytest.mark.parametrize("layout", AUX_LAYOUTS)
def test_exact_auxiliary_losses_are_those_of_one_rank(pool, stock, layout):
    """Both contracts. A z-loss and a loss of samples are of the whole step, the others of a micro-batch."""
    names = [name for name in LOSSES if not (layout.packed and name == "seq_aux_loss")]
    layouts = {contract: replace(layout, calculate_per_token_loss=contract == "per token") for contract in ("default", "per token")}
    steps = {name: ragged_samples() for name in names}
    steps["global_aux_loss"] = in_microbatches_of_one_rank(ragged_samples(), layout)
    rows = [(name, "default") for name in names] + [(name, "per token") for name in names if name in ("seq_aux_loss", BOTH)]
    found = of_auxiliary_losses(pool, [(layouts[contract], steps[name], "exact", LOSSES[name]) for name, contract in rows])
    cut = layout.num_microbatches * layout.data
    of = functools.partial(stock, layout.pipeline)
    expected = {name: of(1)[name] for name in OF_ALL_TOKENS} | {"aux_loss": of(cut)["aux_loss"]}
    expected["global_aux_loss"] = of(layout.num_microbatches)["global_aux_loss"]
    expected[BOTH] = {name: value + of(1)["z_loss"][name] / 10 for name, value in expected["aux_loss"].items()}
    for (name, contract), gradient in zip(rows, found, strict=True):
        # Over the whole gradient: an auxiliary loss has none of the last layer's experts.
        assert error_of_whole(gradient, expected[name]) < GRADIENT_TOLERANCE, (name, contract)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [6, 2, 4]])
def test_the_global_loss_does_not_depend_on_how_many_tokens_a_micro_batch_has(sizes):
    """FB-149: each of two experts gets half of the tokens with mean scores of 0.6 and 0.4, so the loss of every micro-batch is
    2 (0.5 0.6 + 0.5 0.4) = 1. Megatron's, of the second one of 6, 2, 4: (3 + 1) / 2 tokens of 2 an expert, so 2."""
    router = SimpleNamespace(topk=1, num_experts=2, global_tokens_per_expert=torch.zeros(2), ga_steps=0, tp_dp_cp_group=None)
    router.get_aux_loss_coeff = lambda name: 1.0
    router.routed_step = router_losses.RoutedStep(sum(sizes), len(sizes), len(sizes), 1, 1.0)
    stand_ins = {"_summed": lambda values, group: values, "_attached": lambda router, probs, name, loss, coefficient: loss}
    with mock.patch.multiple(router_losses, **stand_ins):
        for size in sizes:
            routes = torch.tensor([[True, False], [False, True]] * (size // 2))
            loss = router_losses._global_aux_loss(router, None, torch.tensor([[0.6, 0.4]] * size), routes)
            assert float(loss) == pytest.approx(1.0)


# Experts that several ranks hold

SHARDED, REPLICATED = Layout(data=2, expert_tensor=2), Layout(**SP, expert_tensor=1)


def drift_on_rank(rank: int, layout: Layout) -> tuple[bool, str]:
    drifts = expert_replicas_drift()
    return drifts, error_of(lambda: LayoutModel(layout, 16, model_of(layout))) if drifts else ""


def test_experts_that_drift_are_refused_and_others_are_exact(pool, truth_of):
    """FB-105: Megatron-Core 0.13 to 0.18 does not add the gradients of replicas, and adds those of different shards; 0.19 adds the
    gradients of replicas: the installed one is asked."""
    for layout, *words in (
        (SHARDED, "ranks hold different shards of an expert"),
        (REPLICATED, "expert_tensor_parallel_size=1: each tensor-parallel rank holds all experts", "drift apart"),
    ):
        drifts, refused = pool.run(drift_on_rank, layout, world_size=2, **layout.model_parallel)[0]
        assert not drifts or all(word in refused for word in words)
    if not drifts:
        model = model_of(REPLICATED)
        truth = truth_of(model)["grpo"]
        result = step_on_layout(pool, REPLICATED, truth.samples, config_of("grpo", "sample_mean"), model)
        assert max(errors_by_kind(result.gradient, truth.by_aggregation["sample_mean"].gradient).values()) < GRADIENT_TOLERANCE


# What is said of the losses at start, and what the first step refuses


def test_what_exact_cannot_scale_is_refused_at_start():
    """Megatron-Core 0.19 has moe_grad_scale_func, which multiplies these losses too."""
    from megatron.core.models.gpt import GPTModel

    config = SimpleNamespace(moe_grad_scale_func=lambda: 2.0)
    [problem] = exact_problems({"z_loss": 0.1}, GPTModel, config, is_packed=False)
    assert "moe_grad_scale_func in the model's config: both scale these losses; remove one" in problem
    [problem] = exact_problems({"seq_aux_loss": 3.0}, GPTModel, SimpleNamespace(), is_packed=True)
    assert "seq_aux_loss" in problem and "packed rows: Megatron gives its router no bounds" in problem


def of_another_schedule(rank: int, factor: float) -> str:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    layout, of_megatron = Layout(num_microbatches=2), MoEAuxLossAutoScaler.set_loss_scale
    model = LayoutModel(layout, row_length(ragged_samples(), layout), model_of(layout, **LOSSES["z_loss"]))
    config = config_of("reinforce", "sample_mean", router_aux_loss="exact")
    with mock.patch.object(MoEAuxLossAutoScaler, "set_loss_scale", lambda scale: of_megatron(scale * factor)):
        return error_of(lambda: model.step(config, ragged_samples()))


def test_a_schedule_with_another_scale_of_these_losses_is_refused_before_the_optimiser(pool):
    """Megatron-Core 0.13 has no cp in it; exact undoes what 0.16 to 0.19 do."""
    [message] = pool.run(of_another_schedule, 0.5, world_size=1)
    assert "multiplies the losses of routers by 0.25, and 0.5 (loss scale x cp / micro-batches) was expected" in message
    assert "would train x 0.5" in message and pool.run(of_another_schedule, 1.0, world_size=1) == [""]


# Padding never reaches a router


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_micro_batch_of_padding_alone_has_no_auxiliary_loss(pool, packed):
    """FB-99: one sample on two ranks: the mean over both is half of it, as Megatron's scale has it."""
    step, layout = ragged_samples()[:1], Layout(data=2, expert=2, packed=packed)
    for name in LOSSES:
        alone, found = (of_auxiliary_losses(pool, [(at, step, "host", LOSSES[name])])[0] for at in (Layout(packed=packed), layout))
        half = {key: value / 2 for key, value in alone.items()}
        assert error_of_whole(found, half) < GRADIENT_TOLERANCE, name


def counts_of_experts(
    rank: int, layout: Layout, tiny: TinyGPT, step: list[StepSample]
) -> tuple[list[list[float]], list[list[float]]]:
    """For each router (how far the bias of each expert moves in a step, the tokens that this rank counts before it moves)."""
    model = LayoutModel(layout, row_length(step, layout), tiny)
    config, counts, routers = model.models[0].config, [], routers_of(model.models[0])
    finalize = config.finalize_model_grads_func

    def keep_counts(*arguments, **named):
        counts.extend(router.local_tokens_per_expert.tolist() for router in routers)
        finalize(*arguments, **named)

    config.finalize_model_grads_func = keep_counts
    before = [router.expert_bias.clone() for router in routers]
    model.step(config_of("reinforce", "sample_mean"), step)
    return [(router.expert_bias - old).tolist() for router, old in zip(routers, before, strict=True)], counts


def tokens_of_experts(rank: int, tiny: TinyGPT) -> torch.Tensor:
    """Tokens that each expert gets of each ragged sample in the float64 model, over its routers: [samples, experts]."""
    samples = ragged_samples()
    model = double_model(tiny, samples)
    with RouteLog([model]) as log, torch.no_grad():
        model_logits(model, samples, tiny)
    return torch.stack([torch.stack([route.sum(0) for route in routes]) for routes in log.by_layer.values()]).sum(0)


BIAS_LAYOUTS = [Layout(), Layout(packed=True), Layout(data=2, expert=2, num_microbatches=2), Layout(data=2, expert=2, packed=True)]
BIAS_LAYOUTS += [Layout(context=2, expert=2, expert_tensor=1)]


def test_the_bias_of_experts_counts_real_tokens(pool):
    """FB-99: the bias moves by the sign of (mean - tokens of the expert). Padding would decide it, and a layout places padding. The
    one token of padding of a packed row shows in the counts alone, and so does that of a rank without a sample."""
    options = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 1e-3}
    model = model_of(Layout(), **options)
    tokens = pool.run(tokens_of_experts, model, world_size=1)[0].float()
    whole, first = tokens.sum(0), tokens[0]
    step = ragged_samples()
    cases = [(layout, step, whole) for layout in BIAS_LAYOUTS] + [(layout, step[:1], first) for layout in BIAS_LAYOUTS[-3:]]
    for layout, samples, expected in cases:
        found = pool.run(counts_of_experts, layout, model, samples, world_size=layout.world_size, **layout.model_parallel)
        assert torch.tensor([counts for _, (counts,) in found]).sum(0).equal(expected), layout
        for (moved,), _ in found:
            assert moved == pytest.approx((1e-3 * (expected.mean() - expected).sign()).tolist(), rel=1e-5), layout
