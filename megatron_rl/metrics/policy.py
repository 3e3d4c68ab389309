"""Defines the metrics of the policy loss, each as a row of a table, and computes the statistics from which they are made.

A statistic is a sum, a minimum or a maximum over tokens. It is combined over micro-batches, cp and dp ranks in any order. The
division by the row's normaliser comes last, once, so that no mean is taken of means. Means are over the samples with at least one
unmasked token, with equal weight, so that a healthy step 0 has ratio 1 under any mask. docs/metrics.md says what each row means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatron_rl.losses.kl import k3


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


def sample_mean(name: str, value: Callable[..., Tensor | None], normaliser: str = "num_samples") -> Metric:
    """The mean over samples of the mean over a sample's tokens."""
    present_with = None if normaliser == "num_samples" else normaliser
    return Metric(name, value, normaliser=normaliser, present_with=present_with)


def count(name: str, value: Callable[..., Tensor | None], weight: Weight = Weight.TOKEN) -> Metric:
    """A statistic that other rows are divided by."""
    return Metric(name, value, weight=weight, is_reported=False)


def _ones(tokens: TokenValues) -> Tensor:
    return torch.ones_like(tokens.log_probs)


METRICS: tuple[Metric, ...] = (
    Metric("num_documents", lambda tokens: None),  # policy_statistics fills it in: it counts documents, not tokens
    count("num_samples", _ones, Weight.SAMPLE_SHARE),  # with at least one unmasked token
    Metric("num_tokens", _ones, weight=Weight.TOKEN),
    count("num_ratios", _ones, Weight.RATIO),  # tokens for a token-level loss, samples for a sequence-level one
    Metric("ratio_new_old_sum", lambda tokens: tokens.ratios, weight=Weight.RATIO),
    Metric("ratio_new_old_squared_sum", lambda tokens: tokens.ratios.double().square(), weight=Weight.RATIO),
    sample_mean("old_logprobs", lambda tokens: tokens.old_log_probs),
    sample_mean("new_logprobs", lambda tokens: tokens.log_probs),
    sample_mean("ratio_new_old", lambda tokens: tokens.ratios),
    sample_mean("kl_new_old", lambda tokens: k3(tokens.old_log_probs, tokens.log_probs).value),
    sample_mean("clipped_ratio_fraction", lambda tokens: tokens.is_clipped),
    sample_mean("clipped_low", lambda tokens: tokens.is_clipped & (tokens.advantages < 0)),
    sample_mean("clipped_high", lambda tokens: tokens.is_clipped & (tokens.advantages > 0)),
    sample_mean("advantage", lambda tokens: tokens.advantages),
    sample_mean("entropy", lambda tokens: tokens.entropy),
    Metric("max_advantage", lambda tokens: tokens.advantages, Reduction.MAX),
    Metric("min_advantage", lambda tokens: tokens.advantages, Reduction.MIN),
)
EFFECTIVE_SAMPLE_SIZE = "effective_sample_size"  # made from three statistics at the end
STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in METRICS}
NUM_DOCUMENTS = list(STATISTICS).index("num_documents")


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """The statistics of one micro-batch, rank or step."""

    values: Tensor  # [len(STATISTICS)] float64, in the order of METRICS
    has_entropy: bool
    rollout: Tensor | None = None  # [len(ROLLOUT_METRICS)] float64; None: the rollout gave no such input
    correction: Tensor | None = None  # [len(CORRECTION_METRICS)] float64; None: there is no correction
    support: Tensor | None = None  # [len(SUPPORT_METRICS)] float64; None: the sampler keeps all ids
    distillation: Tensor | None = None  # [len(DISTILLATION_METRICS)] float64; None: there is no teacher of rows


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
    weights = token_weights(loss_mask, counts)
    weights[Weight.RATIO] = weights[Weight.SAMPLE_SHARE if is_sequence_level else Weight.TOKEN]
    values = over_tokens(METRICS, [metric.value(tokens) for metric in METRICS], loss_mask, weights)
    values[NUM_DOCUMENTS] = num_documents if cp_rank == 0 else 0
    return PolicyStatistics(values, tokens.entropy is not None)


def token_weights(loss_mask: Tensor, counts: Tensor) -> dict[Weight, Tensor]:  # [T] bool, [T] -> [T] float64 each
    share = torch.where(loss_mask, 1.0 / counts.clamp(min=1).double(), 0.0)
    return {Weight.SAMPLE_SHARE: share, Weight.TOKEN: loss_mask.double()}


def over_tokens(
    rows: Sequence[Metric],
    values: Sequence[Tensor | None],  # [T] each; None: its inputs are missing
    loss_mask: Tensor,  # [T] bool
    weights: Mapping[Weight, Tensor],  # [T] float64
) -> Tensor:  # [rows] float64
    """The statistic of each row. Rows of one reduction are one tensor, so that a device has few kernels to launch."""
    found: dict[int, Tensor] = {}
    for kind in Reduction:
        present = [(place, value) for place, value in enumerate(values) if rows[place].reduction == kind and value is not None]
        if not present or not loss_mask.numel():
            continue
        stacked = torch.stack([value.double() for _, value in present])
        live = torch.where(loss_mask, stacked, NEUTRAL[kind])
        if kind == Reduction.SUM:
            reduced = (live * torch.stack([weights[rows[place].weight] for place, _ in present])).sum(1)
        else:
            reduced = live.amax(1) if kind == Reduction.MAX else live.amin(1)
        found |= zip((place for place, _ in present), reduced.unbind(), strict=True)
    for place in set(range(len(rows))) - set(found):
        found[place] = weights[Weight.TOKEN].new_full((), NEUTRAL[rows[place].reduction])
    return torch.stack([found[place] for place in range(len(rows))])
