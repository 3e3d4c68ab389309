"""Shows the results of a run as tables, Markdown, JSON and a picture, with the same numbers. Stored numbers are not rounded."""

from __future__ import annotations

import importlib.util
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import OK, ProviderRow
from benchmarks.problems import HeadProblem, LogitsProblem
from benchmarks.providers import LOGITS_MATMUL, ONE_MATMUL, THREE_MATMULS, UNFUSED
from benchmarks.targets import MISSED, NOT_MEASURED

VOID_HEADING = "VOID: the first provider's time moved by more than {limit:.0%} from the first half of the rounds to the second"
CPU_WARNING, CPU_RATIOS = "CPU, not a statement about GPUs", "CPU: wall clock of a machine that may be busy; read the ratios"
DASH = "-"

# The picture.
OURS_COLOR, OTHER_COLOR, FLOOR_COLOR = "#2563eb", "#9ca3af", "#111827"
MOST_PANELS, PANELS_IN_A_ROW = 6, 2
PANEL_WIDTH, BAR_INCHES, PANEL_MARGIN, TITLE_WIDTH, DOTS_PER_INCH = 6.2, 0.27, 0.9, 52, 120
# Bars end at this ratio, or at twice the fastest one, so that a slow provider does not make the others too small. Numbers stay.
LONGEST_BAR = 12.0
PLOT_STYLE = {"font.size": 10, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.edgecolor": OTHER_COLOR}
PLOT_STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True, slots=True)
class Style:
    """How a benchmark shows its cases. The bars of its picture are `ratio`; a dashed line marks 1."""

    columns: tuple[str, ...]  # of COLUMNS
    sections: tuple[tuple[str, str], ...]  # heading, kind of its cases; the first is drawn
    cpu_heading: str
    ratio: str
    title: str
    axis: str


# Key of a row: heading, format, factor. docs/benchmarks/README.md says what each is. None in a row is a dash.
COLUMNS = {
    "median_ms": ("ms", "{:.3f}", 1.0),
    "p20_ms": ("p20", "{:.3f}", 1.0),
    "p80_ms": ("p80", "{:.3f}", 1.0),
    "gigabytes_per_second": ("GB/s", "{:.4g}", 1.0),
    "copy_fraction": ("of copy", "{:.1%}", 1.0),
    "floor_ratio": ("x floor", "{:.2f}", 1.0),
    "over_first": ("x first", "{:.2f}", 1.0),
    "teraflops_2": ("TF 2TvH", "{:.4g}", 1.0),
    "teraflops_6": ("TF 6TvH", "{:.4g}", 1.0),
    "teraflops_8": ("TF 8TvH", "{:.4g}", 1.0),
    "over_one_matmul": ("x 1 mm", "{:.2f}", 1.0),
    "over_three_matmuls": ("x 3 mm", "{:.2f}", 1.0),
    "over_four_matmuls": ("x 4 mm", "{:.2f}", 1.0),
    "over_unfused": ("x unfused", "{:.2f}", 1.0),
    "bytes_a_logit": ("bytes a logit", "{:.2f}", 1.0),
    "peak_bytes": ("peak MB", "{:.1f}", 1e-6),
    "peak_extra_bytes": ("extra MB", "{:.1f}", 1e-6),
    "memory_over_unfused": ("x unf. MB", "{:.2f}", 1.0),
    "memory_over_first": ("x first MB", "{:.2f}", 1.0),
    "host_ms": ("host ms", "{:.3f}", 1.0),
    "least_ms": ("least ms", "{:.3f}", 1.0),
    "least_host_ms": ("least host", "{:.3f}", 1.0),
    "host_over_first": ("host x first", "{:.2f}", 1.0),
    "least_host_over_first": ("least x first", "{:.2f}", 1.0),
    "rounds": ("rounds", "{:.0f}", 1.0),
}
TIMES, LAST = ("median_ms", "p20_ms", "p80_ms"), ("host_ms", "rounds")
ON_CPU = ("host_ms", "host_over_first", "least_host_ms", "least_host_over_first")
FLOPS = ("teraflops_2", "teraflops_6", "teraflops_8")
MATMULS = ("over_one_matmul", "over_three_matmuls", "over_four_matmuls")
STYLES = {
    "losses": Style(
        columns=(*TIMES, "gigabytes_per_second", "copy_fraction", "floor_ratio", "over_first", "peak_extra_bytes", *LAST),
        sections=(("Losses, forward and backward", "loss"), ("Kernels alone", "kernel")),
        cpu_heading=f"{CPU_WARNING}: tiny shapes, wall clock of a machine that may be busy",
        ratio="floor_ratio",
        title="Loss forward and backward: time over the fewest bytes at the measured copy bandwidth",
        axis="time over the floor (dashed)",
    ),
    "head": Style(
        columns=(*TIMES, *FLOPS, *MATMULS, "over_unfused", "peak_bytes", "peak_extra_bytes", "memory_over_unfused", *LAST),
        sections=(("From hidden states, forward and backward", "head"),),
        cpu_heading=CPU_RATIOS,
        ratio="over_three_matmuls",
        title="Loss from hidden states, forward and backward: time over three bare matmuls",
        axis="time over three bare matmuls (dashed)",
    ),
    "cpu": Style(
        columns=("median_ms", "least_ms", *ON_CPU, "over_first", "peak_extra_bytes", "memory_over_first", "rounds"),
        sections=(("Log-probabilities, forward and backward", "cpu"), ("The loss, forward and backward", "loss")),
        cpu_heading=CPU_RATIOS,
        ratio="over_first",
        title="Log-probabilities, forward and backward: time over eager log_softmax and gather",
        axis="time over eager torch (dashed)",
    ),
    "hosts": Style(
        columns=("bytes_a_logit", *TIMES, "peak_extra_bytes", *LAST),
        sections=(("One step of the head in each host", "hosts"),),
        cpu_heading=CPU_RATIOS,
        ratio="bytes_a_logit",
        title="One step of the head: the most bytes that live at once, for each of T x V logits",
        axis="bytes a logit",
    ),
}


