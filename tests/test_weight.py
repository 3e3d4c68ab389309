"""No folder gets heavier than its figure, and a file of tests that gets slow is named."""

from __future__ import annotations

import pytest
import weight

HEAVIER = "megatron_rl/ops weighs 8, 2 more than its figure 6 in tests/weight.toml; take something away, or raise the figure"
# area, =, length, *, width and f"...": six tokens, on each version of Python.
SIX = 'area = length * width  # a comment\nf"{area} of {length:{width}}"\n'


@pytest.fixture
def project(tmp_path):
    """A project of one module with six tokens and of empty texts, whose figures are written."""
    for name in ("megatron_rl/ops/area.py", "tests/weight.toml", "docs/index.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tests/weight.toml").unlink()
    (tmp_path / "megatron_rl/ops/area.py").write_text(SIX)
    assert weight.main(["--write"], tmp_path) == 0
    return tmp_path


def figures_of(project) -> dict:
    return {name: figure for name, figure in weight.read_figures(project / "tests/weight.toml").items() if figure}


def test_a_token_above_the_figure_is_refused_and_never_written(project, capsys):
    assert figures_of(project) == {"megatron_rl/ops": 6}
    (project / "megatron_rl/ops/more.py").write_text("-1\n")
    for arguments in ([], ["--write"]):
        assert weight.main(arguments, project) == 1
        assert HEAVIER in capsys.readouterr().out
    assert figures_of(project) == {"megatron_rl/ops": 6}


def test_comments_docstrings_and_layout_weigh_nothing(project):
    (project / "megatron_rl/ops/area.py").write_text(f'"""A docstring."""\n\n# A comment.\n{SIX}')
    assert weight.main([], project) == 0


def test_what_is_taken_away_lowers_the_figure(project):
    (project / "megatron_rl/ops/area.py").write_text("area\n")
    assert weight.main(["--write"], project) == 0 and figures_of(project) == {"megatron_rl/ops": 1}
    (project / "megatron_rl/ops/area.py").unlink()
    assert weight.main(["--write"], project) == 0
    assert "megatron_rl/ops" not in weight.read_figures(project / "tests/weight.toml")


def test_a_new_folder_needs_a_figure(project, capsys):
    for name in ("megatron_rl/hosts/heads/head.py", "examples/first.py"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("area\n")
    assert weight.main(["--write"], project) == 1
    refused = capsys.readouterr().out
    assert 'add the line "megatron_rl/hosts/heads" = 1' in refused and 'add the line "examples" = 1' in refused


def test_a_file_of_tests_beyond_twice_its_figure_is_named(project):
    """Seconds are summed over the tests of a file; one without a figure took less than a second."""
    cases = [("tests.test_ops", 3.0), ("tests.test_ops.TestArea", 1.5), ("tests.test_fast", 0.9), ("tests.test_sizes", 1.0)]
    lines = "".join(f'<testcase classname="{name}" name="test_it" time="{seconds}"/>' for name, seconds in cases)
    (project / "junit.xml").write_text(f"<testsuites><testsuite>{lines}</testsuite></testsuites>")
    assert weight.main(["--seconds", str(project / "junit.xml")], project) == 0
    figures = weight.read_figures(project / "tests/seconds.toml")
    assert figures == {"tests/test_ops.py": 4.5, "tests/test_sizes.py": 1.0}
    assert weight.slow_files({"tests/test_ops.py": 9.0, "tests/test_sizes.py": 5.0, "tests/test_fast.py": 5.0}, figures) == []
    assert weight.slow_files({"tests/test_ops.py": 9.1, "tests/test_sizes.py": 5.1, "tests/test_new.py": 4.0}, figures) == [
        "tests/test_ops.py took 9.1 s, more than twice its figure 4.5 s in tests/seconds.toml",
        "tests/test_sizes.py took 5.1 s, more than twice its figure 1.0 s in tests/seconds.toml",
    ]
