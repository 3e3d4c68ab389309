"""Defines GSPO: one importance ratio per sample, clipped per sample."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.declare import LossValue, register_policy_loss
from megatron_rl.losses.grpo import CLIP_RATIO_C, grpo


@register_policy_loss(
    "gspo",
    level="sequence",
    clip_ratios=(3e-4, 4e-4),  # arXiv:2507.18071, section 5.1: the mean of a sample moves a thousand times less than one token
    triton="megatron_rl.losses.grpo_triton.grpo",
    parameters=(CLIP_RATIO_C,),
)
def gspo(
    log_ratio: Tensor,  # [N] the mean of log_probs_t - old_log_probs_t over the m_i unmasked tokens of sample i
    advantages: Tensor,  # [N]
    **clip: float,  # clip_ratio_low, clip_ratio_high and clip_ratio_c, as in grpo
) -> LossValue:  # [N]
    """Clips each sample's ratio. Every token of a sample has the sample's value.

        s_i     = exp(log_ratio_i) = exp( sum_{t in i} m_t (log_probs_t - old_log_probs_t) / m_i )
        value_i = -min(s_i A_i, clip(s_i, 1 - clip_ratio_low, 1 + clip_ratio_high) A_i)

    Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071, equations 5 and 7.
    Use it when you train a mixture of experts: the paper reports that it needs no routing replay.

    m_i counts all cp ranks, so a split sample has the same value as a whole one. The m_i equal values depend on log_probs_t only
    through the mean. The m_i of their sum and the 1 / m_i of the mean cancel: the derivative by each token is value'(s_i) s_i.
    A finite clip_ratio_c clips s_i of samples with A < 0 from above too (losses/grpo.py).
    """
    return grpo(log_ratio, advantages, **clip)
