"""ratios.py in Triton: the same elementwise functions inside kernels.

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
