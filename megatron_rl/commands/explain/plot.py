"""The picture of `megatron-rl explain --plot`: the share of each sample, the weight of each token. It never imports pyplot."""

from __future__ import annotations

import importlib.util
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_rl.commands.explain.report import Explanation
from megatron_rl.errors import ConfigError
from megatron_rl.training.plots import RUN_COLORS, picture

# A segment of the bar below this share has no room for its label.
LABELLED_SHARE = 0.05
# One lies on another where aggregations agree: both are seen.
LINES = ("-", (0, (5, 3)), (0, (1, 1.5)), "-.")
# Edges between more segments than this would hide them.
EDGED_SAMPLES = 64


def check_plot(path: str) -> list[str]:
    """Why no picture can be drawn there, known before anything is read."""
    if importlib.util.find_spec("matplotlib") is None:
        return [f"--plot {path} needs matplotlib: pip install matplotlib, or leave --plot out; --json has the same numbers"]
    if Path(path).is_dir() or not Path(path).suffix:
        return [f"--plot {path} must name a picture, as in {Path(path) / 'weights' if Path(path).is_dir() else path}.png"]
    return []


def draw_weights(explanation: Explanation, path: str) -> None:
    """Raises ConfigError where the file cannot be written. What check_plot finds is not checked again."""
    count = len(explanation.weighings)
    try:
        with picture(path, (9.0, 3.4 + 0.5 * count)) as figure:
            shares, weights = figure.subplots(2, 1, height_ratios=(0.8 + 0.5 * count, 2.2))
            _draw_shares(shares, explanation)
            _draw_weights(weights, explanation)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error


def _draw_shares(panel: Any, explanation: Explanation) -> None:
    """A bar an aggregation, a segment a sample, a colour a prompt."""
    prompts = explanation.step.prompts
    names = prompts or list(range(len(explanation.step.masks)))
    edge = 0.8 if len(names) <= EDGED_SAMPLES else 0.0
    colors = {name: RUN_COLORS[index % len(RUN_COLORS)] for index, name in enumerate(dict.fromkeys(names))}
    for row, weighing in enumerate(explanation.weighings):
        shares = weighing.shares.tolist()
        starts = [0.0, *accumulate(shares)][:-1]
        style = {"color": [colors[name] for name in names], "edgecolor": "white", "linewidth": edge, "alpha": 0.85}
        panel.barh([row] * len(shares), shares, left=starts, **style)
        for start, share in zip(starts, shares, strict=True):
            if share >= LABELLED_SHARE:
                panel.text(start + share / 2, row, f"{share:.0%}", ha="center", va="center", color="white", fontsize=9)
    panel.set_yticks(range(len(explanation.weighings)), [weighing.title for weighing in explanation.weighings])
    panel.invert_yaxis()
    panel.set_xlim(0, 1)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panel.grid(False)
    panel.set_title("Share of each sample; a colour is a prompt" if prompts else "Share of each sample")


def _draw_weights(panel: Any, explanation: Explanation) -> None:
    """One step a sample, as wide as its response."""
    edges = [0]
    for mask in explanation.step.masks:
        edges.append(edges[-1] + mask.numel())
    for index, weighing in enumerate(explanation.weighings):
        color = RUN_COLORS[index % len(RUN_COLORS)]
        weights = [weight or math.nan for weight in weighing.token_weights.tolist()]  # a gap where a sample is fully masked
        look = {"color": color, "linewidth": 1.8, "linestyle": LINES[index % len(LINES)]}
        panel.stairs(weights, edges, baseline=None, label=weighing.title, **look)
    panel.set_axisbelow(True)
    panel.set_yscale("log")
    panel.set_xlabel("response tokens of the step, sample after sample")
    panel.set_title("Weight of a token")
    panel.legend(fontsize=9)
