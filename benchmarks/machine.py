"""What a GPU session needs of the machine, and its programs, as nvidia-smi, which may hang, be missing or lack rights.

Each call has a limit, and each failure a name and a remedy. It needs nothing but the standard library: .ci/gpu_session.py runs
without torch too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import TRITON_OF_TORCH  # its module needs the standard library alone

# Packages: the pip requirement, and what is lost without it.
PACKAGES = {
    "torch": ("torch", "everything"),
    "triton": ("triton", "everything"),
    "pytest": ("pytest", "the stage tests"),
    "megatron.core": ("megatron-core==0.16.1", "the stage train, whole steps in selftest, a peer of losses and head"),
    "liger_kernel": ("liger-kernel", "peers of losses and head"),
    "matplotlib": ("matplotlib", "the pictures of the benchmarks"),
}
# Peers that come as checkouts, with --peer NAME=PATH: the benchmarks with a row for them.
CHECKOUTS = {"fast_llm": "losses", "verl": "losses, head", "rl_engine": "head"}
# Further peers, by distribution: the benchmark with a row for it, which says so where the peer is missing.
OPTIONAL_PEERS = {
    "quack-kernels": "head",
    "liger-cute-kernels": "head",
    "cut-cross-entropy": "head",
    "trl": "losses",
    "flash-linear-attention": "losses",
}
# Of the machine, beside packages: Triton compiles a launcher in C for each new signature of a kernel.
COMPILER, HEADERS, DRIVER, NCU = "a C compiler", "Python.h", "libcuda.so.1", "ncu"
GPU_QUERY = ("name", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
SECONDS_FOR_NVIDIA_SMI = 10.0

# What a killed process gets to end. One in an uninterruptible call of a driver does not end: it is left behind.
SECONDS_AFTER_A_KILL = 10.0
LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program printed, standard error too; error: why it is no answer, else None."""

    output: str
    error: str | None = None


def ask(command: Sequence[str], seconds: float | None) -> Answer:
    """Runs a program in a process group of its own, which ends with it. It raises nothing."""
    name = os.path.basename(command[0])
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return Answer("", f"{name} is missing" if missing else f"{name} cannot be started: {error.strerror or error}")
    error = None
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as expired:
        printed, error = expired.stdout or b"", f"{name} hangs: stopped after {seconds:.0f} s"
    kill_group(process)
    if error is not None:
        try:
            printed, _ = process.communicate(timeout=SECONDS_AFTER_A_KILL)
        except subprocess.TimeoutExpired as expired:
            printed, error = expired.stdout or printed, f"{error}, and it does not end after SIGKILL"
    output = printed.decode(errors="replace")
    if error is None and process.returncode:
        error = f"{name} ended with {process.returncode}: {' '.join(output.split())[-LONGEST_REASON:]}"
    return Answer(output, error)


def kill_group(process: subprocess.Popen) -> None:
    """Also what the process left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def read_csv_line(output: str, number: int) -> list[str] | None:
    """The first line with as many values as were asked for: nvidia-smi prints warnings before and after it. None: there is none."""
    lines = ([value.strip() for value in line.split(",")] for line in output.splitlines())
    return next((values for values in lines if len(values) == number), None)


def problem_of_triton(version: str | None) -> str | None:
    """Of one that no test has compiled these kernels with. The stages are tried all the same: they say more than a number."""
    tested = sorted(set(TRITON_OF_TORCH.values()))
    if version is None or ".".join(version.split(".")[:2]) in tested:
        return None
    return f"triton {version} is none with which the kernels are compiled in tests: install one of {', '.join(tested)}"


def why_no_compiler() -> str | None:
    """As Triton looks for one: $CC, then gcc, then clang; never cc."""
    chosen = os.environ.get("CC")
    if chosen:
        return None if shutil.which(chosen.split()[0]) else f"CC={chosen} is no program: unset it, or install it"
    if shutil.which("gcc") or shutil.which("clang"):
        return None
    return "Triton does not look for cc: set CC=cc" if shutil.which("cc") else "install gcc (apt-get install gcc), or set CC"


def why_no_headers() -> str | None:
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if (Path(folder) / "Python.h").exists():
        return None
    major, minor = sys.version_info[:2]
    return f"it should be in {folder}: apt-get install python{major}.{minor}-dev, or take a Python that has its headers"


def why_no_driver() -> str | None:
    """As Triton looks for it: $TRITON_LIBCUDA_PATH, then ldconfig, then LD_LIBRARY_PATH."""
    given = [os.environ.get("TRITON_LIBCUDA_PATH"), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    if any(folder and (Path(folder) / DRIVER).exists() for folder in given):
        return None
    answer = ask([shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin") or "ldconfig", "-p"], 10.0)
    if DRIVER in answer.output:
        return None
    why = f" ({answer.error})" if answer.error else ""
    remedy = "run ldconfig as root, or set TRITON_LIBCUDA_PATH to the folder of the driver's libraries"
    return f"ldconfig -p does not list it{why}: {remedy}"


def find_ncu() -> str | None:
    return shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")


def why_no_ncu() -> str | None:
    return None if find_ncu() else "it comes with the CUDA toolkit: put its bin folder on PATH"


# What to do where it is missing; None: it is there.
PARTS_OF_THE_MACHINE: dict[str, Callable[[], str | None]] = {
    COMPILER: why_no_compiler,
    HEADERS: why_no_headers,
    DRIVER: why_no_driver,
    NCU: why_no_ncu,
}


class Gpu:
    """What nvidia-smi says of a GPU; it changes no setting. Once it has hung, it is not asked again."""

    def __init__(self, query: Sequence[str] = GPU_QUERY, gpu: str = "0") -> None:
        self.query, self.gpu = tuple(query), gpu
        self.hangs: str | None = None

    def read(self) -> dict[str, str]:
        """{"error": why} where it gives no answer."""
        if self.hangs is not None:
            return {"error": self.hangs}
        command = ["nvidia-smi", f"--query-gpu={','.join(self.query)}", "--format=csv,noheader", f"--id={self.gpu}"]
        try:
            answer = ask(command, SECONDS_FOR_NVIDIA_SMI)
        except Exception as error:
            return {"error": f"nvidia-smi: {type(error).__name__}: {error}"}
        if answer.error is not None:
            self.hangs = answer.error if "hangs" in answer.error else None
            return {"error": answer.error}
        values = read_csv_line(answer.output, len(self.query))
        if values is None:
            return {"error": f"nvidia-smi answers {' '.join(answer.output.split())[:120]!r}"}
        return dict(zip(self.query, values, strict=True))

    def read_or_none(self) -> dict[str, str] | None:
        found = self.read()
        return None if "error" in found else found


def is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of its parent, or a module without a spec
        return False
