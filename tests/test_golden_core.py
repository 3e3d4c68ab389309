"""The core computes what it did: a spread of the cases of golden_core.py against their stored values, and its layouts and trainers.

BITWISE=1 asks for the same bits, where the torch and the processor are those of the file.
`python tests/golden_core.py --compare` has all cases.
"""

from __future__ import annotations

import functools
import hashlib
import os

import pytest
from golden_core import difference, load, machine, values_of

# A word of a key -> (the bound of its cases, why their numbers have moved).
BOUNDS: dict[str, tuple[float, str]] = {}
# Another processor or torch may sum in another order, with other last bits of an exponential: a few roundings, of 6e-8 or 1e-16.
# Torch 2.14, and ATEN_CPU_CAPABILITY=default, move no bit of a loss; the latter moves a whole step of a float32 model by 3e-6.
SINGLE, DOUBLE, WHOLE_STEP = 1e-6, 1e-12, 1e-5
EVERY = 4  # cases: one is tested


@functools.cache
def stored():
    return load()


def is_chosen(key: str) -> bool:
    """By a hash of its own, so that a case which goes changes no other."""
    return hashlib.sha256(key.encode()).digest()[0] % EVERY == 0


def bound_of(key: str) -> float:
    words = key.split(" | ")
    usual = WHOLE_STEP if words[0] in ("layout", "host") else DOUBLE if "float64" in words or words[0] == "counts" else SINGLE
    return max([usual, *(bound for word, (bound, _) in BOUNDS.items() if word in words)])


def assert_as_stored(keys: list[str]) -> None:
    assert keys
    made_on, values = stored()
    is_bitwise = os.environ.get("BITWISE") == "1" and made_on == machine()
    found = {key: difference(values[key], given) for key, given in values_of(keys)}
    moved = [f"{key}: {name} by {gap:.1e}" for key, (_, gap, name) in found.items() if not gap <= bound_of(key)]
    moved += [f"{key}: not the same bits" for key, (is_equal, *_) in found.items() if is_bitwise and not is_equal]
    assert not moved, "\n".join(moved)


GROUPS = sorted({" | ".join(key.split(" | ")[:2]) for key in stored()[1] if key.startswith("loss")}) + ["scores", "counts"]


@pytest.mark.parametrize("group", GROUPS)
def test_a_case_has_the_values_of_the_golden_file(group):
    chosen = [key for key in stored()[1] if key.startswith(f"{group} |") and is_chosen(key)]
    assert_as_stored([key for key in chosen if "triton" not in key.split(" | ")])


@pytest.mark.kernel
@pytest.mark.interpreter
def test_an_interpreted_kernel_has_the_values_of_the_golden_file():
    pytest.importorskip("triton")
    assert_as_stored([key for key in stored()[1] if "triton" in key.split(" | ") and is_chosen(key)])


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("kind", ["layout", "host"])
def test_a_whole_step_has_the_values_of_the_golden_file(kind):
    assert_as_stored([key for key in stored()[1] if key.startswith(f"{kind} |")])
