"""The Triton twin of log_probs_reference: row statistics, their merge over splits and shards. It must never synchronise.

    one shard, one split    row_statistics writes the finished rows
    one shard, splits       row_statistics -> combine
    shards                  row_statistics [-> combine] -> one all-gather [tp, T, 3 or 4] -> combine, alike on every rank

Kernels: row_statistics_triton, logits_gradient_triton. Derivation: docs/kernels.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.layout.collectives import all_gather_stack
from megatron_rl.layout.groups import Group
from megatron_rl.ops.launches import STATISTICS_DEFAULTS, StatisticsConfiguration
from megatron_rl.ops.log_probs_reference import RowResult, VocabShard
from megatron_rl.ops.logits_gradient_triton import logits_gradient_triton
from megatron_rl.ops.row_list_triton import as_bytes
from megatron_rl.ops.row_result_triton import LN_2, row_result_memory, store_row_result
from megatron_rl.ops.row_statistics_triton import (
    KEEP_NAN,
    LOG2_E,
    MAXIMUM_FLOOR,
    launch_row_statistics,
    rescaling_exponent,
)

__all__ = ["combine_statistics_triton", "logits_gradient_triton", "row_results_triton", "row_statistics_triton"]

# Rows that one program merges; a launch costs more than what it does.
COMBINE_BLOCK = 128


@triton.jit(
    do_not_specialize=["inverse_temperature", "qk", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=["PARTS", "MASK", "OUT", "LOG_PROBS", "ENTROPIES"],
)
def combine_kernel(
    PARTS,
    MASK,
    OUT,
    LOG_PROBS,
    ENTROPIES,
    inverse_temperature,
    qk,
    num_rows,
    num_parts,
    BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ENTROPY: tl.constexpr,
    FINISH: tl.constexpr,
):
    """PARTS [parts, T, 3 or 4] merged from the first to the last: the same additions, hence the same bits, on every rank.

    OUT: [T, 3 or 4], or with FINISH [2, T] and RowResult's other two vectors. Masked rows are (0, 1, 0, 0) until finished.
    """
    WIDTH: tl.constexpr = 4 if ENTROPY else 3
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    active = inside
    if HAS_MASK:
        active = inside & (tl.load(MASK + row, mask=inside, other=0) != 0)
    maximum = tl.full((BLOCK,), MAXIMUM_FLOOR, tl.float32)
    target = tl.full((BLOCK,), -float("inf"), tl.float32)
    for part in range(0, num_parts):
        source = PARTS + (part * num_rows.to(tl.int64) + row) * WIDTH
        maximum = tl.maximum(maximum, tl.load(source, mask=active, other=MAXIMUM_FLOOR))
        target = tl.maximum(target, tl.load(source + 2, mask=active, other=-float("inf")), propagate_nan=KEEP_NAN)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, num_parts):
        source = PARTS + (part * num_rows.to(tl.int64) + row) * WIDTH
        exponent = rescaling_exponent(tl.load(source, mask=active, other=MAXIMUM_FLOOR), maximum, qk, True)
        factor = tl.exp2(exponent)
        s = tl.load(source + 1, mask=active, other=0.0)
        total += factor * s
        if ENTROPY:
            w = tl.load(source + 3, mask=active, other=0.0)
            weighted += factor * (w + exponent * LN_2 * s)
    maximum = tl.where(active, maximum, 0.0)
    total = tl.where(active, total, 1.0)
    target = tl.where(active, target, 0.0)
    if FINISH:
        store_row_result(
            OUT, LOG_PROBS, ENTROPIES, row, num_rows, maximum, total, target, weighted / LN_2, inverse_temperature, inside, ENTROPY
        )
    else:
        out = OUT + row * WIDTH
        tl.store(out, maximum, mask=inside)
        tl.store(out + 1, total, mask=inside)
        tl.store(out + 2, target, mask=inside)
        if ENTROPY:
            tl.store(out + 3, weighted, mask=inside)


def row_statistics_triton(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    shard: VocabShard,
    *,
    with_entropy: bool,
    configuration: StatisticsConfiguration = STATISTICS_DEFAULTS,
) -> Tensor:  # [T, 3 or 4] float32: m, s, t and, with entropy, w; masked rows (0, 1, 0, 0)
    """row_statistics_reference's twin: no row that is masked is loaded."""
    options = {"with_entropy": with_entropy, "configuration": configuration}
    with torch.cuda.device_of(logits):
        if logits.shape[0] == 0:
            return logits.new_empty((0, 4 if with_entropy else 3), dtype=torch.float32)
        (parts,) = launch_row_statistics(logits, labels, loss_mask, shard, can_finish=False, **options)
        return parts[0] if parts.shape[0] == 1 else _combine(parts, loss_mask, shard, finish=False)[0]


def combine_statistics_triton(
    gathered: Tensor,  # [parts, T, 3 or 4]
    loss_mask: Tensor | None,  # [T] bool
    shard: VocabShard,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # maximum [T], total [T], log_probs [T], entropy [T]
    """combine_statistics's twin."""
    with torch.cuda.device_of(gathered):
        if gathered.shape[1] == 0:
            return gathered.new_empty((4, 0)).unbind(0)
        return _combine(gathered, loss_mask, shard, finish=True)


def row_results_triton(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    shard: VocabShard,
    tp_group: Group,
    *,
    with_entropy: bool,
    configuration: StatisticsConfiguration = STATISTICS_DEFAULTS,
) -> RowResult:
    """row_results_reference's twin. Launches: one; one more for a mask, for splits and for shards. One all-gather over tp_group."""
    options = {"with_entropy": with_entropy, "configuration": configuration}
    if tp_group.size() > 1:
        statistics = row_statistics_triton(logits, labels, loss_mask, shard, **options)
        return RowResult(*combine_statistics_triton(all_gather_stack(statistics, tp_group), loss_mask, shard))
    with torch.cuda.device_of(logits):
        if logits.shape[0] == 0:
            return RowResult(*logits.new_empty((4, 0), dtype=torch.float32).unbind(0))
        rows = launch_row_statistics(logits, labels, loss_mask, shard, can_finish=True, **options)
        return RowResult(*(rows if len(rows) == 4 else _combine(*rows, loss_mask, shard, finish=True)))


def _combine(parts: Tensor, loss_mask: Tensor | None, shard: VocabShard, *, finish: bool) -> tuple[Tensor, ...]:
    """[parts, T, k] -> RowResult's four vectors [T], or ([T, k],)."""
    parts = parts.contiguous()
    num_parts, num_rows, width = parts.shape
    if finish:
        out, log_probs, entropies = row_result_memory(num_rows, parts.device)
    else:
        out = log_probs = entropies = torch.empty((num_rows, width), dtype=torch.float32, device=parts.device)
    combine_kernel[(triton.cdiv(num_rows, COMBINE_BLOCK),)](
        parts,
        parts if loss_mask is None else as_bytes(loss_mask),
        out,
        log_probs,
        entropies,
        shard.inverse_temperature,
        shard.inverse_temperature * LOG2_E,
        num_rows,
        num_parts,
        BLOCK=COMBINE_BLOCK,
        HAS_MASK=loss_mask is not None,
        ENTROPY=width == 4,
        FINISH=finish,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return (*out.unbind(0), log_probs, entropies) if finish else (out,)
