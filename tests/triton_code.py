"""Triton code of tests: the twins of own_losses.py, and kernels that call a twin on a block, as the loss kernels do,
and one that the gate of machine code finds good or bad."""

from __future__ import annotations

from collections.abc import Callable

import torch
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


# The gate of machine code: a row kernel that keeps its bounds, and variants that each break one of them. Only tests/sass_gate.py
# compiles them.

WITH_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["num_columns", "stride8"])
def good_rows(
    X,
    OUT,
    qk,
    num_columns,
    stride8,
    L: tl.constexpr,
    MASK_IN_LOOP: tl.constexpr,
    ONE_MAXIMUM: tl.constexpr,
    BLIND: tl.constexpr,
    EXPONENTIALS: tl.constexpr,
):
    """The statistics of a row without their tail: lane-private maxima, 8 neighbouring columns a lane."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, L)[:, None] * 8 + tl.arange(0, 8)[None, :]
    m, s, w = tl.full((L,), -1e30, tl.float32), tl.zeros((L,), tl.float32), tl.zeros((L,), tl.float32)
    for tile in range(0, num_columns // (8 * L)):
        columns = tile * (8 * L) + offsets
        if MASK_IN_LOOP:
            x = tl.load(X + row * stride8 * 8 + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
        else:
            x = tl.load(X + row * stride8 * 8 + columns).to(tl.float32)
        new = tl.maximum(m, tl.max(x, 1))
        if ONE_MAXIMUM:
            new = tl.zeros((L,), tl.float32) + tl.max(new, 0)
        step = tl.maximum((m - new) * qk, -300.0)
        scale = tl.exp2(step)
        w = scale * (w + step * s)
        s = scale * s
        d = (x - new[:, None]) * qk
        if BLIND:
            d = tl.maximum(d, -300.0)
        else:
            d = tl.maximum(d, -300.0, propagate_nan=WITH_NAN)
        e = tl.exp2(d)
        for power in tl.static_range(1, EXPONENTIALS):
            e += tl.exp2(d * (power + 1))
        s += tl.sum(e, 1)
        w += tl.sum(e * d, 1)
        m = new
    tl.store(OUT + row * 3, tl.max(m, 0))
    tl.store(OUT + row * 3 + 1, tl.sum(s, 0))
    tl.store(OUT + row * 3 + 2, tl.sum(w, 0))


# The same source: what @triton.jit gives to those who do not say do_not_specialize.
specialising_rows = triton.jit(good_rows.fn)


def launch(function=good_rows, *, lanes: int = 128, num_columns: int = 50304, **options) -> Callable[[], None]:
    switches = {"MASK_IN_LOOP": False, "ONE_MAXIMUM": False, "BLIND": False, "EXPONENTIALS": 1}
    switches.update({name: options.pop(name) for name in switches if name in options})

    def run() -> None:
        logits = torch.empty(4096, num_columns, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(4096, 3, device="cuda")
        function[(4096,)](logits, out, 1.44, num_columns, num_columns // 8, L=lanes, **switches, **{"num_warps": 4, **options})

    return run


LAUNCHES = {
    "good": launch(),
    "mask in the loop": launch(MASK_IN_LOOP=True),
    "one maximum for all lanes": launch(ONE_MAXIMUM=True),
    "clamp that drops NaN": launch(BLIND=True),
    "two exponentials": launch(EXPONENTIALS=2),
    "registers that spill": launch(lanes=2048, maxnreg=32),
    "small blocks": launch(lanes=32, num_warps=1),
    "sizes as constants": launch(specialising_rows),
}