# Ratios


def loss_rows(rows: Sequence[ProviderRow], problem: LogitsProblem, copy_bytes_per_second: float) -> list[dict]:
    """GB/s at nominal bytes, its share of the copy ceiling, time over the floor's and over the first row's, memory."""
    found = [row.as_dict() for row in rows]
    floor_ms = 1e3 * problem.floor_bytes / copy_bytes_per_second
    for row in found:
        milliseconds, extra = row["median_ms"], row["peak_extra_bytes"]
        row["gigabytes_per_second"] = _ratio(problem.nominal_bytes / 1e6, milliseconds)
        row["copy_fraction"] = _ratio(1e3 * problem.nominal_bytes / copy_bytes_per_second, milliseconds)
        row["floor_ratio"], row["over_first"] = _ratio(milliseconds, floor_ms), _ratio(milliseconds, found[0]["median_ms"])
        # With the logits, which exist anyway: two copies against one is 2.
        row["peak_bytes"] = None if extra is None else problem.logits_bytes + extra
        row["memory_over_logits"] = _ratio(extra, problem.logits_bytes)
        row["memory_over_first"] = _ratio(extra, found[0]["peak_extra_bytes"])
        row["host_over_first"] = _ratio(row["host_ms"], found[0]["host_ms"])
        row["least_host_over_first"] = _ratio(row["least_host_ms"], found[0]["least_host_ms"])
    return found


def head_rows(rows: Sequence[ProviderRow], problem: HeadProblem) -> list[dict]:
    """TFLOP/s, time over bare matmuls and over the unfused path, memory; None if there is nothing to compare with."""
    found = [row.as_dict() for row in rows]
    times = {row["provider"]: row["median_ms"] for row in found}
    three, one, unfused = (times.get(name) for name in (THREE_MATMULS, LOGITS_MATMUL, UNFUSED))
    four = None if three is None or one is None else three + one
    unfused_extra = next((row["peak_extra_bytes"] for row in found if row["provider"] == UNFUSED), None)
    for row in found:
        extra, is_one = row["peak_extra_bytes"], row["provider"] in ONE_MATMUL
        whole = None if is_one else row["median_ms"]  # of a step that needs three
        for count in (2, 6, 8):
            milliseconds = row["median_ms"] if is_one == (count == 2) else None
            row[f"teraflops_{count}"] = _ratio(count / 2 * problem.matmul_flops / 1e9, milliseconds)
        row["over_one_matmul"] = _ratio(row["median_ms"] if is_one else None, one)
        row["over_three_matmuls"], row["over_four_matmuls"] = _ratio(whole, three), _ratio(whole, four)
        row["over_unfused"], row["memory_over_unfused"] = _ratio(whole, unfused), _ratio(extra, unfused_extra)
        row["peak_bytes"] = None if extra is None else problem.input_bytes + extra
    return found


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


