"""Corrects for the gap between the sampler's policy and the trainer's: by weights of tokens, and by tokens that are dropped.

    w_t = exp(old_log_prob_t - rollout_log_prob_t)                           level token
    w_i = exp(sum_t m_it (old_log_prob_t - rollout_log_prob_t) / m_i)        level sequence_mean, the geometric mean of w_t
    w_i = exp(sum_t m_it (old_log_prob_t - rollout_log_prob_t))              level sequence_sum, their product
    d_i = sum_t m_it (rollout_log_prob_t - log_prob_t) / m_i                 off-policy: dropped where A < 0 and d_i > delta

The weights multiply the policy term of a token as importance weights do. KL and entropy terms have no such factor, and the counts
that weights are made from stay as they are. Exponents are bounded to +-20.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.config import CorrectionLevel, CorrectionSettings, ImportanceCorrection
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE, Group, all_reduce_sum
from megatron_rl.layout.packing import document_ids, document_sums, spread
from megatron_rl.metrics import CorrectionValues, correction_statistics
from megatron_rl.ops.ratios import bounded_exp


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction of one micro-batch of this rank."""

    weights: Tensor  # [T] the factor of each token's policy term; 0 where it is dropped or masked
    ratios: Tensor  # [T] w before the bounds; 1 where no ratio is computed
    is_kept: Tensor  # [T] bool; False where dropped, and where masked
    is_off_policy: Tensor  # [T] bool: dropped as a token of an off-policy sample
    is_low: Tensor  # [T] bool: w is below the lower bound
    is_high: Tensor  # [T] bool: w is above the upper bound
    statistics: Tensor | None = None  # [len(CORRECTION_STATISTICS)], this rank's share; only of importance_correction

    def values(self, advantages: Tensor) -> CorrectionValues:  # [T]
        """The inputs of the correction metrics."""
        return CorrectionValues(
            *(self.weights, self.ratios, self.is_kept, self.is_off_policy, self.is_low, self.is_high), advantages
        )


def importance_correction(
    settings: CorrectionSettings,
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1]
    *,
    log_probs: Tensor | None = None,  # [T]
    advantages: Tensor | None = None,  # [T]
    cp_group: Group = SINGLE,
) -> Correction:
    """The correction of samples whose log-probabilities are all known: for a loop of one's own, and to count what is kept.

    policy_loss and linear_policy_loss compute the same inside, with `correction=settings`; then do not pass these weights too.

    Args:
        old_log_probs: of the trainer's policy when it took the rollout, in nats.
        rollout_log_probs: of the engine that sampled, in nats.
        cu_seqlens: bounds of this rank's slices of the samples.
        log_probs, advantages: of the policy in training, and the advantage of each token; only sequence_delta needs them.
    Returns: the correction, with its statistics: metrics.CORRECTION_METRICS are made from their sum over micro-batches and ranks.
    Communication: one all-reduce of [N, k <= 3] over cp; none at size 1.
    Raises: ConfigError for settings that do not fit; DataError for wrong shapes and dtypes and, on the CPU, for bounds that are
        none and for unmasked values that are not finite.
    """
    problems = list(settings.problems())
    if problems:
        raise ConfigError(problems)
    if settings.sequence_delta is not None and (log_probs is None or advantages is None):
        raise ConfigError("off_policy_sequence_delta needs log_probs [T] and advantages [T]: pass them")
    vectors = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs, "loss_mask": loss_mask}
    vectors |= {name: v for name, v in (("log_probs", log_probs), ("advantages", advantages)) if v is not None}
    _check_bounds(cu_seqlens, loss_mask.numel())
    is_live = loss_mask.bool() & (document_ids(cu_seqlens, loss_mask.numel()) < cu_seqlens.numel() - 1)
    for name, vector in vectors.items():
        if vector.shape != loss_mask.shape:
            raise DataError(f"{name} must be [T={loss_mask.numel()}], got {tuple(vector.shape)}")
        if name != "loss_mask" and vector.dtype not in (torch.float32, torch.float64):
            raise DataError(f"{name} is {vector.dtype}: a ratio of probabilities needs float32 or float64; convert it")
        if not vector.is_cuda and bool((is_live & ~torch.isfinite(vector)).any()):
            raise DataError(f"{name} has unmasked values that are not finite: mask those tokens or drop the samples")
    correction = correct_known(
        *(settings, old_log_probs, rollout_log_probs, is_live, cu_seqlens),
        log_probs=log_probs,
        advantages=advantages,
        cp_group=cp_group,
    )
    counts = spread(all_reduce_sum(document_sums(is_live, cu_seqlens), cp_group), document_ids(cu_seqlens, loss_mask.numel()))
    given = correction.values(torch.zeros_like(old_log_probs) if advantages is None else advantages)
    return replace(correction, statistics=correction_statistics(given, loss_mask=is_live, counts=counts))


