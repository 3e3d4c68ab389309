"""Computes elementwise functions of a log-ratio, bounded so that nothing overflows: the clipped objective of PPO, and KL estimates.

NaN passes through.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.errors import DataError
from megatron_rl.registries.kl_estimators import KLEstimator, KLValue, get_kl_estimator
from megatron_rl.registries.loss_value import LossValue


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio bounded to +-20."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_objective(
    log_ratio: Tensor,  # [*]
    advantages: Tensor,  # [*]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float = math.inf,
) -> LossValue:  # [*]
    """The pessimistic bound of PPO (Schulman et al., arXiv:1707.06347, equation 7), with the dual clip where c is finite.

        rho = exp(log_ratio)     value = -min(rho A, clip(rho, 1 - low, 1 + high) A)
        for A < 0 and finite c   value = -max(min(rho A, clip(rho, 1 - low, 1 + high) A), c A)

    Dual clip: Ye et al., arXiv:1912.09729. It is computed as min(rho, c) in place of rho, which is the same for c > 1.
    All bounds are inclusive: at 1 + high, 1 - low and c the ratio is not clipped, so the derivative is -rho A there and 0 beyond.
    A log-ratio outside +-20 is set to the bound, with derivative 0. A = 0 gives value and derivative 0. NaN passes through.

    >>> found = clipped_objective(torch.tensor([0.5]).log(), torch.tensor([2.0]), clip_ratio_low=0.2, clip_ratio_high=0.2)
    >>> found.value.item(), found.derivative.item(), found.is_clipped.item()
    (-1.0, -1.0, False)
    """
    ratio = bounded_exp(log_ratio)
    lower, upper = 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    capped = torch.where(advantages < 0, ratio.clamp(max=clip_ratio_c), ratio)  # c A would be inf x 0 at A = 0
    unclipped = capped * advantages
    value = -torch.minimum(unclipped, capped.clamp(lower, upper) * advantages)
    is_active = ((advantages > 0) & (ratio <= upper)) | ((advantages < 0) & (ratio >= lower) & (ratio <= clip_ratio_c))
    is_active &= log_ratio.abs() <= LOG_RATIO_BOUND
    derivative = torch.where(is_active, -unclipped, 0.0)
    return LossValue(torch.where(advantages == 0, 0.0, value), derivative, (derivative == 0) & (advantages != 0))


def k3_estimate(
    log_probs: Tensor,  # [*]
    ref_log_probs: Tensor,  # [*]
) -> tuple[Tensor, Tensor]:  # value [*] >= 0, d value / d log_probs [*]
    """exp(d) - d - 1 with d = ref_log_probs - log_probs: an unbiased estimate of KL(policy, reference) on the policy's samples.

    Schulman, "Approximating KL Divergence", 2020, estimator k3. As k3_of_difference.
    """
    value, slope = k3_of_difference(ref_log_probs - log_probs)
    return value, -slope


def k3_of_difference(difference: Tensor) -> tuple[Tensor, Tensor]:  # [*] -> value [*] >= 0, d value / d difference [*]
    """exp(d) - d - 1 and exp(d) - 1. d is bounded to +-20; beyond, the derivative is 0.

    In float64: in float32 no digit of the value at 1e-4, which is 5e-9, would be right. Rounding below 0 becomes 0.
    """
    bounded = difference.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    slope = bounded.expm1()
    value = (slope - bounded).clamp(min=0.0)
    return value.to(difference.dtype), torch.where(difference.abs() <= LOG_RATIO_BOUND, slope, 0.0).to(difference.dtype)


def kl_estimate(
    estimator: str | KLEstimator,
    log_probs: Tensor,  # [*]
    ref_log_probs: Tensor,  # [*]
    log_ratio: Tensor,  # [*] log_probs - those of the policy that the loss's ratio compares with
) -> tuple[Tensor, Tensor]:  # value [*], the derivative by log_probs that is trained [*]
    """The declared estimate of KL(policy, reference) at each token.

    Autograd takes a derivative that the estimator does not give. Raises ConfigError for an estimator that is not registered, and
    DataError for a result of another shape or dtype.
    """
    declared = get_kl_estimator(estimator) if isinstance(estimator, str) else estimator
    given = (log_probs, ref_log_probs, log_ratio)[: 2 + declared.takes_log_ratio]
    returned = declared.function(*given)
    result = returned if isinstance(returned, KLValue) else KLValue(returned)
    derivative = result.derivative
    if derivative is None:
        derivative = _derivative_of_value(declared, *given)
    for name, tensor in (("value", result.value), ("derivative", derivative)):
        if not isinstance(tensor, Tensor) or tensor.shape != log_probs.shape or tensor.dtype != log_probs.dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DataError(
                f"KL estimator {declared.name!r} returned {found} as its {name}: it must be {tuple(log_probs.shape)} "
                f"{log_probs.dtype}"
            )
    return result.value, derivative


def _derivative_of_value(
    estimator: KLEstimator,
    log_probs: Tensor,  # [*]
    ref_log_probs: Tensor,  # [*]
    log_ratio: Tensor | None = None,  # [*]
) -> Tensor:  # [*] by log_probs, also through log_ratio
    with torch.inference_mode(False), torch.enable_grad():
        # A tensor made in inference mode cannot be differentiated; a copy made outside can.
        leaf = log_probs.detach().clone().requires_grad_()
        given = [leaf.clone(), ref_log_probs.clone()]
        if log_ratio is not None:
            given.append(log_ratio.clone() + (leaf - leaf.detach()))
        returned = estimator.function(*given)
        value = returned.value if isinstance(returned, KLValue) else returned
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise DataError(
                f"KL estimator {estimator.name!r} has no derivative by log_probs: compute its value from them without detach, or "
                "return KLValue(value, derivative)"
            )
        (derivative,) = torch.autograd.grad(value.sum(), leaf)
    return derivative.detach()
