"""Computes log-probabilities over the ids that a sampler kept, beside those over the whole vocabulary, and the gradient of both.

    pairs      (row, kept id) -> the logit x, -inf where another shard has the column
    rows       m, s, t and, with an entropy of the sets, w of each row over its pairs [T, 3 or 4] -> one all-gather over tp,
               together with the statistics of the whole rows where something reads them -> the same merge on every rank
    gradient   zeros, or what the kernels of rows write for the scores over the whole vocabulary and the entropy; then the pairs of
               this shard are written, each with the sum of both parts in float32. No collective.

Letters as in log_probs_torch; a set S has its own maximum, because kept logits may lie far below the row's. Rows of pairs are
segments with one order of additions, so two runs agree in each bit. Nothing synchronises. Both backends share this file: the whole
rows are their own kernels'. A row whose set is the vocabulary is *whole*: it is scored by those kernels, to the bit.
Derivation: docs/losses.md, "Scores over what the sampler kept".
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import TermScore
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Agreement, Group, all_gather_stack
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import first_order_only, gradient_like
from megatron_rl.ops.log_probs_torch import (
    EXPONENT_FLOOR,
    MAXIMUM_FLOOR,
    RowKernels,
    RowResult,
    VocabShard,
    divisors_of_kept,
    every_row,
    keeps_exponentials,
    merge_shards,
    working_dtype,
)

# m, s, t.
WIDTH = 3
IS_GIVEN = "whether sampling_support is given"


def check_score(name: str, score: object, support: object) -> None:
    """Raises ConfigError for what is no TermScore, and for "support" without sets."""
    if score not in set(TermScore):
        raise ConfigError(f"{name}={score!r} is not one of {', '.join(TermScore)}")
    if score == TermScore.SUPPORT and support is None:
        raise ConfigError(
            f"{name}='support' needs sampling_support, the ids that the sampler kept: pass them, or {name}='full', which is the "
            "whole vocabulary"
        )


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


def agreed_support(
    agreement: Agreement,
    support: SamplingSupport,
    labels: Tensor,
    loss_mask: Tensor | None,
    shard: VocabShard,
    tp_group: Group,
    cu_seqlens: Tensor | None = None,
) -> SamplingSupport:
    """check_support, and the sets as they are scored: equal on all tp ranks in what decides what is gathered, whether one is the
    vocabulary. A masked token's does not count. On CUDA the host does not know which these are: ranks that differ are refused.
    """
    check_support(support, labels, loss_mask, shard, cu_seqlens)
    if loss_mask is not None and not loss_mask.is_cuda and tp_group.size() > 1 and support.largest == shard.vocab_size:
        support = support.only(loss_mask)
    agreement.add(IS_GIVEN, True)
    agreement.add("whether a set of sampling_support is the vocabulary", support.largest == shard.vocab_size, is_sliced=True)
    return support


def compare_supports(agreement: Agreement, support: SamplingSupport | None, loss_mask: Tensor | None) -> None:
    """Adds the sets of unmasked tokens, which must be equal on ranks that share a softmax."""
    if not agreement.is_active:
        return
    if support is not None and loss_mask is not None:
        support = support.only(loss_mask)
    agreement.add(IS_GIVEN, support is not None)
    agreement.add("sizes of sampling_support", None if support is None else support.sizes, is_sliced=True)
    agreement.add("ids of sampling_support", None if support is None else support.ids, is_sliced=True)


@dataclass(frozen=True, slots=True)
class SupportResult:
    """Numbers of rows, equal bit for bit on all tp ranks, and the logits of this shard's pairs."""

    kept: RowResult  # [T] each, over the kept ids
    logits: Tensor  # [nnz] of the working dtype; empty where all rows are whole
    full: RowResult | None  # over the vocabulary; None where nothing reads it
    entropy_of_kept: bool = False  # whether the entropy is over the kept ids
    divisors: Tensor | None = None  # [T] of e^z that forward has kept

    @property
    def entropy(self) -> Tensor:  # [T], 0 where none was asked for
        return self.kept.entropy if self.entropy_of_kept or self.full is None else self.full.entropy

    def cut(self, rows: slice | Tensor, pairs: slice) -> SupportResult:
        """The numbers of these rows, whose pairs these are."""
        kept, full = (
            None if of is None else RowResult(*(getattr(of, field.name)[rows] for field in fields(of)))
            for of in (self.kept, self.full)
        )
        assert kept is not None
        return replace(self, kept=kept, full=full, logits=self.logits[pairs], divisors=None)

    def take(self, rows: Tensor, support: SamplingSupport) -> SupportResult:  # [k] ascending, on the device; all its sets
        """The numbers of these rows. On CUDA it synchronises."""
        is_taken = torch.zeros(support.num_rows, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
        logits = self.logits[is_taken[support.rows]] if self.logits.numel() else self.logits
        return replace(self.cut(rows, slice(0, 0)), logits=logits)


def support_results(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool; None: every row counts
    support: SamplingSupport,  # T rows
    shard: VocabShard,
    tp_group: Group,
    kernels: RowKernels,
    *,
    reads_all: bool,
    with_entropy: bool = False,
    entropy_of_kept: bool = False,
    exponentials: Tensor | None = None,  # [T, V_tp] as in row_statistics_reference, where keeps_exponentials says so
) -> SupportResult:
    """Scores over the kept ids and, with reads_all, with an entropy of the vocabulary, or where a row is whole, over all ids.

    A label outside its set gives -inf, a wrong id NaN, and so does an empty set on an unmasked row.
    Communication: one all-gather over tp_group of [T, 3], of [T, 6] with the vocabulary; an entropy adds a column, and one of the
    kept ids beside a whole row two. None at size 1.
    """
    has_whole, of_sets = support.largest == shard.vocab_size, with_entropy and entropy_of_kept
    with_entropy &= not entropy_of_kept or has_whole  # of the vocabulary, which a whole row has too
    reads_all |= with_entropy or has_whole
    are_whole = _are_all_whole(support, shard)
    pairs = logits.new_empty(0 if are_whole else support.num_pairs, dtype=working_dtype(logits))
    # Of whole rows too: no rank gathers another shape.
    own = pairs.new_zeros(support.num_rows, WIDTH + of_sets)
    for rows, block, sets in () if are_whole else support.blocks():
        pairs[block] = pair_logits(logits[rows], sets, shard)
        of_pairs = sets.rows
        is_label = sets.ids == labels[rows][of_pairs]
        numbers = (of_pairs, sets.offsets, shard.inverse_temperature)
        own[rows] = statistics_of_kept(pairs[block], is_label, *numbers, with_entropy=of_sets)
    full = divisors = None
    if reads_all and tp_group.size() == 1 and exponentials is None:
        full = kernels.forward(logits, labels, loss_mask, shard, tp_group, with_entropy=with_entropy)
        gathered = own[None]
    elif reads_all:
        memory = {} if exponentials is None else {"exponentials": exponentials}
        statistics = kernels.statistics(logits, labels, loss_mask, shard, with_entropy=with_entropy, **memory)
        together = all_gather_stack(torch.cat([statistics, own], dim=1), tp_group)
        full = RowResult(*kernels.merge(together[..., : statistics.shape[1]], loss_mask, shard))
        gathered = together[..., statistics.shape[1] :]
        divisors = None if exponentials is None else divisors_of_kept(statistics, full, shard)
    else:
        gathered = all_gather_stack(own, tp_group)
    if are_whole:
        assert full is not None
        kept = replace(full, log_probs=full.log_probs.clone(), entropy=full.entropy.clone())
        return SupportResult(kept, pairs, full, entropy_of_kept, divisors)
    maximum, total, scores, entropy = merge_shards(gathered, loss_mask, shard)
    if has_whole:
        assert full is not None
        is_whole = (support.sizes == shard.vocab_size) & ~scores.isnan()  # NaN: it has a wrong id
        scores = torch.where(is_whole, full.log_probs, scores)
        entropy = torch.where(is_whole, full.entropy, entropy)
    return SupportResult(RowResult(maximum, total, scores, entropy), pairs, full, entropy_of_kept, divisors)


def support_gradient(
    result: SupportResult,
    logits: Tensor,  # [T, V_tp]; read only where a coefficient of the vocabulary, or a whole row, needs it
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    support: SamplingSupport,
    shard: VocabShard,
    kernels: RowKernels,
    coefficients: Tensor | None,  # [T] dL / dscore over the kept ids
    full_coefficients: Tensor | None,  # [T] dL / dscore over the vocabulary
    entropy_coefficients: Tensor | None,  # [T] dL / dentropy
    *,
    out: Tensor,  # [T, V_tp] of any floating dtype; may be the logits' own storage; with result.divisors it holds e^z
) -> Tensor:
    """All of `out` is written, and with p^S, p the probabilities over kept ids and vocabulary, H the entropy, it is

        dlogits_v = [ c_S (delta_v - [v in S] p^S_v) + c_V (delta_v - p_v) - e p_v (ln p_v + H) ] / temperature

    with p^S and the entropy of S in the last term where result.entropy_of_kept. Rows whose coefficients are 0 are 0. No
    communication.
    """
    dense, of_entropy = full_coefficients, None if result.entropy_of_kept else entropy_coefficients
    if support.largest == shard.vocab_size:
        is_whole = support.sizes == shard.vocab_size
        if coefficients is not None:
            of_whole = torch.where(is_whole, coefficients, 0.0)
            dense = of_whole if dense is None else dense + of_whole
        if entropy_coefficients is not None and result.entropy_of_kept:
            of_entropy = torch.where(is_whole, entropy_coefficients, 0.0)
    if dense is None and of_entropy is None:
        out.zero_()
    else:
        assert result.full is not None
        if result.divisors is not None:
            assert kernels.gradient_of_kept is not None and dense is not None
            kernels.gradient_of_kept(out, labels, loss_mask, result.divisors, dense, shard)
        else:
            full = (result.full.maximum, result.full.total, result.full.entropy)
            kernels.gradient(logits, labels, loss_mask, *full, dense, of_entropy, shard, out=out)
    if not _are_all_whole(support, shard):
        vectors = (coefficients, full_coefficients, entropy_coefficients)
        for rows, block, sets in support.blocks():
            of_rows = [None if vector is None else vector[rows] for vector in (loss_mask, *vectors)]
            values = pair_gradient(result.cut(rows, block), labels[rows], of_rows[0], sets, shard.inverse_temperature, *of_rows[1:])
            write_pairs(out[rows], values, sets, shard)
    return out


def pair_logits(
    logits: Tensor,  # [T, V_tp]
    support: SamplingSupport,
    shard: VocabShard,
) -> Tensor:  # [nnz] of the working dtype: -inf where another shard has the column, NaN for an id that no vocabulary has
    columns = support.ids.long() - shard.first_column
    x = logits.detach()[support.rows, columns.clamp(0, shard.num_columns - 1)].to(working_dtype(logits))
    x = torch.where((columns >= 0) & (columns < shard.num_columns), x, -torch.inf)
    return x if support.is_inside(shard.vocab_size) else torch.where(support.are_wrong(shard.vocab_size), torch.nan, x)


def statistics_of_kept(
    x: Tensor,  # [k] logits of pairs, row after row
    is_label: Tensor,  # [k] bool
    rows: Tensor,  # [k] int64, ascending in [0, n)
    offsets: Tensor,  # [n + 1] int64: pairs of the rows before
    inverse_temperature: float,
    *,
    with_entropy: bool,
) -> Tensor:  # [n, 3 or 4]: m, s, t, w over the pairs, as row_statistics_reference; a row without one is (-1e30, 0, -inf, 0)
    def sums(values: Tensor) -> Tensor:
        return _over_rows("sum", values.double(), offsets, 0.0).to(x.dtype)

    maximum = _over_rows("max", x, offsets, MAXIMUM_FLOOR)
    z = (x - maximum[rows]).mul_(inverse_temperature)
    target = _over_rows("max", torch.where(is_label, x, -torch.inf), offsets, -torch.inf)
    if not with_entropy:
        return torch.stack([maximum, sums(z.exp_()), target], dim=1)
    exponentials = z.clamp_(min=EXPONENT_FLOOR).exp()
    return torch.stack([maximum, sums(exponentials), target, sums(exponentials * z)], dim=1)


def gradient_of_kept(
    x: Tensor,  # [k] logits of pairs
    is_label: Tensor,  # [k] bool
    rows: Tensor,  # [k] int64 in [0, n)
    of_rows: RowResult,  # [n] each, over the kept ids or over the vocabulary
    coefficients: Tensor | None,  # [n] dL / dscore
    entropy_coefficients: Tensor | None,  # [n] dL / dentropy
    inverse_temperature: float,
) -> Tensor:  # [k]: c (delta_v - p_v) - e p_v (ln p_v + H), which the temperature divides
    z = (x - of_rows.maximum[rows]).mul_(inverse_temperature)
    p = z.exp().div_(of_rows.total[rows])
    gradient = torch.zeros_like(x)
    if coefficients is not None:
        gradient += coefficients.to(x.dtype)[rows] * (is_label.to(x.dtype) - p)
    if entropy_coefficients is not None:
        entropy_and_log_p = z.clamp_(min=EXPONENT_FLOOR) + (of_rows.entropy - of_rows.total.log())[rows]
        gradient -= entropy_coefficients.to(x.dtype)[rows] * p * entropy_and_log_p
    return gradient


def pair_gradient(
    result: SupportResult,
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    support: SamplingSupport,
    inverse_temperature: float,
    coefficients: Tensor | None,  # [T]
    full_coefficients: Tensor | None,  # [T]
    entropy_coefficients: Tensor | None,  # [T]
) -> Tensor:  # [nnz]: the gradient of each pair's logit, exactly 0 for a set of one id without the other two terms
    rows = support.rows
    is_label = support.ids == labels[rows]
    of_kept, of_all = (entropy_coefficients, None) if result.entropy_of_kept else (None, entropy_coefficients)
    gradient = torch.zeros_like(result.logits)
    for of_rows, c, e in ((result.kept, coefficients, of_kept), (result.full, full_coefficients, of_all)):
        if c is not None or e is not None:
            assert of_rows is not None
            gradient += gradient_of_kept(result.logits, is_label, rows, of_rows, c, e, inverse_temperature)
    is_needed = torch.zeros_like(every_row(labels))
    for given in (coefficients, full_coefficients, entropy_coefficients):
        if given is not None:
            is_needed |= given != 0
    if loss_mask is not None:
        is_needed &= loss_mask
    return torch.where(is_needed[rows], gradient.mul_(inverse_temperature), 0.0)


def write_pairs(
    out: Tensor,  # [T, V_tp]
    values: Tensor,  # [nnz]
    support: SamplingSupport,
    shard: VocabShard,
) -> None:
    """Writes the values of this shard's pairs into `out`, but for whole rows. No two values meet at one place.

    The host does not know which pairs these are, so that each pair writes something: one of another shard the value of the row's
    first pair here once more or, in a row without one, what stands in its first column.
    """
    if not support.num_pairs:
        return
    rows, columns = support.rows, support.ids.long() - shard.first_column
    values = values.to(out.dtype)
    if shard.num_columns == shard.vocab_size > support.largest and support.is_inside(shard.vocab_size):
        out[rows, columns] = values
        return
    is_own = (columns >= 0) & (columns < shard.num_columns)
    if support.largest == shard.vocab_size:
        is_own &= (support.sizes != shard.vocab_size)[rows]
    # Ids rise in a row, so its pairs in this shard are neighbours.
    first = support.offsets[:-1] + _over_rows("sum", (columns < 0).double(), support.offsets, 0.0).long()
    has_own = _over_rows("sum", is_own.double(), support.offsets, 0.0) > 0
    source = torch.where(is_own, torch.arange(support.num_pairs, device=rows.device), first.clamp(max=support.num_pairs - 1)[rows])
    has_own = has_own[rows]
    places = torch.where(has_own, columns[source], 0)
    out[rows, places] = torch.where(has_own, values[source], out[rows, 0])


class SupportLogProbs(torch.autograd.Function):
    """(scores over the kept ids [T], scores over the vocabulary [T] | None, entropy [T] | None, with entropy_of_kept over the kept
    ids); scores that are computed anyway are given.

    Saves the logits of the pairs and two numbers a row; the logits only where something reads the vocabulary, or in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        support: SamplingSupport,
        shard: VocabShard,
        tp_group: Group,
        with_full: bool,
        with_entropy: bool,
        entropy_of_kept: bool,
        inplace: bool,
        kernels: RowKernels,
        has_graph: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        has_whole = support.largest == shard.vocab_size
        reads_entropy = with_entropy and (has_whole or not entropy_of_kept)
        is_dense = with_full or has_whole
        has_backward = has_graph and ctx.needs_input_grad[0]
        keeps = is_dense and has_backward and not inplace and kernels.keeping is not None
        exponentials = gradient_like(logits) if keeps and keeps_exponentials(logits, reads_entropy) else None
        result = support_results(
            logits,
            labels,
            loss_mask,
            support,
            shard,
            tp_group,
            kernels,
            reads_all=with_full,
            with_entropy=with_entropy,
            entropy_of_kept=entropy_of_kept,
            exponentials=exponentials,
        )
        full, ctx.exponentials = result.full, exponentials
        ctx.support, ctx.shard, ctx.inplace, ctx.kernels, ctx.entropy_of_kept = support, shard, inplace, kernels, entropy_of_kept
        ctx.shape = logits.shape, logits.dtype
        ctx.set_materialize_grads(False)
        # In place another backward through these logits must raise, whatever it reads.
        is_read = is_dense or reads_entropy or inplace
        ctx.save_for_backward(
            logits if is_read else None,
            labels,
            loss_mask,
            result.logits,
            result.divisors,
            *(getattr(of, field.name) for of in (result.kept, full) if of is not None for field in fields(of)),
        )
        is_given = with_full or (with_entropy and not entropy_of_kept)
        scores_of_all = full.log_probs if full is not None and is_given else None
        return result.kept.log_probs, scores_of_all, result.entropy if with_entropy else None

    @staticmethod
    @first_order_only
    def backward(
        ctx: Any, gradient: Tensor | None, full_gradient: Tensor | None, entropy_gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, labels, loss_mask, pairs, divisors, *of_rows = ctx.saved_tensors
        kept, full = RowResult(*of_rows[:4]), RowResult(*of_rows[4:]) if of_rows[4:] else None
        out, ctx.exponentials = ctx.exponentials, None  # a second backward through the same graph computes them again
        if out is None:
            divisors = None
            shape, dtype = ctx.shape
            if logits is None:
                out = torch.empty(shape, dtype=dtype, device=labels.device)
            else:
                out = logits.detach() if ctx.inplace else gradient_like(logits)
        support_gradient(
            SupportResult(kept, pairs, full, ctx.entropy_of_kept, divisors),
            logits,
            labels,
            loss_mask,
            ctx.support,
            ctx.shard,
            ctx.kernels,
            gradient,
            full_gradient,
            entropy_gradient,
            out=out,
        )
        return out, *[None] * 11


def _over_rows(reduction: str, values: Tensor, offsets: Tensor, initial: float) -> Tensor:  # [k], [n + 1] -> [n]
    """torch reduces the segments in one order; an empty one is `initial`, and without a value torch is not asked."""
    if values.numel() == 0:
        return values.new_full((offsets.numel() - 1,), initial)
    return torch.segment_reduce(values, reduction, offsets=offsets, axis=0, unsafe=True, initial=initial)


def _are_all_whole(support: SamplingSupport, shard: VocabShard) -> bool:
    vocab_size = shard.vocab_size
    has_all = support.num_pairs == support.num_rows * vocab_size and support.largest == vocab_size
    return has_all and support.is_inside(vocab_size)
