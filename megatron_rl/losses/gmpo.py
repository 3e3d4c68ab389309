"""Defines GMPO: the geometric mean of a sample's clipped token ratios."""

from __future__ import annotations

import math

import torch

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.loss_hub import LossValue, register_policy_loss
from megatron_rl.losses.token_batch import TokenBatch
from megatron_rl.ops.ratios import bounded_exp


@register_policy_loss(
    "gmpo",
    level="batch",
    clip_ratios=(1 - math.exp(-0.4), math.exp(0.4) - 1),  # log-ratios between -0.4 and 0.4, as published
)
def gmpo(
    batch: TokenBatch,  # [T] vectors
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> LossValue:  # [T]
    """Clips each token's log-ratio on the side where the step would go on, and gives all tokens their sample's geometric mean.

        l_t     = min(log_ratio_t, log(1 + clip_ratio_high))     for A_t > 0
                = max(log_ratio_t, log(1 - clip_ratio_low))      for A_t < 0
                = log_ratio_t                                    for A_t = 0
        rho_i   = exp( sum_{t in i} m_t l_t / m_i )
        value_t = -rho_i A_t

    Zhao et al., "Geometric-Mean Policy Optimization", arXiv:2507.20673.
    Use it when outlier ratios make grpo unstable, as the paper describes. The mean is over the sample, on all cp ranks.
    The derivative of the sample's sum by a token is -rho_i mean(A) where its log-ratio is not clipped, and 0 elsewhere; beyond
    |log rho_i| = 20 it is 0.

    Differences from the paper: it clips log-ratios at -0.4 and 0.4; the two flags are distances of the ratio from 1, as in each
    loss here, so the same bounds are 1 - e^-0.4 and e^0.4 - 1. Texts that write the clip with
    the sign of A bound the ratio of A < 0 below by 1 / (upper bound); here, as in equation 4 of the paper's third version and in
    verl, the lower bound does. By default both are e^-0.4. Advantages that vary inside a sample are
    averaged, and each token is clipped by the sign of its own.

    Communication: one all-reduce of [N, 2] over cp, none in backward.
    """
    log_ratio, advantages = batch.log_ratio, batch.advantages
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=math.log(1 + clip_ratio_high)), log_ratio)
    clipped = torch.where(advantages < 0, log_ratio.clamp(min=math.log(1 - clip_ratio_low)), clipped)
    means = batch.of_tokens(batch.sample_mean(torch.stack([clipped, advantages], dim=-1)))
    mean_log_ratio, mean_advantage = means[:, 0], means[:, 1]
    ratio = bounded_exp(mean_log_ratio)
    is_clipped = (clipped != log_ratio) | (mean_log_ratio.abs() > LOG_RATIO_BOUND)
    return LossValue(
        -ratio * advantages,
        derivative=torch.where(is_clipped, 0.0, -ratio * mean_advantage),
        is_clipped=is_clipped & (advantages != 0),
    )
