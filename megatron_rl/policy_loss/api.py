"""Computes this rank's part of the step's loss from logits, with its exact gradient: the public loss functions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.declare import PolicyLoss, get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import all_reduce_sum, document_sums
from megatron_rl.ops.backends import (
    VocabParallelLogProbs,
    check_log_prob_inputs,
    check_logits,
    compare_log_prob_inputs,
    first_order_only,
    log_probs_dtype,
    runs_eagerly,
)
from megatron_rl.ops.distribution import HeadTeacher, check_teacher
from megatron_rl.ops.log_probs import row_kernels
from megatron_rl.ops.scale import AssumedScale, Assumption, check_actual_scale, check_declared_scale
from megatron_rl.ops.support import SupportLogProbs, check_support
from megatron_rl.policy_loss.corrected_inputs import corrected
from megatron_rl.policy_loss.inputs import (
    Coefficients,
    LossBatch,
    LossOptions,
    PolicyLossOutput,
    agreement_of,
    checked_options,
    compare_calls,
    options_and_tensors,
    prepared,
    refuse_bad_data,
)
from megatron_rl.policy_loss.reduce_torch import reduce_torch, sum_live
from megatron_rl.policy_loss.teacher import distribution_term, divergence_weights, taught

OF_HIDDEN_STATES = ("max_logits_bytes", "sequence_parallel", "fp32_logits")
OF_LOGITS = ("temperature", "vocab_size", "entropy_coefficient", "inplace", "loss_scale")


@runs_eagerly
def policy_loss(
    name: str,
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N] from sample_token_weights
    *,
    advantages_per: str | None = None,
    **keywords: Any,
) -> PolicyLossOutput:
    """Any registered policy loss. `loss` is this rank's part of the step's

        L + kl_coefficient sum_i v_i sum_t m_it KL_it - entropy_coefficient sum_i v_i sum_t m_it H_it,    v = regularizer_weights

    with L = sum_i w_i sum_t m_it l_it of the values l of the loss, w = token_weights. The parts sum to it over micro-batches, cp
    and dp ranks, but not over tp, because its ranks hold the same number. Backward gives this rank's slice of the gradient of the
    sum over cp; every cp rank must apply the same factor to it.
    T counts this rank's tokens: slices of the documents in order (empty ones are allowed), then padding past cu_seqlens[-1].
    [N] tensors may be on the host; the copy to the logits' device does not synchronise. A CUDA graph needs them on the device.
    A loss without a Triton version, or with a KL term whose estimator has none, is computed in torch on the logits' device.
    torch.compile does not trace this function (a graph break); create_graph=True raises in backward.

    Args:
        name: a registered loss, or module.function, which is imported.
        logits: [T, V_tp] of any floating dtype, this tp rank's columns.
        labels: [T] int64; labels[t] is the token whose log-probability logits[t] gives: the caller has shifted.
        old_log_probs: [T] float32, of the policy that the ratio compares with, in nats; None: on-policy. A loss with anchor
            "rollout" compares with rollout_log_probs instead.
        advantages: float32, one per sample [N], or one per token [T].
        loss_mask: [T] bool, True on tokens that are trained; other positions may hold anything.
        cu_seqlens: [N + 1] int32, bounds of this rank's slices of the documents.
        token_weights: [N] float32, the weight of each token of a sample; sample_token_weights makes it.
        keywords: the fields of LossOptions, those of LossBatch that have a default, and
            advantages_per: "sample" or "token"; None: read from the shape. Where N == T it is needed, unless each document has one
            token and cu_seqlens is on the host: a loss never reads values of the device.
    Communication: tp one all-gather of [T, 3 or 4], with sampling_support another one for an entropy, with a teacher another one of
        [T, 3], and one column more in the first for its logits; cp one all-reduce of [N, k], before it one for a correction of
        samples, and one of [N] each for token_counts (where the caller gave none) and mean_log_ratio that a loss needs; with
        check_ranks one all-gather of 4 KiB over each; backward none. None at size 1.
    Raises: DataError for wrong shapes, for `advantages` that fit both [N] and [T], for token_counts that differ from the mask's,
        for a wrong return value of the loss, and on the CPU for unmasked non-finite values. ConfigError for wrong settings.
    """
    with agreement_of(keywords) as agreement:
        options, tensors = options_and_tensors(keywords)
        loss = get_policy_loss(name)
        options.refuse(OF_HIDDEN_STATES, "is for linear_policy_loss, which has hidden states")
        batch = LossBatch(old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **tensors)
        options = checked_options(loss, options, batch, check_logits(logits))
        dtype = log_probs_dtype(logits)
        batch = prepared(loss, batch, num_tokens=logits.shape[0], device=logits.device, dtype=dtype, advantages_per=advantages_per)
        temperature, vocab_size, tp_group = options.temperature, options.vocab_size, options.tp_group
        shard = check_log_prob_inputs(logits, labels, batch.loss_mask, temperature, vocab_size, tp_group, inplace=options.inplace)
        compare_log_prob_inputs(agreement, logits, labels, batch.loss_mask)
        support = batch.sampling_support
        if support is not None:
            check_support(support, labels, batch.loss_mask, shard, batch.cu_seqlens)
        if isinstance(batch.teacher, HeadTeacher):
            raise ConfigError("a HeadTeacher is for linear_policy_loss: multiply its hidden states, and pass a LogitsTeacher")
        if batch.teacher is not None:
            check_teacher(batch.teacher, logits.shape, shard.vocab_size, batch.loss_mask)
        declared = None if isinstance(options.loss_scale, AssumedScale) else options.loss_scale
        if declared is not None:
            check_declared_scale(declared)
        compare_calls(agreement, loss, options, batch, advantages)
    batch = known_before_rows(loss, batch, options, dtype)
    with_entropy, scale = options.needs_entropy(loss), options.loss_scale
    if support is None and scale is not None and has_triton(loss, options) and torch.is_grad_enabled() and logits.requires_grad:
        from megatron_rl.policy_loss.one_read_triton import plan_loss, read_once

        configuration = plan_loss(loss, logits, batch, options, is_assumed=declared is None)
        if configuration is not None:
            made_with = scale.assume(logits.device) if isinstance(scale, AssumedScale) else scale
            scores, entropies, gradient = read_once(loss, logits, labels, batch, options, shard, configuration, made_with)
            output, _ = reduce(loss, scores, entropies if with_entropy else None, batch, options)
            return replace(output, loss=_WithLogitsGradient.apply(logits, output, gradient, made_with))  # type: ignore[no-untyped-call]  # torch's
    kernels = row_kernels(Backend(options.backend))
    scored = (logits, labels, batch.loss_mask, shard, tp_group, with_entropy, options.inplace, kernels)
    divergences = None
    if support is not None:
        log_probs, entropy = SupportLogProbs.apply(*scored, support)  # type: ignore[no-untyped-call]  # torch's
    else:
        term = None if batch.teacher is None else distribution_term(batch, options, shard, dtype)
        log_probs, entropy, divergences = VocabParallelLogProbs.apply(*scored, term)  # type: ignore[no-untyped-call]  # torch's
    return _output_of_scores(loss, log_probs, entropy if with_entropy else None, divergences, batch, options, declared)


@runs_eagerly
def loss_of_log_probs(
    name: str,
    log_probs: Tensor,  # [T] with gradient
    old_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    *,
    advantages_per: str | None = None,
    **keywords: Any,
) -> PolicyLossOutput:
    """`policy_loss` for a host that hands over log-probabilities, of any floating dtype. The result keeps no memory of the logits.

    Everything that needs logits is refused: temperature, vocab_size, an entropy. Communication and errors: as policy_loss, without
    the all-gather over tp.
    """
    values = log_probs.to(log_probs_dtype(log_probs))
    with agreement_of(keywords) as agreement:
        options, tensors = options_and_tensors(keywords)
        loss = get_policy_loss(name)
        options.refuse((*OF_LOGITS, *OF_HIDDEN_STATES), "needs logits, and this call has log-probabilities")
        if tensors.get("sampling_support") is not None:
            raise ConfigError(
                "sampling_support needs logits, and this call has log-probabilities: give log_probs, old_log_probs, "
                "rollout_log_probs and ref_log_probs over the kept ids, and leave it out"
            )
        if tensors.get("teacher") is not None:
            raise ConfigError("teacher needs logits, and this call has log-probabilities: pass teacher_log_probs [T]")
        if loss.needs_entropy:
            raise ConfigError(
                f"policy loss {loss.name!r} needs the entropy of each token, and this call has log-probabilities: call policy_loss "
                "or linear_policy_loss, which have logits, or choose another loss"
            )
        batch = LossBatch(old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **tensors)
        options = checked_options(loss, options, batch, values)
        batch = prepared(
            loss, batch, num_tokens=values.shape[0], device=values.device, dtype=values.dtype, advantages_per=advantages_per
        )
        compare_calls(agreement, loss, options, batch, advantages)
    return _output_of_scores(loss, values, None, None, known_before_rows(loss, batch, options, values.dtype), options, None)


def _output_of_scores(
    loss: PolicyLoss,
    log_probs: Tensor,  # [T] with gradient
    entropy: Tensor | None,  # [T] with gradient
    divergences: Tensor | None,  # [T] with gradient
    batch: LossBatch,
    options: LossOptions,
    declared: Tensor | float | None,
) -> PolicyLossOutput:
    scores = (log_probs, entropy, divergences)
    detached = [None if score is None else score.detach() for score in scores]
    batch = replace(batch, divergences=detached[2])
    output, coefficients = reduce(loss, log_probs.detach(), detached[1], batch, options)
    return replace(output, loss=_WithGradient.apply(*scores, output, coefficients, declared))  # type: ignore[no-untyped-call]  # torch's


# losses/grpo.py and losses/gspo.py have the equations: the ratio of a token, clip 0.2 / 0.2, and of a sample, clip 3e-4 / 4e-4.
grpo_loss, gspo_loss = partial(policy_loss, "grpo"), partial(policy_loss, "gspo")


class _WithGradient(torch.autograd.Function):
    """Attaches the analytic derivative to the loss. Backward is at most three multiplications, without a collective."""

    @staticmethod
    def forward(
        ctx: Any,
        log_probs: Tensor,
        entropy: Tensor | None,
        divergences: Tensor | None,
        output: PolicyLossOutput,
        coefficients: Coefficients,
        loss_scale: Tensor | float | None,
    ) -> Tensor:
        ctx.save_for_backward(coefficients.log_probs, coefficients.entropy, coefficients.divergences)
        ctx.loss_scale = loss_scale
        return output.loss

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.loss_scale is not None:  # the same check as after one read, so that a shape decides no error
            factor = check_actual_scale(
                upstream, ctx.loss_scale, "one kernel, where it can, makes the gradient with the declared one"
            )
            upstream = upstream if factor is None else upstream * factor
        return *(None if saved is None else upstream * saved for saved in ctx.saved_tensors), None, None, None


class _WithLogitsGradient(torch.autograd.Function):
    """Attaches the gradient of the logits that forward has made. Backward neither reads nor writes it, but for one column, or where
    another factor was assumed."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, output: PolicyLossOutput, gradient: Tensor, made_with: Tensor | float | Assumption
    ) -> Tensor:
        ctx.gradient, ctx.made_with = gradient, made_with
        return output.loss

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.gradient is None:
            raise ConfigError(
                "a second backward through a policy loss with loss_scale: its gradient was made in forward and is gone; compute "
                "the loss again, or leave loss_scale out where retain_graph is needed"
            )
        gradient, ctx.gradient = ctx.gradient, None  # so that autograd can take the tensor without a copy
        if isinstance(ctx.made_with, Assumption):
            ctx.made_with.correct(gradient, upstream)
            return gradient, None, None, None
        factor = check_actual_scale(upstream, ctx.made_with, "the gradient is already made with the declared one")
        if factor is not None:  # 1 or NaN: a column is enough, because the product with any matrix spreads it
            gradient[:, :1].mul_(factor)
        return gradient, None, None, None


