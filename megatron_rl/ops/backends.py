"""Chooses the kernels, torch or Triton, from the `backend` setting and the logits. It never replaces a named backend by another.

Triton is imported only when it is needed, so that the package works without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.errors import ConfigError
from megatron_rl.ops.log_probs_torch import RowResult, logits_gradient_torch, row_results_torch

# The dtypes that the kernels load; they compute in float32. float64 logits are computed in float64, in torch.
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def resolve_backend(
    backend: str,
    logits: Tensor,  # any shape: only device and dtype are used
) -> Backend:
    """TORCH or TRITON. `auto` is Triton for CUDA logits of at most 32 bits and torch for all others.

    Raises: ConfigError for an unknown name, and for Triton where it cannot run.
    """
    if backend not in set(Backend):
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(Backend)}")
    if backend == Backend.TORCH or (backend == Backend.AUTO and (not logits.is_cuda or logits.dtype not in TRITON_DTYPES)):
        return Backend.TORCH
    if logits.dtype not in TRITON_DTYPES:
        raise ConfigError(
            f"backend='triton' takes float32, bfloat16 and float16 logits, got {logits.dtype}: pass backend='torch' or cast them"
        )
    reason = why_triton_is_missing()
    if reason is not None:
        raise ConfigError(
            f"backend={str(backend)!r} on {logits.device} needs Triton, and `import triton` fails ({reason}): install the "
            "Triton of this torch, or pass backend='torch'"
        )
    if not logits.is_cuda and not is_interpreted():
        raise ConfigError(
            f"backend='triton' needs CUDA and the logits are on {logits.device}: pass backend='auto' or 'torch'; to interpret the "
            "kernels in a test, set TRITON_INTERPRET=1 before the first import of triton"
        )
    return Backend.TRITON


def check_backend(backend: str, device: torch.device) -> None:
    """Raises resolve_backend's errors for logits on `device`, so that a launch fails at its start and not at its first loss."""
    resolve_backend(backend, torch.empty(0, dtype=torch.float32, device=device))


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter. Triton decides it when a kernel is defined, for the whole process."""
    if why_triton_is_missing() is not None:
        return False
    import triton

    from megatron_rl.ops.log_probs_triton import row_statistics_kernel

    return not isinstance(row_statistics_kernel, triton.JITFunction)


@functools.cache
def why_triton_is_missing() -> str | None:
    """The error of `import triton` as text; None if it can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None


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
    """The functions of a resolved backend (resolve_backend). Triton is imported here, on first use."""
    if backend == Backend.TORCH:
        return RowKernels(row_results_torch, logits_gradient_torch)
    from megatron_rl.ops.log_probs_triton import row_results_triton
    from megatron_rl.ops.logits_gradient_triton import logits_gradient_triton

    return RowKernels(row_results_triton, logits_gradient_triton)
