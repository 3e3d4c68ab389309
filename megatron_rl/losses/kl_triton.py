"""The Triton versions of the estimators of kl.py, of float32 blocks: value, derivative."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.ops.loss_triton import LOG_RATIO_BOUND, bounded, bounded_exp


@triton.jit
def k1(log_probs, ref_log_probs, log_ratio):
    difference = log_probs - ref_log_probs
    return difference, tl.zeros_like(difference) + 1.0


@triton.jit
def k2(log_probs, ref_log_probs, log_ratio):
    difference = log_probs - ref_log_probs
    return difference * difference * 0.5, difference


@triton.jit
def k3(log_probs, ref_log_probs, log_ratio):
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


@triton.jit
def k3_plus(log_probs, ref_log_probs, log_ratio):
    value, _ = k3(log_probs, ref_log_probs, log_ratio)
    return value, log_probs - ref_log_probs


@triton.jit
def unbiased(log_probs, ref_log_probs, log_ratio):
    difference = log_probs - ref_log_probs
    value, _ = k3(log_probs, ref_log_probs, log_ratio)
    ratio = bounded_exp(log_ratio)
    is_inside = (tl.abs(difference) <= LOG_RATIO_BOUND) & (tl.abs(log_ratio) <= LOG_RATIO_BOUND)
    return ratio * value, tl.where(is_inside, ratio * difference, 0.0)
