"""What miles and slime publish as tests of their reducer passes with ours in its place. Nothing of a checkout is changed.

MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host tests/test_host_published_tests.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_harness import roots_by_environment
from host_retarget import CALLS

pytestmark = [pytest.mark.host, pytest.mark.megatron]
ROOTS = roots_by_environment()
TESTS = Path(__file__).parent
# Some start a process for each rank and layout, which takes minutes: of those one layout, cp 2.
PUBLISHED = [
    ("slime", "test_cp_utils.py", []),
    ("slime", "test_metric_report.py", []),
    ("slime", "test_loss_cp_invariance.py", ["-k", "1-2"]),
    ("slime", "test_metric_report_dist.py", ["-k", "1-2"]),
    # Its conftest needs the rollout engine.
    ("miles", "fast/backends/training_utils/test_rollout_mask_sums.py", ["--noconftest"]),
]


@pytest.mark.parametrize(("host", "file", "selection"), [row for row in PUBLISHED if row[0] in ROOTS or not ROOTS])
def test_a_published_test_of_the_hosts_reducer_passes_with_ours(host, file, selection, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import host_retarget\nhost_retarget.install()\n", encoding="utf-8")
    calls = tmp_path / "calls"
    calls.touch()
    path = os.pathsep.join([str(tmp_path), str(TESTS), str(TESTS.parent), ROOTS[host]])
    environment = {**os.environ, "PYTHONPATH": path, CALLS: str(calls), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore", "--rootdir", ROOTS[host], *selection]
    command = [sys.executable, "-m", "pytest", *options, str(Path(ROOTS[host], "tests", file))]
    finished = subprocess.run(command, cwd=ROOTS[host], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
    assert calls.read_text(encoding="utf-8"), "the published tests have not called our reducer"
    print(finished.stdout.splitlines()[-1])
