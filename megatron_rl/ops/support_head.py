"""Runs a head whose rows have sets of kept ids: pairs where a set is small, matmuls of all columns where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.ops.sparse_head import add_hidden_reference, add_weight_reference, multiply_reference


@dataclass(frozen=True, slots=True)
class PairKernels:
    """multiply(hidden [T, H], weight [V_tp, H], pairs, *, max_bytes) -> z [k]

    add_hidden(g [k], pairs, weight, *, out [T, H], max_bytes): writes the rows of `out` that have a pair here: dX of this shard.

    add_weight(g [k], pairs, hidden, *, out [V_tp, H] float32, max_bytes): adds dW to the rows of `out` that have a pair.
    """

    multiply: Callable[..., Tensor]
    add_hidden: Callable[..., None]
    add_weight: Callable[..., None]


def pair_kernels(backend: Backend) -> PairKernels:
    """The functions of a resolved backend (resolve_backend). Triton is imported here, on first use."""
    if backend == Backend.TORCH:
        return PairKernels(multiply_reference, add_hidden_reference, add_weight_reference)
    from megatron_rl.ops.sparse_head_triton import add_hidden_triton, add_weight_triton, multiply_triton

    return PairKernels(multiply_triton, add_hidden_triton, add_weight_triton)
