"""Loads what a loss takes inside a kernel, for blocks of tokens and for samples, and calls its Triton version.

LOSS is the version that the loss declares. Masked tokens are not loaded. A pointer of None is an absent input, a column of -1 is
not needed. NaN passes through `bounded`, because comparisons with it are false; tl.minimum, tl.maximum and tl.clamp would return
their other argument.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl import config

LOG_RATIO_BOUND = tl.constexpr(config.LOG_RATIO_BOUND)


@triton.jit
def bounded(x, lower, upper):
    return tl.where(x < lower, lower, tl.where(x > upper, upper, x))


@triton.jit
def bounded_exp(log_ratio):
    """exp of the log-ratio bounded to +-20."""
    return tl.exp(bounded(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


@triton.jit
def load_live(POINTER, tokens, is_live):  # float32 block, 0 where masked
    return tl.load(POINTER + tokens, mask=is_live, other=0.0).to(tl.float32)


@triton.jit
def load_tokens(LOG_PROBS, LOSS_MASK, start, end, BLOCK: tl.constexpr):
    """A block of a document's tokens: their positions, whether each is unmasked, their log-probabilities."""
    tokens = start + tl.arange(0, BLOCK)
    is_live = tl.load(LOSS_MASK + tokens, mask=tokens < end, other=0) != 0
    return tokens, is_live, load_live(LOG_PROBS, tokens, is_live)


@triton.jit
def load_old(OLD_LOG_PROBS, new, tokens, is_live):
    """The old log-probabilities; on-policy the new ones."""
    old = new
    if OLD_LOG_PROBS is not None:
        old = load_live(OLD_LOG_PROBS, tokens, is_live)
    return old


@triton.jit
def mean(total, count):
    """total / count; 0 for a document without a live token on any rank."""
    return tl.where(count > 0, total / tl.maximum(count, 1.0), 0.0)


@triton.jit
def spread(scalar, BLOCK: tl.constexpr):  # float32 block
    """The same number in each lane. Call it before a comparison: the interpreter of Triton spreads a flag wrongly."""
    return tl.zeros((BLOCK,), tl.float32) + scalar.to(tl.float32)


@triton.jit
def load_vectors(VECTORS, tokens, is_live):
    """The loss's further inputs of these tokens, a tuple of blocks; None where it has none."""
    if VECTORS is None:
        vectors = None
    else:
        vectors = ()
        for index in tl.static_range(len(VECTORS)):
            vectors = vectors + (load_live(VECTORS[index], tokens, is_live),)
    return vectors


@triton.jit
def load_vectors_of_sample(VECTORS, document, BLOCK: tl.constexpr):
    """The further inputs of a sequence-level loss, a tuple of blocks of one number; None where it has none."""
    if VECTORS is None:
        vectors = None
    else:
        vectors = ()
        for index in tl.static_range(len(VECTORS)):
            vectors = vectors + (spread(tl.load(VECTORS[index] + document), BLOCK),)  # type: ignore[assignment]  # a tuple in Triton
    return vectors


@triton.jit
def call_loss(
    LOSS: tl.constexpr,
    IS_OF_RATIO: tl.constexpr,
    log_ratio,
    advantages,
    log_probs,
    lowest_ratio,
    highest_ratio,
    vectors,
    parameters,
):
    """Calls the Triton version of the loss: value, derivative, is_clipped. It gets vectors and parameters where some are declared.

    IS_OF_RATIO: the loss does not take log_probs, so its derivative is 0 beyond the bound of the log-ratio, whatever it returns.
    """
    if vectors is None and parameters is None:
        value, derivative, is_clipped = LOSS(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio)
    else:
        value, derivative, is_clipped = LOSS(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters)
    if IS_OF_RATIO:
        derivative = tl.where(tl.abs(log_ratio) > LOG_RATIO_BOUND, 0.0, derivative)
    return value, derivative, is_clipped


@triton.jit
def apply_to_sample(
    LOSS: tl.constexpr,
    IS_OF_RATIO: tl.constexpr,
    sums,
    count,
    VECTORS,  # tuple of [N], or None
    document,
    lowest_ratio,
    highest_ratio,
    parameters,
    LOG_RATIO_COLUMN: tl.constexpr,
    LOG_PROBS_COLUMN: tl.constexpr,
    ADVANTAGES_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # value, derivative: the same in each lane
    """A sequence-level loss on the means of a sample."""
    advantages = spread(mean(tl.load(sums + ADVANTAGES_COLUMN), count), BLOCK)
    log_ratio = spread(mean(tl.load(sums + LOG_RATIO_COLUMN), count), BLOCK)
    log_prob = log_ratio
    if LOG_PROBS_COLUMN >= 0:
        log_prob = spread(mean(tl.load(sums + LOG_PROBS_COLUMN), count), BLOCK)
    vectors = load_vectors_of_sample(VECTORS, document, BLOCK)
    value, derivative, _ = call_loss(
        LOSS, IS_OF_RATIO, log_ratio, advantages, log_prob, lowest_ratio, highest_ratio, vectors, parameters
    )
    return value, derivative


@triton.jit
def weights_of_tokens(weight, IMPORTANCE_WEIGHTS, tokens, is_live):
    """The sample's weight of a token, times the token's importance weight where it has one."""
    weights = weight
    if IMPORTANCE_WEIGHTS is not None:
        weights = weight * load_live(IMPORTANCE_WEIGHTS, tokens, is_live)
    return weights


@triton.jit
def apply_to_tokens(
    LOSS: tl.constexpr,
    IS_OF_RATIO: tl.constexpr,
    new,  # block of log-probabilities
    OLD_LOG_PROBS,
    ADVANTAGES,
    VECTORS,
    tokens,
    is_live,
    lowest_ratio,
    highest_ratio,
    parameters,
):  # value, derivative
    """A token-level loss on a block of tokens."""
    old = load_old(OLD_LOG_PROBS, new, tokens, is_live)
    advantages = load_live(ADVANTAGES, tokens, is_live)
    vectors = load_vectors(VECTORS, tokens, is_live)
    value, derivative, _ = call_loss(
        LOSS, IS_OF_RATIO, new - old, advantages, new, lowest_ratio, highest_ratio, vectors, parameters
    )
    return value, derivative


@triton.jit
def kl_of_tokens(KL_FUNCTION: tl.constexpr, KL_TAKES_LOG_RATIO: tl.constexpr, new, OLD_LOG_PROBS, REF_LOG_PROBS, tokens, is_live):
    """The KL estimate of a block of tokens and its derivative by the log-probability, by the Triton version of the estimator."""
    sampled = new
    if KL_TAKES_LOG_RATIO and OLD_LOG_PROBS is not None:
        sampled = load_live(OLD_LOG_PROBS, tokens, is_live)
    reference = load_live(REF_LOG_PROBS, tokens, is_live)
    value, derivative = KL_FUNCTION(new, reference, new - sampled)
    return value, derivative
