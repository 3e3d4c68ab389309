"""`python -m benchmarks overhead`: what a call of a loss costs beside the logits: launches, host time, allocations.

With few rows the device has done its work before the host has launched the next kernel, so the host's time is the call's. On a
GPU the launches are real, and a CUDA graph of forward and backward is replayed beside them. On a CPU each launch is replaced by
nothing: what is left is the Python of the package and torch's small operations, without Triton's own launcher.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.launches import counted_launches, watched_launches
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses import linear_policy_loss, policy_loss
from megatron_rl.ops.assumed_scale import AssumedScale
from megatron_rl.ops.backends import is_interpreted, why_triton_is_missing

LOSSES, DOCUMENTS, COLUMNS, HIDDEN_SIZE = ("grpo", "gspo"), 4, 1024, 64
# Rounds of CALLS calls each; the least of the rounds is shown, which other load disturbs least.
ROUNDS, CALLS = 7, 20


@dataclass(frozen=True, slots=True)
class OverheadRow:
    rows: int
    loss: str
    path: str
    launches: int
    operations: int
    """Of torch, forward and backward."""
    allocations: int
    kib: float
    """Of the allocations together; the gradients of logits, hidden and weight are among them."""
    forward_us: float
    backward_us: float
    graph_us: float | None
    """A replay of forward and backward; None without CUDA, and where a call looks at a value."""


class _Counted(TorchDispatchMode):
    """Operations of torch that are no views, and the storages that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.storages, self.kept = 0, dict[int, int](), list[Tensor]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        result = function(*args, **(kwargs or {}))
        self.operations += not function.is_view
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and (where := tensor.untyped_storage().data_ptr()) not in known:
                self.storages[where] = tensor.untyped_storage().nbytes()
                self.kept.append(tensor)  # so that no other storage gets its address
        return result


def measure_overhead(num_rows: Sequence[int], device: torch.device) -> Iterator[OverheadRow]:
    """A row for each number of rows, loss and path. Raises ConfigError without Triton."""
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
    if why_triton_is_missing() is not None or (device.type == "cpu" and not is_interpreted()):
        raise ConfigError("overhead is that of the Triton kernels: install Triton, and on a CPU set TRITON_INTERPRET=1")
    for rows in num_rows:
        for loss in LOSSES:
            for path, call in _calls(loss, rows, device).items():
                with _without_kernels() if device.type == "cpu" else contextlib.nullcontext(), counted_launches() as launches:
                    yield _row(rows, loss, path, call, launches, device)


def _calls(name: str, rows: int, device: torch.device) -> dict[str, Callable[[], tuple[Tensor, Sequence[Tensor]]]]:
    """path -> a call that gives the loss and the leaves of its gradient. All [N] tensors are on the device."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, COLUMNS, generator=generator).to(device, torch.bfloat16).requires_grad_()
    hidden = torch.randn(rows, HIDDEN_SIZE, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(COLUMNS, HIDDEN_SIZE, generator=generator).to(device, torch.bfloat16).requires_grad_()
    labels = torch.randint(COLUMNS, (rows,), generator=generator).to(device)
    documents = min(DOCUMENTS, rows)
    bounds = (torch.arange(documents + 1) * rows // documents).to(torch.int32)
    numbers = (torch.full((rows,), -7.0), torch.ones(documents), torch.ones(rows, dtype=torch.bool), bounds)
    inputs = [labels, *(tensor.to(device) for tensor in (*numbers, torch.full((documents,), 1 / rows)))]
    options: dict[str, Any] = {"tp_group": SINGLE, "cp_group": SINGLE, "backend": "triton", "check_ranks": False}
    scale = AssumedScale()
    calls: dict[str, Callable[[], tuple[Tensor, Sequence[Tensor]]]] = {
        "logits": lambda: (policy_loss(name, logits, *inputs, **options).loss, [logits]),
        "logits, metrics": lambda: (policy_loss(name, logits, *inputs, metrics="basic", **options).loss, [logits]),
        "logits, loss_scale": lambda: (policy_loss(name, logits, *inputs, loss_scale=1.0, **options).loss, [logits]),
        "logits, loss_scale assumed": lambda: (policy_loss(name, logits, *inputs, loss_scale=scale, **options).loss, [logits]),
    }
    if device.type == "cuda":  # on a CPU its matmuls would be measured
        calls["fused head"] = lambda: (linear_policy_loss(name, hidden, weight, *inputs, **options).loss, [hidden, weight])
    return calls


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """No kernel runs, and no garbage in their place is looked at."""
    from megatron_rl.losses import reduce_triton

    checks = ("has_bad_data", "is_any")  # on a GPU they do not run
    with watched_launches(lambda launch: lambda kernel, *args, **options: None), contextlib.ExitStack() as patches:
        for check in checks:
            patches.enter_context(mock.patch.object(reduce_triton, check, lambda *args: False))
        yield


def _row(rows: int, loss: str, path: str, call: Callable, launches: list[str], device: torch.device) -> OverheadRow:
    def step() -> None:
        value, leaves = call()
        torch.autograd.grad(value, leaves)

    for _ in range(3):
        step()
    launches.clear()
    with _Counted() as counted:
        step()
    num_launches = len(launches)
    forward, whole = [], []
    for _ in range(ROUNDS):
        forward.append(_host_us(lambda: call(), device))
        whole.append(_host_us(step, device))
    sizes = counted.storages.values()
    times = (min(forward), max(min(whole) - min(forward), 0.0), _graph_us(step, device))
    return OverheadRow(rows, loss, path, num_launches, counted.operations, len(sizes), sum(sizes) / 1024, *times)


def _host_us(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - began) * 1e6 / CALLS


def _graph_us(step: Callable[[], None], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:  # a synchronisation, which a graph cannot hold
        torch.cuda.synchronize(device)
        return None
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(CALLS):
        graph.replay()
    stop.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop) * 1e3 / CALLS


TITLES = (
    "T",
    "loss",
    "path",
    "launches",
    "torch operations",
    "allocations",
    "KiB",
    "host us, forward",
    "host us, backward",
    "us, graph",
)


def table(rows: Iterable[OverheadRow]) -> Iterator[str]:
    """A line for each row, as it comes."""
    names = [field.name for field in fields(OverheadRow)]
    yield "| " + " | ".join(TITLES) + " |"
    yield "|---" * len(names) + "|"
    for row in rows:
        values = [getattr(row, name) for name in names]
        yield "| " + " | ".join("-" if v is None else f"{v:.0f}" if isinstance(v, float) else str(v) for v in values) + " |"
