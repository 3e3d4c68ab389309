"""Triton code of tests: the Triton versions of own_losses.py, and kernels that call one on a block, as the loss kernels do."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl.ops.loss_triton import bounded_exp, call_loss, load_vectors


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


@triton.jit
def kl_kernel(
    LOG_PROBS,  # [n] float32, as all of them
    REF_LOG_PROBS,
    LOG_RATIO,
    VALUE,
    DERIVATIVE,
    n,
    KL_FUNCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    is_inside = at < n
    log_probs, reference = tl.load(LOG_PROBS + at, is_inside, 0.0), tl.load(REF_LOG_PROBS + at, is_inside, 0.0)
    value, derivative = KL_FUNCTION(log_probs, reference, tl.load(LOG_RATIO + at, is_inside, 0.0))
    tl.store(VALUE + at, value, is_inside)
    tl.store(DERIVATIVE + at, derivative, is_inside)


@triton.jit
def loss_kernel(
    LOG_RATIO,  # [n] float32, as all of them
    ADVANTAGES,
    LOG_PROBS,
    VECTORS,  # tuple of [n], or None
    VALUE,
    DERIVATIVE,
    IS_CLIPPED,
    lowest_ratio,
    highest_ratio,
    parameters,  # tuple of numbers, or None
    n,
    LOSS: tl.constexpr,
    IS_OF_RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    is_inside = at < n
    log_ratio, advantages = tl.load(LOG_RATIO + at, is_inside, 0.0), tl.load(ADVANTAGES + at, is_inside, 0.0)
    log_probs = tl.load(LOG_PROBS + at, is_inside, 0.0)
    vectors = load_vectors(VECTORS, at, is_inside)  # by itself: Triton's compiler unpacks no tuple that holds None
    value, derivative, is_clipped = call_loss(
        LOSS, IS_OF_RATIO, log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters
    )
    tl.store(VALUE + at, value, is_inside)
    tl.store(DERIVATIVE + at, derivative, is_inside)
    tl.store(IS_CLIPPED + at, (is_inside & is_clipped).to(tl.float32), is_inside)
