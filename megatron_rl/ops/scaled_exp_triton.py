"""Computes the first product of a head with an epilogue that leaves e^z in place of the logits: no kernel reads the logits again.

    scaled_exp  persistent over tiles of [T, V]  hidden [T, H], weight [V, H] -> -e^z [T, V], sums of each tile, target logits [T]

z is relative to the label's logit x_y, which one row of the weight gives before the product: the label's own e^z is 1, and e^z of
a column is p / p_y. With S the sum of the row, log_prob = -ln S. G of unit_gradient is 1 / (temperature S) times what is left here,
once the label's column holds the sum of the others: S (delta - p) = S - 1 there, and -e^z elsewhere (docs/kernels.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_rl.ops.backends import is_interpreted, num_processors
from megatron_rl.ops.log_probs_torch import RowResult, VocabShard
from megatron_rl.ops.log_probs_triton import LOG2_E


@dataclass(frozen=True, slots=True)
class TileConfiguration:
    """One program's tile and how deep its loads run ahead."""

    rows: int
    columns: int
    depth: int
    halves: bool  # the epilogue takes the halves of the columns in turn
    group: int  # row tiles that share the columns in the L2 cache
    num_warps: int
    num_stages: int


# 16-bit operands: 128 x 256 float32 accumulators are half a multiprocessor's registers, three stages of operands 144 KiB.
SIXTEEN_BIT = TileConfiguration(128, 256, 64, halves=True, group=8, num_warps=8, num_stages=3)
# float32 has no tensor core that is exact: for tests.
THIRTY_TWO_BIT = TileConfiguration(32, 32, 16, halves=False, group=8, num_warps=4, num_stages=2)


