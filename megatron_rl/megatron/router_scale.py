"""Says how strong Megatron makes the losses of routers under --router-aux-loss host, against exact. It changes no loss.

Megatron's scale depends on the layout: validation/auxiliary_losses.py says how. router_losses.py has the losses of exact.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_rl.layout.groups import ParallelGroups, all_gather_stack, group_device
from megatron_rl.megatron.batch import PolicyBatch, StepContext
from megatron_rl.megatron.installed import HostScales, counts_by_sample, installed_scales
from megatron_rl.megatron.model import find_gpt_model

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, slots=True)
class RoutedStep:
    """What the losses of routers need to know about the whole step."""

    num_tokens: int  # T
    num_samples: int  # B
    num_parts: int  # micro-batches times data-parallel ranks, without context parallelism
    data_size: int
    gradient_factor: float
    """Of a loss whose schedule divides it by num_parts. 1 under the default contract."""
    schedule_factor: float = 1.0
    """What the schedule multiplies these losses by, beside the loss scale: cp / micro-batches; 1 under the per-token contract."""


@dataclass(frozen=True, slots=True)
class RoutedPart:
    """A micro-batch of a data-parallel rank, whose tokens lie in slices on tp times cp ranks."""

    microbatch: int
    slices: tuple[float, ...]  # tokens without padding, of each slice
    positions: float  # of one slice, with padding
    rows: float


def host_ranges(
    parts: Sequence[RoutedPart],
    data_size: int,
    num_samples: int,
    num_loss_tokens: int | None,  # None: the default contract
    scales: HostScales,
    *,
    counts_padding: bool = False,
    is_packed: bool = False,
) -> dict[str, tuple[float, float]]:
    """For each loss the least and the largest weight that Megatron gives to a term of it, over that under exact, in one step.

    A term belongs to a token without padding (z_loss), or to the scores and routes of such tokens (the others, see the module's
    docstring). All terms of a part have one weight, and in z_loss all of a slice. parts: all of the step. counts_padding: the
    routers have no padding mask. is_packed: Megatron takes the row for one sample, so seq_aux_loss is compared with exact aux_loss.
    """
    num_tokens, num_parts = sum(sum(part.slices) for part in parts), len(parts)
    real_of: dict[int, float] = {}  # by micro-batch, on all data-parallel ranks
    positions_of: dict[int, float] = {}
    for part in parts:
        real_of[part.microbatch] = real_of.get(part.microbatch, 0) + sum(part.slices)
        positions_of[part.microbatch] = positions_of.get(part.microbatch, 0) + part.positions * len(part.slices)

    def of_contract(multiplier: float) -> float:
        """What stands before the loss of a part: of these tokens under the per-token contract, else one of the parts."""
        return 1 / num_parts if num_loss_tokens is None else multiplier / num_loss_tokens

    found: dict[str, list[float]] = {"z_loss": [], "seq_aux_loss": [], "aux_loss": [], "global_aux_loss": []}
    for part in parts:
        real, number = sum(part.slices), len(part.slices)
        if not real:
            continue
        for tokens in filter(None, part.slices):
            divisor = part.positions if counts_padding else tokens
            shares = number if scales.divides_z_loss or num_loss_tokens is None else 1
            found["z_loss"].append(of_contract(divisor) * num_tokens / divisor / shares)
        # With a mask the count that multiplies a loss is over all slices: Megatron adds them up in place.
        repeats = number if scales.multiplies_balance else 1
        of_part = of_contract(part.positions if counts_padding else real * repeats)
        of_all = of_contract(part.positions if counts_padding else real_of[part.microbatch] * repeats)
        size = part.positions * number if counts_padding else real
        size_of_all = positions_of[part.microbatch] if counts_padding else real_of[part.microbatch]
        aux_loss = of_part * num_parts * (real / size) ** 2
        found["aux_loss"].append(aux_loss)
        # The parts of the data-parallel ranks add up to the loss of their micro-batch, which exact does not average. Megatron takes
        # the mean of the counts so far over the tokens of this micro-batch.
        so_far = [count for microbatch, count in real_of.items() if microbatch <= part.microbatch]
        mean_so_far = sum(so_far) / len(so_far)
        found["global_aux_loss"].append(of_all * num_parts / data_size * real_of[part.microbatch] * mean_so_far / size_of_all**2)
        rows = 1 if num_loss_tokens is not None and scales.divides_samples else part.rows
        of_samples = of_part * rows * num_tokens**2 / (num_samples * size**2)
        found["seq_aux_loss"].append(aux_loss if is_packed else of_samples)
    return {name: (min(values), max(values)) for name, values in found.items()}


@dataclass(frozen=True, slots=True)
class _FirstStep:
    context: StepContext
    counts: list[Tensor]  # of each micro-batch: [data-parallel rank, routed tokens of this rank's slice, its positions, rows]


# A model's first step under host: the counts of this rank's micro-batches so far; None once its line has been said.
_first_steps: weakref.WeakKeyDictionary[nn.Module, _FirstStep | None] = weakref.WeakKeyDictionary()


def tell_scale(
    losses: dict[str, float],
    model: nn.Module,
    config: TransformerConfig,
    batch: PolicyBatch,
    groups: ParallelGroups,
    *,
    has_mask: bool,  # whether the installed Megatron-Core gives routers a padding mask
) -> None:
    """Says once what Megatron's scale makes of each loss in the model's first step, from the counts of all its micro-batches."""
    bare = find_gpt_model(model)
    if not bare.pre_process:
        return
    first = _first_steps.get(bare, _FirstStep(batch.context, []))
    if first is None:
        return
    if first.context is not batch.context:  # the step before ended with an error
        first = _FirstStep(batch.context, [])
    _first_steps[bare] = first
    is_padding = batch.is_padding
    if config.sequence_parallel:
        is_padding = is_padding.chunk(groups.tp.size(), 1)[groups.tp.rank()]
    shape = torch.tensor([groups.dp.rank(), is_padding.numel(), is_padding.numel(), is_padding.shape[0]])
    counts = shape.to(is_padding.device, non_blocking=True)
    counts[1] -= is_padding.sum()
    first.counts.append(counts)
    if len(first.counts) < batch.context.num_microbatches:
        return
    _first_steps[bare] = None
    parts = _parts_of(torch.stack(first.counts), groups, is_sliced=config.sequence_parallel)
    if groups.dp_cp.rank() or groups.tp.rank():
        return
    totals = batch.context.totals
    ranges = host_ranges(
        parts,
        groups.dp.size(),
        totals.num_samples,
        totals.num_tokens if config.calculate_per_token_loss else None,
        installed_scales() if has_mask else HostScales(divides_samples=counts_by_sample()),
        counts_padding=not has_mask,
        is_packed=batch.packed_seq_params is not None,
    )
    as_row = {"seq_aux_loss": " (as aux_loss of the row)"} if batch.packed_seq_params is not None else {}
    scale = ", ".join(f"{name}{as_row.get(name, '')} {_range_in_words(*ranges[name])}" for name in losses)
    num_routed = sum(sum(part.slices) for part in parts)
    num_positions = sum(part.positions * len(part.slices) for part in parts)
    counted = f"; {num_positions - num_routed} positions of padding count too" if not has_mask else ""
    warnings.warn(
        f"--router-aux-loss host keeps Megatron's scale: {scale} of exact in this step ({num_routed} routed, "
        f"{totals.num_tokens} response tokens){counted}",
        stacklevel=3,
    )


def _range_in_words(least: float, most: float) -> str:
    if most - least <= 1e-9 * most:
        return f"x {most:.4g}"
    return f"x {least:.4g} to {most:.4g} (by micro-batch and rank)"


def _parts_of(counts: Tensor, groups: ParallelGroups, *, is_sliced: bool) -> list[RoutedPart]:
    """counts [M, 4], of this rank's micro-batches. Communication: one all-gather over dp-cp, and one over tp with slices."""
    found = counts.to(group_device(groups.dp_cp))
    if is_sliced:
        found = all_gather_stack(found, groups.tp)
    found = all_gather_stack(found, groups.dp_cp).view(-1, *counts.shape)
    slices: dict[tuple[int, int], list[list[int]]] = {}
    for of_rank in found.tolist():
        for microbatch, (rank, *numbers) in enumerate(of_rank):
            slices.setdefault((microbatch, rank), []).append(numbers)
    return [
        RoutedPart(microbatch, tuple(real for real, _, _ in of_part), of_part[0][1], of_part[0][2])
        for (microbatch, _), of_part in slices.items()
    ]
