"""`python -m benchmarks hosts --device cuda`: the steps of benchmarks/hosts.py on a GPU, at full size.

One step object lies on the device. The paths of one host are measured in turn, by the clock, the gate and the allocator of
benchmarks/measure.py: gradients against float64 first, on memory that held NaN; then the peak above what lives before the step;
then times between two events around loss and gradients. What a host compiles is compiled before that.

    ours              Triton, as backend auto takes it there. Chunks of the fused head hold DEFAULT_MAX_LOGITS_BYTES, 2 GiB
    a host's own      its own default of chunk rows in its fused head; a kernel that a setting turns on is a row beside it
    groups            of one rank: NCCL's, gloo's on a CPU. No message leaves it, so no time of one is in the numbers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from benchmarks import hosts, measure
from benchmarks.hosts import MOST_ERROR, HostPath
from benchmarks.measure import Check, Device, Provider, Settings, Unavailable
from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES

NOT_STARTED = "not started"
# Steps of 20 to 200 ms. A slower one takes part in fewer rounds.
SETTINGS = Settings(rounds=10, seconds_per_provider=4.0)


@dataclass(frozen=True, slots=True)
class HostProblem:
    """What each path of each host gets."""

    step: hosts.Step
    exact: Sequence[Tensor]
    num_sets: int = 1

    @property
    def logits_bytes(self) -> int:
        return self.step.num_logits * self.step.hidden.element_size()


def draw_problem(num_tokens: int, num_columns: int, hidden_size: int, dtype: torch.dtype, device: Device) -> HostProblem:
    step = hosts.draw(num_tokens, num_columns, hidden_size, dtype, device.torch_device)
    step = replace(step, max_logits_bytes=DEFAULT_MAX_LOGITS_BYTES, chunk_rows=None)
    problem = HostProblem(step, hosts.exact_gradients(step))
    device.release_memory()
    return problem


def provider_of(path: HostPath, may_start: Callable[[], bool], time_limit: float) -> Provider:
    def prepare(problem: HostProblem) -> measure.Step:
        if not may_start():
            raise Unavailable(NOT_STARTED, f"--time-limit {time_limit:g} was over")
        loss, leaves = path.find(), list[Any]()

        def load(_: int) -> None:
            leaves.clear()
            leaves.extend(problem.step.leaves(with_main_grad=path.into_main_grad))

        def run() -> tuple[Tensor, Tensor]:
            hidden, weight = leaves
            of_hidden, of_weight = torch.autograd.grad(loss(problem.step, hidden, weight), leaves, allow_unused=True)
            return of_hidden, weight.main_grad if path.into_main_grad else of_weight

        def check(found: tuple[Tensor, Tensor]) -> list[Check]:
            return [Check("gradients", hosts.gradient_error(found, problem.exact), MOST_ERROR)]

        return measure.Step(load, run, check)

    return Provider(path.name, prepare, is_ours=path.is_ours)


def measure_steps(
    problem: HostProblem, device: Device, texts: Sequence[str] | None, time_limit: float, settings: Settings
) -> Iterator[dict[str, Any]]:
    """A case of the report for each host, as it comes. texts: as in hosts.paths.

    No path starts after time_limit seconds; 0: no limit. Raises DeviceLost.
    """
    ends = time.perf_counter() + time_limit if time_limit else float("inf")
    with hosts.one_megatron_rank("nccl" if device.kind == "cuda" else "gloo"):
        for host, paths in groupby(hosts.paths(texts, with_kernels=device.kind == "cuda"), lambda path: path.host):
            chosen = [provider_of(path, lambda: time.perf_counter() <= ends, time_limit) for path in paths]
            rows, drift = measure.measure(problem, chosen, device, settings)
            device.release_memory()
            found = [row.as_dict() for row in rows]
            for row in found:
                extra = row["peak_extra_bytes"]
                row["bytes_a_logit"] = None if extra is None else extra / problem.step.num_logits
            case = {"kind": "hosts", "device": device.kind, "title": host, "rows": found}
            yield case | {"drift": drift, "is_void": measure.is_void(drift, settings)}
