"""Computes this rank's part of the step's loss from logits, with its exact gradient: the public loss functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.declare import PolicyLoss, get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.losses.corrections import Correction
from megatron_rl.metrics.policy import PolicyStatistics
from megatron_rl.ops.assumed_scale import AssumedScale, Assumption
from megatron_rl.ops.backends import check_announced, check_delivered, first_order_only, resolve_backend, runs_eagerly
from megatron_rl.ops.log_probs import (
    check_log_prob_inputs,
    check_logits,
    compare_log_prob_inputs,
    log_probs_dtype,
    log_probs_of_rows,
    row_kernels,
)
from megatron_rl.ops.support import check_support
from megatron_rl.policy_loss.compared import compare_inputs
from megatron_rl.policy_loss.corrected_inputs import correct_before_rows
from megatron_rl.policy_loss.inputs import prepare_inputs, with_token_counts
from megatron_rl.policy_loss.reduce_torch import LossResult, reduce_loss_torch
from megatron_rl.policy_loss.settings import (
    LogitsLossKeywords,
    LossKeywords,
    LossSettings,
    groups_and_agreement,
    resolve_settings,
    with_defaults,
)


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """loss is 0-d and differentiable; the other fields are detached. kl_loss and entropy are None at coefficient 0, metrics is None
    at "none". entropy_per_token is there where the loss, a coefficient or a metric needs it."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor | None
    entropy: Tensor | None
    log_probs: Tensor  # [T]
    num_nonfinite: Tensor  # [N] int32
    metrics: PolicyStatistics | None
    correction: Correction | None = None  # None without a correction
    entropy_per_token: Tensor | None = None  # [T], in nats; 0 in masked rows


def output_of(result: LossResult, loss: Tensor, log_probs: Tensor, entropy_per_token: Tensor | None = None) -> PolicyLossOutput:
    """loss: result.loss with the gradient attached."""
    return PolicyLossOutput(
        loss=loss,
        policy_loss=result.policy_loss,
        kl_loss=result.kl_loss,
        entropy=result.entropy,
        log_probs=log_probs,
        num_nonfinite=result.num_nonfinite,
        metrics=result.metric_sums,
        correction=result.correction,
        entropy_per_token=entropy_per_token,
    )


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
    **keywords: Unpack[LogitsLossKeywords],
) -> PolicyLossOutput:
    """Any registered policy loss. `loss` is this rank's part of the step's

        L + kl_coefficient sum_i v_i sum_t m_it KL_it - entropy_coefficient sum_i v_i sum_t m_it H_it,    v = regularizer_weights

    The parts sum to it over micro-batches, cp and dp ranks, but not over tp, because its ranks hold the same number. Backward gives
    this rank's slice of the gradient of the sum over cp; every cp rank must apply the same factor to it.
    T counts this rank's tokens: slices of the documents in order (empty ones are allowed), then padding past cu_seqlens[-1].
    [N] tensors may be on the host; the copy to the logits' device does not synchronise. A CUDA graph needs them on the device.
    A loss without a Triton twin, or with a KL term whose estimator has none, is computed in torch on the logits' device with every
    backend.
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
        keywords: LogitsLossKeywords explains them.
    Communication: tp one all-gather of [T, 3 or 4], with sampling_support another one for an entropy; cp one all-reduce of
        [N, k], and before it one for a correction of samples; with check_ranks one all-gather of 4 KiB over each; backward none.
        None at size 1.
        A loss that needs token_counts of its tokens adds one of [N] where the caller gave none, mean_log_ratio another.
    Raises: DataError for wrong shapes, for `advantages` that fit both [N] and [T], for token_counts that differ from the mask's,
        for a wrong return value of the loss, and on the CPU for unmasked non-finite values. ConfigError for wrong settings.
    """
    tp_group, cp_group, agreement = groups_and_agreement(keywords)
    with agreement:
        loss = get_policy_loss(name)
        options = with_defaults(LogitsLossKeywords, loss, keywords)
        temperature, vocab_size = options["temperature"], options["vocab_size"]
        inplace, loss_scale = options["inplace"], options["loss_scale"]
        settings = resolve_settings(loss, options, tp_group, cp_group, resolve_backend(options["backend"], check_logits(logits)))
        inputs = prepare_inputs(
            loss,
            options,
            cp_group,
            num_tokens=logits.shape[0],
            device=logits.device,
            dtype=log_probs_dtype(logits),
            old_log_probs=old_log_probs,
            advantages=advantages,
            loss_mask=loss_mask,
            cu_seqlens=cu_seqlens,
            token_weights=token_weights,
        )
        shard = check_log_prob_inputs(logits, labels, inputs.loss_mask, temperature, vocab_size, tp_group, inplace=inplace)
        compare_log_prob_inputs(agreement, logits, labels, inputs.loss_mask, temperature, vocab_size)
        support = inputs.sampling_support
        if support is not None:
            check_support(support, labels, inputs.loss_mask, shard, inputs.cu_seqlens)
        if agreement.is_active:
            compare_inputs(agreement, loss, inputs, settings)
        announced = None if isinstance(loss_scale, AssumedScale) else loss_scale
        check_announced(announced)
        agreement.add("loss_scale", "a tensor" if isinstance(announced, Tensor) else announced)
        agreement.add("whether loss_scale is assumed", announced is not loss_scale)
    inputs = with_token_counts(loss, inputs, cp_group)
    if inputs.correction is not None:
        inputs = correct_before_rows(inputs, log_probs_dtype(logits), cp_group)
    with_entropy = settings.needs_entropy
    if support is None and loss_scale is not None and has_twin(loss, settings) and torch.is_grad_enabled() and logits.requires_grad:
        from megatron_rl.policy_loss.one_read_triton import plan_one_read, read_once

        configuration = plan_one_read(loss, logits, inputs, settings, is_assumed=announced is None)
        if configuration is not None:
            made_with = loss_scale.assume(logits.device) if isinstance(loss_scale, AssumedScale) else loss_scale
            scores, entropies, gradient = read_once(
                loss, logits, labels, inputs, settings, shard, configuration, made_with=made_with, inplace=inplace
            )
            result = reducer_of(loss, settings)(loss, scores, entropies if with_entropy else None, inputs, settings)
            loss_of_logits = _WithLogitsGradient.apply(logits, result, gradient, made_with)  # type: ignore[no-untyped-call]  # torch's
            return output_of(result, loss_of_logits, scores, entropies if with_entropy else None)
    rows, kernels = (logits, labels, inputs.loss_mask), row_kernels(settings.backend)
    log_probs, entropy = log_probs_of_rows(*rows, support, shard, tp_group, with_entropy, inplace, kernels)
    of_tokens = None if entropy is None else entropy.detach()
    result = reducer_of(loss, settings)(loss, log_probs.detach(), of_tokens, inputs, settings)
    with_gradient = _WithGradient.apply(log_probs, entropy, result, announced)  # type: ignore[no-untyped-call]  # torch's
    return output_of(result, with_gradient, log_probs.detach(), of_tokens)


