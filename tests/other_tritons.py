"""The Triton of each supported torch, for processes that compile with it: the installed one, and others beside it in .tritons/.

Git ignores .tritons/. The first test that needs a Triton installs it there with pip, 5 seconds and about 600 MB each, and it stays:
the one that most hosts' images have, and with EVERY_LAUNCH=1, which .ci/run sets, all of them.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import TRITON_OF_TORCH

ROOT = Path(__file__).resolve().parent.parent
TRITONS = sorted(set(TRITON_OF_TORCH.values()))
WITHOUT_ASKING = "3.6"  # of torch 2.10 and 2.11
# Each launch of tests/kernel_launches.py with each Triton, and not each kernel once.
EVERY = os.environ.get("EVERY_LAUNCH", "0") not in ("", "0")


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def installed() -> str | None:
    """The Triton that this process imports, "3.9"."""
    try:
        return minor(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return None


def environment_of(version: str) -> dict[str, str]:
    """Of a process that imports this Triton, compiled and not interpreted. Skips where it cannot be installed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join([*path_of(version), str(ROOT)])}


def path_of(version: str) -> list[str]:
    """What comes first on the path."""
    if version == installed():
        return []
    folder = ROOT / ".tritons" / version
    folder.parent.mkdir(exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            if not EVERY and version != WITHOUT_ASKING:
                pytest.skip(f"Triton {version} is not in .tritons/: EVERY_LAUNCH=1 installs each, 3 GB in all")
            options = "--quiet --disable-pip-version-check --no-deps --no-compile --retries 1 --upgrade".split()
            command = [sys.executable, "-m", "pip", "install", *options, "--target", folder, f"triton=={version}.*"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
                pytest.skip(f"pip cannot install triton=={version}.* into .tritons/: {errors[-1]}")
            (folder / "complete").touch()
    return [str(folder)]
