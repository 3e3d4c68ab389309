"""A pytest plugin: `gpu`, `megatron`, `host` and `interpreter` tests skip with a reason; `--require gpu,megatron` makes
such a skip a failure.

    pytest --require gpu

It imports neither megatron.core nor triton, and asks for CUDA only when a collected test is marked for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from functools import cache

import pytest

# Packages that the library runs without, and the extra that brings each: a test file that needs one is skipped where it
# is absent, so that torch, triton and pytest are enough for the GPU tests. Failing to import anything else is an error.
OPTIONAL_PACKAGES = {
    "hypothesis": "dev",
    "matplotlib": "train",
    "megatron": "megatron",
    "numpy": "train",
    "psutil": "megatron",
    "rich": "train",
    "tensorboard": "train",
}
# Environment variables that name checkouts of hosts, where the marker names none: host("VERL_ROOT").
HOST_ROOTS = ("MILES_ROOT", "SLIME_ROOT")
# Of a test that a marker of REASONS_TO_SKIP has skipped.
IS_ABSENT = pytest.StashKey[bool]()
MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)[\w.]*'")


@cache
def missing_gpu() -> str | None:
    """Why a `gpu` test cannot run here; None if it can."""
    import torch

    return None if torch.cuda.is_available() else "needs a GPU: torch.cuda.is_available() is False"


@cache
def missing_megatron() -> str | None:
    """Why a `megatron` test cannot run here; None if it can."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    return None if found else "needs megatron.core: pip install '/path/to/megatron_rl[megatron]'"


def missing_host(*named: str) -> str | None:
    """Why a `host` test cannot run here; None if it can. One of the variables is enough."""
    roots = named or HOST_ROOTS
    if any(os.environ.get(name) for name in roots):
        return None
    return f"needs a checkout of a host: set {' or '.join(roots)} to its root"


def missing_interpreter() -> str | None:
    """Why an `interpreter` test cannot run here; None if it can."""
    if missing_gpu() is not None:
        return None
    return "runs kernels on ranks that are forked, or on the CPU: here is a GPU, where they are compiled and CUDA survives no fork"


REASONS_TO_SKIP = {
    "gpu": missing_gpu,
    "megatron": missing_megatron,
    "host": missing_host,
    "interpreter": missing_interpreter,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("megatron_rl").addoption(
        "--require",
        default="",
        metavar="MARKER,...",
        help="a test with one of these markers fails where it would skip: --require gpu,megatron",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs CUDA; skips without it")
    config.addinivalue_line("markers", "megatron: needs megatron.core; skips without it")
    config.addinivalue_line(
        "markers", "host: runs a checkout of miles or slime; skips without MILES_ROOT and SLIME_ROOT. host(NAME): without NAME"
    )
    config.addinivalue_line("markers", "interpreter: runs kernels in Triton's interpreter alone; skips where there is a GPU")
    if unknown := sorted(required_markers(config) - set(REASONS_TO_SKIP)):
        raise pytest.UsageError(f"--require {','.join(unknown)}: no such marker; it takes {', '.join(REASONS_TO_SKIP)}")


def required_markers(config: pytest.Config) -> set[str]:
    return {name.strip() for name in config.getoption("--require").split(",") if name.strip()}


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, reason_to_skip in REASONS_TO_SKIP.items():
        mark = item.get_closest_marker(marker)
        if mark is not None and (reason := reason_to_skip(*mark.args)):
            if marker in required_markers(item.config):
                pytest.fail(f"--require {marker} allows no skip, but: {reason}", pytrace=False)
            item.stash[IS_ABSENT] = True
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """A required test that skips by itself fails too; one that another marker has skipped does not."""
    report = yield
    broken = sorted(required_markers(item.config) & {mark.name for mark in item.iter_markers()})
    if report.skipped and broken and IS_ABSENT not in item.stash and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"--require {','.join(broken)} allows no skip, but: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """A file that cannot be imported without an optional package skips."""
    report = yield
    missing = MISSING_MODULE.search(str(report.longrepr)) if report.failed else None
    if missing and missing[1] in OPTIONAL_PACKAGES and missing[1] not in required_markers(collector.config):
        extra = OPTIONAL_PACKAGES[missing[1]]
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: needs {missing[1]}: pip install '/path/to/megatron_rl[{extra}]'")
    return report
