"""Runs a schedule of chunks through a head: the forward pass and, during it, the gradient, which autograd then gets.

It contains no loss: a function of the caller gives the coefficients c = dL/dlog_prob and e = dL/dentropy of each item. With
G = d log_prob / d logits of a row, which depends on no loss, dX = c (G W) and dW = G^T (c X). The coefficient commutes with both
matmuls, so plan scale-last can multiply before c is known. Derivation: docs/kernels.md.

    row-by-row   the coefficient of a token depends on that token only: chunks may be cut anywhere
    in-chunk     whole documents that fit one chunk: their coefficients are known while the chunk's logits exist
    scale-last   one long document in several chunks, with one coefficient: chunks are summed unscaled, then scaled
                 (ops/document_bins.py)
    two-pass     one long document with a coefficient for each token: every chunk except the last is computed twice

Row numbers are CPU tensors. A row that has no part in the loss is in no chunk.

A chunk: logits, all-gather over tp, coefficients (their function reduces over cp), removal of rows whose c and e are 0, gradient
written over the logits, dX, start of its reduction over tp, dW during that reduction. Where e is 0, the forward pass of a chunk may
leave G itself in the memory of the logits: then no kernel reads the logits again.

Backward multiplies this gradient by its factor; a second backward raises. The weight's gradient is summed in float32. Where the
parameter has Megatron's float32 `main_grad`, it is added there, unrounded: in forward if the factor was declared (loss_scale),
else in backward. Without main_grad it is returned in the weight's dtype. If that has 16 bits, it is rounded

    one product in all     by this product, once. Then a factor of backward that is no power of two rounds once more, by at most
                           2^-8 of an element in bfloat16, as in the gradient of hidden. A declared factor rounds nothing
    several products       by backward, once: it multiplies their float32 sum
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Pending, start_all_reduce_sum, start_reduce_scatter_sum
from megatron_rl.ops.backends import first_order_only
from megatron_rl.ops.linear_head import (
    CPU_TEMPORARY_BYTES,
    TEMPORARY_BYTES,
    Chunk,
    LinearHead,
    accumulator_dtype,
    add_weight_gradient,
    blocks,
    chunk_logits,
    chunk_operands,
    device_rows,
    forward_chunk,
    hidden_gradient,
    multiply_into,
    weight_gradient,
)
from megatron_rl.ops.scale import AssumedScale, check_actual_scale, check_declared_scale


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """Rows whose coefficients become known at the same time."""

    chunks: tuple[Tensor, ...]  # row numbers [<= rows_per_chunk] int64 on the CPU, ascending
    plan: Callable[..., None] | None = None  # the function that runs it; None: _statistics_first


# (item) -> c [rows of the item, in the order of its chunks], e [the same rows] or None. Called once an item, after the forward pass
# of its last chunk, when the head's log_probs and entropy hold its rows. It may reduce over cp: every rank has the same items.
Coefficients = Callable[[WorkItem], tuple[Tensor, Tensor | None]]


def schedule_rows(
    rows: Tensor,  # ascending row numbers
    capacity: int,
) -> list[WorkItem]:
    """Chunks of nearly equal size, each an item."""
    return [WorkItem((chunk,)) for chunk in cut(rows, capacity)]


def cut(rows: Tensor, capacity: int) -> tuple[Tensor, ...]:
    """The fewest chunks of at most `capacity` rows, of sizes that differ by one row at most; no chunk for no rows."""
    num_chunks = -(-rows.numel() // capacity)
    return tuple(torch.tensor_split(rows, num_chunks)) if num_chunks else ()


@dataclass(slots=True)
class HeadGradient:
    """The buffers that collect the gradient of one call. None: it is not needed."""

    hidden: Tensor | None  # [T, H], this tp rank's part where a reduce-scatter follows, else complete
    weight: Tensor | None  # [V_tp, H]: the parameter's main_grad, else what the products so far gave; None before the first
    needs_weight: bool
    rounds_weight: bool  # a product that is the first and the last one writes the weight's dtype
    has_row_term: bool  # the entropy's or a teacher's gradient comes, which does not commute
    scale: Tensor | float | None = None  # multiplies every coefficient
    is_reduced: bool = True  # `hidden` is summed over tp; False: it stays this shard's part of the sum
    reduction: Pending | None = None  # the reduce-scatter of `hidden`, under sequence parallelism


def hidden_buffer(head: LinearHead) -> Tensor:  # [T, H] zeros
    """Contiguous whatever the strides of head.hidden, because a product and the sum over tp write its slices in place."""
    return torch.zeros_like(head.hidden, memory_format=torch.contiguous_format)


def gradient_for(ready: ReadyGradient, head: LinearHead, *, has_row_term: bool, for_pairs: bool = False) -> HeadGradient:
    """Buffers for what `ready` needs. for_pairs: pairs come too, so that their caller rounds, scales and reduces."""
    main_grad = main_grad_of(ready.parameter)
    return HeadGradient(
        hidden=hidden_buffer(head) if ready.needs_hidden else None,
        weight=main_grad if ready.is_in_main_grad else None,
        needs_weight=ready.parameter.requires_grad,
        rounds_weight=main_grad is None and not for_pairs,  # it stays float32 for a main_grad that backward adds it to
        has_row_term=has_row_term,
        scale=None if for_pairs else ready.loss_scale,
        is_reduced=not for_pairs,
    )


def run_with_gradient(head: LinearHead, items: list[WorkItem], coefficients: Coefficients, gradient: HeadGradient) -> Tensor | None:
    """Forward and gradient; returns the complete gradient of hidden, [T, H] or with sequence parallelism [T / tp, H].

    Rows that are in no item get gradient 0. `gradient.weight` is then there if it is needed: zeros if no row had a coefficient.
    Communication over tp: one all-gather a chunk. For the gradient of hidden one all-reduce a chunk, or one reduce-scatter; each
    runs during a weight gradient.
    """
    for number, item in enumerate(items):
        run = item.plan or _statistics_first
        run(head, item, coefficients, gradient, is_last=number == len(items) - 1)
    return finish(head, gradient)


def finish(head: LinearHead, gradient: HeadGradient) -> Tensor | None:
    """After the last chunk: the complete gradient of hidden, and a weight gradient of zeros where no row had a coefficient."""
    if gradient.needs_weight and gradient.weight is None:
        gradient.weight = torch.zeros_like(head.weight, dtype=head.hidden.dtype)
    if gradient.hidden is None:
        return None
    if head.options.sequence_parallel and gradient.is_reduced and gradient.reduction is None:
        gradient.reduction = start_reduce_scatter_sum(gradient.hidden, head.options.tp_group)
    return gradient.hidden if gradient.reduction is None else gradient.reduction.wait()


def _statistics_first(
    head: LinearHead, item: WorkItem, coefficients: Coefficients, gradient: HeadGradient, *, is_last: bool
) -> None:
    """The other plans: first the statistics of all chunks, then the gradient. The logits of the last chunk are still in the buffer;
    the other chunks' are computed again, of rows with a coefficient other than 0: no statistics, no all-gather. A cp rank without a
    row of a bin has no chunk.
    """
    results, sizes = [], [rows.numel() for rows in item.chunks]
    for number in range(len(sizes)):
        leaves_gradient = number == len(sizes) - 1 and not gradient.has_row_term
        last = forward_item(head, item, number, leaves_gradient=leaves_gradient)
        results.append((last.rows, last.result))
    c, e = scaled(coefficients(item), gradient)
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


def forward_item(head: LinearHead, item: WorkItem, number: int, *, leaves_gradient: bool) -> Chunk:
    return forward_chunk(head, device_rows(item.chunks[number], head.hidden.device), leaves_gradient=leaves_gradient)


def scaled(coefficients: tuple[Tensor, Tensor | None], gradient: HeadGradient) -> tuple[Tensor, Tensor | None]:
    c, e = coefficients
    if gradient.scale is None:
        return c, e
    return c * gradient.scale, None if e is None else e * gradient.scale


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
    kept_chunk = dataclasses.replace(
        chunk,
        rows=rows,
        hidden=hidden,
        labels=chunk.labels[order],
        logits=chunk.logits[:num_kept],
        result=chunk.result.take(order),
    )
    return kept_chunk, order


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


def multiply_chunk(
    head: LinearHead, chunk: Chunk, c: Tensor | None, e: Tensor | None, gradient: HeadGradient, *, is_last: bool
) -> None:
    """Writes the gradient over the logits, then dX, then dW while dX is reduced. c None: 1."""
    out, row_scale = _logits_gradient(head, chunk, c, e)
    pending, own, hidden, operand = None, None, gradient.hidden, chunk.hidden
    if hidden is not None:
        # A slice of rows is written to the place where it stays.
        own = hidden[chunk.rows] if isinstance(chunk.rows, slice) and hidden.dtype == out.dtype else None
        part = hidden_gradient(out, head.weight, out=own)
        if row_scale is not None:
            part.mul_(row_scale)
        if head.options.sequence_parallel or not gradient.is_reduced:
            if own is None:
                hidden[chunk.rows] = part.to(hidden.dtype)
            if is_last and gradient.is_reduced:
                gradient.reduction = start_reduce_scatter_sum(hidden, head.options.tp_group)
        else:
            pending = start_all_reduce_sum(part, head.options.tp_group)
        del part
    if gradient.needs_weight:
        if row_scale is not None:  # rows that were gathered are this chunk's own; a slice shows the caller's tensor
            scaled = operand if isinstance(chunk.rows, Tensor) else torch.empty_like(operand)
            operand = torch.mul(operand, row_scale, out=scaled)
        if gradient.weight is not None:
            add_weight_gradient(out, operand, out=gradient.weight)
        else:
            dtype = head.hidden.dtype if is_last and gradient.rounds_weight else accumulator_dtype(head.hidden)
            gradient.weight = weight_gradient(out, operand, dtype)
    if hidden is not None and pending is not None:
        reduced = pending.wait()
        if own is None:
            hidden[chunk.rows] = reduced.to(hidden.dtype)


def _logits_gradient(
    head: LinearHead, chunk: Chunk, c: Tensor | None, e: Tensor | None
) -> tuple[Tensor, Tensor | None]:  # [n, V_tp], and [n, 1] that rows of both products get, or None
    """Each row is rounded once more where c comes after the product: c (G W) and c X in 16 bits, in the place of c G."""
    if chunk.is_unit_gradient:
        return chunk.logits, None if c is None else c[:, None]
    result, kernels = chunk.result, head.kernels
    c = torch.ones_like(result.total) if c is None else c
    out = head.gradient[: chunk.logits.shape[0]]
    if head.term is None:
        kernels.gradient(chunk.logits, chunk.labels, None, result.maximum, result.total, result.entropy, c, e, head.shard, out=out)
    else:
        d = head.term.weights[chunk.rows]
        head.term.write_gradient(kernels, chunk.logits, chunk.labels, None, chunk.rows, result, c, e, d, out=out)
    return out, None


@dataclass(slots=True)
class ReadyGradient:
    """The gradient that backward returns, once."""

    parameter: Tensor  # the weight as the caller gave it, with main_grad and its flags
    needs_hidden: bool
    is_in_main_grad: bool
    loss_scale: Tensor | float | None
    hidden: Tensor | None = None  # [T, H] or [T / tp, H]
    weight: Tensor | None = None  # [V_tp, H] float32, or already the weight's dtype; None where it is in main_grad or not needed
    is_used: bool = False


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's float32 gradient buffer of the weight; None without one, with Megatron-FSDP, which makes its own later, and where
    a hook on the weight must see its gradient: autograd then gets it."""
    main_grad = getattr(weight, "main_grad", None)
    # torch can register hooks on a tensor, and has no public name for those that are there.
    if main_grad is None or hasattr(weight, "__fsdp_param__") or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    return main_grad if main_grad.dtype == accumulator_dtype(weight) and main_grad.shape == weight.shape else None


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


