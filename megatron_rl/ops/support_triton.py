"""Multiplies the pairs of a head with kept ids (ops/support.py) in two kernels, which read rows of hidden states and of the weight.

    gather_product    programs (k / PAIRS)            X [T, H], W [V_tp, H], (row, column) of each pair -> z [k]
    scatter_product   programs (segments, H / BLOCK)  g [k], rows of W or X of each pair -> rows of dX, or added to rows of dW

Pairs lie by row, so a row of X comes from the cache for all but its first pair. A program of dX takes a row, and one of dW an id;
it adds its pairs in their order, so there are no atomics and each run gives the same bits. Pairs are sorted by id on the device,
where the number of different ids would cost a synchronisation: there is a program for each pair, and it ends unless its id begins.
Derivation: docs/kernels.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.ops.log_probs_torch import working_dtype
from megatron_rl.ops.support import Pairs


@dataclass(frozen=True, slots=True)
class PairConfiguration:
    """`pairs` pairs at a time, `vectors` loads of 16 bytes of each along H."""

    pairs: int
    vectors: int
    num_warps: int


# A warp reads a pair: 4 loads of 16 bytes of each operand under way in a thread, 16 KiB in a program.
GATHER = PairConfiguration(pairs=4, vectors=128, num_warps=4)
# The vectors are the threads, so that a sum over pairs stays in a thread: 8 loads of 16 bytes under way in each.
SCATTER = PairConfiguration(pairs=8, vectors=128, num_warps=4)


@triton.jit(
    do_not_specialize="num_pairs stride_x stride_w width".split(),
    do_not_specialize_on_alignment="ROWS COLUMNS Z".split(),
)
def gather_product_kernel(
    X,  # [T, H]
    W,  # [V_tp, H]
    ROWS,  # [k] int64
    COLUMNS,  # [k] int64
    Z,  # [k] float32
    num_pairs,
    stride_x,
    stride_w,
    width,
    PAIRS: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Grid (k / PAIRS). Strides and width, H, in units of VECTOR elements. Lanes add on their own, and are added at the end."""
    pairs = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pairs < num_pairs
    rows = tl.load(ROWS + pairs, mask=is_pair, other=0)
    columns = tl.load(COLUMNS + pairs, mask=is_pair, other=0)
    firsts = tl.arange(0, VECTORS)
    inside_vector = tl.arange(0, VECTOR)[None, None, :]
    total = tl.zeros((PAIRS, VECTORS, VECTOR), tl.float32)
    for step in range(0, width, VECTORS):
        vectors = step + firsts
        is_inside = (is_pair[:, None] & (vectors < width)[None, :])[:, :, None]
        x_at = (rows[:, None] * stride_x + vectors[None, :])[:, :, None] * VECTOR + inside_vector
        w_at = (columns[:, None] * stride_w + vectors[None, :])[:, :, None] * VECTOR + inside_vector
        x = tl.load(X + x_at, mask=is_inside, other=0.0).to(tl.float32)
        w = tl.load(W + w_at, mask=is_inside, other=0.0).to(tl.float32)
        total += x * w
    tl.store(Z + pairs, tl.sum(tl.sum(total, 2), 1), mask=is_pair)


