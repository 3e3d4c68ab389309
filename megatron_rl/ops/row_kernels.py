"""The seam between logits and kernels: one forward and one gradient over rows, for each backend. It must never choose a backend.

The logits path and the fused head call the same two functions; losses never see them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.layout.collectives import all_gather_stack
from megatron_rl.layout.groups import Group
from megatron_rl.ops.log_probs_reference import (
    VocabShard,
    combine_statistics,
    logits_gradient_reference,
    row_statistics_reference,
)


@dataclass(frozen=True, slots=True)
class RowResult:
    """Numbers of whole rows, equal bit for bit on all tp ranks. The gradient needs all four; masked rows hold no meaning in two."""

    maximum: Tensor  # [T] of the raw logits
    total: Tensor  # [T] sum of e^((x - maximum) / temperature)
    log_probs: Tensor  # [T], 0 where masked
    entropy: Tensor  # [T], 0 where masked and where nobody asked for it


@dataclass(frozen=True, slots=True)
class RowKernels:
    """forward(logits [T, V_tp], labels [T], loss_mask [T] bool | None, shard, tp_group, *, with_entropy) -> RowResult

    One all-gather of [T, 3] (with entropy [T, 4]) over tp_group; none at size 1.

    gradient(logits, labels, loss_mask | None, maximum [T], total [T], entropy [T], coefficients [T] | None,
             entropy_coefficients [T] | None, shard, *, out [T, V_tp]) -> out

    Writes all of `out`, which may be the logits' own storage or have another floating dtype. No communication.
    """

    forward: Callable[..., RowResult]
    gradient: Callable[..., Tensor]


def row_kernels(backend: Backend) -> RowKernels:
    """The functions of a resolved backend (backends.resolve_backend); Triton is imported here, on first use."""
    if backend == Backend.TORCH:
        return RowKernels(row_results_reference, logits_gradient_reference)
    from megatron_rl.ops.log_probs_triton import logits_gradient_triton, row_results_triton

    return RowKernels(row_results_triton, logits_gradient_triton)


def row_results_reference(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    shard: VocabShard,
    tp_group: Group,
    *,
    with_entropy: bool,
) -> RowResult:
    """Row statistics, one all-gather, the same merge on every rank."""
    statistics = row_statistics_reference(logits, labels, loss_mask, shard, with_entropy=with_entropy)
    return RowResult(*combine_statistics(all_gather_stack(statistics, tp_group), loss_mask, shard))
