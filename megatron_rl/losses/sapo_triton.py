"""The Triton version of sapo.py."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.ops.loss_triton import bounded, bounded_exp


@triton.jit
def sapo(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters):
    temperature_positive, temperature_negative = parameters
    ratio = bounded_exp(log_ratio)
    temperature = tl.where(advantages > 0, temperature_positive, temperature_negative)
    exponent = bounded(temperature * (ratio - 1), -80.0, 80.0)  # e^80 is finite, and the sigmoid there 0 or 1
    gate = tl.sigmoid(exponent)
    derivative = -4 * gate * tl.sigmoid(-exponent) * ratio * advantages
    return -4 / temperature * gate * advantages, derivative, ratio < 0
