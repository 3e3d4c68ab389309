"""Writes the metrics of a run: metrics.jsonl and TensorBoard. The file can be read at any time.

metrics.jsonl holds one JSON object for each optimiser step, written in one piece. A value that is not finite is null,
because not every JSON reader takes NaN.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, DataError, RunError
from megatron_rl.files.json_values import parse_json_line

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
# The metrics that the curves and the progress bar show.
REWARD = "rollout/reward"
LENGTH = "rollout/response_length"
WITHOUT_SIGNAL = "rollout/groups_without_signal"
KL = "policy/kl_new_old"
CLIP_FRACTION = "policy/clipped_ratio_fraction"
ENTROPY = "policy/entropy"
MAX_VIO = "policy/max_vio"
ROUTE_AGREEMENT = "policy/route_agreement"
TOKENS_PER_SECOND = "tokens_per_second"
SKIPPED_STEPS = "skipped_steps"
# The x-axes of curves: a metric of the row and its title. Each grows from step to step.
X_AXES = {"step": "Optimiser step", "documents_seen": "Documents trained on", "tokens_seen": "Tokens trained on"}

logger = logging.getLogger(__name__)


def weights_and_biases(project: str, output_dir: Path, settings: dict[str, Any]) -> Any:
    """A new run of the project, with the settings of this one; a resumed run begins another. wandb names it, or WANDB_NAME."""
    import wandb

    return wandb.init(project=project, dir=output_dir, config=settings)


class MetricsWriter:
    """Appends one row for each optimiser step. On a rank that is not the writer it does nothing."""

    def __init__(
        self,
        output_dir: str | Path,
        tensorboard: bool = True,
        is_writer_rank: bool = True,
        resume_step: int | None = None,
        *,
        x_axis: str = "step",
        writers: Sequence[Any] = (),
    ):
        """resume_step: the last step that the loaded checkpoint holds; later rows are dropped, the file goes on there.

        None starts an empty file. x_axis: the metric of a row that TensorBoard and `writers` take as its step; the file holds all
        metrics. writers: a user's own, closed with this one; each has add_scalar(name, value, step), as TensorBoard's, or
        log(numbers, step=), as a run of Weights & Biases.
        """
        self._file = None
        self._writers: list[Any] = []
        self._x_axis = x_axis
        self._last_step = resume_step
        if not is_writer_rank:
            return
        for writer in writers:
            if not hasattr(writer, "add_scalar") and not hasattr(writer, "log"):
                raise ConfigError(
                    f"a metrics writer of type {type(writer).__name__} has neither add_scalar(name, value, step) nor log(numbers, "
                    "step=): return one that has"
                )
        output_dir = Path(output_dir)
        path = output_dir / METRICS_FILE
        last_row = None
        with names_what_cannot_be_written(path):
            output_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                path.write_bytes(b"")
            else:
                last_row = {"step": resume_step} | (_truncate_after(path, resume_step) or {})
            self._file = path.open("ab", buffering=0)
        if tensorboard:
            last_x = None if last_row is None else last_row.get(x_axis, 0)
            summary_writer = _make_summary_writer(output_dir / TENSORBOARD_DIRECTORY, last_x)
            self._writers = [] if summary_writer is None else [summary_writer]
        self._writers += writers

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """One row: the step, then the metrics in their order. Steps must increase; values are numbers, text or None."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"metrics of step {step} after step {self._last_step}: a step is written once")
        self._last_step = step
        file = self._file
        if file is None:
            return
        row = {"step": step} | {name: _plain(value) for name, value in metrics.items() if name != "step"}
        _append(file, (json.dumps(row, allow_nan=False) + "\n").encode())
        if self._writers:
            x = row[self._x_axis]
            numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
            for writer in self._writers:
                if hasattr(writer, "add_scalar"):
                    for name, value in numbers.items():
                        if name != "step":
                            writer.add_scalar(name, value, x)
                else:
                    writer.log(numbers, step=x)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        for writer in self._writers:
            end = getattr(writer, "close", None) or getattr(writer, "finish", None)
            if end is not None:
                end()
        self._writers = []

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def names_what_cannot_be_written(path: str | Path, left: str = "") -> Iterator[None]:
    """RunError, in one line, for an OSError inside: a full disk, a read-only file system. left: what is still whole."""
    try:
        yield
    except OSError as error:
        where = path if error.filename is None else error.filename
        raise RunError(f"{where} cannot be written: {error.strerror}{left}") from error