# Text


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown, aligned for a terminal; the last column is not."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in [heading, *rows]]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heading) - 1)]
    lines.insert(1, ["-" * width for width in widths] + ["---"])
    return ["| " + " | ".join([*map(str.ljust, line[:-1], widths), line[-1]]) + " |" for line in lines]


def case_lines(case: dict, style: Style, *, with_gate: bool) -> list[str]:
    """Title and rows; in the last column the gate, or why there is no time."""
    drift = "" if case["drift"] is None else f"; drift {case['drift']:+.1%}"
    rows = []
    for row in case["rows"]:
        columns = ((row[key] if row["status"] == OK else None, *COLUMNS[key][1:]) for key in style.columns)
        cells = [DASH if value is None else form.format(value * factor) for value, form, factor in columns]
        outcome = f"{row['status']}: {row['detail']}" if row["detail"] else row["status"]
        errors = ((c["name"], "not finite" if c["error"] is None else f"{c['error']:.1e}") for c in row["checks"])
        gate = ", ".join(f"{name} {error}" for name, error in errors) if with_gate else ""
        rows.append([row["provider"], *cells, gate if row["status"] == OK else outcome])
    heading = ["provider", *(COLUMNS[key][0] for key in style.columns), "gate: error" if with_gate else ""]
    return [f"### {case['title']}{drift}{' VOID' * case['is_void']}", "", *table(heading, rows), ""]


def summary_lines(report: dict) -> list[str]:
    """Lines that say what makes the numbers doubtful, and lines for machine and ceilings."""
    machine, ceilings = report["machine"], report["ceilings"]
    lines = [STYLES[report["kind"]].cpu_heading] if machine["device"] == "cpu" else []
    if report["is_void"]:
        lines.append(VOID_HEADING.format(limit=report["max_drift"]))
    void = [case["title"] for case in report["cases"] if case["is_void"]]
    if void:
        lines.append(f"void, and judged by no target: {'; '.join(void)}")
    if report["stopped"]:
        lines.append(f"NOT COMPLETE: {report['stopped']}")
    copy, product = ceilings["copy_bytes_per_second"] / 1e9, ceilings["matmul_flop_per_second"] / 1e12
    lines += [
        f"{machine['device_name']}, {machine['date']} {machine['time']}, torch {machine['torch']}, Python {machine['python']}",
        f"packages: {', '.join(f'{name} {number}' for name, number in machine['packages'].items())}",
        f"ceilings of this run: copy of {ceilings['copy_bytes'] / 1e9:.2f} GB at {copy:.0f} GB/s, read and written; "
        f"bf16 product of two {ceilings['matmul_size']} x {ceilings['matmul_size']} matrices at {product:.2f} TFLOP/s",
    ]
    lines += [f"left out: {line}" for line in report["left_out"]]
    clocks = {when: found for when, found in report["clocks"].items() if found is not None}
    lines += [f"shape: {report['shape']}"] if "shape" in report else []
    return lines + [f"nvidia-smi {when}: {', '.join(map(' '.join, found.items()))}" for when, found in clocks.items()]


def target_table(report: dict) -> list[str]:
    """The table of targets. The worst case decides each; docs/benchmarks/README.md explains them."""
    rows = []
    for found in report["targets"]:
        cells, verdict, where = [DASH, DASH], found["verdict"], DASH
        if found["verdict"] != NOT_MEASURED:
            cells, verdict = [f"{found['worst']:.3f}", f"{found['best']:.3f}"], f"{verdict} by {abs(found['margin']):.1%}"
            where = f"{found['worst_case']} (worst of {found['num_cases']})"
        predicted = DASH if found["predicted"] is None else f"{found['predicted']:g}"
        rows.append([found["name"], f"{found['direction']} {found['limit']:g}", predicted, *cells, verdict, where])
    return table(["target", "limit", "predicted, H200", "worst", "best", "verdict", "where"], rows)


