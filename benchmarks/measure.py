"""Measures a step: the clock of the device, its ceilings, the gate, memory, interleaved times, drift. It times no wrong result.

A problem holds input sets and knows the right values. A provider turns a problem into a step. If a provider raises,
its row of the report has the error, and the run continues. The settings of the device are never changed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import Gpu
from megatron_rl.errors import ConfigError

FLUSH_BYTES = 256 * 1024**2  # several times the L2 of any GPU until now
COPY_BYTES, CPU_COPY_BYTES = 8 * 10**9, 16 * 10**6
# Of the free memory: source and target of the copy, and room for the allocator.
COPY_SHARE = 0.3
MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 256
CEILING_REPETITIONS = {"cuda": 20, "cpu": 5}
# Writes queued before a step. The host then queues the whole step before the device starts it, so launches cost nothing.
MOST_FLUSHES = 100
PACKAGES = "triton numpy liger-kernel megatron-core fast-llm verl flash-attn apex".split()

OK, FAIL, ERROR, NOT_INSTALLED, NOT_SUPPORTED = "ok", "FAIL", "error", "not installed", "not supported"
# A slow provider takes part in fewer rounds, but at least in this many: a median of fewer is not reliable.
FEWEST_ROUNDS = 5
DETAIL_LENGTH = 300


class DeviceLost(Exception):
    """A fault after which no call succeeds, such as an illegal access. The run ends and keeps its results."""


class Unavailable(Exception):
    """(NOT_INSTALLED, how to add the peer), or (NOT_SUPPORTED, what a provider cannot do by design)."""


# The device


class CpuDevice:
    """Wall clock of a machine that may be busy, and beside it the CPU time of the process: for ratios, and to try the command."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    resolution_ms = 0.0

    def timed(self, run: Callable[[], Any], host_milliseconds: float = 0.0) -> tuple[float, float]:
        """(milliseconds of the step, of the host); host_milliseconds: as measured before.

        The host's: on a CPU its CPU time in the step, on CUDA the time until it had queued the step.
        """
        before, before_on_cpu = time.perf_counter(), time.process_time()
        run()
        return 1e3 * (time.perf_counter() - before), 1e3 * (time.process_time() - before_on_cpu)

    def poison(self, num_bytes: float) -> None: ...

    def peak_extra_bytes(self, run: Callable[[], Any], given: Sequence[Tensor]) -> float:
        """The most bytes of torch's storages that live at once during the step, without those of `given`, which live before it."""
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(*given)
        total = lambda when: sum(found["Total"] for found in tracker.get_tracker_snapshot(when).values())  # noqa: E731
        before = total("current")
        with tracker:
            run()
        return float(total("peak") - before)

    def release_memory(self) -> None: ...

    def check_alive(self, culprit: str) -> None: ...


class CudaDevice(CpuDevice):
    """Times come from the device, between two events around the step."""

    kind = "cuda"
    # Events have ticks of about half a microsecond. A change of the median by two ticks is no change.
    resolution_ms = 1e-3

    def __init__(self):
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch_device)
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush_ms = 0.0
        self._flush_ms = median_ms(self, lambda: self._flush.fill_(1))

    def timed(self, run: Callable[[], Any], host_milliseconds: float = 0.0) -> tuple[float, float]:
        for number in range(self.num_flushes(host_milliseconds)):
            self._flush.fill_(number % 255 + 1)
        self._start.record()
        before = time.perf_counter()
        result = run()
        host_seconds = time.perf_counter() - before
        self._end.record()
        self._end.synchronize()
        del result
        return self._start.elapsed_time(self._end), 1e3 * host_seconds

    def num_flushes(self, host_milliseconds: float) -> int:
        return min(max(math.ceil(1.5 * host_milliseconds / max(self._flush_ms, 1e-3)), 1), MOST_FLUSHES)

    def poison(self, num_bytes: float) -> None:
        """Leaves NaN in the memory of the next allocations, so that an element that no kernel writes is found."""
        free, _ = torch.cuda.mem_get_info()
        num_elements = int(min(num_bytes, 0.5 * free)) // 2
        torch.empty(num_elements, dtype=torch.bfloat16, device=self.torch_device).fill_(float("nan"))

    def peak_extra_bytes(self, run: Callable[[], Any], given: Sequence[Tensor]) -> float:
        """The allocator's peak during the step, above what is allocated before it."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def check_alive(self, culprit: str) -> None:
        try:
            torch.cuda.synchronize()
            torch.ones(8, device=self.torch_device).sum().item()
        except Exception as error:
            raise DeviceLost(f"after {culprit}: {' '.join(str(error).split())[:200]}") from None


Device = CpuDevice | CudaDevice


def find_device(name: str | None) -> Device:
    """The device of that name: cuda or cpu. None: CUDA if there is one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; --device cpu runs tiny shapes, for trying it out")
    return CpuDevice() if name == "cpu" or not torch.cuda.is_available() else CudaDevice()


