"""Gives micro-batches to the schedule of Megatron-Core's hybrid context parallelism (hybrid_context_parallel in a model's config).

That schedule runs rounds, with a barrier after each. In a round a rank stays in one context-parallel group, and ranks run different
numbers of micro-batches. It hands a sample to the first tensor-parallel rank alone, and writes the size of its group into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any

import torch.distributed as dist

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group, process_group
from megatron_rl.megatron.batch import PolicyBatch

ForwardStep = Callable[[Iterator[PolicyBatch], Any], Any]
HybridData = tuple[dict[int, dict[str, Any]], list[list[list[int]]]]


class HybridRounds:
    """This rank's micro-batches of a step, in rounds. Every rank has as many rounds, and a micro-batch or more in the last one.

        rounds = HybridRounds(batches_of_rounds, groups.dp_cp)
        get_forward_backward_func()(
            forward_step_func=rounds.forward_step(policy_forward_step),
            data_iterator=rounds.data_iterator(),
            num_microbatches=rounds.num_microbatches,     # of this rank, and of each StepContext
            ...
        )

    The ranks of a group give it the same micro-batches in the same order. The schedule has no pipeline.
    Communication: none here; the schedule's barrier after each round.
    Raises ConfigError for a last round without a micro-batch: the schedule reduces gradients in its last backward.
    """

    def __init__(self, rounds: Sequence[Sequence[PolicyBatch]], dp_cp_group: Group):
        if not rounds or not rounds[-1]:
            raise ConfigError(
                "the last of the rounds has no micro-batch on this rank, and the schedule reduces gradients in its last backward: "
                "make one without samples"
            )
        self._rounds, self._dp_cp = rounds, dp_cp_group

    @property
    def num_microbatches(self) -> int:
        return sum(map(len, self._rounds))

    def data_iterator(self) -> Iterator[HybridData]:
        """Of one step."""
        return data_of_rounds([[batch.cp_group for batch in of_round] for of_round in self._rounds], self._dp_cp)

    def forward_step(self, forward_step: ForwardStep) -> Callable[[object, Any], Any]:
        """The forward step for the schedule: it takes this rank's micro-batches in order, on each tensor-parallel rank."""
        batches = iter(list(chain.from_iterable(self._rounds)))
        return lambda _, model: forward_step(batches, model)


def data_of_rounds(cp_groups: Sequence[Sequence[Group]], dp_cp_group: Group) -> Iterator[HybridData]:
    """Of a step of micro-batches over these groups, as Megatron-Core's HybridCPDataLoaderWrapper has it: samples by number, and
    their numbers by round and dp-cp rank. Of the other ranks only this rank's samples are known, and the schedule reads no more."""
    numbers, of_rounds = count(), []
    samples: dict[int, dict[str, Any]] = {}
    places = {rank: place for place, rank in enumerate(_ranks(dp_cp_group))}
    for of_round in cp_groups:
        of_ranks: list[list[int]] = [[] for _ in places]
        for group in of_round:
            number = next(numbers)
            samples[number] = {}
            for rank in _ranks(group):
                of_ranks[places[rank]].append(number)
        of_rounds.append(of_ranks)
    return iter([(samples, of_rounds)])


def _ranks(group: Group) -> list[int]:
    return [dist.get_rank()] if group.size() == 1 else list(dist.get_process_group_ranks(process_group(group)))
