"""The Triton twin of sapo.py: the same elementwise function inside the loss kernels."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.ops.ratios_triton import bounded, bounded_exp


@triton.jit
def sapo(
    log_ratio,  # float32 block
    advantages,  # float32 block
    log_probs,  # float32 block, not used
    lowest_ratio,  # not used
    highest_ratio,  # not used
    vectors,  # None
    parameters,  # (sapo_temperature_positive, sapo_temperature_negative)
):  # value, derivative, is_clipped
    ratio = bounded_exp(log_ratio)
    temperature = tl.where(advantages > 0, parameters[0], parameters[1])
    exponent = bounded(temperature * (ratio - 1), -80.0, 80.0)  # e^80 is finite, and the sigmoid there 0 or 1
    gate = tl.sigmoid(exponent)
    derivative = -4 * gate * tl.sigmoid(-exponent) * ratio * advantages
    return -4 / temperature * gate * advantages, derivative, ratio < 0
