"""The kernels of a loss over [T] and [N] numbers; parts_triton.py launches them. They must never add across programs atomically.

    document_sums           grid (N)      [T] -> sums [N, k] float64, which cp reduces once
    loss_and_coefficients   grid (N + 1)  sums, [T] -> coefficients [T], entropy_coefficients [T], terms [N, 3] float64
    document_statistics     grid (N)      sums, [T] -> statistics [N, K] float64; only for metrics (statistics_triton.py)
    finish                  grid (1)      terms, statistics -> loss, terms [3] float32, statistics [K] float64

A program walks over its document in blocks, in the order of the tokens, with one float64 accumulator a lane: the same bits on each
run. Masked tokens are not loaded. A column of -1 is one that nobody asked for; a pointer of None is an input that is absent.
Sizes and settings are run-time numbers and alignment is not looked at: what is compiled depends on dtypes and on what is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl.losses.sums import ADVANTAGE_VARIATION, FIRST_COLUMNS
from megatron_rl.losses.surrogate_triton import clipped_surrogate, k3_estimate

VARIATION_SQUARED = tl.constexpr(ADVANTAGE_VARIATION**2)
# Columns of the sums that each loss has.
NONFINITE, COUNT = (tl.constexpr(FIRST_COLUMNS.index(name)) for name in ("num_nonfinite", "counts"))
# Columns of the terms.
POLICY, KL, ENTROPY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NUM_TERMS = tl.constexpr(3)


@triton.jit
def load_live(POINTER, tokens, is_live):  # float32 block, 0 where masked
    return tl.load(POINTER + tokens, mask=is_live, other=0.0).to(tl.float32)


@triton.jit
def mean(total, count):
    """total / count; 0 for a document without a live token on any rank."""
    return tl.where(count > 0, total / tl.maximum(count, 1.0), 0.0)


@triton.jit
def spread(scalar, BLOCK: tl.constexpr):  # float32 block
    """The same number in each lane. To be called before a comparison: the interpreter mistakes a flag that is spread afterwards."""
    return tl.zeros((BLOCK,), tl.float32) + scalar.to(tl.float32)


@triton.jit
def load_advantage(sums, ADVANTAGES, document, count, ADVANTAGES_COLUMN: tl.constexpr):
    """The sample's advantage: given as one, or the mean of its tokens', which are then known to be equal."""
    if ADVANTAGES_COLUMN >= 0:
        advantage = mean(tl.load(sums + ADVANTAGES_COLUMN), count)
    else:
        advantage = tl.load(ADVANTAGES + document)
    return advantage


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")  # false for NaN too


@triton.jit(
    do_not_specialize_on_alignment=[
        *("LOG_PROBS", "OLD_LOG_PROBS", "ADVANTAGES", "IMPORTANCE_WEIGHTS", "REF_LOG_PROBS", "LOSS_MASK", "CU_SEQLENS", "SUMS"),
    ]
)
def document_sums_kernel(
    LOG_PROBS,  # [T]
    OLD_LOG_PROBS,  # [T] or None
    ADVANTAGES,  # [N] or [T]
    IMPORTANCE_WEIGHTS,  # [T] or None
    REF_LOG_PROBS,  # [T] or None
    LOSS_MASK,  # [T] uint8
    CU_SEQLENS,  # [N + 1]
    SUMS,  # [N, NUM_COLUMNS] float64
    NUM_COLUMNS: tl.constexpr,
    LOG_RATIO_COLUMN: tl.constexpr,
    IMPORTANCE_COLUMN: tl.constexpr,
    ADVANTAGES_COLUMN: tl.constexpr,
    HAS_TOKEN_ADVANTAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The columns of sums.sum_columns. A value counts as finite if float32, which the loss computes in, can hold it."""
    document = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(CU_SEQLENS + document), tl.load(CU_SEQLENS + document + 1)
    num_nonfinite, count = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    log_ratio, importance = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    advantage, squared_advantage = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for start in range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_live = tl.load(LOSS_MASK + tokens, mask=tokens < end, other=0) != 0
        new = load_live(LOG_PROBS, tokens, is_live)
        is_finite = _is_finite(new)
        old = new
        if OLD_LOG_PROBS is not None:
            old = load_live(OLD_LOG_PROBS, tokens, is_live)
            is_finite = is_finite & _is_finite(old)
        if HAS_TOKEN_ADVANTAGES:
            advantages = load_live(ADVANTAGES, tokens, is_live)
        else:
            advantages = spread(tl.load(ADVANTAGES + document), BLOCK)
        is_finite = is_finite & _is_finite(advantages)
        if IMPORTANCE_WEIGHTS is not None:
            weights = tl.load(IMPORTANCE_WEIGHTS + tokens, mask=is_live, other=0.0)
            is_finite = is_finite & _is_finite(weights.to(tl.float32))
            importance += weights.to(tl.float64)
        if REF_LOG_PROBS is not None:
            is_finite = is_finite & _is_finite(load_live(REF_LOG_PROBS, tokens, is_live))
        num_nonfinite += (is_live & (is_finite == 0)).to(tl.int32)
        count += is_live.to(tl.int32)
        log_ratio += (new - old).to(tl.float64)
        if ADVANTAGES_COLUMN >= 0:
            advantage += advantages.to(tl.float64)
            squared_advantage += advantages.to(tl.float64) * advantages.to(tl.float64)
    row = SUMS + document * NUM_COLUMNS
    tl.store(row + NONFINITE, tl.sum(num_nonfinite, 0).to(tl.float64))
    tl.store(row + COUNT, tl.sum(count, 0).to(tl.float64))
    if LOG_RATIO_COLUMN >= 0:
        tl.store(row + LOG_RATIO_COLUMN, tl.sum(log_ratio, 0))
    if IMPORTANCE_COLUMN >= 0:
        tl.store(row + IMPORTANCE_COLUMN, tl.sum(importance, 0))
    if ADVANTAGES_COLUMN >= 0:
        tl.store(row + ADVANTAGES_COLUMN, tl.sum(advantage, 0))
        tl.store(row + ADVANTAGES_COLUMN + 1, tl.sum(squared_advantage, 0))


