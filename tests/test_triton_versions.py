"""Each kernel is compiled, loaded and launched with the Triton of each supported torch, for sm_90 and sm_100, without a GPU.

tests/first_launch.py says how, tests/other_tritons.py where the Tritons come from. EVERY_LAUNCH=1, which .ci/run sets, launches all
of tests/kernel_launches.py with each Triton, for one of the targets.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from other_tritons import EVERY, TRITONS, environment_of

TESTS = ROOT / "tests"
NOT_HERE = 3  # sass_gate.NOT_HERE


def first_launch(version: str, *arguments: object) -> dict[str, dict[str, object]]:
    """{target: {launch: what the driver was asked, or the error}}."""
    command = [sys.executable, TESTS / "first_launch.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_of(version))
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"][0].startswith(f"triton {version}.")
    return found["targets"]


def kernels_of_the_package() -> set[str]:
    sources = (ROOT / "megatron_rl").rglob("*_triton.py")
    return {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(encoding="utf-8"), re.M)}


# With these test_kernel_code.py compiles every launch for sm_90, the second where EVERY_LAUNCH is set.
COMPILED_FOR_90 = (TRITONS[-1], "3.6")
# The compiler's front is the same for both targets, so with each Triton every launch is compiled for one of them, and each kernel
# for both. Of the Tritons that compile nothing elsewhere, one has sm_90 and the next sm_100.
OTHERS = [version for version in TRITONS if version not in COMPILED_FOR_90]
EVERY_FOR = dict.fromkeys(COMPILED_FOR_90, "100") | {version: ("90", "100")[i % 2] for i, version in enumerate(OTHERS)}


# Without EVERY_LAUNCH the newest compiles for sm_100 alone.
@pytest.mark.parametrize("version", TRITONS)
@pytest.mark.timeout(1500)
def test_each_kernel_compiles_loads_and_launches(version):
    targets = ["90", "100"] if EVERY else ["100"] if version == TRITONS[-1] else ["90"]
    found = first_launch(version, *["--every", EVERY_FOR[version]] * EVERY, "--targets", *targets)
    assert list(found) == targets
    for launches in found.values():
        errors = {name: answer for name, answer in launches.items() if isinstance(answer, str)}
        assert errors == {}
        asked = [line for answer in launches.values() for line in answer]
        assert {line["launch"] for line in asked if "launch" in line} == kernels_of_the_package()


@pytest.mark.parametrize("version", ["3.6", TRITONS[-1]])
def test_the_kernels_of_the_tests_compile_and_launch(version):
    """As those of the package: each twin by itself. One that the interpreter ran did not compile with Triton 3.6."""
    (found,) = first_launch(version, "--launches", TESTS / "twin_kernel.py", "--targets", 90).values()
    assert {name: answer for name, answer in found.items() if isinstance(answer, str)} == {}
    assert {line["launch"] for answer in found.values() for line in answer} == {"twin_kernel", "kl_kernel"}


@pytest.mark.parametrize("version", ["3.6", TRITONS[-1]])
def test_a_launch_that_fails_on_a_gpu_is_named_here(version):
    """A driver that only says yes proves nothing. The text as a default stopped each loss on CUDA with Triton 3.6."""
    (found,) = first_launch(version, "--launches", TESTS / "bad_launches.py", "--targets", 90).values()
    expected = {
        "an option that Triton does not know": "max_registers was specified but unrecognised",
        "too many programs on grid y": "invalid argument",
        "more threads than a block has": "OutOfResources",
        "a row too long for a tensor map": "invalid argument",
        **({"a text as the default of a constant": "CompilationError"} if version == "3.6" else {}),
    }
    assert {name for name, answer in found.items() if isinstance(answer, str)} == set(expected), found
    assert {name: text for name, text in expected.items() if text not in found[name]} == {}, found
