"""What has one ratio of a sequence-level loss: a sample, the samples of a rollout together, or a turn. It computes no ratio.

A loss takes a ratio of each document. So another unit is another set of bounds, each with the weight and advantage of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import RatioUnit
from megatron_rl.errors import DataError
from megatron_rl.layout.packing import turn_cu_seqlens
from megatron_rl.megatron.samples import PolicySample
from megatron_rl.rollout_groups import rollouts_of


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a micro-batch, D of them."""

    unit: str | None  # of PolicySample.ratio_unit; None without samples
    samples: Sequence[PolicySample]  # D: whose weights and advantage each document has
    token_counts: Tensor  # [D] int64
    bounds: Tensor | None  # [D + 1] int64 in the flattened whole rows; None: the bounds of the samples


def side_by_side(samples: Sequence[PolicySample]) -> Sequence[PolicySample]:
    """With unit rollout, the samples of each rollout behind the first of them; else as they are."""
    if not any(sample.ratio_unit == RatioUnit.ROLLOUT for sample in samples):
        return samples
    return [sample for rollout in rollouts_of(samples) for sample in rollout]


def documents_of(samples: Sequence[PolicySample], loss_mask: Tensor, sizes: Sequence[int]) -> Documents:
    """samples: side by side. loss_mask: [sum of sizes], of the whole rows. sizes: of the samples with padding, then other rows.

    Raises DataError for samples of several units, and, with unit rollout, for a rollout that is not whole here or whose samples
    have different advantages or weights.
    """
    units = {sample.ratio_unit for sample in samples}
    if len(units) > 1:
        raise DataError(f"samples of the ratio units {', '.join(sorted(units))} in one micro-batch: a loss has one unit")
    unit = next(iter(units), None)
    counts = torch.tensor([sample.token_count for sample in samples], dtype=torch.int64)
    if unit in (None, RatioUnit.ROW):
        return Documents(unit, samples, counts, None)
    bounds = torch.tensor([0, *sizes[: len(samples)]]).cumsum(0)
    if unit == RatioUnit.TURN:
        turns, of = turn_cu_seqlens(loss_mask[: int(bounds[-1])], bounds)
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), loss_mask.long().cumsum(0)])
        return Documents(unit, [samples[place] for place in of.tolist()], sums[turns[1:]] - sums[turns[:-1]], turns)
    rollouts = rollouts_of(samples)
    ends = torch.tensor([0, *(len(rollout) for rollout in rollouts)]).cumsum(0)
    of_rollouts = torch.tensor([sum(sample.token_count for sample in rollout) for rollout in rollouts])
    return Documents(unit, [_one_of(rollout) for rollout in rollouts], of_rollouts, bounds[ends])


def _one_of(rollout: Sequence[PolicySample]) -> PolicySample:
    """A sample that has the weights and the advantage of the rollout. Raises DataError where its samples have different ones."""
    first = rollout[0]
    count = sum(sample.token_count for sample in rollout)
    if first.rollout_token_count is not None and count != first.rollout_token_count:
        raise DataError(
            f"importance_ratio_unit=rollout: rollout {first.rollout_id!r} has {first.rollout_token_count} unmasked tokens and "
            f"{count} in this micro-batch: its one ratio needs all its samples in one micro-batch; put them together, or choose "
            "--importance-ratio-unit row"
        )
    live = [sample for sample in rollout if sample.token_count] or [first]
    # A sample whose tokens the correction has dropped has the weight 0.
    one = max(live, key=lambda sample: sample.token_weight)
    for name in ("advantage", "token_weight", "regularizer_weight"):
        values = {getattr(sample, name) for sample in live}
        values = values - {0.0} if name == "token_weight" else values
        if len(values) > 1:
            shown = " and ".join(f"{value:g}" for value in sorted(values)[:2])
            raise DataError(
                f"importance_ratio_unit=rollout: samples of rollout {first.rollout_id!r} have the {name} {shown}: one ratio has "
                f"one {name}; give them the same, or choose --importance-ratio-unit row"
            )
    return one
