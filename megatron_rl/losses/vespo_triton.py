"""The Triton twin of vespo.py: the same elementwise function inside the loss kernels."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.ops.ratios_triton import LOG_RATIO_BOUND, bounded


@triton.jit
def vespo(
    log_ratio,  # float32 block
    advantages,  # float32 block
    log_probs,  # float32 block
    lowest_ratio,  # not used
    highest_ratio,  # not used
    vectors,  # (token_counts,)
    parameters,  # (power, decay) of A >= 0, and (power, decay) of A < 0
):  # value, derivative, is_clipped
    log_weight = bounded(vectors[0] * log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    power = tl.where(advantages >= 0, parameters[0], parameters[2])
    decay = tl.where(advantages >= 0, parameters[1], parameters[3])
    weight = tl.exp(power * log_weight + decay * (1 - tl.exp(log_weight)))
    return -weight * advantages * log_probs, -weight * advantages, weight < 0
