"""Corrects for the gap between the sampler's policy and the trainer's: by weights of tokens, and by tokens that are dropped.

    w_t = exp(old_log_prob_t - rollout_log_prob_t)                           level token
    w_i = exp(sum_t m_it (old_log_prob_t - rollout_log_prob_t) / m_i)        level sequence_mean, the geometric mean of w_t
    w_i = exp(sum_t m_it (old_log_prob_t - rollout_log_prob_t))              level sequence_sum, their product
    d_i = sum_t m_it (rollout_log_prob_t - log_prob_t) / m_i                 off-policy: dropped where A < 0 and d_i > delta

The weights multiply the policy term of a token as importance weights do. KL and entropy terms have no such factor. The counts that
weights are made from stay as they are. Exponents are bounded to +-20.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_rl.config import CorrectionLevel
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, all_reduce_sum
from megatron_rl.layout.packing import document_sums, spread
from megatron_rl.ops.ratios import bounded_exp
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.registries.corrections import CorrectionValue, get_correction


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction of one micro-batch of this rank."""

    weights: Tensor  # [T] the factor of each token's policy term; 0 where it is dropped or masked
    ratios: Tensor  # [T] w before the bounds; 1 where no ratio is computed
    is_kept: Tensor  # [T] bool; False where dropped, and where masked
    is_off_policy: Tensor  # [T] bool: dropped as a token of an off-policy sample
    is_low: Tensor  # [T] bool: w is below the lower bound
    is_high: Tensor  # [T] bool: w is above the upper bound

    def of(self, tokens: slice | Tensor) -> Correction:
        """Of these tokens of the micro-batch."""
        return Correction(*(getattr(self, field.name)[tokens] for field in fields(self)))


def sums_of_samples(
    settings: CorrectionSettings,
    *,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool, False on padding
    cu_seqlens: Tensor,  # [N + 1]
    cp_group: Group,
) -> dict[str, Tensor]:  # [N] float64 each
    """What a correction sums over the tokens of a sample, and "counts". Communication: one all-reduce of [N, k <= 3] over cp."""
    columns = {"counts": loss_mask}
    if settings.is_of_sequence:
        columns["old_to_rollout"] = old_log_probs - rollout_log_probs
    if settings.sequence_delta is not None:
        columns["rollout_to_trained"] = rollout_log_probs - log_probs
    stacked = torch.stack([torch.where(loss_mask, column, 0).double() for column in columns.values()], dim=-1)
    return dict(zip(columns, all_reduce_sum(document_sums(stacked, cu_seqlens), cp_group).unbind(-1), strict=True))


def correct(
    settings: CorrectionSettings,
    *,
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T]
    sums: dict[str, Tensor],  # sums_of_samples; not read unless settings.needs_sums
    loss_mask: Tensor,  # [T] bool
    documents: Tensor,  # [T] int64, N on padding
) -> Correction:
    """The correction from the sums. No communication, no synchronisation."""
    weights = ratios = torch.ones_like(old_log_probs)
    is_kept = torch.ones_like(loss_mask)
    if settings.is_of_sequence:
        of_samples = _sample_ratios(settings, sums)
        parts = (of_samples, *_bounded(settings, of_samples))
        ratios, weights, is_kept = (spread(part, documents) for part in parts)
        weigh_tokens = get_correction(settings.kind).weigh_tokens
        if weigh_tokens is not None:
            of_tokens = bounded_exp(old_log_probs - rollout_log_probs)
            weights = weights * _checked_weights(settings, weigh_tokens(of_tokens), of_tokens)
    elif settings.has_factor:
        ratios = bounded_exp(old_log_probs - rollout_log_probs)
        weights, is_kept = _bounded(settings, ratios)
    is_off_policy = torch.zeros_like(loss_mask)
    if settings.sequence_delta is not None:
        is_off_policy = loss_mask & (advantages < 0) & spread(_has_diverged(settings.sequence_delta, sums), documents)
    is_kept = is_kept & ~is_off_policy & loss_mask
    dtype = old_log_probs.dtype
    weights, ratios = torch.where(is_kept, weights, 0.0).to(dtype), torch.where(loss_mask, ratios, 1.0).to(dtype)
    low, high = settings.bounds
    return Correction(weights, ratios, is_kept, is_off_policy, is_low=ratios < low, is_high=ratios > high)


def _sample_ratios(settings: CorrectionSettings, sums: dict[str, Tensor]) -> Tensor:  # [N] float64
    log_ratio = sums["old_to_rollout"]
    if settings.level == CorrectionLevel.SEQUENCE_MEAN:
        log_ratio = log_ratio / sums["counts"].clamp(min=1)
    elif settings.level != CorrectionLevel.SEQUENCE_SUM:
        raise ConfigError(f"importance_correction_level={settings.level!r} has no formula for a sample")
    return bounded_exp(log_ratio)


def _has_diverged(sequence_delta: float, sums: dict[str, Tensor]) -> Tensor:  # [N] bool
    divergence: Tensor = sums["rollout_to_trained"] / sums["counts"].clamp(min=1)
    return divergence > sequence_delta


def _bounded(settings: CorrectionSettings, ratios: Tensor) -> tuple[Tensor, Tensor]:  # weights [*], is_kept [*] bool
    """Raises DataError where the correction returns another shape or dtype."""
    returned = get_correction(settings.kind).function(ratios, *settings.bounds)
    result = returned if isinstance(returned, CorrectionValue) else CorrectionValue(returned)
    is_kept = torch.ones_like(ratios, dtype=torch.bool) if result.is_kept is None else result.is_kept
    if is_kept.shape != ratios.shape or is_kept.dtype != torch.bool:
        raise DataError(
            f"importance correction {settings.kind!r} returned {tuple(is_kept.shape)} {is_kept.dtype} as is_kept: it must be "
            f"{tuple(ratios.shape)} torch.bool"
        )
    return _checked_weights(settings, result.weights, ratios), is_kept


def _checked_weights(settings: CorrectionSettings, weights: object, ratios: Tensor) -> Tensor:
    if isinstance(weights, Tensor) and weights.shape == ratios.shape and weights.dtype == ratios.dtype:
        return weights
    found = f"{tuple(weights.shape)} {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
    raise DataError(
        f"importance correction {settings.kind!r} returned {found} as its weights: they must be {tuple(ratios.shape)} "
        f"{ratios.dtype}"
    )
