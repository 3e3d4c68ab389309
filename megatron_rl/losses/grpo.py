"""GRPO: one importance ratio per token, clipped per token. Not weighted and not reduced: aggregation and the driver do that."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.layout.groups import Group
from megatron_rl.loss_hub import register_policy_loss
from megatron_rl.losses.surrogate import clipped_surrogate


@register_policy_loss("grpo", level="token", surrogate=clipped_surrogate)
def grpo_values(
    log_probs: Tensor,  # [T] float32, detached
    old_log_probs: Tensor,  # [T] float32
    advantages: Tensor,  # [T] float32
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32, this cp rank's slices
    token_counts: Tensor,  # [N] unmasked tokens per document, over all cp ranks
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    cp_group: Group,
) -> tuple[Tensor, Tensor]:  # values [T], derivative by log_probs [T]; 0 where masked
    """Each token is clipped by itself.

        rho_t   = exp(log_probs_t - old_log_probs_t)
        value_t = -min(rho_t A_t, clip(rho_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A_t)

    Shao et al., "DeepSeekMath", arXiv:2402.03300, equation 3 without its KL term.

    A token's value depends on that token alone: any slicing gives the same. Communication: none. Raises: nothing.
    """
    values, derivative = clipped_surrogate(
        log_probs - old_log_probs, advantages, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
    )
    return torch.where(loss_mask, values, 0.0), torch.where(loss_mask, derivative, 0.0)
