"""Defines the metrics of a step, each as a row of a table, and computes the statistics from which they are made.

A statistic is a sum, a minimum or a maximum over tokens. It is combined over micro-batches, cp and dp ranks in any order. The
division by the row's normaliser comes last, once, so that no mean is taken of means. Means are over the samples with at least one
unmasked token, with equal weight, so that a healthy step 0 has ratio 1 under any mask. docs/metrics.md is written from these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatron_rl.corrections import Correction
from megatron_rl.errors import DataError
from megatron_rl.layout.packing import document_ids, spread
from megatron_rl.ops.ratios import k3_estimate


class Reduction(StrEnum):
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Weight(StrEnum):
    """What a token's value is multiplied by before it is summed."""

    SAMPLE_SHARE = "1 / m_i"
    TOKEN = "1"
    RATIO = "1, or 1 / m_i where the sample has one ratio"


# The value that a rank or micro-batch without tokens contributes.
NEUTRAL = {Reduction.SUM: 0.0, Reduction.MIN: float("inf"), Reduction.MAX: float("-inf")}


@dataclass(frozen=True, slots=True)
class TokenValues:
    """The inputs of the policy metrics, [T] each. Values of masked tokens are left out afterwards."""

    log_probs: Tensor
    old_log_probs: Tensor
    ratios: Tensor  # the importance ratio of the loss: of the token, or of its sample
    is_clipped: Tensor  # bool, from the loss
    advantages: Tensor
    entropy: Tensor | None  # None: not computed


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A row: the statistic `name`, and the metric `policy/<name>` that is made from it."""

    name: str
    value: Callable[..., Tensor | None]
    """TokenValues -> [T], or RolloutValues -> the statistic of this rank, 0-d. None: its inputs are missing."""
    reduction: Reduction = Reduction.SUM
    weight: Weight = Weight.SAMPLE_SHARE
    """The weight of each token in a sum."""
    normaliser: str | None = None
    """The statistic that it is divided by, once, at the end."""
    present_with: str | None = None
    """A count. Where it is 0 the step had no such input, and the metric is left out."""
    is_reported: bool = True
    """False: it is no metric; other rows are divided by it."""
    unit: str = ""
    formula: str = ""
    healthy: str = ""
    """What a healthy run shows."""


def sample_mean(
    name: str,
    value: Callable[..., Tensor | None],
    *,
    normaliser: str = "num_samples",
    unit: str,
    formula: str,
    healthy: str,
) -> Metric:
    """The mean over samples of the mean over a sample's tokens."""
    present_with = None if normaliser == "num_samples" else normaliser
    return Metric(
        name=name, value=value, normaliser=normaliser, present_with=present_with, unit=unit, formula=formula, healthy=healthy
    )


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


def count(name: str, value: Callable[..., Tensor | None], weight: Weight = Weight.TOKEN) -> Metric:
    """A statistic that other rows are divided by."""
    return Metric(name=name, value=value, weight=weight, is_reported=False)


def _shared(given: RolloutValues, values: Tensor | None, of: Callable[[Tensor], Tensor] = torch.Tensor.double) -> Tensor | None:
    """The sum of the samples' means."""
    return None if values is None else _masked(of(values), given.loss_mask, given.share)


def _largest_staleness(given: RolloutValues) -> Tensor | None:
    if given.staleness is None or not given.staleness.numel():
        return None
    return torch.where(given.has_tokens, given.staleness.double(), NEUTRAL[Reduction.MAX]).max()


