"""What a run of the bench found, as text, Markdown and JSON: the same numbers in each. It must never round before it stores."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.commands.bench import chart
from megatron_rl.commands.bench.harness import OK
from megatron_rl.commands.bench.targets import MISSED, NOT_MEASURED

CPU_HEADING = "CPU, not a statement about GPUs: tiny shapes, wall clock of a machine that may be busy"
VOID_HEADING = "VOID: the first provider's time moved by more than {limit:.0%} while other things were measured; measure again"
# Text, key of a row, format, factor. A value that is None is a dash.
COLUMNS = (
    ("ms", "median_ms", "{:.3f}", 1.0),
    ("p20", "p20_ms", "{:.3f}", 1.0),
    ("p80", "p80_ms", "{:.3f}", 1.0),
    ("GB/s", "gigabytes_per_second", "{:.4g}", 1.0),
    ("of copy", "copy_fraction", "{:.1%}", 1.0),
    ("x floor", "floor_ratio", "{:.2f}", 1.0),
    ("x first", "over_first", "{:.2f}", 1.0),
    ("extra MB", "peak_extra_bytes", "{:.1f}", 1e-6),
    ("host ms", "host_ms", "{:.3f}", 1.0),
)
DASH = "-"
NOTES = (
    "ms: median of the step, forward and backward, on the device's own clock; p20 and p80 beside it.",
    "GB/s: at 6 bytes a bf16 logit (12 for float32); for a kernel alone at the 2 that it reads or the 4 that it reads and writes.",
    "of copy: those GB/s over the copy ceiling of this run. x first: time over the first row's.",
    "x floor: time over that of the fewest bytes at the copy ceiling; a masked row is not read, but its gradient is written.",
    "extra MB: peak memory above the inputs. host ms: until the host had queued the step, which is hidden behind earlier work.",
    "one of N shards: one rank's columns and all labels among them; the others' partials are synthetic, communication is excluded.",
    "No document is clipped and no advantage is 0: every unmasked row needs its gradient, from everyone. Token mean throughout.",
)


Column = tuple[str, str, str, float]


@dataclass(frozen=True, slots=True)
class Style:
    """What one kind of bench writes about its cases."""

    name: str  # in headings and file names
    columns: tuple[Column, ...]
    notes: tuple[str, ...]
    sections: tuple[tuple[str, str], ...]  # heading, kind of its cases
    cpu_heading: str
    look: chart.Look


LOSSES = Style(
    name="losses",
    columns=COLUMNS,
    notes=NOTES,
    sections=(("Losses, forward and backward", "loss"), ("Kernels alone", "kernel")),
    cpu_heading=CPU_HEADING,
    look=chart.LOSSES,
)


def cells(row: dict, style: Style) -> list[str]:
    """The columns of a measured row."""
    return [DASH if row[key] is None else form.format(row[key] * factor) for _, key, form, factor in style.columns]


def outcome(row: dict) -> str:
    """What stands where a time would."""
    return row["status"] if not row["detail"] else f"{row['status']}: {row['detail']}"


def gate_text(row: dict) -> str:
    error = lambda check: "not finite" if check["error"] is None else f"{check['error']:.1e}"  # noqa: E731
    return ", ".join(f"{check['name']} {error(check)}" for check in row["checks"])


def case_table(case: dict, style: Style) -> str:
    """For the terminal."""
    width = max(len(row["provider"]) for row in case["rows"])
    heading = f"{'':{width}s}" + "".join(f"{name:>10s}" for name, *_ in style.columns)
    lines = [case_title(case), heading]
    for row in case["rows"]:
        rest = "".join(f"{cell:>10s}" for cell in cells(row, style)) if row["status"] == OK else "  " + outcome(row)
        lines.append(f"{row['provider']:{width}s}{rest}")
    return "\n".join(lines)


def case_title(case: dict) -> str:
    drift = "" if case["drift"] is None else f"; drift {case['drift']:+.1%}"
    return f"{case['title']}{drift}{' VOID' if case['is_void'] else ''}"


def summary_lines(report: dict, style: Style) -> list[str]:
    """Machine, ceilings, what has to be said first, and the targets."""
    machine, ceilings = report["machine"], report["ceilings"]
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    lines = []
    if machine["device"] == "cpu":
        lines.append(style.cpu_heading)
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
        f"packages: {packages}",
        f"ceilings of this run: copy of {ceilings['copy_bytes'] / 1e9:.2f} GB at {copy:.0f} GB/s, read and written; "
        f"bf16 product of two {ceilings['matmul_size']} x {ceilings['matmul_size']} matrices at {product:.2f} TFLOP/s",
    ]
    lines += [f"left out: {line}" for line in report["left_out"]]
    for when, clocks in report["clocks"].items():
        if clocks is not None:
            lines.append(f"nvidia-smi {when}: " + ", ".join(f"{name} {value}" for name, value in clocks.items()))
    return lines


def target_cells(verdict: dict) -> list[str]:
    limit = f"{verdict['direction']} {verdict['limit']:g}"
    if verdict["verdict"] == NOT_MEASURED:
        return [verdict["name"], limit, DASH, DASH, NOT_MEASURED, DASH]
    word = f"{verdict['verdict']} by {abs(verdict['margin']):.1%}"
    worst, best = f"{verdict['worst']:.3f}", f"{verdict['best']:.3f}"
    return [verdict["name"], limit, worst, best, word, f"{verdict['worst_case']} (worst of {verdict['num_cases']})"]


def target_table(report: dict) -> str:
    lines = ["targets (docs/benchmarks/README.md); each by its worst case"]
    for verdict in report["targets"]:
        name, limit, worst, best, word, where = target_cells(verdict)
        lines.append(
            f"  {name:72s} {limit:>8s}  worst {worst:>7s}  best {best:>7s}  {word}" + ("" if where == DASH else f"  {where}")
        )
    return "\n".join(lines)


def markdown(report: dict, picture: str | None, style: Style) -> str:
    """The report of one run, to be read without the JSON beside it."""
    lines = [f"# bench {style.name}: {report['machine']['device_name']}, {report['machine']['date']}", ""]
    lines += [line + "\n" for line in summary_lines(report, style)]
    if picture is not None:
        lines += [f"![{style.look.axis}, by provider]({picture})", ""]
    lines += ["## Targets", "", *_markdown_table(["target", "limit", "worst", "best", "verdict", "where"], _targets(report)), ""]
    missed = [verdict["name"] for verdict in report["targets"] if verdict["verdict"] == MISSED]
    if missed:
        lines += [f"Missed: {'; '.join(missed)}.", ""]
    for title, kind in style.sections:
        cases = [case for case in report["cases"] if case["kind"] == kind]
        lines += [f"## {title}", ""] if cases else []
        for case in cases:
            lines += [f"### {case_title(case)}", "", *_case_rows(case, style), ""]
    lines += ["## How to read this", "", *(f"- {note}" for note in style.notes)]
    left_out = {row["provider"]: row["leaves_out"] for case in report["cases"] for row in case["rows"] if row["leaves_out"]}
    lines += [f"- {provider} leaves out: {what}." for provider, what in left_out.items()]
    return "\n".join(lines) + "\n"


def _targets(report: dict) -> list[list[str]]:
    return [target_cells(verdict) for verdict in report["targets"]]


def _case_rows(case: dict, style: Style) -> list[str]:
    heading = ["provider", *(name for name, *_ in style.columns), "rounds", "gate: error"]
    rows = []
    for row in case["rows"]:
        if row["status"] == OK:
            rows.append([row["provider"], *cells(row, style), str(row["rounds"]), gate_text(row)])
        else:
            rows.append([row["provider"], outcome(row), *[""] * (len(style.columns) - 1), "", gate_text(row)])
    return _markdown_table(heading, rows)


def _markdown_table(heading: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heading, ["---"] * len(heading), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def file_stem(machine: dict[str, Any], name: str) -> str:
    """Date and device: a folder of reports sorts by date."""
    device = re.sub(r"[^a-z0-9]+", "-", machine["device_name"].lower()).strip("-")
    return f"{machine['date']}_{device}_{name}"


def write_report(report: dict, directory: str | Path, style: Style, *, with_picture: bool) -> list[Path]:
    """results.json, report.md and, where matplotlib is there, chart.png; what was written. Existing files of the same name go."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stem = file_stem(report["machine"], style.name)
    results, text, picture = (directory / f"{stem}_{name}" for name in ("results.json", "report.md", "chart.png"))
    written = [results, text]
    if with_picture:
        chart.draw(report, picture, style.look)
        written.append(picture)
    results.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    text.write_text(markdown(report, picture.name if with_picture else None, style), encoding="utf-8")
    return written
