"""A kernel that calls the Triton twin of a loss on blocks, as the loss kernels do; apart, because it needs Triton to be read."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl.losses.twin_triton import apply_twin, load_vectors


@triton.jit
def kl_kernel(
    LOG_PROBS,  # [n] float32, as all of them
    REF_LOG_PROBS,
    LOG_RATIO,
    VALUE,
    DERIVATIVE,
    n,
    KL_TWIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    is_inside = at < n
    log_probs, reference = tl.load(LOG_PROBS + at, is_inside, 0.0), tl.load(REF_LOG_PROBS + at, is_inside, 0.0)
    value, derivative = KL_TWIN(log_probs, reference, tl.load(LOG_RATIO + at, is_inside, 0.0))
    tl.store(VALUE + at, value, is_inside)
    tl.store(DERIVATIVE + at, derivative, is_inside)


@triton.jit
def twin_kernel(
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
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    is_inside = at < n
    log_ratio, advantages = tl.load(LOG_RATIO + at, is_inside, 0.0), tl.load(ADVANTAGES + at, is_inside, 0.0)
    log_probs, vectors = tl.load(LOG_PROBS + at, is_inside, 0.0), load_vectors(VECTORS, at, is_inside)
    value, derivative, is_clipped = apply_twin(
        LOSS, log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters
    )
    tl.store(VALUE + at, value, is_inside)
    tl.store(DERIVATIVE + at, derivative, is_inside)
    tl.store(IS_CLIPPED + at, (is_inside & is_clipped).to(tl.float32), is_inside)
