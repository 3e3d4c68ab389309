"""The metrics' part of the loss kernels: statistics of each document, and the last reduction. They must never average averages.

The statistics are those of metrics.policy_statistics, in the order of metrics.STATISTICS. part_kernels_triton.py has the data flow
and the rules that hold for all of these kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl.losses.part_kernels_triton import (
    COUNT,
    ENTROPY,
    KL,
    NUM_TERMS,
    POLICY,
    load_advantage,
    load_live,
    mean,
    spread,
)
from megatron_rl.losses.surrogate_triton import clipped_surrogate, k3_estimate
from megatron_rl.metrics import STATISTICS

_COLUMNS = {name: tl.constexpr(index) for index, name in enumerate(STATISTICS)}
NUM_STATISTICS = tl.constexpr(len(STATISTICS))
NUM_DOCUMENTS, NUM_SAMPLES = _COLUMNS["num_documents"], _COLUMNS["num_samples"]
NUM_TOKENS, NUM_RATIOS = _COLUMNS["num_tokens"], _COLUMNS["num_ratios"]
RATIO_SUM, RATIO_SQUARED_SUM = _COLUMNS["ratio_new_old_sum"], _COLUMNS["ratio_new_old_squared_sum"]
OLD_LOG_PROB, NEW_LOG_PROB = _COLUMNS["old_logprobs"], _COLUMNS["new_logprobs"]
RATIO, DIVERGENCE = _COLUMNS["ratio_new_old"], _COLUMNS["kl_new_old"]
CLIPPED, CLIPPED_LOW, CLIPPED_HIGH = _COLUMNS["clipped_ratio_fraction"], _COLUMNS["clipped_low"], _COLUMNS["clipped_high"]
ADVANTAGE, ENTROPY_OF_TOKENS = _COLUMNS["advantage"], _COLUMNS["entropy"]
MAX_ADVANTAGE, MIN_ADVANTAGE = _COLUMNS["max_advantage"], _COLUMNS["min_advantage"]


@triton.jit(
    do_not_specialize_on_alignment=[
        *("LOG_PROBS", "OLD_LOG_PROBS", "ADVANTAGES", "ENTROPIES", "LOSS_MASK", "CU_SEQLENS", "SUMS"),
        "STATISTICS_OUT",
    ]
)
def document_statistics_kernel(
    LOG_PROBS,  # [T]
    OLD_LOG_PROBS,  # [T] or None
    ADVANTAGES,  # [N] or [T]
    ENTROPIES,  # [T] or None
    LOSS_MASK,  # [T] uint8
    CU_SEQLENS,  # [N + 1]
    SUMS,  # [N, NUM_COLUMNS] float64, over all cp ranks
    STATISTICS_OUT,  # [N, NUM_STATISTICS] float64
    lowest_ratio,
    highest_ratio,
    document_share,  # what a document adds to num_documents: 1 on cp rank 0, else 0
    NUM_COLUMNS: tl.constexpr,
    LOG_RATIO_COLUMN: tl.constexpr,
    ADVANTAGES_COLUMN: tl.constexpr,
    HAS_TOKEN_ADVANTAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """This rank's tokens of one document. Its share 1 / m_i is the same for all of them and multiplies the sums at the end."""
    document = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(CU_SEQLENS + document), tl.load(CU_SEQLENS + document + 1)
    sums = SUMS + document * NUM_COLUMNS
    count = tl.load(sums + COUNT)
    if not HAS_TOKEN_ADVANTAGES:
        advantages = spread(load_advantage(sums, ADVANTAGES, document, count, ADVANTAGES_COLUMN), BLOCK)
    if LOG_RATIO_COLUMN >= 0:
        log_ratio = spread(mean(tl.load(sums + LOG_RATIO_COLUMN), count), BLOCK)
        ratio, _, derivative = clipped_surrogate(log_ratio, advantages, lowest_ratio, highest_ratio)
    zeros, no_tokens = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int32)
    num_live, num_clipped, num_low, num_high = no_tokens, no_tokens, no_tokens, no_tokens
    ratio_sum, squared_sum, old_sum, new_sum, divergence, advantage_sum, entropy = zeros, zeros, zeros, zeros, zeros, zeros, zeros
    largest, smallest = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_live = tl.load(LOSS_MASK + tokens, mask=tokens < end, other=0) != 0
        new = load_live(LOG_PROBS, tokens, is_live)
        old = new
        if OLD_LOG_PROBS is not None:
            old = load_live(OLD_LOG_PROBS, tokens, is_live)
        if HAS_TOKEN_ADVANTAGES:
            advantages = load_live(ADVANTAGES, tokens, is_live)
        if LOG_RATIO_COLUMN < 0:
            ratio, _, derivative = clipped_surrogate(new - old, advantages, lowest_ratio, highest_ratio)
        is_clipped = is_live & (derivative == 0) & (advantages != 0)
        num_live += is_live.to(tl.int32)
        num_clipped += is_clipped.to(tl.int32)
        num_low += (is_clipped & (advantages < 0)).to(tl.int32)
        num_high += (is_clipped & (advantages > 0)).to(tl.int32)
        live_ratio = tl.where(is_live, ratio, 0.0).to(tl.float64)
        ratio_sum += live_ratio
        squared_sum += live_ratio * live_ratio
        old_sum += old.to(tl.float64)
        new_sum += new.to(tl.float64)
        divergence_of_token, _ = k3_estimate(old, new)
        divergence += tl.where(is_live, divergence_of_token, 0.0).to(tl.float64)
        advantage_sum += tl.where(is_live, advantages, 0.0).to(tl.float64)
        largest = tl.where(is_live, tl.maximum(largest, advantages), largest)
        smallest = tl.where(is_live, tl.minimum(smallest, advantages), smallest)
        if ENTROPIES is not None:
            entropy += load_live(ENTROPIES, tokens, is_live).to(tl.float64)
    num_tokens = tl.sum(num_live, 0).to(tl.float64)
    share = mean(1.0, count)
    ratio_share = share if LOG_RATIO_COLUMN >= 0 else 1.0
    row = STATISTICS_OUT + document * NUM_STATISTICS
    tl.store(row + NUM_DOCUMENTS, document_share)
    tl.store(row + NUM_SAMPLES, num_tokens * share)
    tl.store(row + NUM_TOKENS, num_tokens)
    tl.store(row + NUM_RATIOS, num_tokens * ratio_share)
    tl.store(row + RATIO_SUM, tl.sum(ratio_sum, 0) * ratio_share)
    tl.store(row + RATIO_SQUARED_SUM, tl.sum(squared_sum, 0) * ratio_share)
    tl.store(row + OLD_LOG_PROB, tl.sum(old_sum, 0) * share)
    tl.store(row + NEW_LOG_PROB, tl.sum(new_sum, 0) * share)
    tl.store(row + RATIO, tl.sum(ratio_sum, 0) * share)
    tl.store(row + DIVERGENCE, tl.sum(divergence, 0) * share)
    tl.store(row + CLIPPED, tl.sum(num_clipped, 0).to(tl.float64) * share)
    tl.store(row + CLIPPED_LOW, tl.sum(num_low, 0).to(tl.float64) * share)
    tl.store(row + CLIPPED_HIGH, tl.sum(num_high, 0).to(tl.float64) * share)
    tl.store(row + ADVANTAGE, tl.sum(advantage_sum, 0) * share)
    tl.store(row + ENTROPY_OF_TOKENS, tl.sum(entropy, 0) * share)
    tl.store(row + MAX_ADVANTAGE, tl.max(largest, 0))
    tl.store(row + MIN_ADVANTAGE, tl.min(smallest, 0))