@triton.jit(
    do_not_specialize="stride_source stride_out width".split(),
    do_not_specialize_on_alignment="G ROWS STARTS STOPS PLACES".split(),
)
def scatter_product_kernel(
    SOURCE,  # [*, H]: the weight, or the hidden states
    G,  # [k] float32
    ROWS,  # [k] int64: the pair's row of SOURCE
    STARTS,  # [s] int64: first pair of the segment
    STOPS,  # [s] int64: past its last pair
    PLACES,  # [s] int64: its row of OUT
    OUT,  # [*, H]
    stride_source,
    stride_out,
    width,
    PAIRS: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Grid (s, H / BLOCK). Strides and width in units of VECTOR elements. ADDS: to OUT. A segment without a pair is left."""
    segment = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(STARTS + segment), tl.load(STOPS + segment)
    if start < stop:
        vectors = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
        is_inside = (vectors < width)[:, None]
        inside_vector = tl.arange(0, VECTOR)[None, :]
        total = tl.zeros((VECTORS, VECTOR), tl.float32)
        for first in range(start, stop, PAIRS):
            pairs = first + tl.arange(0, PAIRS)
            is_pair = pairs < stop
            rows = tl.load(ROWS + pairs, mask=is_pair, other=0)
            g = tl.load(G + pairs, mask=is_pair, other=0.0)
            source_at = (rows[:, None] * stride_source + vectors[None, :])[:, :, None] * VECTOR + inside_vector[None, :, :]
            values = tl.load(SOURCE + source_at, mask=is_pair[:, None, None] & is_inside[None, :, :], other=0.0).to(tl.float32)
            total += tl.sum(values * g[:, None, None], 0)
        out = OUT + (tl.load(PLACES + segment) * stride_out + vectors)[:, None] * VECTOR + inside_vector
        if ADDS:
            total += tl.load(out, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(out, total.to(OUT.dtype.element_ty), mask=is_inside)


def multiply_triton(
    hidden: Tensor,  # [T, H]
    weight: Tensor,  # [V_tp, H]
    pairs: Pairs,
    *,
    max_bytes: int,
) -> Tensor:  # [k] float32
    """As PairKernels.multiply, in one launch and without memory for the pairs' rows."""
    num_pairs = pairs.columns.numel()
    z = hidden.new_empty(num_pairs, dtype=working_dtype(weight))
    hidden, weight = _flat(hidden), _flat(weight)
    vector = _vector(hidden, weight)
    if num_pairs:
        with torch.cuda.device_of(hidden):
            gather_product_kernel[(-(-num_pairs // GATHER.pairs),)](
                hidden,
                weight,
                pairs.tokens,
                pairs.columns,
                z,
                num_pairs,
                hidden.stride(0) // vector,
                weight.stride(0) // vector,
                hidden.shape[1] // vector,
                PAIRS=GATHER.pairs,
                VECTORS=GATHER.vectors,
                VECTOR=vector,
                num_warps=GATHER.num_warps,
                enable_fp_fusion=True,
            )
    return z


def add_hidden_triton(g: Tensor, pairs: Pairs, weight: Tensor, *, out: Tensor, max_bytes: int) -> None:
    """As PairKernels.add_hidden, in one launch. `out` holds zeros: rows without a pair on this rank are left as they are."""
    _scatter(weight, g, pairs.columns, (pairs.offsets[:-1], pairs.offsets[1:]), pairs.rows, out, adds=False)


def add_weight_triton(g: Tensor, pairs: Pairs, hidden: Tensor, *, out: Tensor, max_bytes: int) -> None:
    """As PairKernels.add_weight, in one launch. It sorts the pairs by id on the device and does not synchronise."""
    columns, order = pairs.columns.sort(stable=True)
    starts = torch.arange(columns.numel(), device=columns.device)
    stops = torch.searchsorted(columns, columns, right=True)
    # Only the first pair of an id is a segment; the others are empty.
    stops = torch.where(torch.searchsorted(columns, columns) == starts, stops, starts)
    g, rows = g.index_select(0, order), pairs.tokens.index_select(0, order)
    _scatter(hidden, g, rows, (starts, stops), columns, out, adds=True)


def _scatter(
    source: Tensor, g: Tensor, rows: Tensor, segments: tuple[Tensor, Tensor], places: Tensor, out: Tensor, *, adds: bool
) -> None:
    if places.numel() == 0 or rows.numel() == 0:
        return
    target = out if out.stride(1) == 1 else out.contiguous()
    source = _flat(source)
    vector = _vector(source, target)
    width = source.shape[1] // vector
    with torch.cuda.device_of(source):
        scatter_product_kernel[(places.numel(), -(-width // SCATTER.vectors))](
            source,
            g,
            rows,
            *segments,
            places,
            target,
            source.stride(0) // vector,
            target.stride(0) // vector,
            width,
            PAIRS=SCATTER.pairs,
            VECTORS=SCATTER.vectors,
            VECTOR=vector,
            ADDS=adds,
            num_warps=SCATTER.num_warps,
            enable_fp_fusion=True,
        )
    if target is not out:
        out.copy_(target)


def _flat(rows: Tensor) -> Tensor:
    """With adjacent columns: a copy where they are not."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _vector(left: Tensor, right: Tensor) -> int:
    """Elements of a load: 16 bytes of the narrower operand, or the largest power of two that divides each row's begin and end."""
    sizes = [left.shape[1], *(tensor.stride(0) for tensor in (left, right))]
    begins = [tensor.data_ptr() // tensor.itemsize for tensor in (left, right)]
    return math.gcd(16 // min(left.itemsize, right.itemsize), *sizes, *begins)