@triton.jit
def _write_zeros(OUT, begin, end, BLOCK: tl.constexpr):
    for start in range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        tl.store(OUT + tokens, tl.zeros((BLOCK,), tl.float32), mask=tokens < end)


@triton.jit
def _num_nonfinite(sums, TOKEN_COUNTS, document, count, ADVANTAGES_COLUMN: tl.constexpr):  # int32
    """On the device there is no look at a flag: advantages that vary, and token_counts that are wrong, count as non-finite."""
    num_nonfinite = tl.load(sums + NONFINITE)
    if TOKEN_COUNTS is not None:
        is_miscounted = tl.load(TOKEN_COUNTS + document).to(tl.float64) != count
        num_nonfinite += tl.where(is_miscounted, tl.maximum(count, 1.0), 0.0)
    if ADVANTAGES_COLUMN >= 0:
        mean_advantage = mean(tl.load(sums + ADVANTAGES_COLUMN), count)
        mean_square = mean(tl.load(sums + ADVANTAGES_COLUMN + 1), count)
        # The constant on the right: the interpreter of Triton 3.7 takes constant * tensor for a constant.
        varies = mean_square - mean_advantage * mean_advantage > mean_square * VARIATION_SQUARED
        num_nonfinite += tl.where(varies, count, 0.0)
    return num_nonfinite.to(tl.int32)


