"""Sufficient statistics of a step and the metrics made of them; it must never average averages.

A statistic is a sum, a minimum or a maximum over tokens. It adds up over micro-batches, cp and dp ranks in any order; division
comes last, once, by the declared normaliser. Means are taken over the samples with at least one unmasked token, each sample
weighing the same, so that a healthy step 0 has ratio 1 whatever is masked. docs/metrics.md has formula, unit and normaliser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.collectives import all_gather_stack, broadcast_from_last, group_device
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.layout.packing import document_ids, spread
from megatron_rl.ops.ratios import k3_estimate


class Reduction(StrEnum):
    SUM = "sum"
    MIN = "min"
    MAX = "max"


# The value that a rank or micro-batch without tokens contributes.
NEUTRAL = {Reduction.SUM: 0.0, Reduction.MIN: float("inf"), Reduction.MAX: float("-inf")}

# Sums of x_t / m_i over unmasked tokens; divided by num_samples they are means over samples of means over tokens.
SAMPLE_MEANS = (
    "old_logprobs",
    "new_logprobs",
    "ratio_new_old",
    "kl_new_old",
    "clipped_ratio_fraction",
    "clipped_low",
    "clipped_high",
    "advantage",
    "entropy",
)
STATISTICS: dict[str, Reduction] = {
    "num_documents": Reduction.SUM,
    "num_samples": Reduction.SUM,  # documents with at least one unmasked token
    "num_tokens": Reduction.SUM,
    "num_ratios": Reduction.SUM,  # tokens for a token-level loss, samples for a sequence-level one
    "ratio_new_old_sum": Reduction.SUM,
    "ratio_new_old_squared_sum": Reduction.SUM,
    **dict.fromkeys(SAMPLE_MEANS, Reduction.SUM),
    "max_advantage": Reduction.MAX,
    "min_advantage": Reduction.MIN,
}
# Of what a rollout may know beside the loss's inputs. A count of 0 tells that a step was given nothing of the kind.
ROLLOUT_STATISTICS: dict[str, Reduction] = {
    "num_rollout_samples": Reduction.SUM,  # samples with an unmasked token and rollout_log_probs
    "train_rollout_logprob_abs_diff": Reduction.SUM,
    "train_rollout_kl": Reduction.SUM,
    "num_versioned_samples": Reduction.SUM,  # samples with an unmasked token and a policy version
    "staleness": Reduction.SUM,
    "max_staleness": Reduction.MAX,
    "num_compared_tokens": Reduction.SUM,  # unmasked tokens that were looked at for phantoms
    "num_phantom_tokens": Reduction.SUM,
}
# Metric of a rollout statistic -> the count that it is divided by, or that says whether there is one.
ROLLOUT_MEANS = {
    "train_rollout_logprob_abs_diff": "num_rollout_samples",
    "train_rollout_kl": "num_rollout_samples",
    "staleness": "num_versioned_samples",
}
ROLLOUT_TOTALS = {"max_staleness": "num_versioned_samples", "num_phantom_tokens": "num_compared_tokens"}
# Who gave a token all of the probability can not give it less than half before the first step, at any precision.
PHANTOM_LOG_PROB = math.log(0.5)


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """The statistics of one micro-batch, rank or step."""

    values: Tensor  # [len(STATISTICS)] float64, in the order of STATISTICS
    has_entropy: bool
    rollout: Tensor | None = None  # [len(ROLLOUT_STATISTICS)] float64; None: nothing of the kind was given


def policy_statistics(
    *,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    ratios: Tensor,  # [T] the loss's own importance ratio: a token's, or its sample's
    is_clipped: Tensor,  # [T] bool, as the loss says
    advantages: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    loss_mask: Tensor,  # [T] bool
    counts: Tensor,  # [T] unmasked tokens of the token's document over all cp ranks
    num_documents: int,
    is_sequence_level: bool,
    cp_rank: int,
) -> PolicyStatistics:
    """This rank's share of the step's statistics. No communication, no synchronisation.

    Documents are whole on every cp rank's list, so cp rank 0 alone counts them; everything else is a sum over own tokens.
    """
    share = torch.where(loss_mask, 1.0 / counts.clamp(min=1).double(), 0.0)
    is_clipped = loss_mask & is_clipped
    ratio_share = share if is_sequence_level else loss_mask.double()
    per_token = {
        "old_logprobs": old_log_probs,
        "new_logprobs": log_probs,
        "ratio_new_old": ratios,
        "kl_new_old": k3_estimate(old_log_probs, log_probs)[0],
        "clipped_ratio_fraction": is_clipped,
        "clipped_low": is_clipped & (advantages < 0),
        "clipped_high": is_clipped & (advantages > 0),
        "advantage": advantages,
    }
    if entropy is not None:
        per_token["entropy"] = entropy
    values = {
        "num_documents": torch.full_like(share[:1].sum(), num_documents if cp_rank == 0 else 0),
        "num_samples": share.sum(),
        "num_tokens": loss_mask.sum(),
        "num_ratios": ratio_share.sum(),
        "ratio_new_old_sum": _masked(ratios, loss_mask, ratio_share),
        "ratio_new_old_squared_sum": _masked(ratios.double().square(), loss_mask, ratio_share),
        **{name: _masked(value, loss_mask, share) for name, value in per_token.items()},
    }
    if advantages.numel():
        values["max_advantage"] = torch.where(loss_mask, advantages, NEUTRAL[Reduction.MAX]).max()
        values["min_advantage"] = torch.where(loss_mask, advantages, NEUTRAL[Reduction.MIN]).min()
    neutral = {name: share.new_full((), NEUTRAL[kind]) for name, kind in STATISTICS.items() if name not in values}
    row = torch.stack([({**values, **neutral})[name].double() for name in STATISTICS])
    return PolicyStatistics(row, has_entropy=entropy is not None)


def _needed(log_probs: Tensor | None) -> Tensor:
    if log_probs is None:
        raise DataError("these rollout statistics need the policy's log_probs: call the loss with return_log_probs=True")
    return log_probs


def rollout_statistics(
    *,
    log_probs: Tensor | None,  # [T]; None only where nothing below needs them
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    rollout_log_probs: Tensor | None,  # [T] by the engine that sampled
    staleness: Tensor | None,  # [N] policy versions between sampling and training
    counts_phantoms: bool,
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1], this rank's slices
    token_counts: Tensor,  # [N] unmasked tokens over all cp ranks
) -> Tensor:  # [len(ROLLOUT_STATISTICS)] float64
    """This rank's share of ROLLOUT_STATISTICS, of what is given. No communication, no synchronisation.

    train_rollout_*: two engines on the same weights, so the trainer's numbers are old_log_probs, on-policy the current ones; KL is
    k3 of KL(rollout, train) on the rollout's samples. A phantom is an unmasked token whose old log-probability is exactly 0 while
    the policy gives it less than half: a placeholder that nobody measured. Every cp rank has all documents, so that staleness and
    its count come cp times; their quotient is the mean.
    """
    values = {}
    if rollout_log_probs is not None:
        documents = document_ids(cu_seqlens, loss_mask.numel())
        share = torch.where(loss_mask, spread(1.0 / token_counts.clamp(min=1).double(), documents), 0.0)
        trained = (_needed(log_probs) if old_log_probs is None else old_log_probs).double()
        sampled = rollout_log_probs.double()
        values["num_rollout_samples"] = share.sum()
        values["train_rollout_logprob_abs_diff"] = _masked((trained - sampled).abs(), loss_mask, share)
        values["train_rollout_kl"] = _masked(k3_estimate(sampled, trained)[0], loss_mask, share)
    if staleness is not None:
        is_live = token_counts > 0
        values["num_versioned_samples"] = is_live.sum()
        values["staleness"] = torch.where(is_live, staleness, 0).sum()
        if staleness.numel():
            values["max_staleness"] = torch.where(is_live, staleness.double(), NEUTRAL[Reduction.MAX]).max()
    if counts_phantoms and old_log_probs is not None:
        is_phantom = loss_mask & (old_log_probs == 0) & (_needed(log_probs) < PHANTOM_LOG_PROB)
        values["num_compared_tokens"], values["num_phantom_tokens"] = loss_mask.sum(), is_phantom.sum()
    neutral = token_counts.new_zeros((), dtype=torch.float64)
    return torch.stack([values.get(name, neutral + NEUTRAL[kind]).double() for name, kind in ROLLOUT_STATISTICS.items()])


def combine_statistics(parts: Sequence[PolicyStatistics]) -> PolicyStatistics:
    """The statistics of several micro-batches or ranks together, each by its own reduction. At least one part."""
    rollouts = [part.rollout for part in parts if part.rollout is not None]
    return PolicyStatistics(
        _combine(torch.stack([part.values for part in parts]), STATISTICS),
        parts[0].has_entropy,
        _combine(torch.stack(rollouts), ROLLOUT_STATISTICS) if rollouts else None,
    )


def neutral_statistics(*, has_entropy: bool) -> PolicyStatistics:
    """What a rank without a single micro-batch contributes."""
    return PolicyStatistics(_neutral(STATISTICS), has_entropy)


def reduce_statistics(local: PolicyStatistics | None, groups: ParallelGroups, *, has_entropy: bool) -> PolicyStatistics:
    """The whole step's statistics, on every rank's CPU. `local` is None where there was no micro-batch with a loss, as on pipeline
    stages before the last.

    Communication: one all-gather of [K] float64 over the last stage's dp-cp, and one broadcast of it over pp; never over tp, whose
    ranks hold the same numbers. Synchronises once.
    """
    local = neutral_statistics(has_entropy=has_entropy) if local is None else local
    kinds, device = STATISTICS | ROLLOUT_STATISTICS, group_device(groups.dp_cp)
    rollout = _neutral(ROLLOUT_STATISTICS) if local.rollout is None else local.rollout
    values = torch.cat([local.values.to(device), rollout.to(device)])
    if groups.pp.rank() == groups.pp.size() - 1:
        values = _combine(all_gather_stack(values, groups.dp_cp), kinds)
    values = broadcast_from_last(values, groups.pp).cpu()
    return PolicyStatistics(values[: len(STATISTICS)], has_entropy, values[len(STATISTICS) :])


def finalise_metrics(statistics: PolicyStatistics) -> dict[str, float]:
    """`policy/<name>` -> value, from the statistics of a whole step. Empty when no sample had an unmasked token.

    policy/effective_sample_size is (sum of ratios)^2 / (sum of squared ratios) / number of ratios: 1 when all are equal.
    """
    raw = dict(zip(STATISTICS, statistics.values.tolist(), strict=True))
    if raw["num_tokens"] == 0:
        return {}
    metrics = {}
    for name, value in raw.items():
        if name in SAMPLE_MEANS:
            if name != "entropy" or statistics.has_entropy:
                metrics[f"policy/{name}"] = value / raw["num_samples"]
        elif name not in ("num_samples", "num_ratios"):
            metrics[f"policy/{name}"] = value
    metrics["policy/effective_sample_size"] = raw["ratio_new_old_sum"] ** 2 / (raw["ratio_new_old_squared_sum"] * raw["num_ratios"])
    if statistics.rollout is not None:
        known = dict(zip(ROLLOUT_STATISTICS, statistics.rollout.tolist(), strict=True))
        metrics |= {f"policy/{name}": known[name] / known[count] for name, count in ROLLOUT_MEANS.items() if known[count]}
        metrics |= {f"policy/{name}": known[name] for name, count in ROLLOUT_TOTALS.items() if known[count]}
    return metrics


def step_metrics(parts: Sequence[PolicyStatistics], groups: ParallelGroups, *, has_entropy: bool) -> dict[str, float]:
    """The step's metrics, on every rank, from those of this rank's micro-batches: none before the last stage, or on a dry rank.

    Communication: that of reduce_statistics. Synchronises once.
    """
    local = combine_statistics(parts) if parts else None
    return finalise_metrics(reduce_statistics(local, groups, has_entropy=has_entropy))


def report_pairs(statistics: PolicyStatistics, num_parts: int) -> dict[str, Tensor]:  # name -> [2] float32
    """[numerator, denominator] of what Megatron's train_step can carry: it adds both over micro-batches and dp-cp and divides.

    num_parts: micro-batches times dp-cp ranks, over which a plain sum's denominator adds up to 1. Minima, maxima and the effective
    sample size are no such quotients and are left out: step_metrics has them.
    """
    values = dict(zip(STATISTICS, statistics.values.unbind(), strict=True))
    one = torch.full_like(values["num_samples"], 1.0 / num_parts)
    pairs = {}
    for name, kind in STATISTICS.items():
        is_mean = name in SAMPLE_MEANS
        if kind == Reduction.SUM and name not in ("num_samples", "num_ratios") and (name != "entropy" or statistics.has_entropy):
            pairs[f"policy/{name}"] = (values[name], values["num_samples"] if is_mean else one)
    stacked = torch.stack([value for pair in pairs.values() for value in pair]).float().view(-1, 2)
    return dict(zip(pairs, stacked.unbind(), strict=True))


def _masked(values: Tensor, loss_mask: Tensor, share: Tensor) -> Tensor:
    return (torch.where(loss_mask, values, 0).double() * share).sum()


def _neutral(kinds: dict[str, Reduction]) -> Tensor:
    return torch.tensor([NEUTRAL[kind] for kind in kinds.values()], dtype=torch.float64)


def _combine(rows: Tensor, kinds: dict[str, Reduction]) -> Tensor:  # [parts, K] -> [K]
    by_kind = {Reduction.SUM: rows.sum(0), Reduction.MIN: rows.amin(0), Reduction.MAX: rows.amax(0)}
    return torch.stack([by_kind[kind][index] for index, kind in enumerate(kinds.values())])