def median_ms(device: Device, run: Callable[[], Any]) -> float:
    for _ in range(3):
        device.timed(run)
    return statistics.median(device.timed(run)[0] for _ in range(CEILING_REPETITIONS[device.kind]))


def measure_ceilings(device: Device) -> dict[str, float]:
    """Bytes per second of a large copy (read plus written) and FLOP/s of a bf16 matrix product, measured now on this machine."""
    is_cuda = device.kind == "cuda"
    num_bytes = int(min(COPY_BYTES, COPY_SHARE * torch.cuda.mem_get_info()[0])) if is_cuda else CPU_COPY_BYTES
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device.torch_device).normal_()
    target = torch.empty_like(source)
    copy_ms = median_ms(device, functools.partial(target.copy_, source))
    del source, target
    size = MATMUL_SIZE if is_cuda else CPU_MATMUL_SIZE
    # 0.02 x randn: products of random data draw more power, and run slower, than products of zeros.
    left, right = (0.02 * torch.randn(size, size, device=device.torch_device).to(torch.bfloat16) for _ in range(2))
    matmul_ms = median_ms(device, lambda: left @ right)
    device.release_memory()
    return {
        "copy_bytes": num_bytes,
        "copy_bytes_per_second": 2 * num_bytes / copy_ms * 1e3,
        "matmul_size": size,
        "matmul_flop_per_second": 2 * size**3 / matmul_ms * 1e3,
    }


