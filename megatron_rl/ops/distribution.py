"""Compares the softmax p of each row with a teacher's q: a divergence of their buckets, and its gradient by the logits.

With all of the teacher's logits each column of the vocabulary is a bucket. With its top K ids each of these columns is one, and all
other columns together are the last: the tail. So nothing is left out, and the value is at least 0 and at most that of all columns.

    D = sum_b f(p_b, q_b)        dD/dlogits_v = p_v (h_b(v) - sum_b p_b h_b) / temperature,    h_b = df/dp_b up to one constant

The policy's tail is the logarithm of the sum of p over its columns: 1 - the sum in K has no digit left where K holds almost all.
The teacher's is 1 - the sum of q in K, and at least TAIL_FLOOR: a constant of the data, so that no gradient is lost.
Everything is in float32 (float64 for float64 logits), in blocks of rows whose numbers stay in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import Group, all_gather_stack
from megatron_rl.ops.backends import RowKernels, RowResult, VocabShard
from megatron_rl.ops.log_probs_torch import CPU_CHUNK_BYTES, CUDA_CHUNK_BYTES, EXPONENT_FLOOR, working_dtype

# The least probability of the teacher's tail, and of an id that its server gives as -inf: float32 has no smaller distance from 1.
TAIL_FLOOR = 1e-7
# How much more than 1 the probabilities of the top K may sum to: a sum of K rounded numbers of 16 bits.
LARGEST_MASS = 1.01


class BucketValues(NamedTuple):
    """What a divergence is at each bucket [*]."""

    value: Tensor  # f(p, q)
    slope: Tensor  # p df/dp, up to p times one constant


Divergence = Callable[[Tensor, Tensor], BucketValues]  # (log p, log q) [*] each


@dataclass(frozen=True, slots=True)
class TopKTeacher:
    """The teacher's K likeliest ids at each row, each once, and their log-probabilities, in nats at its own temperature."""

    ids: Tensor  # [T, K] int64
    log_probs: Tensor  # [T, K]

    @property
    def mass(self) -> Tensor:  # [T] float64, what the K ids have of its probability
        return self.log_probs.double().exp().sum(-1)


@dataclass(frozen=True, slots=True)
class LogitsTeacher:
    """The teacher's logits, this tp rank's columns of them: [T, V_tp] of any floating dtype."""

    logits: Tensor


@dataclass(frozen=True, slots=True)
class HeadTeacher:
    """The teacher's hidden states, of all rows on each tp rank, and this rank's rows of its head."""

    hidden: Tensor  # [T, H_q]
    weight: Tensor  # [V_tp, H_q]


Teacher = TopKTeacher | LogitsTeacher | HeadTeacher


def check_teacher(teacher: object, shape: tuple[int, ...], vocab_size: int, loss_mask: Tensor) -> None:  # shape: [T, V_tp]
    """Raises DataError for another type or shape and, on the CPU, for unmasked rows whose ids are no part of a distribution."""
    if not isinstance(teacher, Teacher):
        raise DataError(f"teacher is {type(teacher).__name__}: pass a TopKTeacher, LogitsTeacher or HeadTeacher")
    num_tokens, num_columns = shape
    lengths = {"ids": num_tokens, "log_probs": num_tokens, "logits": num_tokens, "hidden": num_tokens, "weight": num_columns}
    for field in fields(teacher):
        tensor, length = getattr(teacher, field.name), lengths[field.name]
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or tensor.shape[0] != length:
            given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DataError(f"{field.name} of the teacher must be a tensor [{length}, *], got {given}")
    if isinstance(teacher, LogitsTeacher) and teacher.logits.shape[1] != num_columns:
        raise DataError(
            f"logits of the teacher have {teacher.logits.shape[1]} columns on this tp rank and the policy's {num_columns}: pad "
            "them alike; a teacher with another tokenizer has no common vocabulary"
        )
    if isinstance(teacher, TopKTeacher):
        if teacher.ids.shape != teacher.log_probs.shape or not 1 <= teacher.ids.shape[1] <= vocab_size:
            raise DataError(
                f"ids of the teacher are {tuple(teacher.ids.shape)} and its log_probs {tuple(teacher.log_probs.shape)}: both must "
                f"be [T, K] with K from 1 to the {vocab_size} ids of the vocabulary"
            )
        is_bad = loss_mask & ~valid_rows(teacher, vocab_size)
        if not is_bad.is_cuda and bool(is_bad.any()):
            row = int(is_bad.nonzero()[0])
            raise DataError(
                f"the teacher's top K of row {row} has ids outside of [0, {vocab_size}), an id twice, or log-probabilities that "
                f"are above 0, NaN or sum to more than 1: ids {teacher.ids[row].tolist()}, log_probs "
                f"{teacher.log_probs[row].tolist()}; mask the row, or ask the teacher for normalised log-probabilities of the "
                "policy's tokenizer"
            )


