"""Computes loss and coefficients in Triton, with the same collectives: as reduce_torch.py does.

    document_sums           grid (N)      [T] -> sums [N, k] float64, which cp reduces once
    loss_and_coefficients   grid (N + 1)  sums, [T] -> coefficients [T], entropy_coefficients [T], terms [N, 3] float64
    finish                  grid (1)      terms -> loss, terms [3] float32

A program reads its document in blocks, in the order of the tokens, with one float64 accumulator a lane. No program adds to a value
that another one wrote, so each run gives the same bits. Kernels are not specialised on sizes,
settings and alignment: they are compiled again only for other dtypes, other options and another loss. The host does not wait for
the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.declare import PolicyLoss
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import all_reduce_sum, document_sums
from megatron_rl.losses.kl import KLEstimator
from megatron_rl.ops.loss_triton import (
    apply_to_sample,
    apply_to_tokens,
    kl_of_tokens,
    load_live,
    load_old,
    load_tokens,
    mean,
    weights_of_tokens,
)
from megatron_rl.policy_loss.inputs import (
    ADVANTAGE_VARIATION,
    FIRST_COLUMNS,
    Coefficients,
    LossBatch,
    LossOptions,
    PolicyLossOutput,
    further_inputs,
    not_none,
    read_sums,
    sum_columns,
    vectors_of_samples,
)
from megatron_rl.policy_loss.reduce_torch import metrics_of
from megatron_rl.registry import import_dotted

# Tokens that a program loads at once. Documents may be long and few, so a big block keeps many loads in flight. 16 warps hold 4
# tokens a thread, so that the accumulators stay in registers. 512 threads may use 128 registers each;
# without this setting ptxas of Triton 3.6 would use 64 and spill.
BLOCK, NUM_WARPS, MAX_REGISTERS = 2048, 16, 128
# Documents that the last reduction loads at once.
FINISH_BLOCK = 256
VARIATION_SQUARED = tl.constexpr(ADVANTAGE_VARIATION**2)
# The arguments of a loss that both kernels over documents take.
VECTORS = ("OLD_LOG_PROBS", "ADVANTAGES", "IMPORTANCE_WEIGHTS", "REF_LOG_PROBS", "LOSS_MASK", "CU_SEQLENS")
# Columns of the sums that a kernel knows by name; -1: it is not needed.
COLUMNS = ("log_ratio", "log_probs", "importance", "advantages")
# Columns of the sums that every loss has.
NONFINITE, COUNT = (tl.constexpr(FIRST_COLUMNS.index(name)) for name in ("num_nonfinite", "counts"))
# Columns of the terms.
POLICY, KL, ENTROPY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NUM_TERMS = tl.constexpr(3)


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
    ADVANTAGES,  # [T]
    IMPORTANCE_WEIGHTS,  # [T] or None
    REF_LOG_PROBS,  # [T] or None
    VECTORS,  # tuple of [T], the loss's further inputs, or None
    LOSS_MASK,  # [T] uint8
    CU_SEQLENS,  # [N + 1]
    SUMS,  # [N, NUM_COLUMNS] float64
    NUM_COLUMNS: tl.constexpr,
    LOG_RATIO_COLUMN: tl.constexpr,
    LOG_PROBS_COLUMN: tl.constexpr,
    IMPORTANCE_COLUMN: tl.constexpr,
    ADVANTAGES_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes inputs.sum_columns. A value counts as finite if float32, in which the loss computes, can hold it."""
    document = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(CU_SEQLENS + document), tl.load(CU_SEQLENS + document + 1)
    num_nonfinite, count = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    log_ratio, log_prob = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    importance = tl.zeros((BLOCK,), tl.float64)
    advantage, squared_advantage = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for start in range(begin, end, BLOCK):
        tokens, is_live, new = load_tokens(LOG_PROBS, LOSS_MASK, start, end, BLOCK)
        old = load_old(OLD_LOG_PROBS, new, tokens, is_live)
        is_finite = _is_finite(new) & _is_finite(old)
        advantages = load_live(ADVANTAGES, tokens, is_live)
        is_finite = is_finite & _is_finite(advantages)
        if IMPORTANCE_WEIGHTS is not None:
            weights = tl.load(IMPORTANCE_WEIGHTS + tokens, mask=is_live, other=0.0)
            is_finite = is_finite & _is_finite(weights.to(tl.float32))
            importance += weights.to(tl.float64)
        if REF_LOG_PROBS is not None:
            is_finite = is_finite & _is_finite(load_live(REF_LOG_PROBS, tokens, is_live))
        if VECTORS is not None:
            for index in tl.static_range(len(VECTORS)):
                is_finite = is_finite & _is_finite(load_live(VECTORS[index], tokens, is_live))
        num_nonfinite += (is_live & (is_finite == 0)).to(tl.int32)
        count += is_live.to(tl.int32)
        log_ratio += (new - old).to(tl.float64)
        log_prob += new.to(tl.float64)
        if ADVANTAGES_COLUMN >= 0:
            advantage += advantages.to(tl.float64)
            squared_advantage += advantages.to(tl.float64) * advantages.to(tl.float64)
    row = SUMS + document * NUM_COLUMNS
    tl.store(row + NONFINITE, tl.sum(num_nonfinite, 0).to(tl.float64))
    tl.store(row + COUNT, tl.sum(count, 0).to(tl.float64))
    if LOG_RATIO_COLUMN >= 0:
        tl.store(row + LOG_RATIO_COLUMN, tl.sum(log_ratio, 0))
    if LOG_PROBS_COLUMN >= 0:
        tl.store(row + LOG_PROBS_COLUMN, tl.sum(log_prob, 0))
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
    """The count of non-finite tokens. Advantages that vary and wrong token_counts are added, because the host reads no flag."""
    num_nonfinite = tl.load(sums + NONFINITE)
    if TOKEN_COUNTS is not None:
        is_miscounted = tl.load(TOKEN_COUNTS + document).to(tl.float64) != count
        num_nonfinite += tl.where(is_miscounted, tl.maximum(count, 1.0), 0.0)
    if ADVANTAGES_COLUMN >= 0:
        mean_advantage = mean(tl.load(sums + ADVANTAGES_COLUMN), count)
        mean_square = mean(tl.load(sums + ADVANTAGES_COLUMN + 1), count)
        # The constant is on the right, because the interpreter of Triton 3.7 treats constant * tensor as a constant.
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
    ADVANTAGES,  # [T]
    IMPORTANCE_WEIGHTS,  # [T] or None
    REF_LOG_PROBS,  # [T] or None
    ENTROPIES,  # [T] or None
    VECTORS,  # tuple of [T], of a sequence-level loss of [N], or None
    LOSS_MASK,  # [T] uint8
    CU_SEQLENS,  # [N + 1]
    SUMS,  # [N, NUM_COLUMNS] float64, over all cp ranks
    TOKEN_COUNTS,  # [N] from the caller, or None
    TOKEN_WEIGHTS,  # [N]
    REGULARIZER_WEIGHTS,  # [N] or None
    COEFFICIENTS,  # [T] float32
    ENTROPY_COEFFICIENTS,  # [T] float32, or None with ENTROPIES
    NUM_NONFINITE,  # [N] int32
    TERMS,  # [N, 3] float64
    lowest_ratio,
    highest_ratio,
    parameters,  # tuple of numbers that the loss declares, or None
    kl_coefficient,
    entropy_coefficient,
    num_documents,
    num_tokens,
    NUM_COLUMNS: tl.constexpr,
    LOG_RATIO_COLUMN: tl.constexpr,
    LOG_PROBS_COLUMN: tl.constexpr,
    IMPORTANCE_COLUMN: tl.constexpr,
    ADVANTAGES_COLUMN: tl.constexpr,
    KL_FUNCTION: tl.constexpr,  # of the estimator, or None with REF_LOG_PROBS
    KL_TAKES_LOG_RATIO: tl.constexpr,
    LOSS: tl.constexpr,
    IS_OF_RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One document's terms and the coefficients of its tokens. The last program writes the padding after all documents.

    A sequence-level loss has one value and one coefficient for each document, a token-level loss for each token.
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
    weight = tl.load(TOKEN_WEIGHTS + document).to(tl.float32)
    regularizer_weight = 0.0
    if REGULARIZER_WEIGHTS is not None:
        regularizer_weight = tl.load(REGULARIZER_WEIGHTS + document).to(tl.float32)
    if LOG_RATIO_COLUMN >= 0:
        value, derivative = apply_to_sample(
            LOSS,
            IS_OF_RATIO,
            sums,
            count,
            VECTORS,
            document,
            lowest_ratio,
            highest_ratio,
            parameters,
            LOG_RATIO_COLUMN,
            LOG_PROBS_COLUMN,
            ADVANTAGES_COLUMN,
            BLOCK,
        )
        coefficient = weight * derivative
        if IMPORTANCE_COLUMN >= 0:
            coefficient = weight * mean(tl.load(sums + IMPORTANCE_COLUMN), count).to(tl.float32) * derivative
    policy, kl, entropy = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    num_bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(begin, end, BLOCK):
        tokens, is_live, new = load_tokens(LOG_PROBS, LOSS_MASK, start, end, BLOCK)
        value_weights = weights_of_tokens(weight, IMPORTANCE_WEIGHTS, tokens, is_live)
        if LOG_RATIO_COLUMN < 0:
            value, derivative = apply_to_tokens(
                LOSS,
                IS_OF_RATIO,
                new,
                OLD_LOG_PROBS,
                ADVANTAGES,
                VECTORS,
                tokens,
                is_live,
                lowest_ratio,
                highest_ratio,
                parameters,
            )
            coefficient = value_weights * derivative
        num_bad += (is_live & ((_is_finite(value) & _is_finite(derivative)) == 0)).to(tl.int32)
        policy += tl.where(is_live, value_weights * value, 0.0).to(tl.float64)
        coefficients = coefficient
        if REF_LOG_PROBS is not None:
            estimate, kl_derivative = kl_of_tokens(
                KL_FUNCTION, KL_TAKES_LOG_RATIO, new, OLD_LOG_PROBS, REF_LOG_PROBS, tokens, is_live
            )
            kl += tl.where(is_live, regularizer_weight * estimate, 0.0).to(tl.float64)
            coefficients += kl_coefficient * regularizer_weight * kl_derivative
        tl.store(COEFFICIENTS + tokens, tl.where(is_live, coefficients, 0.0), mask=tokens < end)
        if ENTROPY_COEFFICIENTS is not None:
            entropy += tl.where(is_live, regularizer_weight * load_live(ENTROPIES, tokens, is_live), 0.0).to(tl.float64)
            entropy_coefficients = tl.where(is_live, -entropy_coefficient * regularizer_weight, 0.0)
            tl.store(ENTROPY_COEFFICIENTS + tokens, entropy_coefficients, mask=tokens < end)
    # Non-finite inputs are counted already, so their results are not counted again.
    num_nonfinite = _num_nonfinite(sums, TOKEN_COUNTS, document, count, ADVANTAGES_COLUMN)
    tl.store(NUM_NONFINITE + document, tl.where(num_nonfinite > 0, num_nonfinite, tl.sum(num_bad, 0)))
    terms = TERMS + document * NUM_TERMS
    tl.store(terms + POLICY, tl.sum(policy, 0))
    tl.store(terms + KL, tl.sum(kl, 0))
    tl.store(terms + ENTROPY, tl.sum(entropy, 0))


