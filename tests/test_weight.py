"""The ratchet of weight, and the warning about slow test files."""

from __future__ import annotations

import pytest
import weight


def test_no_room_is_above_its_figure():
    found = weight.weigh()
    assert not weight.too_heavy(found, weight.read_table(weight.FIGURES))
    assert found.keys() == weight.read_table(weight.FIGURES).keys(), "python tests/weight.py --write"


def test_one_token_more_is_too_heavy_and_a_docstring_is_free(tmp_path):
    (tmp_path / "megatron_rl" / "losses").mkdir(parents=True)
    path = tmp_path / "megatron_rl" / "losses" / "one.py"
    path.write_text("x = 1\n")
    figures = weight.weigh(tmp_path)
    assert figures["megatron_rl/losses"] == 3
    path.write_text('"""A docstring."""\n\n# A comment.\nx = (\n    1\n)\n')
    assert weight.too_heavy(weight.weigh(tmp_path), figures) == [
        "megatron_rl/losses weighs 5, 2 above its figure in tests/weight.toml"
    ]
    path.write_text('"""A docstring."""\n\n# A comment.\nx = 1\n')
    assert not weight.too_heavy(weight.weigh(tmp_path), figures)


def test_a_test_file_that_takes_twice_its_seconds_is_named(pytester: pytest.Pytester):
    pytester.makeconftest('pytest_plugins = ["slow_files"]')
    pytester.makepyfile(test_slow="import time\ndef test_one(): time.sleep(0.3)")
    pytester.makepyfile(
        slow_files="import slow_test_files as own\nown.FIGURES = {'test_slow.py': 0.1}\nown.SHORTEST = 0.2\n"
        "pytest_terminal_summary = own.pytest_terminal_summary"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*test_slow.py took 0.[3-9] s, more than twice its 0.1 s*"])
    result.assert_outcomes(passed=1)