def has_triton(loss: PolicyLoss, options: LossOptions) -> bool:
    """Whether the arithmetic of the loss and of its KL term runs in Triton."""
    has_kl = options.estimator is None or options.estimator.triton is not None
    return options.backend == Backend.TRITON and loss.triton is not None and has_kl


def known_before_rows(loss: PolicyLoss, batch: LossBatch, options: LossOptions, dtype: torch.dtype) -> LossBatch:
    """The batch with what needs no log-probability of the policy in training: the counts that a loss needs for its tokens (at level
    "sequence" it has them after the reduction), a sampled teacher's part of the advantages, and a correction of old ones.

    Communication: where the caller gave no counts, one all-reduce of [N] over cp; and as `corrected`.
    """
    if "token_counts" in loss.needs and loss.level == "token" and batch.token_counts is None:
        counts = document_sums(batch.loss_mask, batch.cu_seqlens)
        batch = replace(batch, token_counts=all_reduce_sum(counts, options.cp_group))
    if batch.teacher_log_probs is not None and batch.old_log_probs is not None:
        batch = taught(batch, options, batch.old_log_probs.to(dtype))
    settings = options.correction
    if settings is None or batch.old_log_probs is None or settings.sequence_delta is not None:
        return batch
    return corrected(settings, batch, batch.old_log_probs.to(dtype), options.cp_group)


