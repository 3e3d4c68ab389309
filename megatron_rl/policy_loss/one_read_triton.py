"""Computes log-probabilities and the gradient of the logits in one kernel, for losses whose coefficients are known row by row.

    one_read   grid (rows)   logits [T, V], the loss's vectors -> log_probs [T], entropy [T], gradient [T, V]

A program walks its row twice. The first walk gives the statistics, they give the log-probability, and the loss's twin gives the
row's coefficients c and e. The second walk goes backwards and writes the gradient; it finds the row in the L2 cache, if the rows
that are under way at once fit there. So each logit is read from memory once and written once: 4 bytes a bf16 logit instead of 6.
The statistics, the coefficients and the gradient are the functions of the other kernels; only the lanes of a row are more.

Loss, metrics and counts come from reduce_triton afterwards, from log_probs [T]. Derivation: docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.declare import PolicyLoss
from megatron_rl.ops.assumed_scale import Assumption
from megatron_rl.ops.backends import (
    ALIGNMENT,
    MAX_REGISTERS,
    OneReadConfiguration,
    flat_rows,
    gradient_like,
    has_flat_rows,
    one_read_configuration,
)
from megatron_rl.ops.log_probs_torch import VocabShard
from megatron_rl.ops.log_probs_triton import LOG2_E, row_result, statistics_of_row, write_gradient_of_row
from megatron_rl.policy_loss.inputs import LossBatch, LossOptions, further_inputs
from megatron_rl.policy_loss.reduce_triton import reduce_triton
from megatron_rl.policy_loss.twin_triton import apply_to_tokens, equation_of, kl_of_tokens, spread, twin_of_kl, weights_of_tokens


def plan_one_read(
    loss: PolicyLoss, logits: Tensor, batch: LossBatch, options: LossOptions, *, is_assumed: bool
) -> OneReadConfiguration | None:
    """How one kernel takes these logits; None where statistics and gradient stay two kernels:

    - the softmax needs another rank's statistics (tp above 1);
    - the loss reads the entropy;
    - a coefficient needs other rows: a sequence-level loss off-policy, or a correction that reads the policy in training;
    - it is known before the rows, but with one more reduction over cp (cp above 1);
    - columns are not adjacent, or there is nothing to read;
    - the factor is assumed and the gradient is float16: a wrong guess would leave zeros or infinities, which no factor mends;
    - the rows are too few.
    """
    if options.tp_group.size() > 1 or logits.numel() == 0 or not has_flat_rows(logits):
        return None
    if is_assumed and logits.dtype == torch.float16:
        return None
    has_late_correction = options.correction is not None and batch.correction is None
    # A loss that reads the entropy gets it from the kernels of rows.
    is_known_in_row = loss.level == "token" and not has_late_correction and not loss.needs_entropy
    if not is_known_in_row and (options.cp_group.size() > 1 or not is_known_on_policy(loss, batch, options)):
        return None
    return one_read_configuration(logits.shape[0], logits.shape[1] * logits.itemsize, logits.device)


def is_known_on_policy(loss: PolicyLoss, batch: LossBatch, options: LossOptions) -> bool:
    """Whether a sequence-level loss needs no log-probability: it reads the log-ratio, which is 0 on-policy, and counts."""
    is_of_ratio = not loss.takes_log_probs and {*loss.needs} <= {"token_counts"} and options.correction is None
    return loss.level == "sequence" and batch.old_log_probs is None and is_of_ratio


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
        "loss_scale lowest_ratio highest_ratio kl_coefficient entropy_coefficient num_documents inverse_temperature qk num_columns "
        "num_stored units shift stride out_shift out_stride"
    ).split(),
    do_not_specialize_on_alignment=(
        "LABELS LOSS_MASK POLICY_COEFFICIENTS OLD_LOG_PROBS ADVANTAGES IMPORTANCE_WEIGHTS REF_LOG_PROBS CU_SEQLENS TOKEN_WEIGHTS "
        "REGULARIZER_WEIGHTS LOSS_SCALE LOG_PROBS ENTROPIES"
    ).split(),
)
def one_read_kernel(
    X,  # [T, V]
    OUT,  # [T, V], may be X's memory
    LABELS,  # [T]
    LOSS_MASK,  # [T] uint8
    POLICY_COEFFICIENTS,  # [T] float32, the policy term's coefficients where they are known before; else None
    OLD_LOG_PROBS,  # [T] or None
    ADVANTAGES,  # [T]
    IMPORTANCE_WEIGHTS,  # [T] or None
    REF_LOG_PROBS,  # [T] or None
    VECTORS,  # tuple of [T], or None
    CU_SEQLENS,  # [N + 1]
    TOKEN_WEIGHTS,  # [N]
    REGULARIZER_WEIGHTS,  # [N] or None
    LOSS_SCALE,  # [] float32, or None where the host knows it
    LOG_PROBS,  # [T] float32
    ENTROPIES,  # [T] float32
    loss_scale,
    lowest_ratio,
    highest_ratio,
    parameters,  # tuple of numbers that the loss declares, or None
    kl_coefficient,
    entropy_coefficient,
    num_documents,
    inverse_temperature,
    qk,
    num_columns,
    num_stored,
    units,
    shift,
    stride,
    out_shift,
    out_stride,
    KL_TWIN: tl.constexpr,  # of the estimator, or None with REF_LOG_PROBS
    KL_TAKES_LOG_RATIO: tl.constexpr,
    LOSS: tl.constexpr,
    IS_OF_RATIO: tl.constexpr,
    L: tl.constexpr,
    U: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    HAS_ENTROPY_TERM: tl.constexpr,
):
    """Grid (rows). A masked row is only written: its log-probability, entropy and gradient are 0."""
    row = tl.program_id(0).to(tl.int64)
    is_live = tl.load(LOSS_MASK + row) != 0
    label = tl.load(LABELS + row, mask=is_live, other=0)
    maximum, total, log_prob, entropy = 0.0, 1.0, 0.0, 0.0
    c, e = 0.0, 0.0
    if is_live:
        maximum, total, target, weighted = statistics_of_row(
            X, LABELS, row, 0, qk, num_columns, 0, units, shift, stride, L, U, VECTOR, WITH_ENTROPY, "evict_last"
        )
        log_prob, entropy = row_result(maximum, total, target, weighted, inverse_temperature, WITH_ENTROPY)
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
                _, kl_derivative = kl_of_tokens(KL_TWIN, KL_TAKES_LOG_RATIO, new, OLD_LOG_PROBS, REF_LOG_PROBS, tokens, is_token)
                coefficients += kl_coefficient * regularizer_weight * kl_derivative
            if HAS_ENTROPY_TERM:
                e = -entropy_coefficient * regularizer_weight
        scale = loss_scale
        if LOSS_SCALE is not None:
            scale = tl.load(LOSS_SCALE)
        c = scale * tl.sum(coefficients, 0)
        e = scale * e
    tl.store(LOG_PROBS + row, log_prob)
    tl.store(ENTROPIES + row, entropy)
    write_gradient_of_row(
        X,
        OUT,
        row,
        0,
        is_live & ((c != 0.0) | (e != 0.0)),
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
        VECTOR,
        HAS_ENTROPY_TERM,
        True,
    )


@torch.no_grad()
def read_once(
    loss: PolicyLoss,
    logits: Tensor,  # [T, V]
    labels: Tensor,  # [T] int64
    batch: LossBatch,
    options: LossOptions,
    shard: VocabShard,
    configuration: OneReadConfiguration,  # of plan_one_read
    made_with: Tensor | float | Assumption,
) -> tuple[Tensor, Tensor, Tensor]:  # log_probs [T], entropy [T], gradient [T, V]
    """One launch. In place the gradient is in the logits' memory.

    The policy term's coefficients that are known before the rows come from reduce_triton: three launches more.
    """
    policy_coefficients = None
    with torch.cuda.device_of(logits):
        log_probs, entropies = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
        if loss.level == "sequence":
            alone = replace(options, kl_coefficient=0.0, entropy_coefficient=0.0, metrics=PolicyMetrics.NONE)
            policy_coefficients = reduce_triton(loss, log_probs.zero_(), None, batch, alone)[1].log_probs
        equation, estimator = equation_of(loss, options), options.estimator
        gradient = logits.detach() if options.inplace else gradient_like(logits)
        rows, out = flat_rows(logits), flat_rows(gradient)
        has_regularizer = options.kl_coefficient != 0 or options.entropy_coefficient != 0
        loss_scale = made_with.factor if isinstance(made_with, Assumption) else made_with
        scale = loss_scale if isinstance(loss_scale, Tensor) and loss_scale.device == logits.device else None
        one_read_kernel[(logits.shape[0],)](
            X=rows.pointer,
            OUT=out.pointer,
            LABELS=labels.contiguous(),
            LOSS_MASK=batch.loss_mask.contiguous().view(torch.uint8),
            POLICY_COEFFICIENTS=policy_coefficients,
            OLD_LOG_PROBS=_contiguous(batch.old_log_probs),
            ADVANTAGES=batch.advantages.contiguous(),
            IMPORTANCE_WEIGHTS=_contiguous(batch.importance_weights),
            REF_LOG_PROBS=_contiguous(batch.ref_log_probs) if options.kl_coefficient else None,
            VECTORS=tuple(vector.contiguous() for vector in further_inputs(loss, batch, torch.float32).values()) or None,
            CU_SEQLENS=batch.cu_seqlens.contiguous(),
            TOKEN_WEIGHTS=batch.token_weights.contiguous(),
            REGULARIZER_WEIGHTS=_contiguous(batch.regularizer_weights) if has_regularizer else None,
            LOSS_SCALE=None if scale is None else scale.detach().float(),
            LOG_PROBS=log_probs,
            ENTROPIES=entropies,
            loss_scale=1.0 if scale is not None else float(loss_scale),
            lowest_ratio=equation.lowest_ratio,
            highest_ratio=equation.highest_ratio,
            parameters=equation.parameters,
            kl_coefficient=float(options.kl_coefficient),
            entropy_coefficient=float(options.entropy_coefficient),
            num_documents=batch.num_documents,
            inverse_temperature=shard.inverse_temperature,
            qk=shard.inverse_temperature * LOG2_E,
            num_columns=shard.num_columns,
            num_stored=logits.shape[1],
            units=triton.cdiv(logits.shape[1], ALIGNMENT),
            shift=rows.shift,
            stride=rows.stride,
            out_shift=out.shift,
            out_stride=out.stride,
            KL_TWIN=None if estimator is None else twin_of_kl(estimator),
            KL_TAKES_LOG_RATIO=estimator is not None and estimator.takes_log_ratio,
            LOSS=equation.twin,
            IS_OF_RATIO=equation.is_of_ratio,
            L=configuration.lanes,
            U=configuration.tiles,
            VECTOR=16 // logits.itemsize,
            BLOCK=configuration.block,
            WITH_ENTROPY=options.needs_entropy(loss),
            HAS_ENTROPY_TERM=options.entropy_coefficient != 0,
            num_warps=configuration.num_warps,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=True,
        )
    # Autograd does not see the write of a kernel. Its version counter protects logits that another backward still needs.
    torch.autograd.graph.increment_version(gradient)
    return log_probs, entropies, gradient


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
