"""Gives autograd a gradient that forward has computed. Backward multiplies it by its factor; a second backward raises.

The weight's gradient is a float32 buffer. It is added to Megatron's float32 `main_grad` where the parameter has one, unrounded:
in forward if the factor was announced (loss_scale), else in backward. Without main_grad it is returned in the weight's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.ops.autograd import first_order_only
from megatron_rl.ops.linear_head import accumulator_dtype

# Relative. The factor is a product of a few float32 numbers; a wrong one differs by a count of ranks or micro-batches.
FACTOR_TOLERANCE = 1e-6


@dataclass(slots=True)
class ReadyGradient:
    """The gradient that backward returns, once."""

    hidden: Tensor | None  # [T, H] or [T / tp, H]
    weight: Tensor | None  # [V_tp, H] float32; None where it is in main_grad or not needed
    parameter: Tensor  # the weight as the caller gave it, with main_grad and its flags
    is_in_main_grad: bool
    loss_scale: Tensor | float | None
    is_delivered: bool = False


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's float32 gradient buffer of the weight; None without one, and with Megatron-FSDP, which makes its own later."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or hasattr(weight, "__fsdp_param__"):
        return None
    return main_grad if main_grad.dtype == accumulator_dtype(weight) and main_grad.shape == weight.shape else None


def check_loss_scale(loss_scale: Tensor | float | None, hidden: Tensor, *, adds_in_forward: bool) -> None:
    """Raises ConfigError for a wrong loss_scale, for float16 without one, and in a recomputation that adds to main_grad."""
    is_scalar = isinstance(loss_scale, Tensor) and loss_scale.dim() == 0
    if loss_scale is not None and not is_scalar and (not isinstance(loss_scale, Real) or not 0 < loss_scale < float("inf")):
        raise ConfigError(
            f"loss_scale={loss_scale!r} must be a finite number above 0 or a 0-d tensor: the factor that backward will deliver; "
            "pass None if it is not known yet"
        )
    if loss_scale is None and hidden.dtype == torch.float16:
        raise ConfigError(
            "float16 hidden states need loss_scale: the gradient is computed in forward, and without its scale float16 rounds most "
            "of it to 0; pass the factor that backward will deliver, or use bfloat16"
        )
    if adds_in_forward and torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            "this forward pass runs inside a backward pass: the head is recomputed, which would add its weight gradient to "
            "main_grad a second time; leave the head out of activation recomputation, or pass loss_scale=None"
        )


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
        if gradient.is_delivered:
            raise ConfigError(
                "a second backward through the fused head: its gradient was computed in forward and is gone; compute the loss "
                "again, or use the logits path (policy_loss) where retain_graph is needed"
            )
        gradient.is_delivered = True
        factor = upstream if gradient.loss_scale is None else _mismatch(upstream, gradient.loss_scale)
        hidden, weight = gradient.hidden, gradient.weight
        gradient.hidden = gradient.weight = None  # so that autograd can take the tensors without a copy
        if hidden is not None and factor is not None:
            hidden.mul_(factor)
        return hidden, _deliver_weight(weight, factor, gradient, reaches_hidden=hidden is not None), None, None


def _mismatch(upstream: Tensor, loss_scale: Tensor | float) -> Tensor | None:
    """None if backward delivers the announced factor, else ConfigError. On CUDA: 1, or NaN for another factor."""
    is_equal = (upstream / loss_scale - 1.0).abs() <= FACTOR_TOLERANCE
    if upstream.is_cuda:
        return torch.where(is_equal, 1.0, float("nan"))
    if not bool(is_equal):
        raise ConfigError(
            f"loss_scale={float(loss_scale)!r} was announced and backward delivers {float(upstream)!r}: the weight gradient is "
            "already in main_grad with the announced one. Pass the product of everything that multiplies .loss: the schedule's "
            "factor, 1 / num_microbatches and the optimizer's loss scale"
        )
    return None


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
        _ = main_grad.add_(weight) if factor is None else main_grad.addcmul_(weight, factor.to(weight.dtype))
        return gradient_in_main_grad(parameter)
    if factor is not None:
        weight.mul_(factor)
    return weight.to(parameter.dtype)


def gradient_in_main_grad(parameter: Tensor) -> Tensor | None:
    """The placeholder for a gradient that is in main_grad already. Megatron's DDP hook needs a gradient, and adds it to main_grad
    unless `grad_added_to_main_grad` is True. With zero_out_wgrad (tied embeddings) the hook always adds it, so it is zeros."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter) if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)
