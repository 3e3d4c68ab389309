"""Computes this rank's part of the step's loss from hidden states, without logits [T, V_tp]: the loss functions of the fused head.

The unmasked rows are cut into chunks, and the chunks whose coefficients become known together are an item, which runs by one of the
plans in linear_policy_loss. ops/linear_head.py has the matmuls of a chunk.

Backward multiplies the gradient by its factor; a second backward raises. The weight's gradient is summed in float32. Where the
parameter has Megatron's float32 `main_grad`, it is added there, unrounded: in forward if the factor was declared (loss_scale),
else in backward. Without main_grad it is returned in the weight's dtype. If that has 16 bits, it is rounded

    one product in all     by this product, once. Then a factor of backward that is no power of two rounds once more, by at most
                           2^-8 of an element in bfloat16, as in the gradient of hidden. A declared factor rounds nothing
    several products       by backward, once: it multiplies their float32 sum
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.declare import PolicyLoss, get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import SINGLE, all_gather_stack, group_device
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import first_order_only, log_probs_dtype, runs_eagerly, vocab_shard
from megatron_rl.ops.distribution import check_teacher
from megatron_rl.ops.linear_head import (
    CPU_TEMPORARY_BYTES,
    TEMPORARY_BYTES,
    Chunk,
    HeadGradient,
    LinearHead,
    ReadyGradient,
    blocks,
    check_head,
    chunk_capacity,
    chunk_logits,
    chunk_operands,
    compare_heads,
    cut,
    device_rows,
    finish,
    forward_chunk,
    gradient_for,
    gradient_in_main_grad,
    logits_dtype,
    main_grad_of,
    make_head,
    multiply_chunk,
    multiply_into,
)
from megatron_rl.ops.linear_log_probs import fill_with_pairs, score_kept, score_rows
from megatron_rl.ops.scale import AssumedScale, check_actual_scale, check_declared_scale
from megatron_rl.ops.support import check_support
from megatron_rl.policy_loss.api import known_before_rows, reduce
from megatron_rl.policy_loss.inputs import (
    LossBatch,
    LossOptions,
    PolicyLossOutput,
    agreement_of,
    check_cu_seqlens,
    checked_options,
    compare_calls,
    options_and_tensors,
    prepared,
)
from megatron_rl.policy_loss.teacher import distribution_term


@runs_eagerly
def linear_policy_loss(
    name: str,
    hidden: Tensor,  # [T, H], or this rank's [T / tp, H] with sequence_parallel; float32, bfloat16, float16 or float64
    weight: Tensor,  # [V_tp, H] of the same dtype: this tp rank's rows of the head
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool, on any device
    cu_seqlens: Tensor,  # [N + 1] int32, on any device
    token_weights: Tensor,  # [N] from sample_token_weights
    *,
    advantages_per: str | None = None,
    **keywords: Any,
) -> PolicyLossOutput:
    """`policy_loss(name, hidden @ weight.T, ...)` without the full logits: loss, metrics and both gradients are equal.

    With G_t = (delta - p) / temperature of row t and c_t = dL / d log_prob_t, dX_t = c_t (G_t W) and dW = sum_t G_t^T (c_t X_t).
    The coefficient commutes with both matmuls. So three matmuls are enough, all in forward, while a chunk's logits are in memory.

        row-by-row   a token-level loss: c_t is known row by row, so chunks may be cut anywhere. A correction by samples of
                     old_log_probs is known before
        in-chunk     a sequence-level loss, and whole documents in a chunk: c is known while the chunk's logits exist
        scale-last   a document longer than a chunk: c is one number for all its tokens, so G is multiplied first, by c last
        two-pass     a long document with KL or entropy terms, with a clip of tokens or a mean log-ratio at token level, or with a
                     correction by samples that reads the policy in training: statistics first, then the logits of all chunks except
                     the last a second time (a fourth matmul for them)

    The coefficients of a chunk, or of whole documents, are those of the reducer on these rows alone; the result is that of the
    reducer on the micro-batch.

    With sampling_support a row multiplies its kept columns alone, in float32 (ops/support.py). An entropy needs all columns: one
    matmul more, and for its term three.

    Masked rows are in no matmul. Rows with c_t = 0 (clipped, or of advantage 0) are left out of the two matmuls of the gradient,
    except in the early chunks of plan scale-last, and for pairs of sampling_support.

    The gradient is computed in forward if gradients are enabled, else one matmul runs. `.loss` can be differentiated once. The
    gradient of hidden is complete over tp; that of weight is summed in float32. The module's docstring says when it is rounded.

    Args:
        name, old_log_probs, advantages, token_weights: as in policy_loss.
        hidden: [T, H], with sequence_parallel [T / tp, H]: hidden states in the order of labels; masked rows may hold anything.
        weight: [V_tp, H], this tp rank's rows of the head, of hidden's dtype.
        labels: [T] int64; labels[t] is the token whose log-probability row t of hidden gives: the caller has shifted.
        loss_mask, cu_seqlens: as in policy_loss. On the CPU they save one synchronisation.
        advantages_per, keywords: as in policy_loss. sampling_support on the CPU saves one synchronisation.
            With loss_scale the weight gradient goes into weight.main_grad in forward, where that is float32, and backward checks
            the factor: another one raises on the CPU, and makes the gradient of hidden NaN on CUDA. None: backward multiplies; it
            adds to main_grad, or returns the weight gradient in weight's dtype. A forward pass without a backward must not have a
            loss_scale.
    Memory: besides max_logits_bytes, and with a HeadTeacher as much again for its chunk, the gradient of hidden; that of weight
        unless it is main_grad, in weight's dtype if one chunk makes it without sampling_support, else float32; for plan scale-last
        one more such buffer, unless the micro-batch is one long document and main_grad is not added to in forward; scratch of
        rows that move, of the torch row kernels and of a teacher, up to six times 4 MiB on the CPU and 256 MiB on CUDA.
    Communication: tp one all-gather of [rows, 3 or 4] a chunk, with a teacher one more, and one all-reduce of the gradient of
        hidden a chunk, or with sequence_parallel one all-gather of hidden and one reduce-scatter. cp one all-reduce of [N, k], and
        one for a correction of samples; with a gradient one more a bin of documents, and before the bins one all-gather of [N].
        All cp ranks have the same bins. Backward none. None at size 1. With check_ranks as policy_loss.
    Synchronisation on CUDA: one for the rows unless loss_mask and cu_seqlens are on the CPU, one under cp for the bins, one a chunk
        for the rows with a gradient (with sampling_support none); none in backward.
    Raises: what policy_loss raises. DataError for operands that do not fit. ConfigError for a max_logits_bytes below one row, a
        wrong loss_scale, float16 without one, and a second backward.
    """
    with agreement_of(keywords) as agreement:
        options, tensors = options_and_tensors(keywords)
        loss = get_policy_loss(name)
        options.refuse(("inplace",), "is for policy_loss, which has logits")
        # Before the options, because the choice of the backend reads the weight.
        num_tokens, device = check_head(hidden, weight, labels, options), hidden.device
        support = tensors.get("sampling_support")
        if isinstance(support, SamplingSupport):
            tensors["sampling_support"], support = support.to(device), support.to(torch.device("cpu"))
        # `prepared` reports a value that is no tensor.
        moved = [x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in (advantages, loss_mask)]
        given = LossBatch(old_log_probs, moved[0], moved[1], cu_seqlens, token_weights, **tensors)
        like_logits = weight.new_empty(0, dtype=logits_dtype(weight, options.fp32_logits))
        options, dtype = checked_options(loss, options, given, like_logits), log_probs_dtype(like_logits)
        batch = prepared(loss, given, num_tokens=num_tokens, device=device, dtype=dtype, advantages_per=advantages_per)
        shard = vocab_shard(weight.shape[0], options.temperature, options.vocab_size, options.tp_group)
        if batch.teacher is not None:
            check_teacher(batch.teacher, (num_tokens, weight.shape[0]), shard.vocab_size, batch.loss_mask)
        if batch.sampling_support is not None:
            check_support(batch.sampling_support, labels, batch.loss_mask, shard, batch.cu_seqlens)
        bounds, mask = _on_host(loss_mask, cu_seqlens, batch)
        capacity = chunk_capacity(weight, options, num_tokens)
        ready = None
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            ready = ready_gradient(hidden, weight, options.loss_scale)
        compare_heads(agreement, hidden, weight, labels, batch.loss_mask)
        if agreement is not None:
            needs = str((ready is not None and hidden.requires_grad, ready is not None and weight.requires_grad))
            agreement.add("which gradients are needed (hidden, weight)", needs)
        compare_calls(agreement, loss, options, batch, given.advantages)
    batch = known_before_rows(loss, batch, options, dtype)
    rows, term = mask.nonzero()[:, 0], None
    if batch.teacher is not None:
        term = distribution_term(batch, options, shard, dtype, None if ready is None else ready.loss_scale)
    with_entropy = options.needs_entropy(loss)
    with torch.no_grad():
        if support is not None:
            head, scored = score_kept(hidden, weight, labels, options, support, rows, capacity, with_entropy=with_entropy)
        elif ready is None:
            parts = ((options.temperature, rows),)
            head, _ = score_rows(hidden, weight, labels, options, parts, capacity, with_entropy=with_entropy, term=term)
        else:
            late_correction = None if batch.correction is not None else options.correction
            is_row_by_row = not (loss.reads_means or (late_correction is not None and late_correction.needs_sums))
            if is_row_by_row:
                items = [WorkItem((chunk,)) for chunk in cut(rows, capacity)]
            else:
                items = _items(loss, batch, options, rows, bounds, capacity)
            longest = max((chunk.numel() for item in items for chunk in item.chunks), default=0)
            head = replace(make_head(hidden, weight, labels, options, longest, with_entropy=with_entropy), term=term)
            # cp ranks have other chunks of rows, so nothing is reduced there.
            row_options = replace(options, metrics=PolicyMetrics.NONE, cp_group=SINGLE if is_row_by_row else options.cp_group)
            scale = ready.loss_scale

            def coefficients(item: WorkItem) -> tuple[Tensor, Tensor | None]:
                chosen = device_rows(torch.cat([rows[:0], *item.chunks]), device)
                entropy = None if head.entropy is None else head.entropy[chosen]
                _, found = reduce(loss, head.log_probs[chosen], entropy, batch.take(chosen), row_options, is_part=True)
                if scale is None:
                    return found.log_probs, found.entropy
                return found.log_probs * scale, None if found.entropy is None else found.entropy * scale

            gradient = gradient_for(ready, head, has_row_term=options.entropy_coefficient != 0 or term is not None)
            ready.hidden = run_with_gradient(head, items, coefficients, gradient)
            ready.weight = None if ready.is_in_main_grad else gradient.weight
        batch = replace(batch, divergences=None if term is None else term.values)
        output, found = reduce(loss, head.log_probs, head.entropy, batch, options)
        if support is not None and ready is not None:
            fill_with_pairs(ready, head, scored, rows, capacity, found.log_probs, found.entropy)
    if ready is None:
        return output
    return replace(output, loss=_WithHeadGradient.apply(hidden, weight, output.loss, ready))  # type: ignore[no-untyped-call]  # torch's


# The arguments are those of linear_policy_loss from hidden on; api.py says where the equations are.
linear_grpo_loss, linear_gspo_loss = partial(linear_policy_loss, "grpo"), partial(linear_policy_loss, "gspo")


def _on_host(loss_mask: Tensor, cu_seqlens: Tensor, batch: LossBatch) -> tuple[Tensor, Tensor]:  # [N + 1], [T] bool
    """The bounds and the mask without padding on the CPU: without a synchronisation where the caller gave both there, else with
    one. Raises DataError for wrong bounds from the device, which `prepared` did not read."""
    if loss_mask.is_cuda or cu_seqlens.is_cuda:
        # One copy, because each waits for all work that is queued on the device.
        copied = torch.cat([batch.cu_seqlens, batch.loss_mask.to(batch.cu_seqlens.dtype)]).cpu()
        bounds, mask = copied.split([batch.cu_seqlens.numel(), batch.loss_mask.numel()])
        check_cu_seqlens(bounds, mask.numel())
        return bounds, mask.bool()
    return cu_seqlens, loss_mask.bool() & (torch.arange(loss_mask.numel()) < cu_seqlens[-1])


# Items


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """Rows whose coefficients become known at the same time."""

    chunks: tuple[Tensor, ...]  # row numbers [<= rows_per_chunk] int64 on the CPU, ascending
    plan: Callable[..., None] | None = None  # the function that runs it; None: _statistics_first


# (item) -> c [rows of the item, in the order of its chunks], e [the same rows] or None, times a declared factor. Called once an
# item, after its last chunk's forward, when the head's log_probs and entropy hold its rows. Over cp every rank has the same items.
ItemCoefficients = Callable[[WorkItem], tuple[Tensor, Tensor | None]]


def _items(loss: PolicyLoss, batch: LossBatch, options: LossOptions, rows: Tensor, bounds: Tensor, capacity: int) -> list[WorkItem]:
    """Bins of whole documents. Communication: one all-gather of [N] over cp, so that all ranks have the same bins."""
    cuts = torch.searchsorted(rows, bounds.to(rows.dtype)).tolist()
    rows_of_documents = [rows[start:stop] for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
    sizes = [part.numel() for part in rows_of_documents]
    cp_group = options.cp_group
    if cp_group.size() > 1 and sizes:  # of the cp rank that holds most of each document
        sizes = all_gather_stack(torch.tensor(sizes).to(group_device(cp_group)), cp_group).amax(0).tolist()
    # Only at level "sequence" without a clip of tokens, and without other terms, the tokens of a document share one coefficient.
    has_row_terms = bool(options.kl_coefficient or options.entropy_coefficient) or batch.teacher is not None
    is_shared = loss.level == "sequence" and loss.token_clip is None and not has_row_terms
    return schedule_documents(document_bins(sizes, capacity), rows_of_documents, capacity, is_shared=is_shared)


def document_bins(
    sizes: Sequence[int],  # N: rows of each document on the cp rank that holds most of it
    capacity: int,
) -> list[tuple[int, ...]]:
    """Bins of whole documents with at most `capacity` rows each (first fit, decreasing). A longer document has its own bin.

    Long documents come first. The result depends only on the arguments, so cp ranks with equal sizes have equal bins.

    >>> document_bins([3, 10, 5, 0, 4], 8)
    [(1,), (0, 2, 3), (4,)]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for document in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size = sizes[document]
        place = next((number for number, free in enumerate(room) if size <= free), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(document)
        room[place] -= size
    return [tuple(sorted(documents)) for documents in bins]


def schedule_documents(
    bins: Sequence[tuple[int, ...]],
    rows_of_documents: Sequence[Tensor],  # N ascending row numbers each: the rows of this rank that take part
    capacity: int,
    *,
    is_shared: bool,
) -> list[WorkItem]:
    """One item for each bin, in order, even if this rank has no row of it: every cp rank has the reductions of each bin.

    A bin with more than `capacity` rows on this rank is cut into chunks, which changes no collective over cp.
    is_shared: the rows of a document share one coefficient.
    """
    items = []
    for documents in bins:
        rows = torch.cat([rows_of_documents[document] for document in documents])
        chunks, is_one = cut(rows, capacity), is_shared and len(documents) == 1
        if len(chunks) > 1 and not is_one:  # the logits of the last chunk are kept, so a full one saves the most recomputation
            chunks = (*cut(rows[:-capacity], capacity), rows[-capacity:])
        items.append(WorkItem(chunks, scale_last if is_one and len(chunks) > 1 else None))
    return items


# Plans


def run_with_gradient(
    head: LinearHead, items: list[WorkItem], coefficients: ItemCoefficients, gradient: HeadGradient
) -> Tensor | None:
    """Forward and gradient; returns the complete gradient of hidden, [T, H] or with sequence parallelism [T / tp, H].

    Rows that are in no item get gradient 0. `gradient.weight` is then there if it is needed: zeros if no row had a coefficient.
    """
    for number, item in enumerate(items):
        run = item.plan or _statistics_first
        run(head, item, coefficients, gradient, is_last=number == len(items) - 1)
    return finish(head, gradient)


def _statistics_first(
    head: LinearHead, item: WorkItem, coefficients: ItemCoefficients, gradient: HeadGradient, *, is_last: bool
) -> None:
    """The other plans: first the statistics of all chunks, then the gradient. The logits of the last chunk are still in the buffer;
    the other chunks' are computed again, of rows with a coefficient other than 0: no statistics, no all-gather. A cp rank without a
    row of a bin has no chunk."""
    results, sizes = [], [rows.numel() for rows in item.chunks]
    for number, numbers in enumerate(item.chunks):
        leaves_gradient = number == len(sizes) - 1 and not gradient.has_row_term
        last = forward_chunk(head, numbers, leaves_gradient=leaves_gradient)
        results.append((last.rows, last.result))
    c, e = coefficients(item)
    if not results:
        return
    c_parts = c.split(sizes)
    e_parts = [None] * len(sizes) if e is None else e.split(sizes)
    _backward(head, last, c_parts[-1], e_parts[-1], gradient, is_last=is_last and len(sizes) == 1)
    for number, (rows, result) in enumerate(results[:-1]):
        c_part, e_part = c_parts[number], e_parts[number]
        kept = _kept(head, c_part, e_part)
        if kept.numel() == 0:
            continue
        if kept.numel() < sizes[number]:
            rows = device_rows(item.chunks[number][kept], head.hidden.device)
            kept = kept.to(c.device, non_blocking=True)
            c_part, e_part, result = c_part[kept], None if e_part is None else e_part[kept], result.take(kept)
        hidden, labels = chunk_operands(head, rows)
        chunk = Chunk(rows, hidden, labels, chunk_logits(head, hidden), result)
        multiply_chunk(head, chunk, c_part, e_part, gradient, is_last=is_last and number == len(sizes) - 2)


def scale_last(head: LinearHead, item: WorkItem, coefficients: ItemCoefficients, gradient: HeadGradient, *, is_last: bool) -> None:
    """Plan scale-last: all chunks except the last are multiplied before the coefficient c is known, because it commutes:

        dX_k = c (G_k W)     dW = c sum_k G_k^T X_k

    The sum needs a scratch buffer of the weight's size, unless there is no weight gradient yet. The last chunk is multiplied
    with its coefficient, as in plan in-chunk.
    """
    early: list[slice | Tensor] = []
    target = gradient if gradient.weight is None else replace(gradient, weight=None)
    for numbers in item.chunks[:-1]:
        chunk = forward_chunk(head, numbers, leaves_gradient=True)
        early.append(chunk.rows)
        multiply_chunk(head, chunk, None, None, target, is_last=False)
    last = forward_chunk(head, item.chunks[-1], leaves_gradient=True)
    c, _ = coefficients(item)
    is_dropped = bool(c[0] == 0)  # then 0 is written, because 0 x inf would be NaN
    if gradient.hidden is not None:
        for rows in early:
            part = gradient.hidden[rows]
            gradient.hidden[rows] = 0 if is_dropped else multiply_into(part, c[0], part)
    if is_dropped:
        target.weight = None
        return
    if target.weight is not None and target is gradient:
        target.weight.mul_(c[0])
    elif target.weight is not None and gradient.weight is not None:
        gradient.weight.addcmul_(target.weight, c[0].to(target.weight.dtype))
    multiply_chunk(head, last, c[-last.labels.numel() :], None, gradient, is_last=is_last)


def _kept(head: LinearHead, c: Tensor, e: Tensor | None) -> Tensor:  # [k] ascending, on the CPU
    """The one synchronisation of a chunk. A teacher has a gradient in each row."""
    if head.term is not None:
        return torch.arange(c.numel())
    is_kept = c != 0 if e is None else (c != 0) | (e != 0)
    return is_kept.cpu().nonzero()[:, 0]


def _backward(head: LinearHead, chunk: Chunk, c: Tensor, e: Tensor | None, gradient: HeadGradient, *, is_last: bool) -> None:
    """The chunk's gradient. Rows whose coefficients are 0, for instance clipped ones, are removed first."""
    kept = _kept(head, c, e)
    if kept.numel() == 0:
        return
    if kept.numel() < c.numel():
        chunk, order = _keep_rows(chunk, kept)
        c, e = c[order], None if e is None else e[order]
    multiply_chunk(head, chunk, c, e, gradient, is_last=is_last)


def _keep_rows(chunk: Chunk, kept: Tensor) -> tuple[Chunk, Tensor]:  # kept [k < n] ascending, on the CPU
    """A chunk of only the `kept` rows, and their order, as compact_rows. The old chunk is then invalid."""
    num_kept = kept.numel()
    order, holes, sources = compact_rows(chunk.logits, kept)
    rows, hidden = chunk.rows, chunk.hidden
    if isinstance(rows, slice):  # then hidden is a view of the caller's tensor
        rows, hidden = order + rows.start, hidden[order]
    else:
        hidden[holes] = hidden[sources]
        rows, hidden = rows[order], hidden[:num_kept]
    labels, logits, result = chunk.labels[order], chunk.logits[:num_kept], chunk.result.take(order)
    return Chunk(rows, hidden, labels, logits, result, chunk.is_unit_gradient), order


def compact_rows(
    logits: Tensor,  # [n, V_tp]
    kept: Tensor,  # [k < n] ascending, on the CPU
) -> tuple[Tensor, Tensor, Tensor]:  # on the device: row i was row order[i]; row holes[j] was row sources[j]
    """Moves the kept rows to the begin, in place: rows from the end fill the gaps, so no more rows move than were dropped."""
    num_kept = kept.numel()
    is_kept = torch.zeros(logits.shape[0], dtype=torch.bool)
    is_kept[kept] = True
    holes = is_kept[:num_kept].logical_not().nonzero()[:, 0]
    sources = kept[num_kept - holes.numel() :]
    order = torch.arange(num_kept)
    order[holes] = sources
    order, holes, sources = (index.to(logits.device, non_blocking=True) for index in (order, holes, sources))
    most = TEMPORARY_BYTES if logits.is_cuda else CPU_TEMPORARY_BYTES
    for part in blocks(holes.numel(), logits.shape[1] * logits.itemsize, most):  # torch makes a copy of the rows that move
        logits[holes[part]] = logits[sources[part]]
    return order, holes, sources


# Backward


def ready_gradient(hidden: Tensor, weight: Tensor, loss_scale: Tensor | float | AssumedScale | None) -> ReadyGradient:
    """An empty one. Raises ConfigError for a wrong loss_scale, for float16 without one, and in a recomputation that adds to
    main_grad."""
    if isinstance(loss_scale, AssumedScale):
        raise ConfigError(
            "loss_scale=AssumedScale() is for losses from logits: the fused head adds the weight's gradient to main_grad in "
            "forward, and cannot take out that of a wrong guess; pass the factor, or None, with which backward multiplies [T, H] "
            "and [V_tp, H] by whatever it delivers"
        )
    if loss_scale is not None:
        check_declared_scale(loss_scale)
    elif hidden.dtype == torch.float16:
        raise ConfigError(
            "float16 hidden states need loss_scale: the gradient is computed in forward, and without its scale float16 rounds most "
            "of it to 0; pass the factor that backward will deliver, or use bfloat16"
        )
    # torch has no public name for "a backward pass runs in this thread"; torch.utils.checkpoint asks the same function.
    is_in_main_grad = loss_scale is not None and weight.requires_grad and main_grad_of(weight) is not None
    if is_in_main_grad and torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            "this forward pass runs inside a backward pass: the head is recomputed, which would add its weight gradient to "
            "main_grad a second time; leave the head out of activation recomputation, or pass loss_scale=None"
        )
    return ReadyGradient(weight, hidden.requires_grad, is_in_main_grad, loss_scale)


