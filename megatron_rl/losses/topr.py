"""Defines TOPR: REINFORCE whose negative tokens fade out as the policy leaves them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.declare import LossValue, bounded_exp, register_policy_loss

# Two sums over a row in another order give one policy's ratio as 1 to about 1e-6, in float32.
LARGEST_RATIO_OF_ONE_POLICY = 1 + 1e-5


@register_policy_loss(
    "topr",
    triton="megatron_rl.losses.reinforce_triton.topr",
)
def topr(
    log_ratio: Tensor,  # [T] log_probs_t - old_log_probs_t
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
) -> LossValue:  # [T]
    """Weights tokens with A < 0 by their ratio, at most 1; tokens with A >= 0 keep the weight 1.

        w_t     = 1 for A_t >= 0, else min(exp(log_ratio_t), 1); a constant for the gradient
        value_t = -w_t A_t log_probs_t

    Le Roux et al., "Tapered Off-Policy REINFORCE", arXiv:2503.14286.
    Use it when data is off-policy and has many negative responses. Differences: the paper's ratio is the whole response's,
    against the policy that sampled it. Here it is the token's, against the old policy: the product of a thousand ratios is near 0
    or above 1 after a small step, and a negative response would have no gradient or all of it. The log-ratio is bounded to +-20, so
    the weight is at least e^-20. An importance correction multiplies this weight, which may then leave [0, 1]. A token counts as
    clipped if its ratio is above 1 by more than rounding, and A_t < 0.
    """
    ratio = bounded_exp(log_ratio)
    weight = torch.where(advantages < 0, ratio.clamp(max=1.0), 1.0).detach()
    is_clipped = (advantages < 0) & (ratio > LARGEST_RATIO_OF_ONE_POLICY)
    return LossValue(-weight * advantages * log_probs, derivative=-weight * advantages, is_clipped=is_clipped)
