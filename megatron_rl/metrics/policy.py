"""Defines the metrics of the policy loss, each as a row of a table, and computes the statistics from which they are made.

A statistic is a sum, a minimum or a maximum over tokens. It is combined over micro-batches, cp and dp ranks in any order. The
division by the row's normaliser comes last, once, so that no mean is taken of means. Means are over the samples with at least one
unmasked token, with equal weight, so that a healthy step 0 has ratio 1 under any mask. docs/metrics.md is written from these rows
and from those of further.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatron_rl.errors import DataError
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


def count(name: str, value: Callable[..., Tensor | None], weight: Weight = Weight.TOKEN) -> Metric:
    """A statistic that other rows are divided by."""
    return Metric(name=name, value=value, weight=weight, is_reported=False)


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
        formula="with `with_entropy`: mean of -sum_v p_v ln p_v over the vocabulary, or the kept ids (`--entropy-score`)",
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
STATISTICS: dict[str, Reduction] = {metric.name: metric.reduction for metric in METRICS}
NUM_DOCUMENTS = list(STATISTICS).index("num_documents")


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """The statistics of one micro-batch, rank or step."""

    values: Tensor  # [len(STATISTICS) + len(custom)] float64, in the order of METRICS and then of custom
    has_entropy: bool
    custom: tuple[Metric, ...] = ()  # a user's rows
    rollout: Tensor | None = None  # [len(ROLLOUT_STATISTICS)] float64; None: the rollout gave no such input
    correction: Tensor | None = None  # [len(CORRECTION_STATISTICS)] float64; None: there is no correction
    support: Tensor | None = None  # [len(SUPPORT_STATISTICS)] float64; None: the sampler keeps all ids
    has_mass: bool = False  # whether support has the kept mass

    @property
    def rows(self) -> tuple[Metric, ...]:
        """The rows of `values`."""
        return (*METRICS, *self.custom)


def policy_statistics(
    tokens: TokenValues,
    *,
    loss_mask: Tensor,  # [T] bool
    counts: Tensor,  # [T] unmasked tokens of the token's document over all cp ranks
    num_documents: int,
    is_sequence_level: bool,
    cp_rank: int,
    custom: tuple[Metric, ...] = (),
) -> PolicyStatistics:
    """This rank's share of the step's statistics. No communication, no synchronisation.

    Every cp rank has all documents, so only cp rank 0 counts them. Every other statistic is over this rank's tokens.
    custom: rows beside METRICS. Raises DataError for a value of theirs that is no vector of [T].
    """
    share = torch.where(loss_mask, 1.0 / counts.clamp(min=1).double(), 0.0)
    live = loss_mask.double()
    weights = {Weight.SAMPLE_SHARE: share, Weight.TOKEN: live, Weight.RATIO: share if is_sequence_level else live}
    values = [over_tokens(metric, metric.value(tokens), loss_mask, weights[metric.weight]) for metric in METRICS]
    values[NUM_DOCUMENTS] = share.new_full((), num_documents if cp_rank == 0 else 0)
    for metric in custom:
        found = metric.value(tokens)
        check_values(metric, found, loss_mask)
        values.append(over_tokens(metric, found, loss_mask, weights[metric.weight]))
    return PolicyStatistics(torch.stack(values), tokens.entropy is not None, custom)


def check_values(metric: Metric, values: object, loss_mask: Tensor) -> None:
    """Raises DataError unless the values are a vector beside loss_mask, [T] real numbers or bool, or None: not there."""
    if values is None:
        return
    found = type(values).__name__
    if isinstance(values, Tensor):
        if values.shape == loss_mask.shape and values.device == loss_mask.device and not values.is_complex():
            return
        found = f"{tuple(values.shape)} {values.dtype} on {values.device}"
    raise DataError(
        f"policy metric {metric.name!r} returned {found}: its value must be {tuple(loss_mask.shape)} real numbers or bool on "
        f"{loss_mask.device}, one for each token; the package weighs them and adds them up"
    )


def over_tokens(metric: Metric, values: Tensor | None, loss_mask: Tensor, weights: Tensor) -> Tensor:  # 0-d float64
    neutral = NEUTRAL[metric.reduction]
    if values is None or not values.numel():
        return weights.new_full((), neutral)
    if metric.reduction == Reduction.SUM:
        return masked_sum(values, loss_mask, weights)
    live = torch.where(loss_mask, values, neutral)
    return (live.max() if metric.reduction == Reduction.MAX else live.min()).double()


def masked_sum(values: Tensor, loss_mask: Tensor, share: Tensor) -> Tensor:
    return (torch.where(loss_mask, values, 0).double() * share).sum()
