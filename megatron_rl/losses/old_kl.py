"""Adds a KL penalty towards the policy of the ratio to a token-level loss, with a coefficient for each token."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.loss_hub import PolicyLoss
from megatron_rl.ops.ratios import k3_of_difference
from megatron_rl.registries.loss_value import LossValue


@functools.lru_cache(maxsize=64)
def with_old_kl(loss: PolicyLoss) -> PolicyLoss:
    """The loss whose value is that of `loss` plus c_t penalty_t; c_t are the inputs' old_kl_coefficients.

        penalty_t = rho_t - 1 - log rho_t,   rho_t = exp(log_ratio_t)        d penalty_t / d log_prob_t = rho_t - 1

    Where the policy of the ratio has sampled, it is an unbiased estimate of KL(that policy, policy), and so is its gradient
    (Schulman, "Approximating KL Divergence", 2020, estimator k3). Where both policies are one it is 0, and so is its gradient: of
    |log rho_t| the gradient would be the sign of a rounding error there. log_ratio is bounded to +-20; beyond, the derivative is 0.

    It has no Triton twin: a loss with a penalty is reduced in torch with every backend.
    Raises ConfigError for a loss of another level, whose tokens share a value, or have values that depend on each other.
    """
    if loss.level != "token":
        raise ConfigError(
            f"old_kl_coefficients with policy loss {loss.name!r} of level {loss.level!r}: the penalty is of single tokens, and the "
            "tokens of a sample are together in this loss; leave them out, or choose a token-level loss, such as grpo"
        )

    def penalized(log_ratio: Tensor, *others: Tensor, old_kl_coefficients: Tensor, **keywords: Any) -> Any:
        returned = loss.function(log_ratio, *others, **keywords)
        result = returned if isinstance(returned, LossValue) else LossValue(returned)
        if not isinstance(result.value, Tensor) or result.value.shape != log_ratio.shape:
            return returned  # the check of what a loss returns says what is wrong
        penalty, slope = k3_of_difference(log_ratio)
        value = result.value + old_kl_coefficients * penalty
        if result.derivative is None:
            return replace(result, value=value)
        return replace(result, value=value, derivative=result.derivative + old_kl_coefficients * slope.detach())

    return replace(
        loss,
        function=penalized,
        triton=None,
        zero_advantage_has_no_gradient=False,
        needs=(*loss.needs, "old_kl_coefficients"),
    )
