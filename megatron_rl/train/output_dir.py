"""The output directory of a run: who has it, what an earlier run has left there, what a resumed run goes on with."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from megatron_rl.errors import ConfigError
from megatron_rl.files.json_values import read_saved
from megatron_rl.train import checkpoints
from megatron_rl.train.option_rules import check_output_dir, checkpoint_directory, goes_on
from megatron_rl.train.options import CHECKPOINT_DIRECTORY, RUN_FILE, VOCABULARY_FILE, TrainOptions
from megatron_rl.train.run_lock import RunLock
from megatron_rl.train.tasks import Task
from megatron_rl.train.user_tasks import PromptFileTask
from megatron_rl.train.writers import METRICS_FILE, missing_rows, names_what_cannot_be_written
from megatron_rl.validation.checks import Asker, problems_of


def take_output_dir(lock: RunLock, options: TrainOptions) -> list[str]:
    """Locks the output directory, and looks again at what it holds: another run may have ended since. ConfigError where another run
    has it. Returns a line where a dead run had it."""
    output_dir = Path(options.output_dir)
    with names_what_cannot_be_written(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        line = lock.acquire(output_dir)
    problems = problems_of([check_output_dir], options, Asker.TRAIN)
    if problems:
        raise ConfigError(problems)
    return [] if line is None else [line]


def run_id_of(options: TrainOptions) -> str:
    """That of the run which is gone on with, else a new one: it tells this run's files from those of another."""
    path = Path(options.output_dir) / RUN_FILE
    return str(read_saved(path, "run_id")) if goes_on(options) and path.exists() else uuid.uuid4().hex


def prepare_output_dir(options: TrainOptions, task: Task, resume_step: int | None = None, *, run_id: str) -> list[str]:
    """A new run must not find an older run's checkpoints and metrics, unless it goes on from them; text prompts keep their
    vocabulary beside them. Returns lines about rows of metrics that are lost; DataError where the file cannot be gone on with."""
    output_dir = Path(options.output_dir)
    own_checkpoints = output_dir / CHECKPOINT_DIRECTORY
    lines = []
    with names_what_cannot_be_written(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        if not goes_on(options):
            checkpoints.remove_checkpoints(own_checkpoints)
            (output_dir / METRICS_FILE).unlink(missing_ok=True)
        elif resume_step is not None:
            lines = missing_rows(output_dir / METRICS_FILE, resume_step)
        if not (goes_on(options) and (output_dir / RUN_FILE).exists()):
            (output_dir / RUN_FILE).write_text(json.dumps({"run_id": run_id}) + "\n", encoding="utf-8")
        if isinstance(task, PromptFileTask) and task.vocabulary is not None:
            task.vocabulary.save(output_dir / VOCABULARY_FILE)
    return lines


def check_vocabulary(options: TrainOptions, task: Task) -> None:
    """A checkpoint's token ids must mean the same characters: ConfigError, on every rank and before any of them starts."""
    if not isinstance(task, PromptFileTask) or task.vocabulary is None or not (options.resume or options.load):
        return
    run_dir = checkpoint_directory(options).parent
    if (run_dir / VOCABULARY_FILE).exists():
        task.vocabulary.check_saved(run_dir / VOCABULARY_FILE)
