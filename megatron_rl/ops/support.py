"""Computes log-probabilities over the ids that a sampler kept, and their gradient, from logits or from hidden states.

S_t is the set of row t, and a pair is (t, v) with v in S_t. With its logit x and the action a of the row

    log_prob_t = z_ta - lse over S_t of z_t     g_tv = c_t (1_va - p_tv) / temperature     z = x / temperature, p = softmax over S_t

    from logits          x is read. The gradient is zeros, or what a term of the entropy writes, which is over the vocabulary; then
                         the pairs of this shard are written. No collective.
    from hidden states   x = X_t . W_v, dX_t = sum over S_t of g_tv W_v, dW_v = sum over t of g_tv X_t: 6 k H operations for the k
                         pairs of this shard in the place of 6 T V H. Pairs are summed in float32 (float64 for float64) and never
                         rounded to 16 bits. The caller adds dX over tp.

Data flow: x [k] -> m, s, t of each row over its pairs [n, 3] -> one all-gather over tp -> the same merge on every rank. Letters as
in log_probs_torch; a set has its own maximum, because kept logits may lie far below the row's. Sums have one order: of a row the
ids', of a column the rows'. So two runs agree in each bit. Nothing synchronises but where a function says so.
The torch functions specify the kernels of ops/support_triton.py. Derivation: docs/losses.md, "Scores over what the sampler kept".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import Group, all_gather_stack
from megatron_rl.layout.sampling_support import SamplingSupport, neighbouring_rows, offsets_of
from megatron_rl.ops.backends import RowKernels, VocabShard, first_order_only, gradient_like
from megatron_rl.ops.log_probs_torch import (
    CPU_CHUNK_BYTES,
    CUDA_CHUNK_BYTES,
    EXPONENT_FLOOR,
    MAXIMUM_FLOOR,
    merge_shards,
    working_dtype,
)

# A row of the hidden states, one of the weight, and their product: what a pair has in memory while torch multiplies it.
ROWS_OF_A_PAIR = 3


def check_support(
    support: object, labels: Tensor, loss_mask: Tensor | None, shard: VocabShard, cu_seqlens: Tensor | None = None
) -> None:
    """Raises DataError for what is no SamplingSupport, and what SamplingSupport.check raises."""
    if not isinstance(support, SamplingSupport):
        raise DataError(
            f"sampling_support is {type(support).__name__}: pass megatron_rl.SamplingSupport(ids, offsets), "
            "SamplingSupport.from_lists(ids of each row), or None"
        )
    support.check(labels.numel(), shard.vocab_size, labels, loss_mask, cu_seqlens)


def compare_supports(agreement: RankAgreement | None, support: SamplingSupport | None, loss_mask: Tensor | None) -> None:
    """Adds the sets of unmasked tokens, which must be equal on ranks that share a softmax."""
    if agreement is None or not agreement.is_active:
        return
    if support is not None and loss_mask is not None:
        support = support.only(loss_mask)
    agreement.add("whether sampling_support is given", support is not None)
    agreement.add("sizes of sampling_support", None if support is None else support.sizes, is_sliced=True)
    agreement.add("ids of sampling_support", None if support is None else support.ids, is_sliced=True)


# Numbers of pairs, from logits and from hidden states


def row_statistics(
    x: Tensor,  # [k] logits of pairs, row after row
    is_label: Tensor,  # [k] bool
    rows: Tensor,  # [k] int64, ascending in [0, n)
    offsets: Tensor,  # [n + 1] int64: pairs of the rows before
    inverse_temperature: float,
) -> Tensor:  # [n, 3]: m, s, t over the pairs, as row_statistics_reference; a row without one is (-1e30, 0, -inf)
    maximum = _over_rows("max", x, offsets, MAXIMUM_FLOOR)
    target = _over_rows("max", torch.where(is_label, x, -torch.inf), offsets, -torch.inf)
    exponentials = (x - maximum[rows]).mul_(inverse_temperature).exp_()
    total = _over_rows("sum", exponentials.double(), offsets, 0.0).to(x.dtype)
    return torch.stack([maximum, total, target], dim=1)


def score_gradient(
    x: Tensor,  # [k] logits of pairs
    is_label: Tensor,  # [k] bool
    rows: Tensor,  # [k] int64 in [0, n)
    maximum: Tensor,  # [n] over the kept ids of all shards
    total: Tensor,  # [n]
    coefficients: Tensor,  # [n] dL / dlog_prob
    inverse_temperature: float,
) -> Tensor:  # [k]: c (1_va - p), which the temperature divides; exactly 0 for a set of one id
    p = (x - maximum[rows]).mul_(inverse_temperature).exp_().div_(total[rows])
    return coefficients.to(x.dtype)[rows] * (is_label.to(x.dtype) - p)


def _over_rows(reduction: str, values: Tensor, offsets: Tensor, initial: float) -> Tensor:  # [k], [n + 1] -> [n]
    """torch reduces the segments in one order; an empty one is `initial`, and without a value torch is not asked."""
    if values.numel() == 0:
        return values.new_full((offsets.numel() - 1,), initial)
    return torch.segment_reduce(values, reduction, offsets=offsets, axis=0, unsafe=True, initial=initial)


# From logits


class SupportLogProbs(torch.autograd.Function):
    """(log-probabilities over the kept ids [T], entropy over the vocabulary [T] or None).

    A label outside its set gives -inf, a wrong id NaN, and so does an empty set on an unmasked row.
    Saves the logits of the pairs and two numbers a row; the logits only where the entropy reads them, or in place.
    Communication: one all-gather over tp of [T, 3], with the entropy another one of [T, 4]. None at size 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        shard: VocabShard,
        tp_group: Group,
        with_entropy: bool,
        inplace: bool,
        kernels: RowKernels,
        support: SamplingSupport,
    ) -> tuple[Tensor, Tensor | None]:
        x = logits.new_empty(support.num_pairs, dtype=working_dtype(logits))
        statistics = x.new_zeros(support.num_rows, 3)
        for rows, pairs, sets in support.blocks():
            x[pairs] = pair_logits(logits[rows], sets, shard)
            is_label = sets.ids == labels[rows][sets.rows]
            statistics[rows] = row_statistics(x[pairs], is_label, sets.rows, sets.offsets, shard.inverse_temperature)
        maximum, total, log_probs, _ = merge_shards(all_gather_stack(statistics, tp_group), loss_mask, shard)
        vocabulary_parts: tuple[Tensor, ...] = ()
        if with_entropy:
            full = kernels.forward(logits, labels, loss_mask, shard, tp_group, with_entropy=True)
            vocabulary_parts = (full.maximum, full.total, full.entropy)
        ctx.support, ctx.shard, ctx.inplace, ctx.kernels = support, shard, inplace, kernels
        ctx.shape = logits.shape, logits.dtype
        ctx.set_materialize_grads(False)
        # In place another backward through these logits must raise, whatever it reads.
        ctx.save_for_backward(logits if with_entropy or inplace else None, labels, loss_mask, x, maximum, total, *vocabulary_parts)
        return log_probs, vocabulary_parts[-1] if with_entropy else None

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """All of the logits' gradient is written. Rows whose coefficients are 0 are 0."""
        logits, labels, loss_mask, x, maximum, total, *vocabulary_parts = ctx.saved_tensors
        support, shard, (shape, dtype) = ctx.support, ctx.shard, ctx.shape
        if logits is None:
            out = torch.empty(shape, dtype=dtype, device=labels.device)
        else:
            out = logits.detach() if ctx.inplace else gradient_like(logits)
        c = torch.zeros_like(total) if gradient is None else gradient
        is_needed = c != 0
        if entropy_gradient is None:
            out.zero_()
        else:
            is_needed |= entropy_gradient != 0
            ctx.kernels.gradient(logits, labels, loss_mask, *vocabulary_parts, None, entropy_gradient, shard, out=out)
        is_needed = is_needed if loss_mask is None else is_needed & loss_mask
        for rows, pairs, sets in support.blocks():
            pair_rows = sets.rows
            is_label = sets.ids == labels[rows][pair_rows]
            kept_parts = (pair_rows, maximum[rows], total[rows], c[rows])
            values = score_gradient(x[pairs], is_label, *kept_parts, shard.inverse_temperature)
            if entropy_gradient is not None:
                entropy_parts = [part[rows] for part in (*vocabulary_parts, entropy_gradient)]
                values += entropy_gradient_of_pairs(x[pairs], pair_rows, entropy_parts, shard.inverse_temperature)
            values = torch.where(is_needed[rows][pair_rows], values.mul_(shard.inverse_temperature), 0.0)
            write_pairs(out[rows], values, sets, shard)
        return out, *[None] * 8


