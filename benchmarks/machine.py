"""What nvidia-smi says of a GPU: it may be missing, lack rights, or hang in a call of the driver that no signal ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

CLOCKS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")
SECONDS_FOR_NVIDIA_SMI = 10.0
# What a killed process gets to end. One in an uninterruptible call of a driver does not end: it is left behind.
SECONDS_AFTER_A_KILL = 10.0


def ask(command: Sequence[str], seconds: float) -> str | None:
    """What a program printed; None where it cannot be started, fails or hangs. It raises nothing."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
    except OSError:
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        printed, _ = process.communicate(timeout=seconds)
        return None if process.returncode else printed
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=SECONDS_AFTER_A_KILL)
    return None


class Gpu:
    """Reads the clocks of a GPU; it changes no setting. Once nvidia-smi has given no answer, it is not asked again."""

    def __init__(self, gpu: str) -> None:
        self.command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader", f"--id={gpu}"]
        self.answers = True

    def read(self) -> dict[str, str] | None:
        printed = ask(self.command, SECONDS_FOR_NVIDIA_SMI) if self.answers else None
        self.answers = printed is not None
        # nvidia-smi prints warnings before and after the line.
        lines = ([value.strip() for value in line.split(",")] for line in (printed or "").splitlines())
        return next((dict(zip(CLOCKS, values, strict=True)) for values in lines if len(values) == len(CLOCKS)), None)
