"""`python -m benchmarks losses|head|cpu|hosts`, from a checkout: megatron_rl beside what it replaces; `show FILE`: earlier results.

It measures in one process and one run: ceilings first, then gate, memory and interleaved times of each case; then it judges
targets. It prints no time of a wrong result, and no ratio of numbers from two runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkouts, measure, peers, providers, report, targets
from benchmarks.measure import Device, Provider, Settings
from benchmarks.problems import CASES, NUM_SETS, BenchmarkCase, HeadProblem, Inputs, LogitsProblem, Problem
from megatron_rl.errors import ConfigError

KINDS = {
    "losses": "Losses and their kernels from given logits, beside every peer that is here. Made for CUDA.",
    "head": "The loss from hidden states, beside bare matmuls, the unfused path and peers. CUDA or CPU.",
    "cpu": "Log-probabilities, and the loss, forward and backward on one thread of this CPU against eager log_softmax + gather.",
    "hosts": "One training step of the head in each host's own code and in ours: bytes a logit, memory, time. CPU or CUDA.",
}
PROBLEMS = {
    "head": HeadProblem,
    "hosts": HeadProblem,
    "kernel": providers.KernelProblem,
    "loss": LogitsProblem,
    "cpu": LogitsProblem,
}
EXIT_FAULT, EXIT_CONFIG = 1, 2
# The speed of a shared CPU changes by a third from one moment to the next. This voids no case.
MAX_DRIFT = {"cuda": 0.03, "cpu": None}
# Steps of a head take tens of milliseconds (CUDA) or seconds (CPU): few rounds are enough.
ROUNDS = {"losses": {"cuda": 30, "cpu": 5}, "head": {"cuda": 12, "cpu": 5}, "cpu": {"cpu": 9}, "hosts": {"cuda": 10, "cpu": 5}}
SECONDS_PER_PROVIDER = {"losses": 4.0, "head": 2.0, "cpu": 60.0, "hosts": 4.0}
SHAPES = {"head": "T,H,V", "cpu": "T,V", "hosts": "T,H,V"}
SIZES = {"T": "num_tokens", "H": "hidden_size", "V": "vocab_size"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. 0; 1: our provider failed its gate or raised, or the run is void or unfinished; 2: wrong settings."""
    args = build_parser().parse_args(arguments)
    try:
        if args.kind == "show":
            print(*report.show(args.file), sep="\n")
            return 0
        return run(args)
    except ConfigError as error:
        say(f"benchmarks {args.kind}: ConfigError: {error}")
        return EXIT_CONFIG


