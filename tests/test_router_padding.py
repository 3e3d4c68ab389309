"""Padding never reaches a router: neither its losses, nor the bias of its experts; a rank may have nothing else."""

from __future__ import annotations

import pytest
import torch
from helpers import pool_of
from test_expert_layouts import LOSSES, error_of_whole, model_of, of_auxiliary_losses
from test_layouts import GRADIENT_TOLERANCE, config_of

from megatron_rl.megatron.routing import RouteLog, routers_of
from megatron_rl.testing.invariance import Layout, StepSample, TinyGPT
from megatron_rl.testing.layout_step import LayoutModel, row_length
from megatron_rl.testing.reference import double_model, model_logits, ragged_samples

pytestmark = pytest.mark.megatron

pool = pool_of(2)


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
