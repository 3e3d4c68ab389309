"""The Triton twins of the estimators of this folder, of float32 blocks: value, derivative."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.ops.ratios_triton import LOG_RATIO_BOUND, bounded_exp, k3_estimate


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
    value, derivative = k3_estimate(log_probs, ref_log_probs)
    return value, derivative


@triton.jit
def k3_plus(log_probs, ref_log_probs, log_ratio):
    value, _ = k3_estimate(log_probs, ref_log_probs)
    return value, log_probs - ref_log_probs


@triton.jit
def unbiased(log_probs, ref_log_probs, log_ratio):
    difference = log_probs - ref_log_probs
    value, _ = k3_estimate(log_probs, ref_log_probs)
    ratio = bounded_exp(log_ratio)
    is_inside = (tl.abs(difference) <= LOG_RATIO_BOUND) & (tl.abs(log_ratio) <= LOG_RATIO_BOUND)
    return ratio * value, tl.where(is_inside, ratio * difference, 0.0)