def build_parser(parser_class: type[ArgumentParser] = ArgumentParser) -> ArgumentParser:
    parser = parser_class(prog="python -m benchmarks", description="megatron_rl beside what it replaces, in one run.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, line in KINDS.items():
        add = kinds.add_parser(kind, help=line, description=line, allow_abbrev=False).add_argument
        if kind != "cpu":
            add("--device", choices=("cuda", "cpu"), help="Default: cuda where torch finds one, else cpu.")
        if kind in SHAPES:
            add("--shape", metavar=SHAPES[kind], help="Replaces the shape of the first case; the others of that shape stay.")
        add("--case", action="append", metavar="TEXT", help="Only cases with TEXT in their title; may be repeated.")
        add("--provider", action="append", metavar="TEXT", help="Only providers with TEXT in their name; may be repeated.")
        names = ", ".join(checkouts.CHECKOUTS)
        add("--peer", action="append", default=[], metavar="NAME=PATH", help=f"A checkout to import; NAME: {names}.")
        rounds = ", ".join(f"{number} on {device}" for device, number in ROUNDS[kind].items())
        add("--rounds", type=int, help=f"Interleaved rounds. Default: {rounds}.")
        # Stop before the ten-minute limit that many jobs have, so that the results are written.
        add("--time-limit", type=float, default=540.0, help="No case starts after these seconds; 0: no limit. Default: 540.")
        add("--output-dir", metavar="DIR", help="Write results.json there, named by date and device; benchmarks/recorded has some.")
    line = "The tables of a file that --output-dir has written."
    kinds.add_parser("show", help=line, description=line).add_argument("file", type=Path, metavar="FILE")
    return parser


def run(args: Namespace) -> int:
    checkouts.add_checkouts(args.peer)
    device = measure.find_device("cpu" if args.kind == "cpu" else args.device)
    cases, settings = cases_of(args, device), settings_of(args, device)
    if args.kind in ("cpu", "hosts") and device.kind == "cpu":
        torch.set_num_threads(1)
    if args.kind == "losses" and device.kind == "cpu" and args.device is None:
        say("torch finds no CUDA device: tiny shapes on the CPU, to try the command out")
    clocks, ceilings = {"before": measure.read_clocks(device)}, measure.measure_ceilings(device)
    found = {"kind": args.kind, "machine": measure.describe_machine(device), "ceilings": ceilings}
    found |= {"clocks": clocks | {"after the ceilings": measure.read_clocks(device)}, "rounds": settings.rounds}
    found |= {"max_drift": settings.max_drift, "num_sets": NUM_SETS, "stopped": None, "left_out": [], "is_void": False}
    found |= {"cases": [], "targets": []}
    try:
        with groups_of(args.kind, device):
            measure_cases(found, cases, device, settings, args)
    except measure.DeviceLost as error:
        found["stopped"] = f"the device is lost {error}"
    finally:
        providers.close_fake_groups()
    found["clocks"]["at the end"] = measure.read_clocks(device)
    print(*report.summary_lines(found), sep="\n", flush=True)
    if args.output_dir:
        say(f"wrote {report.write_results(found, args.output_dir)}")
    rows = [row for case in found["cases"] for row in case["rows"]]
    faults = [row for row in rows if row["is_ours"] and row["status"] in (measure.FAIL, measure.ERROR)]
    return EXIT_FAULT if faults or found["is_void"] or found["stopped"] or not found["cases"] else 0


def groups_of(kind: str, device: Device) -> contextlib.AbstractContextManager[None]:
    """The process groups that hosts' code asks for."""
    if kind != "hosts":
        return contextlib.nullcontext()
    if device.kind == "cuda" and os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        raise ConfigError("TORCH_COMPILE_DISABLE=1 takes from the hosts what they compile: unset it")
    try:
        from benchmarks import hosts
    except ModuleNotFoundError as error:
        raise ConfigError(f"hosts needs megatron-core: {error}") from error
    return hosts.one_megatron_rank(device)


def settings_of(args: Namespace, device: Device) -> Settings:
    rounds = ROUNDS[args.kind][device.kind] if args.rounds is None else args.rounds
    if rounds < 1 or args.time_limit < 0:
        raise ConfigError(f"--rounds {rounds} must be at least 1, and --time-limit {args.time_limit:g} at least 0")
    return Settings(rounds, SECONDS_PER_PROVIDER[args.kind], MAX_DRIFT[device.kind])


def cases_of(args: Namespace, device: Device) -> Sequence[BenchmarkCase]:
    cases = CASES[args.kind][device.kind]
    if args.kind in SHAPES and args.shape is not None:
        cases = with_shape(cases, args.shape, SHAPES[args.kind])
    chosen = [case for case in cases if args.case is None or any(text in case.title for text in args.case)]
    if not chosen:
        titles = "\n  ".join(case.title for case in cases)
        raise ConfigError(f"no case of {args.kind} holds {' or '.join(map(repr, args.case))}; it has:\n  {titles}")
    return chosen


def with_shape(cases: Sequence[BenchmarkCase], shape: str, form: str) -> list[BenchmarkCase]:
    """The cases that have the shape of the first one, with this shape instead. Raises ConfigError."""
    names = form.split(",")
    sizes = [int(size) if size.isdecimal() else 0 for size in shape.split(",")]
    if len(sizes) != len(names) or min(sizes) < 1 or sizes[0] < 2 * max(case.documents for case in cases):
        raise ConfigError(f"--shape {shape} must be {form}: whole numbers, with at least two tokens for each of eight documents")
    chosen = {SIZES[name]: size for name, size in zip(names, sizes, strict=True)}
    of_first = [(case.num_tokens, case.hidden_size, case.vocab_size) for case in cases]
    return [replace(case, **chosen) for case, of_case in zip(cases, of_first, strict=True) if of_case == of_first[0]]


def providers_of(case: BenchmarkCase, device_kind: str, args: Namespace) -> list[Provider]:
    if case.kind == "hosts":
        from benchmarks.hosts import host_providers

        found = list(host_providers(case, device_kind))
    elif case.kind == "head":
        found = providers.head_providers(case, device_kind) + peers.head_peers(case)
    elif case.kind == "kernel":
        found = providers.kernel_providers(case, device_kind)
    elif args.kind == "cpu":
        found = providers.cpu_providers(case) + peers.cpu_peers(case)
    else:
        found = providers.loss_providers(device_kind) + peers.loss_peers()
    return [provider for provider in found if args.provider is None or any(text in provider.name for text in args.provider)]


def measure_cases(found: dict, cases: Sequence[BenchmarkCase], device: Device, settings: Settings, args: Namespace) -> None:
    """Fills found["cases"]. Writes the results after each case, so a run that is ended from outside leaves them."""
    started, inputs = time.perf_counter(), None
    for number, case in enumerate(cases, 1):
        seconds, left = time.perf_counter() - started, f"{len(cases) - number + 1} of {len(cases)} cases"
        if args.time_limit and seconds > args.time_limit:
            found["stopped"] = f"--time-limit {args.time_limit:g}: {left} were not started"
            return
        say(f"[{number}/{len(cases)}, {seconds:.0f} s] {case.title}")
        chosen = providers_of(case, device.kind, args)
        if not chosen:
            continue
        if args.output_dir and found["cases"]:
            report.write_results(found | {"stopped": f"it was ended from outside before the last {left}"}, args.output_dir)
        try:
            if inputs is None or inputs.shape != case.input_shape:
                inputs = None
                device.release_memory()
                inputs = Inputs(case, device.torch_device)
            problem = PROBLEMS[case.kind](case, inputs)
        except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
            device.check_alive("drawing the inputs")
            found["left_out"].append(f"{case.title}: {' '.join(str(error).split())[:200]}")
            continue
        found["cases"].append(measure_case(problem, chosen, device, settings, found["ceilings"]))
        del problem
        # A void case is judged by no target, and says nothing of the others.
        found["is_void"] = all(case["is_void"] for case in found["cases"])
        found["targets"] = targets.judge_all(args.kind, device.kind, found["cases"])
        print(*report.case_lines(found["cases"][-1], args.kind), sep="\n", flush=True)


def measure_case(
    problem: Problem, chosen: list[Provider], device: Device, settings: Settings, ceilings: dict[str, float]
) -> dict[str, Any]:
    case, title = problem.case, problem.case.title
    rows, drift = measure.measure(problem, chosen, device, settings)
    if isinstance(problem, HeadProblem):
        measured = report.head_rows(rows, problem)
    else:
        measured = report.loss_rows(rows, problem, ceilings["copy_bytes_per_second"])
    if case.kind == "head":
        title += f": chunks of up to {providers.chunk_rows(problem)} rows"
    found = {"kind": case.kind, "device": device.kind, "title": title, "shape": case.as_dict(), **problem.work}
    return found | {"drift": drift, "is_void": measure.is_void(drift, settings), "rows": measured}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
