"""Computes row statistics, their merge over splits and shards, and the gradient of the logits: log_probs_torch in Triton.

    one shard, one split    row_statistics writes the finished rows
    one shard, splits       row_statistics -> combine
    shards                  row_statistics [-> combine] -> one all-gather [tp, T, 3 or 4] -> combine, in one order on every rank

    list_rows       mask [T] -> the unmasked rows and their number, on the device, so that the host does not wait
    row_statistics  logits [T, V_tp] -> (m, s, t, w) of each row and split, or with one split and one shard the finished row; each
                    unmasked row is read once, a masked row is not read
    combine         the statistics of splits or shards -> of the whole row, or the finished row
    logits_gradient the gradient of the logits, in place or into another tensor: one read and one write of each logit; rows without
                    a coefficient, and padding columns, are only written

Letters and units as in log_probs_torch. The exponent is (x - m) * qk with qk = log2(e) / temperature: the difference of two
logits near 1e4 is exact, x * qk - m * qk is not. Nothing synchronises. Derivation and layout: docs/kernels.md.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.layout.groups import Gather, Group, all_gather_stack
from megatron_rl.ops.backends import (
    ALIGNMENT,
    GRADIENT_DEFAULTS,
    STATISTICS_DEFAULTS,
    GradientConfiguration,
    RowResult,
    StatisticsConfiguration,
    VocabShard,
    flat_rows,
    gradient_like,
    has_flat_rows,
    split_rows,
)

# Rows of one program of list_rows, and entries of the mask that it reads at once.
LIST_BLOCK = 4096


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["MASK", "ORDER", "NUM_ACTIVE"])
def list_rows_kernel(MASK, ORDER, NUM_ACTIVE, num_rows, BLOCK: tl.constexpr):
    """Grid (blocks of rows). ORDER: first the unmasked rows, then the masked ones, both ascending.

    Each program counts the whole mask, a byte a row, so that it waits for no other program.
    """
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0) * BLOCK
    everywhere = tl.zeros((BLOCK,), tl.int32)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        rows = start + lanes
        is_active = tl.load(MASK + rows, mask=rows < num_rows, other=0).to(tl.int32)
        everywhere += is_active
        before += tl.where(rows < first, is_active, 0)
    num_active = tl.sum(everywhere, 0)
    rows = first + lanes
    is_active = tl.load(MASK + rows, mask=rows < num_rows, other=0).to(tl.int32)
    active_before = tl.sum(before, 0) + tl.cumsum(is_active, 0) - is_active
    position = tl.where(is_active != 0, active_before, num_active + rows - active_before)
    tl.store(ORDER + position, rows, mask=rows < num_rows)
    if first == 0:
        tl.store(NUM_ACTIVE, num_active)


def list_rows(
    loss_mask: Tensor,  # [T] bool
) -> tuple[Tensor, Tensor]:  # order [T] int32: unmasked rows, then masked ones; num_active [1] int32
    """Lists the unmasked rows on the device. On the host that would synchronise."""
    order, num_active = (torch.empty(n, dtype=torch.int32, device=loss_mask.device) for n in (loss_mask.shape[0], 1))
    list_rows_kernel[(triton.cdiv(loss_mask.shape[0], LIST_BLOCK),)](
        as_bytes(loss_mask), order, num_active, loss_mask.shape[0], BLOCK=LIST_BLOCK, num_warps=8, enable_fp_fusion=True
    )
    return order, num_active


def as_bytes(
    mask: Tensor,  # [T] bool
) -> Tensor:  # [T] uint8 in the same memory
    return mask.contiguous().view(torch.uint8)


LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def row_result(maximum, total, target, weighted, inverse_temperature, ENTROPY: tl.constexpr):  # log_prob, entropy
    """`weighted` is in log2 units. Without ENTROPY the entropy is 0."""
    log_total = tl.log(total)
    log_prob = (target - maximum) * inverse_temperature - log_total
    entropy = tl.zeros_like(total)
    if ENTROPY:
        entropy = log_total - weighted * LN_2 / total
    return log_prob, entropy


@triton.jit
def store_row_result(
    OUT, LOG_PROBS, ENTROPIES, row, num_rows, maximum, total, target, weighted, inverse_temperature, mask, ENTROPY: tl.constexpr
):
    """Writes the RowResult of merged statistics: OUT [2, T] gets maximum and total."""
    log_prob, entropy = row_result(maximum, total, target, weighted, inverse_temperature, ENTROPY)
    tl.store(OUT + row, maximum, mask=mask)
    tl.store(OUT + num_rows + row, total, mask=mask)
    tl.store(LOG_PROBS + row, log_prob, mask=mask)
    tl.store(ENTROPIES + row, entropy, mask=mask)


def row_result_memory(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum and total [2, T], log_probs [T], entropy [T]). The last two are no views: callers may change them in place."""
    bounds = torch.empty((2, num_rows), dtype=torch.float32, device=device)
    return bounds, bounds.new_empty(num_rows), bounds.new_empty(num_rows)


