"""Runs a head whose rows have sets of kept ids: pairs where a set is small, matmuls of all columns where it is not.

    a row of one id                       score 0, gradient 0, in no product
    a row of 2 to SPARSE_ROW_LIMIT ids    ops/sparse_head.py: its kept columns alone
    a row with more ids, or with all      a chunk of logits, as in ops/linear_head.py, scored by ops/support_scores.py
    every row, where a term reads the     such a chunk
    whole vocabulary

Scores of all rows come first, because they cost little where sets are small; then the caller knows all coefficients. The logits of
the last chunks that fit the buffer together are still there for their gradient; those of others are computed a second time. Rows
whose coefficients are 0 are in no product of the gradient, but for pairs on CUDA, which the host does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.layout.groups import start_all_reduce_sum, start_reduce_scatter_sum
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.linear_gradient import compact_rows
from megatron_rl.ops.linear_head import (
    HeadOptions,
    LinearHead,
    add_weight_gradient,
    chunk_logits,
    chunk_operands,
    device_rows,
    hidden_gradient,
    keep_results,
    make_head,
)
from megatron_rl.ops.linear_schedule import cut
from megatron_rl.ops.log_probs import vocab_shard
from megatron_rl.ops.log_probs_torch import RowResult
from megatron_rl.ops.sparse_head import (
    SPARSE_ROW_LIMIT,
    Pairs,
    RowKinds,
    add_hidden_reference,
    add_weight_reference,
    make_pairs,
    multiply_reference,
    pair_gradient,
    pair_results,
    single_log_probs,
    sort_rows,
    without_zeros,
)
from megatron_rl.ops.support_scores import SupportResult, support_gradient, support_results


@dataclass(frozen=True, slots=True)
class PairKernels:
    """multiply(hidden [T, H], weight [V_tp, H], pairs, *, max_bytes) -> z [k]

    add_hidden(g [k], pairs, weight, *, out [T, H], max_bytes): writes the rows of `out` that have a pair here: dX of this shard.

    add_weight(g [k], pairs, hidden, *, out [V_tp, H] float32, max_bytes): adds dW to the rows of `out` that have a pair.
    """

    multiply: Callable[..., Tensor]
    add_hidden: Callable[..., None]
    add_weight: Callable[..., None]


def pair_kernels(backend: Backend) -> PairKernels:
    """The functions of a resolved backend (resolve_backend). Triton is imported here, on first use."""
    if backend == Backend.TORCH:
        return PairKernels(multiply_reference, add_hidden_reference, add_weight_reference)
    from megatron_rl.ops.sparse_head_triton import add_hidden_triton, add_weight_triton, multiply_triton

    return PairKernels(multiply_triton, add_hidden_triton, add_weight_triton)


@dataclass(slots=True)
class DenseChunk:
    """Rows in a matmul of all columns."""

    numbers: Tensor  # [n] row numbers in [0, T), on the CPU
    rows: slice | Tensor  # the same on the device
    support: SamplingSupport  # n rows, on the device
    place: int | None  # the first of its rows of the buffer, where its logits stay; None: the next chunk overwrites them
    result: SupportResult | None = None


@dataclass(slots=True)
class SupportHead:
    """A head, its rows by what they cost, and their scores so far. Rows that take no part have 0."""

    head: LinearHead  # its log_probs are the scores over the kept ids
    pairs: Pairs
    kernels: PairKernels
    chunks: list[DenseChunk]
    max_bytes: int
    full: Tensor | None  # [T] scores over the vocabulary; None: nothing reads it
    z: Tensor | None = None  # [k]
    result: RowResult | None = None  # [n] of the rows of the pairs


def make_support_head(
    hidden: Tensor,  # [T, H] or [T / tp, H]
    weight: Tensor,  # [V_tp, H]
    labels: Tensor,  # [T]
    options: HeadOptions,
    support: SamplingSupport,  # T rows, on the CPU
    rows: Tensor,  # ascending row numbers that take part, on the CPU
    *,
    capacity: int,
    max_bytes: int,
    reads_all: bool,
) -> SupportHead:
    """Sorts the rows, and sets the scores of those of one id. Call it under no_grad.

    reads_all: a term needs the scores over the vocabulary; they are there with an entropy of the vocabulary too.
    Communication: with sequence_parallel one all-gather of hidden over tp.
    """
    nothing = rows[:0]
    vocab_size = vocab_shard(weight.shape[0], options.temperature, options.vocab_size, options.tp_group).vocab_size
    reads_all |= options.with_entropy and not options.entropy_of_kept
    if reads_all:
        kinds = RowKinds(nothing, nothing, rows)
    else:
        kinds = sort_rows(support, rows, vocab_size, limit=SPARSE_ROW_LIMIT)
    # A chunk of whole rows alone needs no pair, of which they have as many as there are logits.
    is_whole = support.sizes[kinds.dense] == vocab_size
    numbers = [chunk for rows_of_kind in (kinds.dense[is_whole], kinds.dense[~is_whole]) for chunk in cut(rows_of_kind, capacity)]
    places, num_rows = _places([chunk.numel() for chunk in numbers], capacity)
    head = make_head(hidden, weight, labels, options, num_rows)
    device = head.hidden.device
    chunks = [
        DenseChunk(chunk, device_rows(chunk, device), support.take(chunk).to(device), place)
        for chunk, place in zip(numbers, places, strict=True)
    ]
    if kinds.single.numel():
        scores = single_log_probs(support, kinds.single, labels, head.log_probs.dtype)
        head.log_probs[kinds.single.to(device, non_blocking=True)] = scores
    return SupportHead(
        head=head,
        pairs=make_pairs(support, kinds.sparse, labels, head.shard),
        kernels=pair_kernels(resolve_backend(options.backend, head.logits)),
        chunks=chunks,
        max_bytes=max_bytes,
        full=torch.zeros_like(head.log_probs) if reads_all else None,
    )


def _places(sizes: list[int], capacity: int) -> tuple[list[int | None], int]:  # and the rows of the buffer
    """Of the last chunks as many stay as fit together. The others come before them, and take the buffer from its first row on."""
    places: list[int | None] = []
    end, are_kept = 0, True
    for size in reversed(sizes):
        are_kept &= end + size <= capacity
        places.append(end if are_kept else None)
        end += size * are_kept
    return places[::-1], max([end, *sizes])


def run_scores(sparse: SupportHead) -> None:
    """Fills log_probs, full and the entropy. Communication: one all-gather over tp for the pairs and one a chunk."""
    head, pairs = sparse.head, sparse.pairs
    if pairs.rows.numel():
        sparse.z = sparse.kernels.multiply(head.hidden, head.weight, pairs, max_bytes=sparse.max_bytes)
        options = head.options
        sparse.result = pair_results(sparse.z, pairs, head.shard, options.tp_group, with_entropy=options.with_entropy)
        keep_results(head, pairs.rows, sparse.result)
    for chunk in sparse.chunks:
        hidden, labels = chunk_operands(head, chunk.rows)
        logits = chunk_logits(head, hidden, first=chunk.place or 0)
        result = chunk.result = support_results(
            logits,
            labels,
            None,
            chunk.support,
            head.shard,
            head.options.tp_group,
            head.kernels,
            reads_all=sparse.full is not None,
            with_entropy=head.options.with_entropy,
            entropy_of_kept=head.options.entropy_of_kept,
        )
        keep_results(head, chunk.rows, replace(result.kept, entropy=result.entropy))
        if sparse.full is not None:
            assert result.full is not None
            sparse.full[chunk.rows] = result.full.log_probs


def run_support_gradient(
    sparse: SupportHead,  # after run_scores
    c: Tensor,  # [T] dL / dscore over the kept ids
    c_full: Tensor | None,  # [T] dL / dscore over the vocabulary
    e: Tensor | None,  # [T] dL / dentropy
    *,
    of_hidden: Tensor | None,  # [T, H] zeros; None: not needed
    of_weight: Tensor | None,  # [V_tp, H] float32 to add to; None: not needed
) -> Tensor | None:
    """The complete gradient of hidden, [T, H] or with sequence parallelism [T / tp, H].

    Communication: one all-reduce of [T, H] over tp, or one reduce-scatter, during the weight gradient of the pairs.
    Synchronisation on CUDA: one for the rows with a coefficient, if there are chunks.
    """
    head, pairs = sparse.head, sparse.pairs
    if sparse.chunks:
        is_needed = torch.stack([part != 0 for part in (c, c_full, e) if part is not None]).any(0).cpu()
        for chunk in reversed(sparse.chunks):  # first those that stay, which a chunk that is computed again overwrites
            _multiply_chunk(head, chunk, c, c_full, e, of_hidden, of_weight, is_needed=is_needed[chunk.numbers])
    g, memory = None, {"max_bytes": sparse.max_bytes}
    if sparse.z is not None and sparse.result is not None:
        of_entropy = None if e is None else e[pairs.rows]
        g = pair_gradient(sparse.z, pairs, sparse.result, c[pairs.rows], head.shard, of_entropy)
        if not g.is_cuda:
            g, pairs = without_zeros(g, pairs)
        if of_hidden is not None:
            sparse.kernels.add_hidden(g, pairs, head.weight, out=of_hidden, **memory)
    start = start_reduce_scatter_sum if head.options.sequence_parallel else start_all_reduce_sum
    pending = None if of_hidden is None else start(of_hidden, head.options.tp_group)
    if g is not None and of_weight is not None:
        sparse.kernels.add_weight(g, pairs, head.hidden, out=of_weight, **memory)
    return None if pending is None else pending.wait()


def _multiply_chunk(
    head: LinearHead,
    chunk: DenseChunk,
    c: Tensor,
    c_full: Tensor | None,
    e: Tensor | None,
    of_hidden: Tensor | None,
    of_weight: Tensor | None,
    *,
    is_needed: Tensor,  # [n] bool, on the CPU
) -> None:
    """The gradient of the chunk's logits, over them or beside them, and its two products."""
    assert chunk.result is not None
    device, kept = head.hidden.device, is_needed.nonzero()[:, 0]
    if not kept.numel():
        return
    rows, support, result, has_all = chunk.rows, chunk.support, chunk.result, kept.numel() == is_needed.numel()
    if chunk.place is None and not has_all:
        index = kept.to(device, non_blocking=True)
        result, support, rows = result.take(index, support), support.take(index), device_rows(chunk.numbers[kept], device)
    hidden, labels = chunk_operands(head, rows)
    place = slice(chunk.place or 0, (chunk.place or 0) + labels.numel())
    logits = chunk_logits(head, hidden) if chunk.place is None else head.logits[place]
    coefficients = (None if part is None else part[rows] for part in (c, c_full, e))
    out = head.gradient[place]
    support_gradient(result, logits, labels, None, support, head.shard, head.kernels, *coefficients, out=out)
    if chunk.place is not None and not has_all:
        order, _, _ = compact_rows(out, kept)
        out, hidden = out[: kept.numel()], hidden[order]
        rows = order + rows.start if isinstance(rows, slice) else rows[order]
    if of_hidden is not None:
        of_hidden[rows] = hidden_gradient(out, head.weight).to(of_hidden.dtype)
    if of_weight is not None:
        add_weight_gradient(out, hidden, out=of_weight)
