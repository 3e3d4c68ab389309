"""What is built of a checkout, and when a skip fails. Never reaches for a network."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import megatron_rl

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


@pytest.fixture
def run_plugin(pytester, monkeypatch):
    """Runs a test file in a pytest of its own, on a machine without GPU or Megatron."""
    import marker_plugin

    for marker in ("gpu", "megatron"):
        monkeypatch.setitem(marker_plugin.REASONS_TO_SKIP, marker, lambda marker=marker: f"no {marker} here")

    def run(source, *arguments):
        pytester.makepyfile(source)
        plugins = ("-p", "marker_plugin", "-p", "no:hypothesispytest")
        return pytester.runpytest_inprocess("-rs", *plugins, *arguments)

    return run


MARKED = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu(): pass

@pytest.mark.megatron
def test_with_megatron(): pass

def test_anywhere(): pass
"""


def test_require_turns_the_skips_of_that_marker_alone_into_failures(run_plugin):
    """Catches a GPU job that is green because every test skipped."""
    result = run_plugin(MARKED, "--require", "gpu")
    result.assert_outcomes(passed=1, skipped=1, errors=1)
    result.stdout.fnmatch_lines(["*--require gpu allows no skip, but: no gpu here*"])


def test_require_makes_a_failure_of_a_skip_in_the_body_of_such_a_test(run_plugin, monkeypatch):
    import marker_plugin

    monkeypatch.setitem(marker_plugin.REASONS_TO_SKIP, "gpu", lambda: None)
    source = f"{MARKED}\n@pytest.mark.gpu\ndef test_that_skips(): pytest.skip('no memory')"
    result = run_plugin(source, "--require", "gpu")
    result.assert_outcomes(passed=2, skipped=1, failed=1)
    result.stdout.fnmatch_lines(["*--require gpu allows no skip, but: Skipped: no memory*"])
