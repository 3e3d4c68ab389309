"""Makes .venv with the package in it, with the standard library alone. An installed torch is kept.

    python3 .ci/make_venv.py

A torch of the calling interpreter is reused: .venv then sees that interpreter's site-packages. Without one, TORCH_SPEC
(a pip requirement, pip options may follow it; default torch==2.13.0) goes into .venv first. Everything else is
installed under constraints that pin torch and triton. The stamp is written last, so an interrupted set-up starts
again; where the stamp fits, nothing is done.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP_NAME = "made_by_make_venv"
UNFINISHED = "unfinished"
DEFAULT_TORCH_SPEC = "torch==2.13.0"
EXTRAS = ("megatron", "train", "docs", "dev")

# .venv's python runs it. find_spec for triton: some of its builds have another distribution name.
PROBE = """
import importlib.metadata, importlib.util, json, torch
pins = {}
for name in ("torch", "triton"):
    try:
        pins[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({
    "pins": pins,
    "has_accelerator": bool(torch.version.cuda or torch.version.hip),
    "has_triton": importlib.util.find_spec("triton") is not None,
    "folder": torch.__path__[0],
}))
"""


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def caller_torch() -> str | None:
    """The version of the calling interpreter's torch, None without one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pass
    if importlib.util.find_spec("torch") is not None:
        sys.exit(
            f"setup: {sys.executable} can import a torch that carries no package metadata, so pip would install "
            "a second one: install that torch with pip, or choose another interpreter with PYTHON=..."
        )
    return None


def wanted_stamp() -> list[str]:
    """[calling interpreter, hash of what is installed]: a new first line needs a new .venv, a new second one only pip."""
    digest = hashlib.sha256()
    for source in ("setup.py", ".ci/make_venv.py"):
        digest.update((ROOT / source).read_bytes())
    version = ".".join(map(str, sys.version_info[:2]))
    return [f"python {version} of {sys.prefix}, torch {caller_torch()}", digest.hexdigest()]


def read_stamp(folder: Path) -> list[str] | None:
    """The stamp's lines; None where this script has not begun."""
    stamp = folder / STAMP_NAME
    return stamp.read_text(encoding="utf-8").splitlines() if stamp.exists() else None


