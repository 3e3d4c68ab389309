"""Defines VESPO: a smooth weight of the sample's whole importance ratio, without a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.declare import LossValue, Parameter, register_policy_loss


@register_policy_loss(
    "vespo",
    level="sequence",
    triton="megatron_rl.losses.vespo_triton.vespo",
    needs=("token_counts",),
    parameters=(
        Parameter(
            "vespo_power_positive", default=2.0, minimum=0.0, help="the power of the ratio of samples with A >= 0, c1 in the paper"
        ),
        Parameter(
            "vespo_decay_positive",
            default=3.0,
            minimum=0.0,
            help="the decay of samples with A >= 0 above the ratio 1, c2 in the paper",
        ),
        Parameter(
            "vespo_power_negative", default=3.0, minimum=0.0, help="the power of the ratio of samples with A < 0, c1 in the paper"
        ),
        Parameter(
            "vespo_decay_negative",
            default=2.0,
            minimum=0.0,
            help="the decay of samples with A < 0 above the ratio 1, c2 in the paper",
        ),
    ),
)
def vespo(
    log_ratio: Tensor,  # [N] the mean of log_probs_t - old_log_probs_t over the m_i unmasked tokens of sample i
    advantages: Tensor,  # [N]
    log_probs: Tensor,  # [N] the mean of log_probs_t
    *,
    token_counts: Tensor,  # [N] m_i
    vespo_power_positive: float,
    vespo_decay_positive: float,
    vespo_power_negative: float,
    vespo_decay_negative: float,
) -> LossValue:  # [N]
    """Weights each sample by a function of its whole ratio, the product of its tokens' ratios. It is 1 at ratio 1.

        W_i     = exp(m_i log_ratio_i) = exp( sum_{t in i} m_t (log_probs_t - old_log_probs_t) )
        phi_i   = W_i^c1 exp(c2 (1 - W_i)), a constant for the gradient; c1 and c2 by the sign of A_i
        value_t = -phi_i A_i log_probs_t

    Shen et al., "VESPO: Variational Sequence-Level Soft Policy Optimization", arXiv:2602.10693, the kernel of equation 17 in its
    shifted form, the gradient of equation 20, the defaults of section 4.1; appendix I has the same as code.
    Use it when data is far off-policy (many steps a rollout, asynchronous rollouts), where the paper reports that it stays stable.

    Differences from the paper: log W_i is bounded to +-20, as in the authors' code. Their pseudocode leaves the average over tokens
    and samples open; here it is --loss-aggregation. The value of a sample has its mean log-probability, so the m_i values sum up to
    the sum over its tokens, and the derivative by each token is -phi_i A_i.
    """
    log_weight = (token_counts * log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    is_positive = advantages >= 0
    power = torch.where(is_positive, vespo_power_positive, torch.full_like(log_ratio, vespo_power_negative))
    decay = torch.where(is_positive, vespo_decay_positive, torch.full_like(log_ratio, vespo_decay_negative))
    weight = (power * log_weight + decay * (1 - log_weight.exp())).exp().detach()
    return LossValue(-weight * advantages * log_probs, derivative=-weight * advantages)
