"""Defines GSPO-token: the ratio of the sample, with an advantage for each token."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.declare import LossValue, register_policy_loss
from megatron_rl.losses.grpo import CLIP_RATIO_C, grpo


@register_policy_loss(
    "gspo_token",
    clip_ratios=(3e-4, 4e-4),  # as GSPO
    needs=("mean_log_ratio",),
    parameters=(CLIP_RATIO_C,),
)
def gspo_token(
    log_ratio: Tensor,  # [T]
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
    *,
    mean_log_ratio: Tensor,  # [T] of the token's sample, a constant for the gradient
    **clip: float,  # clip_ratio_low, clip_ratio_high and clip_ratio_c, as in grpo
) -> LossValue:  # [T]
    """Clips each sample's ratio; each token multiplies it by its own advantage and has its own gradient.

        s_i     = exp( sum_{t in i} m_t log_ratio_t / m_i ), a constant for the gradient
        s_it    = s_i exp(log_probs_t - constant log_probs_t)
        value_t = -min(s_it A_t, clip(s_it, 1 - clip_ratio_low, 1 + clip_ratio_high) A_t)

    Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071, section 4.3. The number s_it is s_i,
    and the derivative by a token is -s_i A_t where s_i is not clipped. With one advantage a sample, value and gradient equal
    GSPO's. With importance weights the two differ: here each token's gradient has its own weight, in GSPO their mean.
    Use it when you want gspo and have advantages for tokens or turns.
    """
    return grpo(mean_log_ratio + (log_probs - log_probs.detach()), advantages, **clip)
