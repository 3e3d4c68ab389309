"""Computes a rank's part of the step's loss and its derivative from log-probabilities, in torch: specification and CPU backend.

The columns of the one reduction over cp are in inputs.py, because both backends share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND, PolicyMetrics
from megatron_rl.declare import LossValue, PolicyLoss, bounded_exp, checked_result
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import all_reduce_sum, document_sums
from megatron_rl.losses.corrections import Correction
from megatron_rl.losses.kl import kl_estimate
from megatron_rl.metrics.further import DistillationValues, SupportValues, token_statistics
from megatron_rl.metrics.policy import PolicyStatistics, TokenValues, policy_statistics
from megatron_rl.ops.distribution import TopKTeacher
from megatron_rl.policy_loss.inputs import (
    Coefficients,
    DocumentSums,
    LossBatch,
    LossOptions,
    PolicyLossOutput,
    checked_tensors,
    further_inputs,
    mean_of_documents,
    not_none,
    read_sums,
    sum_columns,
    vectors_of_samples,
)


class LossValues(NamedTuple):
    """A LossValue with all its fields, detached."""

    value: Tensor  # [*]
    derivative: Tensor  # [*] d value / d log-probability
    is_clipped: Tensor  # [*] bool


def evaluate(
    loss: PolicyLoss,
    log_ratio: Tensor,  # [*] of tokens or samples
    advantages: Tensor,  # [*]
    log_probs: Tensor,  # [*] of tokens, or means of samples
    keywords: Mapping[str, float],  # clip and parameters
    vectors: Mapping[str, Tensor],  # [*] the further inputs that the loss declares
    *,
    prefers_autograd: bool = False,  # even where the loss gives a derivative, unless its value has no graph
) -> LossValues:
    """Calls an elementwise loss on copies of its inputs. Raises DataError for a result of another shape or dtype.

    The derivative is the sum of those by log_ratio and log_probs; autograd computes it where the loss gives none, and with
    prefers_autograd wherever it can. The derivative through log_ratio is 0 beyond its bound: autograd does not go through it
    there, and one that the loss gives is 0 there, unless the loss takes log_probs and so has another derivative.
    """
    with torch.inference_mode(False), torch.enable_grad():
        # A tensor made in inference mode cannot be differentiated; a copy made outside can.
        leaves = [log_ratio.detach().clone().requires_grad_()]
        is_beyond = leaves[0].detach().abs() > LOG_RATIO_BOUND  # false for NaN, which passes through
        given = [torch.where(is_beyond, leaves[0].detach(), leaves[0]), advantages.detach().clone()]
        if loss.takes_log_probs:
            leaves.append(log_probs.detach().clone().requires_grad_())
            given.append(leaves[1].clone())
        returned = loss.function(*given, **{name: vector.detach().clone() for name, vector in vectors.items()}, **keywords)
        result = returned if isinstance(returned, LossValue) else LossValue(returned)
        remedy = ", one number for each of its inputs; return megatron_rl.LossValue(value, derivative, is_clipped)"
        for name, tensor, like in (
            ("its value", result.value, log_ratio),
            ("its derivative", result.derivative, log_ratio),
            ("its is_clipped", result.is_clipped, is_beyond),
        ):
            if tensor is not None or name == "its value":
                checked_result(f"policy loss {loss.name!r}", name, tensor, like, remedy)
        derivative = None if prefers_autograd and result.value.requires_grad else result.derivative
        if derivative is None:
            derivative = _derivative(loss, result.value, leaves)
        elif not loss.takes_log_probs:
            derivative = torch.where(is_beyond, 0.0, derivative)
    is_clipped = torch.zeros_like(log_ratio, dtype=torch.bool) if result.is_clipped is None else result.is_clipped
    return LossValues(result.value.detach(), derivative.detach(), is_clipped)


def _derivative(loss: PolicyLoss, value: Tensor, leaves: list[Tensor]) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(value)
    gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    found = [gradient for gradient in gradients if gradient is not None]
    if not found:
        raise DataError(
            f"policy loss {loss.name!r} returned a value with a gradient of its own, and none by log_ratio or log_probs: compute "
            "it from them; a number that is trained elsewhere, such as a torch.nn.Parameter, must be detached"
        )
    return sum(found[1:], found[0])


@torch.no_grad()
def reduce_torch(
    loss: PolicyLoss,
    log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    batch: LossBatch,
    options: LossOptions,
) -> tuple[PolicyLossOutput, Coefficients]:
    """loss = sum_t w_i m_t u_t value_t + kl_coefficient sum_t v_i m_t KL_t - entropy_coefficient sum_t v_i m_t H_t.

    Importance weights u: a loss with a value for each token multiplies value and coefficient by u_t. At level "sequence" the tokens
    share the value, so the sample's weight becomes W_i = w_i sum_t m_t u_t, and each token's coefficient (W_i / m_i) derivative_i,
    without u_t.

    A correction is a factor of u_t; the KL and entropy terms have no such factor.

    Communication: one all-reduce over cp of [N, k]; none at cp size 1. k = 2 (non-finite, count), and the loss's means. Level
    "sequence" adds two columns for advantages, which must be equal inside a sample over all cp ranks, and one for importance
    weights. A token-level loss that reads a mean has one of [N] more: whether its results are finite.
    num_nonfinite counts what cannot be trained; the caller refuses it on the CPU. Raises DataError for a wrong return value of the
    loss.
    """
    dtype = log_probs.dtype
    tensors = checked_tensors(loss, log_probs, batch, options)
    advantages, log_ratio = tensors["advantages"], log_probs - tensors["old_log_probs"]
    results: dict[str, Tensor] = {}
    # Before the reduction, which tells the other cp ranks about non-finite values.
    if not loss.reads_means:
        keywords, vectors = options.keywords(loss), further_inputs(loss, batch, dtype)
        values = evaluate(loss, log_ratio, advantages, log_probs, keywords, vectors)
        results = {"value": values.value, "derivative": values.derivative}
    estimator = options.estimator
    if estimator is not None:
        kl, kl_derivative = kl_estimate(estimator, log_probs, tensors["ref_log_probs"], log_ratio)
        results |= {"kl": kl, "kl derivative": kl_derivative}
    sums = _sum_documents(loss, tensors, results, batch, options)
    read = read_sums(loss, sums, batch, dtype)
    num_nonfinite = read.num_nonfinite
    if loss.reads_means:
        values, num_bad = values_by_means(loss, log_probs, log_ratio, batch, read, options)
        num_nonfinite = torch.where(num_nonfinite > 0, num_nonfinite, num_bad)
    weights = batch.spread(batch.token_weights.to(dtype))
    value_weights = weights if batch.importance_weights is None else weights * tensors["importance_weights"]
    coefficient_weights = value_weights
    if loss.level == "sequence" and read.importance is not None:
        mean_importance = mean_of_documents(read.importance, read.counts, dtype)
        coefficient_weights = weights * batch.spread(mean_importance)
    policy_loss = sum_live(value_weights * torch.where(batch.loss_mask, values.value, 0.0), batch)
    c = torch.where(batch.loss_mask, coefficient_weights * torch.where(batch.loss_mask, values.derivative, 0.0), 0.0)
    total, kl_loss, entropy_sum, e = policy_loss.clone(), None, None, None
    if estimator is not None or options.entropy_coefficient:
        regularizer_weights = batch.spread(not_none(batch.regularizer_weights).to(dtype))
    if estimator is not None:
        kl_loss = sum_live(regularizer_weights * kl, batch)
        total = total + options.kl_coefficient * kl_loss
        c = c + torch.where(batch.loss_mask, options.kl_coefficient * regularizer_weights * kl_derivative, 0.0)
    if options.entropy_coefficient:
        entropy_sum = sum_live(regularizer_weights * not_none(entropy), batch)
        total = total - options.entropy_coefficient * entropy_sum
        e = torch.where(batch.loss_mask, -options.entropy_coefficient * regularizer_weights, 0.0)
    output = PolicyLossOutput(
        loss=total,
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        entropy=entropy_sum,
        log_probs=log_probs,
        num_nonfinite=num_nonfinite.to(torch.int32),
        metrics=metrics_of(loss, log_probs, entropy, batch, read, options, values),
        correction=batch.correction,
        entropy_per_token=entropy if options.needs_entropy(loss) else None,
    )
    return output, Coefficients(c, e, sums)


def values_by_means(
    loss: PolicyLoss,
    log_probs: Tensor,  # [T]
    log_ratio: Tensor,  # [T]
    batch: LossBatch,
    sums: DocumentSums,
    options: LossOptions,
) -> tuple[LossValues, Tensor]:  # [T] each; [N] tokens over all cp ranks whose results are not finite
    """Of a sequence-level loss, whose tokens share the values of their sample, and of a token-level one that reads a mean.

    Communication: at level "token" one all-reduce of [N] over cp.
    """
    keywords, advantages = options.keywords(loss), batch.advantages.to(log_ratio.dtype)
    if loss.level == "token":
        vectors = further_inputs(loss, batch, log_ratio.dtype) | {"mean_log_ratio": batch.spread(sums.means["log_ratio"])}
        values = evaluate(loss, log_ratio, advantages, log_probs, keywords, vectors)
        return values, all_reduce_sum(document_sums(batch.loss_mask & ~_is_finite(values), batch.cu_seqlens), options.cp_group)
    means, vectors = sums.means, vectors_of_samples(loss, sums, log_ratio.dtype)
    log_probs = means.get("log_probs", means["log_ratio"])  # any tensor, where the loss does not take log_probs
    samples = evaluate(loss, means["log_ratio"], means["advantages"], log_probs, keywords, vectors)
    value, derivative, is_clipped = (batch.spread(part) for part in samples)
    if loss.token_clip is not None:
        is_token_clipped = _clipped_log_ratio(loss, log_ratio, advantages, keywords) != log_ratio
        derivative = torch.where(is_token_clipped, 0.0, derivative)
        is_clipped = is_clipped | (is_token_clipped & (advantages != 0))
    return LossValues(value, derivative, is_clipped), torch.where(_is_finite(samples), 0.0, sums.counts)


def _is_finite(values: LossValues) -> Tensor:  # [*] bool
    return torch.isfinite(values.value) & torch.isfinite(values.derivative)


def metrics_of(
    loss: PolicyLoss,
    log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    batch: LossBatch,
    sums: DocumentSums,
    options: LossOptions,
    values: LossValues | None = None,  # [T] each; None: they are computed
) -> PolicyStatistics | None:
    """This rank's share of the policy metrics. No communication."""
    if options.metrics == PolicyMetrics.NONE:
        return None
    old_log_probs, advantages = batch.anchor(log_probs), batch.advantages.to(log_probs.dtype)
    log_ratio = log_probs - old_log_probs
    if values is None and loss.reads_means:
        values, _ = values_by_means(loss, log_probs, log_ratio, batch, sums, options)
    elif values is None:
        vectors = further_inputs(loss, batch, log_probs.dtype)
        values = evaluate(loss, log_ratio, advantages, log_probs, options.keywords(loss), vectors)
    is_sequence, counts = loss.level == "sequence", batch.spread(sums.counts)
    statistics = policy_statistics(
        TokenValues(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            ratios=bounded_exp(batch.spread(sums.means["log_ratio"]) if is_sequence else log_ratio),
            is_clipped=values.is_clipped,
            advantages=batch.spread(sums.means["advantages"]) if is_sequence else advantages,
            entropy=entropy if options.metrics == PolicyMetrics.WITH_ENTROPY else None,
        ),
        loss_mask=batch.loss_mask,
        counts=counts,
        num_documents=batch.num_documents,
        is_sequence_level=is_sequence,
        cp_rank=options.cp_group.rank(),
    )
    given: dict[str, Correction | SupportValues | DistillationValues] = {}
    if batch.correction is not None:
        given["correction"] = batch.correction
    if batch.sampling_support is not None:
        given["support"] = SupportValues(log_probs, batch.sampling_support.sizes)
    if batch.divergences is not None:
        mass = batch.teacher.mass if isinstance(batch.teacher, TopKTeacher) else torch.ones_like(batch.divergences)
        given["distillation"] = DistillationValues(batch.divergences, mass)
    found: dict[str, Any] = {
        name: token_statistics(name, values_of, loss_mask=batch.loss_mask, counts=counts) for name, values_of in given.items()
    }
    return replace(statistics, **found)


