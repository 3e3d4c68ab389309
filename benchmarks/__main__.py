"""`python -m benchmarks losses|head|cpu|hosts`, from a checkout: megatron_rl beside its peers.

It measures in one process and one run: ceilings first, then gate, memory and interleaved times of each case; then it judges
targets. It prints no time of a wrong result, and no ratio of numbers from two runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import measure, peers, providers, report, targets
from benchmarks.measure import Device, Settings
from benchmarks.problems import LOG_PROBS, NUM_SETS, PRESETS, BenchmarkCase, HeadProblem, Inputs, LogitsProblem, Problem, with_shape
from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES
from megatron_rl.errors import ConfigError

KINDS = {
    "losses": "Losses and their kernels from given logits, beside every peer that is here. Made for CUDA.",
    "head": "The loss from hidden states, beside bare matmuls, the unfused path and peers. CUDA or CPU.",
    "cpu": "Log-probabilities, and the loss, forward and backward on this CPU against eager log_softmax + gather.",
    "hosts": "One training step of the head in each host's own code and in ours: bytes a logit, memory, time. CPU or CUDA.",
}
PROBLEMS = {"head": HeadProblem, "kernel": providers.KernelProblem, "loss": LogitsProblem, "cpu": LogitsProblem}
EXIT_FAULT, EXIT_CONFIG = 1, 2
# The speed of a shared CPU changes by a third from one moment to the next. This must not void a case.
MAX_DRIFT = {"cuda": 0.03, "cpu": 10.0}
# Steps of a head take tens of milliseconds (CUDA) or seconds (CPU): few rounds are enough.
ROUNDS = {"losses": {"cuda": 30, "cpu": 5}, "head": {"cuda": 12, "cpu": 5}, "cpu": {"cpu": 9}}
# Tokens, columns, hidden size of `hosts`. The CPU's T / H is that of the full size, hosts.FULL_TOKENS and so on.
HOST_SIZES = {"cpu": (512, 16384, 256), "cuda": (8192, 151_936, 4096)}
SECONDS_PER_PROVIDER = {"losses": 4.0, "head": 2.0, "cpu": 60.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. 0; 1: our provider failed its gate or raised, or the run is void or unfinished; 2: wrong settings."""
    args = build_parser().parse_args(arguments)
    try:
        return (run_hosts if args.kind == "hosts" else run)(args)
    except ConfigError as error:
        say(f"benchmarks {args.kind}: ConfigError: {error}")
        return EXIT_CONFIG


