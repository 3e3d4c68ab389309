"""Declares an estimator of KL(policy, reference): `register_kl_estimator`, and the registry that --kl-estimator reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_rl.registries.registry import Registry, takes
from megatron_rl.registries.signatures import check_called, check_signature, check_twin_path

if TYPE_CHECKING:
    from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


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
    exponent_bound: float | None
    formula: str
    gradient: str
    on_policy: str
    off_policy: str
    takes_log_ratio: bool


KL_ESTIMATORS: Registry[KLEstimator] = Registry("KL estimator", "kl_estimators", "register_kl_estimator")


def register_kl_estimator(
    name: str,
    *,
    triton: str | None = None,
    is_gradient_of_value: bool = True,
    exponent_bound: float | None = None,
    formula: str = "",
    gradient: str = "",
    on_policy: str = "",
    off_policy: str = "",
) -> Callable[[Function], Function]:
    """Decorator: registers a function as the KL estimator `name`. The package knows nothing else of it.

        fn(log_probs, ref_log_probs[, log_ratio]) -> value, or KLValue(value, derivative)

    The function is elementwise, of vectors [T] in nats. log_ratio is log_probs minus the log-probabilities of the policy that the
    loss's ratio compares with, of the token at every level; a function without that argument does not get it. The package adds
    mask, sample_mean weights, coefficient, gradient, every backend, head and host.

    triton: `module.function` of its twin, a @triton.jit function that computes the same inside the kernels:
        twin(log_probs, ref_log_probs, log_ratio) -> value, derivative
        of float32 blocks; log_ratio is 0 where the function has no such argument.
        None: a loss with this term is computed in torch on the logits' device.
    is_gradient_of_value: whether it is the derivative of the value; a check at launch and a test compare them. False: on
        purpose it is not.
    exponent_bound: the log-ratio beyond which exponents do not grow. None: there is no bound.
    formula, gradient: value and derivative as text, with d = log_prob - ref_log_prob and rho = exp(log_ratio).
    on_policy, off_policy: what its expectation is.
    Raises ConfigError when another function has the name, or when the declaration or the signature is wrong.
    """
    check_called(KL_ESTIMATORS.decorator, name)
    check_twin_path(KL_ESTIMATORS.kind, name, triton)

    def decorate(function: Function) -> Function:
        takes_log_ratio = takes(function, "log_ratio")
        positional = ("log_probs", "ref_log_probs", "log_ratio")[: 2 + takes_log_ratio]
        check_signature(KL_ESTIMATORS.kind, name, function, positional)
        record = KLEstimator(
            name=name,
            function=function,
            triton=triton,
            is_gradient_of_value=is_gradient_of_value,
            exponent_bound=exponent_bound,
            formula=formula,
            gradient=gradient,
            on_policy=on_policy,
            off_policy=off_policy,
            takes_log_ratio=takes_log_ratio,
        )
        KL_ESTIMATORS.add(name, record)
        return function

    return decorate


def get_kl_estimator(name: object) -> KLEstimator:
    """The declaration of that name, or of module.function. Raises ConfigError as Registry.find."""
    return KL_ESTIMATORS.find(name)


def kl_estimator_names() -> tuple[str, ...]:
    return KL_ESTIMATORS.names()
