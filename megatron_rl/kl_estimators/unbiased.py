"""unbiased: k3 times the importance ratio of the token."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.ops.ratios import bounded_exp, k3_estimate
from megatron_rl.registries.kl_estimators import KLValue, register_kl_estimator


@register_kl_estimator(
    "unbiased",
    triton="megatron_rl.kl_estimators.twins_triton.unbiased",
    exponent_bound=LOG_RATIO_BOUND,
    formula="rho (exp(-d) + d - 1)",
    gradient="rho d",
    on_policy="value and gradient of KL(pi, ref)",
    off_policy="value and gradient of KL(pi, ref), if mu is the old policy",
)
def unbiased(log_probs: Tensor, ref_log_probs: Tensor, log_ratio: Tensor) -> KLValue:
    """rho k3, differentiated through rho too: rho d with d = log_prob - ref_log_prob.

    DeepSeek-V3.2, arXiv:2512.02556, equation 7.
    """
    difference = log_probs - ref_log_probs
    value, _ = k3_estimate(log_probs, ref_log_probs)
    ratio = bounded_exp(log_ratio)
    is_inside = (difference.abs() <= LOG_RATIO_BOUND) & (log_ratio.abs() <= LOG_RATIO_BOUND)
    return KLValue(ratio * value, torch.where(is_inside, ratio * difference, 0.0))
