"""The Triton version of grpo.py, and of gspo.py."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.ops.ratios_triton import LOG_RATIO_BOUND, bounded, bounded_exp


@triton.jit
def grpo(
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
