"""Writes the metrics of a run: metrics.jsonl, TensorBoard's events, and through these Weights & Biases.

metrics.jsonl holds one JSON object for each optimiser step, written in one piece, so the file can be read at any time. A value that
is not finite is null, because not every JSON reader takes NaN.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.errors import RunError
from megatron_rl.files.json_values import finished_lines, parse_json_line

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
# The metrics that the curves and the progress bar show.
REWARD = "rollout/reward"
LENGTH = "rollout/response_length"
WITHOUT_SIGNAL = "rollout/groups_without_signal"
KL = "policy/kl_new_old"
CLIP_FRACTION = "policy/clipped_ratio_fraction"
ENTROPY = "policy/entropy"
TOKENS_PER_SECOND = "tokens_per_second"
SKIPPED_STEPS = "skipped_steps"

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one row for each optimiser step. One rank makes it."""

    def __init__(self, output_dir: str | Path, resume_step: int, *, tensorboard: bool, wandb: dict[str, Any] | None = None):
        """resume_step: the last step that the loaded checkpoint holds; later rows are dropped, the file goes on there. 0 starts
        an empty file. wandb: arguments of wandb.init for a new run there, which gets the events of TensorBoard; None: no run."""
        output_dir = Path(output_dir)
        path = output_dir / METRICS_FILE
        with names_what_cannot_be_written(path):
            output_dir.mkdir(parents=True, exist_ok=True)
            if resume_step and path.exists():
                keep_lines(path, lambda row: row["step"] <= resume_step)
            self._file = path.open("ab" if resume_step else "wb", buffering=0)
        self._wandb = None
        if wandb is not None:
            from wandb import init

            self._wandb = init(**wandb, dir=output_dir, sync_tensorboard=True)  # before the events that it listens to
        self._events = _make_summary_writer(output_dir / TENSORBOARD_DIRECTORY, resume_step) if tensorboard else None

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """One row: the step, then the metrics in their order: numbers, text or None."""
        row = {"step": step, **metrics}
        row = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with names_what_cannot_be_written(self._file.name, "; --resume goes on from the last checkpoint"):
            while line:  # without a buffer a write may take a part
                line = line[self._file.write(line) :]
        if self._events is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._events.add_scalar(name, value, step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


@contextlib.contextmanager
def names_what_cannot_be_written(path: str | Path, left: str = "") -> Iterator[None]:
    """RunError, in one line, for an OSError inside: a full disk, a read-only file system. left: what is still whole."""
    try:
        yield
    except OSError as error:
        where = path if error.filename is None else error.filename
        raise RunError(f"{where} cannot be written: {error.strerror}{left}") from error


def read_metrics(path: str | Path) -> list[dict]:
    """The rows of a metrics file. A last line that a killed run left unfinished is dropped; another bad line raises DataError."""
    return [parse_json_line(line, f"{path}, line {number}") for number, line in finished_lines(path)]


def keep_lines(path: str | Path, is_kept: Callable[[dict], bool]) -> None:
    """Drops the first line whose object is not kept and all behind it, for a resumed run; and a last line without an end."""
    size = 0
    for number, line in finished_lines(path):
        if not is_kept(parse_json_line(line, f"{path}, line {number}")):
            break
        size += len(line)
    os.truncate(path, size)


def _make_summary_writer(directory: Path, resume_step: int) -> Any:
    """TensorBoard's writer, or None. Events after resume_step are hidden; with resume_step 0 old events are removed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning(f"TensorBoard is not installed: metrics go only to {METRICS_FILE}; pip install tensorboard")
        return None
    if resume_step == 0:
        for events in directory.glob("events.out.tfevents.*"):
            os.unlink(events)
    return SummaryWriter(str(directory), purge_step=resume_step + 1)