def _sum_documents(
    loss: PolicyLoss, tensors: Mapping[str, Tensor], results: Mapping[str, Tensor], batch: LossBatch, options: LossOptions
) -> Tensor:  # [N, k] float64
    """Sums sum_columns over each document into one [N, k] tensor. Communication: one all-reduce of it over cp."""
    checked = [*tensors.values(), *results.values()]
    is_finite = torch.stack([torch.isfinite(tensor) for tensor in checked]).all(0)
    vectors = {**tensors, "num_nonfinite": ~is_finite, "counts": batch.loss_mask}
    columns = sum_columns(loss, batch)
    if "log_ratio" in columns:
        log_ratio = tensors["log_probs"] - tensors["old_log_probs"]
        vectors["log_ratio"] = _clipped_log_ratio(loss, log_ratio, tensors["advantages"], options.keywords(loss))
    if "squared_advantages" in columns:
        vectors["squared_advantages"] = tensors["advantages"].double().square()
    if batch.importance_weights is not None:
        vectors["importance"] = batch.importance_weights
    stacked = torch.stack([torch.where(batch.loss_mask, vectors[name], 0).double() for name in columns], dim=-1)
    return all_reduce_sum(document_sums(stacked, batch.cu_seqlens), options.cp_group)


def _clipped_log_ratio(
    loss: PolicyLoss, log_ratio: Tensor, advantages: Tensor, keywords: Mapping[str, float]
) -> Tensor:  # [T] each
    """The log-ratios whose mean the loss gets. Raises DataError for another shape."""
    if loss.token_clip is None:
        return log_ratio
    clipped = loss.token_clip(log_ratio, advantages, **keywords)
    if not isinstance(clipped, Tensor) or clipped.shape != log_ratio.shape:
        raise DataError(f"token_clip of policy loss {loss.name!r} must return [T={len(log_ratio)}], as its log_ratio")
    return clipped


def sum_live(values: Tensor, batch: LossBatch) -> Tensor:  # [T] -> 0-d
    """Sums in float64, document by document: padding changes no bit, and the order of documents none that float32 can show."""
    return document_sums(torch.where(batch.loss_mask, values, 0.0), batch.cu_seqlens).sum().to(values.dtype)
