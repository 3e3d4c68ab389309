"""k2: half the squared log-ratio."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.registries.kl_estimators import KLValue, register_kl_estimator


@register_kl_estimator(
    "k2",
    triton="megatron_rl.kl_estimators.twins_triton.k2",
    formula="d^2 / 2",
    gradient="d",
    on_policy="value biased; gradient of KL(pi, ref)",
    off_policy="neither",
)
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> KLValue:
    """d^2 / 2 with d = log_prob - ref_log_prob.

    Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html.
    """
    difference = log_probs - ref_log_probs
    return KLValue(difference.square() / 2, difference)
