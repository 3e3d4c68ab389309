"""The workflow of CI: its GPU job runs the tests that `make gpu` runs, on a runner that is there, and never the code of a fork."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAME_REPOSITORY = "github.event.pull_request.head.repo.full_name == github.repository"


def read_yaml(path: str) -> dict:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the docs extra")
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def jobs() -> dict[str, dict]:
    return read_yaml(".github/workflows/tests.yml")["jobs"]


def commands(job: dict) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def selection(command: str) -> list[str]:
    """pytest's arguments, without the interpreter and what a caller may add."""
    words = shlex.split(command.replace("$(PYTEST_ARGS)", ""))
    return words[words.index("pytest") + 1 :]


def test_the_gpu_job_selects_the_tests_of_make_gpu(jobs):
    """The kernel tests run compiled on a GPU alone; a job with another selection would leave them out without a word."""
    recipe = re.search(r"^gpu:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    of_make = [selection(line) for line in recipe.splitlines() if "pytest" in line]
    of_job = [selection(command) for command in commands(jobs["gpu"]) if "pytest" in command]
    assert of_make == of_job == [["-m", "gpu or kernel", "--require", "gpu"]]


def test_the_gpu_job_waits_for_no_runner_that_is_absent_and_runs_no_fork(jobs):
    """A job without a runner queues for a day, and then fails."""
    first, _, second = jobs["gpu"]["if"].partition(" && ")
    assert first == "vars.HAS_GPU_RUNNER == 'true'"
    assert second == f"(github.event_name != 'pull_request' || {SAME_REPOSITORY})"