def _check_bounds(cu_seqlens: Tensor, num_tokens: int) -> None:
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel() or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise DataError(f"cu_seqlens must be [N + 1] int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}")
    if cu_seqlens.is_cuda:  # looking would synchronise
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > num_tokens:
        raise DataError(f"cu_seqlens {bounds} must begin with 0, not decrease and end at or before the {num_tokens} tokens")


def correct_known(
    settings: CorrectionSettings,
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool, False on padding
    cu_seqlens: Tensor,  # [N + 1]
    *,
    log_probs: Tensor | None = None,  # [T]
    advantages: Tensor | None = None,  # [T]
    cp_group: Group,
) -> Correction:
    """importance_correction without its checks, which may raise on one of several cp ranks, and without statistics.

    Communication: one all-reduce of [N, k <= 3] over cp for criteria of a sample; none at level token and at size 1.
    """
    trained = old_log_probs if log_probs is None else log_probs
    columns = {"counts": loss_mask, **correction_columns(settings, trained, old_log_probs, rollout_log_probs)}
    sums: dict[str, Tensor] = {}
    if settings.needs_sums:
        stacked = torch.stack([torch.where(loss_mask, column, 0).double() for column in columns.values()], dim=-1)
        reduced = all_reduce_sum(document_sums(stacked, cu_seqlens), cp_group)
        sums = dict(zip(columns, reduced.unbind(-1), strict=True))
    return correct(
        settings,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=torch.zeros_like(old_log_probs) if advantages is None else advantages,
        sums=sums,
        loss_mask=loss_mask,
        documents=document_ids(cu_seqlens, loss_mask.numel()),
    )


def correction_columns(
    settings: CorrectionSettings,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
) -> dict[str, Tensor]:  # [T] each
    """What the criteria of a sample sum over its tokens. Its caller sums them, and over cp, together with sums of its own."""
    columns = {"old_to_rollout": old_log_probs - rollout_log_probs, "rollout_to_trained": rollout_log_probs - log_probs}
    return {name: columns[name] for name in settings.columns}


def token_weights_of(settings: CorrectionSettings, old_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:  # [T]
    """The factor of each token at level token, which needs no sum; ones at other levels."""
    if settings.kind == ImportanceCorrection.NONE or settings.is_of_sequence:
        return torch.ones_like(old_log_probs)
    weights, _ = _bounded(settings, bounded_exp(old_log_probs - rollout_log_probs))
    return weights


def sample_weights_of(
    settings: CorrectionSettings,
    sums: dict[str, Tensor],  # [N] each, over all cp ranks; with "counts"
    advantages: Tensor,  # [N]
) -> Tensor:  # [N] float64
    """The factor that all tokens of a sample share, and a sequence-level loss has for its sample."""
    factor = torch.ones_like(sums["counts"])
    if settings.is_of_sequence:
        factor, _ = _bounded(settings, _sample_ratios(settings, sums))
    if settings.sequence_delta is not None:
        factor = torch.where((advantages < 0) & _has_diverged(settings.sequence_delta, sums), 0.0, factor)
    return factor


def correct(
    settings: CorrectionSettings,
    *,
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T]
    sums: dict[str, Tensor],  # [N] each, over all cp ranks: correction_columns and "counts"; not read unless needs_sums
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
    elif settings.kind != ImportanceCorrection.NONE:
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
    return bounded_exp(log_ratio)


def _has_diverged(sequence_delta: float, sums: dict[str, Tensor]) -> Tensor:  # [N] bool
    divergence: Tensor = sums["rollout_to_trained"] / sums["counts"].clamp(min=1)
    return divergence > sequence_delta


def _bounded(settings: CorrectionSettings, ratios: Tensor) -> tuple[Tensor, Tensor]:  # weights [*], is_kept [*] bool
    low, high = settings.bounds
    if settings.kind == ImportanceCorrection.TIS:
        return ratios.clamp(low, high), torch.ones_like(ratios, dtype=torch.bool)
    is_kept = (ratios >= low) & (ratios <= high)
    weights = ratios if settings.kind == ImportanceCorrection.ICEPOP else torch.ones_like(ratios)
    return torch.where(is_kept, weights, 0.0), is_kept
