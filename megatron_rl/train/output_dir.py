"""The output directory of a run: what an earlier run has left there, whether this one may use it, and what it goes on with."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.json_values import read_saved
from megatron_rl.train import checkpoints
from megatron_rl.train.options import CHECKPOINT_DIRECTORY, RUN_FILE, SAMPLES_FILE, VOCABULARY_FILE, TrainOptions
from megatron_rl.train.tasks import Task
from megatron_rl.train.user_tasks import CharacterVocabulary, PromptFileTask
from megatron_rl.train.writers import METRICS_FILE, missing_rows, names_what_cannot_be_written

LOCK_FILE = "run.lock"


def check_start(options: TrainOptions) -> Iterator[str]:
    other = "--load" if options.load is not None else "--overwrite"
    if options.resume and (options.load is not None or options.overwrite):
        yield f"--resume and {other} say different things about where to start; give one of them"
    if options.load is not None and not os.path.isdir(options.load):
        yield f"--load {options.load}: there is no such directory"
    elif options.load is not None and not options.resume:
        try:
            checkpoints.latest_checkpoint(checkpoint_directory(options))
        except ConfigError as error:
            yield f"--load {options.load}: {error}"


def checkpoint_directory(options: TrainOptions) -> Path:
    """Where --resume or --load finds checkpoints; --load takes that directory, or the run's that holds it."""
    given = Path(options.output_dir if options.load is None else options.load)
    inside = given / CHECKPOINT_DIRECTORY
    return inside if options.load is None or inside.is_dir() else given


def goes_on(options: TrainOptions) -> bool:
    """Whether this is the run of the --output-dir, and no new one: with --resume, or with --load of that folder."""
    own = os.path.join(options.output_dir, CHECKPOINT_DIRECTORY)
    return options.resume or options.load is not None and is_same_file(str(checkpoint_directory(options)), own)


def check_output_dir(options: TrainOptions) -> Iterator[str]:
    output_dir = options.output_dir
    place = Path(output_dir).absolute()
    while not os.path.exists(place):
        place = place.parent
    if not os.path.isdir(place) or not os.access(place, os.W_OK | os.X_OK):
        yield f"--output-dir {output_dir}: {place} is no folder that can be written; name another"
    own_checkpoints = os.path.join(output_dir, CHECKPOINT_DIRECTORY)
    foreign = checkpoints.foreign_entries(own_checkpoints) if options.overwrite else []
    if foreign:
        yield (
            f"--overwrite: {own_checkpoints} holds what no run has put there "
            f"({printable(', '.join(foreign[:3]))}): move it away, or name another --output-dir"
        )
    has_checkpoint, metrics = os.path.isdir(own_checkpoints), os.path.join(output_dir, METRICS_FILE)
    # A run that failed before its first step has left an empty file, which may be overwritten.
    has_metrics = os.path.exists(metrics) and os.path.getsize(metrics) > 0
    if options.resume and not has_checkpoint:
        how = "--overwrite starts anew" if has_metrics else "start without --resume"
        yield f"--resume: --output-dir {output_dir} holds no {CHECKPOINT_DIRECTORY}; {how}"
    elif (has_checkpoint or has_metrics) and not (options.resume or options.overwrite):
        resume = "--resume goes on, " if has_checkpoint else ""
        yield f"--output-dir {output_dir} holds a run; {resume}--overwrite starts anew, or name another"


def is_same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def lock_of(options: TrainOptions) -> FileLock:
    """Of the output directory, not taken yet. The kernel drops it with the process, by kill -9 too."""
    return FileLock(Path(options.output_dir) / LOCK_FILE, blocking=False)


def take_output_dir(lock: FileLock, options: TrainOptions) -> str:
    """Locks the output directory, and looks again at what it holds: another run may have ended since. ConfigError where another run
    has it. Returns the id of the resumed run, else a new one: it tells this run's files from another's."""
    output_dir = Path(options.output_dir)
    with names_what_cannot_be_written(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(f"{output_dir} is in use by another run: wait for it, end it, or name another --output-dir") from None
    if problems := [*check_output_dir(options)]:
        raise ConfigError(problems)
    path = output_dir / RUN_FILE
    return str(read_saved(path, "run_id")) if goes_on(options) and path.exists() else uuid.uuid4().hex


def prepare_output_dir(options: TrainOptions, task: Task, resume_step: int | None = None, *, run_id: str) -> list[str]:
    """A new run must not find an older run's checkpoints and metrics, unless it goes on from them; text prompts keep their
    vocabulary beside them. Returns lines about rows of metrics that are lost; DataError where the file cannot be gone on with."""
    output_dir = Path(options.output_dir)
    lines = []
    with names_what_cannot_be_written(output_dir):
        if not goes_on(options):
            checkpoints.remove_checkpoints(output_dir / CHECKPOINT_DIRECTORY)
            for name in (METRICS_FILE, SAMPLES_FILE):
                (output_dir / name).unlink(missing_ok=True)
        elif resume_step is not None:
            lines = missing_rows(output_dir / METRICS_FILE, resume_step)
        if not (goes_on(options) and (output_dir / RUN_FILE).exists()):
            (output_dir / RUN_FILE).write_text(json.dumps({"run_id": run_id}) + "\n", encoding="utf-8")
        if isinstance(task, PromptFileTask) and isinstance(task.vocabulary, CharacterVocabulary):
            task.vocabulary.save(output_dir / VOCABULARY_FILE)
    return lines


def check_vocabulary(options: TrainOptions, task: Task) -> None:
    """A checkpoint's token ids must mean the same characters: ConfigError, on every rank and before any of them starts."""
    if not isinstance(task, PromptFileTask) or not (options.resume or options.load):
        return
    run_dir = checkpoint_directory(options).parent
    if isinstance(task.vocabulary, CharacterVocabulary) and (run_dir / VOCABULARY_FILE).exists():
        task.vocabulary.check_saved(run_dir / VOCABULARY_FILE)
