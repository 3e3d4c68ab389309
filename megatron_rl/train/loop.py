"""The training loop. A rollout, or a stretch of a file, is cut into steps; each step moves the policy and writes a row of metrics.

Read `TrainingRun._train` first: it takes TrainSteps, from `_steps_of_rollouts` or `_steps_of_file`, and hands each to the trainer,
which computes the loss. Between rollouts it asks whether the run ends, and saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.config import EmptySteps, Watchdog
from megatron_rl.errors import EmptyStep
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.train.checkpoints import on_first_rank
from megatron_rl.train.collection import (
    Evaluation,
    SampledRollouts,
    reads_old_log_probs,
    with_old_log_probs,
    with_ref_log_probs,
    with_rollout_log_probs,
)
from megatron_rl.train.document_steps import DocumentSteps
from megatron_rl.train.options import CHECKPOINT_DIRECTORY, ROLLOUTS_BETWEEN_SAMPLES, SAMPLES_FILE, TrainOptions, settings_of
from megatron_rl.train.progress import describe, make_bar
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollout_files import save_rollouts
from megatron_rl.train.rollouts import (
    Microbatches,
    Sample,
    SharedRollout,
    partition,
    rollout_values,
    split_into_steps,
)
from megatron_rl.train.stopping import StopRule, StopSignals
from megatron_rl.train.trainer import PolicyTrainer
from megatron_rl.train.watchdog import WatchdogState, look
from megatron_rl.train.writers import (
    REWARD,
    SKIPPED_STEPS,
    TOKENS_PER_SECOND,
    MetricsWriter,
    names_what_cannot_be_written,
)

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far the run is; a checkpoint keeps it beside the weights."""

    num_rollouts: int = 0
    num_steps: int = 0
    samples_seen: int = 0
    prompts_seen: int = 0
    tokens_seen: int = 0
    skipped_steps: int = 0
    """Steps without a token that trains, under --empty-step skip; num_steps counts the others."""
    first_reward: float | None = None
    last_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: at nothing, or at a checkpoint."""

    progress: Progress = field(default_factory=Progress)
    recent_rewards: tuple[float, ...] = ()
    stream_state: dict | None = None
    """The position in the rollout file, under --docs-per-step."""
    watchdog: WatchdogState = field(default_factory=WatchdogState)

    @classmethod
    def from_counters(cls, counters: dict[str, Any]) -> Start:
        """What a checkpoint keeps beside the weights; KeyError for one that no run has saved."""
        progress, watchdog = Progress(**counters["progress"]), WatchdogState(**counters["watchdog"])
        return cls(progress, tuple(counters["recent_rewards"]), counters.get("stream"), watchdog)


@dataclass(frozen=True, slots=True)
class Outcome:
    progress: Progress
    reason: str
    exit_code: int
    seconds: float
    checkpoint: Path | None


@dataclass(frozen=True, slots=True)
class TrainStep:
    """What one optimiser step trains on."""

    microbatches: Microbatches
    rollout: int
    """The last rollout that it has samples of."""
    rollout_metrics: dict[str, float]
    """The metrics of that rollout, or of the samples in the step."""
    may_be_last: bool
    """Whether the run may stop, or save a checkpoint, behind it."""


class TrainingRun:
    """One run of the loop on this rank. Every rank makes one and calls `run`."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        rollouts: SampledRollouts | ReplayedRollouts,
        options: TrainOptions,
        start: Start,
        *,
        evaluation: Evaluation | None = None,
    ):
        self._trainer, self._rollouts, self._options, self._config = trainer, rollouts, options, trainer.config
        self._documents = None if self._config.docs_per_step is None else DocumentSteps(trainer, options)
        self._evaluation = evaluation
        self._start, self._progress = start, start.progress
        self._measures_first_steps = reads_old_log_probs(options, self._config)
        self._is_first_rank = dist.get_rank() == 0
        self._watchdog = start.watchdog
        self._saved_steps = start.progress.num_steps
        self._checkpoint: Path | None = None

    def run(self) -> Outcome:
        """Trains until a rule stops it. The last state is saved, also after a signal."""
        options, started = self._options, time.monotonic()
        total = None  # a file may end before, and documents make as many steps as they make
        if self._documents is None and not options.rollouts and options.num_rollouts is not None:
            total = options.num_rollouts * options.steps_per_rollout
        with (
            StopSignals() as signals,
            self._make_writer() if self._is_first_rank else contextlib.nullcontext() as self._writer,
            make_bar(total, self._progress.num_steps, is_shown=self._is_first_rank) as self._bar,
        ):
            stop = StopRule(signals, options.target_reward, self._start.recent_rewards)
            if self._documents is not None and isinstance(self._rollouts, ReplayedRollouts):
                steps = self._steps_of_file(self._documents, self._rollouts)
            else:
                steps = self._steps_of_rollouts()
            reason = self._train(steps, stop)
            checkpoint = self._save(stop)
        return Outcome(self._progress, reason, stop.exit_code, time.monotonic() - started, checkpoint)

    def _train(self, steps: Iterator[TrainStep], stop: StopRule) -> str:
        """Takes the steps until they are all done or the rule stops the run, and says which."""
        progress, save_interval, limit = self._progress, self._options.save_interval, self._options.num_rollouts
        began = time.monotonic()
        for step in steps:
            metrics = self._step(step)
            if metrics is not None:
                self._record(metrics, step.rollout, step.rollout_metrics, began)
            if step.may_be_last:
                rollouts_before, progress.num_rollouts = progress.num_rollouts, step.rollout + 1
                if stop.should_stop(step.rollout_metrics[REWARD]):
                    return stop.reason or ""
                if progress.num_rollouts // save_interval > rollouts_before // save_interval:
                    self._save(stop)
            began = time.monotonic()
        is_cut = limit is not None and progress.num_rollouts >= limit
        return f"all {limit} rollouts are done" if is_cut else "every rollout of the file is trained on"

    def _steps_of_rollouts(self) -> Iterator[TrainStep]:
        """Each rollout is sampled, or read, by the policy that the steps before it have left."""
        options, progress = self._options, self._progress
        while options.num_rollouts is None or progress.num_rollouts < options.num_rollouts:
            rollout = self._rollouts.get(progress.num_rollouts, policy_version=progress.num_steps)
            if rollout is None:
                return
            is_shown = options.show_samples and progress.num_rollouts % ROLLOUTS_BETWEEN_SAMPLES == 0
            if is_shown and self._is_first_rank and isinstance(self._rollouts, SampledRollouts):
                lines = "\n".join(self._rollouts.lines_about(rollout, options.show_samples))
                self._bar.write(lines, file=sys.stderr)
                with open(Path(options.output_dir) / SAMPLES_FILE, "a", encoding="utf-8", errors="backslashreplace") as file:
                    print(lines, file=file)
            rollout_metrics = {name: sum(values) / len(values) for name, values in rollout_values(rollout.headers).items()}
            if self._evaluation is not None and progress.num_rollouts % options.save_interval == 0:
                rollout_metrics |= self._evaluation.measure()  # of the policy that sampled this rollout
            steps = self._cut(rollout)
            for number, microbatches in enumerate(steps, 1):
                yield TrainStep(microbatches, rollout.own.rollout_index, rollout_metrics, may_be_last=number == len(steps))

    def _steps_of_file(self, documents: DocumentSteps, rollouts: ReplayedRollouts) -> Iterator[TrainStep]:
        """--docs-per-step over recorded rollouts: a step may hold the end of one and the beginning of another."""
        num_rollouts = self._progress.num_rollouts
        for step in documents.from_file(rollouts, first_rollout=num_rollouts, state=self._start.stream_state):
            rollout_metrics, last_rollout = documents.rollout_metrics(step)
            num_rollouts = max(num_rollouts, last_rollout + 1)
            yield TrainStep(step.microbatches, num_rollouts - 1, rollout_metrics, may_be_last=True)

    def _cut(self, rollout: SharedRollout) -> list[Microbatches]:
        """This rank's micro-batches of each optimiser step on the rollout.

        A later step has the old log-probabilities of its samples, measured before the first one moves the policy. The first step
        is on-policy: its own are the old ones, its ratio is 1, and without a reader of them it costs no forward.
        """
        groups, options, own = self._trainer.groups, self._options, rollout.own
        if self._documents is None:
            headers_of_steps = split_into_steps(rollout.headers, options.steps_per_rollout, own.rollout_index)
            sample_of = {sample.index: sample for sample in own.samples}
            steps: list[Microbatches] = [
                [
                    [sample_of[header.index] for header in part]
                    for part in partition(headers, groups.dp.rank(), options.micro_batch_size)
                ]
                for headers in headers_of_steps
            ]
        else:
            steps = [step.microbatches for step in self._documents.from_rollout(own)]
        unmeasured = [] if self._measures_first_steps else steps[:1]
        steps = [*unmeasured, *(with_old_log_probs(self._trainer, step) for step in steps[len(unmeasured) :])]
        if options.save_rollouts:
            samples = [sample for step in steps for part in step for sample in part]
            self._save_rollout(rollout, samples, options.save_rollouts)
        return steps

    def _save_rollout(self, rollout: SharedRollout, samples: list[Sample], path: str) -> None:
        """The first rank writes the samples of all data-parallel ranks, in the rollout's order. Communication: on_all_ranks'."""
        groups = self._trainer.groups
        is_given = groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0
        sample_of = {sample.index: sample for share in on_all_ranks(lambda: samples if is_given else []) for sample in share}
        whole = [sample_of[header.index] for header in rollout.headers]

        def write() -> None:
            with names_what_cannot_be_written(path, "; --resume cuts it to what the last checkpoint knows"):
                save_rollouts(path, dataclasses.replace(rollout.own, samples=whole))

        on_first_rank(write)

    def _step(self, step: TrainStep) -> dict[str, float] | None:
        """The metrics of the step. None under --empty-step skip for a step that no rank has trained on."""
        microbatches, steps_done = step.microbatches, self._progress.num_steps
        # Each step of a file under --docs-per-step is a first one.
        if self._measures_first_steps:
            microbatches = with_old_log_probs(self._trainer, microbatches)
        if needs_rollout_log_probs(self._config):
            microbatches = with_rollout_log_probs(self._trainer, microbatches)
        if self._config.kl_coefficient:
            microbatches = with_ref_log_probs(self._trainer, microbatches)
        try:
            return self._trainer.step(
                microbatches,
                policy_version=steps_done,
                counts_phantoms=self._config.watchdog != Watchdog.OFF and steps_done == 0,
            )
        except EmptyStep as error:
            if self._config.empty_step != EmptySteps.SKIP:
                raise
            self._progress.skipped_steps += 1
            if self._is_first_rank:
                number = f"{self._progress.skipped_steps} so far, after {steps_done} that trained"
                logger.warning(f"rollout {step.rollout}: a step is skipped ({number}): {error}")
            return None

    def _record(self, metrics: dict[str, float], rollout: int, rollout_metrics: dict[str, float], began: float) -> None:
        """Writes a row of the metrics file, and counts what has been trained on."""
        progress, seconds = self._progress, time.monotonic() - began
        progress.last_reward = rollout_metrics[REWARD]
        progress.first_reward = progress.last_reward if progress.first_reward is None else progress.first_reward
        progress.num_steps += 1
        progress.samples_seen += int(metrics["num_samples"])
        progress.prompts_seen += int(metrics["num_prompts"])
        progress.tokens_seen += int(metrics["num_tokens"])
        row = {
            "rollout": rollout,
            **rollout_metrics,
            **metrics,
            "num_documents": metrics["num_samples"],
            "documents_seen": progress.samples_seen,
            "prompts_seen": progress.prompts_seen,
            "tokens_seen": progress.tokens_seen,
            "seconds": seconds,
            TOKENS_PER_SECOND: metrics["num_tokens"] / seconds,
        }
        if self._config.empty_step == EmptySteps.SKIP:
            row[SKIPPED_STEPS] = progress.skipped_steps
        if self._writer is not None:
            self._writer.write(progress.num_steps, row)
        self._bar.set_postfix_str(describe(row), refresh=False)
        self._bar.update()
        self._watchdog = look(self._config.watchdog, self._watchdog, progress.num_steps, row, speaks=self._is_first_rank)

    def _make_writer(self) -> MetricsWriter:
        options, wandb = self._options, None
        if options.wandb_project is not None:
            wandb = {"project": options.wandb_project, "config": settings_of(options, self._config)}
        return MetricsWriter(options.output_dir, self._start.progress.num_steps, tensorboard=options.tensorboard, wandb=wandb)

    def _save(self, stop: StopRule) -> Path | None:
        """Saves a checkpoint of this state, unless it is saved already. None where nothing has been trained."""
        if self._saved_steps != self._progress.num_steps:
            counters: dict[str, Any] = {"progress": vars(self._progress), "recent_rewards": list(stop.recent_rewards)}
            counters |= {"watchdog": dataclasses.asdict(self._watchdog), "settings": settings_of(self._options, self._config)}
            if self._documents is not None:
                counters["stream"] = self._documents.state_dict()
            directory = Path(self._options.output_dir) / CHECKPOINT_DIRECTORY
            self._saved_steps = self._progress.num_steps
            self._checkpoint = self._trainer.save(directory, self._saved_steps, counters)
        return self._checkpoint
