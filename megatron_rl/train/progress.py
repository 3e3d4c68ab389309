"""Shows a run's progress on stderr: tqdm's bar, on a terminal often, in a log seldom."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from megatron_rl.train.writers import CLIP_FRACTION, KL, REWARD, SKIPPED_STEPS, TOKENS_PER_SECOND, WITHOUT_SIGNAL

# metric: (label, format)
SHOWN = {
    REWARD: ("reward", "{:.3f}"),
    WITHOUT_SIGNAL: ("no signal", "{:.0%}"),
    KL: ("KL", "{:.2e}"),
    CLIP_FRACTION: ("clipped", "{:.1%}"),
    SKIPPED_STEPS: ("skipped", "{:.0f}"),
    TOKENS_PER_SECOND: ("tokens/s", "{:,.0f}"),
}


def make_bar(total: int | None, initial: int, *, is_shown: bool) -> tqdm:
    """A bar over optimiser steps, of which `initial` are done. total None: it has no end."""
    interval = 0.1 if sys.stderr.isatty() else 5.0
    shown = {"file": sys.stderr, "mininterval": interval, "dynamic_ncols": True, "disable": not is_shown}
    return tqdm(total=total, initial=initial, unit="step", **shown)


def describe(metrics: dict[str, Any]) -> str:
    """The metrics worth watching, in a fixed order: `reward 0.512  no signal 25%  KL 1.23e-04  clipped 3.1%  tokens/s 1,234`."""
    shown = ((label, form, metrics.get(name)) for name, (label, form) in SHOWN.items())
    return "  ".join(f"{label} {form.format(value)}" for label, form, value in shown if value is not None)
