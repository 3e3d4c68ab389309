"""The machine under measurement: clock, cache, memory, ceilings, versions. It must never change a setting of the device."""

from __future__ import annotations

import gc
import math
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from megatron_rl.errors import ConfigError

FLUSH_BYTES = 256 * 1024**2  # several times the L2 of any GPU so far
COPY_BYTES = 8 * 10**9
CPU_COPY_BYTES = 16 * 10**6
# Of the free memory: source and target of the copy, and room for the allocator.
COPY_SHARE = 0.3
MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 256
CEILING_REPETITIONS, CPU_CEILING_REPETITIONS = 20, 5
# Writes queued in front of a step so that the host has queued all of it before the device gets there; then launches cost nothing.
MOST_FLUSHES = 100
PACKAGES = "triton numpy liger-kernel megatron-core fast-llm verl flash-attn cut-cross-entropy quack-kernels apex".split()
CLOCKS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


class DeviceLost(Exception):
    """A fault that no later call survives, such as an illegal access: what was measured before it is all there will be."""


class Device(Protocol):
    kind: str
    torch_device: torch.device
    resolution_ms: float

    def synchronize(self) -> None: ...

    def timed(self, run: Callable[[], Any], flushes: int) -> tuple[float, float]:
        """(milliseconds of the step, milliseconds until the host had queued it)"""

    def flushes_to_hide(self, host_milliseconds: float) -> int: ...

    def poison(self, num_bytes: float) -> None: ...

    def peak_extra_bytes(self, run: Callable[[], Any]) -> float | None: ...

    def release_memory(self) -> None: ...

    def check_alive(self, culprit: str) -> None: ...


class CudaDevice:
    """Times are the device's own, between two events around the step."""

    kind = "cuda"
    # Events tick in about half a microsecond: a median that moved by two ticks did not move.
    resolution_ms = 1e-3

    def __init__(self):
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch_device)
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush_ms = 0.0
        self._flush_ms = statistics.median(self.timed(lambda: self._flush.fill_(1), 1)[0] for _ in range(CEILING_REPETITIONS))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def timed(self, run: Callable[[], Any], flushes: int) -> tuple[float, float]:
        """(milliseconds of the step, milliseconds until the host had queued it). The flush stands in the queue before it."""
        for number in range(flushes):
            self._flush.fill_(number % 255 + 1)
        self._start.record()
        before = time.perf_counter()
        result = run()
        host_seconds = time.perf_counter() - before
        self._end.record()
        self._end.synchronize()
        del result
        return self._start.elapsed_time(self._end), 1e3 * host_seconds

    def flushes_to_hide(self, host_milliseconds: float) -> int:
        return min(max(math.ceil(1.5 * host_milliseconds / max(self._flush_ms, 1e-3)), 1), MOST_FLUSHES)

    def poison(self, num_bytes: float) -> None:
        """Leaves NaN in the memory that the next allocations get: an element that nobody writes shows."""
        free, _ = torch.cuda.mem_get_info()
        num_elements = int(min(num_bytes, 0.5 * free)) // 2
        torch.empty(num_elements, dtype=torch.bfloat16, device=self.torch_device).fill_(float("nan"))

    def peak_extra_bytes(self, run: Callable[[], Any]) -> float | None:
        """Allocated at the worst moment of the step, above what is allocated before it."""
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


class CpuDevice:
    """Wall clock of a machine that may be busy with other things. For trying the command out, not for numbers."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    resolution_ms = 0.0

    def synchronize(self) -> None: ...

    def timed(self, run: Callable[[], Any], flushes: int) -> tuple[float, float]:
        before = time.perf_counter()
        run()
        milliseconds = 1e3 * (time.perf_counter() - before)
        return milliseconds, milliseconds

    def flushes_to_hide(self, host_milliseconds: float) -> int:
        return 0

    def poison(self, num_bytes: float) -> None: ...

    def peak_extra_bytes(self, run: Callable[[], Any]) -> float | None:
        return None  # a process does not give memory back; `bench cpu` measures it in processes of their own

    def release_memory(self) -> None: ...

    def check_alive(self, culprit: str) -> None: ...


def find_device(name: str | None) -> Device:
    """cuda, cpu, or None: CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; --device cpu runs tiny shapes, for trying it out")
    if name == "cpu" or not torch.cuda.is_available():
        return CpuDevice()
    return CudaDevice()


def measure_ceilings(device: Device) -> dict[str, float]:
    """What this machine can do: bytes per second of a large copy (read plus written), FLOP/s of a bf16 matrix product."""
    is_cuda = device.kind == "cuda"
    num_bytes = CPU_COPY_BYTES
    if is_cuda:
        free, _ = torch.cuda.mem_get_info()
        num_bytes = int(min(COPY_BYTES, COPY_SHARE * free))
    copy_ms = _median_ms(device, _large_copy(num_bytes, device))
    size = MATMUL_SIZE if is_cuda else CPU_MATMUL_SIZE
    # 0.02 x randn: products on random data draw more power, and run slower, than on zeros.
    left, right = (0.02 * torch.randn(size, size, device=device.torch_device).to(torch.bfloat16) for _ in range(2))
    matmul_ms = _median_ms(device, lambda: left @ right)
    device.release_memory()
    return {
        "copy_bytes": num_bytes,
        "copy_bytes_per_second": 2 * num_bytes / copy_ms * 1e3,
        "matmul_size": size,
        "matmul_flop_per_second": 2 * size**3 / matmul_ms * 1e3,
    }


def _large_copy(num_bytes: int, device: Device) -> Callable[[], Any]:
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device.torch_device).normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _median_ms(device: Device, run: Callable[[], Any]) -> float:
    for _ in range(3):
        device.timed(run, 1)
    repetitions = CEILING_REPETITIONS if device.kind == "cuda" else CPU_CEILING_REPETITIONS
    return statistics.median(device.timed(run, 1)[0] for _ in range(repetitions))


def describe_machine(device: Device) -> dict[str, Any]:
    """Names, versions and the date: without them a number cannot be compared with another."""
    is_cuda = device.kind == "cuda"
    described = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "time": datetime.now(UTC).strftime("%H:%M UTC"),
        "device": device.kind,
        "device_name": torch.cuda.get_device_name() if is_cuda else f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }
    if is_cuda:
        properties = torch.cuda.get_device_properties(device.torch_device)
        described |= {
            "cuda": torch.version.cuda,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(str(number) for number in torch.cuda.get_device_capability()),
        }
    return described


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_clocks(device: Device) -> dict[str, str] | None:
    """Clocks, power and temperature as nvidia-smi reports them now; None where it is not there or does not answer."""
    if device.kind != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    if torch.cuda.device_count() > 1:
        # Not the index: CUDA_VISIBLE_DEVICES renumbers the devices for torch alone.
        command.append(f"--id=GPU-{torch.cuda.get_device_properties(device.torch_device).uuid}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    return dict(zip(CLOCKS, values, strict=True)) if len(values) == len(CLOCKS) else None
