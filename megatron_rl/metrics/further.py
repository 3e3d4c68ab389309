"""Defines the metrics of what a loss may be given: the inputs of a rollout, a correction, kept ids. Tables, and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.corrections import Correction
from megatron_rl.errors import DataError
from megatron_rl.layout.packing import document_ids, spread
from megatron_rl.metrics.policy import NEUTRAL, Metric, Reduction, Weight, count, masked_sum, over_tokens, sample_mean
from megatron_rl.ops.ratios import k3_of_difference


@dataclass(frozen=True, slots=True)
class RolloutValues:
    """The inputs of the rollout metrics; None where the rollout did not give them."""

    log_prob_difference: Tensor | None  # [T] float64, trained - sampled
    share: Tensor  # [T] float64, 1 / m_i of unmasked tokens, 0 of masked ones
    kept_mass: Tensor | None  # [T] what the sampler's kept ids had of its softmax
    staleness: Tensor | None  # [N] policy versions between sampling and training
    has_tokens: Tensor  # [N] bool
    is_phantom: Tensor | None  # [T] bool
    loss_mask: Tensor  # [T] bool


@dataclass(frozen=True, slots=True)
class CorrectionValues:
    """The inputs of the correction metrics."""

    correction: Correction
    advantages: Tensor  # [T]


@dataclass(frozen=True, slots=True)
class SupportValues:
    """The inputs of the metrics of kept ids, [T] each."""

    log_probs: Tensor  # over the kept ids
    sizes: Tensor  # ids that were kept
    log_kept_mass: Tensor | None  # None: nothing reads the whole vocabulary


def of_tokens(
    name: str,
    value: Callable[[CorrectionValues], Tensor | None],
    normaliser: str = "num_corrected_tokens",
    *,
    formula: str,
    healthy: str,
) -> Metric:
    """The share of tokens, of those that the normaliser counts."""
    return Metric(
        name=name,
        value=value,
        weight=Weight.TOKEN,
        normaliser=normaliser,
        present_with=normaliser,
        unit="0 to 1",
        formula=formula,
        healthy=healthy,
    )


def _shared(given: RolloutValues, values: Tensor | None, of: Callable[[Tensor], Tensor] = torch.Tensor.double) -> Tensor | None:
    """The sum of the samples' means."""
    return None if values is None else masked_sum(of(values), given.loss_mask, given.share)


def _largest_staleness(given: RolloutValues) -> Tensor | None:
    if given.staleness is None or not given.staleness.numel():
        return None
    return torch.where(given.has_tokens, given.staleness.double(), NEUTRAL[Reduction.MAX]).max()


