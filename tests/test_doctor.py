"""`megatron-rl doctor` names what is broken, survives it, and shows a launch line to its trainer's own parser. Then what is built
of a checkout, and when a skip of a test fails. Nothing reaches for a network."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import marker_plugin
import pytest
from forked import forget, forked

import megatron_rl
from megatron_rl.commands.doctor import launch, probes
from megatron_rl.commands.doctor.machine import findings
from megatron_rl.commands.doctor.report import NOTE, OK, PROBLEM
from megatron_rl.errors import ConfigError

# Machines as facts, of which nothing is looked up here

HERE = {"state": "here"}
ABSENT = {"state": "absent"}
BROKEN = {"state": "broken", "error": "OSError: y"}
CPU_MACHINE = {
    "python": {"version": "3.11.9"},
    "machine": {"has_nvidia_device": False},
    "torch": {
        **HERE,
        "version": "2.13.0+cpu",
        "cuda_build": None,
        "rocm_build": None,
        "has_cuda": False,
        "devices": [],
        "has_nccl": False,
        "has_gloo": True,
        "nccl": None,
    },
    "psutil": {**HERE, "version": "7.2.2"},
    "triton": {**HERE, "version": "3.9.0"},
    "transformer_engine": ABSENT,
    "flash_attn": ABSENT,
    "apex": ABSENT,
    "megatron": {**HERE, "version": "0.16.1", "ratio": 1.0},
}
CUDA_TORCH = {
    "cuda_build": "13.0",
    "has_cuda": True,
    "devices": ["NVIDIA H200"] * 2,
    "has_nccl": True,
    "nccl": "2.29.7",
}


def machine(base: dict = CPU_MACHINE, **changes: dict) -> dict:
    """A machine that differs in some packages: a dict without a state changes facts, one with a state replaces them."""
    facts = deepcopy(base)
    for name, change in changes.items():
        facts[name] = change if "state" in change else {**facts[name], **change}
    return facts


GPU_MACHINE = machine(torch=CUDA_TORCH, machine={"has_nvidia_device": True})
# The one of docs/tools.md.
SICK_MACHINE = machine(
    GPU_MACHINE,
    flash_attn={"state": "broken", "error": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"},
    psutil=ABSENT,
    transformer_engine={**HERE, "version": "2.9.0"},
    triton={**HERE, "version": "3.7.0"},
)


@pytest.mark.parametrize(
    "facts", [CPU_MACHINE, GPU_MACHINE, machine(megatron=ABSENT, triton=ABSENT, psutil=ABSENT)], ids=["CPU", "GPU", "torch alone"]
)
def test_a_sound_machine_has_no_problem_whatever_it_lacks(facts):
    """Absent is not broken: the losses need torch alone."""
    assert {row.status for row in findings(facts)} <= {"ok", "absent"}


SICK = [
    # what differs, the row's subject, and its text
    (CPU_MACHINE, {"megatron": BROKEN}, "megatron", "broken import: OSError: y"),
    (CPU_MACHINE, {"megatron": {"ratio": 0.5}}, "schedule", "gradient x 0.5 of the step's"),
    (CPU_MACHINE, {"machine": {"has_nvidia_device": True}}, "cuda", "install a CUDA build"),
    (GPU_MACHINE, {"triton": ABSENT}, "triton", "auto refuses CUDA without it"),
]


@pytest.mark.parametrize(("base", "changes", "subject", "text"), SICK, ids=[row[-1] for row in SICK])
def test_a_sick_machine_is_told_what_is_broken(base, changes, subject, text):
    """FB-16: catches a package that breaks training later and is not named."""
    (row,) = [row for row in findings(machine(base, **changes)) if row.status == PROBLEM]
    assert row.subject == subject and text in row.text


def test_what_is_odd_is_a_note_and_no_problem():
    rows = findings(machine(GPU_MACHINE, torch={"rocm_build": "7.1"}))
    assert [row.status for row in rows if row.status in (PROBLEM, NOTE)] == [NOTE]


# Looking at this machine


def test_broken_packages_are_told_and_do_not_take_doctor_down(tmp_path, monkeypatch):
    """Beside one that says something at import: a web toolkit of that name, a library that is none, one that kills its process."""
    files = {
        "apex/__init__.py": "from pyramid.session import UnencryptedCookieSessionFactoryConfig",
        "flash_attn/__init__.py": "import flash_attn_2_cuda",
        "flash_attn_2_cuda.so": "no library",
        "psutil/__init__.py": "import os; os.kill(os.getpid(), 9)",
        "triton/__init__.py": "__version__ = '3.4.5'\nprint('hello')",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {name: details for name, details in probes.DETAILS.items() if f"{name}/__init__.py" in files}
    monkeypatch.setattr(probes, "DETAILS", asked)
    facts = probes.collect_facts()
    assert facts["apex"] == {"state": "broken", "error": "ModuleNotFoundError: No module named 'pyramid'"}
    assert facts["flash_attn"]["state"] == "broken" and "flash_attn_2_cuda.so: file too short" in facts["flash_attn"]["error"]
    assert facts["psutil"]["error"] == "its import ended the process with -9: no message"
    assert facts["triton"]["state"] == "here"


def test_a_folder_of_that_name_is_no_installed_package(tmp_path, monkeypatch):
    """Beside a checkout `import apex` finds the folder of the checkout, a namespace with nothing in it."""
    (tmp_path / "apex").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [probes._is_there(name) for name in ("apex", "torch", "megatron")] == [False, True, True]


def test_doctor_runs_where_torch_does_not():
    """Catches an import of torch on the way to the one command that is to say what is wrong with it, with a launch line too."""

    def without_torch() -> int:
        forget("torch")
        sys.modules["torch"] = None
        import_module("megatron_rl.commands.doctor.probes")._is_there = lambda name: False
        return import_module("megatron_rl.__main__").main(["doctor", "--", "python", "slime/train.py"])

    code, out, error = forked(without_torch)
    assert code == 1, error
    assert "PROBLEM  torch" in out and "not installed, and everything needs it" in out


# The launch line


def raises(error: BaseException):
    def call(_):
        raise error

    return call


REFUSED = ConfigError(["mode=bad: first", "mode=bad: second"])
JUDGED = [
    # what raises what, the status of each row, its text
    (
        {"compose": raises(ImportError("no toy"))},
        NOTE,
        ["Toy cannot read it here (no toy): run doctor in its environment"],
    ),
    ({"compose": raises(SystemExit(2))}, PROBLEM, ["Toy's own parser refuses it, exit code 2"]),
    ({"compose": raises(REFUSED)}, PROBLEM, REFUSED.problems),
    ({"check": raises(REFUSED)}, PROBLEM, REFUSED.problems),
    ({}, OK, ["python", "train.py"]),
]


@pytest.mark.parametrize(("methods", "status", "texts"), JUDGED, ids=["not here", "exit", "composer", "check", "sound"])
def test_the_trainers_own_parser_reads_a_line_and_the_check_at_start_judges_it(methods, status, texts, monkeypatch):
    adapter = SimpleNamespace(**{"TITLE": "Toy", "compose": list, "check": list, **methods})
    monkeypatch.setattr(launch, "adapter_named", lambda name: adapter)
    rows = launch.judge_line(["python", "train.py"], "verl")
    assert [row.status for row in rows] == [status] * len(texts)
    assert all(row.text.startswith(text) for row, text in zip(rows, texts, strict=True))


# What is built of a checkout

ROOT = Path(__file__).resolve().parent.parent


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_one_version_stands_in_every_place():
    texts = [(ROOT / "CITATION.cff", "\nversion: {}\n"), (ROOT / "CHANGELOG.md", "\n## {}\n")]
    assert PROJECT["version"] == megatron_rl.__version__
    assert all(text.format(megatron_rl.__version__) in path.read_text(encoding="utf-8") for path, text in texts)


def test_the_source_distribution_can_run_its_tests(tmp_path):
    """Catches tests without the helpers that they import, and pages that a test compares with."""
    egg = ["egg_info", "--egg-base", tmp_path]
    subprocess.run([sys.executable, "setup.py", "-q", *egg, "sdist", "-d", tmp_path], check=True, cwd=ROOT, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    files = [path for folder in (".ci", "benchmarks", "docs", "examples", "tests") for path in (ROOT / folder).rglob("*")]
    wanted = {path.relative_to(ROOT).as_posix() for path in files if path.is_file() and "__pycache__" not in path.parts}
    assert wanted | {"Makefile", "mkdocs.yml", "pyproject.toml", "CHANGELOG.md", "CONTRIBUTING.md"} <= held


def test_the_wheel_holds_the_package_its_types_and_its_entry_points_and_works_alone(tmp_path):
    """Without py.typed (PEP 561) a type checker takes every name for Any. `tests` in site-packages hides a user's. Unpacked, it
    runs beside torch and the rest, which come from here."""
    command = ["egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path / "base", "bdist_wheel", "-d", tmp_path]
    subprocess.run([sys.executable, "setup.py", "-q", *command], check=True, cwd=ROOT, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = archive.read(next(name for name in archive.namelist() if name.endswith("entry_points.txt"))).decode()
        archive.extractall(tmp_path / "site")
    assert {"megatron_rl/py.typed", "megatron_rl/layout/groups.py", "pytest_megatron_rl.py"} <= names
    assert {name.split("/")[0] for name in names} == {"megatron_rl", "pytest_megatron_rl.py"}
    assert "[pytest11]\npytest_megatron_rl = pytest_megatron_rl" in entry_points
    assert "[verl.plugins]\nmegatron_rl = megatron_rl.hosts.verl_plugin" in entry_points
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "import megatron_rl.__main__ as m; print(m.__file__); m.main()"]
    words = ["explain", "--response-lengths", "2,4", "--prompt-ids", "a,b"]
    finished = subprocess.run([*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(str(tmp_path / "site")) and "sample_mean" in finished.stdout


# tests/marker_plugin.py


MARKED = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu(): pass

@pytest.mark.gpu
def test_that_skips(): pytest.skip("no memory")

@pytest.mark.megatron
def test_with_megatron(): pass

def test_anywhere(): pass
"""


@pytest.mark.parametrize(
    ("required", "outcomes", "told"),
    [
        ("gpu", {"passed": 2, "skipped": 1, "failed": 1}, "*--require gpu allows no skip, but: Skipped: no memory*"),
        ("megatron", {"passed": 2, "skipped": 1, "errors": 1}, "*--require megatron allows no skip, but: no megatron here*"),
    ],
)
def test_require_turns_the_skips_of_that_marker_alone_into_failures(pytester, monkeypatch, required, outcomes, told):
    """Catches a GPU job that is green because every test skipped. Here is a GPU, and no Megatron."""
    monkeypatch.setitem(marker_plugin.REASONS_TO_SKIP, "gpu", lambda: None)
    monkeypatch.setitem(marker_plugin.REASONS_TO_SKIP, "megatron", lambda: "no megatron here")
    pytester.makepyfile(MARKED)
    result = pytester.runpytest_inprocess("-rs", "-p", "marker_plugin", "-p", "no:hypothesispytest", "--require", required)
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([told])
