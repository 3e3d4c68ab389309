"""Computes a head where a sampler kept few ids of each row: their logits alone, and the gradient through them alone.

For a row t with kept ids S (layout/sampling_support.py), a pair is (t, v) with v in S, and k counts the pairs whose columns this tp
rank owns. Where nothing reads the rest of the vocabulary,

    z_tv = x_t . W_v      log_prob_t = z_ta - lse over S of z_t      g_tv = c_t (1_va - e^(z_tv) / sum over S) / temperature,
    dX_t = sum over S of g_tv W_v                                    dW_v = sum over t of g_tv x_t

are 6 k H operations in the place of 6 T V H, and k numbers in the place of T V. Pairs are summed in float32 (float64 for float64)
and never rounded to 16 bits. Sums have one order: of a row the ids', of a column the rows'. So two runs agree in each bit.

Data flow: z [k] -> row statistics [n, 3] by segments -> one all-gather over tp -> log-probabilities; c -> g [k] -> dX by segments
of rows, dW by segments of ids, which are sorted once. The gradient has no collective: the caller adds dX over tp.
Here are the torch functions, which specify the kernels of ops/sparse_head_triton.py. Derivation: docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.layout.groups import Group, all_gather_stack
from megatron_rl.layout.sampling_support import SamplingSupport, neighbouring_rows, offsets_of
from megatron_rl.ops.log_probs_torch import (
    CPU_CHUNK_BYTES,
    CUDA_CHUNK_BYTES,
    RowResult,
    VocabShard,
    merge_shards,
    working_dtype,
)
from megatron_rl.ops.support_scores import gradient_of_kept, statistics_of_kept

# A row with more kept ids is cheaper in a matmul of all columns.
#
# Measured on an H100 (T 8192, H 4096, 151,936 columns, bfloat16, Triton 3.6, 2026-11-28): the fused head, forward and backward into
# main_grad, with sets of one size; milliseconds, the best of five.
#
#     ids of a row       1      2      8     32    128    512
#     pairs            3.5    5.2    6.6   17.8   49.9    227
#     all columns     48.2   49.6   49.0   53.6   56.6    121
#
# Both cost the same at 161 ids, on a CPU at 750 (T 512, H 256, 32,000 columns, float32).
SPARSE_ROW_LIMIT = 128
# A row of the hidden states, one of the weight, and their product: what a pair has in memory while torch multiplies it.
ROWS_OF_A_PAIR = 3


@dataclass(frozen=True, slots=True)
class RowKinds:
    """Row numbers in [0, T), ascending, on the CPU."""

    single: Tensor  # at most one kept id: the score is 0, or -inf where the label is not that id
    sparse: Tensor  # 2 to SPARSE_ROW_LIMIT ids
    dense: Tensor  # more, or the whole vocabulary


def sort_rows(
    support: SamplingSupport,  # on the CPU
    rows: Tensor,  # ascending row numbers, on the CPU
    vocab_size: int,
    *,
    limit: int,  # SPARSE_ROW_LIMIT
) -> RowKinds:
    """The rows by what their sets cost. All tp ranks have the same. A wrong id makes a row dense, where its score is NaN."""
    sizes = support.sizes[rows]
    is_single, is_dense = sizes <= 1, (sizes > limit) | (sizes == vocab_size)
    if not support.is_inside(vocab_size):
        is_wrong = torch.zeros(support.num_rows, dtype=torch.bool)
        is_wrong[support.rows[support.are_wrong(vocab_size)]] = True
        is_dense |= is_wrong[rows]
    is_single &= ~is_dense
    return RowKinds(rows[is_single], rows[~(is_single | is_dense)], rows[is_dense])


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
    columns = support.ids.index_select(0, shift.add_(torch.arange(num_pairs))).long() - shard.first_column
    if num_pairs and (int(columns.min()) < 0 or int(columns.max()) >= shard.num_columns):
        is_owned = (columns >= 0) & (columns < shard.num_columns)
        columns, places = columns[is_owned], places[is_owned]
        bounds = offsets_of(is_owned)[bounds]
    on_host = (rows, columns, places, rows.index_select(0, places), bounds)
    rows, columns, places, tokens, offsets = (part.to(labels.device, non_blocking=True) for part in on_host)
    is_label = (labels - shard.first_column).index_select(0, tokens) == columns
    return Pairs(rows, columns, places, tokens, offsets, is_label, bounds)


def without_zeros(g: Tensor, pairs: Pairs) -> tuple[Tensor, Pairs]:  # [k], on the CPU
    """The pairs that have a gradient: those of clipped rows and of advantage 0 have none."""
    is_needed = g != 0
    if bool(is_needed.all()):
        return g, pairs
    offsets = offsets_of(is_needed)[pairs.offsets]
    of_pairs = {name: getattr(pairs, name)[is_needed] for name in ("columns", "places", "tokens", "is_label")}
    return g[is_needed], replace(pairs, **of_pairs, offsets=offsets, bounds=offsets)


def single_log_probs(
    support: SamplingSupport,  # on the CPU
    rows: Tensor,  # [n] of RowKinds.single, on the CPU
    labels: Tensor,  # [T]
    dtype: torch.dtype,
) -> Tensor:  # [n] on the labels' device
    """0 where the label is the one kept id, else -inf, which the losses count. The gradient is 0: there is nothing to choose."""
    starts, device = support.offsets[rows], labels.device
    ids = torch.where(support.sizes[rows] == 1, torch.cat([support.ids.long(), support.ids.new_zeros(1)])[starts], -1)
    is_label = labels[rows.to(device, non_blocking=True)] == ids.to(device, non_blocking=True)
    return torch.where(is_label, 0.0, -torch.inf).to(dtype)


def multiply_reference(
    hidden: Tensor,  # [T, H]
    weight: Tensor,  # [V_tp, H]
    pairs: Pairs,
    *,
    max_bytes: int,
) -> Tensor:  # [k] float32, or float64
    """z = x_t . W_v of each pair. Products of 16-bit numbers are exact."""
    dtype = working_dtype(weight)
    z = hidden.new_empty(pairs.columns.numel(), dtype=dtype)
    for _, chosen in neighbouring_rows(pairs.bounds, _pairs_at_once(hidden, max_bytes)):
        x = hidden.index_select(0, pairs.tokens[chosen]).to(dtype)
        z[chosen] = x.mul_(weight.index_select(0, pairs.columns[chosen])).sum(-1)
    return z


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


def pair_results(
    z: Tensor,  # [k]
    pairs: Pairs,
    shard: VocabShard,
    tp_group: Group,
    *,
    with_entropy: bool = False,
) -> RowResult:  # [n]
    """Scores and entropy over the kept ids. m is their own maximum: it may lie far below the row's.

    Communication: one all-gather of [n, 3], with entropy [n, 4].
    """
    numbers = (pairs.is_label, pairs.places, pairs.offsets, shard.inverse_temperature)
    statistics = statistics_of_kept(z, *numbers, with_entropy=with_entropy)
    return RowResult(*merge_shards(all_gather_stack(statistics, tp_group), None, shard))


def pair_gradient(
    z: Tensor,  # [k]
    pairs: Pairs,
    result: RowResult,  # [n]
    coefficients: Tensor,  # [n] dL / dlog_prob
    shard: VocabShard,
    entropy_coefficients: Tensor | None = None,  # [n] dL / dentropy
) -> Tensor:  # [k] dL / dz
    """g = (c (1_va - p_v) - e p_v (ln p_v + H)) / temperature, p_v = e^((z - m) / temperature) / total."""
    numbers = (result, coefficients, entropy_coefficients, shard.inverse_temperature)
    return gradient_of_kept(z, pairs.is_label, pairs.places, *numbers).mul_(shard.inverse_temperature)
