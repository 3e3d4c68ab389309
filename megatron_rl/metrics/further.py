"""Defines the metrics of what a loss may be given: the inputs of a rollout, a correction, kept ids. Tables, and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.layout.groups import document_ids, spread
from megatron_rl.losses.corrections import Correction
from megatron_rl.losses.kl import k3
from megatron_rl.metrics.policy import NEUTRAL, Metric, Reduction, Weight, count, over_tokens, sample_mean, token_weights


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
class SupportValues:
    """The inputs of the metrics of kept ids, [T] each."""

    log_probs: Tensor  # over the kept ids
    sizes: Tensor  # ids that were kept


@dataclass(frozen=True, slots=True)
class DistillationValues:
    """The inputs of the metrics of a teacher of rows, [T] each."""

    divergences: Tensor
    teacher_mass: Tensor  # of its top K, or 1


def token_share(name: str, value: Callable[[Correction], Tensor]) -> Metric:
    """The share of the unmasked tokens."""
    return Metric(name, value, weight=Weight.TOKEN, normaliser="num_corrected_tokens", present_with="num_corrected_tokens")


def _shared(given: RolloutValues, values: Tensor | None, of: Callable[[Tensor], Tensor] = torch.Tensor.double) -> Tensor | None:
    """The sum of the samples' means."""
    return None if values is None else (torch.where(given.loss_mask, of(values), 0).double() * given.share).sum()


def _largest_staleness(given: RolloutValues) -> Tensor | None:
    if given.staleness is None or not given.staleness.numel():
        return None
    return torch.where(given.has_tokens, given.staleness.double(), NEUTRAL[Reduction.MAX]).max()


def _summed_staleness(given: RolloutValues) -> Tensor | None:
    return None if given.staleness is None else torch.where(given.has_tokens, given.staleness, 0).sum()


def _corrected(given: Correction) -> Tensor:
    return torch.ones_like(given.weights)


# Metrics of inputs that a rollout may give besides the loss's own. Staleness counts optimiser steps since the sample was sampled.
ROLLOUT_METRICS: tuple[Metric, ...] = (
    # Samples with an unmasked token: those with rollout_log_probs, and those whose sampler measured a kept mass.
    count("num_rollout_samples", lambda given: None if given.log_prob_difference is None else given.share.sum()),
    count("num_sampler_mass_samples", lambda given: None if given.kept_mass is None else given.share.sum()),
    sample_mean(
        "train_rollout_logprob_abs_diff",
        lambda given: _shared(given, given.log_prob_difference, torch.abs),
        "num_rollout_samples",
    ),
    sample_mean("train_rollout_logprob_diff", lambda given: _shared(given, given.log_prob_difference), "num_rollout_samples"),
    sample_mean(  # k3 of KL(rollout, train) on the rollout's samples
        "train_rollout_kl",
        lambda given: _shared(given, given.log_prob_difference, lambda d: k3(torch.zeros_like(d), d).value),
        "num_rollout_samples",
    ),
    sample_mean("sampler_mass", lambda given: _shared(given, given.kept_mass), "num_sampler_mass_samples"),
    # Samples with an unmasked token and a policy version.
    count("num_versioned_samples", lambda given: None if given.staleness is None else given.has_tokens.sum()),
    sample_mean("staleness", _summed_staleness, "num_versioned_samples"),
    Metric("max_staleness", _largest_staleness, Reduction.MAX, present_with="num_versioned_samples"),
    # Unmasked tokens that were checked for phantoms.
    count("num_compared_tokens", lambda given: None if given.is_phantom is None else given.loss_mask.sum()),
    Metric(
        "num_phantom_tokens",
        lambda given: None if given.is_phantom is None else given.is_phantom.sum(),
        present_with="num_compared_tokens",
    ),
)
# Metrics of an importance correction, where one is set.
CORRECTION_METRICS: tuple[Metric, ...] = (
    # Samples with an unmasked token, and unmasked tokens.
    count("num_corrected_samples", _corrected, Weight.SAMPLE_SHARE),
    count("num_corrected_tokens", _corrected),
    count("correction_weight_sum", lambda given: given.weights),
    count("correction_weight_squared_sum", lambda given: given.weights.double().square()),
    token_share("correction_kept_tokens", lambda given: given.is_kept),
    sample_mean("correction_off_policy", lambda given: given.is_off_policy, "num_corrected_samples"),
    sample_mean("correction_weight", lambda given: given.weights, "num_corrected_samples"),
    token_share("correction_at_low", lambda given: given.is_low),
    token_share("correction_at_high", lambda given: given.is_high),
    Metric(  # before the bounds
        "correction_largest_ratio", lambda given: given.ratios, Reduction.MAX, present_with="num_corrected_tokens"
    ),
)
CORRECTION_SAMPLE_SIZE = "correction_effective_sample_size"
# Metrics of the ids that the sampler kept, where they are given. First samples with an unmasked token.
SUPPORT_METRICS: tuple[Metric, ...] = (
    count("num_support_samples", lambda given: torch.ones_like(given.log_probs), Weight.SAMPLE_SHARE),
    sample_mean("kept_ids", lambda given: given.sizes, "num_support_samples"),
    Metric(  # unmasked tokens outside their own set
        "outside_support",
        lambda given: given.log_probs == -torch.inf,
        weight=Weight.TOKEN,
        present_with="num_support_samples",
    ),
)
# Metrics of a teacher of rows. First samples with an unmasked token.
DISTILLATION_METRICS: tuple[Metric, ...] = (
    count("num_distilled_samples", lambda given: torch.ones_like(given.divergences), Weight.SAMPLE_SHARE),
    sample_mean("distillation", lambda given: given.divergences, "num_distilled_samples"),
    sample_mean("teacher_mass", lambda given: given.teacher_mass, "num_distilled_samples"),
)
# By the name of their statistics in PolicyStatistics, in its order.
TABLES: dict[str, tuple[Metric, ...]] = {
    "rollout": ROLLOUT_METRICS,
    "correction": CORRECTION_METRICS,
    "support": SUPPORT_METRICS,
    "distillation": DISTILLATION_METRICS,
}
# An old log-probability of exactly 0 means probability 1. If the policy gives less than 1/2 at step 0, it was never measured.
PHANTOM_LOG_PROB = math.log(0.5)