def pair_logits(
    logits: Tensor,  # [T, V_tp]
    support: SamplingSupport,
    shard: VocabShard,
) -> Tensor:  # [nnz] of the working dtype: -inf where another shard has the column, NaN for an id that no vocabulary has
    columns = support.ids.long() - shard.first_column
    x = logits.detach()[support.rows, columns.clamp(0, shard.num_columns - 1)].to(working_dtype(logits))
    x = torch.where((columns >= 0) & (columns < shard.num_columns), x, -torch.inf)
    return x if support.is_inside(shard.vocab_size) else torch.where(support.are_wrong(shard.vocab_size), torch.nan, x)


def entropy_gradient_of_pairs(
    x: Tensor,  # [k] logits of pairs
    rows: Tensor,  # [k] int64 in [0, n)
    row_parts: list[Tensor],  # [n] each: maximum, total and entropy over the vocabulary, dL / dentropy
    inverse_temperature: float,
) -> Tensor:  # [k]: -e p_v (ln p_v + H), as in the kernels of rows, because the pair's place gets one sum, rounded once
    maximum, total, entropy, coefficients = row_parts
    z = (x - maximum[rows]).mul_(inverse_temperature)
    p = z.exp().div_(total[rows])
    return -coefficients.to(x.dtype)[rows] * p * (z.clamp_(min=EXPONENT_FLOOR) + (entropy - total.log())[rows])


