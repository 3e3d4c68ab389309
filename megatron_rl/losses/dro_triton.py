"""The Triton version of dro.py."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl  # noqa: F401  (the interpreter of Triton looks for it)


@triton.jit
def dro(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters):
    (log_ratio_penalty,) = parameters
    penalty = log_ratio * log_ratio_penalty
    return -advantages * log_probs + penalty * log_ratio / 2, -advantages + penalty, log_ratio != log_ratio