def valid_rows(teacher: TopKTeacher, vocab_size: int) -> Tensor:  # [T] bool
    """Whether the K ids of a row are a part of a distribution over the vocabulary."""
    ids = teacher.ids.sort(-1).values
    is_part = (ids[:, 0] >= 0) & (ids[:, -1] < vocab_size) & (ids.diff(dim=-1) > 0).all(-1)
    return is_part & (teacher.log_probs <= 0).all(-1) & (teacher.mass <= LARGEST_MASS)


def compare_teachers(agreement: RankAgreement, teacher: Teacher | None, loss_mask: Tensor) -> None:
    """Adds what must be equal on ranks that share a softmax: the kind and, of unmasked rows, whole rows."""
    agreement.add("teacher", type(teacher).__name__)
    for name in ("ids", "log_probs", "hidden"):
        if hasattr(teacher, name):
            agreement.add(f"{name} of the teacher", torch.where(loss_mask[:, None], getattr(teacher, name), 0), is_sliced=True)


class DistributionTerm:
    """The divergence of the rows of one call, and the numbers that its gradient needs.

    Call `forward` for each set of rows, and `write_gradient` with the same logits.
    """

    def __init__(
        self,
        divergence: Divergence,
        teacher: Teacher,
        shard: VocabShard,
        tp_group: Group,
        loss_mask: Tensor,  # [T] bool
        weights: Tensor,  # [T] dL / dvalue, for who makes the gradient in forward
        teacher_temperature: float,
    ):
        self.divergence, self.teacher, self.shard, self.tp_group = divergence, teacher, shard, tp_group
        self.inverse_teacher_temperature, self.loss_mask, self.weights = 1.0 / teacher_temperature, loss_mask, weights
        self.values = torch.zeros_like(weights)  # [T]
        self._slopes = torch.zeros_like(self.values)  # [T] sum of p h over the buckets
        self._numbers = torch.zeros_like(self.values)  # [T] log p of the tail, or of the teacher's sum of exponentials
        self._held: tuple[slice | Tensor, Tensor] | None = None  # rows, and a HeadTeacher's logits of them

    @property
    def saved(self) -> list[Tensor]:
        """What autograd keeps for the gradient, so that it raises where it was written to."""
        return [getattr(self.teacher, field.name) for field in fields(self.teacher)]

    def forward(
        self,
        kernels: RowKernels,
        logits: Tensor,  # [n, V_tp]
        labels: Tensor,  # [n]
        loss_mask: Tensor | None,  # [n] bool
        rows: slice | Tensor,  # [n] of T
        *,
        with_entropy: bool,
    ) -> RowResult:  # [n]
        """The kernels' forward; sets `values` of these rows. Communication over tp: the kernels' all-gather, without top K with one
        column more, and one of [n, 3]."""
        local = self.values.new_zeros(logits.shape[0])  # the teacher's log of the sum of exponentials
        if not isinstance(self.teacher, TopKTeacher):
            for block in self._blocks(logits):
                local[block] = self._teacher_logits(rows, block).logsumexp(-1)
        self._numbers[rows] = local

        def gather(statistics: Tensor, tp_group: Group) -> Tensor:
            if isinstance(self.teacher, TopKTeacher):
                return all_gather_stack(statistics, tp_group)
            gathered = all_gather_stack(torch.cat([statistics, local[:, None]], dim=1), tp_group)
            self._numbers[rows] = gathered[..., -1].logsumexp(0)
            return gathered[..., :-1]

        result = kernels.forward(logits, labels, loss_mask, self.shard, self.tp_group, with_entropy=with_entropy, gather=gather)
        sums = result.total.new_zeros(logits.shape[0], 3)
        for block in self._blocks(logits):
            sums[block] = self._sums(logits[block], rows, result, block)
        gathered = all_gather_stack(sums, self.tp_group)
        value, slope, _ = gathered.sum(0).unbind(-1)
        if self._has_tail:
            self._numbers[rows] = gathered[..., 2].logsumexp(0)
            tail = self._tail(rows)
            value, slope = value + tail.value, slope + tail.slope
        if isinstance(self.teacher, TopKTeacher):  # on CUDA nobody has read the ids
            value = torch.where(valid_rows(TopKTeacher(*self._pairs(rows)), self.shard.vocab_size), value, torch.nan)
        self.values[rows] = torch.where(self.loss_mask[rows], value, 0.0)
        self._slopes[rows] = slope
        return result

    def write_gradient(
        self,
        kernels: RowKernels,
        logits: Tensor,  # [n, V_tp]; may be out's own storage
        labels: Tensor,  # [n]
        loss_mask: Tensor | None,  # [n] bool
        rows: slice | Tensor,  # [n] of T
        result: RowResult,  # [n]
        c: Tensor | None,  # [n] dL / dlog_prob
        e: Tensor | None,  # [n] dL / dentropy
        d: Tensor | None,  # [n] dL / dvalue
        *,
        out: Tensor,  # [n, V_tp]
    ) -> None:
        """The kernels' gradient and that of the divergence, block by block. No communication."""
        for block in self._blocks(logits):
            divergence_gradient = None
            if d is not None:
                scale = torch.where(self.loss_mask[self._part(rows, block)], d[block] * self.shard.inverse_temperature, 0.0)
                divergence_gradient = self._gradient(logits[block], rows, result, block).mul_(scale[:, None])
                divergence_gradient.masked_fill_((scale == 0)[:, None], 0.0)  # masked rows hold anything
            given = (result.maximum, result.total, result.entropy, c, e)
            numbers = (None if vector is None else vector[block] for vector in given)
            mask = None if loss_mask is None else loss_mask[block]
            kernels.gradient(logits[block], labels[block], mask, *numbers, self.shard, out=out[block])
            if divergence_gradient is not None:
                out[block, : self.shard.num_columns] += divergence_gradient

    def _gradient(self, logits: Tensor, rows: slice | Tensor, result: RowResult, block: slice) -> Tensor:  # [n, num_columns]
        part = self._part(rows, block)
        log_p, slopes = self._log_p(logits, result, block), self._slopes[part][:, None]
        if not isinstance(self.teacher, TopKTeacher):
            slope = self.divergence(log_p, self._log_q(rows, block)).slope
            return slope - log_p.exp_() * slopes
        places, log_q = self._places(part)
        id_gradient = log_p.gather(1, places.clamp(max=log_p.shape[1] - 1))
        id_gradient = self.divergence(id_gradient, log_q).slope - id_gradient.exp() * slopes
        gradient = log_p.exp() * -slopes
        if self._has_tail:  # of the ids it may be infinite, but they get their own
            gradient += (log_p - self._numbers[part][:, None]).exp_().mul_(self._tail(part).slope[:, None])
        # One column more gets what belongs to another rank's ids.
        return torch.nn.functional.pad(gradient, (0, 1)).scatter_(1, places, id_gradient)[:, :-1]

    def _sums(self, logits: Tensor, rows: slice | Tensor, result: RowResult, block: slice) -> Tensor:  # [n, 3] of this shard
        log_p = self._log_p(logits, result, block)
        if not isinstance(self.teacher, TopKTeacher):
            value, slope = (part.sum(-1) for part in self.divergence(log_p, self._log_q(rows, block)))
            return torch.stack([value, slope, torch.zeros_like(value)], -1)
        places, log_q = self._places(self._part(rows, block))
        is_here = places < log_p.shape[1]
        found = self.divergence(log_p.gather(1, places.clamp(max=log_p.shape[1] - 1)), log_q)
        value, slope = (torch.where(is_here, part, 0.0).sum(-1) for part in found)
        tail = torch.nn.functional.pad(log_p, (0, 1), value=-torch.inf).scatter_(1, places, -torch.inf)
        return torch.stack([value, slope, tail.logsumexp(-1)], -1)

    @property
    def _has_tail(self) -> bool:
        return isinstance(self.teacher, TopKTeacher) and self.teacher.ids.shape[1] < self.shard.vocab_size

    def _tail(self, rows: slice | Tensor) -> BucketValues:  # [n] each
        _, log_q = self._pairs(rows)
        mass = 1.0 - log_q.double().exp().sum(-1)
        return self.divergence(self._numbers[rows], mass.clamp(min=TAIL_FLOOR).log().to(self.values.dtype))

    def _pairs(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:  # ids and log q [n, K]
        assert isinstance(self.teacher, TopKTeacher)
        log_q = self.teacher.log_probs[rows].to(self.values.dtype)
        return self.teacher.ids[rows], torch.where(log_q == -torch.inf, math.log(TAIL_FLOOR), log_q)

    def _places(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """The columns of the ids [n, K], of another rank's ids the column behind the last one; and log q [n, K]."""
        ids, log_q = self._pairs(rows)
        columns = ids - self.shard.first_column
        return columns.where((columns >= 0) & (columns < self.shard.num_columns), self.shard.num_columns), log_q

    def _log_p(self, logits: Tensor, result: RowResult, block: slice) -> Tensor:  # [n, num_columns]
        x = logits[:, : self.shard.num_columns].to(self.values.dtype)
        z = (x - result.maximum[block, None]).mul_(self.shard.inverse_temperature).clamp_(min=EXPONENT_FLOOR)
        return z - result.total[block].log()[:, None]

    def _log_q(self, rows: slice | Tensor, block: slice) -> Tensor:  # [n, num_columns]
        log_normaliser = self._numbers[self._part(rows, block)]
        return (self._teacher_logits(rows, block) - log_normaliser[:, None]).clamp_(min=EXPONENT_FLOOR)

    def _teacher_logits(self, rows: slice | Tensor, block: slice) -> Tensor:  # [n, num_columns] over the temperature
        """A HeadTeacher multiplies all rows at once, and keeps the product, because their gradient mostly follows."""
        if isinstance(self.teacher, LogitsTeacher):
            logits = self.teacher.logits[self._part(rows, block)]
        else:
            assert isinstance(self.teacher, HeadTeacher)
            if self._held is None or self._held[0] is not rows:
                self._held = None  # one chunk at a time
                self._held = rows, teacher_product(self.teacher.hidden[rows].detach(), self.teacher.weight.detach())
            logits = self._held[1][block]
        return logits[:, : self.shard.num_columns].to(self.values.dtype) * self.inverse_teacher_temperature

    def _blocks(self, logits: Tensor) -> Iterator[slice]:
        limit = CUDA_CHUNK_BYTES if logits.is_cuda else CPU_CHUNK_BYTES
        size = max(1, limit // max(self.shard.num_columns * working_dtype(logits).itemsize, 1))
        for start in range(0, logits.shape[0], size):
            yield slice(start, min(start + size, logits.shape[0]))

    def _part(self, rows: slice | Tensor, block: slice) -> slice | Tensor:
        """The rows of a block of `rows`."""
        if isinstance(rows, slice):
            return slice(rows.start + block.start, rows.start + block.stop)
        return rows[block]


def teacher_product(hidden: Tensor, weight: Tensor) -> Tensor:  # [n, H_q], [V_tp, H_q] -> [n, V_tp]
    """In their own dtype: torch.autocast casts no product with an `out`."""
    return torch.mm(hidden, weight.t(), out=weight.new_empty(hidden.shape[0], weight.shape[0]))
