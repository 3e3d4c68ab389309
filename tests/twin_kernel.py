"""Kernels that call the Triton twins on blocks, as the loss kernels do; apart, because they need Triton to be read.

The interpreter runs what does not compile: tests/test_triton_versions.py compiles LAUNCHES without a GPU.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megatron_rl.declare import get_policy_loss, policy_loss_names
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.ops.loss_triton import call_loss, load_vectors
from megatron_rl.policy_loss.reduce_triton import triton_of_estimator, triton_of_loss


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


def launch(name: str) -> None:
    """Of a loss: without the tuples that it does not have."""
    loss = get_policy_loss(name)
    vectors = [torch.empty(64, device="cuda") for _ in range(6 + len(loss.needs))]
    further, numbers = tuple(vectors[6:]) or None, tuple(0.5 for _ in loss.parameters) or None
    twin_kernel[(1,)](
        *(*vectors[:3], further, *vectors[3:6], 0.8, 1.2, numbers, 64),
        LOSS=triton_of_loss(loss),
        IS_OF_RATIO=not loss.takes_log_probs,
        BLOCK=64,
    )


def launch_kl(name: str) -> None:
    vectors = [torch.empty(128, device="cuda") for _ in range(5)]
    kl_kernel[(1,)](*vectors, 128, KL_FUNCTION=triton_of_estimator(KL_ESTIMATORS[name]), BLOCK=128)


LAUNCHES = {
    **{name: functools.partial(launch, name) for name in policy_loss_names() if get_policy_loss(name).triton},
    **{f"KL {name}": functools.partial(launch_kl, name) for name in KL_ESTIMATORS.names() if KL_ESTIMATORS[name].triton},
}