def markdown(report: dict, picture: str | None) -> str:
    """The report of one run, to be read without the JSON beside it."""
    style = STYLES[report["kind"]]
    lines = [f"# benchmarks {report['kind']}: {report['machine']['device_name']}, {report['machine']['date']}", ""]
    lines += [line + "\n" for line in summary_lines(report)]
    if picture is not None:
        lines += [f"![{style.axis}, by provider]({picture})", ""]
    lines += ["## Targets", "", *target_table(report), ""] if report["targets"] else []
    missed = [verdict["name"] for verdict in report["targets"] if verdict["verdict"] == MISSED]
    if missed:
        lines += [f"Missed: {'; '.join(missed)}.", ""]
    for title, kind in style.sections:
        cases = [case for case in report["cases"] if case["kind"] == kind]
        lines += [f"## {title}", ""] if cases else []
        for case in cases:
            lines += case_lines(case, style, with_gate=True)
    left_out = {row["provider"]: row["leaves_out"] for case in report["cases"] for row in case["rows"] if row["leaves_out"]}
    lines += ["## How to read this", "", "What is measured, and what each column is: docs/benchmarks/README.md.", ""]
    text = "\n".join([*lines, *(f"- {provider} leaves out: {what}." for provider, what in left_out.items())]) + "\n"
    # An error's text may hold a word in angle brackets, which a reader of Markdown takes for a tag.
    return re.sub(r"<(?=[A-Za-z/])", "&lt;", text)


# Files


def write_report(report: dict, directory: str | Path, *, with_picture: bool) -> list[Path]:
    """results.json, report.md and chart.png, named by date and device; what was written. Files of the same name are replaced."""
    directory, machine = Path(directory), report["machine"]
    directory.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", machine["device_name"].lower()).strip("-")
    stem = f"{machine['date']}_{device}_{report['kind']}"
    results, text, picture = (directory / f"{stem}_{name}" for name in ("results.json", "report.md", "chart.png"))
    if with_picture:
        draw(report, picture)
    results.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    text.write_text(markdown(report, picture.name if with_picture else None), encoding="utf-8")
    return [results, text, *([picture] if with_picture else [])]


def why_no_picture() -> str | None:
    """None where matplotlib can be imported."""
    return None if importlib.util.find_spec("matplotlib") else "chart.png left out: matplotlib is not installed"


def bars(case: dict, style: Style) -> list[dict]:
    """The rows of the picture, the slowest first."""
    rows = [row for row in case["rows"] if row["status"] == OK and row[style.ratio] is not None]
    return sorted(rows, key=lambda row: -row["median_ms"])


def draw(report: dict, path: Path) -> None:
    """Draws the first cases in which something ran, without void ones, one panel for each case. pyplot is not imported."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style, machine = STYLES[report["kind"]], report["machine"]
    cases = [case for case in report["cases"] if case["kind"] == style.sections[0][1] and not case["is_void"]]
    shown = [case for case in cases if bars(case, style)][:MOST_PANELS]
    num_rows = max(1, -(-len(shown) // PANELS_IN_A_ROW))
    most_bars = max((len(bars(case, style)) for case in shown), default=1)
    height = num_rows * (BAR_INCHES * most_bars + PANEL_MARGIN) + 0.8
    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(PANEL_WIDTH * PANELS_IN_A_ROW, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(num_rows, PANELS_IN_A_ROW, squeeze=False).ravel()
        for axis, case in zip(axes[: len(shown)], shown, strict=True):
            _draw_panel(axis, case, style)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        where = f"{machine['device_name']}, {machine['date']}, torch {machine['torch']}"
        warning = f" ({CPU_WARNING})" if machine["device"] == "cpu" else ""
        title = f"{style.title}\n{where}{warning}{', VOID' if report['is_void'] else ''}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_panel(axis: Any, case: dict, style: Style) -> None:
    rows = bars(case, style)
    ratios = [row[style.ratio] for row in rows]
    longest = min(max(ratios), max(LONGEST_BAR, 2 * min(ratios)))
    lengths = [min(ratio, longest) for ratio in ratios]
    axis.barh(range(len(rows)), lengths, color=[OURS_COLOR if row["is_ours"] else OTHER_COLOR for row in rows], height=0.72)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        axis.text(length, place, f" {row[style.ratio]:.2f}x  {row['median_ms']:.3g} ms", va="center", fontsize=8.5)
    axis.axvline(1.0, color=FLOOR_COLOR, linewidth=1.0, linestyle="--")
    axis.set_yticks(range(len(rows)), [row["provider"] for row in rows])
    axis.set_xlim(0, longest * 1.32)
    axis.set_xlabel(style.axis)
    axis.set_title(textwrap.fill(case["title"], TITLE_WIDTH))
