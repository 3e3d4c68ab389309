"""Makes .venv with the package and its tools in it, with the standard library alone.

    python3 .ci/make_venv.py

A torch of the calling interpreter's own site-packages is reused. Without one, TORCH_SPEC (a requirement, options of pip may follow
it) goes into .venv first. Everything else is installed under constraints that pin torch and triton.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "made_by_make_venv"
CONSTRAINTS = VENV / "constraints.txt"
EXTRAS = "megatron,train,docs,dev"
HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
PINS = """
import importlib.metadata
for name in ("torch", "triton"):
    try:
        print(f"{name}=={importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        pass
"""


def wanted_stamp() -> str:
    """Of the interpreter, its torch, and what is installed: where it changes, .venv is made again."""
    sources = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", ".ci/make_venv.py"))
    facts = f"{sys.version} {sys.prefix} {importlib.util.find_spec('torch')}"
    return hashlib.sha256(sources + facts.encode()).hexdigest()


def pip(*words: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", *words]
    if status := subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(f"setup: this failed (above) with status {status}; run again when mended: {shlex.join(command)}")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this file tells the user)
        sys.exit(f"setup: Python 3.11 or later is needed, {sys.executable} is {sys.version.split()[0]}: set PYTHON=...")
    if STAMP.exists() and STAMP.read_text() == wanted_stamp():
        return
    if VENV.exists() and not CONSTRAINTS.exists():
        sys.exit(f"setup: {VENV} was not made by this script: move it away, or activate it and pip install -e '.[{EXTRAS}]'")
    shutil.rmtree(VENV, ignore_errors=True)
    print(f"setup: making {VENV.name} for {sys.executable}", flush=True)
    # In a virtual environment the option would mean the packages of the base interpreter.
    has_own_torch = importlib.util.find_spec("torch") is not None and sys.prefix == sys.base_prefix
    venv.create(VENV, system_site_packages=has_own_torch, with_pip=True)
    CONSTRAINTS.touch()
    if subprocess.run([PYTHON, "-c", HAS_TORCH]).returncode:
        pip(*shlex.split(os.environ.get("TORCH_SPEC") or "torch==2.13.0"))
    CONSTRAINTS.write_text(subprocess.run([PYTHON, "-c", PINS], check=True, capture_output=True, text=True).stdout)
    pip("--constraint", str(CONSTRAINTS), "--editable", f".[{EXTRAS}]")
    STAMP.write_text(wanted_stamp())


if __name__ == "__main__":
    main()