LOG2_E = math.log2(math.e)
# Finite "minus infinity" of a running maximum: it avoids inf - inf without a check of each element.
MAXIMUM_FLOOR = tl.constexpr(-1e30)
# In log2 units: exp2(-300) is 0 in float32 and 0 x -300 is 0, while 0 x -inf would be NaN.
EXPONENT_FLOOR = tl.constexpr(-300.0)
# By default tl.maximum(NaN, x) is x, so that a NaN logit would be lost.
KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)
UNIT = tl.constexpr(ALIGNMENT)
EVICT_FIRST = tl.constexpr("evict_first")  # a text as the default would be no constant before Triton 3.7


@triton.jit
def rescaling_exponent(x, maximum, qk, FLOOR: tl.constexpr):
    exponent = (x - maximum) * qk
    if FLOOR:
        exponent = tl.maximum(exponent, EXPONENT_FLOOR, propagate_nan=KEEP_NAN)
    return exponent


@triton.jit
def _add_tile(x, m, s, w, qk, ENTROPY: tl.constexpr):
    exponent = rescaling_exponent(x, m[:, None], qk, ENTROPY)
    exponential = tl.exp2(exponent)
    s += tl.sum(exponential, 1)
    if ENTROPY:
        w += tl.sum(exponential * exponent, 1)
    return s, w


@triton.jit
def _rescale(m, new, s, w, qk, ENTROPY: tl.constexpr):
    """Converts sums with maximum m to a larger maximum. The floor keeps -inf x 0 out of both products."""
    exponent = rescaling_exponent(m, new, qk, True)
    factor = tl.exp2(exponent)
    if ENTROPY:
        w = factor * (w + exponent * s)
    return s * factor, w


@triton.jit
def _load_tile(base, firsts, start, end, VECTOR: tl.constexpr, MASKED: tl.constexpr, EVICTION: tl.constexpr):
    """[L, VECTOR] from column `start` on. A masked load takes or leaves whole vectors, so that it is 128 bits wide too."""
    address = base + start + firsts + tl.arange(0, VECTOR)[None, :]
    if MASKED:
        x = tl.load(address, mask=start + firsts < end, other=-float("inf"), eviction_policy=EVICTION)
    else:
        x = tl.load(address, eviction_policy=EVICTION)
    return x.to(tl.float32)


