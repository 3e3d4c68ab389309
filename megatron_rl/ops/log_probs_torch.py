"""Computes log-probabilities and their gradient in torch: the specification of the kernels and the CPU backend.

No fp32 [T, V] but the gradient itself.

Letters as in docs/losses.md: per row and shard m = max x, z = (x - m) / temperature, s = sum e^z, t = x_label or -inf,
w = sum z e^z. m and t are unscaled logits: a difference of two logits near 1e4 is exact, one of their lse is not.
Rows are computed in chunks that stay in the cache: on a CPU a pass over memory costs more than the exponential.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_rl.layout.groups import Gather, Group, all_gather_stack
from megatron_rl.ops.backends import RowResult, VocabShard

# A maximum starts here, not at -inf, so that a row or shard without a finite logit gives no inf - inf.
MAXIMUM_FLOOR = -1e30
# exp(-800) is 0, in float64 too, and 0 x -800 is 0: a -inf column adds exactly 0 to the entropy sum. NaN passes a clamp.
EXPONENT_FLOOR = -800.0
# Fits the last-level cache; within 3 % of the best on [2048, 32000] among 0.5, 1, 2, 4 and 8 MiB with one and two threads.
CPU_CHUNK_BYTES = 4 * 1024**2
# On a GPU a chunk only has to bound memory; launches cost more than cache misses.
CUDA_CHUNK_BYTES = 256 * 1024**2


def row_statistics_reference(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool; None: every row counts
    shard: VocabShard,
    *,
    with_entropy: bool,
) -> Tensor:  # [T, 3 or 4] float32: m, s, t and, with entropy, w; masked rows (0, 1, 0, 0)
    """Reads each row once. Masked rows are not read on the CPU; on CUDA they are read, because finding them would synchronise."""
    dtype = working_dtype(logits)
    loss_mask = torch.ones_like(labels, dtype=torch.bool) if loss_mask is None else loss_mask
    statistics = logits.new_zeros(logits.shape[0], 4 if with_entropy else 3, dtype=dtype)
    statistics[:, 1] = 1.0
    for rows, scratch in _chunks(logits, loss_mask, dtype, shard.num_columns):
        x = _load(logits, rows, shard.num_columns, dtype)
        maximum = x.amax(-1, keepdim=True).clamp_(min=MAXIMUM_FLOOR)
        label = _local_labels(labels[rows], shard)
        owned = (label >= 0) & (label < shard.num_columns)
        target = x.gather(1, label.clamp(0, shard.num_columns - 1)[:, None])[:, 0]
        z = torch.sub(x, maximum, out=scratch[: x.shape[0]])
        if shard.inverse_temperature != 1.0:
            z.mul_(shard.inverse_temperature)
        statistics[rows, 0] = maximum[:, 0]
        statistics[rows, 2] = torch.where(owned, target, -torch.inf)
        if with_entropy:
            exponent = z.clamp_(min=EXPONENT_FLOOR)
            exponential = exponent.exp()
            statistics[rows, 1] = exponential.sum(-1)
            statistics[rows, 3] = exponential.mul_(exponent).sum(-1)
        else:
            statistics[rows, 1] = z.exp_().sum(-1)
    return statistics


def merge_shards(
    gathered: Tensor,  # [tp_size, T, 3 or 4]
    loss_mask: Tensor | None,  # [T] bool; None: every row counts
    shard: VocabShard,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # maximum [T], total [T], log_probs [T], entropy [T]
    """Merges the shards in rank order: the same additions give the same bits on each rank.

        maximum = max m     total = sum e^((m - maximum) / temperature) s     log_prob = (t - maximum) / temperature - ln total

    t is merged by max, with -inf on the other ranks. So a label that no rank owns gives -inf and is found; a sum with zeros would
    give -lse without an error. Without w the entropy is 0. log_prob and entropy are 0 where masked.
    """
    m, s, t = gathered[..., 0], gathered[..., 1], gathered[..., 2]
    maximum = m.amax(0)
    shift = (m - maximum).mul_(shard.inverse_temperature).clamp_(min=MAXIMUM_FLOOR)
    scale = shift.exp()
    total = (scale * s).sum(0)
    log_total = total.log()
    log_probs = (t.amax(0) - maximum) * shard.inverse_temperature - log_total
    zero = torch.zeros_like(log_probs)
    loss_mask = torch.ones_like(maximum, dtype=torch.bool) if loss_mask is None else loss_mask
    entropy = zero
    if gathered.shape[-1] == 4:
        entropy = log_total - (scale * (gathered[..., 3] + shift * s)).sum(0) / total
    return maximum, total, torch.where(loss_mask, log_probs, zero), torch.where(loss_mask, entropy, zero)


def row_results_torch(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    shard: VocabShard,
    tp_group: Group,
    *,
    with_entropy: bool,
    gather: Gather = all_gather_stack,
) -> RowResult:
    """Row statistics, one all-gather over tp_group, the same merge on every rank."""
    statistics = row_statistics_reference(logits, labels, loss_mask, shard, with_entropy=with_entropy)
    return RowResult(*merge_shards(gather(statistics, tp_group), loss_mask, shard))


def logits_gradient_torch(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool; None: every row counts
    maximum: Tensor,  # [T] over all shards
    total: Tensor,  # [T] over all shards
    entropy: Tensor,  # [T]
    coefficients: Tensor | None,  # [T] dL / dlog_prob
    entropy_coefficients: Tensor | None,  # [T] dL / dentropy
    shard: VocabShard,
    *,
    out: Tensor,  # [T, V_tp] of any floating dtype; may be the logits' own storage
) -> Tensor:
    """dlogits_j = [ c (delta_j - p_j) - e p_j (ln p_j + entropy) ] / temperature, p_j = e^(z_j) / total. All of `out` is written.

    On the CPU, rows whose coefficients are 0 (masked, A = 0, clipped) are not read.
    """
    dtype = working_dtype(logits)
    if coefficients is None:
        coefficients = torch.zeros_like(total)
    loss_mask = torch.ones_like(labels, dtype=torch.bool) if loss_mask is None else loss_mask
    is_needed = loss_mask & (coefficients != 0)
    if entropy_coefficients is not None:
        is_needed |= loss_mask & (entropy_coefficients != 0)
    out[:, shard.num_columns :] = 0
    if not logits.is_cuda and not bool(is_needed.all()):
        out.index_fill_(0, (~is_needed).nonzero()[:, 0], 0)
    for rows, scratch in _chunks(logits, is_needed, dtype, shard.num_columns):
        x = _load(logits, rows, shard.num_columns, dtype)
        direct = dtype == out.dtype and isinstance(rows, slice)
        gradient = torch.sub(
            x,
            maximum[rows, None],
            out=out[rows, : shard.num_columns] if direct else scratch[: x.shape[0]],
        )
        if shard.inverse_temperature != 1.0:
            gradient.mul_(shard.inverse_temperature)
        c = (coefficients[rows] * shard.inverse_temperature).to(dtype)
        if entropy_coefficients is not None:
            entropy_and_log_p = gradient.clamp_(min=EXPONENT_FLOOR) + (entropy - total.log())[rows, None]
            e = (entropy_coefficients[rows] * shard.inverse_temperature).to(dtype)
            factors = entropy_and_log_p.mul_(-e[:, None]).sub_(c[:, None]).div_(total[rows, None])
            gradient.exp_().mul_(factors)
        else:
            gradient.exp_().mul_(-(c / total[rows])[:, None])
        label = _local_labels(labels[rows], shard)
        owned = (label >= 0) & (label < shard.num_columns)
        gradient.scatter_add_(1, label.clamp(0, shard.num_columns - 1)[:, None], torch.where(owned, c, 0.0)[:, None])
        if logits.is_cuda:
            gradient = torch.where(is_needed[rows, None], gradient, 0.0)
        if not direct or logits.is_cuda:
            out[rows, : shard.num_columns] = gradient.to(out.dtype)
    return out


def working_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float32, or float64 for float64 logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor, is_needed: Tensor, dtype: torch.dtype, num_columns: int) -> Iterator[tuple[slice | Tensor, Tensor]]:
    """(rows, scratch): rows are a slice where they are consecutive, which gives a view, else an index. All chunks share scratch."""
    chunk_bytes = CUDA_CHUNK_BYTES if logits.is_cuda else CPU_CHUNK_BYTES
    num_rows = max(1, chunk_bytes // max(num_columns * dtype.itemsize, 1))
    num_rows = min(num_rows, max(logits.shape[0], 1))
    scratch = torch.empty(num_rows, num_columns, dtype=dtype, device=logits.device)
    needed = None if logits.is_cuda or bool(is_needed.all()) else is_needed.nonzero()[:, 0]
    for start in range(0, logits.shape[0] if needed is None else needed.numel(), num_rows):
        if needed is None:
            yield slice(start, min(start + num_rows, logits.shape[0])), scratch
            continue
        rows = needed[start : start + num_rows]
        first, last = int(rows[0]), int(rows[-1])
        yield (slice(first, last + 1) if last - first + 1 == rows.numel() else rows), scratch


def _load(logits: Tensor, rows: slice | Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    return logits[rows, :num_columns].to(dtype)


def _local_labels(labels: Tensor, shard: VocabShard) -> Tensor:
    return labels - shard.first_column
