"""The picture of a bench run: time over the floor of each provider, one panel a shape. It must never import pyplot."""

from __future__ import annotations

import importlib.util
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.commands.bench.harness import OK

OURS_COLOR, OTHER_COLOR, FLOOR_COLOR = "#2563eb", "#9ca3af", "#111827"
MOST_PANELS, PANELS_IN_A_ROW = 6, 2
PANEL_WIDTH, BAR_INCHES, PANEL_MARGIN = 6.2, 0.27, 0.9
# Bars are cut at this many floors, or at twice the fastest one: a slow provider must not flatten the others. Numbers are not cut.
LONGEST_BAR = 12.0
TITLE_WIDTH = 52
DOTS_PER_INCH = 120
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "xtick.color": "#374151",
    "ytick.color": "#111827",
}


@dataclass(frozen=True, slots=True)
class Look:
    """What the bars of a picture are: a ratio of the rows of one kind of case, 1 marked by a dashed line."""

    case_kind: str
    ratio: str  # its key in a row; rows without it are not shown
    title: str
    axis: str
    cpu_warning: str


LOSSES = Look(
    case_kind="loss",
    ratio="floor_ratio",
    title="Loss forward and backward: time over the fewest bytes at the measured copy bandwidth",
    axis="time over the floor (dashed)",
    cpu_warning=" (CPU: not a statement about GPUs)",
)


def why_no_picture() -> str | None:
    """None where matplotlib can be imported."""
    return None if importlib.util.find_spec("matplotlib") else "chart.png left out: matplotlib is not installed"


def panels(report: dict, look: Look) -> list[dict]:
    """The first cases of the kind in which something ran, void ones left out."""
    cases = [case for case in report["cases"] if case["kind"] == look.case_kind and not case["is_void"]]
    return [case for case in cases if bars(case, look)][:MOST_PANELS]


def bars(case: dict, look: Look) -> list[dict]:
    """The rows that are shown, the slowest first."""
    rows = [row for row in case["rows"] if row["status"] == OK and row[look.ratio] is not None]
    return sorted(rows, key=lambda row: -row["median_ms"])


def draw(report: dict, path: str | Path, look: Look) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = panels(report, look)
    num_rows = max(1, -(-len(shown) // PANELS_IN_A_ROW))
    most_bars = max((len(bars(case, look)) for case in shown), default=1)
    height = num_rows * (BAR_INCHES * most_bars + PANEL_MARGIN) + 0.8
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH * PANELS_IN_A_ROW, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(num_rows, PANELS_IN_A_ROW, squeeze=False).ravel()
        for axis, case in zip(axes[: len(shown)], shown, strict=True):
            _draw_panel(axis, case, look)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        machine = report["machine"]
        where = f"{machine['device_name']}, {machine['date']}, torch {machine['torch']}"
        warning = look.cpu_warning if machine["device"] == "cpu" else ""
        figure.suptitle(f"{look.title}\n{where}{warning}{', VOID' if report['is_void'] else ''}", x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_panel(axis: Any, case: dict, look: Look) -> None:
    rows = bars(case, look)
    ratios = [row[look.ratio] for row in rows]
    longest = min(max(ratios), max(LONGEST_BAR, 2 * min(ratios)))
    lengths = [min(ratio, longest) for ratio in ratios]
    axis.barh(range(len(rows)), lengths, color=[OURS_COLOR if row["is_ours"] else OTHER_COLOR for row in rows], height=0.72)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        axis.text(length, place, f" {row[look.ratio]:.2f}x  {row['median_ms']:.3g} ms", va="center", fontsize=8.5)
    axis.axvline(1.0, color=FLOOR_COLOR, linewidth=1.0, linestyle="--")
    axis.set_yticks(range(len(rows)), [row["provider"] for row in rows])
    axis.set_xlim(0, longest * 1.32)
    axis.set_xlabel(look.axis)
    axis.set_title(textwrap.fill(case["title"], TITLE_WIDTH))
