"""From log-probabilities to a rank's part of the step's loss and its derivative; nothing here is differentiated or reads a flag.

The logits path and, later, the fused head call the same function: it sees [T] and [N] tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.errors import DataError
from megatron_rl.layout.collectives import all_reduce_sum
from megatron_rl.layout.groups import Group
from megatron_rl.layout.packing import document_sums, spread
from megatron_rl.loss_hub import PolicyLossEntry
from megatron_rl.losses.gspo import mean_log_ratio
from megatron_rl.losses.inputs import LossInputs
from megatron_rl.losses.surrogate import bounded_exp, k3_estimate
from megatron_rl.metrics import PolicyStatistics, policy_statistics

# Relative standard deviation above which a sample's [T] advantages count as varying: float64 sums of equal numbers stay below 1e-7.
ADVANTAGE_VARIATION = 1e-5


@dataclass(frozen=True, slots=True)
class LossSettings:
    clip_ratio_low: float
    clip_ratio_high: float
    kl_coefficient: float
    entropy_coefficient: float
    metrics: str
    cp_group: Group


@dataclass(frozen=True, slots=True)
class LossParts:
    loss: Tensor  # 0-d, policy + kl_coefficient kl - entropy_coefficient entropy
    policy_loss: Tensor  # 0-d
    kl_loss: Tensor | None  # 0-d
    entropy: Tensor | None  # 0-d
    coefficients: Tensor  # [T] d loss / d log_probs
    entropy_coefficients: Tensor | None  # [T] d loss / d entropy
    num_nonfinite: Tensor  # [N] int32 over all cp ranks
    statistics: PolicyStatistics | None


@dataclass(frozen=True, slots=True)
class _DocumentSums:
    """Per-document sums over all cp ranks, [N] float64 each; None where nobody needs it."""

    num_nonfinite: Tensor
    counts: Tensor
    log_ratio: Tensor | None
    importance: Tensor | None
    advantages: Tensor | None  # one per document, from [T] input
    advantages_vary: Tensor | None  # [N] bool


@torch.no_grad()
def loss_parts(
    entry: PolicyLossEntry,
    log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    inputs: LossInputs,
    settings: LossSettings,
) -> LossParts:
    """loss = sum_t w_i m_t u_t value_t + kl_coefficient sum_t v_i m_t k3_t - entropy_coefficient sum_t v_i m_t H_t.

    Importance weights u: a token-level loss multiplies value and coefficient by u_t. At sequence level the value is shared, so
    the sample's weight becomes W_i = w_i sum_t m_t u_t and each token's coefficient (W_i / m_i) value'(s_i) s_i, never times u_t.

    Communication: one all-reduce over cp of [N, k], at cp size 1 none; k <= 4 (non-finite, log-ratio, count, importance) and two
    more where a sequence-level loss is given [T] advantages, which must then be shown equal over all cp ranks.
    Raises, on the CPU and after that all-reduce, so on all tp and cp ranks together: DataError for non-finite unmasked tokens and
    for advantages that vary inside a sample. On CUDA num_nonfinite tells, without a synchronisation.
    """
    is_sequence, dtype = entry.level == "sequence", log_probs.dtype
    old_log_probs = log_probs if inputs.old_log_probs is None else inputs.old_log_probs.to(dtype)
    advantages = inputs.advantages.to(dtype)
    token_advantages = spread(advantages, inputs.token_documents) if inputs.advantages_per == "sample" else advantages
    tensors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": token_advantages}
    if inputs.importance_weights is not None:
        tensors["importance_weights"] = inputs.importance_weights
    if settings.kl_coefficient:
        tensors["ref_log_probs"] = inputs.ref_log_probs
    sums = _sum_documents(entry, tensors, inputs, settings.cp_group)
    _raise_on_bad_data(sums, tensors, inputs)
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
    loss = policy_loss
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
            num_documents=inputs.cu_seqlens.numel() - 1,
            is_sequence_level=is_sequence,
            cp_rank=settings.cp_group.rank(),
        )
    num_nonfinite = sums.num_nonfinite.to(torch.int32)
    return LossParts(loss, policy_loss, kl_loss, entropy_sum, coefficients, entropy_coefficients, num_nonfinite, statistics)


def _weights(is_sequence: bool, inputs: LossInputs, sums: _DocumentSums, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


def _values(entry, log_probs, old_log_probs, advantages, inputs: LossInputs, sums: _DocumentSums, settings: LossSettings):
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


def _sum_documents(entry: PolicyLossEntry, tensors: dict[str, Tensor], inputs: LossInputs, cp_group: Group) -> _DocumentSums:
    """Packs what has to be known of whole documents into one [N, k] tensor and reduces it over cp once."""
    is_finite = torch.ones_like(inputs.loss_mask)
    for tensor in tensors.values():
        is_finite = is_finite & torch.isfinite(tensor)
    columns = {"num_nonfinite": inputs.loss_mask & ~is_finite}
    if inputs.token_counts is None:
        columns["counts"] = inputs.loss_mask
    if entry.level == "sequence":
        columns["log_ratio"] = tensors["log_probs"] - tensors["old_log_probs"]
        if inputs.importance_weights is not None:
            columns["importance"] = inputs.importance_weights
        if inputs.advantages_per == "token":
            columns["advantages"] = tensors["advantages"]
            columns["squared_advantages"] = tensors["advantages"].double().square()
    stacked = torch.stack([torch.where(inputs.loss_mask, column, 0).double() for column in columns.values()], dim=-1)
    reduced = all_reduce_sum(document_sums(stacked, inputs.cu_seqlens), cp_group)
    sums = dict(zip(columns, reduced.unbind(-1), strict=True))
    counts = sums["counts"] if inputs.token_counts is None else inputs.token_counts.double()
    mean_advantages = vary = None
    if "advantages" in sums:
        mean_advantages = sums["advantages"] / counts.clamp(min=1)
        mean_square = sums["squared_advantages"] / counts.clamp(min=1)
        vary = (mean_square - mean_advantages.square()) > ADVANTAGE_VARIATION**2 * mean_square
        # CUDA must not look: a varying document turns into a non-finite one, which stops the step before the optimiser.
        sums["num_nonfinite"] = sums["num_nonfinite"] + torch.where(vary, counts, 0.0)
    return _DocumentSums(sums["num_nonfinite"], counts, sums.get("log_ratio"), sums.get("importance"), mean_advantages, vary)


def _raise_on_bad_data(sums: _DocumentSums, tensors: dict[str, Tensor], inputs: LossInputs) -> None:
    if sums.num_nonfinite.is_cuda or not bool((sums.num_nonfinite > 0).any()):
        return
    if sums.advantages_vary is not None and bool(sums.advantages_vary.any()):
        document = int(sums.advantages_vary.nonzero()[0])
        raise DataError(
            f"advantages vary inside document {document}: a sequence-level loss takes one advantage per sample; average them in "
            "the rollout, or use a token-level loss (grpo)"
        )
    document = int((sums.num_nonfinite > 0).nonzero()[0])
    here = inputs.loss_mask & (inputs.token_documents == document)
    names = [name for name, tensor in tensors.items() if bool((here & ~torch.isfinite(tensor)).any())]
    where = f"in {', '.join(names)}" if names else "on another context-parallel rank"
    raise DataError(
        f"document {document} of the micro-batch has {int(sums.num_nonfinite[document])} unmasked tokens with a value that is not "
        f"finite, {where}; {int((sums.num_nonfinite > 0).sum())} documents are affected. A label outside the vocabulary gives "
        "-inf log_probs; mask the token or drop the sample"
    )


def _mean(sums: _DocumentSums, dtype: torch.dtype) -> Tensor:  # [N]
    return mean_log_ratio(sums.log_ratio, sums.counts, dtype)


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:  # 0-d
    """In float64 and in one fixed order, so that reordering documents moves nothing that float32 can show."""
    return torch.where(mask, values, 0.0).sum(dtype=torch.float64).to(values.dtype)
