"""k3+: the value of k3 with the gradient of k2."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.ops.ratios import k3_estimate
from megatron_rl.registries.kl_estimators import KLValue, register_kl_estimator


@register_kl_estimator(
    "k3+",
    triton="megatron_rl.kl_estimators.twins_triton.k3_plus",
    is_gradient_of_value=False,
    exponent_bound=LOG_RATIO_BOUND,
    formula="exp(-d) + d - 1",
    gradient="d, that of k2",
    on_policy="value and gradient of KL(pi, ref)",
    off_policy="neither",
)
def k3_plus(log_probs: Tensor, ref_log_probs: Tensor) -> KLValue:
    """The value of k3, and d = log_prob - ref_log_prob as its derivative.

    verl's name, https://github.com/volcengine/verl.
    """
    value, _ = k3_estimate(log_probs, ref_log_probs)
    return KLValue(value, log_probs - ref_log_probs)
