"""The Triton version of grpo.py, and of gspo.py."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.ops.loss_triton import LOG_RATIO_BOUND, bounded, bounded_exp


@triton.jit
def grpo(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters):
    """The bounds are inclusive. Beyond them, and beyond the bound of the log-ratio, the derivative is 0."""
    (clip_ratio_c,) = parameters
    ratio = bounded_exp(log_ratio)
    is_above_c = (advantages < 0) & (ratio > clip_ratio_c)
    capped = tl.where(is_above_c, clip_ratio_c, ratio)
    unclipped = capped * advantages
    clipped = bounded(capped, lowest_ratio, highest_ratio) * advantages
    value = -tl.where(unclipped < clipped, unclipped, clipped)
    is_active = ((advantages > 0) & (ratio <= highest_ratio)) | ((advantages < 0) & (ratio >= lowest_ratio))
    is_active = is_active & (tl.abs(log_ratio) <= LOG_RATIO_BOUND) & (is_above_c == 0)
    derivative = tl.where(is_active, -unclipped, 0.0)
    return tl.where(advantages == 0, 0.0, value), derivative, (derivative == 0) & (advantages != 0)