def write_stamp(folder: Path, lines: list[str]) -> None:
    (folder / STAMP_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def site_packages_of(folder: Path) -> Path:
    # The scheme is named because Debian's default one answers with dist-packages.
    return Path(sysconfig.get_path("purelib", scheme="venv", vars={"base": str(folder), "platbase": str(folder)}))


def create(folder: Path) -> None:
    """A fresh virtual environment; it sees the calling interpreter's packages if torch is among them."""
    if folder.exists():
        if read_stamp(folder) is None:
            sys.exit(
                f"setup: {folder} was not made by this script and stays as it is: move it away, or call with "
                f"PYTHON={python_of(folder)} to install into it"
            )
        say(f"removing {folder.name}: it is unfinished, or made for another interpreter or torch")
        shutil.rmtree(folder)
    say(f"creating {folder.name} for {sys.executable}")
    folder.mkdir(parents=True)
    write_stamp(folder, [UNFINISHED])
    has_ensurepip = importlib.util.find_spec("ensurepip") is not None
    venv.EnvBuilder(symlinks=os.name != "nt", with_pip=has_ensurepip).create(folder)
    if caller_torch() is not None:
        share_packages(folder)
        share_torchrun(folder)


def share_packages(folder: Path) -> None:
    """A .pth file puts the calling interpreter's site-packages, with its editable installs, behind .venv's own.

    `include-system-site-packages` does not work here: in a virtual environment it means the base interpreter's packages.
    """
    folders = [Path(path) for path in sys.path]
    shared = [str(path) for path in folders if path.name in ("site-packages", "dist-packages") and path.is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in shared]
    (site_packages_of(folder) / "calling_interpreter.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def share_torchrun(folder: Path) -> None:
    """Writes a torchrun with .venv's interpreter: the caller's own would start ranks without this package."""
    script = python_of(folder).with_name("torchrun")
    code = f"#!{python_of(folder)}\nimport sys\n\nfrom torch.distributed.run import main\n\nsys.exit(main())\n"
    script.write_text(code, encoding="utf-8")
    script.chmod(0o755)


def can_import(folder: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python_of(folder), "-c", code], check=False).returncode == 0


def probe(folder: Path) -> dict:
    """What .venv's python sees: pins, has_accelerator, has_triton, folder of torch."""
    answer = subprocess.run([python_of(folder), "-W", "ignore", "-c", PROBE], check=False, stdout=subprocess.PIPE, text=True)
    if answer.returncode != 0:
        sys.exit(f"setup: torch cannot be imported by {python_of(folder)} (above): mend it and run again")
    return json.loads(answer.stdout.splitlines()[-1])


def pip_install(folder: Path, *arguments: str) -> None:
    """Runs the pip of .venv, or that of the calling interpreter where Python came without ensurepip."""
    if can_import(folder, "pip"):
        pip = [str(python_of(folder)), "-m", "pip"]
    else:
        pip = [sys.executable, "-m", "pip", "--python", str(python_of(folder))]
    command = [*pip, "install", "-qq", "--no-input", "--disable-pip-version-check", *arguments]
    status = subprocess.run(command, check=False, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    if status != 0:
        sys.exit(f"setup: this failed (above) with status {status}; run again when mended: {shlex.join(command)}")


def chosen_extras(found: dict) -> list[str]:
    """EXTRAS, and a triton for its interpreter where there is none. A torch for an accelerator pins its own triton."""
    needs_triton = not found["has_accelerator"] and not found["has_triton"]
    return [*EXTRAS, "interpreter"] if needs_triton else [*EXTRAS]


def install(folder: Path) -> dict:
    """torch where there is none, then the package, editable. Returns what `probe` found between the two."""
    if not can_import(folder, "torch"):
        spec = os.environ.get("TORCH_SPEC") or DEFAULT_TORCH_SPEC
        say(f"installing {spec}, since {sys.executable} has no torch (a large download, unless pip has it cached)")
        pip_install(folder, *shlex.split(spec))
    found = probe(folder)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in found["pins"].items()), encoding="utf-8")
    extras = ",".join(chosen_extras(found))
    pins = ", ".join(f"{name} {version}" for name, version in found["pins"].items())
    say(f"installing the package, editable, with [{extras}], and keeping {pins}")
    pip_install(folder, "--constraint", str(constraints), "--editable", f".[{extras}]")
    return found


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this file tells the user)
        sys.exit(f"setup: Python 3.11 or later is needed, {sys.executable} is {sys.version.split()[0]}: set PYTHON=...")
    started = time.monotonic()
    wanted, found = wanted_stamp(), read_stamp(VENV)
    # An activated .venv calls: it cannot be made again from inside, and its interpreter is right.
    called_from_inside = Path(sys.prefix).resolve() == VENV.resolve()
    if found is not None and len(found) == len(wanted) and called_from_inside:
        wanted[0] = found[0]
    if found == wanted:
        say(f"{VENV.name} is up to date")
        return
    if not called_from_inside and (found is None or found[0] != wanted[0]):
        create(VENV)
    write_stamp(VENV, [UNFINISHED])
    before = install(VENV)
    after = probe(VENV)
    if after["pins"]["torch"] != before["pins"]["torch"] or after["folder"] != before["folder"]:
        sys.exit(f"setup: torch changed from {before} to {after}, which must not happen: please report it")
    write_stamp(VENV, wanted)
    say(f"done in {time.monotonic() - started:.0f} s; torch {after['pins']['torch']} in {after['folder']}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; the next run starts anew")
