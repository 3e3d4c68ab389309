"""Defines SAPO: a sigmoid of the ratio in place of a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.declare import LossValue, Parameter, bounded_exp, register_policy_loss


@register_policy_loss(
    "sapo",
    triton="megatron_rl.losses.sapo_triton.sapo",
    parameters=(
        Parameter(
            "sapo_temperature_positive",
            default=1.0,
            minimum=0.0,
            is_above_minimum=True,
            help="the temperature of tokens with A > 0; a larger one fades the gradient out nearer to the ratio 1",
        ),
        Parameter(
            "sapo_temperature_negative",
            default=1.05,
            minimum=0.0,
            is_above_minimum=True,
            help="the temperature of tokens with A < 0; the paper takes it above the other one",
        ),
    ),
)
def sapo(
    log_ratio: Tensor,  # [T] log_probs_t - old_log_probs_t
    advantages: Tensor,  # [T]
    *,
    sapo_temperature_positive: float,
    sapo_temperature_negative: float,
) -> LossValue:  # [T]
    """Fades the gradient of a token out as its ratio leaves 1.

        rho_t   = exp(log_ratio_t)     tau = sapo_temperature_positive for A_t > 0, else sapo_temperature_negative
        value_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A_t

    Gao et al., "Soft Adaptive Policy Optimization", arXiv:2511.20347.
    Use it when hard clips throw too much signal away, as the paper describes. With p = sigmoid(tau (rho_t - 1)) the
    derivative is -4 p (1 - p) rho_t A_t: REINFORCE's -A_t at ratio 1. Beyond |log_ratio| = 20 it is 0.
    """
    ratio = bounded_exp(log_ratio)
    # One side is a tensor: two numbers would be rounded to float32, for a float64 loss too.
    temperature = torch.where(advantages > 0, sapo_temperature_positive, torch.full_like(ratio, sapo_temperature_negative))
    exponent = temperature * (ratio - 1)
    # By exp: torch.sigmoid has other bits in the last elements of a tensor, and padding would move them.
    gate, rest = 1 / (1 + (-exponent).exp()), 1 / (1 + exponent.exp())
    return LossValue(-4 / temperature * gate * advantages, derivative=-4 * gate * rest * ratio * advantages)