def reduce(
    loss: PolicyLoss,
    log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    batch: LossBatch,
    options: LossOptions,
    *,
    is_part: bool = False,  # rows alone, whose documents may be cut: nothing is refused
) -> tuple[PolicyLossOutput, Coefficients]:
    """reduce_torch, or reduce_triton where the backend is Triton and the loss has Triton versions, of a batch with what the
    log-probabilities make known: an entropy that is read, and a correction.

    Communication: as reduce_torch, and as `corrected`. Raises DataError for data that cannot be trained, on the CPU.
    """
    if loss.needs_entropy or batch.sampling_support is not None:
        batch = replace(batch, entropy=entropy)
    if batch.teacher_log_probs is not None:
        batch = taught(batch, options, log_probs)
    if options.correction is not None and batch.correction is None:
        batch = corrected(options.correction, batch, log_probs, options.cp_group)
    if has_triton(loss, options):
        from megatron_rl.policy_loss.reduce_triton import reduce_triton

        output, coefficients = reduce_triton(loss, log_probs, entropy, batch, options)
    else:
        output, coefficients = reduce_torch(loss, log_probs, entropy, batch, options)
    if batch.divergences is not None:
        weights = divergence_weights(batch, options, log_probs.dtype)
        distillation = sum_live(weights * batch.divergences, batch)
        output = replace(output, loss=output.loss + distillation, distillation=distillation, divergences=batch.divergences)
        coefficients = coefficients._replace(divergences=weights)
    if not is_part:
        refuse_bad_data(loss, output, coefficients.sums, batch, options)
    return output, coefficients
