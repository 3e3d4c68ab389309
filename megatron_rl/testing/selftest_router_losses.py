"""The selftest's rows of the auxiliary losses of routers under --router-aux-loss exact.

A row is a step of a mixture of experts in which one of these losses is on and all advantages are 0: this loss alone has a gradient.
Its reference is written out here: one process, float64, one sample after another, without padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig, RouterAuxLoss
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.model import global_parameter_name, is_of_expert
from megatron_rl.megatron.router_losses import NO_BOUNDS_OF_SAMPLES, exact_problem
from megatron_rl.megatron.routing import routers_of
from megatron_rl.testing.comparison import Truth, compare, compare_part
from megatron_rl.testing.layout_step import Layout, LayoutModel, RankStep, StepSample, TinyGPT
from megatron_rl.testing.reference import double_model, model_log_probs
from megatron_rl.testing.selftest_bench import Measured
from megatron_rl.testing.selftest_table import ROUTER_LOSSES, Z_LOSS
from megatron_rl.validation.auxiliary_losses import TYPES_WITH_A_LOSS

OF_MICROBATCHES = ("aux_loss", "global_aux_loss")
COEFFICIENT = 1.0
CONFIG = PolicyLossConfig(
    policy_loss="reinforce", loss_aggregation="token_mean", policy_metrics="none", router_aux_loss=RouterAuxLoss.EXACT
)
PACKED = f"seq_aux_loss with packed rows, which exact refuses: {NO_BOUNDS_OF_SAMPLES}"
# What a row compares besides the whole gradient.
LEAVES = {"routers": lambda name: ".router." in name, "experts": is_of_expert}
# Indices of samples: of each micro-batch, of each data-parallel rank.
Cut = list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class RouterTruth:
    """cuts: for a loss that is defined by the micro-batch (length of the gradient in the layout's cut over that in one micro-batch,
    norm of the difference over the latter)."""

    samples: list[StepSample]
    by_loss: dict[str, Truth]
    cuts: dict[str, tuple[float, float]]


def model_of_router_losses(tiny: TinyGPT) -> TinyGPT:
    """The mixture of experts with experts in each layer, so that a loss of the last router reaches experts too, and no loss on."""
    return replace(tiny, experts=(*tiny.experts, ("moe_layer_freq", (1,) * tiny.num_layers), ("mtp_loss_scaling_factor", 0.0)))


def exact_router_losses(layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the losses that are exact on this layout, what is left out and why)."""
    from megatron.core.models.gpt import GPTModel

    problem = exact_problem(GPTModel)
    if problem is not None:
        return (), (f"auxiliary losses of routers: {problem}",)
    if layout.packed:
        return tuple(name for name in ROUTER_LOSSES if name != "seq_aux_loss"), (PACKED,)
    return ROUTER_LOSSES, ()


def truth_of_router_losses(samples: Sequence[StepSample], tiny: TinyGPT, layout: Layout) -> RouterTruth:
    """On a process whose layout is one rank. The model runs once."""
    model = double_model(tiny, samples)
    seen: dict[int, list[Tensor]] = {}

    def keep(router: Any, inputs: tuple[Tensor, ...]) -> None:
        seen.setdefault(router.layer_number, []).append(inputs[0].flatten(0, 1) @ router.weight.t())

    hooks = [router.register_forward_pre_hook(keep) for router in routers_of(model)]
    model_log_probs(model, samples, tiny)
    for hook in hooks:
        hook.remove()
    topk = tiny.expert_options["moe_router_topk"]

    def gradient_of(name: str, cut: Cut) -> dict[str, Tensor]:
        loss = COEFFICIENT * added(by_hand(name, logits, topk, cut) for logits in seen.values())
        named = {global_parameter_name(model, name): parameter for name, parameter in model.named_parameters()}
        gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
        return {name: gradient.cpu() for name, gradient in zip(named, gradients, strict=True)}

    here, whole = cut_of(layout, len(samples)), cut_of(Layout(), len(samples))
    found = {name: gradient_of(name, here) for name in exact_router_losses(layout)[0]}
    cuts = {name: change(found[name], gradient_of(name, whole)) for name in OF_MICROBATCHES}
    step = [replace(sample, advantage=0.0) for sample in samples]
    return RouterTruth(step, {name: Truth(0.0, 1.0, gradient) for name, gradient in found.items()}, cuts)


