"""Computes the ratio of two probabilities from their log-ratio, bounded so that nothing overflows."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio bounded to +-20. NaN passes through."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
