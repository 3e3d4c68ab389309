"""The clipped surrogate and the k3 estimator: elementwise functions of a log-ratio, each with its derivative. They never reduce."""

from __future__ import annotations

import torch
from torch import Tensor

# Log-ratios are bounded to +-20 before exp: e^20 = 5e8 is far outside any clip and squares to 2e17, well inside float32.
LOG_RATIO_BOUND = 20.0


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


def k3_estimate(
    log_probs: Tensor,  # [*]
    ref_log_probs: Tensor,  # [*]
) -> tuple[Tensor, Tensor]:  # value [*] >= 0, derivative by log_probs [*]
    """exp(d) - d - 1 with d = ref_log_probs - log_probs: an unbiased estimate of KL(policy, reference) on the policy's samples.

    Schulman, "Approximating KL Divergence", 2020, estimator k3. d is bounded to +-20 as in the surrogate, derivative 0 beyond.
    """
    difference = ref_log_probs - log_probs
    bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = bounded.exp()
    derivative = torch.where(difference.abs() <= LOG_RATIO_BOUND, 1.0 - ratio, 0.0)
    return ratio - bounded - 1.0, derivative


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio bounded to +-20."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
