"""The torch twin of the loss kernels: the specification, the CPU backend, and any registered loss of a user's own.

From log-probabilities to a rank's part of the step's loss and its derivative. It must never differentiate nor read a flag.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import Backend, PolicyMetrics
from megatron_rl.errors import DataError
from megatron_rl.layout.collectives import all_reduce_sum
from megatron_rl.layout.groups import Group
from megatron_rl.layout.packing import document_sums, spread
from megatron_rl.loss_hub import PolicyLossEntry
from megatron_rl.losses.gspo import mean_log_ratio
from megatron_rl.losses.inputs import LossInputs
from megatron_rl.losses.registered import LossValues, function_values, nonfinite_values, surrogate_values
from megatron_rl.losses.sums import DocumentSums, checked_tensors, raise_on_bad_data, read_sums, sum_columns
from megatron_rl.metrics import PolicyStatistics, policy_statistics
from megatron_rl.ops.ratios import bounded_exp, k3_estimate

NOT_FINITE = "returned values or derivatives that are not finite, from finite inputs"


@dataclass(frozen=True, slots=True)
class LossSettings:
    clip_ratio_low: float
    clip_ratio_high: float
    kl_coefficient: float
    entropy_coefficient: float
    metrics: str
    cp_group: Group
    backend: Backend = Backend.TORCH  # resolved: TORCH or TRITON


@dataclass(frozen=True, slots=True)
class LossParts:
    """loss = policy_loss + kl_coefficient kl_loss - entropy_coefficient entropy. It aliases nothing: schedules divide in place."""

    loss: Tensor  # 0-d
    policy_loss: Tensor  # 0-d
    kl_loss: Tensor | None  # 0-d
    entropy: Tensor | None  # 0-d
    coefficients: Tensor  # [T] d loss / d log_probs
    entropy_coefficients: Tensor | None  # [T] d loss / d entropy
    num_nonfinite: Tensor  # [N] int32 over all cp ranks
    statistics: PolicyStatistics | None


@torch.no_grad()
def loss_parts_reference(
    entry: PolicyLossEntry,
    log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    inputs: LossInputs,
    settings: LossSettings,
) -> LossParts:
    """`loss_parts` of losses/parts.py, where equation, communication and errors stand."""
    is_sequence, dtype = entry.level == "sequence", log_probs.dtype
    tensors = checked_tensors(log_probs, inputs, settings.kl_coefficient)
    old_log_probs, token_advantages = tensors["old_log_probs"], tensors["advantages"]
    clip = {"clip_ratio_low": settings.clip_ratio_low, "clip_ratio_high": settings.clip_ratio_high}
    tokens, results = None, {}
    if entry.surrogate is not None and not is_sequence:
        # Before the reduction, in which what is not finite travels to the other cp ranks.
        tokens = surrogate_values(entry, log_probs - old_log_probs, token_advantages, **clip)
        results = {f"value of {entry.name}": tokens.value, f"derivative of {entry.name}": tokens.derivative}
    columns = sum_columns(entry, inputs)
    sums = read_sums(columns, _sum_documents(columns, tensors | results, inputs, settings.cp_group), inputs)
    raise_on_bad_data(sums, tensors, inputs, results)
    advantages = inputs.advantages.to(dtype)
    if is_sequence and inputs.advantages_per == "token":
        advantages = sums.advantages.to(dtype)
        token_advantages = spread(advantages, inputs.token_documents)
    num_nonfinite = sums.num_nonfinite
    if tokens is None:
        own_advantages = advantages if is_sequence else token_advantages
        tokens, is_bad = _values_after_reduction(
            entry, log_probs, old_log_probs, own_advantages, token_advantages, inputs, sums, settings
        )
        num_nonfinite = num_nonfinite + is_bad
    values, derivative = (torch.where(inputs.loss_mask, part, 0.0) for part in (tokens.value, tokens.derivative))
    value_weights, coefficient_weights = _weights(is_sequence, inputs, sums, dtype)
    policy_loss = _sum_live(value_weights * values, inputs)
    coefficients = torch.where(inputs.loss_mask, coefficient_weights * derivative, 0.0)
    kl_loss, kl_coefficients, entropy_sum, entropy_coefficients = _regularizers(log_probs, entropy, inputs, settings)
    loss = policy_loss.clone()
    if kl_loss is not None:
        loss, coefficients = loss + settings.kl_coefficient * kl_loss, coefficients + kl_coefficients
    if entropy_sum is not None:
        loss = loss - settings.entropy_coefficient * entropy_sum
    statistics = None
    if settings.metrics != PolicyMetrics.NONE:
        log_ratio = spread(_mean(sums, dtype), inputs.token_documents) if is_sequence else log_probs - old_log_probs
        statistics = policy_statistics(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            ratios=bounded_exp(log_ratio),
            is_clipped=tokens.is_clipped,
            advantages=token_advantages,
            entropy=entropy if settings.metrics == PolicyMetrics.WITH_ENTROPY else None,
            loss_mask=inputs.loss_mask,
            counts=spread(sums.counts, inputs.token_documents),
            num_documents=inputs.num_documents,
            is_sequence_level=is_sequence,
            cp_rank=settings.cp_group.rank(),
        )
    return LossParts(
        *(loss, policy_loss, kl_loss, entropy_sum, coefficients, entropy_coefficients),
        num_nonfinite=num_nonfinite.to(torch.int32),
        statistics=statistics,
    )


def _values_after_reduction(
    entry: PolicyLossEntry,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [N], or [T] for a token-level loss without a surrogate
    token_advantages: Tensor,  # [T]
    inputs: LossInputs,
    sums: DocumentSums,
    settings: LossSettings,
) -> tuple[LossValues, Tensor]:  # [T] each, [N] further tokens that are not finite
    """Values that need whole documents: of a sequence-level surrogate, or of a loss without a surrogate."""
    clip = {"clip_ratio_low": settings.clip_ratio_low, "clip_ratio_high": settings.clip_ratio_high}
    if entry.surrogate is None:
        counts, group = sums.counts, settings.cp_group
        tokens = function_values(
            entry, log_probs, old_log_probs, advantages, token_advantages, inputs, counts, **clip, cp_group=group
        )
        is_bad = nonfinite_values(tokens, inputs.loss_mask)
        if not is_bad.is_cuda and bool(is_bad.any()):
            raise DataError(f"policy loss {entry.name!r} {NOT_FINITE}")
        return tokens, document_sums(is_bad, inputs.cu_seqlens)
    documents = surrogate_values(entry, _mean(sums, log_probs.dtype), advantages, **clip)
    is_bad = nonfinite_values(documents, sums.counts > 0)
    if not is_bad.is_cuda and bool(is_bad.any()):  # the same on every cp rank: they raise together
        raise DataError(f"policy loss {entry.name!r} {NOT_FINITE}")
    tokens = LossValues(*(spread(part, inputs.token_documents) for part in documents))
    return tokens, torch.where(is_bad, sums.counts, 0.0)


def _weights(is_sequence: bool, inputs: LossInputs, sums: DocumentSums, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a token's value [T] and what its derivative [T] is multiplied by."""
    weights = spread(inputs.token_weights.to(dtype), inputs.token_documents)
    if inputs.importance_weights is None:
        return weights, weights
    value_weights = weights * inputs.importance_weights.to(dtype)
    if not is_sequence:
        return value_weights, value_weights
    mean_importance = torch.where(sums.counts > 0, sums.importance / sums.counts.clamp(min=1), 0.0).to(dtype)
    return value_weights, weights * spread(mean_importance, inputs.token_documents)