@triton.jit(
    do_not_specialize=["num_documents", "num_tokens"],
    do_not_specialize_on_alignment=[
        *("LOG_PROBS", "OLD_LOG_PROBS", "ADVANTAGES", "IMPORTANCE_WEIGHTS", "REF_LOG_PROBS", "ENTROPIES", "LOSS_MASK"),
        *("CU_SEQLENS", "SUMS", "TOKEN_COUNTS", "TOKEN_WEIGHTS", "REGULARIZER_WEIGHTS", "COEFFICIENTS"),
        *("ENTROPY_COEFFICIENTS", "NUM_NONFINITE", "TERMS"),
    ],
)
def loss_and_coefficients_kernel(
    LOG_PROBS,  # [T]
    OLD_LOG_PROBS,  # [T] or None
    ADVANTAGES,  # [N] or [T]
    IMPORTANCE_WEIGHTS,  # [T] or None
    REF_LOG_PROBS,  # [T] or None
    ENTROPIES,  # [T] or None
    LOSS_MASK,  # [T] uint8
    CU_SEQLENS,  # [N + 1]
    SUMS,  # [N, NUM_COLUMNS] float64, over all cp ranks
    TOKEN_COUNTS,  # [N] the caller's, or None
    TOKEN_WEIGHTS,  # [N]
    REGULARIZER_WEIGHTS,  # [N] or None
    COEFFICIENTS,  # [T] float32
    ENTROPY_COEFFICIENTS,  # [T] float32, or None with ENTROPIES
    NUM_NONFINITE,  # [N] int32
    TERMS,  # [N, 3] float64
    lowest_ratio,
    highest_ratio,
    kl_coefficient,
    entropy_coefficient,
    num_documents,
    num_tokens,
    NUM_COLUMNS: tl.constexpr,
    LOG_RATIO_COLUMN: tl.constexpr,
    IMPORTANCE_COLUMN: tl.constexpr,
    ADVANTAGES_COLUMN: tl.constexpr,
    HAS_TOKEN_ADVANTAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One document's terms and the coefficients of its tokens; the last program owns the padding behind all documents.

    A sequence-level loss has one value and one coefficient a document, a token-level one computes both for each token.
    """
    document = tl.program_id(0).to(tl.int64)
    begin = tl.load(CU_SEQLENS + document)
    if document == num_documents:
        _write_zeros(COEFFICIENTS, begin, num_tokens, BLOCK)
        if ENTROPY_COEFFICIENTS is not None:
            _write_zeros(ENTROPY_COEFFICIENTS, begin, num_tokens, BLOCK)
        return
    end = tl.load(CU_SEQLENS + document + 1)
    sums = SUMS + document * NUM_COLUMNS
    count = tl.load(sums + COUNT)
    tl.store(NUM_NONFINITE + document, _num_nonfinite(sums, TOKEN_COUNTS, document, count, ADVANTAGES_COLUMN))
    weight = tl.load(TOKEN_WEIGHTS + document).to(tl.float32)
    regularizer_weight = 0.0
    if REGULARIZER_WEIGHTS is not None:
        regularizer_weight = tl.load(REGULARIZER_WEIGHTS + document).to(tl.float32)
    if not HAS_TOKEN_ADVANTAGES:
        advantages = spread(load_advantage(sums, ADVANTAGES, document, count, ADVANTAGES_COLUMN), BLOCK)
    if LOG_RATIO_COLUMN >= 0:
        log_ratio = spread(mean(tl.load(sums + LOG_RATIO_COLUMN), count), BLOCK)
        _, value, derivative = clipped_surrogate(log_ratio, advantages, lowest_ratio, highest_ratio)
        coefficient = weight * derivative
        if IMPORTANCE_COLUMN >= 0:
            coefficient = weight * mean(tl.load(sums + IMPORTANCE_COLUMN), count).to(tl.float32) * derivative
    policy, kl, entropy = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for start in range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_live = tl.load(LOSS_MASK + tokens, mask=tokens < end, other=0) != 0
        new = load_live(LOG_PROBS, tokens, is_live)
        value_weights = weight
        if IMPORTANCE_WEIGHTS is not None:
            value_weights = weight * load_live(IMPORTANCE_WEIGHTS, tokens, is_live)
        if LOG_RATIO_COLUMN < 0:
            old = new
            if OLD_LOG_PROBS is not None:
                old = load_live(OLD_LOG_PROBS, tokens, is_live)
            if HAS_TOKEN_ADVANTAGES:
                advantages = load_live(ADVANTAGES, tokens, is_live)
            _, value, derivative = clipped_surrogate(new - old, advantages, lowest_ratio, highest_ratio)
            coefficient = value_weights * derivative
        policy += tl.where(is_live, value_weights * value, 0.0).to(tl.float64)
        coefficients = coefficient
        if REF_LOG_PROBS is not None:
            k3, k3_derivative = k3_estimate(new, load_live(REF_LOG_PROBS, tokens, is_live))
            kl += tl.where(is_live, regularizer_weight * k3, 0.0).to(tl.float64)
            coefficients += kl_coefficient * regularizer_weight * k3_derivative
        tl.store(COEFFICIENTS + tokens, tl.where(is_live, coefficients, 0.0), mask=tokens < end)
        if ENTROPY_COEFFICIENTS is not None:
            entropy += tl.where(is_live, regularizer_weight * load_live(ENTROPIES, tokens, is_live), 0.0).to(tl.float64)
            entropy_coefficients = tl.where(is_live, -entropy_coefficient * regularizer_weight, 0.0)
            tl.store(ENTROPY_COEFFICIENTS + tokens, entropy_coefficients, mask=tokens < end)
    terms = TERMS + document * NUM_TERMS
    tl.store(terms + POLICY, tl.sum(policy, 0))
    tl.store(terms + KL, tl.sum(kl, 0))
    tl.store(terms + ENTROPY, tl.sum(entropy, 0))
