"""A run of the bench from its flags to its files, whatever its cases are; it must never know what a case measures."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.commands.bench.chart import why_no_picture
from megatron_rl.commands.bench.device import Device, describe_machine, measure_ceilings, read_clocks
from megatron_rl.commands.bench.harness import ERROR, FAIL, Provider, Settings
from megatron_rl.commands.bench.report import Style, case_table, summary_lines, target_table, write_report
from megatron_rl.commands.bench.targets import Verdict
from megatron_rl.errors import ConfigError

EXIT_FAULT = 1
# A lease of a machine often ends a command after ten minutes; what was measured until then should be written.
TIME_LIMIT = 540.0
# A shared CPU moves by a third between two breaths, which says nothing and voids nothing.
MAX_DRIFT = {"cuda": 0.03, "cpu": 10.0}


@dataclass(frozen=True, slots=True)
class Kind:
    """What one kind of bench puts into a run. A case has a title."""

    providers: Callable[[Any], list[Provider]]  # of a case; none: it is left out
    draw: Callable[[Any], Any]  # case -> problem; what a device has no room for raises RuntimeError or MemoryError
    measure: Callable[[Any, Any, list[Provider]], dict]  # case, problem, providers -> the case of the report
    judge: Callable[[list[dict]], list[Verdict]]
    is_large: Callable[[dict], bool]  # of a case of the report: its times are of kernels and not of launches
    style: Style


def add_run_arguments(parser: ArgumentParser, presets: Sequence[str], checkouts: Sequence[str], rounds: dict[str, int]) -> None:
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="Default: cuda where torch finds one, else cpu.")
    add("--preset", choices=tuple(presets), help="Shapes. Default: quick on CUDA (minutes), the smallest on a CPU.")
    add("--case", action="append", metavar="TEXT", help="Only cases whose title holds TEXT; may be repeated.")
    add("--provider", action="append", metavar="TEXT", help="Only providers whose name holds TEXT; may be repeated.")
    add(
        "--peer", action="append", default=[], metavar="NAME=PATH", help=f"A checkout of {' or '.join(checkouts)}; may be repeated."
    )
    add("--rounds", type=int, help=f"Interleaved rounds. Default: {rounds['cuda']}, on a CPU {rounds['cpu']}.")
    add("--max-drift", type=float, help="Change of the first provider that voids a case. Default: 0.03; on a CPU 10.")
    add("--time-limit", type=float, default=TIME_LIMIT, help="Seconds after which no further case starts; 0: none. Default: 540.")
    add("--seed", type=int, default=0, help="Of the inputs. Default: 0.")
    add("--json", action="store_true", help="Print one JSON object instead of the tables.")
    add("--output-dir", metavar="DIR", help="Write report.md, results.json and chart.png there, named by date and device.")


def settings_of(args: Namespace, device: Device, default_rounds: dict[str, int]) -> Settings:
    rounds = default_rounds[device.kind] if args.rounds is None else args.rounds
    max_drift = MAX_DRIFT[device.kind] if args.max_drift is None else args.max_drift
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds} must be at least 1")
    if max_drift <= 0 or args.time_limit < 0:
        raise ConfigError("--max-drift must be above 0 and --time-limit at least 0")
    return Settings(rounds=rounds, max_drift=max_drift)


def named(cases: Sequence[Any], preset: str, texts: Sequence[str] | None) -> list[Any]:
    chosen = [case for case in cases if texts is None or any(text in case.title for text in texts)]
    if not chosen:
        titles = "\n  ".join(case.title for case in cases)
        raise ConfigError(f"no case of --preset {preset} holds {' or '.join(map(repr, texts))}; it has:\n  {titles}")
    return chosen


def chosen(providers: Sequence[Provider], texts: Sequence[str] | None) -> list[Provider]:
    return [provider for provider in providers if texts is None or any(text in provider.name for text in texts)]


def new_report(kind: str, device: Device, settings: Settings, preset: str, num_sets: int) -> dict[str, Any]:
    before = read_clocks(device)
    return {
        "kind": kind,
        "preset": preset,
        "machine": describe_machine(device),
        "ceilings": measure_ceilings(device),
        "clocks": {"before": before, "after the ceilings": read_clocks(device)},
        "rounds": settings.rounds,
        "max_drift": settings.max_drift,
        "num_sets": num_sets,
        "stopped": None,
        "left_out": [],
        "is_void": False,
        "cases": [],
        "targets": [],
    }


def measure_cases(report: dict, cases: Sequence[Any], kind: Kind, device: Device, args: Namespace) -> None:
    """Fills report["cases"] as they come, and writes them, so that a run that is ended from outside leaves what it had."""
    started = time.perf_counter()
    for number, case in enumerate(cases, 1):
        seconds = time.perf_counter() - started
        if args.time_limit and seconds > args.time_limit:
            report["stopped"] = (
                f"--time-limit {args.time_limit:g}: {len(cases) - number + 1} of {len(cases)} cases were not started"
            )
            return
        say(f"[{number}/{len(cases)}, {seconds:.0f} s] {case.title}")
        providers = kind.providers(case)
        if not providers:
            continue
        try:
            problem = kind.draw(case)
        except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
            device.check_alive("drawing the inputs")
            report["left_out"].append(f"{case.title}: {' '.join(str(error).split())[:200]}")
            continue
        found = kind.measure(case, problem, providers)
        report["cases"].append(found)
        report["is_void"] = run_is_void(report["cases"], kind.is_large)
        report["targets"] = [verdict.as_dict() for verdict in kind.judge(report["cases"])]
        if not args.json:
            print(case_table(found, kind.style) + "\n", flush=True)
        if args.output_dir:
            write_report(report, args.output_dir, kind.style, with_picture=False)


def run_is_void(cases: Sequence[dict], is_large: Callable[[dict], bool]) -> bool:
    """A case whose first provider drifted is void for itself. The machine is in doubt where a large one did, or all of them."""
    void = [case for case in cases if case["is_void"]]
    return len(void) == len(cases) or any(is_large(case) for case in void)


def finish(report: dict, style: Style, device: Device, args: Namespace) -> int:
    """Tables or JSON on standard output; files where asked for; what is not a result goes to standard error. The exit code."""
    report["clocks"]["at the end"] = read_clocks(device)
    text = json.dumps(report, allow_nan=False) if args.json else "\n".join([*summary_lines(report, style), target_table(report)])
    print(text, flush=True)
    if args.output_dir:
        reason = why_no_picture()
        if reason is not None:
            say(reason)
        for path in write_report(report, args.output_dir, style, with_picture=reason is None):
            say(f"wrote {path}")
    return exit_code(report)


def exit_code(report: dict) -> int:
    faults = [row for case in report["cases"] for row in case["rows"] if row["is_ours"] and row["status"] in (FAIL, ERROR)]
    return EXIT_FAULT if faults or report["is_void"] or report["stopped"] or not report["cases"] else 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