@triton.jit(
    do_not_specialize=["num_documents"],
    do_not_specialize_on_alignment=["TERMS", "LOSS", "TERMS_OUT"],
)
def finish_kernel(
    TERMS,  # [N, 3] float64
    LOSS,  # [] float32
    TERMS_OUT,  # [3] float32
    kl_coefficient,
    entropy_coefficient,
    num_documents,
    BLOCK: tl.constexpr,
):
    """Sums the terms over the documents, in one order."""
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


@functools.cache
def triton_version(declared: PolicyLoss | KLEstimator) -> Callable[..., object]:
    """The @triton.jit function that a declaration names. Raises ConfigError where it cannot be imported or is no such function."""
    whose = f"{'policy loss' if isinstance(declared, PolicyLoss) else 'KL estimator'} {declared.name!r}"
    assert declared.triton is not None
    function = import_dotted(declared.triton, f"triton of {whose}:")
    if not isinstance(function, triton.runtime.jit.KernelInterface):
        raise ConfigError(f"triton={declared.triton!r} of {whose} is not a @triton.jit function: decorate it")
    kernel: Callable[..., object] = function
    return kernel


def loss_arguments(loss: PolicyLoss, batch: LossBatch, options: LossOptions) -> dict[str, Any]:
    """What each kernel that computes the loss and its terms takes: tensors of the batch, and the Triton versions with their
    numbers."""
    low, high = loss.clip_bounds(options.clip_ratio_low, options.clip_ratio_high) or (1.0, math.inf)
    has_regularizer, estimator = options.kl_coefficient != 0 or options.entropy_coefficient != 0, options.estimator
    return {
        "OLD_LOG_PROBS": contiguous(batch.old_log_probs),
        "ADVANTAGES": batch.advantages.contiguous(),
        "IMPORTANCE_WEIGHTS": contiguous(batch.importance_weights),
        "REF_LOG_PROBS": contiguous(batch.ref_log_probs) if options.kl_coefficient else None,
        "LOSS_MASK": batch.loss_mask.contiguous().view(torch.uint8),
        "CU_SEQLENS": batch.cu_seqlens.contiguous(),
        "TOKEN_WEIGHTS": batch.token_weights.contiguous(),
        "REGULARIZER_WEIGHTS": contiguous(batch.regularizer_weights) if has_regularizer else None,
        "LOSS": triton_version(loss),
        "IS_OF_RATIO": not loss.takes_log_probs,
        "lowest_ratio": 1.0 - low,
        "highest_ratio": 1.0 + high,
        "parameters": tuple(options.loss_parameters.values()) or None,
        "KL_FUNCTION": None if estimator is None else triton_version(estimator),
        "KL_TAKES_LOG_RATIO": estimator is not None and estimator.takes_log_ratio,
        "kl_coefficient": float(options.kl_coefficient),
        "entropy_coefficient": float(options.entropy_coefficient),
        "num_documents": batch.num_documents,
    }


