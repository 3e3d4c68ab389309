"""Writes the results of a run as JSON, and shows such a file as tables. Stored numbers are not rounded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import OK, ProviderRow
from benchmarks.problems import HeadProblem, LogitsProblem
from benchmarks.providers import ONE_MATMUL, THREE_MATMULS, UNFUSED

VOID = "VOID: the first provider's time moved by more than {limit:.0%} from the first half of the rounds to the second"
ON_CPU = "CPU, no statement about GPUs: wall clock of a machine that may be busy; read the ratios"
DASH = "-"

# Key of a row: heading, format, factor. docs/benchmarks.md says what each is. None in a row is a dash.
COLUMNS = {
    "median_ms": ("ms", "{:.3f}", 1.0),
    "p20_ms": ("p20", "{:.3f}", 1.0),
    "p80_ms": ("p80", "{:.3f}", 1.0),
    "copy_fraction": ("of copy", "{:.1%}", 1.0),
    "floor_ratio": ("x floor", "{:.2f}", 1.0),
    "over_first": ("x first", "{:.2f}", 1.0),
    "over_one_matmul": ("x 1 mm", "{:.2f}", 1.0),
    "over_three_matmuls": ("x 3 mm", "{:.2f}", 1.0),
    "over_unfused": ("x unfused", "{:.2f}", 1.0),
    "bytes_a_logit": ("bytes a logit", "{:.2f}", 1.0),
    "peak_extra_bytes": ("extra MB", "{:.1f}", 1e-6),
    "memory_over_unfused": ("x unf. MB", "{:.2f}", 1.0),
    "memory_over_logits": ("x logits MB", "{:.2f}", 1.0),
    "host_ms": ("host ms", "{:.3f}", 1.0),
    "least_host_ms": ("least host", "{:.3f}", 1.0),
    "least_host_over_first": ("least x first", "{:.2f}", 1.0),
    "rounds": ("rounds", "{:.0f}", 1.0),
}
TIMES, LAST = ("median_ms", "p20_ms", "p80_ms"), ("peak_extra_bytes", "host_ms", "rounds")
COLUMNS_OF = {
    "losses": (*TIMES, "copy_fraction", "floor_ratio", "over_first", *LAST),
    "head": (*TIMES, "over_one_matmul", "over_three_matmuls", "over_unfused", "memory_over_unfused", *LAST),
    "cpu": ("median_ms", "over_first", "least_host_ms", "least_host_over_first", "memory_over_logits", *LAST),
    "hosts": (*TIMES, "bytes_a_logit", *LAST),
}


# Ratios


def loss_rows(rows: Sequence[ProviderRow], problem: LogitsProblem, copy_bytes_per_second: float) -> list[dict]:
    """The share of the copy ceiling at nominal bytes, time over the floor's and over the first row's, memory."""
    found = [row.as_dict() for row in rows]
    for row in found:
        milliseconds, extra = row["median_ms"], row["peak_extra_bytes"]
        row["copy_fraction"] = _ratio(1e3 * problem.nominal_bytes / copy_bytes_per_second, milliseconds)
        row["floor_ratio"] = _ratio(milliseconds, 1e3 * problem.floor_bytes / copy_bytes_per_second)
        row["over_first"] = _ratio(milliseconds, found[0]["median_ms"])
        row["least_host_over_first"] = _ratio(row["least_host_ms"], found[0]["least_host_ms"])
        # With the logits, which exist anyway: two copies against one is 2.
        row["peak_bytes"] = None if extra is None else problem.logits_bytes + extra
        row["memory_over_logits"] = _ratio(extra, problem.logits_bytes)
    return found


def head_rows(rows: Sequence[ProviderRow], problem: HeadProblem) -> list[dict]:
    """Time over bare matmuls and over the unfused path, memory; None if there is nothing to compare with."""
    found = [row.as_dict() for row in rows]
    of = {row["provider"]: row for row in found}
    one, three, unfused = (of.get(name, {}).get("median_ms") for name in (ONE_MATMUL[0], THREE_MATMULS, UNFUSED))
    for row in found:
        extra, is_one = row["peak_extra_bytes"], row["provider"] in ONE_MATMUL
        whole = None if is_one else row["median_ms"]  # of a step that needs three
        row["over_one_matmul"] = _ratio(row["median_ms"] if is_one else None, one)
        row["over_three_matmuls"], row["over_unfused"] = _ratio(whole, three), _ratio(whole, unfused)
        row["memory_over_unfused"] = _ratio(extra, of.get(UNFUSED, {}).get("peak_extra_bytes"))
        row["bytes_a_logit"] = _ratio(extra, problem.case.num_tokens * problem.case.vocab_size)
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


def case_lines(case: dict, kind: str) -> list[str]:
    """Title and rows; in the last column the gate, or why there is no time."""
    drift = "" if case["drift"] is None else f"; drift {case['drift']:+.1%}"
    rows = []
    for row in case["rows"]:
        columns = ((row.get(key) if row["status"] == OK else None, *COLUMNS[key][1:]) for key in COLUMNS_OF[kind])
        cells = [DASH if value is None else form.format(value * factor) for value, form, factor in columns]
        errors = ((c["name"], "not finite" if c["error"] is None else f"{c['error']:.1e}") for c in row["checks"])
        outcome = f"{row['status']}: {row['detail']}" if row["detail"] else row["status"]
        rows.append([row["provider"], *cells, ", ".join(map(" ".join, errors)) if row["status"] == OK else outcome])
    heading = ["provider", *(COLUMNS[key][0] for key in COLUMNS_OF[kind]), "gate: error"]
    return [f"### {case['title']}{drift}{' VOID' * case['is_void']}", "", *table(heading, rows), ""]


def summary_lines(found: dict) -> list[str]:
    """What makes the numbers doubtful; machine and ceilings; targets; what each peer leaves out."""
    machine, ceilings = found["machine"], found["ceilings"]
    lines = [ON_CPU] if machine["device"] == "cpu" else []
    if found["is_void"]:
        lines.append(VOID.format(limit=found["max_drift"]))
    if void := [case["title"] for case in found["cases"] if case["is_void"]]:
        lines.append(f"void, and judged by no target: {'; '.join(void)}")
    if found["stopped"]:
        lines.append(f"NOT COMPLETE: {found['stopped']}")
    copy, product = ceilings["copy_bytes_per_second"] / 1e9, ceilings["matmul_flop_per_second"] / 1e12
    lines += [
        f"{machine['device_name']}, {machine['date']} {machine['time']}, torch {machine['torch']}, Python {machine['python']}",
        f"packages: {', '.join(f'{name} {number}' for name, number in machine['packages'].items())}",
        f"ceilings of this run: copy of {ceilings['copy_bytes'] / 1e9:.2f} GB at {copy:.0f} GB/s, read and written; "
        f"bf16 product of two {ceilings['matmul_size']} x {ceilings['matmul_size']} matrices at {product:.2f} TFLOP/s",
    ]
    lines += [f"nvidia-smi {when}: {', '.join(map(' '.join, of.items()))}" for when, of in found["clocks"].items() if of]
    lines += [f"left out: {line}" for line in found["left_out"]]
    left_out = {row["provider"]: row["leaves_out"] for case in found["cases"] for row in case["rows"] if row["leaves_out"]}
    lines += [f"{provider} leaves out: {what}" for provider, what in left_out.items()]
    return [*lines, "", *target_table(found["targets"])] if found["targets"] else lines


def target_table(targets: Sequence[dict]) -> list[str]:
    """The worst case decides each target."""
    rows = []
    for found in targets:
        cells = [DASH, DASH, found["verdict"], DASH]
        if found["worst"] is not None:
            numbers = [f"{found['worst']:.3f}", f"{found['best']:.3f}"]
            where = f"{found['worst_case']} (worst of {found['num_cases']})"
            cells = [*numbers, f"{found['verdict']} by {abs(found['margin']):.1%}", where]
        rows.append([found["name"], f"{found['direction']} {found['limit']:g}", *cells])
    return table(["target", "limit", "worst", "best", "verdict", "where"], rows)


# Files


def show(path: str | Path) -> list[str]:
    """The lines of a file that write_results has written."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    cases = [line for case in found["cases"] for line in case_lines(case, found["kind"])]
    return [*cases, *summary_lines(found)]


def write_results(found: dict, directory: str | Path) -> Path:
    """<date>_<device>_<kind>_results.json; a file of this name is replaced."""
    machine = found["machine"]
    device = re.sub(r"[^a-z0-9]+", "-", machine["device_name"].lower()).strip("-")
    path = Path(directory, f"{machine['date']}_{device}_{found['kind']}_results.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path
