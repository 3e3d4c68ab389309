"""The seam between logits and kernels: one forward and one gradient over rows, for each backend. It must never choose a backend.

The logits path and the fused head call the same two functions; losses never see them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.ops.log_probs_reference import RowResult, logits_gradient_reference, row_results_reference


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
