"""The Dockerfile without a daemon: each instruction, argument, path and command that it and the README name exists and is used."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in TEXT.splitlines() if line and not line.startswith("#")]
COMMENTS = [line.lstrip("# ") for line in TEXT.splitlines() if line.startswith("#")]


def values_of(name: str) -> list[str]:
    return [value for instruction, value in INSTRUCTIONS if instruction == name]


def targets_of_make() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {*re.findall(r"^([a-z]+):", makefile, re.MULTILINE)}


def test_the_instructions_are_known_and_in_an_order_that_builds():
    names = [name for name, _ in INSTRUCTIONS]
    assert names == ["ARG", "FROM", "ARG", "RUN", "WORKDIR", "COPY", "RUN", "CMD"]
    # An argument before FROM is known in FROM alone, and one after it in the instructions behind.
    assert values_of("FROM") == ["${BASE}"] and values_of("ARG")[0].startswith("BASE=")
    assert values_of("COPY") == [". ."]


def test_the_base_has_a_python_that_the_package_takes():
    image = values_of("ARG")[0].partition("=")[2]
    major, minor = re.fullmatch(r"python:(\d+)\.(\d+)-slim", image).groups()
    requires = re.search(r'python_requires=">=(\d+)\.(\d+)"', (ROOT / "setup.py").read_text(encoding="utf-8")).groups()
    assert (int(major), int(minor)) >= tuple(map(int, requires))


def test_the_torch_is_the_one_of_the_set_up_and_reaches_it():
    [given] = [value for value in values_of("ARG") if value.startswith("TORCH_SPEC=")]
    requirement, *options = shlex.split(given.partition("=")[2])[0].split()
    set_up = (ROOT / ".ci" / "make_venv.py").read_text(encoding="utf-8")
    assert f'DEFAULT_TORCH_SPEC = "{requirement}"' in set_up and 'os.environ.get("TORCH_SPEC")' in set_up
    assert options[0] == "--index-url"
    assert 'TORCH_SPEC="${TORCH_SPEC}" make venv' in values_of("RUN")


def test_each_make_target_of_the_file_and_of_the_readme_exists():
    commands = [*values_of("RUN"), " ".join(json.loads(values_of("CMD")[0])), *COMMENTS]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = {name for command in commands for name in re.findall(r"\bmake ([a-z]+)(?![a-z+])", command)}
    assert {"venv", "demo", "test"} == named <= targets_of_make()
    # Both commands of the README, `make demo` and `make test`.
    assert {*re.findall(r"^make ([a-z]+)", readme, re.MULTILINE)} == named - {"venv"}


@pytest.mark.parametrize("target", ["venv", "demo", "test"])
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_knows_what_it_would_run(target):
    """With -n make prints the lines; it fails for a target without a rule."""
    done = subprocess.run(["make", "-n", target, f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and ".ci/make_venv.py" in done.stdout, done.stderr


@pytest.mark.parametrize("command", values_of("RUN"))
def test_each_run_is_a_command_line_that_the_shell_parses(command):
    subprocess.run(["sh", "-n", "-c", command], check=True)


def test_the_commands_in_the_comments_name_arguments_that_exist():
    builds = [shlex.split(line, comments=True) for line in COMMENTS if line.startswith("docker build")]
    assert len(builds) == 2 and all(words[-1] == "." for words in builds)
    given = {words[words.index("--build-arg") + 1].partition("=")[0] for words in builds if "--build-arg" in words}
    declared = {value.partition("=")[0] for value in values_of("ARG")}
    assert given == {"BASE"} <= declared
    tags = {words[words.index("-t") + 1] for words in builds}
    runs = [shlex.split(line, comments=True) for line in COMMENTS if line.startswith("docker run")]
    assert len(runs) == 3 and all(tags & {*words} for words in runs)


def test_what_is_left_out_is_made_and_nothing_that_the_package_needs():
    """A pattern of .dockerignore is a folder that git ignores too, so nothing tracked is missing in the image."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()}
    assert {pattern.removeprefix("**/") for pattern in patterns} <= ignored
    assert all((ROOT / name).exists() for name in ("Makefile", "setup.py", "README.md", ".ci/make_venv.py"))