# Metrics of inputs that a rollout may give besides the loss's own.
ROLLOUT_METRICS: tuple[Metric, ...] = (
    # Samples with an unmasked token: those with rollout_log_probs, and those whose sampler measured a kept mass.
    count("num_rollout_samples", lambda given: None if given.log_prob_difference is None else given.share.sum()),
    count("num_sampler_mass_samples", lambda given: None if given.kept_mass is None else given.share.sum()),
    sample_mean(
        "train_rollout_logprob_abs_diff",
        lambda given: _shared(given, given.log_prob_difference, torch.abs),
        normaliser="num_rollout_samples",
        unit="nats per token",
        formula="mean of abs(d_t), d_t = old_log_probs_t (on-policy log_probs_t) - rollout_log_probs_t: two engines, equal weights",
        healthy="small and constant; it falls with equal head precision (`--fp32-lm-head`); if it rises, the engines drift apart",
    ),
    sample_mean(
        "train_rollout_logprob_diff",
        lambda given: _shared(given, given.log_prob_difference),
        normaliser="num_rollout_samples",
        unit="nats per token",
        formula="mean of d_t",
        healthy="near 0, about -1/2 of the mean of d^2; ln M where the sampler keeps tokens of the mass M alone",
    ),
    sample_mean(
        "train_rollout_kl",
        lambda given: _shared(given, given.log_prob_difference, lambda d: k3_of_difference(d)[0]),
        normaliser="num_rollout_samples",
        unit="nats per token",
        formula="mean of exp(d_t) - 1 - d_t: k3 of KL(rollout, train) on the rollout's samples",
        healthy="about half the mean of d^2, constant",
    ),
    sample_mean(
        "sampler_mass",
        lambda given: _shared(given, given.kept_mass),
        normaliser="num_sampler_mass_samples",
        unit="0 to 1",
        formula="mean of M by the sampler's softmax: over the vocabulary the mean ratio would be",
        healthy="as `kept_mass`",
    ),
    # Samples with an unmasked token and a policy version.
    count("num_versioned_samples", lambda given: None if given.staleness is None else given.has_tokens.sum()),
    sample_mean(
        "staleness",
        lambda given: None if given.staleness is None else torch.where(given.has_tokens, given.staleness, 0).sum(),
        normaliser="num_versioned_samples",
        unit="optimiser steps",
        formula="mean of v - v_i: v the optimiser steps done, v_i those done when sample i was sampled",
        healthy="0, 1, ... within a rollout; below 0: the versions in the file do not count the steps of this run",
    ),
    Metric(
        name="max_staleness",
        value=_largest_staleness,
        reduction=Reduction.MAX,
        present_with="num_versioned_samples",
        unit="optimiser steps",
        formula="the largest v - v_i",
        healthy="bounded",
    ),
    # Unmasked tokens that were checked for phantoms.
    count("num_compared_tokens", lambda given: None if given.is_phantom is None else given.loss_mask.sum()),
    Metric(
        name="num_phantom_tokens",
        value=lambda given: None if given.is_phantom is None else given.is_phantom.sum(),
        present_with="num_compared_tokens",
        unit="count",
        formula="first step of a run: unmasked tokens with a given old log-probability of exactly 0 and a probability below 1/2",
        healthy="0",
    ),
)
# Metrics of an importance correction, where one is set.
CORRECTION_METRICS: tuple[Metric, ...] = (
    # Samples with an unmasked token, and unmasked tokens: all, and by the sign of the advantage.
    count("num_corrected_samples", lambda given: torch.ones_like(given.correction.weights), Weight.SAMPLE_SHARE),
    count("num_corrected_tokens", lambda given: torch.ones_like(given.correction.weights)),
    count("num_positive_tokens", lambda given: given.advantages > 0),
    count("num_negative_tokens", lambda given: given.advantages < 0),
    count("correction_weight_sum", lambda given: given.correction.weights),
    count("correction_weight_squared_sum", lambda given: given.correction.weights.double().square()),
    of_tokens(
        "correction_kept_tokens",
        lambda given: given.correction.is_kept,
        formula="share of unmasked tokens that the correction keeps",
        healthy="above 0.9; under 0.5 most of the rollout is thrown away",
    ),
    sample_mean(
        "correction_kept_samples",
        lambda given: given.correction.is_kept,
        normaliser="num_corrected_samples",
        unit="0 to 1",
        formula="mean over samples of the share of its tokens that is kept: for a criterion of the sample the share of samples",
        healthy="near `correction_kept_tokens`; if it is larger, long samples are dropped more often",
    ),
    of_tokens(
        "correction_kept_positive",
        lambda given: given.correction.is_kept & (given.advantages > 0),
        "num_positive_tokens",
        formula="share of the tokens with A > 0 that is kept",
        healthy="near `correction_kept_negative`; with `--off-policy-sequence-delta` alone 1",
    ),
    of_tokens(
        "correction_kept_negative",
        lambda given: given.correction.is_kept & (given.advantages < 0),
        "num_negative_tokens",
        formula="share of the tokens with A < 0 that is kept",
        healthy="near `correction_kept_positive`",
    ),
    sample_mean(
        "correction_off_policy",
        lambda given: given.correction.is_off_policy,
        normaliser="num_corrected_samples",
        unit="0 to 1",
        formula="mean over samples of the share of its tokens that `--off-policy-sequence-delta` drops",
        healthy="a few per cent; always 0: the delta never acts",
    ),
    sample_mean(
        "correction_weight",
        lambda given: given.correction.weights,
        normaliser="num_corrected_samples",
        unit="ratio",
        formula="mean over samples of the mean factor of its tokens, 0 where dropped",
        healthy="near 1; the policy term is that much weaker or stronger",
    ),
    of_tokens(
        "correction_at_low",
        lambda given: given.correction.is_low,
        formula="share of unmasked tokens with w below the lower bound",
        healthy="a few per cent",
    ),
    of_tokens(
        "correction_at_high",
        lambda given: given.correction.is_high,
        formula="share of unmasked tokens with w above the upper bound",
        healthy="a few per cent",
    ),
    Metric(
        name="correction_largest_weight",
        value=lambda given: given.correction.weights,
        reduction=Reduction.MAX,
        present_with="num_corrected_tokens",
        unit="ratio",
        formula="largest factor of a token",
        healthy="at the upper bound of `tis`, or below",
    ),
    Metric(
        name="correction_largest_ratio",
        value=lambda given: given.correction.ratios,
        reduction=Reduction.MAX,
        present_with="num_corrected_tokens",
        unit="ratio",
        formula="largest w before the bounds",
        healthy="constant; if it rises, the engines drift apart",
    ),
)
CORRECTION_SAMPLE_SIZE = Metric(
    name="correction_effective_sample_size",
    value=lambda given: None,
    normaliser="num_corrected_tokens",
    unit="0 to 1",
    formula="(sum u)^2 / (n sum u^2) of the factors u of n tokens",
    healthy="above 0.9; under 0.1 a tenth of the tokens decides the step",
)
# Metrics of the ids that the sampler kept, where they are given. First samples with an unmasked token: all, those with a kept mass.
SUPPORT_METRICS: tuple[Metric, ...] = (
    count("num_support_samples", lambda given: torch.ones_like(given.log_probs), Weight.SAMPLE_SHARE),
    count("num_mass_samples", lambda given: None if given.log_kept_mass is None else given.sizes > -1, Weight.SAMPLE_SHARE),
    sample_mean(
        "kept_mass",
        lambda given: None if given.log_kept_mass is None else given.log_kept_mass.exp(),
        normaliser="num_mass_samples",
        unit="0 to 1",
        formula="mean of M, the policy's probability of the kept ids, where something reads the vocabulary",
        healthy="the sampler's top-p, or above",
    ),
    sample_mean(
        "kept_ids",
        lambda given: given.sizes,
        normaliser="num_support_samples",
        unit="ids",
        formula="mean of the number of kept ids",
        healthy="falls with the entropy",
    ),
    Metric(
        name="outside_support",
        value=lambda given: given.log_probs == -torch.inf,
        weight=Weight.TOKEN,
        present_with="num_support_samples",
        unit="count",
        formula="unmasked tokens outside their own set",
        healthy="0; one ends the step",
    ),
)
ROLLOUT_STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in ROLLOUT_METRICS}
CORRECTION_STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in CORRECTION_METRICS}
SUPPORT_STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in SUPPORT_METRICS}
# An old log-probability of exactly 0 means probability 1. If the policy gives less than 1/2 at step 0, it was never measured.
PHANTOM_LOG_PROB = math.log(0.5)


