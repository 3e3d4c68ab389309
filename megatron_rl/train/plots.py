"""Draws a run's metrics as PNG. matplotlib is imported only for a picture."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from megatron_rl.train.writers import CLIP_FRACTION, ENTROPY, KL, REWARD

PANEL_TITLES = {
    REWARD: "Mean reward",
    KL: "KL to the policy that sampled, mean over a rollout's steps",
    CLIP_FRACTION: "Fraction clipped, mean over a rollout's steps",
    ENTROPY: "Entropy (nats)",
}
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
}


def plot_curves(rows: list[dict], png_path: Path, title: str) -> None:
    """Reward, KL, clip fraction and entropy, where the run measured them, against the optimiser step. The figure is made without
    pyplot: no global state, no display."""
    import matplotlib
    from matplotlib.figure import Figure

    curves = {name: points for name in PANEL_TITLES if (points := _points(rows, name))}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 2.1 * len(curves) + 0.6), layout="constrained")
        panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (name, points) in zip(panels, curves.items(), strict=True):
            panel.plot(*zip(*points, strict=True), color="#2563eb", marker="o" if len(points) < FEW_POINTS else None, markersize=4)
            panel.set_title(PANEL_TITLES[name])
        panels[-1].set_xlabel("Optimiser step")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.savefig(png_path, dpi=120)


def _points(rows: list[dict], name: str) -> list[tuple[int, float]]:
    """A point for each rollout: its last step, and the mean over its steps. The first step on a rollout is on-policy, so KL and
    clip fraction of single steps jump between 0 and their value."""
    found: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get(name) is not None:
            found.setdefault(row["rollout"], []).append((row["step"], row[name]))
    return [(steps[-1][0], fmean(value for _, value in steps)) for steps in found.values()]