class _WithHeadGradient(torch.autograd.Function):
    """Makes the loss differentiable with respect to hidden and weight. Backward: no communication, no synchronisation on CUDA."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, gradient: ReadyGradient) -> Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None  # so that autograd can take its tensors without a copy
        if gradient is None:
            raise ConfigError(
                "a second backward through the fused head: its gradient was computed in forward and is gone; compute the loss "
                "again, or use the logits path (policy_loss) where retain_graph is needed"
            )
        factor: Tensor | None = upstream
        if gradient.loss_scale is not None:
            factor = check_actual_scale(upstream, gradient.loss_scale, "the gradient is already made with the declared one")
        hidden = gradient.hidden
        if hidden is not None and factor is not None:
            multiply_into(hidden, factor, hidden)
        return hidden, _deliver_weight(factor, gradient), None, None


def _deliver_weight(factor: Tensor | None, gradient: ReadyGradient) -> Tensor | None:
    """What autograd gets for the weight: its gradient, or what Megatron's hooks expect where main_grad has it."""
    weight = gradient.weight
    parameter: Any = gradient.parameter  # it has attributes of Megatron
    if gradient.is_in_main_grad:
        if factor is not None and gradient.hidden is None:
            parameter.main_grad.mul_(factor)  # without a gradient of hidden, only main_grad can show the NaN of a wrong factor
        return gradient_in_main_grad(parameter)
    if weight is None:
        return None
    main_grad = main_grad_of(parameter)
    if main_grad is not None:
        _ = main_grad.add_(weight) if factor is None else main_grad.addcmul_(weight, factor.to(main_grad.dtype))
        return gradient_in_main_grad(parameter)
    if factor is None:
        return weight.to(parameter.dtype)
    is_rounded = weight.dtype == parameter.dtype
    return multiply_into(weight, factor, weight if is_rounded else torch.empty_like(weight, dtype=parameter.dtype))