def rollout_statistics(
    *,
    log_probs: Tensor | None,  # [T]; None only where nothing below needs them
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    rollout_log_probs: Tensor | None,  # [T] from the sampling engine
    kept_mass: Tensor | None = None,  # [T] what its kept ids had of its softmax
    staleness: Tensor | None,  # [N] policy versions between sampling and training; of one of the ranks that share the documents
    counts_phantoms: bool,
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1], this rank's slices
    token_counts: Tensor,  # [N] unmasked tokens over all cp ranks
) -> Tensor:  # [len(ROLLOUT_STATISTICS)] float64
    """This rank's share of ROLLOUT_STATISTICS, from the inputs that are given. No communication, no synchronisation.

    train_rollout_* compare two engines on the same weights, so the trainer's side is old_log_probs, or log_probs on-policy. A
    phantom is a placeholder that was never measured. Staleness is summed over the ranks that give it.
    Raises DataError where a statistic needs log_probs and they are None.
    """
    difference = is_phantom = None
    of_token = spread(1.0 / token_counts.clamp(min=1).double(), document_ids(cu_seqlens, loss_mask.numel()))
    share = torch.where(loss_mask, of_token, 0.0)
    if rollout_log_probs is not None:
        trained = _needed(log_probs) if old_log_probs is None else old_log_probs
        difference = trained.double() - rollout_log_probs.double()
    if counts_phantoms and old_log_probs is not None:
        is_phantom = loss_mask & (old_log_probs == 0) & (_needed(log_probs) < PHANTOM_LOG_PROB)
    given = RolloutValues(difference, share, kept_mass, staleness, token_counts > 0, is_phantom, loss_mask)
    neutral = token_counts.new_zeros((), dtype=torch.float64)
    values = [(metric.value(given), NEUTRAL[metric.reduction]) for metric in ROLLOUT_METRICS]
    return torch.stack([neutral + none if value is None else value.double() for value, none in values])


def _needed(log_probs: Tensor | None) -> Tensor:
    if log_probs is None:
        raise DataError("these rollout statistics need the policy's log_probs: call the loss with return_log_probs=True")
    return log_probs


def token_statistics(
    given: CorrectionValues | SupportValues,
    *,
    loss_mask: Tensor,  # [T] bool
    counts: Tensor,  # [T] unmasked tokens of the token's document over all cp ranks
) -> Tensor:  # [len(CORRECTION_STATISTICS)] or [len(SUPPORT_STATISTICS)] float64
    """This rank's share of the statistics that the given values make. No communication, no synchronisation."""
    rows = CORRECTION_METRICS if isinstance(given, CorrectionValues) else SUPPORT_METRICS
    share = torch.where(loss_mask, 1.0 / counts.clamp(min=1).double(), 0.0)
    weights = {Weight.SAMPLE_SHARE: share, Weight.TOKEN: loss_mask.double()}
    return torch.stack([over_tokens(metric, metric.value(given), loss_mask, weights[metric.weight]) for metric in rows])
