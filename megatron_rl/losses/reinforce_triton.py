"""The Triton versions of reinforce.py and topr.py."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.losses import topr as in_torch
from megatron_rl.ops.loss_triton import bounded_exp

LARGEST_RATIO_OF_ONE_POLICY = tl.constexpr(in_torch.LARGEST_RATIO_OF_ONE_POLICY)


@triton.jit
def reinforce(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio):
    return -advantages * log_probs, -advantages, log_probs != log_probs


@triton.jit
def topr(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio):
    ratio = bounded_exp(log_ratio)
    weight = tl.where((advantages >= 0) | (ratio > 1), 1.0, ratio)
    is_clipped = (advantages < 0) & (ratio > LARGEST_RATIO_OF_ONE_POLICY)
    return -weight * advantages * log_probs, -weight * advantages, is_clipped