@triton.jit(
    do_not_specialize=["num_documents"],
    do_not_specialize_on_alignment=["TERMS", "STATISTICS_IN", "LOSS", "TERMS_OUT", "STATISTICS_OUT"],
)
def finish_kernel(
    TERMS,  # [N, 3] float64
    STATISTICS_IN,  # [N, NUM_STATISTICS] float64 or None
    LOSS,  # [] float32
    TERMS_OUT,  # [3] float32
    STATISTICS_OUT,  # [NUM_STATISTICS] float64, or None with STATISTICS_IN
    kl_coefficient,
    entropy_coefficient,
    num_documents,
    BLOCK: tl.constexpr,
):
    """The documents' terms and statistics to the rank's, in one order. Program 0 has the terms, the others a statistic each."""
    column = tl.program_id(0) - 1
    if column < 0:
        policy, kl, entropy = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        for start in range(0, num_documents, BLOCK):
            documents = start + tl.arange(0, BLOCK)
            is_inside = documents < num_documents
            policy += tl.load(TERMS + documents * NUM_TERMS + POLICY, mask=is_inside, other=0.0)
            kl += tl.load(TERMS + documents * NUM_TERMS + KL, mask=is_inside, other=0.0)
            entropy += tl.load(TERMS + documents * NUM_TERMS + ENTROPY, mask=is_inside, other=0.0)
        loss = tl.sum(policy, 0) + tl.sum(kl, 0) * kl_coefficient - tl.sum(entropy, 0) * entropy_coefficient
        tl.store(LOSS, loss.to(tl.float32))
        tl.store(TERMS_OUT + POLICY, tl.sum(policy, 0).to(tl.float32))
        tl.store(TERMS_OUT + KL, tl.sum(kl, 0).to(tl.float32))
        tl.store(TERMS_OUT + ENTROPY, tl.sum(entropy, 0).to(tl.float32))
        return
    if STATISTICS_IN is not None:
        is_max, is_min = column == MAX_ADVANTAGE, column == MIN_ADVANTAGE
        neutral = tl.where(is_max, float("-inf"), tl.where(is_min, float("inf"), 0.0)).to(tl.float64)
        total = tl.zeros((BLOCK,), tl.float64) + neutral
        for start in range(0, num_documents, BLOCK):
            documents = start + tl.arange(0, BLOCK)
            is_inside = documents < num_documents
            x = tl.load(STATISTICS_IN + documents * NUM_STATISTICS + column, mask=is_inside, other=0.0)
            x = tl.where(is_inside, x, neutral)
            total = tl.where(is_max, tl.maximum(total, x), tl.where(is_min, tl.minimum(total, x), total + x))
        result = tl.where(is_max, tl.max(total, 0), tl.where(is_min, tl.min(total, 0), tl.sum(total, 0)))
        tl.store(STATISTICS_OUT + column, result)