def write_pairs(
    out: Tensor,  # [T, V_tp]
    values: Tensor,  # [nnz]
    support: SamplingSupport,
    shard: VocabShard,
) -> None:
    """Writes the values of this shard's pairs into `out`. No two values meet at one place.

    A pair of another shard must not write, and to leave it out would synchronise. So it repeats a write of its row that does no
    harm: the value of the row's first pair here or, in a row without one, what stands in its first column.
    """
    if not support.num_pairs:
        return
    rows, columns = support.rows, support.ids.long() - shard.first_column
    values = values.to(out.dtype)
    if shard.num_columns == shard.vocab_size and support.is_inside(shard.vocab_size):
        out[rows, columns] = values
        return
    is_own = (columns >= 0) & (columns < shard.num_columns)
    # Ids rise in a row, so its pairs in this shard are neighbours.
    first = support.offsets[:-1] + _over_rows("sum", (columns < 0).double(), support.offsets, 0.0).long()
    has_own = _over_rows("sum", is_own.double(), support.offsets, 0.0) > 0
    source = torch.where(is_own, torch.arange(support.num_pairs, device=rows.device), first.clamp(max=support.num_pairs - 1)[rows])
    has_own = has_own[rows]
    places = torch.where(has_own, columns[source], 0)
    out[rows, places] = torch.where(has_own, values[source], out[rows, 0])


# From hidden states


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of n rows whose columns this tp rank owns, by row and then by id."""

    rows: Tensor  # [n] int64 row numbers in [0, T)
    columns: Tensor  # [k] int64: the id's column on this rank
    places: Tensor  # [k] int64: the pair is of row rows[place]
    tokens: Tensor  # [k] int64: rows[places]
    offsets: Tensor  # [n + 1] int64: pairs of the rows before
    is_label: Tensor  # [k] bool
    bounds: Tensor  # `offsets` on the CPU
    are_wrong: Tensor | None = None  # [n] bool: the set has an id that SamplingSupport.check refuses; None: no set has


def make_pairs(
    support: SamplingSupport,  # on the CPU
    rows: Tensor,  # [n] row numbers, on the CPU
    labels: Tensor,  # [T] int64 ids in the full vocabulary, on the device of the head
    shard: VocabShard,
) -> Pairs:
    """The pairs of these rows, on the labels' device. It reads the sets on the host; the copies do not synchronise."""
    starts, sizes = support.offsets[rows], support.sizes[rows]
    bounds = offsets_of(sizes)
    num_pairs = int(bounds[-1])
    places = torch.repeat_interleave(torch.arange(rows.numel()), sizes, output_size=num_pairs)
    shift = torch.repeat_interleave(starts - bounds[:-1], sizes, output_size=num_pairs)
    chosen = shift.add_(torch.arange(num_pairs))
    columns, are_wrong = support.ids.index_select(0, chosen).long() - shard.first_column, None
    if not support.is_inside(shard.vocab_size):
        wrong_pairs = support.are_wrong(shard.vocab_size)[chosen]
        are_wrong = torch.zeros(rows.numel(), dtype=torch.bool).index_fill_(0, places[wrong_pairs], True)
        are_wrong = are_wrong.to(labels.device, non_blocking=True)
    if num_pairs and (int(columns.min()) < 0 or int(columns.max()) >= shard.num_columns):
        is_owned = (columns >= 0) & (columns < shard.num_columns)
        columns, places = columns[is_owned], places[is_owned]
        bounds = offsets_of(is_owned)[bounds]
    on_host = (rows, columns, places, rows.index_select(0, places), bounds)
    rows, columns, places, tokens, offsets = (part.to(labels.device, non_blocking=True) for part in on_host)
    is_label = (labels - shard.first_column).index_select(0, tokens) == columns
    return Pairs(rows, columns, places, tokens, offsets, is_label, bounds, are_wrong)