def _regularizers(log_probs: Tensor, entropy: Tensor | None, inputs: LossInputs, settings: LossSettings):
    """(kl sum 0-d, its coefficients [T], entropy sum 0-d, its coefficients [T]); None for a term whose coefficient is 0."""
    kl_loss = kl_coefficients = entropy_sum = entropy_coefficients = None
    if settings.kl_coefficient or settings.entropy_coefficient:
        weights = spread(inputs.regularizer_weights.to(log_probs.dtype), inputs.token_documents)
    if settings.kl_coefficient:
        k3, derivative = k3_estimate(log_probs, inputs.ref_log_probs.to(log_probs.dtype))
        kl_loss = _sum_live(weights * k3, inputs)
        kl_coefficients = torch.where(inputs.loss_mask, settings.kl_coefficient * weights * derivative, 0.0)
    if settings.entropy_coefficient:
        entropy_sum = _sum_live(weights * entropy, inputs)
        entropy_coefficients = torch.where(inputs.loss_mask, -settings.entropy_coefficient * weights, 0.0)
    return kl_loss, kl_coefficients, entropy_sum, entropy_coefficients


def _sum_documents(
    columns: tuple[str, ...], tensors: dict[str, Tensor], inputs: LossInputs, cp_group: Group
) -> Tensor:  # [N, k] float64
    """Packs what has to be known of whole documents into one [N, k] tensor and reduces it over cp once."""
    is_finite = torch.ones_like(inputs.loss_mask)
    for tensor in tensors.values():
        is_finite = is_finite & torch.isfinite(tensor)
    per_token = {"num_nonfinite": ~is_finite, "counts": inputs.loss_mask, "importance": inputs.importance_weights}
    if "log_ratio" in columns:
        per_token["log_ratio"] = tensors["log_probs"] - tensors["old_log_probs"]
    if "advantages" in columns:
        per_token["advantages"] = tensors["advantages"]
        per_token["squared_advantages"] = tensors["advantages"].double().square()
    stacked = torch.stack([torch.where(inputs.loss_mask, per_token[name], 0).double() for name in columns], dim=-1)
    return all_reduce_sum(document_sums(stacked, inputs.cu_seqlens), cp_group)


def _mean(sums: DocumentSums, dtype: torch.dtype) -> Tensor:  # [N]
    return mean_log_ratio(sums.log_ratio, sums.counts, dtype)


def _sum_live(values: Tensor, inputs: LossInputs) -> Tensor:  # [T] -> 0-d
    """In float64, document by document: padding moves no bit, and another order of documents none that float32 can show."""
    return document_sums(torch.where(inputs.loss_mask, values, 0.0), inputs.cu_seqlens).sum().to(values.dtype)