@torch.no_grad()
def reduce_triton(
    loss: PolicyLoss,  # with a Triton version
    log_probs: Tensor,  # [T] float32
    entropy: Tensor | None,  # [T] float32
    batch: LossBatch,
    options: LossOptions,
    *,
    block: int = BLOCK,
) -> tuple[PolicyLossOutput, Coefficients]:
    """`reduce_torch` in three launches: equation, communication and errors are the same. Metrics are in torch."""
    assert log_probs.dtype == torch.float32, "the log-probabilities of float64 logits take reduce_torch"
    columns = sum_columns(loss, batch)
    vectors = [vector.contiguous() for vector in further_inputs(loss, batch, log_probs.dtype).values()]
    arguments = loss_arguments(loss, batch, options)
    shared: dict[str, Any] = {
        "LOG_PROBS": log_probs.contiguous(),
        **{name: arguments.pop(name) for name in VECTORS},
        "SUMS": log_probs.new_empty(batch.num_documents, len(columns), dtype=torch.float64),
        "NUM_COLUMNS": len(columns),
        **{f"{name.upper()}_COLUMN": columns.index(name) if name in columns else -1 for name in COLUMNS},
        "BLOCK": block,
        "num_warps": NUM_WARPS,
        "maxnreg": MAX_REGISTERS,
        "enable_fp_fusion": True,
    }
    # The first kernel only checks that these are finite.
    checked = [*vectors]
    if options.correction is not None:
        checked.append(not_none(batch.rollout_log_probs).contiguous())
    if batch.sampling_support is not None and batch.entropy is not None:
        checked.append(batch.entropy.contiguous())
    if batch.divergences is not None:
        checked.append(batch.divergences.contiguous())
    # Triton launches on the current device, not on its arguments' device.
    with torch.cuda.device_of(log_probs):
        document_sums_kernel[(batch.num_documents,)](VECTORS=tuple(checked) or None, **shared)
        sums = shared["SUMS"]
        if loss.level == "sequence":
            for name, vector in further_inputs(loss, batch, log_probs.dtype).items():
                sums[:, columns.index(name)] = document_sums(torch.where(batch.loss_mask, vector, 0.0), batch.cu_seqlens)
        sums = shared["SUMS"] = all_reduce_sum(sums, options.cp_group)
        if loss.level == "sequence" and loss.needs:
            means = vectors_of_samples(loss, read_sums(loss, sums, batch, log_probs.dtype), log_probs.dtype)
            vectors = [vector.contiguous() for vector in means.values()]
        terms, c, e, num_nonfinite = _loss_and_coefficients(arguments | shared, tuple(vectors) or None, entropy, batch, options)
        total, (policy_loss, kl_loss, entropy_sum) = _finish(terms, options)
        metrics = None
        if options.metrics != PolicyMetrics.NONE:
            metrics = metrics_of(loss, log_probs, entropy, batch, read_sums(loss, sums, batch, log_probs.dtype), options)
    output = PolicyLossOutput(
        loss=total,
        policy_loss=policy_loss,
        kl_loss=kl_loss if options.kl_coefficient else None,
        entropy=entropy_sum if options.entropy_coefficient else None,
        log_probs=log_probs,
        num_nonfinite=num_nonfinite,
        metrics=metrics,
        correction=batch.correction,
        entropy_per_token=entropy if options.needs_entropy(loss) else None,
    )
    return output, Coefficients(c, e, sums)


