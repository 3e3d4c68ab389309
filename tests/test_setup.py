"""The set-up of a checkout: what setup.py asks for, what .venv sees, when a skip fails. Never reaches for a network."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
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
EXTRAS = PROJECT["optional-dependencies"]

spec = importlib.util.spec_from_file_location("make_venv", ROOT / ".ci" / "make_venv.py")
make_venv = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_venv)

# pyproject.toml


def test_the_package_requires_torch_packaging_and_numpy_alone():
    assert PROJECT["dependencies"] == ["torch>=2.8", "packaging", "numpy"]
    assert set(EXTRAS) == set("megatron triton train testing dev docs".split())
    # PyPI's apex is another project, and a transformer-engine without its libraries breaks megatron.core.
    wanted = " ".join(sum(EXTRAS.values(), [])).lower()
    assert "apex" not in wanted and not re.search("transformer[-_]engine", wanted)


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = ["egg_info", "--egg-base", folder, "build", "--build-base", folder / "base", "bdist_wheel", "-d", folder]
    subprocess.run([sys.executable, "setup.py", "-q", *command], check=True, cwd=ROOT, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_its_types_and_its_entry_points(wheel):
    """Without py.typed (PEP 561) a type checker takes every name for Any. `tests` in site-packages hides a user's."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = archive.read(next(name for name in archive.namelist() if name.endswith("entry_points.txt"))).decode()
    assert {"megatron_rl/py.typed", "megatron_rl/layout/groups.py", "pytest_megatron_rl.py"} <= names
    assert {name.split("/")[0] for name in names} == {"megatron_rl", "pytest_megatron_rl.py"}
    assert "[pytest11]\npytest_megatron_rl = pytest_megatron_rl" in entry_points
    assert "[verl.plugins]\nmegatron_rl = megatron_rl.hosts.verl_plugin" in entry_points


def test_the_wheel_works_outside_of_a_checkout(wheel, tmp_path):
    """Unpacked beside torch and the rest, which come from here."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "import megatron_rl.__main__ as m; print(m.__file__); m.main()"]
    words = ["explain", "--response-lengths", "2,4", "--prompt-ids", "a,b"]
    finished = subprocess.run([*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(str(tmp_path / "site")) and "sample_mean" in finished.stdout


TYPED = """
import torch
from megatron_rl import count_step, register_policy_loss, sample_token_weights, vocab_parallel_log_probs
from megatron_rl.policy_loss import policy_loss

@register_policy_loss("plain")
def plain(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -torch.exp(log_ratio) * advantages

totals, tokens, prompt_tokens, _ = count_step([torch.ones(4)], ["a"])
weights = sample_token_weights("prompt_mean", tokens * 1, totals, prompt_token_counts=prompt_tokens)
logits, labels, bounds = torch.randn(4, 8), torch.arange(4), torch.tensor([0, 4])
log_probs = vocab_parallel_log_probs(logits, labels).detach()
mask = torch.ones(4, dtype=torch.bool)
loss = policy_loss("plain", logits, labels, log_probs, torch.ones(1), mask, bounds, weights, temperature=0.7, vocab_size=8).loss
"""


def test_a_users_type_checker_knows_the_public_names(tmp_path):
    """mypy --strict finds the package as an installed one, and no error in the first file; in each other one its wrong word."""
    pytest.importorskip("mypy")
    wrong = {
        "wrong_name": ("count_step, register_policy_loss", "count_step, register_policy_los", '"register_policy_los"'),
        "wrong_level": ('"plain")\ndef', '"plain", "sample")\ndef', "\"Literal['token', 'sequence']\""),
    }
    (tmp_path / "right.py").write_text(TYPED, encoding="utf-8")
    for file, (word, misspelled, _) in wrong.items():
        assert TYPED.count(word) == 1
        (tmp_path / f"{file}.py").write_text(TYPED.replace(word, misspelled), encoding="utf-8")
    # torch's own types cost twenty seconds, and the bodies of our functions ten: neither is what is asked about.
    skipped = "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n[mypy-megatron_rl.*]\nignore_errors = True\n"
    (tmp_path / "mypy.ini").write_text(skipped, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "right.py", *(f"{file}.py" for file in wrong)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    checked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert lines and not [line for line in lines if line.startswith("right.py")], checked.stdout + checked.stderr
    for file, (*_, told) in wrong.items():
        assert any(line.startswith(f"{file}.py") and told in line for line in lines), checked.stdout


# .ci/make_venv.py


@pytest.fixture
def recorded_setup(monkeypatch, tmp_path):
    """`main` on a folder of its own, with pip replaced by a list of what it was asked for."""
    done = []
    folder = tmp_path / ".venv"
    monkeypatch.setattr(make_venv, "VENV", folder)
    monkeypatch.setattr(make_venv, "PYTHON", sys.executable)
    monkeypatch.setattr(make_venv, "STAMP", folder / "made_by_make_venv")
    monkeypatch.setattr(make_venv, "CONSTRAINTS", folder / "constraints.txt")
    monkeypatch.setattr(make_venv.venv, "create", lambda path, **options: path.mkdir())
    monkeypatch.setattr(make_venv, "pip", lambda *words: done.append(words))
    return done


def test_a_venv_that_somebody_else_made_is_never_deleted(recorded_setup):
    make_venv.VENV.mkdir()
    with pytest.raises(SystemExit, match="was not made by this script: move it away, or activate it"):
        make_venv.main()
    assert make_venv.VENV.exists() and not recorded_setup


def test_an_interrupted_set_up_starts_anew_and_a_finished_one_does_nothing(recorded_setup, monkeypatch):
    """Catches a half-installed package that a later run takes for granted."""

    def interrupted(*words):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(make_venv, "pip", interrupted)
        make_venv.main()
    make_venv.main()
    make_venv.main()
    assert len(recorded_setup) == 1


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


def test_require_refuses_a_marker_that_does_not_exist(run_plugin):
    """Catches `--require cuda`, which would require nothing."""
    result = run_plugin(MARKED, "--require", "gpu,cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--require cuda: no such marker; it takes gpu, megatron, host*"])


@pytest.mark.parametrize(
    ("source", "outcomes"),
    [
        pytest.param("import hypothesis.absent", {"skipped": 1}, id="an optional package is absent"),
        pytest.param("import unheard_of", {"errors": 1}, id="any other package is absent"),
        pytest.param("import megatron.absent", {"errors": 1}, id="the required package is absent"),
    ],
)
def test_a_file_that_cannot_be_imported_skips_only_for_want_of_an_optional_package(run_plugin, source, outcomes):
    """`make gpu` is content with torch, triton and pytest, and still no file may vanish in silence."""
    run_plugin(source, "--require", "megatron").assert_outcomes(**outcomes)
