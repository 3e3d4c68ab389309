"""Computes row results and, in the same kernel, the gradient of each row's log-probability with respect to its logits.

    unit_gradient   grid (rows)   logits [T, V] -> maximum, total, log_probs, entropy [T]; G = (delta - p) / temperature [T, V]

G needs no loss: the coefficient of a row commutes with the matmuls that follow (docs/kernels.md). A program walks its row twice, as
one_read does: the second walk goes backwards and finds the row in the L2 cache. So a bf16 logit costs 4 bytes instead of 6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.ops.backends import (
    ALIGNMENT,
    MAX_REGISTERS,
    OneReadConfiguration,
    flat_rows,
    has_flat_rows,
    one_read_configuration,
)
from megatron_rl.ops.log_probs_torch import RowResult, VocabShard
from megatron_rl.ops.log_probs_triton import (
    LOG2_E,
    row_result_memory,
    statistics_of_row,
    store_row_result,
    write_gradient_of_row,
)


def plan_unit_gradient(logits: Tensor, out: Tensor) -> OneReadConfiguration | None:  # [T, V] each; out may be logits
    """The program; None where statistics and gradient stay two kernels.

    None too for a float16 `out`: its largest number is 65504, and then the coefficient multiplies a row of hidden states, which may
    be large, in the place of G, which is at most 1 / temperature.
    """
    if logits.numel() == 0 or out.dtype == torch.float16 or not (has_flat_rows(logits) and has_flat_rows(out)):
        return None
    if not flat_rows(out).is_aligned_with(flat_rows(logits)):
        return None
    return one_read_configuration(logits.shape[0], logits.shape[1] * logits.itemsize, logits.device)


@triton.jit(
    do_not_specialize=(
        "inverse_temperature qk num_rows num_columns num_stored units shift stride out_shift out_stride"  # one binary
    ).split(),
    do_not_specialize_on_alignment="LABELS BOUNDS LOG_PROBS ENTROPIES".split(),
)
def unit_gradient_kernel(
    X,  # [T, V]
    OUT,  # [T, V], may be X's memory
    LABELS,  # [T]
    BOUNDS,  # [2, T] float32: maximum, total
    LOG_PROBS,  # [T] float32
    ENTROPIES,  # [T] float32
    inverse_temperature,
    qk,
    num_rows,
    num_columns,
    num_stored,
    units,
    shift,
    stride,
    out_shift,
    out_stride,
    L: tl.constexpr,
    U: tl.constexpr,
    VECTOR: tl.constexpr,
    OUT_VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    maximum, total, target, weighted = statistics_of_row(
        X, LABELS, row, 0, qk, num_columns, 0, units, shift, stride, L, U, VECTOR, ENTROPY, "evict_last"
    )
    store_row_result(
        BOUNDS, LOG_PROBS, ENTROPIES, row, num_rows, maximum, total, target, weighted, inverse_temperature, None, ENTROPY
    )
    write_gradient_of_row(
        X,
        OUT,
        row,
        0,
        num_columns > 0,
        tl.load(LABELS + row),
        maximum,
        total,
        0.0,
        1.0,
        0.0,
        (inverse_temperature, qk),
        (num_columns, num_stored),
        (units, shift, stride, out_shift, out_stride),
        BLOCK,
        OUT_VECTOR,
        False,
        True,
    )


def unit_gradient(
    logits: Tensor,  # [T, V]: the whole vocabulary
    labels: Tensor,  # [T] int64
    shard: VocabShard,
    *,
    with_entropy: bool,
    out: Tensor,  # [T, V] of the weight's dtype; may be the logits' own storage
) -> RowResult | None:
    """One launch, no communication. `out` gets G, 0 behind the vocabulary. None, and nothing done, where there is no plan."""
    configuration = plan_unit_gradient(logits, out)
    if configuration is None:
        return None
    rows, gradient = flat_rows(logits), flat_rows(out)
    with torch.cuda.device_of(logits):
        bounds, log_probs, entropies = row_result_memory(logits.shape[0], logits.device)
        unit_gradient_kernel[(logits.shape[0],)](
            rows.pointer,
            gradient.pointer,
            labels.contiguous(),
            bounds,
            log_probs,
            entropies,
            shard.inverse_temperature,
            shard.inverse_temperature * LOG2_E,
            logits.shape[0],
            shard.num_columns,
            logits.shape[1],
            triton.cdiv(logits.shape[1], ALIGNMENT),
            rows.shift,
            rows.stride,
            gradient.shift,
            gradient.stride,
            L=configuration.lanes,
            U=configuration.tiles,
            VECTOR=16 // logits.itemsize,
            OUT_VECTOR=16 // out.itemsize,
            BLOCK=configuration.block,
            ENTROPY=with_entropy,
            num_warps=configuration.num_warps,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=True,
        )
    # Autograd does not see the write of a kernel.
    torch.autograd.graph.increment_version(out)
    return RowResult(bounds[0], bounds[1], log_probs, entropies)
