"""Shows a run's progress on stderr. A stderr that fails does not stop the run."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from megatron_rl.train.writers import CLIP_FRACTION, KL, REWARD, TOKENS_PER_SECOND, WITHOUT_SIGNAL

# Where no bar can be drawn: often enough to see that the run goes on, seldom enough for a log.
SECONDS_BETWEEN_LINES = 5.0
# A terminal that is narrower has no bar, and its line keeps the first metrics: columns of the bar, and of all else but metrics.
WIDTH_WITH_BAR, BAR_WIDTH, OTHER_COLUMNS = 100, 20, 40
# metric: (label, format); the first are the last to go
SHOWN = {
    REWARD: ("reward", "{:.3f}"),
    WITHOUT_SIGNAL: ("no signal", "{:.0%}"),
    KL: ("KL", "{:.2e}"),
    CLIP_FRACTION: ("clipped", "{:.1%}"),
    TOKENS_PER_SECOND: ("tokens/s", "{:,.0f}"),
}


class ProgressBar:
    """With rich a bar on a terminal, else a line now and then. total None: the end is unknown. Enable it on one rank."""

    def __init__(self, total: int | None, enabled: bool, initial: int = 0):
        """initial: steps that an earlier run has done; they count in the bar and not in the time left."""
        self._total = total
        self._initial = self._done = initial
        self._started = time.monotonic()
        self._last_line = -float("inf")
        self._last_text: str | None = None
        self._enabled = enabled
        self._bar = _make_bar(total, initial) if enabled and sys.stderr.isatty() else None

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        """step: optimiser steps done so far. Metrics that the row lacks are left out."""
        if not self._enabled:
            return
        self._done = step
        if self._bar is not None:
            text = describe(metrics, room_for_metrics(self._bar.console.width))
            self._bar.update(self._bar.task_ids[0], completed=step, metrics=text)
            return
        self._last_text = describe(metrics)
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print_line()

    def expect(self, total: int) -> None:
        """The number of steps, once it is known."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=total)

    def close(self) -> None:
        """Shows the last state. A second call does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._last_text is not None:
            self._print_line()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _print_line(self) -> None:
        elapsed = time.monotonic() - self._started
        total = "" if self._total is None else f"/{self._total}"
        parts = [f"step {self._done}{total}", self._last_text, f"{format_seconds(elapsed)} elapsed"]
        if self._total is not None and self._total > self._done > self._initial:
            remaining = elapsed / (self._done - self._initial) * (self._total - self._done)
            parts.append(f"{format_seconds(remaining)} left")
        try:
            print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)
        except OSError:  # the reader of stderr is gone
            self._enabled = False
        self._last_line = time.monotonic()
        self._last_text = None


def describe(metrics: dict[str, Any], width: float = math.inf) -> str:
    """The metrics worth watching, in a fixed order, as many as fit into the width and one at least:
    `reward 0.512  no signal 25%  KL 1.23e-04  clipped 3.1%  tokens/s 1,234`."""
    text = ""
    for name, (label, form) in SHOWN.items():
        if metrics.get(name) is not None:
            longer = f"{text}  {label} {form.format(metrics[name])}".lstrip()
            if text and len(longer) > width:
                break
            text = longer
    return text


def room_for_metrics(width: int) -> int:
    return width - OTHER_COLUMNS - (BAR_WIDTH if width >= WIDTH_WITH_BAR else 0)


def format_seconds(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _make_bar(total: int | None, initial: int) -> Any:
    """rich's progress bar, started; None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        return None
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        *([BarColumn(bar_width=BAR_WIDTH)] if console.width >= WIDTH_WITH_BAR else []),
        TextColumn("{task.fields[metrics]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    bar.add_task("train", total=total, completed=initial, metrics="")
    bar.start()
    return bar
