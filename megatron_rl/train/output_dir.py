"""The output directory of a run: what an earlier run has left there, whether this one may use it, and what it goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_rl.errors import ConfigError
from megatron_rl.train import checkpoints
from megatron_rl.train.options import CHECKPOINT_DIRECTORY, SAMPLES_FILE, VOCABULARY_FILE, TrainOptions
from megatron_rl.train.tasks import Task
from megatron_rl.train.user_tasks import CharacterVocabulary, PromptFileTask
from megatron_rl.train.writers import METRICS_FILE, names_what_cannot_be_written

LOCK_FILE = "run.lock"


def check_output_dir(options: TrainOptions) -> Iterator[str]:
    output_dir = Path(options.output_dir)
    metrics, latest = output_dir / METRICS_FILE, output_dir / CHECKPOINT_DIRECTORY / checkpoints.LATEST
    # A run that failed before its first step has left an empty file, which may be overwritten.
    holds_a_run = latest.exists() or (metrics.exists() and metrics.stat().st_size > 0)
    if holds_a_run and not (options.resume or options.overwrite):
        yield f"--output-dir {output_dir} holds a run; --resume goes on, --overwrite starts anew, or name another"


def take_output_dir(lock: FileLock, options: TrainOptions, task: Task) -> None:
    """Locks the output directory, and empties it for a new run, which must not find an older run's checkpoints and metrics.

    Text prompts keep their vocabulary there. Raises ConfigError where another run has the directory or has filled it since the
    start, and where the token ids of the checkpoint would mean other characters.
    """
    output_dir = Path(options.output_dir)
    with names_what_cannot_be_written(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(f"{output_dir} is in use by another run: wait for it, end it, or name another --output-dir") from None
        if problems := [*check_output_dir(options)]:
            raise ConfigError(problems)
        if not options.resume:
            checkpoints.remove_checkpoints(output_dir / CHECKPOINT_DIRECTORY)
            for name in (METRICS_FILE, SAMPLES_FILE, VOCABULARY_FILE):
                (output_dir / name).unlink(missing_ok=True)
        if isinstance(task, PromptFileTask) and isinstance(task.vocabulary, CharacterVocabulary):
            task.vocabulary.save(output_dir / VOCABULARY_FILE)
