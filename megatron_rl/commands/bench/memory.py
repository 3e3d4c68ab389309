"""Peak resident memory of a step in a process of its own, because a process never gives memory back. Linux; never for a GPU's."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError


def peak_above_inputs(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> float:
    """Bytes of peak resident memory of `prepare(*arguments)()` above what the process held when prepare returned.

    `prepare` is a function of a module: it makes the inputs and takes one tiny step, because what autograd and the allocator load
    once is not the step's. It must not touch more memory than the step will. Raises RuntimeError with what the process raised.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(prepare, arguments, sender))
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = "it ended without a word; out of memory?"
    process.join()
    if isinstance(found, str):
        raise RuntimeError(f"the process that measures memory: {found}")
    return found


def _report(prepare: Callable[..., Callable[[], Any]], arguments: tuple, sender) -> None:
    try:
        step = prepare(*arguments)
        gc.collect()
        before = status_bytes("VmRSS")
        result = step()
        found: float | str = status_bytes("VmHWM") - before
        del result
    except Exception as error:  # whatever it is, the parent says it
        found = f"{type(error).__name__}: {error}"
    sender.send(found)


def status_bytes(field: str) -> float:
    """VmRSS, resident now, or VmHWM, its peak. getrusage is no help: its peak survives exec and would be the parent's."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise ConfigError("the bench measures a CPU's memory through /proc/self/status: run it on Linux")
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024.0