def missing_rows(path: Path, last_step: int) -> list[str]:
    """A line about the rows up to last_step that the file lacks. DataError where the run cannot go on with the file: a line is no
    row, or steps do not increase."""
    steps = [row["step"] for row in read_metrics(path) if row["step"] <= last_step] if path.exists() else []
    lost, last = [], steps[0] - 1 if steps else 0
    for step in [*steps, last_step + 1]:
        if step > last + 1:
            lost.append(f"{last + 1} to {step - 1}" if step > last + 2 else f"{last + 1}")
        last = step
    if not lost:
        return []
    which = f"{path} holds no rows of steps {', '.join(lost)}, which the checkpoint was trained on"
    return [f"{which}: they are lost, and the file goes on with step {last_step + 1}"]


def read_metrics(path: str | Path) -> list[dict]:
    """The rows of a metrics file, whose steps increase. A last line that a killed run left unfinished is ignored; another bad line
    raises DataError."""
    path = Path(path)
    return [row for _, row in _complete_rows(path, path.read_bytes())]


def _truncate_after(path: Path, last_step: int) -> dict | None:
    """Cuts the file behind the row of last_step, and returns the last row that is left. Kept rows are not moved, so a kill loses
    nothing."""
    if not path.exists():
        return None
    kept, last_row = 0, None
    content = path.read_bytes()
    for end, row in _complete_rows(path, content):
        if row["step"] > last_step:
            break
        kept, last_row = end, row
    with path.open("r+b") as file:
        file.truncate(kept)
    return last_row


def _append(file: io.FileIO, line: bytes) -> None:
    """One write without a buffer: a killed process leaves whole lines, at worst a part of the last. A full disk leaves whole lines
    too: a part that it has taken is cut off."""
    end = file.seek(0, os.SEEK_END)
    with names_what_cannot_be_written(file.name, "; its rows are whole, and --resume goes on from the last checkpoint"):
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(end)
            raise


def _complete_rows(path: Path, content: bytes) -> list[tuple[int, dict]]:
    """(offset behind the row, row) of each finished line."""
    rows: list[tuple[int, dict]] = []
    end = 0
    for number, line in enumerate(io.BytesIO(content), 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        place = f"{path}, line {number}"
        row = parse_json_line(line, place, "; delete the line or start a new run")
        if not isinstance(row, dict) or "step" not in row:
            raise DataError(f"{place}: step: missing; is this the metrics file of a training run?")
        step = row["step"]
        if type(step) is not int or step < 1:
            raise DataError(f"{place}: step: {step!r} must be a whole number of at least 1; delete the line or start a new run")
        if rows and step <= rows[-1][1]["step"]:
            raise DataError(
                f"{place}: step: {step} follows {rows[-1][1]['step']}: two runs wrote this file, or it was edited; keep one line "
                "of each step, in order, or move the file away: the run then goes on with a new one"
            )
        rows.append((end, row))
    return rows


def _plain(value: Any) -> int | float | str | None:
    """A value for JSON: numpy and torch scalars become floats, and a value that is not finite becomes None."""
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _make_summary_writer(directory: Path, last_x: int | None) -> Any:
    """TensorBoard's writer, or None. Events past last_x on the x-axis are hidden; with last_x None all old events are removed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning(
            "TensorBoard is not installed: metrics go to %s alone; pip install tensorboard, or pass --no-tensorboard",
            METRICS_FILE,
        )
        return None
    if last_x is None:
        for events in directory.glob("events.out.tfevents.*"):
            events.unlink()
    return SummaryWriter(str(directory), purge_step=None if last_x is None else last_x + 1)
