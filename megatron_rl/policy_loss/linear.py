"""Computes this rank's part of the step's loss from hidden states, without logits [T, V_tp]: the loss functions of the fused head.

ops/linear_schedule.py decides which rows are in which matmul. This module reads what it needs on the host: bounds of the documents,
unmasked rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Unpack

import torch
from torch import Tensor

from megatron_rl.declare import PolicyLoss, get_policy_loss
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import SINGLE, Agreement, start_all_reduce_sum, start_reduce_scatter_sum
from megatron_rl.layout.packing import document_ids, spread
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import Correction, correct
from megatron_rl.losses.kl import kl_estimate
from megatron_rl.metrics.step import combine_statistics
from megatron_rl.ops.backends import resolve_backend, runs_eagerly
from megatron_rl.ops.linear_gradient import (
    ReadyGradient,
    attach_gradient,
    check_loss_scale,
    main_grad_of,
    make_gradient,
    run_forward,
    run_gradient,
    run_with_gradient,
)
from megatron_rl.ops.linear_head import (
    HeadOptions,
    LinearHead,
    check_head,
    chunk_capacity,
    compare_heads,
    device_rows,
    logits_dtype,
    make_head,
)
from megatron_rl.ops.linear_log_probs import score_kept
from megatron_rl.ops.linear_schedule import WorkItem, cut, document_bins, schedule_documents, schedule_rows
from megatron_rl.ops.log_probs import log_probs_dtype, vocab_shard
from megatron_rl.ops.support import check_support, pair_gradient
from megatron_rl.policy_loss.api import PolicyLossOutput, output_of, reducer_of
from megatron_rl.policy_loss.bad_data import nonfinite_loss
from megatron_rl.policy_loss.compared import compare_inputs
from megatron_rl.policy_loss.corrected_inputs import correct_before_rows
from megatron_rl.policy_loss.host_copies import ScheduleCopies, check_document_lengths, document_sizes, read_host_copies
from megatron_rl.policy_loss.inputs import (
    LossInputs,
    are_coefficients_known_on_policy,
    further_inputs,
    given,
    is_any,
    prepare_inputs,
    with_token_counts,
)
from megatron_rl.policy_loss.reduce_torch import LossResult, are_finite, evaluate, nonfinite_values
from megatron_rl.policy_loss.settings import LinearLossKeywords, LossSettings, groups_and_agreement, resolve_settings, with_defaults


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
    **keywords: Unpack[LinearLossKeywords],
) -> PolicyLossOutput:
    """`policy_loss(name, hidden @ weight.T, ...)` without the full logits: loss, metrics and both gradients are equal.

    With G_t = (delta - p) / temperature of row t and c_t = dL / d log_prob_t, dX_t = c_t (G_t W) and dW = sum_t G_t^T (c_t X_t).
    The coefficient commutes with both matmuls. So three matmuls are enough, all in forward, while a chunk's logits are in memory.

        in-chunk     a sequence-level loss, and whole documents in a chunk: c is known while the chunk's logits exist
        scale-last   a document longer than a chunk: c is one number for all its tokens, so G is multiplied first, by c last
        two-pass     a long document with KL or entropy terms, with a clip of tokens or a mean log-ratio at token level, or with a
                     correction by samples that reads the policy in training: statistics first, then the logits of all chunks except
                     the last a second time (a fourth matmul for them)
        row-by-row   a token-level loss, or old_log_probs None: c_t is known row by row, so chunks may be cut anywhere. A correction
                     by samples of old_log_probs is known before

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
        keywords: as LinearLossKeywords. LossKeywords explains most of them; the others are
            max_logits_bytes: the most bytes of all chunk buffers together. Smaller chunks cost time, not precision.
            sequence_parallel: hidden, and its gradient, is this tp rank's part of the rows.
            fp32_logits: logits of 16-bit operands stay float32; their gradient is 16-bit on CUDA.
            document_lengths: N ints, the tokens of whole documents with padding; under cp they save one synchronisation.
            loss_scale: the product of all factors of `.loss` before backward. The weight gradient then goes into weight.main_grad
                in forward (where that is float32), and backward checks the factor: another one raises on the CPU, and makes the
                gradient of hidden NaN on CUDA. None: backward multiplies; it adds to main_grad, or returns the weight gradient in
                weight's dtype. A forward pass without a backward must not have a loss_scale.
            sampling_support: sets on the CPU save one synchronisation.
    Memory: besides max_logits_bytes the gradient of hidden; that of weight unless it is main_grad, in weight's dtype if one chunk
        makes it without sampling_support, else float32; for plan scale-last one more such buffer, unless the micro-batch is one
        long document and main_grad is not added to in forward; scratch of the torch row kernels, up to six times 4 MiB on the CPU
        and 256 MiB on CUDA.
    Communication: tp one all-gather of [rows, 3 or 4] a chunk, and one all-reduce of the gradient of hidden a chunk, or with
        sequence_parallel one all-gather of hidden and one reduce-scatter. cp one all-reduce of [N_bin, k] a bin (row-by-row and
        with sampling_support: one of [N, k], on-policy at sequence level row-by-row two), one more for a correction of samples,
        and for bins one all-gather of [2, N]
        unless document_lengths and token_counts are given. All cp ranks have the same bins. Backward none. None at size 1. With
        check_ranks as policy_loss.
    Synchronisation on CUDA: one for the rows unless loss_mask and cu_seqlens are on the CPU, one under cp for the bins unless
        document_lengths are given, one a chunk for the rows with a gradient (with sampling_support none); none in backward.
    Raises: what policy_loss raises. DataError for operands or document_lengths that do not fit. ConfigError for a max_logits_bytes
        below one row, a wrong loss_scale, float16 without one, and a second backward.
    """
    tp_group, cp_group, agreement = groups_and_agreement(keywords)
    with agreement:
        loss = get_policy_loss(name)
        options = with_defaults(LinearLossKeywords, loss, keywords)
        fp32_logits, max_logits_bytes = options["fp32_logits"], options["max_logits_bytes"]
        document_lengths, loss_scale = options["document_lengths"], options["loss_scale"]
        # The head is checked before the settings, because the choice of the backend reads the weight.
        head_options = HeadOptions(
            temperature=options["temperature"],
            vocab_size=options["vocab_size"],
            tp_group=tp_group,
            with_entropy=False,
            backend=options["backend"],
            sequence_parallel=options["sequence_parallel"],
            fp32_logits=fp32_logits,
        )
        num_tokens, device = check_head(hidden, weight, labels, head_options), hidden.device
        support = options["sampling_support"]
        if isinstance(support, SamplingSupport):
            options["sampling_support"], support = support.to(device), support.to(torch.device("cpu"))
        like_logits = weight.new_empty(0, dtype=logits_dtype(weight, fp32_logits))
        settings = resolve_settings(loss, options, tp_group, cp_group, resolve_backend(options["backend"], like_logits))
        head_options = replace(head_options, with_entropy=settings.needs_entropy)
        inputs = prepare_inputs(
            loss,
            options,
            cp_group,
            num_tokens=num_tokens,
            device=device,
            dtype=log_probs_dtype(like_logits),
            old_log_probs=old_log_probs,
            advantages=_on(device, advantages),
            loss_mask=_on(device, loss_mask),
            cu_seqlens=cu_seqlens,
            token_weights=token_weights,
            document_lengths=document_lengths,
        )
        if inputs.sampling_support is not None:
            shard = vocab_shard(weight.shape[0], options["temperature"], options["vocab_size"], tp_group)
            check_support(inputs.sampling_support, labels, inputs.loss_mask, shard, inputs.cu_seqlens)
        copies = read_host_copies(loss_mask, cu_seqlens, inputs)
        check_document_lengths(document_lengths, copies, cp_group.size())
        capacity = chunk_capacity(weight, max_logits_bytes, fp32_logits, num_tokens)
        needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        ready = _ready_gradient(hidden, weight, loss_scale) if needs_gradient else None
        compare_heads(agreement, hidden, weight, labels, inputs.loss_mask, head_options, max_logits_bytes)
        if agreement.is_active:
            compare_inputs(agreement, loss, inputs, settings)
        _compare_plans(agreement, hidden, weight, options)
    inputs = with_token_counts(loss, inputs, cp_group)
    if inputs.correction is not None:
        inputs = correct_before_rows(inputs, log_probs_dtype(like_logits), cp_group)
    with torch.no_grad():
        if support is None:
            plan = _plan(loss, inputs, settings, copies, capacity, options)
            longest = max((chunk.numel() for item in plan.items for chunk in item.chunks), default=0)
            head = make_head(hidden, weight, labels, head_options, longest)
            result = _run(head, plan, settings, hidden, ready)
        else:
            rows, sizes = copies.loss_mask.nonzero()[:, 0], (capacity, max_logits_bytes)
            operands = (hidden, weight, labels, head_options)
            head, result = _run_kept(operands, support, rows, sizes, loss, inputs, settings, ready)
    with_gradient = result.loss if ready is None else attach_gradient(result.loss, hidden, weight, ready)
    of_tokens = head.entropy if settings.needs_entropy else None
    return output_of(result, with_gradient, head.log_probs, of_tokens)


def linear_grpo_loss(
    hidden: Tensor,  # [T, H], or [T / tp, H] with sequence_parallel
    weight: Tensor,  # [V_tp, H]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **keywords: Unpack[LinearLossKeywords],
) -> PolicyLossOutput:
    """`linear_policy_loss` with GRPO's ratio, one per token: row-by-row. Default clip 0.2 / 0.2. Args: as
    linear_policy_loss from hidden on; `grpo_loss` has the equation and its source."""
    return linear_policy_loss(
        "grpo", hidden, weight, labels, old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **keywords
    )


def linear_gspo_loss(
    hidden: Tensor,  # [T, H], or [T / tp, H] with sequence_parallel
    weight: Tensor,  # [V_tp, H]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N], or [T] and equal inside each sample
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **keywords: Unpack[LinearLossKeywords],
) -> PolicyLossOutput:
    """`linear_policy_loss` with GSPO's ratio, one per sample; on-policy it runs row-by-row. Default clip 3e-4 / 4e-4. Args:
    as linear_policy_loss from hidden on; `gspo_loss` has the equation and its source."""
    return linear_policy_loss(
        "gspo", hidden, weight, labels, old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **keywords
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    loss: PolicyLoss
    inputs: LossInputs
    items: list[WorkItem]
    bounds: list[int]  # N + 1
    is_row_by_row: bool


def _plan(
    loss: PolicyLoss,
    inputs: LossInputs,
    settings: LossSettings,
    copies: ScheduleCopies,
    capacity: int,
    options: LinearLossKeywords,
) -> _Plan:
    """The rows that take part, and their chunks. Communication: as document_sizes; in plan row-by-row none."""
    has_row_terms = bool(settings.kl_coefficient or settings.entropy_coefficient)
    rows = copies.loss_mask.nonzero()[:, 0]
    waits_for_sums = inputs.correction is not None and inputs.correction.needs_sums
    if not (loss.reads_means or waits_for_sums) or are_coefficients_known_on_policy(loss, inputs):
        return _Plan(loss, inputs, schedule_rows(rows, capacity), copies.bounds, is_row_by_row=True)
    rows_of_documents = copies.rows_of_documents(rows)
    device, cp_group = inputs.loss_mask.device, settings.cp_group
    sizes, counts = document_sizes(copies, rows_of_documents, options["document_lengths"], inputs.token_counts, cp_group, device)
    items = schedule_documents(
        document_bins(sizes, capacity) or [()],
        rows_of_documents,
        capacity,
        # Only at level "sequence" without a clip of tokens the tokens of a document share one coefficient.
        has_row_terms=has_row_terms or loss.level != "sequence" or loss.token_clip is not None,
    )
    return _Plan(loss, replace(inputs, token_counts=counts), items, copies.bounds, is_row_by_row=False)


def _run(head: LinearHead, plan: _Plan, settings: LossSettings, hidden: Tensor, ready: ReadyGradient | None) -> LossResult:
    """Runs all chunks and fills `ready` with the gradient."""
    kind = TokenCoefficients if plan.is_row_by_row else DocumentCoefficients
    coefficients = kind(plan.loss, plan.inputs, settings, plan.bounds, head)
    if ready is None:
        run_forward(head, plan.items, coefficients)
        return coefficients.finish()
    gradient = make_gradient(
        head,
        needs_hidden=hidden.requires_grad,
        needs_weight=ready.parameter.requires_grad,
        main_grad=main_grad_of(ready.parameter) if ready.is_in_main_grad else None,
        rounds_weight=main_grad_of(ready.parameter) is None,
        scale=ready.loss_scale,
        has_entropy_term=settings.entropy_coefficient != 0,
    )
    ready.hidden = run_with_gradient(head, plan.items, coefficients, gradient)
    ready.weight = None if ready.is_in_main_grad else gradient.weight
    return coefficients.finish()


def _run_kept(
    operands: tuple[Tensor, Tensor, Tensor, HeadOptions],  # hidden, weight, labels, as the caller gave them
    support: SamplingSupport,  # T rows, on the CPU
    rows: Tensor,  # ascending row numbers, on the CPU
    sizes: tuple[int, int],  # rows of a chunk, bytes
    loss: PolicyLoss,
    inputs: LossInputs,
    settings: LossSettings,
    ready: ReadyGradient | None,
) -> tuple[LinearHead, LossResult]:
    """Scores all rows over their kept ids, reduces once, and fills `ready` with the gradient.

    A term of the entropy, which is over the vocabulary, has chunks of all columns beside the pairs, and their logits a second time.
    Communication: tp one all-gather for the pairs and one a chunk; one all-reduce of the gradient of hidden, or one reduce-scatter,
    during the weight gradient of the pairs. cp as reduce_loss_torch.
    """
    capacity, max_bytes = sizes
    head, of_all, pairs, kernels, scores = score_kept(*operands, support, rows, capacity, max_bytes)
    result = reducer_of(loss, settings)(loss, head.log_probs, head.entropy, inputs, settings)
    if ready is None:
        return head, result
    scale = 1.0 if ready.loss_scale is None else ready.loss_scale
    c, e = result.coefficients * scale, result.entropy_coefficients
    gradient = make_gradient(
        head,
        needs_hidden=operands[0].requires_grad,
        needs_weight=ready.parameter.requires_grad,
        main_grad=main_grad_of(ready.parameter) if ready.is_in_main_grad else None,
        rounds_weight=False,
        scale=None,
        has_entropy_term=True,
        is_reduced=False,
    )
    if e is not None and rows.numel():
        chunks = [(head.options.temperature, chunk) for chunk in cut(rows, capacity)]
        run_gradient(head, chunks, of_all, torch.zeros_like(c), e * scale, gradient)
    g, pending, memory = pair_gradient(scores, pairs, c[pairs.rows], head.shard), None, {"max_bytes": max_bytes}
    if gradient.hidden is not None:
        of_pairs = gradient.hidden if e is None else torch.zeros_like(gradient.hidden)
        kernels.add_hidden(g, pairs, head.weight, out=of_pairs, **memory)
        start = start_reduce_scatter_sum if head.options.sequence_parallel else start_all_reduce_sum
        pending = start(of_pairs if e is None else gradient.hidden.add_(of_pairs), head.options.tp_group)
    if gradient.needs_weight:
        if gradient.weight is None:
            gradient.weight = torch.zeros_like(head.weight, dtype=head.log_probs.dtype)
        kernels.add_weight(g, pairs, head.hidden, out=gradient.weight, **memory)
    ready.hidden = None if pending is None else pending.wait()
    ready.weight = None if ready.is_in_main_grad else gradient.weight
    return head, result


def _compare_plans(agreement: Agreement, hidden: Tensor, weight: Tensor, options: LinearLossKeywords) -> None:
    """Adds the other values that decide which rows are in which chunk, and which collectives the gradient needs."""
    lengths, loss_scale = options["document_lengths"], options["loss_scale"]
    gradients = (torch.is_grad_enabled() and hidden.requires_grad, torch.is_grad_enabled() and weight.requires_grad)
    agreement.add("which gradients are needed (hidden, weight)", str(gradients))
    agreement.add("document_lengths", None if lengths is None else str(list(lengths)))
    agreement.add("loss_scale", "a tensor" if isinstance(loss_scale, Tensor) else loss_scale)


def _ready_gradient(hidden: Tensor, weight: Tensor, loss_scale: Tensor | float | None) -> ReadyGradient:
    """An empty ReadyGradient. loss_scale is checked before anything is computed."""
    adds_in_forward = loss_scale is not None and weight.requires_grad and main_grad_of(weight) is not None
    check_loss_scale(loss_scale, hidden, adds_in_forward=adds_in_forward)
    return ReadyGradient(hidden=None, weight=None, parameter=weight, is_in_main_grad=adds_in_forward, loss_scale=loss_scale)


def _on(device: torch.device, value: Tensor) -> Tensor:
    """Moves a CPU tensor to the device. prepare_inputs reports a value that is no tensor."""
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


class DocumentCoefficients:
    """The coefficients of plans in-chunk, scale-last and two-pass. Communication: as reduce_loss_torch, once an item."""

    def __init__(self, loss: PolicyLoss, inputs: LossInputs, settings: LossSettings, bounds: list[int], head: LinearHead):
        self.loss, self.inputs, self.settings, self.bounds, self.head = loss, inputs, settings, bounds, head
        self.results: list[tuple[WorkItem, LossResult]] = []
        self.coefficients = torch.zeros_like(head.log_probs)
        self.entropy_coefficients = torch.zeros_like(head.log_probs) if settings.entropy_coefficient else None

    def __call__(self, item: WorkItem) -> tuple[Tensor, Tensor | None]:
        inputs, tokens = bin_inputs(self.inputs, item.documents, self.bounds)
        entropy = None if self.head.entropy is None else self.head.entropy[tokens]
        result = reducer_of(self.loss, self.settings)(self.loss, self.head.log_probs[tokens], entropy, inputs, self.settings)
        self.results.append((item, result))
        self.coefficients[tokens] = result.coefficients
        if self.entropy_coefficients is not None and result.entropy_coefficients is not None:
            self.entropy_coefficients[tokens] = result.entropy_coefficients
        rows = _rows_of(item, self.coefficients.device)
        return self.coefficients[rows], None if self.entropy_coefficients is None else self.entropy_coefficients[rows]

    def finish(self) -> LossResult:
        """The result of the micro-batch: every document was in exactly one item."""
        results = [result for _, result in self.results]
        metric_sums = [result.metric_sums for result in results if result.metric_sums is not None]
        num_nonfinite = results[0].num_nonfinite.new_zeros(len(self.bounds) - 1)
        for item, result in self.results:
            num_nonfinite[torch.tensor(item.documents, dtype=torch.int64).to(num_nonfinite.device, non_blocking=True)] = (
                result.num_nonfinite
            )
        return LossResult(
            loss=_total([result.loss for result in results]),
            policy_loss=_total([result.policy_loss for result in results]),
            kl_loss=_total_of_term([result.kl_loss for result in results]),
            entropy=_total_of_term([result.entropy for result in results]),
            coefficients=self.coefficients,
            entropy_coefficients=self.entropy_coefficients,
            num_nonfinite=num_nonfinite,
            metric_sums=combine_statistics(metric_sums) if metric_sums else None,
            correction=self._correction(),
        )

    def _correction(self) -> Correction | None:
        """The corrections of all items, put back in the order of the tokens."""
        if self.inputs.correction is None:
            return self.inputs.applied_correction
        like, flags = self.head.log_probs, (torch.zeros_like(self.inputs.loss_mask) for _ in range(4))
        whole = Correction(torch.zeros_like(like), torch.ones_like(like), *flags)
        for item, result in self.results:
            _, tokens = bin_inputs(self.inputs, item.documents, self.bounds)
            for field in fields(Correction):
                getattr(whole, field.name)[tokens] = getattr(result.correction, field.name)
        return whole


class TokenCoefficients:
    """The coefficients of plan row-by-row: a token-level loss, or an on-policy sequence-level loss of only the log-ratio.

        c_t = w_i u_t value'(log_ratio_t) + kl_coefficient v_i k3'_t          e_t = -entropy_coefficient v_i

    At sequence level the first term is computed once, at ratio 1, with one more all-reduce of [N, k] over cp.
    """

    def __init__(self, loss: PolicyLoss, inputs: LossInputs, settings: LossSettings, bounds: list[int], head: LinearHead):
        self.loss, self.inputs, self.settings, self.head = loss, inputs, settings, head
        self.documents = document_ids(inputs.cu_seqlens, inputs.loss_mask.numel())
        self.dtype = head.log_probs.dtype
        self.policy_coefficients: Tensor | None = None
        self.refusal: Exception | None = None
        if loss.level == "sequence":
            zeros = torch.zeros_like(head.log_probs)
            self.policy_coefficients = reducer_of(loss, settings)(loss, zeros, None, inputs, settings.policy_alone()).coefficients

    def __call__(self, item: WorkItem) -> tuple[Tensor, Tensor | None]:
        rows = _rows_of(item, self.documents.device)
        documents, log_probs = self.documents[rows], self.head.log_probs[rows]
        c = self._checked_policy(rows, documents, log_probs) if self.policy_coefficients is None else self.policy_coefficients[rows]
        if self.settings.kl_estimator is None and not self.settings.entropy_coefficient:
            return c, None
        weights = spread(given(self.inputs.regularizer_weights).to(self.dtype), documents)
        if self.settings.kl_estimator is not None:
            reference = given(self.inputs.ref_log_probs)[rows].to(self.dtype)
            log_ratio = log_probs - self._old_log_probs(rows, log_probs)
            _, derivative = kl_estimate(self.settings.kl_estimator, log_probs, reference, log_ratio)
            c = c + self.settings.kl_coefficient * weights * derivative
        return c, -self.settings.entropy_coefficient * weights if self.settings.entropy_coefficient else None

    def _checked_policy(self, rows: slice | Tensor, documents: Tensor, log_probs: Tensor) -> Tensor:  # [rows]
        """The policy term. An error is kept until `finish`, because the other ranks are between two collectives of the head.

        tp ranks agree at once, because rows without a coefficient are left out of their next collectives. cp ranks have other
        chunks. Communication: as RankAgreement over tp.
        """
        try:
            with RankAgreement(self.settings.tp_group, SINGLE, check_ranks=self.settings.check_ranks):
                return self._policy(rows, documents, log_probs)
        except Exception as error:
            self.refusal = self.refusal or error
            return torch.zeros_like(log_probs)

    def _policy(self, rows: slice | Tensor, documents: Tensor, log_probs: Tensor) -> Tensor:  # [rows]
        inputs, settings = self.inputs, self.settings
        if self.loss.needs_entropy:
            inputs = replace(inputs, entropy=self.head.entropy)
        old = self._old_log_probs(rows, log_probs)
        advantages = inputs.advantages.to(self.dtype)
        advantages = spread(advantages, documents) if inputs.advantages_per == "sample" else advantages[rows]
        vectors = {name: vector[rows] for name, vector in further_inputs(self.loss, inputs, self.dtype).items()}
        values = evaluate(self.loss, log_probs - old, advantages, log_probs, settings.keywords, vectors)
        if not log_probs.is_cuda:
            is_given = are_finite({"log_probs": log_probs, "old_log_probs": old, "advantages": advantages, **vectors})
            if is_any(is_bad := nonfinite_values(values, is_given)):
                raise nonfinite_loss(self.loss, is_bad, log_probs - old, advantages)
        weights = spread(inputs.token_weights.to(self.dtype), documents)
        if inputs.importance_weights is not None:
            weights = weights * inputs.importance_weights[rows].to(self.dtype)
        if inputs.correction is not None:
            # Of tokens: a criterion of samples is in no plan row-by-row.
            correction = correct(
                inputs.correction,
                old_log_probs=old,
                rollout_log_probs=given(inputs.rollout_log_probs)[rows].to(self.dtype),
                advantages=advantages,
                sums={},
                loss_mask=inputs.loss_mask[rows],
                documents=documents,
            )
            weights = weights * correction.weights
        return weights * values.derivative

    def _old_log_probs(self, rows: slice | Tensor, log_probs: Tensor) -> Tensor:  # [rows]
        old_log_probs = self.inputs.old_log_probs
        return log_probs if old_log_probs is None else old_log_probs[rows].to(self.dtype)

    def finish(self) -> LossResult:
        """The result of the micro-batch. Raises an error that was kept. Communication: as reduce_loss_torch."""
        with self.settings.agreement():
            if self.refusal is not None:
                raise self.refusal
        return reducer_of(self.loss, self.settings)(self.loss, self.head.log_probs, self.head.entropy, self.inputs, self.settings)


def _rows_of(item: WorkItem, device: torch.device) -> slice | Tensor:
    rows = torch.cat(item.chunks) if item.chunks else torch.zeros(0, dtype=torch.int64)
    return device_rows(rows, device) if rows.numel() else rows.to(device, non_blocking=True)


def _total(parts: Sequence[Tensor]) -> Tensor:  # 0-d each
    """The sum in float64, as a new tensor."""
    return torch.stack(list(parts)).sum(dtype=torch.float64).to(parts[0].dtype)


def _total_of_term(parts: Sequence[Tensor | None]) -> Tensor | None:  # 0-d each
    """The sum; None for a term that is off."""
    present = [part for part in parts if part is not None]
    return _total(present) if present else None


def bin_inputs(
    inputs: LossInputs, documents: tuple[int, ...], bounds: Sequence[int]
) -> tuple[LossInputs, slice | Tensor]:  # and their tokens [T_bin], masked ones too
    """The inputs of only these documents, as a micro-batch."""
    if len(documents) == len(bounds) - 1:
        return inputs, slice(None)
    device = inputs.loss_mask.device
    starts, stops = [bounds[i] for i in documents], [bounds[i + 1] for i in documents]
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    if all(stop == start for stop, start in zip(stops[:-1], starts[1:], strict=True)):
        tokens: slice | Tensor = slice(starts[0], stops[-1])
    else:
        tokens = torch.cat([torch.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
        tokens = tokens.to(device, non_blocking=True)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(inputs.cu_seqlens.dtype)
    numbers = torch.tensor(documents).to(device, non_blocking=True)

    def of(values: Tensor | None, index: slice | Tensor) -> Tensor | None:
        return None if values is None else values[index]

    return replace(
        inputs,
        old_log_probs=of(inputs.old_log_probs, tokens),
        advantages=inputs.advantages[numbers if inputs.advantages_per == "sample" else tokens],
        loss_mask=inputs.loss_mask[tokens],
        cu_seqlens=cu_seqlens.to(device, non_blocking=True),
        token_weights=inputs.token_weights[numbers],
        token_counts=of(inputs.token_counts, numbers),
        importance_weights=of(inputs.importance_weights, tokens),
        ref_log_probs=of(inputs.ref_log_probs, tokens),
        rollout_log_probs=of(inputs.rollout_log_probs, tokens),
        regularizer_weights=of(inputs.regularizer_weights, numbers),
        applied_correction=None if inputs.applied_correction is None else inputs.applied_correction.of(tokens),
        document_numbers=documents,
    ), tokens
