"""The Triton twin of dro.py: the same elementwise function inside the loss kernels."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl  # noqa: F401  (the interpreter of Triton looks for it)


@triton.jit
def dro(
    log_ratio,  # float32 block, as the next two
    advantages,
    log_probs,
    lowest_ratio,  # not used
    highest_ratio,  # not used
    vectors,  # None
    parameters,  # (log_ratio_penalty,)
):  # value, derivative, is_clipped
    penalty = log_ratio * parameters[0]
    return -advantages * log_probs + penalty * log_ratio / 2, -advantages + penalty, log_ratio != log_ratio
