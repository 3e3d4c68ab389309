"""k3: an estimate that is never below 0."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.ops.ratios import k3_estimate
from megatron_rl.registries.kl_estimators import KLValue, register_kl_estimator


@register_kl_estimator(
    "k3",
    triton="megatron_rl.kl_estimators.twins_triton.k3",
    exponent_bound=LOG_RATIO_BOUND,
    formula="exp(-d) + d - 1",
    gradient="1 - exp(-d)",
    on_policy="value KL(pi, ref); gradient of the reverse, KL(ref, pi)",
    off_policy="neither",
)
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> KLValue:
    """exp(-d) + d - 1 with d = log_prob - ref_log_prob.

    Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html.
    """
    return KLValue(*k3_estimate(log_probs, ref_log_probs))