def build_parser(parser_class: type[ArgumentParser] = ArgumentParser) -> ArgumentParser:
    parser = parser_class(prog="python -m benchmarks", description="megatron_rl beside what it replaces, in one run.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, line in KINDS.items():
        add = kinds.add_parser(kind, help=line, description=line, allow_abbrev=False).add_argument
        if kind == "hosts":
            add(
                "--device",
                choices=("cuda", "cpu"),
                default="cpu",
                help="cpu: bytes by torch's tracker, and CPU time; cuda: the full size, memory and times of the GPU. Default: cpu, "
                "whose table is in docs/benchmarks/README.md.",
            )
            add("--rows", type=int, metavar="COUNT", help="Tokens. Default: 512; on CUDA 8192.")
            add("--vocab-size", type=int, metavar="COUNT", help="Columns. Default: 16384; on CUDA 151936.")
            add(
                "--hidden-size",
                type=int,
                metavar="COUNT",
                help="Default: 256, so that T / H is that of the full size; on CUDA 4096.",
            )
            add(
                "--dtype",
                choices=("float32", "bfloat16"),
                default="bfloat16",
                help="Of hidden states and weight. Default: bfloat16.",
            )
            add("--host", action="append", metavar="TEXT", help="Only hosts with TEXT in their name; may be repeated.")
            add("--peer", action="append", default=[], metavar="NAME=PATH", help=f"A checkout; NAME: {', '.join(peers.HOSTS)}.")
            add("--time-limit", type=float, help="CUDA: no path starts after these seconds; 0: no limit. Default: 540.")
            add("--json", action="store_true", help="CUDA: print one JSON object instead of the tables.")
            add("--output-dir", metavar="DIR", help="CUDA: write report.md and results.json there, named by date and device.")
            continue
        if kind == "cpu":
            add("--rows", type=int, default=2048, help="Tokens. Default: 2048.")
            add("--vocab-size", type=int, default=32000, help="Columns. Default: 32000.")
            add("--dtype", choices=("float32", "bfloat16"), default="float32", help="Dtype of the logits. Default: float32.")
        else:
            add("--preset", choices=tuple(PRESETS[kind]["cuda"]), help="Shapes. Default: quick on CUDA, the smallest on a CPU.")
            add("--device", choices=("cuda", "cpu"), help="Default: cuda where torch finds one, else cpu.")
        if kind == "head":
            add("--shape", metavar="T,H,V", help="Replaces the first shape of the preset; its variants stay.")
            add("--max-logits-bytes", type=int, default=DEFAULT_MAX_LOGITS_BYTES, metavar="COUNT", help="Default: 2 GiB.")
        add(
            "--threads",
            type=int,
            default=1 if kind == "cpu" else None,
            help="Threads of torch on a CPU. Default: its choice; cpu: 1.",
        )
        add("--case", action="append", metavar="TEXT", help="Only cases with TEXT in their title; may be repeated.")
        add("--provider", action="append", metavar="TEXT", help="Only providers with TEXT in their name; may be repeated.")
        names = ", ".join(peers.CHECKOUTS)
        rounds = ", ".join(f"{number} on {device}" for device, number in ROUNDS[kind].items())
        add("--peer", action="append", default=[], metavar="NAME=PATH", help=f"A checkout; NAME: {names}. May be repeated.")
        add("--rounds", type=int, help=f"Interleaved rounds. Default: {rounds}.")
        add("--max-drift", type=float, help="Change of the first provider that voids a case. Default: 0.03; on a CPU 10.")
        # Stop before the ten-minute limit that many jobs have, so that the report is written.
        add("--time-limit", type=float, default=540.0, help="No case starts after these seconds; 0: no limit. Default: 540.")
        add("--seed", type=int, default=0, help="Seed of the inputs. Default: 0.")
        add("--json", action="store_true", help="Print one JSON object instead of the tables.")
        add("--output-dir", metavar="DIR", help="Write report.md, results.json and chart.png there, named by date and device.")
    return parser


def run(args: Namespace) -> int:
    peers.add_checkouts(args.peer)
    asked = "cpu" if args.kind == "cpu" else args.device
    device = measure.find_device(asked)
    settings, (preset, cases) = settings_of(args, device), cases_of(args, device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.kind == "losses" and device.kind == "cpu" and asked is None:
        say("torch finds no CUDA device: tiny shapes on the CPU, to try the command out")
    clocks, ceilings = {"before": measure.read_clocks(device)}, measure.measure_ceilings(device)
    found = {"kind": args.kind, "preset": preset, "machine": measure.describe_machine(device), "ceilings": ceilings}
    found |= {"clocks": clocks | {"after the ceilings": measure.read_clocks(device)}, "rounds": settings.rounds}
    found |= {"max_drift": settings.max_drift, "num_sets": NUM_SETS, "stopped": None, "left_out": [], "is_void": False}
    found |= {"cases": [], "targets": []} | ({"max_logits_bytes": args.max_logits_bytes} if args.kind == "head" else {})
    try:
        measure_cases(found, cases, device, settings, args)
    except measure.DeviceLost as error:
        found["stopped"] = f"the device is lost {error}"
    finally:
        providers.close_fake_groups()
    found["clocks"]["at the end"] = measure.read_clocks(device)
    return finish(found, args)


def noted(values: Iterable[Any], kept: list[Any]) -> Iterator[Any]:
    for value in values:
        kept.append(value)
        yield value


def run_hosts(args: Namespace) -> int:
    is_cuda = args.device == "cuda"
    defaults = HOST_SIZES[args.device]
    given = (args.rows, args.vocab_size, args.hidden_size)
    sizes = [default if size is None else size for size, default in zip(given, defaults, strict=True)]
    if min(sizes) < 1:
        raise ConfigError(f"--rows {sizes[0]}, --vocab-size {sizes[1]} and --hidden-size {sizes[2]}: each must be at least 1")
    if not is_cuda and (args.json or args.output_dir or args.time_limit is not None):
        raise ConfigError("--json, --output-dir and --time-limit belong to --device cuda: add it, or leave them out on a CPU")
    if is_cuda and args.time_limit is not None and args.time_limit < 0:
        raise ConfigError(f"--time-limit {args.time_limit:g} must be at least 0")
    peers.add_checkouts(args.peer)
    try:
        from benchmarks import hosts

        if is_cuda:
            return run_hosts_on(measure.find_device("cuda"), sizes, args)
        torch.set_num_threads(1)
        rows = list[hosts.HostRow]()
        for line in hosts.table(noted(hosts.measure_hosts(*sizes, getattr(torch, args.dtype), args.host), rows)):
            print(line, flush=True)
    except ModuleNotFoundError as error:
        raise ConfigError(f"hosts needs megatron-core: {error}") from error
    return EXIT_FAULT if any(row.is_ours and row.status for row in rows) else 0


def run_hosts_on(device: Device, sizes: Sequence[int], args: Namespace) -> int:
    from benchmarks import host_steps

    if device.kind == "cuda" and os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        raise ConfigError("TORCH_COMPILE_DISABLE=1 takes from the hosts what they compile: unset it")
    settings = replace(host_steps.SETTINGS, max_drift=MAX_DRIFT[device.kind])
    time_limit = 540.0 if args.time_limit is None else args.time_limit
    clocks, ceilings = {"before": measure.read_clocks(device)}, measure.measure_ceilings(device)
    shape = f"T {sizes[0]:,}, V {sizes[1]:,}, H {sizes[2]:,}, {args.dtype}; max_logits_bytes {DEFAULT_MAX_LOGITS_BYTES:,}"
    found = {"kind": "hosts", "shape": shape, "machine": measure.describe_machine(device), "ceilings": ceilings, "clocks": clocks}
    found |= {"rounds": settings.rounds, "max_drift": settings.max_drift, "num_sets": 1, "stopped": None, "left_out": []}
    found |= {"is_void": False, "cases": [], "targets": []}
    problem = host_steps.draw_problem(*sizes, getattr(torch, args.dtype), device)
    try:
        for case in host_steps.measure_steps(problem, device, args.host, time_limit, settings):
            found["cases"].append(case)
            found["is_void"] = all(case["is_void"] for case in found["cases"])
            if any(row["status"] == host_steps.NOT_STARTED for row in case["rows"]):
                found["stopped"] = f"--time-limit {time_limit:g}"
            if not args.json:
                print(*report.case_lines(case, report.STYLES["hosts"], with_gate=True), sep="\n", flush=True)
            if args.output_dir:
                report.write_report(found, args.output_dir, with_picture=False)
    except measure.DeviceLost as error:
        found["stopped"] = f"the device is lost {error}"
    found["clocks"]["at the end"] = measure.read_clocks(device)
    return finish(found, args)


def settings_of(args: Namespace, device: Device) -> Settings:
    rounds = ROUNDS[args.kind][device.kind] if args.rounds is None else args.rounds
    max_drift = MAX_DRIFT[device.kind] if args.max_drift is None else args.max_drift
    sizes = {"--rounds": rounds, "--threads": 1 if args.threads is None else args.threads}
    sizes |= {"--rows": args.rows, "--vocab-size": args.vocab_size} if args.kind == "cpu" else {}
    problems = [f"{flag} {size} must be at least 1" for flag, size in sizes.items() if size < 1]
    if max_drift <= 0 or args.time_limit < 0:
        problems.append("--max-drift must be above 0 and --time-limit at least 0")
    if problems:
        raise ConfigError(problems)
    return Settings(rounds, SECONDS_PER_PROVIDER[args.kind], max_drift)


def cases_of(args: Namespace, device: Device) -> tuple[str, Sequence[BenchmarkCase]]:
    """Returns the name of the preset and those of its cases that were asked for."""
    if args.kind == "cpu":
        dtype = getattr(torch, args.dtype)
        shape = (args.rows, args.vocab_size)
        preset, cases = "cpu", [BenchmarkCase(*shape, documents=1, kernel=LOG_PROBS, dtype=dtype)]
        cases.append(BenchmarkCase(*shape, loss="grpo", dtype=dtype))
    else:
        presets = PRESETS[args.kind][device.kind]
        preset = args.preset or next(iter(presets))
        if preset not in presets:
            raise ConfigError(f"--preset {preset} is for CUDA: leave it out on a CPU; its kernels need a GPU")
        cases = with_shape(presets[preset], args.shape) if args.kind == "head" and args.shape else presets[preset]
    chosen = [case for case in cases if args.case is None or any(text in case.title for text in args.case)]
    if not chosen:
        titles = "\n  ".join(case.title for case in cases)
        raise ConfigError(f"no case of --preset {preset} holds {' or '.join(map(repr, args.case))}; it has:\n  {titles}")
    for case in chosen if args.kind == "head" else ():
        providers.chunk_rows(case, device.torch_device, args.max_logits_bytes)  # reports a budget without room for a row now
    return preset, chosen


def providers_of(case: BenchmarkCase, device_kind: str, args: Namespace) -> list[measure.Provider]:
    if case.kind == "head":
        found = providers.head_providers(case, device_kind, args.max_logits_bytes) + peers.head_peers(case)
    elif case.kind == "kernel":
        found = providers.kernel_providers(case, device_kind)
    else:
        is_log_probs, is_of_cpu = case.kernel is not None, args.kind == "cpu"
        if is_log_probs:
            found = providers.log_probs_providers() + peers.log_probs_peers()
        elif is_of_cpu:
            found = providers.cpu_loss_providers() + peers.cpu_loss_peers()
        else:
            found = providers.loss_providers(device_kind) + peers.loss_peers()
    return [provider for provider in found if args.provider is None or any(text in provider.name for text in args.provider)]


def measure_cases(found: dict, cases: Sequence[BenchmarkCase], device: Device, settings: Settings, args: Namespace) -> None:
    """Fills found["cases"]. Writes the report after each case, so a run that is ended from outside leaves its results."""
    started, inputs = time.perf_counter(), None
    for number, case in enumerate(cases, 1):
        seconds = time.perf_counter() - started
        if args.time_limit and seconds > args.time_limit:
            left = f"{len(cases) - number + 1} of {len(cases)} cases were not started"
            found["stopped"] = f"--time-limit {args.time_limit:g}: {left}"
            return
        say(f"[{number}/{len(cases)}, {seconds:.0f} s] {case.title}")
        chosen = providers_of(case, device.kind, args)
        if not chosen:
            continue
        try:
            if inputs is None or inputs.shape != case.input_shape:
                inputs = None
                device.release_memory()
                inputs = Inputs(case, device.torch_device, seed=args.seed)
            problem = PROBLEMS[case.kind](case, inputs, seed=args.seed)
        except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
            device.check_alive("drawing the inputs")
            found["left_out"].append(f"{case.title}: {' '.join(str(error).split())[:200]}")
            continue
        found["cases"].append(measure_case(problem, chosen, device, settings, found["ceilings"], args))
        del problem
        # A void case is judged by no target, and says nothing of the others.
        found["is_void"] = all(case["is_void"] for case in found["cases"])
        found["targets"] = targets.judge_all(args.kind, device.kind, found["cases"])
        if not args.json:
            print(*report.case_lines(found["cases"][-1], report.STYLES[args.kind], with_gate=False), sep="\n", flush=True)
        if args.output_dir:
            left = len(cases) - number
            found["stopped"] = f"it was ended from outside before the last {left} of {len(cases)} cases" if left else None
            report.write_report(found, args.output_dir, with_picture=False)
            found["stopped"] = None


def measure_case(
    problem: Problem, chosen: list[measure.Provider], device: Device, settings: Settings, ceilings: dict, args: Namespace
) -> dict[str, Any]:
    case, (rows, drift) = problem.case, measure.measure(problem, chosen, device, settings)
    title, plan = case.title, {}
    if case.kind == "head":
        num_rows = providers.chunk_rows(case, device.torch_device, args.max_logits_bytes)
        name, num_chunks = providers.plan_of(case, num_rows)
        plan = {"plan": name, "chunks": num_chunks, "rows_per_chunk": num_rows}
        title += f": plan {name}, {num_chunks} chunk{'s' * (num_chunks > 1)} of up to {num_rows} rows"
        measured = report.head_rows(rows, problem)
    else:
        measured = report.loss_rows(rows, problem, ceilings["copy_bytes_per_second"])
    found = {"kind": case.kind, "device": device.kind, "title": title, "shape": case.as_dict(), **plan, **problem.work}
    return found | {"drift": drift, "is_void": measure.is_void(drift, settings), "rows": measured}


def finish(found: dict, args: Namespace) -> int:
    """Prints tables or JSON, and writes files where asked for; other lines go to standard error. Returns the exit code."""
    lines = report.summary_lines(found) + (["", *report.target_table(found)] if found["targets"] else [])
    print(json.dumps(found, allow_nan=False) if args.json else "\n".join(lines), flush=True)
    if args.output_dir:
        reason = "chart.png left out: hosts has none" if found["kind"] == "hosts" else report.why_no_picture()
        if reason is not None:
            say(reason)
        for path in report.write_report(found, args.output_dir, with_picture=reason is None):
            say(f"wrote {path}")
    faults = [
        row for case in found["cases"] for row in case["rows"] if row["is_ours"] and row["status"] in (measure.FAIL, measure.ERROR)
    ]
    return EXIT_FAULT if faults or found["is_void"] or found["stopped"] or not found["cases"] else 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