# The rows that metric_sums_kernel of losses/reduce_triton.py computes too. Its columns are in this order.
KERNEL_METRICS: tuple[Metric, ...] = (
    Metric(
        name="num_documents",
        value=lambda tokens: None,  # policy_statistics fills it in: it counts documents, not tokens
        unit="count",
        formula="documents that the loss saw, fully masked ones included",
        healthy="`num_samples`",
    ),
    # Documents with at least one unmasked token.
    count("num_samples", lambda tokens: torch.ones_like(tokens.log_probs), Weight.SAMPLE_SHARE),
    Metric(
        name="num_tokens",
        value=lambda tokens: torch.ones_like(tokens.log_probs),
        weight=Weight.TOKEN,
        unit="count",
        formula="unmasked tokens that the loss saw",
        healthy="`num_tokens`",
    ),
    # Tokens for a token-level loss, samples for a sequence-level one.
    count("num_ratios", lambda tokens: torch.ones_like(tokens.log_probs), Weight.RATIO),
    Metric(
        name="ratio_new_old_sum",
        value=lambda tokens: tokens.ratios,
        weight=Weight.RATIO,
        unit="ratio",
        formula="sum of rho_t over tokens, of s_i over samples",
        healthy="the number of tokens (samples) at a first step",
    ),
    Metric(
        name="ratio_new_old_squared_sum",
        value=lambda tokens: tokens.ratios.double().square(),
        weight=Weight.RATIO,
        unit="ratio",
        formula="sum of rho_t^2 over tokens, of s_i^2 over samples",
        healthy="the number of tokens (samples) at a first step",
    ),
    sample_mean(
        "old_logprobs",
        lambda tokens: tokens.old_log_probs,
        unit="nats",
        formula="mean of the old log-probability of the token taken; of dppo the rollout's",
        healthy="equal to the new one at a first step",
    ),
    sample_mean(
        "new_logprobs",
        lambda tokens: tokens.log_probs,
        unit="nats",
        formula="mean of the policy's log-probability of the token taken",
        healthy="goes towards 0 when the policy becomes sure",
    ),
    sample_mean(
        "ratio_new_old",
        lambda tokens: tokens.ratios,
        unit="ratio",
        formula="mean of rho_t (token level), s_i (sequence level)",
        healthy="1 at a first step, to 1e-5 where trainer and sampler are one engine; near 1 later",
    ),
    sample_mean(
        "kl_new_old",
        lambda tokens: k3_estimate(tokens.old_log_probs, tokens.log_probs)[0],
        unit="nats per token",
        formula="mean of rho_t - 1 - ln rho_t, for GSPO too: KL(old, new) estimated token by token on the old policy's samples; "
        "of dppo KL(rollout, new)",
        healthy="0 at a first step; later 1e-1 falling to 1e-4",
    ),
    sample_mean(
        "clipped_ratio_fraction",
        lambda tokens: tokens.is_clipped,
        unit="0 to 1",
        formula="mean of [the loss says that the token is clipped]; for GRPO and GSPO: the derivative is 0 and A is not, so the "
        "clip keeps the token from learning",
        healthy="0 at a first step; later a few per cent with GRPO, half and more with GSPO at its published clip",
    ),
    sample_mean(
        "clipped_low",
        lambda tokens: tokens.is_clipped & (tokens.advantages < 0),
        unit="0 to 1",
        formula="its part with A < 0",
        healthy="above 0; if it is 0 and `clipped_high` is not, the clip never acts on this side",
    ),
    sample_mean(
        "clipped_high",
        lambda tokens: tokens.is_clipped & (tokens.advantages > 0),
        unit="0 to 1",
        formula="its part with A > 0",
        healthy="as `clipped_low`",
    ),
    sample_mean(
        "advantage",
        lambda tokens: tokens.advantages,
        unit="reward",
        formula="mean of A",
        healthy="0 with group-relative advantages and whole groups",
    ),
    sample_mean(
        "entropy",
        lambda tokens: tokens.entropy,
        unit="nats",
        formula="with `with_entropy`: mean of -sum_v p_v ln p_v over the whole vocabulary, padding left out",
        healthy="falls slowly; 0 early in a run means that sampling has collapsed",
    ),
    Metric(
        name="max_advantage",
        value=lambda tokens: tokens.advantages,
        reduction=Reduction.MAX,
        unit="reward",
        formula="largest A of an unmasked token",
        healthy="above 0; 0 if all samples of each group have the same reward",
    ),
    Metric(
        name="min_advantage",
        value=lambda tokens: tokens.advantages,
        reduction=Reduction.MIN,
        unit="reward",
        formula="smallest A of an unmasked token",
        healthy="below 0",
    ),
)
# A row that is no part of KERNEL_METRICS is computed in torch, beside the kernels too.
METRICS: tuple[Metric, ...] = KERNEL_METRICS
EFFECTIVE_SAMPLE_SIZE = Metric(  # made from three statistics at the end
    name="effective_sample_size",
    value=lambda tokens: None,
    normaliser="num_ratios",
    unit="0 to 1",
    formula="(sum r)^2 / (n sum r^2), n tokens for GRPO, samples for GSPO",
    healthy="1 at a first step; later above 0.9 but for the first few rollouts",
)
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
        lambda given: _shared(given, given.log_prob_difference, lambda d: k3_estimate(torch.zeros_like(d), d)[0]),
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
CORRECTION_STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in CORRECTION_METRICS}
SUPPORT_STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in SUPPORT_METRICS}
STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in METRICS}
NUM_DOCUMENTS = list(STATISTICS).index("num_documents")
ROLLOUT_STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in ROLLOUT_METRICS}
# An old log-probability of exactly 0 means probability 1. If the policy gives less than 1/2 at step 0, it was never measured.
PHANTOM_LOG_PROB = math.log(0.5)


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """The statistics of one micro-batch, rank or step."""

    values: Tensor  # [len(STATISTICS)] float64, in the order of STATISTICS
    has_entropy: bool
    rollout: Tensor | None = None  # [len(ROLLOUT_STATISTICS)] float64; None: the rollout gave no such input
    correction: Tensor | None = None  # [len(CORRECTION_STATISTICS)] float64; None: there is no correction
    support: Tensor | None = None  # [len(SUPPORT_STATISTICS)] float64; None: the sampler keeps all ids
    has_mass: bool = False  # whether support has the kept mass


