"""The Triton twins of own_losses.py."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl.ops.loss_triton import bounded_exp


@triton.jit
def truncated(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters):
    ratio = bounded_exp(log_probs - vectors[0])
    is_clipped = ratio >= parameters[0]
    weight = parameters[1] * tl.where(is_clipped, parameters[0], ratio)
    return -weight * advantages * log_probs, -weight * advantages, is_clipped


@triton.jit
def heeding(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters):
    weight = (1 + 0.1 * vectors[0]) * vectors[1]
    return -weight * advantages * log_probs, -weight * advantages, weight < 0


@triton.jit
def unbounded(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio):
    ratio = bounded_exp(log_ratio)
    size = tl.abs(advantages)
    value = -advantages * ratio + size * (ratio - 1) * (ratio - 1)
    return value, (-advantages + 2 * size * (ratio - 1)) * ratio, ratio < 0


@triton.jit
def overflowing(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio):
    return tl.where(log_ratio > 100, float("inf"), -advantages * log_ratio), -advantages, log_ratio > 100
