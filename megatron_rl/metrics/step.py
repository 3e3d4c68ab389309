"""Combines the statistics of micro-batches and ranks, and divides once, at the end: the metrics of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.layout.groups import ParallelGroups, all_gather_stack, broadcast_from_last, group_device
from megatron_rl.metrics.further import CORRECTION_SAMPLE_SIZE, TABLES
from megatron_rl.metrics.policy import EFFECTIVE_SAMPLE_SIZE, METRICS, NEUTRAL, Metric, PolicyStatistics, Reduction


def combine_statistics(parts: Sequence[PolicyStatistics]) -> PolicyStatistics:
    """The statistics of several micro-batches or ranks together, each by its reduction. Needs at least one part."""
    found = {name: [getattr(part, name) for part in parts if getattr(part, name) is not None] for name in TABLES}
    return PolicyStatistics(
        combined(torch.stack([part.values for part in parts]), METRICS),
        parts[0].has_entropy,
        **{name: combined(torch.stack(rows), TABLES[name]) for name, rows in found.items() if rows},
    )


def combined(rows: Tensor, table: Sequence[Metric]) -> Tensor:  # [parts, K] -> [K]
    """Each statistic over the parts, by its reduction."""
    by_kind = {Reduction.SUM: rows.sum(0), Reduction.MIN: rows.amin(0), Reduction.MAX: rows.amax(0)}
    return torch.stack([by_kind[row.reduction][index] for index, row in enumerate(table)])


def neutral_statistics(*, has_entropy: bool) -> PolicyStatistics:
    """The statistics of a rank without a micro-batch."""
    return PolicyStatistics(_neutral(METRICS, torch.device("cpu")), has_entropy)


def reduce_statistics(local: PolicyStatistics | None, groups: ParallelGroups, *, has_entropy: bool) -> PolicyStatistics:
    """The statistics of the whole step, on every rank's CPU. `local` is None on a rank without a loss, as on pipeline stages before
    the last.

    Communication: one all-gather of [K] float64 over dp-cp on the last stage, and one broadcast of the result over pp; none over
    tp, because its ranks hold the same numbers. Synchronises once.
    """
    local = neutral_statistics(has_entropy=has_entropy) if local is None else local
    tables = (METRICS, *TABLES.values())
    device = group_device(groups.dp_cp)
    parts = zip((local.values, *(getattr(local, name) for name in TABLES)), tables, strict=True)
    values = torch.cat([_neutral(table, device) if part is None else part.to(device) for part, table in parts])
    if groups.pp.rank() == groups.pp.size() - 1:
        values = combined(all_gather_stack(values, groups.dp_cp), [row for table in tables for row in table])
    values, *others = broadcast_from_last(values, groups.pp).cpu().split([len(table) for table in tables])
    return PolicyStatistics(values, has_entropy, *others)


def finalise_metrics(statistics: PolicyStatistics) -> dict[str, float]:
    """`policy/<name>` -> value, from the statistics of a whole step. Empty when no sample had an unmasked token.

    policy/effective_sample_size is that of the ratios, policy/correction_effective_sample_size that of a correction's factors.
    """
    rows, values = _present(statistics)
    known = dict(zip((row.name for row in rows), values.tolist(), strict=True))
    if known["num_tokens"] == 0:
        return {}
    metrics = {
        f"policy/{row.name}": known[row.name] / (known[row.normaliser] if row.normaliser else 1)
        for row in rows
        if _is_reported(row, statistics.has_entropy) and (row.present_with is None or known[row.present_with])
    }
    ratio_sums = (known["ratio_new_old_sum"], known["ratio_new_old_squared_sum"], known["num_ratios"])
    metrics[f"policy/{EFFECTIVE_SAMPLE_SIZE}"] = _effective_sample_size(*ratio_sums)
    if known.get("num_corrected_tokens"):
        factor_sums = (*(known[f"correction_weight_{name}"] for name in ("sum", "squared_sum")), known["num_corrected_tokens"])
        metrics[f"policy/{CORRECTION_SAMPLE_SIZE}"] = _effective_sample_size(*factor_sums)
    return metrics


def _present(statistics: PolicyStatistics) -> tuple[list[Metric], Tensor]:
    """The rows whose statistics are there, and these [K]."""
    found = {name: values for name in TABLES if (values := getattr(statistics, name)) is not None}
    return [*METRICS, *(row for name in found for row in TABLES[name])], torch.cat([statistics.values, *found.values()])


def _effective_sample_size(total: float, squared_total: float, number: float) -> float:
    """total^2 / squared_total / number: 1 when all are equal; 0 where all are 0, as factors are where everything is dropped."""
    return total**2 / (squared_total * number) if squared_total else 0.0


def _is_reported(row: Metric, has_entropy: bool) -> bool:
    return row.is_reported and (has_entropy or row.name != "entropy")


def step_metrics(parts: Sequence[PolicyStatistics], groups: ParallelGroups, *, has_entropy: bool) -> dict[str, float]:
    """The metrics of the step, on every rank. `parts` has one entry for each micro-batch of this rank that had a loss.

    Communication: that of reduce_statistics. Synchronises once.
    """
    local = combine_statistics(parts) if parts else None
    return finalise_metrics(reduce_statistics(local, groups, has_entropy=has_entropy))


def report_pairs(statistics: PolicyStatistics, num_parts: int) -> dict[str, Tensor]:  # name -> [2] float32
    """[numerator, denominator] of each metric that Megatron's train_step can report: it sums both over micro-batches and dp-cp,
    then divides.

    num_parts: micro-batches times dp-cp ranks; the denominator of a plain sum is 1 / num_parts. Minima, maxima and the effective
    sample size are no such quotients and are left out: step_metrics has them.
    """
    # A rank without samples has no rollout statistics, and all ranks must report the same names.
    rows, present = _present(replace(statistics, rollout=None))
    values = dict(zip((row.name for row in rows), present.unbind(), strict=True))
    one = torch.full_like(values["num_samples"], 1.0 / num_parts)
    pairs = {
        f"policy/{row.name}": (values[row.name], values[row.normaliser] if row.normaliser else one)
        for row in rows
        if row.reduction == Reduction.SUM and _is_reported(row, statistics.has_entropy)
    }
    stacked = torch.stack([value for pair in pairs.values() for value in pair]).float().view(-1, 2)
    return dict(zip(pairs, stacked.unbind(), strict=True))


def _neutral(table: Sequence[Metric], device: torch.device) -> Tensor:
    """Filled on the device: a copy from the host would synchronise."""
    return torch.stack([torch.full((), NEUTRAL[row.reduction], dtype=torch.float64, device=device) for row in table])