def _loss_and_coefficients(
    arguments: dict[str, Any],
    vectors: tuple[Tensor, ...] | None,  # [T] each, the loss's further inputs; of a sequence-level loss [N]
    entropy: Tensor | None,  # [T]
    batch: LossBatch,
    options: LossOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(terms [N, 3] float64, coefficients [T], entropy_coefficients [T] or None, num_nonfinite [N] int32)."""
    log_probs, has_entropy_term = arguments["LOG_PROBS"], options.entropy_coefficient != 0
    terms = log_probs.new_empty(batch.num_documents, 3, dtype=torch.float64)
    coefficients = torch.empty_like(log_probs)
    entropy_coefficients = torch.empty_like(log_probs) if has_entropy_term else None
    num_nonfinite = log_probs.new_empty(batch.num_documents, dtype=torch.int32)
    loss_and_coefficients_kernel[(batch.num_documents + 1,)](
        ENTROPIES=contiguous(entropy) if has_entropy_term else None,
        VECTORS=vectors,
        TOKEN_COUNTS=contiguous(batch.token_counts),
        COEFFICIENTS=coefficients,
        ENTROPY_COEFFICIENTS=entropy_coefficients,
        NUM_NONFINITE=num_nonfinite,
        TERMS=terms,
        num_tokens=log_probs.numel(),
        **arguments,
    )
    return terms, coefficients, entropy_coefficients, num_nonfinite


def _finish(terms: Tensor, options: LossOptions) -> tuple[Tensor, tuple[Tensor, ...]]:  # terms [N, 3] float64
    """(loss 0-d, (policy, kl and entropy sums)). The loss has its own storage: the schedule divides it in place."""
    loss, sums = terms.new_empty((), dtype=torch.float32), terms.new_empty(3, dtype=torch.float32)
    finish_kernel[(1,)](
        TERMS=terms,
        LOSS=loss,
        TERMS_OUT=sums,
        kl_coefficient=float(options.kl_coefficient),
        entropy_coefficient=float(options.entropy_coefficient),
        num_documents=terms.shape[0],
        BLOCK=FINISH_BLOCK,
        enable_fp_fusion=True,
    )
    return loss, sums.unbind()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