def attach_gradient(
    loss: Tensor,  # 0-d, with its own storage
    hidden: Tensor,
    weight: Tensor,
    gradient: ReadyGradient,
) -> Tensor:
    """The loss, differentiable with respect to hidden and weight. Backward: no communication, no synchronisation on CUDA."""
    result: Tensor = _WithHeadGradient.apply(hidden, weight, loss, gradient)  # type: ignore[no-untyped-call]  # torch's
    return result


class _WithHeadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, gradient: ReadyGradient) -> Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ctx.gradient
        if gradient.is_used:
            raise ConfigError(
                "a second backward through the fused head: its gradient was computed in forward and is gone; compute the loss "
                "again, or use the logits path (policy_loss) where retain_graph is needed"
            )
        gradient.is_used = True
        factor: Tensor | None = upstream
        if gradient.loss_scale is not None:
            factor = check_actual_scale(upstream, gradient.loss_scale, "the gradient is already made with the declared one")
        hidden, weight = gradient.hidden, gradient.weight
        gradient.hidden = gradient.weight = None  # so that autograd can take the tensors without a copy
        if hidden is not None and factor is not None:
            multiply_into(hidden, factor, hidden)
        return hidden, _deliver_weight(weight, factor, gradient, reaches_hidden=hidden is not None), None, None


def _deliver_weight(
    weight: Tensor | None, factor: Tensor | None, gradient: ReadyGradient, *, reaches_hidden: bool
) -> Tensor | None:
    """What autograd gets for the weight: its gradient, or what Megatron's hooks expect where main_grad has it."""
    parameter: Any = gradient.parameter  # it has attributes of Megatron
    if gradient.is_in_main_grad:
        if factor is not None and not reaches_hidden:
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


def gradient_in_main_grad(parameter: Tensor) -> Tensor | None:
    """The placeholder for a gradient that is in main_grad already. Megatron's DDP hook needs a gradient, and adds it to main_grad
    unless `grad_added_to_main_grad` is True. With zero_out_wgrad (tied embeddings) the hook always adds it, so it is zeros."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter) if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)
