"""Computes the fp32 head: float32 logits of 16-bit parameters, and their gradients. It keeps no second copy of the weight.

Data flow: (SP: one all-gather of hidden) -> logits = X W^T in float32 -> backward: dX = G W; its reduction over tp runs during
dW += G^T X. dW goes into the parameter's float32 gradient buffer where it has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.layout.groups import Group, all_gather_stack, start_all_reduce_sum, start_reduce_scatter_sum
from megatron_rl.ops.backends import first_order_only, runs_eagerly
from megatron_rl.ops.linear_head import (
    add_weight_gradient,
    gradient_dtype,
    gradient_in_main_grad,
    head_logits,
    hidden_gradient,
    logits_dtype,
    main_grad_of,
    product_operand,
    weight_gradient,
)


@runs_eagerly
def fp32_head_logits(
    hidden: Tensor,  # [..., H], with sequence_parallel this tp rank's shard of the first dimension
    weight: Tensor,  # [V_tp, H], of hidden's dtype
    *,
    tp_group: Group,
    sequence_parallel: bool = False,
) -> Tensor:  # [..., V_tp] float32, the first dimension whole
    """X W^T with a float32 result. Products of bfloat16 (or float16) are exact in float32, so only the sums are rounded.

    The gradient of `hidden` is complete over tp. The gradient of `weight` is summed in float32. Where Megatron keeps a float32
    `weight.main_grad` it is added there, and Megatron's hook gets the gradient that it then expects; else it is returned in the
    weight's dtype. On CUDA the logits' gradient is rounded to hidden's dtype for the two backward products. Their sums are
    float32, and the gradient of `hidden` is rounded to its dtype. On the CPU only the returned gradients are rounded.

    Communication: without sequence parallelism one all-reduce of the gradient of `hidden` over tp in backward; with it one
    all-gather of hidden in forward and in backward, and one reduce-scatter in backward. None at tp size 1.
    """
    logits: Tensor = _Float32Head.apply(hidden, weight, tp_group, sequence_parallel and tp_group.size() > 1)  # type: ignore[no-untyped-call]  # torch's
    return logits


class _Float32Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tp_group: Group, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.parameter = weight  # the object that carries main_grad
        ctx.tp_group, ctx.sequence_parallel = tp_group, sequence_parallel
        rows = _whole_rows(hidden, tp_group, sequence_parallel)
        logits = rows.new_empty(rows.shape[0], weight.shape[0], dtype=logits_dtype(weight, True))
        head_logits(product_operand(rows, True), product_operand(weight, True), out=logits)
        whole = (-1, *hidden.shape[1:-1]) if hidden.dim() > 1 else ()
        return logits.view(*whole, weight.shape[0])

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # [..., V_tp]
        hidden, weight = ctx.saved_tensors
        logits_gradient = gradient.reshape(-1, weight.shape[0]).to(gradient_dtype(weight, True))
        pending = own_weight_gradient = rows = None
        if ctx.needs_input_grad[1]:  # before the reduction starts: collectives of a group queue, and the gather is waited for
            rows = product_operand(_whole_rows(hidden, ctx.tp_group, ctx.sequence_parallel), True)
        if ctx.needs_input_grad[0]:
            rows_gradient = hidden_gradient(logits_gradient, product_operand(weight, True))
            start = start_reduce_scatter_sum if ctx.sequence_parallel else start_all_reduce_sum
            pending = start(rows_gradient, ctx.tp_group)
        if rows is not None:
            own_weight_gradient = _weight_gradient(logits_gradient, rows, ctx.parameter)
        reduced_gradient = None if pending is None else pending.wait().to(hidden.dtype).view(hidden.shape)
        return reduced_gradient, own_weight_gradient, None, None


def _weight_gradient(logits_gradient: Tensor, rows: Tensor, parameter: Tensor) -> Tensor | None:  # [V_tp, H], what backward returns
    """Adds G^T X to main_grad, unrounded, where there is one; else returns it in the parameter's dtype."""
    main_grad = main_grad_of(parameter)
    if main_grad is None:
        return weight_gradient(logits_gradient, rows, parameter.dtype)
    add_weight_gradient(logits_gradient, rows, out=main_grad)
    return gradient_in_main_grad(parameter)


def _whole_rows(hidden: Tensor, tp_group: Group, sequence_parallel: bool) -> Tensor:  # -> [T, H]
    rows = hidden.reshape(-1, hidden.shape[-1])
    return all_gather_stack(rows, tp_group).flatten(0, 1) if sequence_parallel else rows