def name_of_cpu() -> str:
    """The model where the system says it, as Linux does, else the architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} CPU ({platform.machine()})"
    return f"{platform.machine()} CPU"


def describe_machine(device: Device) -> dict[str, Any]:
    """Names, versions and the date: without them a number cannot be compared with another."""
    is_cuda, now = device.kind == "cuda", datetime.now(UTC)
    described = {
        "date": now.strftime("%Y-%m-%d"),
        "time": now.strftime("%H:%M UTC"),
        "device": device.kind,
        "device_name": torch.cuda.get_device_name() if is_cuda else f"{name_of_cpu()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "packages": {found.name: found.version for found in distributions() if found.name in PACKAGES},
    }
    if is_cuda:
        properties = torch.cuda.get_device_properties(device.torch_device)
        described |= {"cuda": torch.version.cuda, "capability": ".".join(map(str, torch.cuda.get_device_capability()))}
        described |= {"memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count}
    return described


def read_clocks(device: Device) -> dict[str, str] | None:
    """Clocks, power and temperature as nvidia-smi reports them now; None where it does not answer."""
    if device.kind != "cuda":
        return None
    # Not the index: CUDA_VISIBLE_DEVICES renumbers the devices only for torch.
    several = torch.cuda.device_count() > 1
    of_gpu = f"GPU-{torch.cuda.get_device_properties(device.torch_device).uuid}" if several else "0"
    return _gpu(of_gpu).read()


_gpu = functools.cache(Gpu)


# Providers in turn


@dataclass(frozen=True, slots=True)
class Check:
    """One number of the gate. NaN is above every limit."""

    name: str
    error: float
    limit: float

    @property
    def is_passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Step:
    """load(index) restores input set `index`, untimed; run() is timed; check(result) judges a run on the loaded set."""

    load: Callable[[int], None]
    run: Callable[[], Any]
    check: Callable[[Any], list[Check]]


@dataclass(frozen=True, slots=True)
class Provider:
    """prepare(problem) -> Step; it may raise Unavailable. `leaves_out`: what a user would still have to add."""

    name: str
    prepare: Callable[[Any], Step]
    leaves_out: str = ""
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 30
    seconds_per_provider: float = 4.0  # of one case; bounds the rounds of slow providers
    max_drift: float | None = 0.03  # None: a shared CPU, whose speed changes by a third from one moment to the next


@dataclass(slots=True)
class ProviderRow:
    """One provider on one case. Times are None unless status is ok."""

    provider: str
    is_ours: bool
    leaves_out: str
    status: str = OK
    detail: str = ""
    checks: list[Check] = field(default_factory=list)
    peak_extra_bytes: float | None = None
    rounds: int = 0
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    host_ms: float | None = None
    least_host_ms: float | None = None

    def as_dict(self) -> dict:
        """As a dictionary. An error that is not finite becomes None, because JSON has no NaN."""
        checks = [asdict(check) | {"error": check.error if math.isfinite(check.error) else None} for check in self.checks]
        return asdict(self) | {"checks": checks}


@dataclass(slots=True)
class _Qualified:
    """A provider that passed the gate; `times` of a step on the device and until the host had queued it."""

    row: ProviderRow
    step: Step
    rounds: int
    host_milliseconds: float
    times: list[tuple[float, float]] = field(default_factory=list)


def measure(
    problem: Any, providers: Sequence[Provider], device: Device, settings: Settings
) -> tuple[list[ProviderRow], float | None]:  # one row a provider in their order; drift of the first that ran, None if none did
    """Runs gate and memory of each provider, then A B C A B C over rotating input sets."""
    rows = [ProviderRow(provider.name, provider.is_ours, provider.leaves_out) for provider in providers]
    ready = []
    for provider, row in zip(providers, rows, strict=True):
        qualified = _guard(row, device, lambda p=provider, r=row: _qualify(p, r, problem, device, settings))
        if qualified is not None:
            ready.append(qualified)
    for number in range(settings.rounds):
        for entry in ready:
            if entry.row.status == OK and takes_part(number, entry.rounds, settings.rounds):
                _guard(entry.row, device, lambda e=entry, n=number: _time_once(e, n, problem, device))
    ready = [entry for entry in ready if entry.row.status == OK]
    for entry in ready:
        row, (milliseconds, host_milliseconds) = entry.row, zip(*entry.times, strict=True)
        row.rounds, row.host_ms = len(entry.times), statistics.median(host_milliseconds)
        row.least_host_ms = min(host_milliseconds)
        row.p20_ms, row.median_ms, row.p80_ms = percentiles(milliseconds)
    return rows, _drift(ready[0].times, device.resolution_ms) if ready else None


def _guard(row: ProviderRow, device: Device, action: Callable[[], Any]) -> Any:
    """The result of the action; None, with the reason in the row, if it raises. DeviceLost if no provider can run after it."""
    try:
        return action()
    except Unavailable as error:
        row.status, row.detail = error.args
        return None
    except Exception as error:  # an adapter or a peer: it may raise anything
        row.status = ERROR
        row.detail = " ".join(f"{type(error).__name__}: {error}".split())[:DETAIL_LENGTH]
        error.__traceback__ = None  # it holds the step's tensors
    gc.collect()
    device.release_memory()
    device.check_alive(row.provider)
    return None


def _qualify(provider: Provider, row: ProviderRow, problem: Any, device: Device, settings: Settings) -> _Qualified | None:
    """Runs the gate on memory filled with NaN; measures the peak above the inputs; counts the rounds. None on FAIL."""
    step = provider.prepare(problem)
    device.poison(problem.logits_bytes)
    step.load(0)
    result = step.run()
    row.checks = step.check(result)
    del result
    if not row.checks or not all(check.is_passed for check in row.checks):
        row.status, row.detail = FAIL, "; ".join(f"{c.name} {c.error:.1e} > {c.limit:.0e}" for c in row.checks if not c.is_passed)
        return None
    step.load(1 % problem.num_sets)
    row.peak_extra_bytes = device.peak_extra_bytes(step.run, problem.given)
    # The second call may still compile or allocate; the third shows the time.
    for index in range(2):
        step.load(index % problem.num_sets)
        milliseconds, host_milliseconds = device.timed(step.run)
    affordable = int(1e3 * settings.seconds_per_provider / max(milliseconds, 1e-6))
    rounds = min(settings.rounds, max(affordable, FEWEST_ROUNDS))
    return _Qualified(row, step, rounds, host_milliseconds)


def takes_part(number: int, rounds: int, all_rounds: int) -> bool:
    """Spreads `rounds` of a provider evenly over `all_rounds`."""
    return (number + 1) * rounds // all_rounds > number * rounds // all_rounds


def _time_once(entry: _Qualified, number: int, problem: Any, device: Device) -> bool:
    entry.step.load(number % problem.num_sets)
    entry.times.append(device.timed(entry.step.run, entry.host_milliseconds))
    return True


def percentiles(values: Sequence[float]) -> list[float]:
    """20 %, 50 % and 80 %, linear between neighbours: of 0, 1, 2, 3, 4, 5 they are 1, 2.5 and 4."""
    return torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()


def _drift(times: Sequence[tuple[float, float]], resolution_ms: float) -> float | None:
    """Relative change of a provider's median from the first to the second half of the rounds; None with one round.

    In both halves the others run between its steps. Alone it would find other clocks: a GPU that the others' matmuls hold at its
    limit of power speeds up without them, and nothing has drifted.
    """
    halves = times[: len(times) // 2], times[-(len(times) // 2) :]
    if len(times) < 2:
        return None
    before, after = (statistics.median(milliseconds for milliseconds, _ in half) for half in halves)
    return 0.0 if abs(after - before) <= resolution_ms else after / before - 1.0


def is_void(drift: float | None, settings: Settings) -> bool:
    """Whether the machine changed during the measurement. Then the times of this case are not valid."""
    return None not in (drift, settings.max_drift) and not abs(drift) <= settings.max_drift
