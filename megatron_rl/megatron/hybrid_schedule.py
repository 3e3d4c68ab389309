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

    def data_iterator(self) -> Iterator[tuple[dict[int, dict[str, Any]], list[list[list[int]]]]]:
        """Of one step, as Megatron-Core's HybridCPDataLoaderWrapper has it: samples by number, and their numbers by round and dp-cp
        rank. Of the other ranks only this rank's samples are known, and the schedule reads no more."""
        numbers, of_ranks = count(), []
        samples: dict[int, dict[str, Any]] = {}
        places = {rank: place for place, rank in enumerate(_ranks(self._dp_cp))}
        for batches in self._rounds:
            of_round: list[list[int]] = [[] for _ in places]
            for batch in batches:
                number = next(numbers)
                samples[number] = {}
                for rank in _ranks(batch.cp_group):
                    of_round[places[rank]].append(number)
            of_ranks.append(of_round)
        return iter([(samples, of_ranks)])

    def forward_step(self, forward_step: ForwardStep) -> Callable[[object, Any], Any]:
        """The forward step for the schedule: it takes this rank's micro-batches in order, on each tensor-parallel rank."""
        batches = iter(list(chain.from_iterable(self._rounds)))
        return lambda _, model: forward_step(batches, model)


def _ranks(group: Group) -> list[int]:
    return [dist.get_rank()] if group.size() == 1 else list(dist.get_process_group_ranks(process_group(group)))