@triton.jit
def _add_tiles(
    base,
    firsts,
    start,
    end,
    m,
    s,
    w,
    qk,
    STEP: tl.constexpr,
    U: tl.constexpr,
    VECTOR: tl.constexpr,
    ENTROPY: tl.constexpr,
    MASKED: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Loads U tiles of [L, VECTOR] together and rescales once. One tile of [L, U x VECTOR] would exchange data between threads."""
    x0 = _load_tile(base, firsts, start, end, VECTOR, MASKED, EVICTION)
    new = tl.maximum(m, tl.max(x0, 1))
    if U >= 2:
        x1 = _load_tile(base, firsts, start + STEP, end, VECTOR, MASKED, EVICTION)
        new = tl.maximum(new, tl.max(x1, 1))
    if U >= 4:
        x2 = _load_tile(base, firsts, start + 2 * STEP, end, VECTOR, MASKED, EVICTION)
        x3 = _load_tile(base, firsts, start + 3 * STEP, end, VECTOR, MASKED, EVICTION)
        new = tl.maximum(new, tl.maximum(tl.max(x2, 1), tl.max(x3, 1)))
    s, w = _rescale(m, new, s, w, qk, ENTROPY)
    s, w = _add_tile(x0, new, s, w, qk, ENTROPY)
    if U >= 2:
        s, w = _add_tile(x1, new, s, w, qk, ENTROPY)
    if U >= 4:
        s, w = _add_tile(x2, new, s, w, qk, ENTROPY)
        s, w = _add_tile(x3, new, s, w, qk, ENTROPY)
    return new, s, w


@triton.jit
def statistics_of_row(
    X,
    LABELS,
    row,
    split,
    qk,
    num_columns,
    first_column,
    units_per_split,
    shift,
    stride,
    L: tl.constexpr,
    U: tl.constexpr,
    VECTOR: tl.constexpr,
    ENTROPY: tl.constexpr,
    EVICTION: tl.constexpr = EVICT_FIRST,
):  # m, s, t, w of this split's columns; w in log2 units
    """Full tiles without a mask, then masked whole vectors, then the columns left at both ends. L x VECTOR is at least 2 UNIT.

    Every lane keeps its own m, s and w; threads exchange nothing before the end of the row.
    """
    STEP: tl.constexpr = L * VECTOR
    first = row * stride + shift
    head = ((-first) & (UNIT - 1)).to(tl.int32)
    # From here on columns count from the first aligned one. The compiler can see that the address is a multiple of UNIT.
    low = split * units_per_split * UNIT
    high = tl.minimum(low + units_per_split * UNIT, num_columns - head)
    base = X + ((first + head) // UNIT + split * units_per_split) * UNIT
    column = tl.load(LABELS + row) - first_column - head
    is_owned = (column >= tl.where(split == 0, -head, low)) & (column < high)
    target = tl.load(base + tl.where(is_owned, column - low, 0), mask=is_owned, other=-float("inf")).to(tl.float32)

    m = tl.full((L,), MAXIMUM_FLOOR, tl.float32)
    s = tl.zeros((L,), tl.float32)
    w = tl.zeros((L,), tl.float32)
    firsts = tl.arange(0, L)[:, None] * VECTOR
    length = tl.maximum(high - low, 0)
    vector_end = length // VECTOR * VECTOR
    full_end = length // (STEP * U) * (STEP * U)
    for start in range(0, full_end, STEP * U):
        m, s, w = _add_tiles(base, firsts, start, vector_end, m, s, w, qk, STEP, U, VECTOR, ENTROPY, False, EVICTION)
    if full_end < vector_end:
        m, s, w = _add_tiles(base, firsts, full_end, vector_end, m, s, w, qk, STEP, U, VECTOR, ENTROPY, True, EVICTION)
    # Up to 7 columns before the first aligned one (in the first split), and up to 7 after the last whole vector.
    if ((split == 0) & (head > 0)) | (vector_end < length):
        columns = tl.where(firsts < UNIT, firsts - UNIT, vector_end + firsts - UNIT) + tl.arange(0, VECTOR)[None, :]
        inside = (columns >= tl.where(split == 0, -head, 0)) & (columns < high - low)
        x = tl.load(base + columns, mask=inside, other=-float("inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(x, 1))
        s, w = _rescale(m, new, s, w, qk, ENTROPY)
        s, w = _add_tile(x, new, s, w, qk, ENTROPY)
        m = new

    maximum = tl.max(m, 0)
    exponent = rescaling_exponent(m, maximum, qk, True)
    factor = tl.exp2(exponent)
    total = tl.sum(factor * s, 0)
    weighted = total
    if ENTROPY:
        weighted = tl.sum(factor * (w + exponent * s), 0)
    return maximum, total, target, weighted


@triton.jit(
    # One binary for all values.
    do_not_specialize="inverse_temperature qk num_rows num_columns first_column units_per_split shift stride".split(),
    do_not_specialize_on_alignment=["ORDER", "NUM_ACTIVE", "LABELS", "OUT", "LOG_PROBS", "ENTROPIES"],
)
def row_statistics_kernel(
    X,
    ORDER,
    NUM_ACTIVE,
    LABELS,
    OUT,
    LOG_PROBS,
    ENTROPIES,
    inverse_temperature,
    qk,
    num_rows,
    num_columns,
    first_column,
    units_per_split,
    shift,
    stride,
    L: tl.constexpr,
    U: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ENTROPY: tl.constexpr,
    FINISH: tl.constexpr,
):
    """Grid (rows, splits). OUT [splits, T, 3 or 4], or with FINISH (one split, one shard) [2, T] and RowResult's other two vectors.

    A masked row is (0, 1, 0, 0) in both and is not loaded.
    """
    program = tl.program_id(0)
    split = tl.program_id(1)
    maximum = 0.0
    total = 1.0
    target = 0.0
    weighted = 0.0
    if HAS_MASK:
        row = tl.load(ORDER + program).to(tl.int64)
        if program < tl.load(NUM_ACTIVE):
            maximum, total, target, weighted = statistics_of_row(
                X, LABELS, row, split, qk, num_columns, first_column, units_per_split, shift, stride, L, U, VECTOR, ENTROPY
            )
    else:
        row = program.to(tl.int64)
        maximum, total, target, weighted = statistics_of_row(
            X, LABELS, row, split, qk, num_columns, first_column, units_per_split, shift, stride, L, U, VECTOR, ENTROPY
        )
    if FINISH:
        store_row_result(
            OUT, LOG_PROBS, ENTROPIES, row, num_rows, maximum, total, target, weighted, inverse_temperature, None, ENTROPY
        )
    else:
        out = OUT + (split.to(tl.int64) * num_rows + row) * (4 if ENTROPY else 3)
        tl.store(out, maximum)
        tl.store(out + 1, total)
        tl.store(out + 2, target)
        if ENTROPY:
            tl.store(out + 3, weighted * LN_2)


def launch_row_statistics(
    logits: Tensor,  # [T, V_tp], T > 0
    labels: Tensor,  # [T] int64
    listed: tuple[Tensor, Tensor] | None,  # from list_rows; None: every row counts
    shard: VocabShard,
    *,
    with_entropy: bool,
    can_finish: bool,
    configuration: StatisticsConfiguration,
) -> tuple[Tensor, RowResult | None]:  # parts [splits, T, 3 or 4]; the finished rows, where no merge is needed
    """One launch. Logits with strided columns are copied."""
    num_rows = logits.shape[0]
    logits = logits if has_flat_rows(logits) else logits.contiguous()
    rows, vector = flat_rows(logits), 16 // logits.itemsize
    splits, per_split = split_rows(
        num_rows, logits.shape[1], configuration.lanes * vector * configuration.tiles, configuration.splits, logits.device
    )
    finish = can_finish and splits == 1
    if finish:
        out, log_probs, entropies = row_result_memory(num_rows, logits.device)
    else:
        out = torch.empty((splits, num_rows, 4 if with_entropy else 3), dtype=torch.float32, device=logits.device)
        log_probs = entropies = out
    labels = labels.contiguous()
    order, num_active = (labels, labels) if listed is None else listed
    row_statistics_kernel[(num_rows, splits)](
        rows.pointer,
        order,
        num_active,
        labels,
        out,
        log_probs,
        entropies,
        shard.inverse_temperature,
        shard.inverse_temperature * LOG2_E,
        num_rows,
        shard.num_columns,
        shard.first_column,
        per_split // ALIGNMENT,
        rows.shift,
        rows.stride,
        L=configuration.lanes,
        U=configuration.tiles,
        VECTOR=vector,
        HAS_MASK=listed is not None,
        ENTROPY=with_entropy,
        FINISH=finish,
        num_warps=configuration.num_warps,
        enable_fp_fusion=True,
    )
    return out, RowResult(out[0], out[1], log_probs, entropies) if finish else None


# Rows that one program merges; the launch costs more than the merge.
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
    """Merges PARTS [parts, T, 3 or 4] from the first to the last: the same additions give the same bits on every rank.

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
    """row_statistics_reference in Triton. Masked rows are not loaded."""
    with torch.cuda.device_of(logits):
        if logits.shape[0] == 0:
            return logits.new_empty((0, 4 if with_entropy else 3), dtype=torch.float32)
        listed = None if loss_mask is None else list_rows(loss_mask)
        parts, _ = launch_row_statistics(
            logits, labels, listed, shard, with_entropy=with_entropy, can_finish=False, configuration=configuration
        )
        return parts[0] if parts.shape[0] == 1 else _combine(parts, loss_mask, shard, finish=False)[0]


def merge_shards_triton(
    gathered: Tensor,  # [parts, T, 3 or 4]
    loss_mask: Tensor | None,  # [T] bool
    shard: VocabShard,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # maximum [T], total [T], log_probs [T], entropy [T]
    """merge_shards in Triton."""
    with torch.cuda.device_of(gathered):
        if gathered.shape[1] == 0:
            bounds, log_probs, entropies = gathered.new_empty((2, 0)), gathered.new_empty(0), gathered.new_empty(0)
        else:
            bounds, log_probs, entropies = _combine(gathered, loss_mask, shard, finish=True)
        return bounds[0], bounds[1], log_probs, entropies


def row_results_triton(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    shard: VocabShard,
    tp_group: Group,
    *,
    with_entropy: bool,
    gather: Gather = all_gather_stack,
    configuration: StatisticsConfiguration = STATISTICS_DEFAULTS,
) -> RowResult:
    """row_results_torch in Triton. One launch, and one more each for a mask, for splits and for shards.

    Communication: one all-gather of [T, 3 or 4] over tp_group; none at size 1.
    """
    if tp_group.size() > 1:
        statistics = row_statistics_triton(logits, labels, loss_mask, shard, with_entropy=with_entropy, configuration=configuration)
        return RowResult(*merge_shards_triton(gather(statistics, tp_group), loss_mask, shard))
    with torch.cuda.device_of(logits):
        if logits.shape[0] == 0:
            return RowResult(*logits.new_empty((4, 0), dtype=torch.float32).unbind(0))
        listed = None if loss_mask is None else list_rows(loss_mask)
        parts, rows = launch_row_statistics(
            logits, labels, listed, shard, with_entropy=with_entropy, can_finish=True, configuration=configuration
        )
        if rows is not None:
            return rows
        return RowResult(*merge_shards_triton(parts, loss_mask, shard))


def _combine(parts: Tensor, loss_mask: Tensor | None, shard: VocabShard, *, finish: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[parts, T, k] -> with `finish` the tensors of row_result_memory, else [T, k] three times."""
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
    return out, log_probs, entropies


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
def edge_columns(head, split, vector_end, length):
    """Up to 7 columns before the first aligned one (in the first split), and up to 7 after the last whole vector."""
    step = tl.arange(0, 2 * UNIT)
    columns = tl.where(step < UNIT, step - UNIT, vector_end + step - UNIT)
    return columns, (columns >= tl.where(split == 0, -head, 0)) & (columns < length)


@triton.jit
def write_gradient_of_row(
    X,
    OUT,
    row,
    split,
    is_wanted,
    label,  # the row's, counted from this shard's first column
    maximum,
    total,
    entropy,
    c,
    e,
    scales,  # inverse_temperature, qk
    widths,  # num_columns, num_stored
    memory,  # units_per_split, shift, stride, out_shift, out_stride
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ENTROPY: tl.constexpr,
    BACKWARDS: tl.constexpr = False,
):
    """The gradient of one split of a row; zeros without a read where it is not wanted.

    OUT may be X's memory: a thread reads a logit before it writes it, no other reads it. BACKWARDS: the last full block first.
    """
    inverse_temperature, qk = scales
    num_columns, num_stored = widths
    units_per_split, shift, stride, out_shift, out_stride = memory
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
    if is_wanted:
        log2_total = tl.log2(total)
        label_here = tl.where((label >= 0) & (label < num_columns), label - head - low, -(2**30)).to(tl.int32)
        scaled_c = c * inverse_temperature
        p_factor = -scaled_c
        log_p_factor = p_factor
        if ENTROPY:
            scaled_e = e * inverse_temperature
            p_factor -= scaled_e * entropy
            log_p_factor = -scaled_e * LN_2
        real = num_columns - head - low
        full_end = tl.maximum(tl.minimum(length, real), 0) // BLOCK * BLOCK
        for step in range(0, full_end, BLOCK):
            offset = step
            if BACKWARDS:
                offset = full_end - BLOCK - step
            x = tl.load(source + offset + lanes, eviction_policy="evict_first").to(tl.float32)
            is_label = (label_here - offset - firsts) == steps
            gradient = _gradient(x, is_label, maximum, log2_total, scaled_c, p_factor, log_p_factor, qk, ENTROPY)
            tl.store(target + offset + lanes, gradient.to(OUT.dtype.element_ty))
        if full_end < vector_end:
            # The mask takes or leaves whole vectors, so that this block is 128 bits wide too. Padding that it reads is not used.
            inside = full_end + firsts < vector_end
            x = tl.load(source + full_end + lanes, mask=inside, other=-float("inf")).to(tl.float32)
            is_label = (label_here - full_end - firsts) == steps
            gradient = _gradient(x, is_label, maximum, log2_total, scaled_c, p_factor, log_p_factor, qk, ENTROPY)
            gradient = tl.where(full_end + lanes < real, gradient, 0.0)
            tl.store(target + full_end + lanes, gradient.to(OUT.dtype.element_ty), mask=inside)
        for offset in range(full_end + BLOCK, vector_end, BLOCK):
            tl.store(target + offset + lanes, zeros, mask=offset + firsts < vector_end)
        if has_edges:
            columns, inside = edge_columns(head, split, vector_end, length)
            x = tl.load(source + columns, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = _gradient(x, columns == label_here, maximum, log2_total, scaled_c, p_factor, log_p_factor, qk, ENTROPY)
            gradient = tl.where(columns < real, gradient, 0.0)
            tl.store(target + columns, gradient.to(OUT.dtype.element_ty), mask=inside)
    else:
        for offset in range(0, vector_end, BLOCK):
            tl.store(target + offset + lanes, zeros, mask=offset + firsts < vector_end)
        if has_edges:
            columns, inside = edge_columns(head, split, vector_end, length)
            tl.store(target + columns, tl.zeros((2 * UNIT,), OUT.dtype.element_ty), mask=inside)


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
    """Grid (rows, splits). OUT may be X's memory."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    is_wanted = num_columns > 0  # the next three loads start at once; the coefficients of a masked row are not used
    if HAS_MASK:
        is_wanted = is_wanted & (tl.load(MASK + row) != 0)
    c, e, entropy = 0.0, 0.0, 0.0
    has_coefficient = False
    if HAS_COEFFICIENTS:
        c = tl.load(COEFFICIENTS + row)
        has_coefficient = c != 0.0
    if ENTROPY:
        e = tl.load(ENTROPY_COEFFICIENTS + row)
        has_coefficient = has_coefficient | (e != 0.0)
    is_wanted = is_wanted & has_coefficient
    if ENTROPY:
        entropy = tl.load(ENTROPIES + row, mask=is_wanted, other=0.0)
    write_gradient_of_row(
        X,
        OUT,
        row,
        split,
        is_wanted,
        tl.load(LABELS + row, mask=is_wanted, other=0) - first_column,
        tl.load(MAXIMUM + row, mask=is_wanted, other=0.0),
        tl.load(TOTAL + row, mask=is_wanted, other=1.0),
        entropy,
        c,
        e,
        (inverse_temperature, qk),
        (num_columns, num_stored),
        (units_per_split, shift, stride, out_shift, out_stride),
        BLOCK,
        VECTOR,
        ENTROPY,
    )


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
    """logits_gradient_torch in Triton, one launch. Autograd's version counters see the write of `out`.

    Logits with strided columns are copied first. If `out` has other aligned columns than the logits, the gradient is copied into it
    at the end; gradient_like makes a tensor with the same ones.
    """
    if logits.numel() == 0:
        return out
    source = logits if has_flat_rows(logits) else logits.contiguous()
    is_direct = has_flat_rows(out) and flat_rows(out).is_aligned_with(flat_rows(source))
    target = out if is_direct else gradient_like(source, out.dtype)
    maximum, total, entropy = (vector.to(torch.float32).contiguous() for vector in (maximum, total, entropy))
    c, e = (None if vector is None else vector.to(torch.float32).contiguous() for vector in (coefficients, entropy_coefficients))
    labels, (num_rows, num_stored) = labels.contiguous(), source.shape
    rows, written = flat_rows(source), flat_rows(target)
    with torch.cuda.device_of(logits):
        splits, per_split = split_rows(num_rows, num_stored, configuration.block, configuration.splits, source.device)
        logits_gradient_kernel[(num_rows, splits)](
            rows.pointer,
            written.pointer,
            labels if loss_mask is None else as_bytes(loss_mask),
            labels,
            maximum,
            total,
            entropy,
            maximum if c is None else c,
            maximum if e is None else e,
            shard.inverse_temperature,
            shard.inverse_temperature * LOG2_E,
            shard.num_columns,
            num_stored,
            shard.first_column,
            per_split // ALIGNMENT,
            rows.shift,
            rows.stride,
            written.shift,
            written.stride,
            BLOCK=configuration.block,
            VECTOR=16 // target.itemsize,
            HAS_MASK=loss_mask is not None,
            HAS_COEFFICIENTS=c is not None,
            ENTROPY=e is not None,
            num_warps=configuration.num_warps,
            enable_fp_fusion=True,
        )
    if not is_direct:
        return out.copy_(target)
    # Autograd does not see the write of a kernel. Its version counter protects logits that another backward still needs.
    torch.autograd.graph.increment_version(out)
    return out