@dataclass(frozen=True, slots=True)
class PairKernels:
    """multiply(hidden [T, H], weight [V_tp, H], pairs, *, max_bytes) -> x [k]

    add_hidden(g [k], pairs, weight, *, out [T, H], max_bytes): writes the rows of `out` that have a pair here: dX of this shard.

    add_weight(g [k], pairs, hidden, *, out [V_tp, H] float32, max_bytes): adds dW to the rows of `out` that have a pair.
    """

    multiply: Callable[..., Tensor]
    add_hidden: Callable[..., None]
    add_weight: Callable[..., None]


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of the rows of the pairs, with the numbers that their gradient needs."""

    x: Tensor  # [k] logits of the pairs
    maximum: Tensor  # [n] over the kept ids of all shards
    total: Tensor  # [n]
    log_probs: Tensor  # [n]


def score_pairs(
    hidden: Tensor,  # [T, H]
    weight: Tensor,  # [V_tp, H]
    pairs: Pairs,
    shard: VocabShard,
    tp_group: Group,
    kernels: PairKernels,
    *,
    max_bytes: int,
) -> PairScores:
    """A label outside its set gives -inf, a wrong id or an empty set NaN. Communication: one all-gather of [n, 3] over tp."""
    x = kernels.multiply(hidden, weight, pairs, max_bytes=max_bytes)
    statistics = row_statistics(x, pairs.is_label, pairs.places, pairs.offsets, shard.inverse_temperature)
    maximum, total, log_probs, _ = merge_shards(all_gather_stack(statistics, tp_group), None, shard)
    if pairs.are_wrong is not None:
        log_probs = torch.where(pairs.are_wrong, torch.nan, log_probs)
    return PairScores(x, maximum, total, log_probs)


def pair_gradient(scores: PairScores, pairs: Pairs, coefficients: Tensor, shard: VocabShard) -> Tensor:  # c [n] -> g [k]
    row_parts = (pairs.places, scores.maximum, scores.total, coefficients, shard.inverse_temperature)
    return score_gradient(scores.x, pairs.is_label, *row_parts).mul_(shard.inverse_temperature)


def multiply_reference(
    hidden: Tensor,  # [T, H]
    weight: Tensor,  # [V_tp, H]
    pairs: Pairs,
    *,
    max_bytes: int,
) -> Tensor:  # [k] float32, or float64
    """x = X_t . W_v of each pair. Products of 16-bit numbers are exact."""
    dtype = working_dtype(weight)
    logits = hidden.new_empty(pairs.columns.numel(), dtype=dtype)
    for _, chosen in neighbouring_rows(pairs.bounds, _pairs_at_once(hidden, max_bytes)):
        rows = hidden.index_select(0, pairs.tokens[chosen]).to(dtype)
        logits[chosen] = rows.mul_(weight.index_select(0, pairs.columns[chosen])).sum(-1)
    return logits


def add_hidden_reference(g: Tensor, pairs: Pairs, weight: Tensor, *, out: Tensor, max_bytes: int) -> None:
    """Writes dX of this shard to the rows of `out` [T, H]; rows without a pair on this rank get 0."""
    for rows, chosen in neighbouring_rows(pairs.bounds, _pairs_at_once(weight, max_bytes)):
        part = weight.index_select(0, pairs.columns[chosen]).to(g.dtype).mul_(g[chosen, None])
        counts = pairs.offsets[rows.start : rows.stop + 1].diff()
        out[pairs.rows[rows]] = _sum_segments(part, counts, pairs.places[chosen] - rows.start).to(out.dtype)


def add_weight_reference(g: Tensor, pairs: Pairs, hidden: Tensor, *, out: Tensor, max_bytes: int) -> None:
    """Adds dW to the rows of `out` [V_tp, H]. On CUDA it synchronises: the ids of a chunk are counted."""
    order = pairs.columns.argsort(stable=True)
    for chosen in order.split(_pairs_at_once(hidden, max_bytes)):
        part = hidden.index_select(0, pairs.tokens[chosen]).to(g.dtype).mul_(g[chosen, None])
        columns, numbers, counts = pairs.columns[chosen].unique_consecutive(return_inverse=True, return_counts=True)
        # The columns differ, so the addition has no order. An id that two chunks share gets the first one's sum first.
        out.index_add_(0, columns, _sum_segments(part, counts, numbers).to(out.dtype))


def _pairs_at_once(like: Tensor, max_bytes: int) -> int:
    preferred = CUDA_CHUNK_BYTES if like.is_cuda else CPU_CHUNK_BYTES
    return max(1, min(max_bytes, preferred) // max(1, ROWS_OF_A_PAIR * like.shape[1] * working_dtype(like).itemsize))


def _sum_segments(values: Tensor, counts: Tensor, numbers: Tensor) -> Tensor:  # [k, H], [n], [k] ascending in [0, n) -> [n, H]
    """In the order of the values on both devices: index_add has an order on a CPU alone, where it is the faster one."""
    if not values.is_cuda or values.numel() == 0:
        return values.new_zeros(counts.numel(), values.shape[1]).index_add_(0, numbers, values)
    return torch.segment_reduce(values, "sum", lengths=counts, axis=0, unsafe=True, initial=0)
