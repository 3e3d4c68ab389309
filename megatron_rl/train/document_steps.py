"""The steps of a run with --docs-per-step, from sampled rollouts or from a file, and a run's position in its file.

A sampled rollout's steps end with it, and the last may be smaller; all are assembled before the first one moves the policy. A file
is one stream: steps go on from rollout to rollout, and the next is read in a thread while this one trains. Each rank reads alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.accumulation import AccumulatedStep, AccumulationSettings, Deal, StepAccumulator, make_accumulation_group
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import Group, all_gather_stack, group_device
from megatron_rl.megatron.ranks import COLLECTIVE_TIMEOUT
from megatron_rl.megatron.schedule import microbatch_multiple
from megatron_rl.rollout_groups import rollouts_of
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollouts import RolloutBatch, Sample, prompt_groups
from megatron_rl.train.trainer import PolicyTrainer
from megatron_rl.train.writers import LENGTH, REWARD, WITHOUT_SIGNAL

# Of a sample's number in its rollout, which is below the samples of a rollout.
NUMBER_BITS = 20


class DocumentSteps:
    """Every rank makes one, and closes it (or ends the `with`) before torch.distributed is destroyed.

    Communication: make_accumulation_group's in the constructor, and StepAccumulator's for each rollout, or for the whole file.
    """

    def __init__(self, trainer: PolicyTrainer, options: TrainOptions, config: PolicyLossConfig):
        self._options, self._dp = options, trainer.groups.dp
        self._settings = AccumulationSettings.of(config, microbatch_multiple=microbatch_multiple(trainer.model.config))
        self._deal = Deal(self._dp.size(), options.micro_batch_size)
        self._group: Group | None = make_accumulation_group(self._dp, timeout=COLLECTIVE_TIMEOUT)
        self._file_steps: StepAccumulator | None = None
        self._done = Done()

    def of_rollout(self, own: RolloutBatch) -> list[AccumulatedStep]:
        """The steps of a sampled rollout, of which this data-parallel rank holds whole prompt groups."""
        stream = self._deal.cut_share(prompt_groups(own.samples))
        with StepAccumulator(stream, self._settings, dp_group=self._dp, group=self._group, prefetch=False) as steps:
            return list(steps)

    def of_file(self, rollouts: ReplayedRollouts, *, first_rollout: int, state: dict | None) -> Iterator[AccumulatedStep]:
        """The steps of a file. state: from state_dict(), under any layout; None: the steps begin with first_rollout."""
        accumulated, self._done = None, Done(first_rollout)
        if state is not None:
            earlier, self._done, accumulated = Deal(**state["deal"]), Done.from_lists(state["done"]), state["accumulator"]
            if earlier != self._deal:
                self._done = done_after(rollouts.from_start(), earlier, self._done, accumulated["positions"])
                accumulated = {**accumulated, "positions": [0] * self._dp.size()}
        batches = itertools.islice(rollouts.from_start(), self._options.num_rollouts)
        stream = stream_of_rank(batches, self._deal, self._done, self._dp.rank())
        self._file_steps = StepAccumulator(stream, self._settings, dp_group=self._dp, group=self._group, state=accumulated)
        return self._file_steps

    def state_dict(self) -> dict | None:
        """The run's position in its file, equal on all ranks; None without a file. Communication: StepAccumulator.state_dict's."""
        if self._file_steps is None:
            return None
        deal = {"dp_size": self._deal.dp_size, "micro_batch_size": self._deal.micro_batch_size}
        return {"deal": deal, "done": self._done.as_lists(), "accumulator": self._file_steps.state_dict()}

    def rollout_metrics(self, step: AccumulatedStep) -> tuple[dict[str, float], int]:
        """The rollout/ metrics of a file's step, and the last rollout with samples in it; equal on all ranks.

        A prompt group counts with its samples that are in the step; they are on one rank.
        Communication: one all-gather of seven numbers over dp.
        """
        samples, groups = step.samples, prompt_groups(step.samples)
        last = max((sample.place[0] for sample in samples), default=-1)
        rollouts = rollouts_of(samples)
        sums = [math.fsum(rollout[0].reward for rollout in rollouts), len(rollouts)]
        sums += [sum(sample.response_length for sample in samples)]
        silent = sum(all(sample.advantage == 0.0 for sample in group) for group in groups)
        mine = torch.tensor([last, *sums, len(samples), silent, len(groups)], dtype=torch.float64, device=group_device(self._dp))
        lasts, *columns = zip(*all_gather_stack(mine, self._dp).tolist(), strict=True)
        rewards, num_rollouts, lengths, num_samples, without_signal, num_groups = (math.fsum(column) for column in columns)
        means = {REWARD: rewards / num_rollouts, LENGTH: lengths / num_samples, WITHOUT_SIGNAL: without_signal / num_groups}
        return means, int(max(lasts))

    def close(self) -> None:
        if self._file_steps is not None:
            self._file_steps.close()
        self._file_steps = self._group = None

    def __enter__(self) -> DocumentSteps:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedSample(Sample):
    """A sample that knows its rollout. Its ids hold the rollout, because a step may hold several rollouts."""

    place: tuple[int, int]
    """(rollout, number of the sample in it)."""

    @property
    def number(self) -> int:
        rollout, sample = self.place
        return (rollout << NUMBER_BITS) | sample

    @classmethod
    def all_of(cls, batch: RolloutBatch) -> list[StreamedSample]:
        names, index = [field.name for field in dataclasses.fields(Sample)], batch.rollout_index
        found = []
        for number, sample in enumerate(batch.samples):
            values = {name: getattr(sample, name) for name in names}
            values["prompt_id"] = f"{index}/{sample.prompt_id}"
            if sample.rollout_id is not None:
                values["rollout_id"] = f"{index}/{sample.rollout_id}"
            found.append(cls(**values, place=(index, number)))
        return found


@dataclass(frozen=True, slots=True)
class Done:
    """What a run has trained on from its file: the first rollouts, and some samples of later ones, by (rollout, place in it)."""

    num_rollouts: int = 0
    samples: frozenset[tuple[int, int]] = frozenset()

    def as_lists(self) -> dict:
        return {"num_rollouts": self.num_rollouts, "samples": [list(place) for place in sorted(self.samples)]}

    @classmethod
    def from_lists(cls, values: dict) -> Done:
        return cls(values["num_rollouts"], frozenset((rollout, number) for rollout, number in values["samples"]))


def stream_of_rank(batches: Iterable[RolloutBatch], deal: Deal, done: Done, rank: int) -> Iterator[list[StreamedSample]]:
    """One rank's micro-batches of what is left. Each rollout is cut by itself, so no cut depends on where a file ends."""
    for _, parts in _deal(batches, deal, done):
        yield from parts[rank]


