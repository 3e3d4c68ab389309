"""Shows a run's progress on stderr: a bar on a terminal, else a line now and then. A stderr that fails does not stop the run."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from threading import RLock
from typing import Any

from megatron_rl.train.writers import CLIP_FRACTION, KL, REWARD, SKIPPED_STEPS, TOKENS_PER_SECOND, WITHOUT_SIGNAL

# Where no bar can be drawn: often enough to see that the run goes on, seldom enough for a log.
SECONDS_BETWEEN_LINES = 5.0
# As where `head` has read enough: the run goes on.
STDERR_MAY_BE_GONE = contextlib.suppress(OSError)
# metric: (label, format)
SHOWN = {
    REWARD: ("reward", "{:.3f}"),
    WITHOUT_SIGNAL: ("no signal", "{:.0%}"),
    KL: ("KL", "{:.2e}"),
    CLIP_FRACTION: ("clipped", "{:.1%}"),
    SKIPPED_STEPS: ("skipped", "{:.0f}"),
    TOKENS_PER_SECOND: ("tokens/s", "{:,.0f}"),
}


class ProgressBar:
    """total None: the end is unknown. Enable it on one rank. Without tqdm one line says so, and nothing is shown."""

    def __init__(self, total: int | None, enabled: bool, initial: int = 0):
        """initial: steps that an earlier run has done; they count in the bar and not in the time left."""
        self._bar = None
        self._rollout: object = None
        self._moved: dict[str, Any] = {}
        with STDERR_MAY_BE_GONE:
            self._bar = _make_bar(total, initial) if enabled else None

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        """step: optimiser steps done so far. Metrics that the row lacks are left out. At a rollout's first step, where nothing has
        moved, KL and clip fraction are those of the last step that was another one, if there was one."""
        if self._bar is None:
            return
        if metrics.get("rollout") is not None and metrics["rollout"] == self._rollout:
            self._moved = {name: metrics[name] for name in (KL, CLIP_FRACTION) if metrics.get(name) is not None}
        self._rollout = metrics.get("rollout")
        self._bar.set_description_str(describe(metrics | self._moved), refresh=False)
        with STDERR_MAY_BE_GONE:
            self._bar.update(step - self._bar.n)

    def expect(self, total: int) -> None:
        """The number of steps, once it is known."""
        if self._bar is not None:
            self._bar.total = total

    def leave_out_a_step(self) -> None:
        """One step fewer will be done."""
        if self._bar is not None and self._bar.total is not None:
            self._bar.total -= 1

    def close(self) -> None:
        """Shows the last state. A second call does nothing."""
        if self._bar is not None:
            with STDERR_MAY_BE_GONE:
                self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def describe(metrics: dict[str, Any]) -> str:
    """The metrics worth watching, in a fixed order: `reward 0.512  no signal 25%  KL 1.23e-04  clipped 3.1%  tokens/s 1,234`."""
    shown = ((label, form, metrics.get(name)) for name, (label, form) in SHOWN.items())
    return "  ".join(f"{label} {form.format(value)}" for label, form, value in shown if value is not None)


def _make_bar(total: int | None, initial: int) -> Any:
    """A bar of tqdm; None where it is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        logging.getLogger(__name__).warning("tqdm is not installed: no progress is shown; pip install tqdm")
        return None

    class Bar(tqdm):
        """Without tqdm's thread and its lock between processes: one that is forked or killed must not stop a run."""

        monitor_interval = 0

    class Lines(Bar):
        """Prints whole lines, because a log has no cursor to move back."""

        disable: bool

        @staticmethod
        def status_printer(file: Any) -> Callable[[str], None]:
            return lambda line: print(line, file=file, flush=True)

        def close(self) -> None:
            if not self.disable and self.n != self.last_print_n:
                self.display()
            self.disable = True

    is_terminal = sys.stderr.isatty()
    Bar.set_lock(RLock())
    kind, interval, drawn = (Bar, 0.1, " |{bar:20}|") if is_terminal else (Lines, SECONDS_BETWEEN_LINES, "")
    form = f"step {{n_fmt}}/{{total_fmt}}{drawn}  {{desc}}  {{elapsed}} elapsed  {{remaining}} left"
    return kind(total=total, initial=initial, bar_format=form, dynamic_ncols=True, miniters=1, mininterval=interval)
