"""`megatron-rl bench head`: the loss from hidden states beside bare matmuls, the unfused path and every peer that is here.

For each shape the gate, memory and interleaved times, then targets; one process, one run. On a CPU the same, memory in processes
of their own. It must never print a time of a wrong result, and never a ratio of numbers from two runs.
"""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.commands.bench import head_cases
from megatron_rl.commands.bench.device import Device, DeviceLost, find_device
from megatron_rl.commands.bench.harness import ERROR, OK, Provider, Settings, is_void, measure
from megatron_rl.commands.bench.head_cases import HeadCase, HeadInputs, Vectors, cases_of, plan_of
from megatron_rl.commands.bench.head_peers import CHECKOUTS, peer_providers
from megatron_rl.commands.bench.head_problem import HeadProblem
from megatron_rl.commands.bench.head_providers import chunk_rows, own_providers
from megatron_rl.commands.bench.head_report import STYLE, TARGETS, add_head_ratios, add_memory_ratios, is_large
from megatron_rl.commands.bench.memory import peak_above_inputs
from megatron_rl.commands.bench.peers import parse_peers
from megatron_rl.commands.bench.session import (
    Kind,
    add_run_arguments,
    chosen,
    finish,
    measure_cases,
    named,
    new_report,
    settings_of,
)
from megatron_rl.commands.bench.targets import judge_all
from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES
from megatron_rl.errors import ConfigError

# Steps of tens of milliseconds (CUDA) and of seconds (CPU) need few of them.
ROUNDS = {"cuda": 12, "cpu": 5}
SECONDS_PER_PROVIDER = 2.0
WARM_UP = {"num_tokens": 20, "hidden_size": 8, "vocab_size": 64}


def add_arguments(parser: ArgumentParser) -> None:
    presets = tuple(head_cases.PRESETS["cuda"])
    add_run_arguments(parser, presets, tuple(CHECKOUTS), ROUNDS)
    parser.add_argument("--shape", metavar="T,H,V", help="In place of the preset's first shape, whose variants stay.")
    parser.add_argument(
        "--max-logits-bytes", type=int, default=DEFAULT_MAX_LOGITS_BYTES, metavar="COUNT", help="Of ours. Default: 2 GiB."
    )
    parser.add_argument("--threads", type=int, help="Threads of torch on a CPU. Default: torch's own choice.")


def run(args: Namespace) -> int:
    """Exit code 0; 1 when one of ours fails its gate or raises, when the run is void, or when it could not be finished."""
    checkouts = parse_peers(args.peer, CHECKOUTS)
    device = find_device(args.device)
    settings = replace(settings_of(args, device, ROUNDS), seconds_per_provider=SECONDS_PER_PROVIDER)
    preset = args.preset or "quick"
    if args.threads is not None:
        if args.threads < 1:
            raise ConfigError(f"--threads {args.threads} must be at least 1")
        torch.set_num_threads(args.threads)

    def providers(case: HeadCase) -> list[Provider]:
        peers = peer_providers(case, checkouts)
        return chosen([*own_providers(case, device.kind, args.max_logits_bytes), *peers], args.provider)

    cases = named(cases_of(device.kind, preset, args.shape), preset, args.case)
    for case in cases:
        chunk_rows(case, device.torch_device, args.max_logits_bytes)  # a budget without room for a row is said now
    report = new_report("head", device, settings, preset, head_cases.NUM_SETS)
    report["max_logits_bytes"] = args.max_logits_bytes
    kind = Kind(
        providers=providers,
        draw=Inputs(device, args.seed).problem,
        measure=lambda case, problem, rows: measure_case(case, problem, rows, device, settings, args),
        judge=lambda found: judge_all(found, TARGETS[device.kind]),
        is_large=lambda found: is_large(found["shape"]),
        style=STYLE,
    )
    try:
        measure_cases(report, cases, kind, device, args)
    except DeviceLost as error:
        report["stopped"] = f"the device is lost {error}"
    return finish(report, STYLE, device, args)


class Inputs:
    """Holds the hidden states and the head of one shape at a time: its cases, which differ in their documents, share them."""

    def __init__(self, device: Device, seed: int):
        self.device, self.seed = device, seed
        self._key, self._inputs = None, None

    def problem(self, case: HeadCase) -> HeadProblem:
        if (case.shape, case.dtype) != self._key:
            self._key = self._inputs = None
            gc.collect()
            self.device.release_memory()
            self._inputs = HeadInputs(case, self.device.torch_device, num_sets=head_cases.NUM_SETS, seed=self.seed)
            self._key = (case.shape, case.dtype)
        return HeadProblem(case, self._inputs, seed=self.seed)


def measure_case(
    case: HeadCase, problem: HeadProblem, providers: list[Provider], device: Device, settings: Settings, args: Namespace
) -> dict:
    rows, drift = measure(problem, providers, device, settings)
    found = add_head_ratios(rows, problem)
    if device.kind == "cpu":
        measure_memory(found, problem, args)
    num_rows = chunk_rows(case, device.torch_device, args.max_logits_bytes)
    plan, num_chunks = plan_of(case, num_rows)
    return {
        "kind": "head",
        "device": device.kind,
        "title": f"{case.title}: plan {plan}, {num_chunks} chunk{'s' * (num_chunks > 1)} of up to {num_rows} rows",
        "shape": case.as_dict(),
        "plan": plan,
        "chunks": num_chunks,
        "rows_per_chunk": num_rows,
        "matmul_flops": problem.matmul_flops,
        "logits_bytes": problem.logits_bytes,
        "input_bytes": problem.input_bytes,
        "drift": drift,
        "is_void": is_void(drift, settings),
        "rows": found,
    }


def measure_memory(rows: list[dict], problem: HeadProblem, args: Namespace) -> None:
    """Of each of ours that ran. Its numbers of [T] go along: computing them there would raise the peak that is measured."""
    inputs = problem.sets[0]
    vectors = Vectors(inputs.old_log_probs.tolist(), inputs.ref_log_probs.tolist())
    for row in rows:
        if row["status"] != OK or not row["is_ours"]:
            continue
        arguments = (problem.case, row["provider"], args.max_logits_bytes, args.seed, torch.get_num_threads(), vectors)
        try:
            row["peak_extra_bytes"] = peak_above_inputs(prepare_step, *arguments)
        except RuntimeError as error:
            row["status"], row["detail"] = ERROR, str(error)
    add_memory_ratios(rows, problem.input_bytes)


def prepare_step(
    case: HeadCase, provider: str, max_logits_bytes: int, seed: int, threads: int, vectors: Vectors
) -> Callable[[], Any]:
    """For a process of its own: inputs, a tiny step, and the step of one provider, not yet taken."""
    torch.set_num_threads(threads)
    device = torch.device("cpu")

    def step_of(shape: dict, vectors: Vectors | None) -> Callable[[], Any]:
        small = replace(case, **shape)
        inputs = HeadInputs(small, device, num_sets=1, seed=seed, with_truth=vectors is None)
        batch = HeadProblem(small, inputs, seed=seed, vectors=vectors)
        found = next(entry for entry in own_providers(small, "cpu", max_logits_bytes) if entry.name == provider)
        step = found.prepare(batch)
        step.load(0)
        return step.run

    step_of(WARM_UP, None)()
    return step_of({}, vectors)
