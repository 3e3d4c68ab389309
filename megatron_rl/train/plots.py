"""Draws a run's metrics file as PNG. matplotlib is imported only for a picture."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.errors import DataError
from megatron_rl.train.writers import CLIP_FRACTION, ENTROPY, KL, MAX_VIO, REWARD, ROUTE_AGREEMENT, X_AXES, read_metrics

PANEL_TITLES = {
    REWARD: "Mean reward",
    KL: "KL to the policy that sampled, mean over a rollout's steps",
    CLIP_FRACTION: "Fraction clipped, mean over a rollout's steps",
    ENTROPY: "Entropy (nats)",
    MAX_VIO: "Load of the busiest expert over the mean, less 1, mean over layers",
    ROUTE_AGREEMENT: "Share of tokens whose routers choose the experts of the sampler",
}
ACCENT = "#2563eb"
PANEL_INCHES = (8.0, 2.1)
DOTS_PER_INCH = 120
# Fewer points than this are drawn with markers: a line through one point cannot be seen.
FEW_POINTS = 12
STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
}


def plot_curves(metrics_path: str | Path, png_path: str | Path, title: str, *, x_axis: str = "step") -> None:
    """Reward, KL, clip fraction and, where the run measured them, entropy, load balance and routing agreement against the optimiser
    step, or another of X_AXES. The figure is made without pyplot: no global state, no display."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = read_metrics(metrics_path)
    if not rows:
        raise DataError(f"{metrics_path} holds no row yet: there is nothing to plot")
    names = [name for name in PANEL_TITLES if name in (REWARD, KL, CLIP_FRACTION) or _points(rows, name)[0]]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_INCHES[0], PANEL_INCHES[1] * len(names) + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
        for panel, name in zip(panels, names, strict=True):
            places, values = _points(rows, name, x_axis)
            _draw_curve(panel, places, values)
            panel.set_title(PANEL_TITLES[name])
            if name == REWARD and all(0 <= value <= 1 for value in values):
                panel.set_ylim(-0.02, 1.02)
            panel.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 2.5, 5, 10)))
        panels[-1].set_xlabel(X_AXES[x_axis])
        panels[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        Path(png_path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png_path, dpi=DOTS_PER_INCH)


def _points(rows: list[dict], name: str, x_axis: str = "step") -> tuple[list[int], list[float]]:
    """A point for each rollout: x at its last step, and the mean over its steps; a row without a rollout is its own point.

    The first step on a rollout is on-policy, so KL and clip fraction of single steps jump between 0 and their value.
    """
    found: dict[object, list[tuple[int, float]]] = {}
    for number, row in enumerate(rows):
        if row.get(name) is not None:
            found.setdefault(row.get("rollout", ("row", number)), []).append((row[x_axis], row[name]))
    points = list(found.values())
    return [steps[-1][0] for steps in points], [fmean(value for _, value in steps) for steps in points]


def _draw_curve(panel: Any, places: list[int], values: list[float]) -> None:
    if not places:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", va="center", color="#6b7280")
        return
    marker = "o" if len(places) < FEW_POINTS else None
    panel.plot(places, values, color=ACCENT, linewidth=1.6, marker=marker, markersize=4)
