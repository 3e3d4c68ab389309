"""Sets the process up before any test: one thread, no compiler, NaN in fresh memory. CUDA is not initialised here."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import gc
import os
import pickle
import signal
import sys
from pathlib import Path

# Ranks are forked from this process, and OpenMP threads do not survive a fork. Compiling costs seconds and changes no number.
os.environ.update(OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")

import pytest
import torch
from quick_interpreter import quicken

# Kernels are compiled where there is a GPU and interpreted elsewhere. Triton decides that at a kernel's definition, for the whole
# process. The driver's library says whether there is a GPU, so that ranks can still be forked afterwards.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):  # without Triton there is nothing to quicken
        quicken()

# No example is judged by the wall clock: beside other work one of a millisecond may take half a second. pytest-timeout ends a hang.
with contextlib.suppress(ImportError):  # `make gpu` runs without hypothesis
    import hypothesis

    hypothesis.settings.register_profile("busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("busy machine")

pytest_plugins = ["marker_plugin", "pytest_megatron_rl", "pytester"]

ROOT = Path(__file__).resolve().parent.parent
# This module wraps torch's factories too: the caller of its wrapper counts.
CPU_SHIM = "megatron_rl.megatron.cpu"

# A shell starts background jobs with Ctrl-C ignored, Python keeps that, and every process that a test starts inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
# On its first use `with torch.device(...)` lists the factories that it redirects: here, before they are replaced below.
with torch.device("cpu"):
    torch.empty(0)


def filled_with_nan(factory):
    """Fresh memory of our own modules is NaN, so that a test finds an element that is not written."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        tensor = factory(*args, **kwargs)
        if tensor.is_floating_point() and kwargs.get("out") is None and called_by_the_package():
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return wrapped


def called_by_the_package() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == CPU_SHIM:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("megatron_rl.")


torch.empty = filled_with_nan(torch.empty)
torch.empty_like = filled_with_nan(torch.empty_like)
torch.Tensor.new_empty = filled_with_nan(torch.Tensor.new_empty)


@pytest.fixture(scope="session")
def package_trees() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its path within megatron_rl/: {"layout/groups.py": ...}."""
    package = ROOT / "megatron_rl"
    paths = sorted(package.rglob("*.py"))
    return {path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@pytest.fixture(scope="session")
def benchmark_trees() -> dict[str, ast.Module]:
    """The same for the benchmarks: {"benchmarks/measure.py": ...}."""
    paths = sorted((ROOT / "benchmarks").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """shared(name, compute): what `compute()` gives, computed once by the processes that share the tests of a run. It is pickled;
    `name` begins with the name of the file."""
    folder = tmp_path_factory.getbasetemp().parent  # of all processes, where there are several

    def ask(name: str, compute):
        if "PYTEST_XDIST_WORKER" not in os.environ:
            return compute()
        path = folder / f"{name}.pickle"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(compute()))
            fcntl.flock(lock, fcntl.LOCK_UN)  # ranks that compute() has started hold the file open as long as they live
        return pickle.loads(path.read_bytes())

    return ask


@pytest.fixture(autouse=True)
def nothing_of_other_tests(monkeypatch):
    """No test finds another's registered names or host's arguments, in whatever order they run."""
    from helpers import GLOBAL_VARS, names_forgotten

    from megatron_rl.hosts.host_run import RUNS

    monkeypatch.setattr(RUNS, "_found", {})
    had_globals = GLOBAL_VARS in sys.modules
    with names_forgotten():
        yield
    if not had_globals:
        sys.modules.pop(GLOBAL_VARS, None)


@pytest.fixture
def schedules(monkeypatch) -> list[list]:
    """The work items of each schedule of the fused head that is run with a gradient."""
    from megatron_rl.policy_loss import linear

    seen, run = [], linear.run_with_gradient
    monkeypatch.setattr(linear, "run_with_gradient", lambda head, items, *rest: seen.append(items) or run(head, items, *rest))
    return seen


@pytest.fixture
def unseen_machine(monkeypatch):
    """doctor judges a launch line without its look at the machine, which takes many seconds."""
    from megatron_rl.commands import doctor

    monkeypatch.setattr(doctor, "collect_facts", lambda: {"torch": {"state": "here"}})
    monkeypatch.setattr(doctor, "findings", lambda facts: [])


@pytest.fixture
def own_losses():
    """The losses of own_losses.py are registered, and gone after the test."""
    import own_losses

    own_losses.declare()


# Files that start training runs, whole hosts, compilers or many ranks; `make test` runs them, `pytest -m "not slow"` does not.
SLOW_FILES = set(
    "test_benchmarks test_checkpoints test_doctor "
    "test_fused_head test_kernel_code "
    "test_ranks test_selftest "
    "test_train_command test_train_loop "
    "test_whole_host".split()
)


# The files of those that `make gpu` selects.
GPU_FILES = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if addressed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"an address in the name of a test: workers collect other names. Give it ids: {addressed[0]}")
    for_gpu = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("kernel")]
    config.stash[GPU_FILES] = {item.path.relative_to(ROOT).as_posix() for item in for_gpu}
    for item in items:
        if item.path.stem in SLOW_FILES:
            item.add_marker("slow")


def pytest_collection_finish():
    """Modules and tests live until the end: gc.collect(), in a benchmark or in Megatron, need not search them each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else libraries report what is left at the end as leaks