def combine_statistics(parts: Sequence[PolicyStatistics]) -> PolicyStatistics:
    """The statistics of several micro-batches or ranks together, each by its reduction. Needs at least one part."""
    tables = {"rollout": ROLLOUT_STATISTICS, "correction": CORRECTION_STATISTICS, "support": SUPPORT_STATISTICS}
    found = {name: [getattr(part, name) for part in parts if getattr(part, name) is not None] for name in tables}
    return PolicyStatistics(
        combined(torch.stack([part.values for part in parts]), STATISTICS),
        parts[0].has_entropy,
        has_mass=parts[0].has_mass,
        **{name: combined(torch.stack(rows), tables[name]) for name, rows in found.items() if rows},
    )


def combined(rows: Tensor, kinds: dict[str, Reduction]) -> Tensor:  # [parts, K] -> [K]
    """Each statistic over the parts, by its reduction."""
    by_kind = {Reduction.SUM: rows.sum(0), Reduction.MIN: rows.amin(0), Reduction.MAX: rows.amax(0)}
    return torch.stack([by_kind[kind][index] for index, kind in enumerate(kinds.values())])


def policy_statistics(
    tokens: TokenValues,
    *,
    loss_mask: Tensor,  # [T] bool
    counts: Tensor,  # [T] unmasked tokens of the token's document over all cp ranks
    num_documents: int,
    is_sequence_level: bool,
    cp_rank: int,
) -> PolicyStatistics:
    """This rank's share of the step's statistics. No communication, no synchronisation.

    Every cp rank has all documents, so only cp rank 0 counts them. Every other statistic is over this rank's tokens.
    """
    share = torch.where(loss_mask, 1.0 / counts.clamp(min=1).double(), 0.0)
    live = loss_mask.double()
    weights = {Weight.SAMPLE_SHARE: share, Weight.TOKEN: live, Weight.RATIO: share if is_sequence_level else live}
    values = [_over_tokens(metric, metric.value(tokens), loss_mask, weights[metric.weight]) for metric in METRICS]
    values[NUM_DOCUMENTS] = share.new_full((), num_documents if cp_rank == 0 else 0)
    return PolicyStatistics(torch.stack(values), has_entropy=tokens.entropy is not None)


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
    return torch.stack([_over_tokens(metric, metric.value(given), loss_mask, weights[metric.weight]) for metric in rows])


def _over_tokens(metric: Metric, values: Tensor | None, loss_mask: Tensor, weights: Tensor) -> Tensor:  # 0-d float64
    neutral = NEUTRAL[metric.reduction]
    if values is None or not values.numel():
        return weights.new_full((), neutral)
    if metric.reduction == Reduction.SUM:
        return _masked(values, loss_mask, weights)
    live = torch.where(loss_mask, values, neutral)
    return (live.max() if metric.reduction == Reduction.MAX else live.min()).double()


def _needed(log_probs: Tensor | None) -> Tensor:
    if log_probs is None:
        raise DataError("these rollout statistics need the policy's log_probs: call the loss with return_log_probs=True")
    return log_probs


def rollout_statistics(
    *,
    log_probs: Tensor | None,  # [T]; None only where nothing below needs them
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    rollout_log_probs: Tensor | None,  # [T] from the sampling engine
    kept_mass: Tensor | None = None,  # [T] what its kept ids had of its softmax
    staleness: Tensor | None,  # [N] policy versions between sampling and training
    counts_phantoms: bool,
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1], this rank's slices
    token_counts: Tensor,  # [N] unmasked tokens over all cp ranks
) -> Tensor:  # [len(ROLLOUT_STATISTICS)] float64
    """This rank's share of ROLLOUT_STATISTICS, from the inputs that are given. No communication, no synchronisation.

    train_rollout_* compare two engines on the same weights, so the trainer's side is old_log_probs, or log_probs on-policy. A
    phantom is a placeholder that was never measured. Every cp rank has all documents, so staleness and its count are both summed
    cp times; their quotient is the mean.
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


def _masked(values: Tensor, loss_mask: Tensor, share: Tensor) -> Tensor:
    return (torch.where(loss_mask, values, 0).double() * share).sum()
