"""Draws head_plans.png: the order of the matmuls in the four plans of docs/kernels.md. Counts, not times.

python docs/images/head_plans.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOCUMENTS = ("#2563eb", "#f59e0b", "#10b981", "#a855f7")
LOGITS, AGAIN, GRADIENT, COEFFICIENT, EDGE, FAINT = "#dbeafe", "#fecaca", "#d1fae5", "#fde68a", "#374151", "#9ca3af"
HEIGHT, GAP = 0.62, 0.08
# Where the strips and the boxes begin, and where the picture ends.
STRIP, FIRST, END = 3.2, 6.2, 18.7
# Plan, what it is for, rows of documents, ends of chunks, and in order: X logits, G gradients, U gradients without c, R logits
# again, c coefficients, s scaling.
SHORT, LONG = (3, 2, 2, 1), (8,)
PLANS = (
    ("in-chunk", "whole documents share a chunk", SHORT, (5, 8), "X1 c G1 X2 c G2"),
    ("scale-last", "a document longer than a chunk:\nits tokens share one c", LONG, (3, 6, 8), "X1 U1 X2 U2 X3 c s G3"),
    ("two-pass", "the same with KL or entropy:\nc differs from token to token", LONG, (3, 6, 8), "X1 X2 X3 c G3 R1 G1 R2 G2"),
    ("row-by-row", "c of a token known from itself:\nchunks cut anywhere", SHORT, (4, 8), "X1 c G1 X2 c G2"),
)


def draw_rows(axis, y: float, documents: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    """T rows as a strip, a colour a document, a dashed line where a chunk ends."""
    unit, left = 0.3, STRIP
    for number, size in enumerate(documents):
        axis.barh(y, size * unit, left=left, height=HEIGHT * 0.6, color=DOCUMENTS[number], edgecolor="white")
        left += size * unit
    first = 0
    for number, cut in enumerate(cuts, 1):
        if cut != cuts[-1]:
            axis.plot([STRIP + cut * unit] * 2, [y - 0.42, y + 0.42], color=EDGE, linestyle="--", linewidth=1)
        axis.text(STRIP + (first + cut) / 2 * unit, y - 0.37, f"{number}", ha="center", va="center", fontsize=8, color=EDGE)
        first = cut


def draw_steps(axis, y: float, steps: str) -> None:
    x = FIRST
    for step in steps.split():
        kind, chunk = step[0], step[1:]
        if kind in "XR":
            boxes = [(1.0, f"logits {chunk}", AGAIN if kind == "R" else LOGITS)]
        elif kind in "GU":
            boxes = [(1.0, f"dX {chunk}", GRADIENT), (1.0, f"dW {chunk}", GRADIENT)]
        else:
            boxes = [(0.36, "c" if kind == "c" else "c ×", COEFFICIENT)]
        for width, text, color in boxes:
            hatch = "///" if kind == "U" else None
            axis.barh(
                y, width, left=x, height=HEIGHT, color=color, edgecolor="#9ca3af" if hatch else EDGE, hatch=hatch, linewidth=0.8
            )
            background = {"facecolor": color, "edgecolor": "none", "pad": 1.0} if hatch else None
            axis.text(x + width / 2, y, text, ha="center", va="center", fontsize=8.5, bbox=background)
            x += width + GAP / 2
        x += GAP


def draw(path: Path) -> None:
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(14.0, 4.8), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        for number, (plan, words, documents, cuts, steps) in enumerate(PLANS):
            y = -1.3 * number
            axis.text(-0.55, y + 0.3, plan, fontsize=11, fontweight="bold", va="center")
            axis.text(-0.55, y - 0.15, words, fontsize=8.8, va="center")
            draw_rows(axis, y, documents, cuts)
            draw_steps(axis, y, steps)
        axis.text(STRIP, 0.72, "rows, by document and chunk", fontsize=9.5, color=EDGE)
        axis.text(FIRST, 0.72, "matmuls in their order, a box each", fontsize=9.5, color=EDGE)
        legend = (
            (LOGITS, None, "first matmul"),
            (GRADIENT, None, "second and third, c applied"),
            (GRADIENT, "///", "second and third, c still unknown"),
            (COEFFICIENT, None, "coefficients; c ×: what was multiplied without"),
            (AGAIN, None, "logits computed again"),
        )
        x = -0.55
        for color, hatch, text in legend:
            axis.barh(
                -4.95, 0.35, left=x, height=0.3, color=color, hatch=hatch, edgecolor="#9ca3af" if hatch else EDGE, linewidth=0.8
            )
            axis.text(x + 0.45, -4.95, text, va="center", fontsize=9)
            x += 0.9 + 0.094 * len(text)
        axis.set_xlim(-0.6, END)
        axis.set_ylim(-5.2, 0.95)
        axis.set_axis_off()
        figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
