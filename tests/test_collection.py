"""Every process collects the same tests: `pytest -n 2` compares their names, and runs none where two processes differ."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COLLECTED_IDS

ROOT = Path(__file__).resolve().parent.parent
# How Python prints an object that has no name: by its address, which is another one in each process.
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


# Before pytest sorts tests by the fixtures that they share, as conftest.py has them.
PRINT_NAMES = """
import sys
import pytest

class PrintNames:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        print(*("name " + item.nodeid for item in items), sep="\\n")

sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[PrintNames()]))
"""


def test_no_name_of_a_test_holds_an_address(request):
    """Functions and objects as parameters need ids of their own."""
    assert [name for name in request.config.stash[COLLECTED_IDS] if ADDRESS.search(name)] == []


@pytest.mark.slow
def test_another_process_collects_the_same_tests_in_the_same_order(request):
    """Of the files that this run was asked for. Strings hash otherwise there, so that a set of parameters shows as well."""
    command = [sys.executable, "-c", PRINT_NAMES, *request.config.args]
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    done = subprocess.run(command, cwd=request.config.invocation_params.dir, env=environment, capture_output=True, text=True)
    expected = request.config.stash[COLLECTED_IDS]
    files = {name.split("::")[0] for name in expected}  # without those that --ignore left out
    names = [line.removeprefix("name ") for line in done.stdout.splitlines() if line.startswith("name ")]
    found = [name for name in names if name.split("::")[0] in files]
    assert found == expected, done.stdout[-1000:] + done.stderr[-1000:]
