"""Computes elementwise functions of a log-ratio, bounded so that nothing overflows. NaN passes through."""

from __future__ import annotations

import torch
from torch import Tensor

# Log-ratios are bounded to +-20 before exp: e^20 = 5e8 is far outside any clip and squares to 2e17, well inside float32.
LOG_RATIO_BOUND = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio bounded to +-20."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def k3_estimate(
    log_probs: Tensor,  # [*]
    ref_log_probs: Tensor,  # [*]
) -> tuple[Tensor, Tensor]:  # value [*] >= 0, d value / d log_probs [*]
    """exp(d) - d - 1 with d = ref_log_probs - log_probs: an unbiased estimate of KL(policy, reference) on the policy's samples.

    Schulman, "Approximating KL Divergence", 2020, estimator k3. d is bounded to +-20; beyond, the derivative is 0. At a small d
    rounding may give a value below 0, which becomes 0.
    """
    difference = ref_log_probs - log_probs
    bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = bounded.exp()
    derivative = torch.where(difference.abs() <= LOG_RATIO_BOUND, 1.0 - ratio, 0.0)
    return (ratio - bounded - 1.0).clamp(min=0.0), derivative
