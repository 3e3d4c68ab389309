"""Computes the gradient with respect to the logits in Triton, in place or into another tensor. Rows without gradient are not read.

    dlogits_j = [ c (delta_j - p_j) - e p_j (ln p_j + entropy) ] / temperature,   p_j = e^((x_j - maximum) / temperature) / total

One read and one write of each logit. Rows without a coefficient and padding columns are only written. Derivation: docs/kernels.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.ops.log_probs_torch import VocabShard
from megatron_rl.ops.log_probs_triton import EXPONENT_FLOOR, KEEP_NAN, LN_2, LOG2_E, UNIT, as_bytes, rescaling_exponent
from megatron_rl.ops.tiling import (
    ALIGNMENT,
    GRADIENT_DEFAULTS,
    GradientConfiguration,
    flat_rows,
    gradient_like,
    has_flat_rows,
    split_rows,
)


@triton.jit
def _gradient(x, is_label, maximum, log2_total, c, p_factor, log_p_factor, qk, ENTROPY: tl.constexpr):
    """c delta - p (c + e (ln p + entropy)) with p_factor = -(c + e entropy), log_p_factor = -e ln 2, all of them / temperature.

    The label's column is handled inside the same store: a second store to it would need a barrier.
    """
    log2_p = rescaling_exponent(x, maximum, qk, False) - log2_total
    factor = p_factor
    if ENTROPY:
        log2_p = tl.maximum(log2_p, EXPONENT_FLOOR, propagate_nan=KEEP_NAN)
        factor = log2_p * log_p_factor + p_factor
    return tl.exp2(log2_p) * factor + tl.where(is_label, c, 0.0)


@triton.jit
def _edge_columns(head, split, vector_end, length):
    """Up to 7 columns before the first aligned one (in the first split), and up to 7 after the last whole vector."""
    step = tl.arange(0, 2 * UNIT)
    columns = tl.where(step < UNIT, step - UNIT, vector_end + step - UNIT)
    return columns, (columns >= tl.where(split == 0, -head, 0)) & (columns < length)


@triton.jit(
    do_not_specialize=(
        "inverse_temperature qk num_columns num_stored first_column units_per_split shift stride out_shift out_stride"
    ).split(),
    do_not_specialize_on_alignment="MASK LABELS MAXIMUM TOTAL ENTROPIES COEFFICIENTS ENTROPY_COEFFICIENTS".split(),
)
def logits_gradient_kernel(
    X,
    OUT,
    MASK,
    LABELS,
    MAXIMUM,
    TOTAL,
    ENTROPIES,
    COEFFICIENTS,
    ENTROPY_COEFFICIENTS,
    inverse_temperature,
    qk,
    num_columns,
    num_stored,
    first_column,
    units_per_split,
    shift,
    stride,
    out_shift,
    out_stride,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_COEFFICIENTS: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Grid (rows, splits). OUT may be X's memory: a thread reads a logit before it writes it, and no other thread reads it."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = row * stride + shift
    head = ((-start) & (UNIT - 1)).to(tl.int32)
    # From here on columns count from the first column of this split, itself counted from the first aligned one of the row. Both
    # tensors have the same aligned columns.
    low = split * units_per_split * UNIT
    length = tl.minimum(units_per_split * UNIT, num_stored - head - low)
    vector_end = tl.maximum(length, 0) // VECTOR * VECTOR
    has_edges = ((split == 0) & (head > 0)) | (vector_end < length)
    source = X + ((start + head) // UNIT + split * units_per_split) * UNIT
    target = OUT + ((row * out_stride + out_shift + head) // UNIT + split * units_per_split) * UNIT
    # [BLOCK / VECTOR, VECTOR]: the columns of a thread are neighbours, so that finding the label's is a comparison with a constant.
    firsts = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR
    steps = tl.arange(0, VECTOR)[None, :]
    lanes = firsts + steps
    zeros = tl.zeros((BLOCK // VECTOR, VECTOR), OUT.dtype.element_ty)

    # All three loads start at once; the coefficients of a masked row are not used.
    is_read = num_columns > 0
    if HAS_MASK:
        is_read = is_read & (tl.load(MASK + row) != 0)
    c = 0.0
    e = 0.0
    is_wanted = False
    if HAS_COEFFICIENTS:
        c = tl.load(COEFFICIENTS + row)
        is_wanted = c != 0.0
    if ENTROPY:
        e = tl.load(ENTROPY_COEFFICIENTS + row)
        is_wanted = is_wanted | (e != 0.0)
    if is_read & is_wanted:
        maximum = tl.load(MAXIMUM + row)
        log2_total = tl.log2(tl.load(TOTAL + row))
        label = tl.load(LABELS + row) - first_column
        label = tl.where((label >= 0) & (label < num_columns), label - head - low, -(2**30)).to(tl.int32)
        c = c * inverse_temperature
        p_factor = -c
        log_p_factor = p_factor
        if ENTROPY:
            e = e * inverse_temperature
            p_factor -= e * tl.load(ENTROPIES + row)
            log_p_factor = -e * LN_2
        real = num_columns - head - low
        full_end = tl.maximum(tl.minimum(length, real), 0) // BLOCK * BLOCK
        for offset in range(0, full_end, BLOCK):
            x = tl.load(source + offset + lanes, eviction_policy="evict_first").to(tl.float32)
            is_label = (label - offset - firsts) == steps
            gradient = _gradient(x, is_label, maximum, log2_total, c, p_factor, log_p_factor, qk, ENTROPY)
            tl.store(target + offset + lanes, gradient.to(OUT.dtype.element_ty))
        if full_end < vector_end:
            # The mask takes or leaves whole vectors, so that this block is 128 bits wide too. Padding that it reads is not used.
            inside = full_end + firsts < vector_end
            x = tl.load(source + full_end + lanes, mask=inside, other=-float("inf")).to(tl.float32)
            is_label = (label - full_end - firsts) == steps
            gradient = _gradient(x, is_label, maximum, log2_total, c, p_factor, log_p_factor, qk, ENTROPY)
            gradient = tl.where(full_end + lanes < real, gradient, 0.0)
            tl.store(target + full_end + lanes, gradient.to(OUT.dtype.element_ty), mask=inside)
        for offset in range(full_end + BLOCK, vector_end, BLOCK):
            tl.store(target + offset + lanes, zeros, mask=offset + firsts < vector_end)
        if has_edges:
            columns, inside = _edge_columns(head, split, vector_end, length)
            x = tl.load(source + columns, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = _gradient(x, columns == label, maximum, log2_total, c, p_factor, log_p_factor, qk, ENTROPY)
            gradient = tl.where(columns < real, gradient, 0.0)
            tl.store(target + columns, gradient.to(OUT.dtype.element_ty), mask=inside)
    else:
        for offset in range(0, vector_end, BLOCK):
            tl.store(target + offset + lanes, zeros, mask=offset + firsts < vector_end)
        if has_edges:
            columns, inside = _edge_columns(head, split, vector_end, length)
            tl.store(target + columns, tl.zeros((2 * UNIT,), OUT.dtype.element_ty), mask=inside)


def logits_gradient_triton(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    maximum: Tensor,  # [T] over all shards
    total: Tensor,  # [T] over all shards
    entropy: Tensor,  # [T]
    coefficients: Tensor | None,  # [T] dL / dlog_prob
    entropy_coefficients: Tensor | None,  # [T] dL / dentropy
    shard: VocabShard,
    *,
    out: Tensor,  # [T, V_tp] of any floating dtype; may be the logits' own storage
    configuration: GradientConfiguration = GRADIENT_DEFAULTS,
) -> Tensor:
    """The twin of logits_gradient_torch, one launch. Autograd's version counters see the write of `out`.

    Logits with strided columns are copied first. If `out` has other aligned columns than the logits, the gradient is copied into it
    at the end; tiling.gradient_like makes a tensor with the same ones.
    """
    if logits.numel() == 0:
        return out
    source = logits if has_flat_rows(logits) else logits.contiguous()
    is_direct = has_flat_rows(out) and flat_rows(out).is_aligned_with(flat_rows(source))
    target = out if is_direct else gradient_like(source, out.dtype)
    vectors = [
        None if vector is None else vector.to(torch.float32).contiguous()
        for vector in (maximum, total, entropy, coefficients, entropy_coefficients)
    ]
    with torch.cuda.device_of(logits):
        _launch(source, labels.contiguous(), loss_mask, vectors, shard, target, configuration)
    if not is_direct:
        return out.copy_(target)
    # Autograd does not see the write of a kernel. Its version counter protects logits that another backward still needs.
    torch.autograd.graph.increment_version(out)
    return out


def _launch(
    source: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    vectors: list[Tensor | None],
    shard: VocabShard,
    target: Tensor,
    configuration: GradientConfiguration,
) -> None:
    maximum, total, entropy, coefficients, entropy_coefficients = vectors
    num_rows, num_stored = source.shape
    rows, out = flat_rows(source), flat_rows(target)
    splits, per_split = split_rows(num_rows, num_stored, configuration.block, configuration.splits, source.device)
    logits_gradient_kernel[(num_rows, splits)](
        rows.pointer,
        out.pointer,
        labels if loss_mask is None else as_bytes(loss_mask),
        labels,
        maximum,
        total,
        entropy,
        maximum if coefficients is None else coefficients,
        maximum if entropy_coefficients is None else entropy_coefficients,
        shard.inverse_temperature,
        shard.inverse_temperature * LOG2_E,
        shard.num_columns,
        num_stored,
        shard.first_column,
        per_split // ALIGNMENT,
        rows.shift,
        rows.stride,
        out.shift,
        out.stride,
        BLOCK=configuration.block,
        VECTOR=16 // target.itemsize,
        HAS_MASK=loss_mask is not None,
        HAS_COEFFICIENTS=coefficients is not None,
        ENTROPY=entropy_coefficients is not None,
        num_warps=configuration.num_warps,
        enable_fp_fusion=True,
    )
