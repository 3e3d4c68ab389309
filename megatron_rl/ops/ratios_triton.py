"""The Triton twin of ratios.py: the same elementwise functions inside kernels.

NaN passes through, because comparisons with it are false; tl.minimum, tl.maximum and tl.clamp would return their other argument.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl import config

LOG_RATIO_BOUND = tl.constexpr(config.LOG_RATIO_BOUND)


@triton.jit
def bounded(x, lower, upper):
    return tl.where(x < lower, lower, tl.where(x > upper, upper, x))


@triton.jit
def bounded_exp(log_ratio):
    """exp of the log-ratio bounded to +-20."""
    return tl.exp(bounded(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


@triton.jit
def clipped_objective(
    log_ratio,  # float32 block
    advantages,  # float32 block
    log_probs,  # float32 block, not used
    lowest_ratio,  # 1 - clip_ratio_low
    highest_ratio,  # 1 + clip_ratio_high
    vectors,  # None
    parameters,  # (clip_ratio_c,)
):  # value, d value / d log_ratio, is_clipped
    """The bounds are inclusive. Beyond them, and beyond the bound of the log-ratio, the derivative is 0."""
    ratio = bounded_exp(log_ratio)
    is_above_c = (advantages < 0) & (ratio > parameters[0])
    capped = tl.where(is_above_c, parameters[0], ratio)
    unclipped = capped * advantages
    clipped = bounded(capped, lowest_ratio, highest_ratio) * advantages
    value = -tl.where(unclipped < clipped, unclipped, clipped)
    is_active = ((advantages > 0) & (ratio <= highest_ratio)) | ((advantages < 0) & (ratio >= lowest_ratio))
    is_active = is_active & (tl.abs(log_ratio) <= LOG_RATIO_BOUND) & (is_above_c == 0)
    derivative = tl.where(is_active, -unclipped, 0.0)
    return tl.where(advantages == 0, 0.0, value), derivative, (derivative == 0) & (advantages != 0)


@triton.jit
def k3_estimate(
    log_probs,  # float32 block
    ref_log_probs,  # float32 block
):  # value, d value / d log_probs
    """exp(d) - d - 1 with d = ref_log_probs - log_probs bounded to +-20, derivative 0 beyond.

    Up to |d| = 1, where float32 would lose its digits, by d^2 (1/2! + d/3! + ... + d^8/10!); the rest is at most 7e-8 of the value.
    """
    difference = ref_log_probs - log_probs
    d = bounded(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    series = 1 / 24 + d * (1 / 120 + d * (1 / 720 + d * (1 / 5040 + d * (1 / 40320 + d * (1 / 362880 + d * (1 / 3628800))))))
    near = d * d * (0.5 + d * (1 / 6 + d * series))
    ratio = tl.exp(d)
    is_near = tl.abs(d) < 1.0
    derivative = tl.where(is_near, -(d + near), 1.0 - ratio)
    return tl.where(is_near, near, ratio - d - 1.0), tl.where(tl.abs(difference) <= LOG_RATIO_BOUND, derivative, 0.0)
