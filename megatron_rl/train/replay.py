"""Recorded rollouts in the place of sampled ones. Every rank reads the whole file and keeps its data-parallel rank's samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.config import RouterReplay, SupportUse
from megatron_rl.errors import DataError
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.megatron.samples import teacher_problem
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollout_files import load_rollouts
from megatron_rl.train.rollouts import RolloutBatch, SharedRollout
from megatron_rl.train.trainer import PolicyTrainer


class ReplayedRollouts:
    """The rollouts of --rollouts, in the file's order, from index `first` on: a resumed run has trained on those before."""

    def __init__(self, options: TrainOptions, trainer: PolicyTrainer, *, first: int = 0):
        self._options, self._trainer = options, trainer
        self._batches = itertools.islice(self.from_start(), first, None)

    def get(self, rollout_index: int, *, policy_version: int | None = None) -> SharedRollout | None:
        """The next one, which is rollout_index; None after the last. The file's samples have their own policy_version, or none."""
        batch, dp = next(self._batches, None), self._trainer.groups.dp
        return None if batch is None else SharedRollout.of(batch, dp.rank(), dp.size())

    def from_start(self) -> Iterator[RolloutBatch]:
        """The whole file, whatever `get` has returned. Raises DataError for what it lacks."""
        path, trainer = str(self._options.rollouts), self._trainer
        has_routes = self._options.router_replay != RouterReplay.NONE
        for due, batch in enumerate(load_rollouts(path, vocab_size=trainer.settings.vocab_size)):
            if batch.rollout_index != due:
                raise DataError(f"{path} holds rollout {batch.rollout_index} where rollout {due} is due: it was cut or edited")
            if (problem := self._problem_of(batch)) is not None:
                raise DataError(f"{path}, rollout {due}: {problem}")
            yield batch if has_routes else replace(batch, samples=[replace(sample, routes=None) for sample in batch.samples])

    def _problem_of(self, batch: RolloutBatch) -> str | None:
        """What the run needs and the samples lack, or have and it refuses. A field is given for all of them, or for none."""
        sample, config, router_replay = batch.samples[0], self._trainer.config, self._options.router_replay
        if (problem := teacher_problem(config, sample)) is not None:
            return problem
        if CorrectionSettings.of(config) is not None and sample.rollout_log_probs is None:
            return (
                "no rollout_log_probs, which the correction compares with: record the sampling engine's log-probabilities, or "
                "remove --importance-correction and --off-policy-sequence-delta"
            )
        if config.sampling_support == SupportUse.REFUSE and sample.kept_ids is not None:
            return (
                "kept_ids with --sampling-support refuse: its sampler kept a part of the vocabulary, and its log-probabilities are "
                "over that; choose --sampling-support replay"
            )
        if router_replay == RouterReplay.ROLLOUT and sample.routes is None:
            return (
                "no routes, which --router-replay rollout needs: record those of the sampling engine, or choose --router-replay "
                "old_log_probs"
            )
        if router_replay == RouterReplay.OLD_LOG_PROBS and sample.routes is None and sample.old_log_probs is not None:
            return (
                "old_log_probs and no routes: --router-replay old_log_probs needs the routes of the forward that measured them; "
                "give both, or old_log_probs: null, and this policy measures both"
            )
        return None
