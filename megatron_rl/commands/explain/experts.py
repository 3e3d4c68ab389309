"""What `megatron-rl explain` says of a mixture of experts: the gradients of experts in the chain, and its auxiliary losses.

tests/test_expert_layouts.py measures both on the installed Megatron-Core.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator

from megatron_rl.aggregation_record import Formula
from megatron_rl.commands.explain.step import LaunchLayout
from megatron_rl.commands.explain.weights import short
from megatron_rl.config import RouterAuxLoss
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.companions import RolloutCounts
from megatron_rl.megatron.installed import HostScales
from megatron_rl.megatron.router_scale import RoutedStep, host_factors
from megatron_rl.validation.auxiliary_losses import TYPES_WITH_A_LOSS, active_losses, listed

# The launch's settings that are handed to the rules as they are.
SETTINGS = ("num_experts", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")
SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
RELEASES = {"0.16 to 0.18": HostScales(), "0.19": HostScales(False, False, True)}


def given_settings(args: Namespace) -> dict[str, object]:
    return {name: vars(args)[name] for name in (*SETTINGS, *SIZES) if vars(args)[name] is not None}


def layout_problem(args: Namespace, layout: LaunchLayout) -> str | None:
    num_ranks, of_experts = layout.tensor * layout.context * layout.data, layout.expert * layout.expert_tensor
    if any(vars(args)[name] is not None for name in SIZES) and args.num_experts is None:
        return f"{' and '.join('--' + name.replace('_', '-') for name in SIZES)} need --num-experts: a dense model has no experts"
    if args.num_experts is not None and num_ranks % of_experts:
        return (
            f"{num_ranks} ranks of a pipeline stage do not hold the experts in groups of {of_experts} (ep {layout.expert} x etp "
            f"{layout.expert_tensor}): choose sizes whose product divides them"
        )
    return None


def expert_row(layout: LaunchLayout, *, per_token: bool) -> list[str]:
    """In the place of DDP's factor: an expert's replicas are fewer, and each has had the tokens of more ranks."""
    replicas = layout.tensor * layout.context * layout.data // (layout.expert * layout.expert_tensor)
    formula = Formula() if per_token else Formula(dp=-1, cp=-1)
    added = "are added" if per_token else "are added and divided by dp x cp"
    does = f"edp = tp cp dp / (ep etp) = {replicas} replicas of an expert {added}; together they met the tokens of all ranks"
    here = 1.0 if per_token else 1 / (layout.data * layout.context)
    return ["DDP, experts", str(formula), short(here), "", does]


def loss_rows(args: Namespace, layout: LaunchLayout, counts: RolloutCounts) -> Iterator[list[str]]:
    """A row for each auxiliary loss that is on: its factor beside exact under each --router-aux-loss. None where none is."""
    active = active_losses(given_settings(args))
    names = [kind for kind in listed(args.moe_router_load_balancing_type or "aux_loss") if kind in TYPES_WITH_A_LOSS]
    names = [*(map(str, names) if "moe_aux_loss_coeff" in active else ()), *(["z_loss"] if "moe_z_loss_coeff" in active else ())]
    if args.num_experts is None or not names:
        return
    yield ["--router-aux-loss", *(str(mode) for mode in RouterAuxLoss)]
    for name in names:
        exact = "not in a host, which calls the model" if args.host in ROLLOUT_HOST_NAMES else "x 1"
        yield [name, "an error", _host_cell(name, args, layout, counts), exact]


def _host_cell(name: str, args: Namespace, layout: LaunchLayout, counts: RolloutCounts) -> str:
    totals, routed = counts.totals, args.num_routed_tokens
    num_parts, num_slices = layout.data * layout.num_microbatches, layout.tensor * layout.context
    unit = RoutedStep(totals.num_tokens if routed is None else routed, totals.num_samples, num_parts, layout.data, math.nan)
    if not args.calculate_per_token_loss:
        mean_of_means = "a mean over micro-batches and ranks of means over their tokens: it changes with the layout"
        if args.host in ROLLOUT_HOST_NAMES:  # whose routers count padding, which is not known here
            return mean_of_means
        return f"x {short(host_factors(unit, None, num_slices, HostScales())[name])} for equal micro-batches, else {mean_of_means}"
    found = {release: host_factors(unit, totals.num_tokens, num_slices, scales)[name] for release, scales in RELEASES.items()}
    given = "" if routed is not None else f"routed / {totals.num_tokens} "
    if len(set(found.values())) == 1:
        return f"x {given}{short(next(iter(found.values())))}".removesuffix(" 1") if given else f"x {short(found['0.19'])}"
    return ", ".join(f"x {given}{'x ' if given else ''}{short(value)} (Megatron-Core {name})" for name, value in found.items())