def cut_of(layout: Layout, num_samples: int) -> Cut:
    """Which samples lie in which micro-batch of which data-parallel rank, as make_step_batches puts them."""
    size, number = layout.data, layout.num_microbatches
    places = range(num_samples)
    return [[list(places[rank::size][index::number]) for rank in range(size)] for index in range(number)]


def by_hand(name: str, logits: Sequence[Tensor], topk: int, cut: Cut) -> Tensor:
    """The loss of one router with coefficient 1, 0-d, from the logits [tokens, E] of each sample, as the module router_losses
    writes it down."""
    chosen = [torch.zeros_like(rows).scatter(1, rows.topk(topk, 1).indices, 1.0).sum(0) for rows in logits]
    scores = [torch.softmax(rows, 1).sum(0) for rows in logits]
    scale = logits[0].shape[1] / topk
    num_tokens, num_samples = sum(map(len, logits)), len(logits)
    if name == Z_LOSS:
        return added(torch.logsumexp(rows, 1).square().sum() for rows in logits) / num_tokens
    if name == "seq_aux_loss":
        balance = added(scale * (f * p).sum() for f, p in zip(chosen, scores, strict=True))
        return balance / ((num_tokens / num_samples) ** 2 * num_samples)
    if name == "aux_loss":
        parts = [part for of_ranks in cut for part in of_ranks]
    else:
        parts = [[index for part in of_ranks for index in part] for of_ranks in cut]
    nothing = torch.zeros_like(chosen[0])
    counts = [sum((chosen[index] for index in part), nothing) for part in parts]
    sizes = so_far = [sum(len(logits[index]) for index in part) for part in parts]
    if name == "global_aux_loss":
        counts, so_far = list(accumulate(counts)), list(accumulate(sizes))
    terms = [
        scale * (count * scores[index]).sum() / (size * size_so_far)
        for part, count, size, size_so_far in zip(parts, counts, sizes, so_far, strict=True)
        for index in part
    ]
    return added(terms) / len(parts)


def added(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()


def change(found: dict[str, Tensor], whole: dict[str, Tensor]) -> tuple[float, float]:
    def norm(values: Iterable[Tensor]) -> float:
        return math.sqrt(sum(float(value.square().sum()) for value in values))

    length = norm(whole.values())
    return norm(found.values()) / length, norm(found[name] - value for name, value in whole.items()) / length


class RouterLossModel:
    """This rank's model with experts, of which one auxiliary loss at a time is on. COEFFICIENT is not 0 while it is built, because
    a router then makes its buffers for global_aux_loss."""

    def __init__(self, layout: Layout, row_length: int, tiny: TinyGPT):
        losses = {
            "moe_router_load_balancing_type": TYPES_WITH_A_LOSS,
            "moe_aux_loss_coeff": (COEFFICIENT,) * len(TYPES_WITH_A_LOSS),
            "moe_z_loss_coeff": COEFFICIENT,
        }
        self._model = LayoutModel(layout, row_length, replace(tiny, experts=(*tiny.experts, *losses.items())))
        self.groups: ParallelGroups = self._model.groups

    def step(self, name: str, samples: Sequence[StepSample]) -> RankStep:
        for model in self._model.models:
            model.config.moe_aux_loss_coeff = [COEFFICIENT if kind == name else 0.0 for kind in TYPES_WITH_A_LOSS]
            model.config.moe_z_loss_coeff = COEFFICIENT if name == Z_LOSS else 0.0
        return self._model.step(CONFIG, samples)


def compare_router_loss(model: RouterLossModel, name: str, truth: RouterTruth) -> Measured:
    """The whole gradient, and the parts of routers and of experts, which may be small in it."""
    found, expected = model.step(name, truth.samples), truth.by_loss[name]
    comparisons = {"": compare(found, expected, model.groups)}
    return comparisons | {leaves: compare_part(found, expected, model.groups, is_one) for leaves, is_one in LEAVES.items()}
