"""The training loop: rollout, optimiser steps, metrics, checkpoints; it must never compute a loss itself."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_rl.config import PolicyLossConfig, Watchdog
from megatron_rl.errors import DataError
from megatron_rl.megatron.trainer import PolicyTrainer
from megatron_rl.training.collection import (
    ReplayedRollouts,
    SampledRollouts,
    merge_samples,
    with_old_log_probs,
    with_ref_log_probs,
)
from megatron_rl.training.options import CHECKPOINT_DIRECTORY, TrainOptions
from megatron_rl.training.progress import ProgressBar
from megatron_rl.training.rollout_files import save_rollouts, truncate_rollouts
from megatron_rl.training.rollouts import RolloutBatch, Sample, partition, split_into_steps
from megatron_rl.training.stopping import StopRule, StopSignals
from megatron_rl.training.writers import REWARD, TOKENS_PER_SECOND, MetricsWriter

logger = logging.getLogger(__name__)

# Without these in a row, two rows of equal runs are equal.
TIMING_METRICS = ("seconds", TOKENS_PER_SECOND)
# A first step whose mean importance ratio lies outside compares two policies that should be one.
HEALTHY_FIRST_RATIO = (0.9, 1.1)


@dataclass
class Progress:
    """What a checkpoint remembers beside weights: how far the run is."""

    num_rollouts: int = 0
    num_steps: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    first_reward: float | None = None
    last_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    progress: Progress
    reason: str
    exit_code: int
    seconds: float
    checkpoint: Path | None


class TrainingRun:
    """One run of the loop on this rank. Every rank makes one and calls `run`."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        rollouts: SampledRollouts | ReplayedRollouts,
        options: TrainOptions,
        config: PolicyLossConfig,
        *,
        progress: Progress,
        recent_rewards: list[float],
        resume_step: int | None,
    ):
        self._trainer, self._rollouts, self._options, self._config = trainer, rollouts, options, config
        self._progress = progress
        self._recent_rewards = recent_rewards
        self._resume_step = resume_step
        self._is_first_rank = dist.get_rank() == 0
        self._output_dir = Path(options.output_dir)
        self._last_saved: tuple[int, Path] | None = None

    def run(self) -> Outcome:
        """Trains until a rule stops it; the last state is saved, also when a signal ended the run."""
        options, started = self._options, time.monotonic()
        if options.save_rollouts and self._is_first_rank:
            truncate_rollouts(options.save_rollouts, self._progress.num_rollouts)
        total = None if options.num_rollouts is None else options.num_rollouts * options.steps_per_rollout
        with (
            StopSignals() as signals,
            MetricsWriter(self._output_dir, options.tensorboard, self._is_first_rank, self._resume_step) as writer,
            ProgressBar(total, self._is_first_rank, self._progress.num_steps) as bar,
        ):
            stop = StopRule(
                signals,
                max_seconds=options.max_seconds,
                target_reward=options.target_reward,
                window=options.target_reward_window,
                recent_rewards=self._recent_rewards,
            )
            reason = self._train(stop, writer, bar)
            checkpoint = self._save(stop)
        return Outcome(self._progress, reason, stop.exit_code, time.monotonic() - started, checkpoint)

    def _train(self, stop: StopRule, writer: MetricsWriter, bar: ProgressBar) -> str:
        options = self._options
        while options.num_rollouts is None or self._progress.num_rollouts < options.num_rollouts:
            began = time.monotonic()
            batch = self._rollouts.get(self._progress.num_rollouts)
            if batch is None:
                return "every rollout of the file is trained on"
            reward = sum(sample.reward for sample in batch.samples) / len(batch.samples)
            if self._progress.first_reward is None:
                self._progress.first_reward = reward
            self._progress.last_reward = reward
            for metrics in self._train_on(batch):
                row = {"rollout": batch.rollout_index, REWARD: reward, **metrics, **self._seen(metrics)}
                seconds = time.monotonic() - began
                began = time.monotonic()
                row |= {"seconds": seconds, TOKENS_PER_SECOND: metrics["num_tokens"] / seconds}
                self._progress.num_steps += 1
                writer.write(self._progress.num_steps, row)
                bar.update(self._progress.num_steps, row)
                self._watch(metrics)
            self._progress.num_rollouts += 1
            if stop.should_stop(reward):
                return stop.reason or ""
            if options.save_interval and self._progress.num_rollouts % options.save_interval == 0:
                self._save(stop)
        return f"all {options.num_rollouts} rollouts are done"

    def _train_on(self, batch: RolloutBatch):
        """Yields the metrics of each optimiser step on the batch."""
        groups, options = self._trainer.groups, self._options
        steps = [
            partition(samples, groups.dp.rank(), groups.dp.size(), options.micro_batch_size)
            for samples in split_into_steps(batch, options.steps_per_rollout)
        ]
        # All of them before the first step moves the policy, and in the very micro-batches that will be trained on. A single
        # step is on-policy: its ratio is 1 by definition and needs no forward.
        if options.steps_per_rollout > 1 or options.save_rollouts:
            steps = [with_old_log_probs(self._trainer, microbatches) for microbatches in steps]
        if options.save_rollouts:
            whole = merge_samples([samples for microbatches in steps for samples in microbatches], batch)
            if self._is_first_rank:
                save_rollouts(options.save_rollouts, whole)
        for microbatches in steps:
            yield self._trainer.step(self._with_reference(microbatches))

    def _with_reference(self, microbatches: list[list[Sample]]) -> list[list[Sample]]:
        return with_ref_log_probs(self._trainer, microbatches) if self._config.kl_coefficient else microbatches

    def _seen(self, metrics: dict[str, float]) -> dict[str, int]:
        self._progress.samples_seen += int(metrics["num_samples"])
        self._progress.tokens_seen += int(metrics["num_tokens"])
        return {"documents_seen": self._progress.samples_seen, "tokens_seen": self._progress.tokens_seen}

    def _watch(self, metrics: dict[str, float]) -> None:
        """At the run's first step the policy is the one that sampled: a mean ratio away from 1 means that something differs."""
        ratio = metrics.get("policy/ratio_new_old")
        low, high = HEALTHY_FIRST_RATIO
        if self._progress.num_steps != 1 or ratio is None or low <= ratio <= high or self._config.watchdog == Watchdog.OFF:
            return
        message = (
            f"mean importance ratio {ratio:.3f} at the first step, expected 1: check --policy-temperature (that of the rollouts), "
            "the loss masks (prompt tokens unmasked?) and whether old log-probabilities come from other (stale) weights"
        )
        if self._config.watchdog == Watchdog.RAISE:
            raise DataError(message)
        if self._is_first_rank:
            logger.warning(message)

    def _save(self, stop: StopRule) -> Path | None:
        """A checkpoint of this state, unless it is the one that was saved last or nothing has been trained."""
        if self._progress.num_steps == (self._resume_step or 0):
            return None
        if self._last_saved is None or self._last_saved[0] != self._progress.num_steps:
            counters = {"progress": vars(self._progress), "recent_rewards": list(stop.recent_rewards)}
            directory = self._output_dir / CHECKPOINT_DIRECTORY
            self._last_saved = (
                self._progress.num_steps,
                self._trainer.save(directory, self._progress.num_steps, counters),
            )
        return self._last_saved[1]