@triton.jit(
    do_not_specialize="qk num_rows num_columns width depth num_programs".split(),
    do_not_specialize_on_alignment="SHIFTS LABELS SUMS WEIGHTED TARGETS".split(),
)
def scaled_exp_kernel(
    X,  # descriptor of [T, H]
    W,  # descriptor of [V, H]
    OUT,  # descriptor of [T, V]
    SHIFTS,  # [T] float32: near the label's logit
    LABELS,  # [T]
    SUMS,  # [column tiles, T] float32: of e^z without the label's
    WEIGHTED,  # the same of z e^z, z in base 2
    TARGETS,  # [T] float32, -inf where no tile has the label
    qk,
    num_rows,
    num_columns,
    width,
    depth,
    num_programs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    ROUNDS: tl.constexpr,
    ENTROPY: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (programs). ROUNDS: logits are rounded to OUT's dtype first. HALVES: the epilogue takes the
    halves of a tile in turn, for fewer registers."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, num_programs):
        group = tile // (GROUP * column_tiles)
        tiles_of_group = min(row_tiles - group * GROUP, GROUP)
        row_tile = group * GROUP + tile % (GROUP * column_tiles) % tiles_of_group
        column_tile = tile % (GROUP * column_tiles) // tiles_of_group
        logits = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in tl.range(0, tl.cdiv(depth, DEPTH)):
            x = X.load([row_tile * ROWS, step * DEPTH])
            w = W.load([column_tile * COLUMNS, step * DEPTH])
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            logits = tl.dot(x, w.T, logits, input_precision="ieee")
        numbers = (SHIFTS, LABELS, SUMS, WEIGHTED, TARGETS)
        sizes = (num_rows, num_columns)
        if HALVES:
            left, right = logits.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
            _leave(left, OUT, numbers, qk, row_tile, 2 * column_tile, sizes, ROWS, COLUMNS // 2, ROUNDS, ENTROPY)
            _leave(right, OUT, numbers, qk, row_tile, 2 * column_tile + 1, sizes, ROWS, COLUMNS // 2, ROUNDS, ENTROPY)
        else:
            _leave(logits, OUT, numbers, qk, row_tile, column_tile, sizes, ROWS, COLUMNS, ROUNDS, ENTROPY)


@triton.jit
def _leave(
    logits,
    OUT,
    numbers,
    qk,
    row_tile,
    column_tile,
    sizes,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """-e^z of a tile and its part of each row's numbers."""
    SHIFTS, LABELS, SUMS, WEIGHTED, TARGETS = numbers
    num_rows, num_columns = sizes
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    labels = tl.load(LABELS + rows, mask=is_row, other=-1)
    labels = tl.where((labels >= 0) & (labels < num_columns), labels, -1).to(tl.int32)  # int32 alone could make one valid
    shifts = tl.load(SHIFTS + rows, mask=is_row, other=0.0)
    if ROUNDS:
        logits = logits.to(OUT.dtype).to(tl.float32)
    is_label = columns[None, :] == labels[:, None]
    target = tl.sum(tl.where(is_label, logits, 0.0), axis=1)
    has_label = (labels >= column_tile * COLUMNS) & (labels < (column_tile + 1) * COLUMNS)
    tl.store(TARGETS + rows, target, mask=is_row & has_label)
    # -300: 2^-300 and -300 x 2^-300 are 0, and -inf x 0 would be NaN.
    z = tl.maximum((logits - shifts[:, None]) * qk, -300.0, propagate_nan=tl.PropagateNan.ALL)
    others = tl.where(is_label | (columns >= num_columns)[None, :], 0.0, tl.exp2(z))
    place = column_tile.to(tl.int64) * num_rows + rows
    tl.store(SUMS + place, tl.sum(others, axis=1), mask=is_row)
    if ENTROPY:
        tl.store(WEIGHTED + place, tl.sum(others * z, axis=1), mask=is_row)
    OUT.store([row_tile * ROWS, column_tile * COLUMNS], (-others).to(OUT.dtype))


def scaled_exp(
    hidden: Tensor,  # [T, H]
    weight: Tensor,  # [V, H] of the same dtype: the whole vocabulary
    labels: Tensor,  # [T] int64
    shard: VocabShard,
    *,
    with_entropy: bool,
    rounds_logits: bool,  # to the dtype of out, as where they are in memory
    out: Tensor,  # [T, V]
) -> tuple[RowResult, Tensor]:  # and scales [T]: G = scales * out, with G = (delta - p) / temperature
    """One launch, operations on [T], no communication. `maximum` is the label's logit, nearly.

    It holds only where each log-probability is above LEAST_LOG_PROB: the caller looks. A label outside the vocabulary gives -inf.
    """
    tile = SIXTEEN_BIT if hidden.itemsize == 2 else THIRTY_TWO_BIT
    num_rows, width = out.shape
    num_tiles = triton.cdiv(width, tile.columns)
    block = tile.columns // 2 if tile.halves else tile.columns
    places = labels.clamp(0, width - 1)
    shifts = torch.linalg.vecdot(hidden, weight.index_select(0, places)).float()
    sums = torch.empty(
        2 if with_entropy else 1, num_tiles * (2 if tile.halves else 1), num_rows, dtype=torch.float32, device=hidden.device
    )
    targets = torch.full_like(shifts, -math.inf)
    num_programs = min(triton.cdiv(num_rows, tile.rows) * num_tiles, num_processors(hidden.device))
    with torch.cuda.device_of(hidden):
        scaled_exp_kernel[(num_programs,)](
            TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
            TensorDescriptor.from_tensor(out, [tile.rows, block]),
            shifts,
            labels.contiguous(),
            sums[0],
            sums[-1],
            targets,
            shard.inverse_temperature * LOG2_E,
            num_rows,
            shard.num_columns,
            width,
            hidden.shape[1],
            num_programs,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            GROUP=tile.group,
            ROUNDS=rounds_logits,
            ENTROPY=with_entropy,
            HALVES=tile.halves,
            UPCAST=is_interpreted(),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
    others = sums[0].sum(0)
    z = (targets - shifts) * shard.inverse_temperature
    total = others + z.exp()
    log_probs = z - total.log()
    out.scatter_(1, places.unsqueeze(1), others.unsqueeze(1).to(out.dtype))
    entropy = torch.zeros_like(total)
    if with_entropy:
        entropy = total.log() - (sums[1].sum(0) * math.log(2.0) + z * z.exp()) / total
    return RowResult(shifts, total, log_probs, entropy), shard.inverse_temperature / total
