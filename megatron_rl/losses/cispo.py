"""Defines CISPO: the clipped ratio is a weight on the log-probability, so that no token loses its gradient."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.declare import LossValue, bounded_exp, register_policy_loss


@register_policy_loss(
    "cispo",
    clip_ratios=(1.0, 0.28),  # no lower bound, as published; the upper distance is from DAPO, arXiv:2503.14476
    triton="megatron_rl.losses.cispo_triton.cispo",
)
def cispo(
    log_ratio: Tensor,  # [T] log_probs_t - old_log_probs_t
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> LossValue:  # [T]
    """Multiplies the log-probability by the clipped ratio, a constant weight.

        rho_t   = exp(log_ratio_t)
        w_t     = clip(rho_t, 1 - clip_ratio_low, 1 + clip_ratio_high), a constant for the gradient
        value_t = -w_t A_t log_probs_t

    MiniMax, "MiniMax-M1", arXiv:2506.13585, equation 4; its average is prompt_mean.
    Use it when rare decisive tokens lose their gradient in grpo's clip, as the paper describes.
    """
    ratio = bounded_exp(log_ratio)
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high).detach()
    is_clipped = (ratio != weight) & (advantages != 0)
    return LossValue(-weight * advantages * log_probs, derivative=-weight * advantages, is_clipped=is_clipped)
