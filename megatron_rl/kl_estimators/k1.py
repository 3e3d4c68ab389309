"""k1: the log-ratio itself."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.registries.kl_estimators import KLValue, register_kl_estimator


@register_kl_estimator(
    "k1",
    triton="megatron_rl.kl_estimators.twins_triton.k1",
    formula="d",
    gradient="1",
    on_policy="value KL(pi, ref); **gradient 0**: it adds noise alone",
    off_policy="neither",
)
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> KLValue:
    """d = log_prob - ref_log_prob.

    Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html.
    """
    difference = log_probs - ref_log_probs
    return KLValue(difference, torch.ones_like(difference))
