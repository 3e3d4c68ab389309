"""The Triton version of vespo.py."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.ops.loss_triton import LOG_RATIO_BOUND, bounded


@triton.jit
def vespo(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters):
    (token_counts,) = vectors
    power_positive, decay_positive, power_negative, decay_negative = parameters
    log_weight = bounded(token_counts * log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    power = tl.where(advantages >= 0, power_positive, power_negative)
    decay = tl.where(advantages >= 0, decay_positive, decay_negative)
    weight = tl.exp(power * log_weight + decay * (1 - tl.exp(log_weight)))
    return -weight * advantages * log_probs, -weight * advantages, weight < 0
