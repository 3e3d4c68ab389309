"""Estimates KL(policy, reference) at a token: the estimators, and how another one is declared.

d = log_prob - ref_log_prob, rho = exp(log_ratio). docs/corrections.md says what each expectation is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.declare import bounded_exp, checked_result
from megatron_rl.errors import DataError
from megatron_rl.registry import Function, Registry, check_signature, check_triton_path, takes


@dataclass(frozen=True, slots=True)
class KLValue:
    """What an estimator returns: [*], as the log-probabilities that it gets.

    value: of the term.
    derivative: what is trained, d / d log_prob. None: autograd differentiates the value.
    """

    value: Tensor
    derivative: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KLEstimator:
    """An estimator as it was declared; `register_kl_estimator` says what each field means."""

    name: str
    function: Callable[..., Any]
    triton: str | None
    is_gradient_of_value: bool
    takes_log_ratio: bool


KL_ESTIMATORS: Registry[KLEstimator] = Registry("KL estimator", "register_kl_estimator")


def register_kl_estimator(
    name: str,
    *,
    triton: str | None = None,
    is_gradient_of_value: bool = True,
) -> Callable[[Function], Function]:
    """Decorator: registers a function as the KL estimator `name`. The package knows nothing else of it.

        fn(log_probs, ref_log_probs[, log_ratio]) -> value, or KLValue(value, derivative)

    The function is elementwise, of vectors [T] in nats. log_ratio is log_probs minus the log-probabilities of the policy that the
    loss's ratio compares with, of the token at every level; a function without that argument does not get it. The package adds
    mask, sample_mean weights, coefficient, gradient, every backend, head and host.

    triton: `module.function` of its Triton version, a @triton.jit function that computes the same inside the kernels:
        fn(log_probs, ref_log_probs, log_ratio) -> value, derivative
        of float32 blocks; log_ratio is 0 where the function has no such argument.
        None: a loss with this term is computed in torch on the logits' device.
    is_gradient_of_value: whether it is the derivative of the value; a check at launch and a test compare them. False: on
        purpose it is not.
    Raises ConfigError when another function has the name, or when the declaration or the signature is wrong.
    """
    KL_ESTIMATORS.check_name(name)
    check_triton_path(KL_ESTIMATORS.kind, name, triton)

    def decorate(function: Function) -> Function:
        takes_log_ratio = takes(function, "log_ratio")
        positional = ("log_probs", "ref_log_probs", "log_ratio")[: 2 + takes_log_ratio]
        check_signature(KL_ESTIMATORS.kind, name, function, positional)
        record = KLEstimator(name, function, triton, is_gradient_of_value, takes_log_ratio)
        KL_ESTIMATORS.add(name, record)
        return function

    return decorate


@register_kl_estimator("k1", triton="megatron_rl.losses.kl_triton.k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> KLValue:
    """d. On-policy its gradient has expectation 0: it adds noise alone.

    k1 to k3: Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html.
    """
    difference = log_probs - ref_log_probs
    return KLValue(difference, torch.ones_like(difference))


@register_kl_estimator("k2", triton="megatron_rl.losses.kl_triton.k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> KLValue:
    """d^2 / 2."""
    difference = log_probs - ref_log_probs
    return KLValue(difference.square() / 2, difference)


@register_kl_estimator("k3", triton="megatron_rl.losses.kl_triton.k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> KLValue:
    """exp(-d) + d - 1, which is never below 0. d is bounded to +-20; beyond, the derivative is 0. NaN passes through.

    In float64: in float32 no digit of the value at 1e-4, which is 5e-9, would be right. Rounding below 0 becomes 0.
    """
    difference = ref_log_probs - log_probs
    bounded = difference.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    slope = bounded.expm1()
    value = (slope - bounded).clamp(min=0.0)
    derivative = -torch.where(difference.abs() <= LOG_RATIO_BOUND, slope, 0.0)
    return KLValue(value.to(difference.dtype), derivative.to(difference.dtype))


@register_kl_estimator("k3+", triton="megatron_rl.losses.kl_triton.k3_plus", is_gradient_of_value=False)
def k3_plus(log_probs: Tensor, ref_log_probs: Tensor) -> KLValue:
    """The value of k3 with the gradient of k2, d. verl's name, https://github.com/volcengine/verl."""
    return KLValue(k3(log_probs, ref_log_probs).value, log_probs - ref_log_probs)


@register_kl_estimator("unbiased", triton="megatron_rl.losses.kl_triton.unbiased")
def unbiased(log_probs: Tensor, ref_log_probs: Tensor, log_ratio: Tensor) -> KLValue:
    """rho k3, differentiated through rho too: rho d. DeepSeek-V3.2, arXiv:2512.02556, equation 7."""
    difference, ratio = log_probs - ref_log_probs, bounded_exp(log_ratio)
    is_inside = (difference.abs() <= LOG_RATIO_BOUND) & (log_ratio.abs() <= LOG_RATIO_BOUND)
    return KLValue(ratio * k3(log_probs, ref_log_probs).value, torch.where(is_inside, ratio * difference, 0.0))


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
    declared = KL_ESTIMATORS[estimator] if isinstance(estimator, str) else estimator
    given = (log_probs, ref_log_probs, log_ratio)[: 2 + declared.takes_log_ratio]
    returned = declared.function(*given)
    result = returned if isinstance(returned, KLValue) else KLValue(returned)
    derivative = _derivative_of_value(declared, *given) if result.derivative is None else result.derivative
    whose, like = f"KL estimator {declared.name!r}", log_probs
    return checked_result(whose, "its value", result.value, like), checked_result(whose, "its derivative", derivative, like)


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
