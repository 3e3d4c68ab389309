"""Sufficient statistics of a step and the metrics made of them; it must never average averages.

A statistic is a sum, a minimum or a maximum over tokens. It adds up over micro-batches, cp and dp ranks in any order; division
comes last, once, by the declared normaliser. Means are taken over the samples with at least one unmasked token, each sample
weighing the same, so that a healthy step 0 has ratio 1 whatever is masked. docs/metrics.md has formula, unit and normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatron_rl.layout.collectives import all_gather_stack, broadcast_from_last, group_device
from megatron_rl.layout.groups import ParallelGroups


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


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """The statistics of one micro-batch, rank or step: `values` [len(STATISTICS)] float64 in the order of STATISTICS."""

    values: Tensor
    has_entropy: bool


def policy_statistics(
    *,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    ratios: Tensor,  # [T] the loss's own importance ratio: a token's, or its sample's
    derivative: Tensor,  # [T] of the loss values by log_probs; 0 where clipped
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
    log_ratio = log_probs - old_log_probs
    is_clipped = loss_mask & (derivative == 0) & (advantages != 0)
    ratio_share = share if is_sequence_level else loss_mask.double()
    per_token = {
        "old_logprobs": old_log_probs,
        "new_logprobs": log_probs,
        "ratio_new_old": ratios,
        "kl_new_old": log_ratio.clamp(-20.0, 20.0).exp() - log_ratio - 1.0,
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


def combine_statistics(parts: Sequence[PolicyStatistics]) -> PolicyStatistics:
    """The statistics of several micro-batches or ranks together, each by its own reduction. At least one part."""
    return PolicyStatistics(_combine(torch.stack([part.values for part in parts])), parts[0].has_entropy)


def neutral_statistics(*, has_entropy: bool) -> PolicyStatistics:
    """What a rank without a single micro-batch contributes."""
    return PolicyStatistics(torch.tensor([NEUTRAL[kind] for kind in STATISTICS.values()], dtype=torch.float64), has_entropy)


def reduce_statistics(local: PolicyStatistics | None, groups: ParallelGroups, *, has_entropy: bool) -> PolicyStatistics:
    """The whole step's statistics, on every rank. `local` is None on pipeline stages before the last, which hold no loss.

    Communication: one all-gather of [K] float64 over dp-cp, called by every rank of every stage, and one broadcast over pp from
    the last stage; never over tp, whose ranks hold the same numbers.
    """
    local = neutral_statistics(has_entropy=has_entropy) if local is None else local
    values = local.values.to(group_device(groups.dp_cp))
    combined = _combine(all_gather_stack(values, groups.dp_cp))
    return PolicyStatistics(broadcast_from_last(combined, groups.pp), has_entropy)


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
    return metrics


def _masked(values: Tensor, loss_mask: Tensor, share: Tensor) -> Tensor:
    return (torch.where(loss_mask, values, 0).double() * share).sum()


def _combine(rows: Tensor) -> Tensor:  # [parts, K] -> [K]
    by_kind = {Reduction.SUM: rows.sum(0), Reduction.MIN: rows.amin(0), Reduction.MAX: rows.amax(0)}
    return torch.stack([by_kind[kind][index] for index, kind in enumerate(STATISTICS.values())])
