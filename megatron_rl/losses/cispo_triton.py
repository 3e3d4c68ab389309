"""The Triton version of cispo.py."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl  # noqa: F401  (the interpreter of Triton looks for it)

from megatron_rl.ops.loss_triton import bounded, bounded_exp


@triton.jit
def cispo(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio):
    ratio = bounded_exp(log_ratio)
    weight = bounded(ratio, lowest_ratio, highest_ratio)
    return -weight * advantages * log_probs, -weight * advantages, (ratio != weight) & (advantages != 0)
