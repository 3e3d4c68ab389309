"""The torch twin of the loss kernels: the specification, the CPU backend, and any registered loss of a user's own.

From log-probabilities to a rank's part of the step's loss and its derivative. It must never differentiate nor read a flag.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import Backend, PolicyMetrics
from megatron_rl.layout.collectives import all_reduce_sum
from megatron_rl.layout.groups import Group
from megatron_rl.layout.packing import document_sums, spread
from megatron_rl.loss_hub import PolicyLossEntry
from megatron_rl.losses.gspo import mean_log_ratio
from megatron_rl.losses.inputs import LossInputs
from megatron_rl.losses.sums import DocumentSums, checked_tensors, raise_on_bad_data, read_sums, sum_columns
from megatron_rl.losses.surrogate import bounded_exp, k3_estimate
from megatron_rl.metrics import PolicyStatistics, policy_statistics


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
    columns = sum_columns(entry, inputs)
    sums = read_sums(columns, _sum_documents(columns, tensors, inputs, settings.cp_group), inputs)
    raise_on_bad_data(sums, log_probs, inputs, settings.kl_coefficient)
    advantages = inputs.advantages.to(dtype)
    if is_sequence and inputs.advantages_per == "token":
        advantages = sums.advantages.to(dtype)
        token_advantages = spread(advantages, inputs.token_documents)
    values, derivative = _values(
        entry, log_probs, old_log_probs, advantages if is_sequence else token_advantages, inputs, sums, settings
    )
    value_weights, coefficient_weights = _weights(is_sequence, inputs, sums, dtype)
    policy_loss = _masked_sum(value_weights * values, inputs.loss_mask)
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
            derivative=derivative,
            advantages=token_advantages,
            entropy=entropy if settings.metrics == PolicyMetrics.WITH_ENTROPY else None,
            loss_mask=inputs.loss_mask,
            counts=spread(sums.counts, inputs.token_documents),
            num_documents=inputs.num_documents,
            is_sequence_level=is_sequence,
            cp_rank=settings.cp_group.rank(),
        )
    num_nonfinite = sums.num_nonfinite.to(torch.int32)
    return LossParts(loss, policy_loss, kl_loss, entropy_sum, coefficients, entropy_coefficients, num_nonfinite, statistics)


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
        kl_loss = _masked_sum(weights * k3, inputs.loss_mask)
        kl_coefficients = torch.where(inputs.loss_mask, settings.kl_coefficient * weights * derivative, 0.0)
    if settings.entropy_coefficient:
        entropy_sum = _masked_sum(weights * entropy, inputs.loss_mask)
        entropy_coefficients = torch.where(inputs.loss_mask, -settings.entropy_coefficient * weights, 0.0)
    return kl_loss, kl_coefficients, entropy_sum, entropy_coefficients


def _values(entry, log_probs, old_log_probs, advantages, inputs: LossInputs, sums: DocumentSums, settings: LossSettings):
    """values [T] and derivative [T], 0 where masked."""
    clip = {"clip_ratio_low": settings.clip_ratio_low, "clip_ratio_high": settings.clip_ratio_high}
    if entry.surrogate is None:
        return entry.values(
            log_probs,
            old_log_probs,
            advantages,
            inputs.loss_mask,
            inputs.cu_seqlens,
            sums.counts,
            **clip,
            cp_group=settings.cp_group,
        )
    if entry.level == "token":
        values, derivative = entry.surrogate(log_probs - old_log_probs, advantages, **clip)
    else:
        values, derivative = (
            spread(part, inputs.token_documents) for part in entry.surrogate(_mean(sums, log_probs.dtype), advantages, **clip)
        )
    return torch.where(inputs.loss_mask, values, 0.0), torch.where(inputs.loss_mask, derivative, 0.0)


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


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:  # 0-d
    """In float64 and in one fixed order, so that reordering documents moves nothing that float32 can show."""
    return torch.where(mask, values, 0.0).sum(dtype=torch.float64).to(values.dtype)
