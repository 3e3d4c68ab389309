"""Computes this rank's part of the step's loss from hidden states, without logits [T, V_tp]: the loss functions of the fused head.

ops/linear_gradient.py decides which rows are in which matmul. This module reads what it needs on the host: bounds of the documents,
unmasked rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.declare import PolicyLoss, get_policy_loss
from megatron_rl.layout.groups import SINGLE, all_gather_stack, group_device
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import log_probs_dtype, runs_eagerly, vocab_shard
from megatron_rl.ops.distribution import check_teacher
from megatron_rl.ops.document_bins import document_bins, schedule_documents
from megatron_rl.ops.linear_gradient import (
    WorkItem,
    attach_gradient,
    gradient_for,
    ready_gradient,
    run_with_gradient,
    schedule_rows,
)
from megatron_rl.ops.linear_head import (
    check_head,
    chunk_capacity,
    compare_heads,
    device_rows,
    logits_dtype,
    make_head,
)
from megatron_rl.ops.linear_log_probs import fill_with_pairs, score_kept, score_rows
from megatron_rl.ops.support import check_support
from megatron_rl.policy_loss.api import known_before_rows, reduce
from megatron_rl.policy_loss.inputs import (
    LossBatch,
    LossOptions,
    PolicyLossOutput,
    agreement_of,
    check_cu_seqlens,
    checked_options,
    compare_calls,
    options_and_tensors,
    prepared,
)
from megatron_rl.policy_loss.teacher import distribution_term


@runs_eagerly
def linear_policy_loss(
    name: str,
    hidden: Tensor,  # [T, H], or this rank's [T / tp, H] with sequence_parallel; float32, bfloat16, float16 or float64
    weight: Tensor,  # [V_tp, H] of the same dtype: this tp rank's rows of the head
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool, on any device
    cu_seqlens: Tensor,  # [N + 1] int32, on any device
    token_weights: Tensor,  # [N] from sample_token_weights
    *,
    advantages_per: str | None = None,
    **keywords: Any,
) -> PolicyLossOutput:
    """`policy_loss(name, hidden @ weight.T, ...)` without the full logits: loss, metrics and both gradients are equal.

    With G_t = (delta - p) / temperature of row t and c_t = dL / d log_prob_t, dX_t = c_t (G_t W) and dW = sum_t G_t^T (c_t X_t).
    The coefficient commutes with both matmuls. So three matmuls are enough, all in forward, while a chunk's logits are in memory.

        row-by-row   a token-level loss: c_t is known row by row, so chunks may be cut anywhere. A correction by samples of
                     old_log_probs is known before
        in-chunk     a sequence-level loss, and whole documents in a chunk: c is known while the chunk's logits exist
        scale-last   a document longer than a chunk: c is one number for all its tokens, so G is multiplied first, by c last
        two-pass     a long document with KL or entropy terms, with a clip of tokens or a mean log-ratio at token level, or with a
                     correction by samples that reads the policy in training: statistics first, then the logits of all chunks except
                     the last a second time (a fourth matmul for them)

    The coefficients of a chunk, or of whole documents, are those of the reducer on these rows alone; the result is that of the
    reducer on the micro-batch.

    With sampling_support a row multiplies its kept columns alone, in float32 (ops/support.py). An entropy needs all columns: one
    matmul more, and for its term three.

    Masked rows are in no matmul. Rows with c_t = 0 (clipped, or of advantage 0) are left out of the two matmuls of the gradient,
    except in the early chunks of plan scale-last, and for pairs of sampling_support.

    The gradient is computed in forward if gradients are enabled, else one matmul runs. `.loss` can be differentiated once. The
    gradient of hidden is complete over tp; that of weight is summed in float32. ops/linear_gradient.py says when it is rounded.

    Args:
        name, old_log_probs, advantages, token_weights: as in policy_loss.
        hidden: [T, H], with sequence_parallel [T / tp, H]: hidden states in the order of labels; masked rows may hold anything.
        weight: [V_tp, H], this tp rank's rows of the head, of hidden's dtype.
        labels: [T] int64; labels[t] is the token whose log-probability row t of hidden gives: the caller has shifted.
        loss_mask, cu_seqlens: as in policy_loss. On the CPU they save one synchronisation.
        advantages_per, keywords: as in policy_loss. sampling_support on the CPU saves one synchronisation.
            With loss_scale the weight gradient goes into weight.main_grad in forward, where that is float32, and backward checks
            the factor: another one raises on the CPU, and makes the gradient of hidden NaN on CUDA. None: backward multiplies; it
            adds to main_grad, or returns the weight gradient in weight's dtype. A forward pass without a backward must not have a
            loss_scale.
    Memory: besides max_logits_bytes, and with a HeadTeacher as much again for its chunk, the gradient of hidden; that of weight
        unless it is main_grad, in weight's dtype if one chunk makes it without sampling_support, else float32; for plan scale-last
        one more such buffer, unless the micro-batch is one long document and main_grad is not added to in forward; scratch of
        rows that move, of the torch row kernels and of a teacher, up to six times 4 MiB on the CPU and 256 MiB on CUDA.
    Communication: tp one all-gather of [rows, 3 or 4] a chunk, with a teacher one more, and one all-reduce of the gradient of
        hidden a chunk, or with sequence_parallel one all-gather of hidden and one reduce-scatter. cp one all-reduce of [N, k], and
        one for a correction of samples; with a gradient one more a bin of documents, and before the bins one all-gather of [N].
        All cp ranks have the same bins. Backward none. None at size 1. With check_ranks as policy_loss.
    Synchronisation on CUDA: one for the rows unless loss_mask and cu_seqlens are on the CPU, one under cp for the bins, one a chunk
        for the rows with a gradient (with sampling_support none); none in backward.
    Raises: what policy_loss raises. DataError for operands that do not fit. ConfigError for a max_logits_bytes below one row, a
        wrong loss_scale, float16 without one, and a second backward.
    """
    with agreement_of(keywords) as agreement:
        options, tensors = options_and_tensors(keywords)
        loss = get_policy_loss(name)
        options.refuse(("inplace",), "is for policy_loss, which has logits")
        # Before the options, because the choice of the backend reads the weight.
        num_tokens, device = check_head(hidden, weight, labels, options), hidden.device
        support = tensors.get("sampling_support")
        if isinstance(support, SamplingSupport):
            tensors["sampling_support"], support = support.to(device), support.to(torch.device("cpu"))
        # `prepared` reports a value that is no tensor.
        moved = [x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in (advantages, loss_mask)]
        given = LossBatch(old_log_probs, moved[0], moved[1], cu_seqlens, token_weights, **tensors)
        like_logits = weight.new_empty(0, dtype=logits_dtype(weight, options.fp32_logits))
        options, dtype = checked_options(loss, options, given, like_logits), log_probs_dtype(like_logits)
        batch = prepared(loss, given, num_tokens=num_tokens, device=device, dtype=dtype, advantages_per=advantages_per)
        shard = vocab_shard(weight.shape[0], options.temperature, options.vocab_size, options.tp_group)
        if batch.teacher is not None:
            check_teacher(batch.teacher, (num_tokens, weight.shape[0]), shard.vocab_size, batch.loss_mask)
        if batch.sampling_support is not None:
            check_support(batch.sampling_support, labels, batch.loss_mask, shard, batch.cu_seqlens)
        bounds, mask = _on_host(loss_mask, cu_seqlens, batch)
        capacity = chunk_capacity(weight, options, num_tokens)
        ready = None
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            ready = ready_gradient(hidden, weight, options.loss_scale)
        compare_heads(agreement, hidden, weight, labels, batch.loss_mask)
        if agreement is not None:
            needs = str((ready is not None and hidden.requires_grad, ready is not None and weight.requires_grad))
            agreement.add("which gradients are needed (hidden, weight)", needs)
        compare_calls(agreement, loss, options, batch, given.advantages)
    batch = known_before_rows(loss, batch, options, dtype)
    rows, term = mask.nonzero()[:, 0], None
    if batch.teacher is not None:
        term = distribution_term(batch, options, shard, dtype, None if ready is None else ready.loss_scale)
    with_entropy = options.needs_entropy(loss)
    with torch.no_grad():
        if support is not None:
            head, scored = score_kept(hidden, weight, labels, options, support, rows, capacity, with_entropy=with_entropy)
        elif ready is None:
            parts = ((options.temperature, rows),)
            head, _ = score_rows(hidden, weight, labels, options, parts, capacity, with_entropy=with_entropy, term=term)
        else:
            late_correction = None if batch.correction is not None else options.correction
            is_row_by_row = not (loss.reads_means or (late_correction is not None and late_correction.needs_sums))
            items = schedule_rows(rows, capacity) if is_row_by_row else _items(loss, batch, options, rows, bounds, capacity)
            longest = max((chunk.numel() for item in items for chunk in item.chunks), default=0)
            head = replace(make_head(hidden, weight, labels, options, longest, with_entropy=with_entropy), term=term)
            # cp ranks have other chunks of rows, so nothing is reduced there.
            row_options = replace(options, metrics=PolicyMetrics.NONE, cp_group=SINGLE if is_row_by_row else options.cp_group)

            def coefficients(item: WorkItem) -> tuple[Tensor, Tensor | None]:
                chosen = _rows_of(item, device)
                entropy = None if head.entropy is None else head.entropy[chosen]
                _, found = reduce(loss, head.log_probs[chosen], entropy, batch.take(chosen), row_options, is_part=True)
                return found.log_probs, found.entropy

            gradient = gradient_for(ready, head, has_row_term=options.entropy_coefficient != 0 or term is not None)
            ready.hidden = run_with_gradient(head, items, coefficients, gradient)
            ready.weight = None if ready.is_in_main_grad else gradient.weight
        batch = replace(batch, divergences=None if term is None else term.values)
        output, found = reduce(loss, head.log_probs, head.entropy, batch, options)
        if support is not None and ready is not None:
            fill_with_pairs(ready, head, scored, rows, capacity, found.log_probs, found.entropy)
    return output if ready is None else replace(output, loss=attach_gradient(output.loss, hidden, weight, ready))


# The arguments are those of linear_policy_loss from hidden on; api.py says where the equations are.
linear_grpo_loss, linear_gspo_loss = partial(linear_policy_loss, "grpo"), partial(linear_policy_loss, "gspo")


def _on_host(loss_mask: Tensor, cu_seqlens: Tensor, batch: LossBatch) -> tuple[Tensor, Tensor]:  # [N + 1], [T] bool
    """The bounds and the mask without padding on the CPU: without a synchronisation where the caller gave both there, else with
    one. Raises DataError for wrong bounds from the device, which `prepared` did not read."""
    if loss_mask.is_cuda or cu_seqlens.is_cuda:
        # One copy, because each waits for all work that is queued on the device.
        copied = torch.cat([batch.cu_seqlens, batch.loss_mask.to(batch.cu_seqlens.dtype)]).cpu()
        bounds, mask = copied.split([batch.cu_seqlens.numel(), batch.loss_mask.numel()])
        check_cu_seqlens(bounds, mask.numel())
        return bounds, mask.bool()
    return cu_seqlens, loss_mask.bool() & (torch.arange(loss_mask.numel()) < cu_seqlens[-1])


def _items(loss: PolicyLoss, batch: LossBatch, options: LossOptions, rows: Tensor, bounds: Tensor, capacity: int) -> list[WorkItem]:
    """Bins of whole documents. Communication: one all-gather of [N] over cp, so that all ranks have the same bins."""
    cuts = torch.searchsorted(rows, bounds.to(rows.dtype)).tolist()
    rows_of_documents = [rows[start:stop] for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
    sizes = [part.numel() for part in rows_of_documents]
    cp_group = options.cp_group
    if cp_group.size() > 1 and sizes:  # of the cp rank that holds most of each document
        sizes = all_gather_stack(torch.tensor(sizes).to(group_device(cp_group)), cp_group).amax(0).tolist()
    # Only at level "sequence" without a clip of tokens, and without other terms, the tokens of a document share one coefficient.
    has_row_terms = bool(options.kl_coefficient or options.entropy_coefficient) or batch.teacher is not None
    is_shared = loss.level == "sequence" and loss.token_clip is None and not has_row_terms
    return schedule_documents(document_bins(sizes, capacity), rows_of_documents, capacity, is_shared=is_shared)


def _rows_of(item: WorkItem, device: torch.device) -> slice | Tensor:
    rows = torch.cat(item.chunks) if item.chunks else torch.zeros(0, dtype=torch.int64)
    return device_rows(rows, device) if rows.numel() else rows.to(device, non_blocking=True)
