"""Makes the steps of a run with --docs-per-step, from sampled rollouts or from a file. No loss is weighted here.

A sampled rollout's steps end with it, and the last may be smaller; all are assembled before the first one moves the policy. A file
is one stream: steps go on from rollout to rollout, and the next is read while this one trains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from megatron_rl.accumulation import AccumulatedStep, AccumulationSettings, Deal, StepAccumulator, make_accumulation_group
from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.groups import Group, all_gather_stack, group_device
from megatron_rl.megatron.ranks import COLLECTIVE_TIMEOUT
from megatron_rl.megatron.schedule import microbatch_multiple
from megatron_rl.train.document_stream import Done, done_after, stream_of_rank
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollouts import RolloutBatch, prompt_groups
from megatron_rl.train.trainer import PolicyTrainer
from megatron_rl.train.writers import LENGTH, REWARD, WITHOUT_SIGNAL


class DocumentSteps:
    """Every rank makes one, and closes it (or ends the `with`) before torch.distributed is destroyed.

    Communication: make_accumulation_group's in the constructor, and StepAccumulator's for each rollout, or for the whole file.
    """

    def __init__(self, trainer: PolicyTrainer, options: TrainOptions, config: PolicyLossConfig):
        self._options, self._dp = options, trainer.groups.dp
        self._settings = AccumulationSettings.of(
            config,
            max_microbatches=options.max_microbatches,
            microbatch_multiple=microbatch_multiple(trainer.model.config),
        )
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

        A prompt group counts with those of its samples that are in the step; they are on one rank.
        Communication: one all-gather of six numbers over dp.
        """
        samples, groups = step.samples, prompt_groups(step.samples)
        last = max((sample.place[0] for sample in samples), default=-1)
        sums = [math.fsum(sample.reward for sample in samples), sum(sample.response_length for sample in samples)]
        silent = sum(all(sample.advantage == 0.0 for sample in group) for group in groups)
        mine = torch.tensor([last, *sums, len(samples), silent, len(groups)], dtype=torch.float64, device=group_device(self._dp))
        lasts, *columns = zip(*all_gather_stack(mine, self._dp).tolist(), strict=True)
        rewards, lengths, num_samples, without_signal, num_groups = (math.fsum(column) for column in columns)
        means = {REWARD: rewards / num_samples, LENGTH: lengths / num_samples, WITHOUT_SIGNAL: without_signal / num_groups}
        return means, int(max(lasts))

    def close(self) -> None:
        if self._file_steps is not None:
            self._file_steps.close()
        self._file_steps = self._group = None

    def __enter__(self) -> DocumentSteps:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
