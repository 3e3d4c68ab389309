"""Computes row results and the gradient of the logits in one kernel: it reads each logit from memory once.

    one_read   grid (rows)   logits [T, V], what the coefficients need -> log_probs [T], entropy [T], gradient [T, V]

A program walks its row twice. The first walk gives the statistics, they give the log-probability, and from it come the row's
coefficients c and e. The second walk goes backwards and writes the gradient; it finds the row in the L2 cache, if the rows that are
under way at once fit there. So a bf16 logit costs 4 bytes instead of 6. The statistics and the gradient are the functions of the
other kernels; only the lanes of a row are more.

The coefficients are those of a loss whose Triton version knows them row by row, or c = 1 without a loss: then the gradient is
G = (delta - p) / temperature, and a row's coefficient commutes with the matmuls that follow in a fused head. Derivation:
docs/kernels.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.ops.backends import (
    ALIGNMENT,
    RowResult,
    VocabShard,
    flat_rows,
    has_flat_rows,
    num_processors,
)
from megatron_rl.ops.log_probs_triton import (
    LOG2_E,
    row_result,
    row_result_memory,
    statistics_of_row,
    write_gradient_of_row,
)
from megatron_rl.ops.loss_triton import apply_to_tokens, kl_of_tokens, spread, weights_of_tokens

# Of the L2 cache, what the rows under way at once may take. The rest is for the vectors and for lines on their way out.
#
# Measured on an H100 (132 multiprocessors, 50 MiB of L2, Triton 3.6, 2026-11-28): GRPO with a declared factor, forward and backward
# of 4 GiB of bfloat16 logits, with two kernels and with one kernel of 8, 16 and 32 warps; the median of five. Time of the program
# that this share takes, over that of two kernels:
#
#     columns     16,384    32,768    65,536    98,304    151,936    262,144    524,288
#     warps            8        16        32        32         32         32         32
#     in place      0.63      0.75      0.80      0.76       0.81       0.86       0.91
#
# Out of place it is 0.73 to 0.92: in no shape are two kernels faster. At 151,936 columns the rows of fewer warps do not fit: they
# take 0.86 with 16 warps, 0.93 with 8.
CACHE_SHARE = 0.8
# A program has at most 64 registers a thread, and needs more than 32. So a multiprocessor of 65,536 registers starts at most one
# program of 32 warps, three of 16 or six of 8: {warps: rows under way at once}. More rows hide each other's latencies.
# They bound each binary. At the 45 to 64 registers compiled for sm_90 two of 16 warps start, or four or five of 8. At the 40 of
# one_read without a loss on sm_100 three and six do (docs/kernels.md). So a smaller number would let more rows into the cache than
# it holds.
ROWS_AT_ONCE, MAX_REGISTERS = {8: 6, 16: 3, 32: 1}, 64
# With fewer waves of programs, the last one leaves too many multiprocessors idle: at 2, two thirds of the device work at least.
FEWEST_WAVES = 2
LANES_OF_A_WARP, TILES, COLUMNS_OF_A_LANE = 32, 2, 16
# There is no memory to save where kernels are interpreted: the number of an H100, so that the same shapes take the same kernels.
CACHE_OF_A_CPU = 50 << 20


@dataclass(frozen=True, slots=True)
class OneReadConfiguration:
    """A program: `lanes` with `tiles` 128-bit loads in flight in the first walk, `block` columns at a time in the second."""

    lanes: int
    tiles: int
    block: int
    num_warps: int


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """The size of the L2 cache."""
    if device.type != "cuda":
        return CACHE_OF_A_CPU
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def one_read_configuration(num_rows: int, row_bytes: int, device: torch.device) -> OneReadConfiguration | None:
    """The program with the most rows at once that fit the cache, else the one with the fewest; None: the rows are too few.

    row_bytes: of a row that is read. Only numbers that the host knows.
    """
    for num_warps, rows_at_once in ROWS_AT_ONCE.items():
        rows = rows_at_once * num_processors(device)
        fits = rows * row_bytes <= CACHE_SHARE * cache_bytes(device) or rows_at_once == min(ROWS_AT_ONCE.values())
        if fits and num_rows >= FEWEST_WAVES * rows:
            lanes = LANES_OF_A_WARP * num_warps
            return OneReadConfiguration(lanes, TILES, COLUMNS_OF_A_LANE * lanes, num_warps)
    return None


def plan_one_read(
    logits: Tensor,  # [T, V]
    out: Tensor | None,  # [T, V] for the gradient, may be logits; None: of gradient_like
) -> OneReadConfiguration | None:
    """The program; None where statistics and gradient stay two kernels: there is nothing to read, columns are not adjacent, rows of
    both are not aligned alike, or the rows are too few."""
    if logits.numel() == 0 or not has_flat_rows(logits):
        return None
    if out is not None and not (has_flat_rows(out) and flat_rows(out).is_aligned_with(flat_rows(logits))):
        return None
    return one_read_configuration(logits.shape[0], logits.shape[1] * logits.itemsize, logits.device)


@triton.jit
def _document_of(row, CU_SEQLENS, num_documents, BLOCK: tl.constexpr):
    """The document of a row that is no padding: as many documents as end at or before it come first."""
    num_ended = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_documents, BLOCK):
        documents = start + tl.arange(0, BLOCK)
        is_inside = documents < num_documents
        ends = tl.load(CU_SEQLENS + 1 + documents, mask=is_inside, other=0)
        num_ended += (is_inside & (ends <= row)).to(tl.int32)
    return tl.sum(num_ended, 0)


@triton.jit(
    do_not_specialize=(
        "loss_scale lowest_ratio highest_ratio kl_coefficient entropy_coefficient num_documents inverse_temperature qk num_rows "
        "num_columns num_stored units shift stride out_shift out_stride"
    ).split(),
    do_not_specialize_on_alignment=(
        "LABELS LOSS_MASK POLICY_COEFFICIENTS OLD_LOG_PROBS ADVANTAGES IMPORTANCE_WEIGHTS REF_LOG_PROBS CU_SEQLENS TOKEN_WEIGHTS "
        "REGULARIZER_WEIGHTS LOSS_SCALE BOUNDS LOG_PROBS ENTROPIES"
    ).split(),
)
def one_read_kernel(
    X,  # [T, V]
    OUT,  # [T, V], may be X's memory
    LABELS,  # [T]
    BOUNDS,  # [2, T] float32: maximum, total; or None
    LOG_PROBS,  # [T] float32
    ENTROPIES,  # [T] float32
    inverse_temperature,
    qk,
    num_rows,
    num_columns,
    num_stored,
    units,
    shift,
    stride,
    out_shift,
    out_stride,
    L: tl.constexpr,
    U: tl.constexpr,
    VECTOR: tl.constexpr,
    OUT_VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    # Of a loss; NO_LOSS without one.
    LOSS_MASK,  # [T] uint8; None: every row counts
    POLICY_COEFFICIENTS,  # [T] float32, the policy term's coefficients where they are known before
    OLD_LOG_PROBS,  # [T]
    ADVANTAGES,  # [T]
    IMPORTANCE_WEIGHTS,  # [T]
    REF_LOG_PROBS,  # [T]
    VECTORS,  # tuple of [T]
    CU_SEQLENS,  # [N + 1]
    TOKEN_WEIGHTS,  # [N]
    REGULARIZER_WEIGHTS,  # [N]
    LOSS_SCALE,  # [] float32; None: the host knows it
    loss_scale,
    lowest_ratio,
    highest_ratio,
    parameters,  # tuple of numbers that the loss declares
    kl_coefficient,
    entropy_coefficient,
    num_documents,
    KL_FUNCTION: tl.constexpr,  # of the estimator, with REF_LOG_PROBS
    KL_TAKES_LOG_RATIO: tl.constexpr,
    LOSS: tl.constexpr,  # its Triton version; None: the coefficient is 1
    IS_OF_RATIO: tl.constexpr,
    HAS_ENTROPY_TERM: tl.constexpr,
):
    """Grid (rows). A masked row is only written: its log-probability, entropy and gradient are 0."""
    row = tl.program_id(0).to(tl.int64)
    is_live = True
    if LOSS_MASK is not None:
        is_live = tl.load(LOSS_MASK + row) != 0
    label = tl.load(LABELS + row, mask=is_live, other=0)
    maximum, total, log_prob, entropy = 0.0, 1.0, 0.0, 0.0
    c, e = 1.0, 0.0
    if is_live:
        maximum, total, target, weighted = statistics_of_row(
            X, LABELS, row, 0, qk, num_columns, 0, units, shift, stride, L, U, VECTOR, WITH_ENTROPY, "evict_last"
        )
        log_prob, entropy = row_result(maximum, total, target, weighted, inverse_temperature, WITH_ENTROPY)
        if LOSS is not None:
            # The loss's functions work on blocks of tokens: here a block of one.
            tokens = row + tl.arange(0, 1)
            is_token = tokens >= 0
            new = spread(log_prob, 1)
            document = _document_of(row, CU_SEQLENS, num_documents, L)
            if POLICY_COEFFICIENTS is not None:
                coefficients = tl.load(POLICY_COEFFICIENTS + tokens)
            else:
                weight = tl.load(TOKEN_WEIGHTS + document).to(tl.float32)
                _, derivative = apply_to_tokens(
                    LOSS,
                    IS_OF_RATIO,
                    new,
                    OLD_LOG_PROBS,
                    ADVANTAGES,
                    VECTORS,
                    tokens,
                    is_token,
                    lowest_ratio,
                    highest_ratio,
                    parameters,
                )
                coefficients = weights_of_tokens(weight, IMPORTANCE_WEIGHTS, tokens, is_token) * derivative
            if REGULARIZER_WEIGHTS is not None:
                regularizer_weight = tl.load(REGULARIZER_WEIGHTS + document).to(tl.float32)
                if REF_LOG_PROBS is not None:
                    _, kl_derivative = kl_of_tokens(
                        KL_FUNCTION, KL_TAKES_LOG_RATIO, new, OLD_LOG_PROBS, REF_LOG_PROBS, tokens, is_token
                    )
                    coefficients += kl_coefficient * regularizer_weight * kl_derivative
                if HAS_ENTROPY_TERM:
                    e = -entropy_coefficient * regularizer_weight
            scale = loss_scale
            if LOSS_SCALE is not None:
                scale = tl.load(LOSS_SCALE)
            c = scale * tl.sum(coefficients, 0)
            e = scale * e
    is_wanted = num_columns > 0
    if LOSS is not None:
        is_wanted = is_live & ((c != 0.0) | (e != 0.0))
    if BOUNDS is not None:
        tl.store(BOUNDS + row, maximum)
        tl.store(BOUNDS + num_rows + row, total)
    if LOSS is None:
        label = tl.load(LABELS + row)  # so late, because it would take a register during the first walk
    tl.store(LOG_PROBS + row, log_prob)
    tl.store(ENTROPIES + row, entropy)
    write_gradient_of_row(
        X,
        OUT,
        row,
        0,
        is_wanted,
        label,
        maximum,
        total,
        entropy,
        c,
        e,
        (inverse_temperature, qk),
        (num_columns, num_stored),
        (units, shift, stride, out_shift, out_stride),
        BLOCK,
        OUT_VECTOR,
        HAS_ENTROPY_TERM,
        True,
    )


# The arguments of a loss where there is none.
NO_LOSS: dict[str, Any] = {
    **dict.fromkeys("LOSS_MASK POLICY_COEFFICIENTS OLD_LOG_PROBS ADVANTAGES IMPORTANCE_WEIGHTS REF_LOG_PROBS".split()),
    **dict.fromkeys("VECTORS CU_SEQLENS TOKEN_WEIGHTS REGULARIZER_WEIGHTS LOSS_SCALE parameters KL_FUNCTION LOSS".split()),
    "loss_scale": 1.0,
    "lowest_ratio": 0.0,
    "highest_ratio": 0.0,
    "kl_coefficient": 0.0,
    "entropy_coefficient": 0.0,
    "num_documents": 0,
    "KL_TAKES_LOG_RATIO": False,
    "IS_OF_RATIO": False,
    "HAS_ENTROPY_TERM": False,
}


def run_one_read(
    configuration: OneReadConfiguration,  # of plan_one_read
    logits: Tensor,  # [T, V]: the whole vocabulary
    labels: Tensor,  # [T] int64
    shard: VocabShard,
    *,
    with_entropy: bool,
    out: Tensor,  # [T, V], may be the logits' own storage
    with_bounds: bool = False,
    **loss_arguments: Any,  # the kernel's arguments of a loss
) -> RowResult:  # maximum and total are undefined without with_bounds
    """One launch, no communication."""
    rows, gradient = flat_rows(logits), flat_rows(out)
    with torch.cuda.device_of(logits):
        bounds, log_probs, entropies = row_result_memory(logits.shape[0], logits.device)
        one_read_kernel[(logits.shape[0],)](
            X=rows.pointer,
            OUT=gradient.pointer,
            LABELS=labels.contiguous(),
            BOUNDS=bounds if with_bounds else None,
            LOG_PROBS=log_probs,
            ENTROPIES=entropies,
            inverse_temperature=shard.inverse_temperature,
            qk=shard.inverse_temperature * LOG2_E,
            num_rows=logits.shape[0],
            num_columns=shard.num_columns,
            num_stored=logits.shape[1],
            units=triton.cdiv(logits.shape[1], ALIGNMENT),
            shift=rows.shift,
            stride=rows.stride,
            out_shift=gradient.shift,
            out_stride=gradient.stride,
            L=configuration.lanes,
            U=configuration.tiles,
            VECTOR=16 // logits.itemsize,
            OUT_VECTOR=16 // out.itemsize,
            BLOCK=configuration.block,
            WITH_ENTROPY=with_entropy,
            num_warps=configuration.num_warps,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=True,
            **(NO_LOSS | loss_arguments),
        )
    # Autograd does not see the write of a kernel. Its version counter protects logits that another backward still needs.
    torch.autograd.graph.increment_version(out)
    return RowResult(bounds[0], bounds[1], log_probs, entropies)


def unit_gradient(
    logits: Tensor,  # [T, V]: the whole vocabulary
    labels: Tensor,  # [T] int64
    shard: VocabShard,
    *,
    with_entropy: bool,
    out: Tensor,  # [T, V] of the weight's dtype; may be the logits' own storage
) -> RowResult | None:
    """`out` gets G, 0 behind the vocabulary. None, and nothing done, where there is no plan.

    None too for a float16 `out`: its largest number is 65504, and then the coefficient multiplies a row of hidden states, which may
    be large, in the place of G, which is at most 1 / temperature.
    """
    configuration = None if out.dtype == torch.float16 else plan_one_read(logits, out)
    if configuration is None:
        return None
    return run_one_read(configuration, logits, labels, shard, with_entropy=with_entropy, out=out, with_bounds=True)
