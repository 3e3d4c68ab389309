"""Makes one stream of micro-batches for each data-parallel rank from rollouts, and knows a run's position in its file.

No group of ranks is used: `--docs-per-step` reads a stream in a thread, and each rank reads alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.accumulation import AccumulationSettings, Deal
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollouts import RolloutBatch, Sample, prompt_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedSample(Sample):
    """A sample that knows its rollout. Its prompt_id holds the rollout, because a step may hold several rollouts."""

    place: tuple[int, int]
    """(rollout, number of the sample in it)."""

    @classmethod
    def all_of(cls, batch: RolloutBatch) -> list[StreamedSample]:
        names, index = [field.name for field in dataclasses.fields(Sample)], batch.rollout_index
        return [
            cls(**{**{name: getattr(sample, name) for name in names}, "prompt_id": f"{index}/{sample.prompt_id}"}, place=(index, n))
            for n, sample in enumerate(batch.samples)
        ]


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