@runs_eagerly
def loss_of_log_probs(
    name: str,
    log_probs: Tensor,  # [T] with gradient
    old_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **keywords: Unpack[LossKeywords],
) -> PolicyLossOutput:
    """`policy_loss` for a host that hands over log-probabilities, of any floating dtype. The result keeps no memory of the logits.

    Everything that needs logits is refused: temperature, vocab_size, an entropy. Communication and errors: as policy_loss, without
    the all-gather over tp.
    """
    values = log_probs.to(log_probs_dtype(log_probs))
    tp_group, cp_group, agreement = groups_and_agreement(keywords)
    with agreement:
        loss = get_policy_loss(name)
        options = with_defaults(LossKeywords, loss, keywords)
        if (options["temperature"], options["vocab_size"], options["entropy_coefficient"]) != (1.0, None, 0.0):
            raise ConfigError("temperature, vocab_size and entropy_coefficient need logits, and this call has log-probabilities")
        if options["sampling_support"] is not None:
            raise ConfigError(
                "sampling_support needs logits, and this call has log-probabilities: give log_probs, old_log_probs, "
                "rollout_log_probs and ref_log_probs over the kept ids, and leave it out"
            )
        if loss.needs_entropy:
            raise ConfigError(
                f"policy loss {loss.name!r} needs the entropy of each token, and this call has log-probabilities: call policy_loss "
                "or linear_policy_loss, which have logits, or choose another loss"
            )
        settings = resolve_settings(loss, options, tp_group, cp_group, resolve_backend(options["backend"], values))
        inputs = prepare_inputs(
            loss,
            options,
            cp_group,
            num_tokens=values.shape[0],
            device=values.device,
            dtype=values.dtype,
            old_log_probs=old_log_probs,
            advantages=advantages,
            loss_mask=loss_mask,
            cu_seqlens=cu_seqlens,
            token_weights=token_weights,
        )
        if agreement.is_active:
            compare_inputs(agreement, loss, inputs, settings)
    inputs = with_token_counts(loss, inputs, cp_group)
    result = reducer_of(loss, settings)(loss, values.detach(), None, inputs, settings)
    with_gradient = _WithGradient.apply(values, None, result, None)  # type: ignore[no-untyped-call]  # torch's
    return output_of(result, with_gradient, values.detach())


