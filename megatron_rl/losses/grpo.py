"""Defines GRPO: one importance ratio per token, clipped per token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.declare import LossValue, Parameter, bounded_exp, register_policy_loss

CLIP_RATIO_C = Parameter(
    "clip_ratio_c",
    default=math.inf,
    minimum=1.0,
    is_above_minimum=True,
    help="dual clip: for A < 0 the ratio is clipped at this number too, so that one token has at most this many times the "
    "gradient of REINFORCE; 3 is usual",
)


@register_policy_loss(
    "grpo",
    clip_ratios=(0.2, 0.2),
    triton="megatron_rl.losses.grpo_triton.grpo",
    parameters=(CLIP_RATIO_C,),
)
def grpo(
    log_ratio: Tensor,  # [*] log_probs_t - old_log_probs_t
    advantages: Tensor,  # [*]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float = math.inf,
) -> LossValue:  # [*]
    """Clips each token's ratio.

        rho_t   = exp(log_ratio_t)
        value_t = -min(rho_t A_t, clip(rho_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A_t)
        for A_t < 0 and a finite c = clip_ratio_c: -max(min(...), c A_t)

    Shao et al., "DeepSeekMath", arXiv:2402.03300, equation 3 without its KL term. The clip is PPO's (Schulman et al.,
    arXiv:1707.06347, equation 7); the dual clip with c is from Ye et al., arXiv:1912.09729.
    Use it when you want the common baseline. DAPO (arXiv:2503.14476) widens clip_ratio_high to 0.28 for more exploration.

    All bounds are inclusive: at 1 + high, 1 - low and c the ratio is not clipped, so the derivative is -rho A there and 0 beyond.
    A log-ratio outside +-20 is set to the bound, with derivative 0. A = 0 gives value and derivative 0. NaN passes through.

    >>> found = grpo(torch.tensor([0.5]).log(), torch.tensor([2.0]), clip_ratio_low=0.2, clip_ratio_high=0.2)
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