def done_after(batches: Iterable[RolloutBatch], deal: Deal, done: Done, positions: Sequence[int]) -> Done:
    """What is done after each rank has taken the first positions[rank] micro-batches of its stream. Another deal may follow."""
    left, places, num_rollouts = list(positions), set(done.samples), done.num_rollouts
    for batch, parts in _deal(batches, deal, done):
        for rank, of_rank in enumerate(parts):
            taken = of_rank[: left[rank]]
            left[rank] -= len(taken)
            places.update(sample.place for part in taken for sample in part)
        index = batch.rollout_index
        if index == num_rollouts and all((index, number) in places for number in range(len(batch.samples))):
            num_rollouts += 1
        if not any(left) and num_rollouts <= index:
            break
    if any(left):
        raise DataError(f"the rollout file ends {max(left)} micro-batches before where the run stopped: is it another file?")
    return Done(num_rollouts, frozenset(place for place in places if place[0] >= num_rollouts))


def _deal(
    batches: Iterable[RolloutBatch], deal: Deal, done: Done
) -> Iterator[tuple[RolloutBatch, list[list[list[StreamedSample]]]]]:
    """Each rollout, with each rank's micro-batches of what is left of it."""
    num_groups = 0
    for batch in batches:
        if batch.rollout_index < done.num_rollouts:
            continue
        groups = prompt_groups([sample for sample in StreamedSample.all_of(batch) if sample.place not in done.samples])
        yield batch, deal.cut(groups, num_groups % deal.dp_size)
        num_groups += len(groups)


def size_of_steps(options: TrainOptions, config: PolicyLossConfig, dp_size: int) -> tuple[int, list[str]]:
    """The documents of a step of --docs-per-step, and a line where they are more than were asked for.

    The last step of a rollout may have fewer; of a file all may, where its prompt groups are not of --samples-per-prompt.
    """
    settings, group_size = AccumulationSettings.of(config), config.samples_per_prompt
    asked = settings.docs_per_step
    part = Deal(dp_size, options.micro_batch_size).documents_of_a_step(settings, group_size)
    size = -(-asked // part) * part
    if not options.rollouts and group_size is not None:
        size = min(size, options.prompts_per_rollout * group_size)
    if size == asked:
        return asked, []
    ends = [] if options.micro_batch_size is None else [f"micro-batches of {options.micro_batch_size}"]
    ends += [f"prompt groups of {group_size}"] if settings.keep_prompt_groups or not ends else []
    together = " together" if len(ends) > 1 else ""
    why = f"on {dp_size} data-parallel rank{'s' if dp_size > 1 else ''} {' and '.join(ends)} end{together} every {part} documents"
    return size, [f"--docs-per-step {asked} makes steps of {size} documents: {why}"]
