"""Computes elementwise functions of a log-ratio, bounded so that nothing overflows. NaN passes through."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND, KLEstimator
from megatron_rl.errors import ConfigError


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


def kl_estimate(
    estimator: str,
    log_probs: Tensor,  # [*]
    ref_log_probs: Tensor,  # [*]
    log_ratio: Tensor,  # [*] log_probs minus the sampling policy's; only `unbiased` reads it
) -> tuple[Tensor, Tensor]:  # value [*], the derivative by log_probs that is trained [*]
    """An estimate of KL(policy, reference) at each token, with d = log_probs - ref_log_probs and rho = exp(log_ratio).

        k1        d                     derivative 1: its expectation is 0 on-policy
        k2        d^2 / 2               derivative d: its expectation is the gradient of the KL on-policy
        k3        exp(-d) + d - 1       derivative 1 - exp(-d): its expectation belongs to the reverse KL(reference, policy)
        k3+       exp(-d) + d - 1       derivative d, as k2
        unbiased  rho (exp(-d) + d - 1) derivative rho d: its expectation is the gradient of the KL off-policy too

    Schulman, "Approximating KL Divergence", 2020; unbiased: DeepSeek-V3.2, arXiv:2512.02556, equation 7. Exponents are bounded to
    +-20; beyond, the derivatives of k3 and unbiased are 0. k1 and k2 have no bound. Raises ConfigError for another estimator.
    """
    if estimator == KLEstimator.K3:
        return k3_estimate(log_probs, ref_log_probs)
    difference = log_probs - ref_log_probs
    if estimator == KLEstimator.K1:
        return difference, torch.ones_like(difference)
    if estimator == KLEstimator.K2:
        return difference.square() / 2, difference
    value, _ = k3_estimate(log_probs, ref_log_probs)
    if estimator == KLEstimator.K3_PLUS:
        return value, difference
    if estimator != KLEstimator.UNBIASED:
        raise ConfigError(f"kl_estimator={estimator!r} has no formula here: choose one of {', '.join(KLEstimator)}")
    ratio = bounded_exp(log_ratio)
    is_inside = (difference.abs() <= LOG_RATIO_BOUND) & (log_ratio.abs() <= LOG_RATIO_BOUND)
    return ratio * value, torch.where(is_inside, ratio * difference, 0.0)