def rollout_statistics(
    *,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    rollout_log_probs: Tensor | None,  # [T] from the sampling engine
    kept_mass: Tensor | None = None,  # [T] what its kept ids had of its softmax
    staleness: Tensor | None,  # [N] policy versions between sampling and training; of one of the ranks that share the documents
    counts_phantoms: bool,
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1], this rank's slices
    token_counts: Tensor,  # [N] unmasked tokens over all cp ranks
) -> Tensor:  # [len(ROLLOUT_METRICS)] float64
    """This rank's share of ROLLOUT_METRICS, from the inputs that are given. No communication, no synchronisation.

    train_rollout_* compare two engines on the same weights, so the trainer's side is old_log_probs, or log_probs on-policy. A
    phantom is a placeholder that was never measured. Staleness is summed over the ranks that give it.
    """
    difference = is_phantom = None
    inverse_counts = spread(1.0 / token_counts.clamp(min=1).double(), document_ids(cu_seqlens, loss_mask.numel()))
    share = torch.where(loss_mask, inverse_counts, 0.0)
    if rollout_log_probs is not None:
        trained = log_probs if old_log_probs is None else old_log_probs
        difference = trained.double() - rollout_log_probs.double()
    if counts_phantoms and old_log_probs is not None:
        is_phantom = loss_mask & (old_log_probs == 0) & (log_probs < PHANTOM_LOG_PROB)
    given = RolloutValues(difference, share, kept_mass, staleness, token_counts > 0, is_phantom, loss_mask)
    neutral = token_counts.new_zeros((), dtype=torch.float64)
    values = [(metric.value(given), NEUTRAL[metric.reduction]) for metric in ROLLOUT_METRICS]
    return torch.stack([neutral + none if value is None else value.double() for value, none in values])


def token_statistics(
    table: str,  # of TABLES
    given: Correction | SupportValues | DistillationValues,
    *,
    loss_mask: Tensor,  # [T] bool
    counts: Tensor,  # [T] unmasked tokens of the token's document over all cp ranks
) -> Tensor:  # [number of rows of the table] float64
    """This rank's share of the statistics that the given values make. No communication, no synchronisation."""
    rows = TABLES[table]
    return over_tokens(rows, [metric.value(given) for metric in rows], loss_mask, token_weights(loss_mask, counts))