def grpo_loss(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **keywords: Unpack[LogitsLossKeywords],
) -> PolicyLossOutput:
    """`policy_loss` with GRPO's ratio, one per token; default clip 0.2 / 0.2.

        rho_t   = exp(log_probs_t - old_log_probs_t)
        value_t = -min(rho_t A_t, clip(rho_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A_t)

    Shao et al., "DeepSeekMath", arXiv:2402.03300, equation 3; its KL term is the keyword kl_coefficient.

    Args:
        logits: [T, V_tp] of any floating dtype, this tp rank's columns.
        labels: [T] int64; labels[t] is the token that logits[t] predicts.
        old_log_probs: [T] float32, in nats; None: on-policy, every ratio is 1.
        advantages: float32, [N] or [T].
        loss_mask: [T] bool, True on tokens that are trained.
        cu_seqlens: [N + 1] int32, bounds of this rank's slices of the documents.
        token_weights: [N] float32, from sample_token_weights.
        keywords: clip_ratio_low, clip_ratio_high, temperature, tp_group, cp_group and the others of LogitsLossKeywords.
    Returns: a PolicyLossOutput. Its loss is 0-d: this rank's part of the step's. Communication and errors: as policy_loss.
    """
    return policy_loss("grpo", logits, labels, old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **keywords)


def gspo_loss(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N], or [T] and equal inside each sample
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **keywords: Unpack[LogitsLossKeywords],
) -> PolicyLossOutput:
    """`policy_loss` with GSPO's ratio, one per sample; default clip 3e-4 / 4e-4.

        s_i     = exp( sum_{t in i} m_t (log_probs_t - old_log_probs_t) / m_i )
        value_i = -min(s_i A_i, clip(s_i, 1 - clip_ratio_low, 1 + clip_ratio_high) A_i)

    Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071, equations 5 and 7; m_i counts all cp ranks.

    Args:
        logits: [T, V_tp] of any floating dtype, this tp rank's columns.
        labels: [T] int64; labels[t] is the token that logits[t] predicts.
        old_log_probs: [T] float32, in nats; None: on-policy, every ratio is 1.
        advantages: float32, [N] or [T] and equal inside each sample.
        loss_mask: [T] bool, True on tokens that are trained.
        cu_seqlens: [N + 1] int32, bounds of this rank's slices of the documents.
        token_weights: [N] float32, from sample_token_weights.
        keywords: clip_ratio_low, clip_ratio_high, temperature, tp_group, cp_group and the others of LogitsLossKeywords.
    Returns: a PolicyLossOutput. Its loss is 0-d: this rank's part of the step's. Communication and errors: as policy_loss.
    """
    return policy_loss("gspo", logits, labels, old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **keywords)


class _WithGradient(torch.autograd.Function):
    """Attaches the analytic derivative to the loss. Backward is at most two multiplications, without a collective."""

    @staticmethod
    def forward(
        ctx: Any,
        log_probs: Tensor,
        entropy: Tensor | None,
        result: LossResult,
        loss_scale: Tensor | float | None,
    ) -> Tensor:
        ctx.save_for_backward(result.coefficients, result.entropy_coefficients)
        ctx.loss_scale = loss_scale
        return result.loss

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_scores = ctx.saved_tensors
        if ctx.loss_scale is not None:  # the same check as after one read, so that a shape decides no error
            factor = check_delivered(
                upstream, ctx.loss_scale, "one kernel, where it can, makes the gradient with the announced one"
            )
            upstream = upstream if factor is None else upstream * factor
        return *(None if coefficients is None else upstream * coefficients for coefficients in of_scores), None, None


class _WithLogitsGradient(torch.autograd.Function):
    """Attaches the gradient of the logits that forward has made. Backward neither reads nor writes it, but for one column, or where
    another factor was assumed."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, result: LossResult, gradient: Tensor, made_with: Tensor | float | Assumption) -> Tensor:
        ctx.gradient, ctx.made_with = gradient, made_with
        return result.loss

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
        factor = check_delivered(upstream, ctx.made_with, "the gradient is already made with the announced one")
        if factor is not None:  # 1 or NaN: a column is enough, because the product with any matrix spreads it
            gradient[:, :1].mul_(factor)
        return gradient, None, None, None


def has_twin(loss: PolicyLoss, settings: LossSettings) -> bool:
    """Whether the arithmetic of the loss and of its KL term runs in Triton."""
    has_kl_twin = settings.kl_estimator is None or settings.kl_estimator.triton is not None
    return settings.backend == Backend.TRITON and loss.triton is not None and has_kl_twin


def reducer_of(loss: PolicyLoss, settings: LossSettings) -> Callable[..., LossResult]:
    """reduce_loss_triton where the backend is Triton and there are twins, else reduce_loss_torch."""
    if not has_twin(loss, settings):
        return reduce_loss_torch
    from megatron_rl.policy_loss.reduce_triton import reduce_loss_triton

    return reduce_loss_triton
