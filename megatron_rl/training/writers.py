"""The metrics of a run on disk: metrics.jsonl and TensorBoard; it must never leave a file that cannot be read.

metrics.jsonl holds one JSON object for each optimiser step, written in one piece. A value that is not finite is written
as null, which every JSON reader takes.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
# What the curves and the progress bar look for in a row.
REWARD = "rollout/reward"
KL = "policy/kl_new_old"
CLIP_FRACTION = "policy/clipped_ratio_fraction"
ENTROPY = "policy/entropy"
TOKENS_PER_SECOND = "tokens_per_second"

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one row for each optimiser step. On a rank that is not the writer it does nothing at all."""

    def __init__(
        self,
        output_dir: str | Path,
        tensorboard: bool = True,
        is_writer_rank: bool = True,
        resume_step: int | None = None,
    ):
        """resume_step: the last step that the loaded checkpoint holds; later rows are dropped, the file goes on there.

        None starts an empty file.
        """
        self._file = self._tensorboard = None
        self._last_step = resume_step
        if not is_writer_rank:
            return
        output_dir = Path(output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / METRICS_FILE
        if resume_step is None:
            path.write_bytes(b"")
        else:
            _truncate_after(path, resume_step)
        self._file = path.open("ab", buffering=0)
        if tensorboard:
            self._tensorboard = _make_summary_writer(output_dir / TENSORBOARD_DIRECTORY, resume_step)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """One row: the step, then the metrics in their order. Steps must increase; values are numbers, text or None."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}: a step is written once")
        self._last_step = step
        if self._file is None:
            return
        row = {"step": step} | {name: _plain(value) for name, value in metrics.items() if name != "step"}
        # One write without a buffer: a killed process leaves whole lines, at worst a part of the last.
        self._file.write((json.dumps(row, allow_nan=False) + "\n").encode())
        if self._tensorboard is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict]:
    """The rows of a metrics file. A last line that a killed run left unfinished is ignored; another bad line raises."""
    path = Path(path)
    return [row for _, row in _complete_rows(path, path.read_bytes())]


def _truncate_after(path: Path, last_step: int) -> None:
    """Cuts the file behind the row of last_step. What is kept is not moved, so a kill in between loses nothing."""
    if not path.exists():
        return
    kept = 0
    content = path.read_bytes()
    for end, row in _complete_rows(path, content):
        if row["step"] > last_step:
            break
        kept = end
    with path.open("r+b") as file:
        file.truncate(kept)


def _complete_rows(path: Path, content: bytes) -> list[tuple[int, dict]]:
    """(offset behind the row, row) of each finished line."""
    rows = []
    end = 0
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}); delete the line or start a new run") from error
        if not isinstance(row, dict) or "step" not in row:
            raise DataError(f"{path}, line {number}: step: missing; is this the metrics file of a training run?")
        rows.append((end, row))
    return rows


def _plain(value: Any) -> int | float | str | None:
    """What JSON can hold: numpy and torch scalars become floats, what is not finite becomes None."""
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _make_summary_writer(directory: Path, resume_step: int | None) -> Any:
    """TensorBoard's writer, or None. Events of steps past resume_step are hidden; without one, all old events go."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning(
            "TensorBoard is not installed: metrics go to %s alone; pip install tensorboard, or pass --no-tensorboard",
            METRICS_FILE,
        )
        return None
    if resume_step is None:
        for events in directory.glob("events.out.tfevents.*"):
            events.unlink()
    return SummaryWriter(str(directory), purge_step=None if resume_step is None else resume_step + 1)
