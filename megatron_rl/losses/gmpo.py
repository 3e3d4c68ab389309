"""Defines GMPO: the geometric mean of a sample's clipped token ratios."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.declare import LossValue, bounded_exp, register_policy_loss


def clipped_log_ratio(
    log_ratio: Tensor,  # [T]
    advantages: Tensor,  # [T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> Tensor:  # [T]
    """Each on the side where the step would go on."""
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=math.log(1 + clip_ratio_high)), log_ratio)
    return torch.where(advantages < 0, log_ratio.clamp(min=math.log(1 - clip_ratio_low)), clipped)


@register_policy_loss(
    "gmpo",
    level="sequence",
    clip_ratios=(1 - math.exp(-0.4), math.exp(0.4) - 1),  # log-ratios between -0.4 and 0.4, as published
    token_clip=clipped_log_ratio,
)
def gmpo(
    log_ratio: Tensor,  # [N] the mean of clipped_log_ratio over the m_i unmasked tokens of sample i
    advantages: Tensor,  # [N]
    **clip: float,  # acts on tokens, in clipped_log_ratio
) -> LossValue:  # [N]
    """Clips each token's log-ratio on the side where the step would go on, and gives all tokens their sample's geometric mean.

        l_t     = min(log_ratio_t, log(1 + clip_ratio_high))     for A_i > 0
                = max(log_ratio_t, log(1 - clip_ratio_low))      for A_i < 0
                = log_ratio_t                                    for A_i = 0
        rho_i   = exp( sum_{t in i} m_t l_t / m_i )
        value_i = -rho_i A_i

    Zhao et al., "Geometric-Mean Policy Optimization", arXiv:2507.20673.
    Use it when outlier ratios make grpo unstable, as the paper describes. The mean is over the sample, on all cp ranks.
    The derivative by a token is -rho_i A_i where its log-ratio is not clipped, and 0 elsewhere; beyond |log rho_i| = 20 it is 0.

    Differences from the paper: it clips log-ratios at -0.4 and 0.4; the two flags are distances of the ratio from 1, as in each
    loss here, so the same bounds are 1 - e^-0.4 and e^0.4 - 1. Texts that write the clip with
    the sign of A bound the ratio of A < 0 below by 1 / (upper bound); here, as in equation 4 of the paper's third version and in
    verl, the lower bound does. By default both are e^-0.4.
    """
    value = -bounded_exp(log_ratio) * advantages
    return LossValue(value, derivative=value, is_clipped=(log_ratio.abs() > LOG_RATIO_BOUND) & (advantages != 0))
