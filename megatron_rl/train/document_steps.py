"""The steps of a run with --docs-per-step, from sampled rollouts or from a file, and a run's position in its file.

A sampled rollout's steps end with it, and the last may be smaller; all are assembled before the first one moves the policy. A file
is one stream: steps go on from rollout to rollout. Each rank reads alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import all_gather_stack, group_device
from megatron_rl.train.accumulation import AccumulatedStep, AccumulationSettings, StepAccumulator
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollouts import AnySample, RolloutBatch, Sample, cut_at_rollouts, prompt_groups, rollout_values
from megatron_rl.train.trainer import PolicyTrainer


class DocumentSteps:
    """Every rank makes one. Communication: StepAccumulator's for each rollout, or for the whole file."""

    def __init__(self, trainer: PolicyTrainer, options: TrainOptions):
        self._options, self._dp = options, trainer.groups.dp
        self._settings = AccumulationSettings.of(trainer.config)
        self._file_steps: StepAccumulator | None = None
        self._place: dict = {}

    def from_rollout(self, own: RolloutBatch) -> list[AccumulatedStep]:
        """The steps of a sampled rollout, of which this data-parallel rank holds whole prompt groups."""
        stream = cut_share(prompt_groups(own.samples), self._options.micro_batch_size)
        return list(StepAccumulator(stream, self._settings, dp_group=self._dp))

    def from_file(self, rollouts: ReplayedRollouts, *, first_rollout: int, state: dict | None) -> Iterator[AccumulatedStep]:
        """The steps of a file. state: from state_dict() of the same layout; None: the steps begin with first_rollout.

        Raises ConfigError for a state of another layout."""
        layout = {"dp_size": self._dp.size(), "micro_batch_size": self._options.micro_batch_size}
        self._place = {"layout": layout, "first_rollout": first_rollout} if state is None else state
        if (earlier := self._place["layout"]) != layout:
            raise ConfigError(
                f"the checkpoint is in a file that was cut for {earlier['dp_size']} data-parallel ranks in micro-batches of "
                f"{earlier['micro_batch_size']}, and this run has {layout['dp_size']} and {layout['micro_batch_size']}: resume "
                "with the former"
            )
        batches = itertools.islice(rollouts.from_start(), self._place["first_rollout"], self._options.num_rollouts)
        self._file_steps = StepAccumulator(
            stream_of_rank(batches, self._dp.rank(), self._dp.size(), self._options.micro_batch_size),
            self._settings,
            dp_group=self._dp,
            state=self._place.get("accumulator"),
        )
        return self._file_steps

    def state_dict(self) -> dict | None:
        """The run's position in its file, equal on all ranks; None without a file. Communication: StepAccumulator.state_dict's."""
        return None if self._file_steps is None else {**self._place, "accumulator": self._file_steps.state_dict()}

    def rollout_metrics(self, step: AccumulatedStep) -> tuple[dict[str, float], int]:
        """The rollout/ metrics of a file's step, and the last rollout with samples in it; equal on all ranks.

        A prompt group counts with its samples that are in the step; they are on one rank.
        Communication: one all-gather of seven numbers over dp.
        """
        values = rollout_values(step.samples)
        pairs = [number for one in values.values() for number in (math.fsum(one), len(one))]
        last = max((sample.rollout_index for sample in step.samples), default=-1)
        mine = torch.tensor([last, *pairs], dtype=torch.float64, device=group_device(self._dp))
        lasts, *columns = zip(*all_gather_stack(mine, self._dp).tolist(), strict=True)
        sums = [math.fsum(column) for column in columns]
        means = {name: sums[2 * n] / sums[2 * n + 1] for n, name in enumerate(values)}
        return means, int(max(lasts))


def cut_share(groups: Sequence[list[AnySample]], micro_batch_size: int | None) -> list[list[AnySample]]:
    """The micro-batches of one rank's prompt groups. None: each group is one."""
    return list(groups) if micro_batch_size is None else cut_at_rollouts([*itertools.chain(*groups)], micro_batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedSample(Sample):
    """A sample that knows its rollout. Its ids hold the rollout, because a step may hold several rollouts."""

    rollout_index: int

    @classmethod
    def of(cls, sample: Sample, rollout_index: int) -> StreamedSample:
        values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Sample)}
        values["prompt_id"] = f"{rollout_index}/{sample.prompt_id}"
        if sample.rollout_id is not None:
            values["rollout_id"] = f"{rollout_index}/{sample.rollout_id}"
        return cls(**values, rollout_index=rollout_index)


def stream_of_rank(
    batches: Iterable[RolloutBatch], rank: int, dp_size: int, micro_batch_size: int | None
) -> Iterator[list[StreamedSample]]:
    """One rank's micro-batches. The prompt groups of all rollouts go to the data-parallel ranks in turn. Each rollout is cut
    by itself, so no cut depends on where a file ends."""
    num_groups = 0
    for batch in batches:
        groups = prompt_groups([StreamedSample.of(sample, batch.rollout_index) for sample in batch.samples])
        yield from cut_share(groups[(rank - num_groups) % dp_size :: dp_size], micro_batch_size)
        num_groups += len(groups)
