"""`megatron-rl bench losses`: our losses and kernels from given logits beside every peer that is here; one process, one run.

Ceilings, then for each shape the gate, memory and interleaved times, then targets. It must never print a time of a wrong result,
and never a ratio of numbers from two runs.
"""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace

from megatron_rl.commands.bench import cases as bench_cases
from megatron_rl.commands.bench import kernels as bench_kernels
from megatron_rl.commands.bench.cases import LossCase, LossProblem
from megatron_rl.commands.bench.device import Device, DeviceLost, find_device
from megatron_rl.commands.bench.harness import Provider, Settings, add_ratios, is_void, measure
from megatron_rl.commands.bench.kernels import KernelCase, KernelProblem, kernel_providers
from megatron_rl.commands.bench.peers import CHECKOUTS, parse_peers, peer_providers
from megatron_rl.commands.bench.providers import FakeGroups, own_providers
from megatron_rl.commands.bench.report import LOSSES
from megatron_rl.commands.bench.session import (
    Kind,
    add_run_arguments,
    chosen,
    finish,
    measure_cases,
    named,
    new_report,
    say,
    settings_of,
)
from megatron_rl.commands.bench.targets import is_large, judge_all
from megatron_rl.errors import ConfigError

Case = LossCase | KernelCase
NUM_SETS = 3
ROUNDS = {"cuda": 30, "cpu": 5}


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, tuple(bench_cases.PRESETS), tuple(CHECKOUTS), ROUNDS)


def run(args: Namespace) -> int:
    """Exit code 0; 1 when one of ours fails its gate or raises, when the run is void, or when it could not be finished."""
    checkouts = parse_peers(args.peer)
    device = find_device(args.device)
    preset = preset_of(args.preset, device)
    settings = settings_of(args, device, ROUNDS)
    if device.kind == "cpu" and args.device is None:
        say("torch finds no CUDA device: tiny shapes on the CPU, to try the command out")
    peers = peer_providers(checkouts)

    def providers(case: Case) -> list[Provider]:
        is_kernel = isinstance(case, KernelCase)
        found = kernel_providers(case, device.kind) if is_kernel else own_providers(device.kind) + peers
        return chosen(found, args.provider)

    cases = named([*bench_cases.PRESETS[preset], *bench_kernels.PRESETS[preset]], preset, args.case)
    report = new_report("losses", device, settings, preset, NUM_SETS)
    copy_bytes_per_second = report["ceilings"]["copy_bytes_per_second"]
    kind = Kind(
        providers=providers,
        draw=Inputs(device, args.seed).problem,
        measure=lambda case, problem, rows: measure_case(case, problem, rows, device, settings, copy_bytes_per_second),
        judge=judge_all,
        is_large=is_large,
        style=LOSSES,
    )
    try:
        measure_cases(report, cases, kind, device, args)
    except DeviceLost as error:
        report["stopped"] = f"the device is lost {error}"
    finally:
        FakeGroups.close()
    return finish(report, LOSSES, device, args)


def preset_of(name: str | None, device: Device) -> str:
    if device.kind == "cpu":
        if name not in (None, "cpu"):
            raise ConfigError(f"--preset {name} is for CUDA: on a CPU leave it out; the kernels that it is about need a GPU")
        return "cpu"
    return name or "quick"


class Inputs:
    """Holds the input sets of one shape at a time: cases that share them, such as those of the kernels, draw them once."""

    def __init__(self, device: Device, seed: int):
        self.device, self.seed = device, seed
        self._case, self._problem = None, None

    def problem(self, case: Case) -> LossProblem | KernelProblem:
        shape = case if isinstance(case, LossCase) else case.inputs
        if shape != self._case:
            self._case = self._problem = None
            gc.collect()
            self.device.release_memory()
            self._problem = LossProblem(shape, self.device.torch_device, num_sets=NUM_SETS, seed=self.seed)
            self._case = shape
        return self._problem if isinstance(case, LossCase) else KernelProblem(case, self._problem)


def measure_case(
    case: Case, problem, providers: list[Provider], device: Device, settings: Settings, copy_bytes_per_second: float
) -> dict:
    rows, drift = measure(problem, providers, device, settings)
    add_ratios(rows, problem, copy_bytes_per_second)
    return {
        "kind": "loss" if isinstance(case, LossCase) else "kernel",
        "title": case.title,
        "shape": case.as_dict(),
        **{name: getattr(problem, name) for name in ("logits_bytes", "nominal_bytes", "floor_bytes")},
        "drift": drift,
        "is_void": is_void(drift, settings),
        "rows": [row.as_dict() for row in rows],
    }
