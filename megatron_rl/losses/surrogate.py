"""The clipped surrogate: an elementwise function of log-ratio and advantage, with its derivative. It never reduces."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.ratios import LOG_RATIO_BOUND, bounded_exp


def clipped_surrogate(
    log_ratio: Tensor,  # [*] log_probs - old_log_probs of a token, or its mean over a sample
    advantages: Tensor,  # [*]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, Tensor]:  # value [*], derivative by the log-ratio [*]
    """The pessimistic bound of PPO (Schulman et al., arXiv:1707.06347, equation 7).

        rho = exp(log_ratio)     value = -min(rho A, clip(rho, 1 - low, 1 + high) A)

    Both boundaries are inclusive: at 1 + high and 1 - low the unclipped branch counts, so the derivative is -rho A there and 0
    beyond. A log-ratio outside +-20 counts as the bound, derivative 0; A = 0 gives exactly 0 in both. NaN passes through.

    >>> value, derivative = clipped_surrogate(torch.tensor([0.5]).log(), torch.tensor([2.0]), clip_ratio_low=.2, clip_ratio_high=.2)
    >>> value.item(), derivative.item()
    (-1.0, -1.0)
    """
    ratio = bounded_exp(log_ratio)
    lower, upper = 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    unclipped = ratio * advantages
    value = -torch.minimum(unclipped, ratio.clamp(lower, upper) * advantages)
    is_active = ((advantages > 0) & (ratio <= upper)) | ((advantages < 0) & (ratio >= lower))
    is_active &= log_ratio.abs() <= LOG_RATIO_BOUND
    derivative = torch.where(is_active, -unclipped, 0.0)
    return torch.where(advantages == 0, 0.0, value), derivative
