"""Computes the clipped objective of PPO. GRPO applies it to the ratio of each token, GSPO to the ratio of each sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.loss_hub import LossValue, Parameter
from megatron_rl.ops.ratios import bounded_exp

CLIP_RATIO_C = Parameter(
    "clip_ratio_c",
    default=math.inf,
    minimum=1.0,
    is_above_minimum=True,
    help="dual clip: for A < 0 the ratio is clipped at this number too, so that one token has at most this many times the "
    "gradient of REINFORCE; 3 is usual",
)


def clipped_objective(
    log_ratio: Tensor,  # [*]
    advantages: Tensor,  # [*]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float = math.inf,
) -> LossValue:  # [*]
    """The pessimistic bound of PPO (Schulman et al., arXiv:1707.06347, equation 7), with the dual clip where c is finite.

        rho = exp(log_ratio)     value = -min(rho A, clip(rho, 1 - low, 1 + high) A)
        for A < 0 and finite c   value = -max(min(rho A, clip(rho, 1 - low, 1 + high) A), c A)

    Dual clip: Ye et al., arXiv:1912.09729. It is computed as min(rho, c) in place of rho, which is the same for c > 1.
    All bounds are inclusive: at 1 + high, 1 - low and c the ratio is not clipped, so the derivative is -rho A there and 0 beyond.
    A log-ratio outside +-20 is set to the bound, with derivative 0. A = 0 gives value and derivative 0. NaN passes through.

    >>> found = clipped_objective(torch.tensor([0.5]).log(), torch.tensor([2.0]), clip_ratio_low=0.2, clip_ratio_high=0.2)
    >>> found.value.item(), found.derivative.item(), found.is_clipped.item()
    (-1.0, -1.0, False)
    """
    ratio = bounded_exp(log_ratio)
    lower, upper = 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    capped = torch.where(advantages < 0, ratio.clamp(max=clip_ratio_c), ratio)  # c A would be inf x 0 at A = 0
    unclipped = capped * advantages
    value = -torch.minimum(unclipped, capped.clamp(lower, upper) * advantages)
    is_active = ((advantages > 0) & (ratio <= upper)) | ((advantages < 0) & (ratio >= lower) & (ratio <= clip_ratio_c))
    is_active &= log_ratio.abs() <= LOG_RATIO_BOUND
    derivative = torch.where(is_active, -unclipped, 0.0)
    return LossValue(torch.where(advantages == 0, 0.0, value), derivative, (derivative == 0) & (advantages != 0))
