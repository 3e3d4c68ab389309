"""The code of pages and docstrings: Python runs, fragments call what exists, command lines parse. No command line is run here."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import re
import subprocess
import sys
from collections.abc import Iterator

import markdown_pages
import pytest
from command_lines import check_line
from markdown_pages import ROOT, Fence, fences, spans

# The changelog names command lines that went.
PAGES = [page for page in markdown_pages.pages() if page != "CHANGELOG.md"]
FENCES = [fence for page in PAGES for fence in fences(page)]
# tests/test_pages.py runs those of the notebook, in their order, and compares what they print.
PYTHON = [fence for fence in FENCES if fence.language == "python" and fence.page != markdown_pages.NOTEBOOK]
FRAGMENT = re.compile(r"fragment of (\S+\.py)")

# Python


def case(fence: Fence):
    starts_ranks = "RankPool(" in fence.text
    return pytest.param(fence, marks=[pytest.mark.megatron, pytest.mark.slow] if starts_ranks else [], id=str(fence))


@pytest.mark.parametrize("fence", [case(fence) for fence in PYTHON if not FRAGMENT.search(fence.comment)])
def test_a_python_block_runs_by_itself(fence):
    if fence.text.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(fence.text, {}, str(fence), fence.page, fence.line)
        said = io.StringIO()
        doctest.DocTestRunner(verbose=False).run(test, out=said.write)
        assert test.examples and said.getvalue() == ""
    else:
        exec(compile(fence.text, str(fence), "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_the_notebook_can_be_pasted_into_pythons_own_prompt_where_torch_is_all_there_is():
    """That prompt ends a block at an empty line, and takes no other end. Between two blocks the reader presses Enter."""
    page = [fence for fence in FENCES if fence.page == markdown_pages.NOTEBOOK]
    only_torch = "import sys; sys.modules |= dict.fromkeys(['megatron', 'triton', 'matplotlib', 'psutil', 'pytest', 'yaml'])\n"
    typed = only_torch + "".join(f"{fence.text}\n" for fence in page if fence.language == "python")
    done = subprocess.run([sys.executable, "-i", "-q"], input=typed, capture_output=True, text=True, cwd=ROOT, check=False)
    shown = "".join(fence.text for fence in page if fence.comment.startswith("output of: block"))
    assert done.stdout == shown, done.stderr


DOCSTRINGS = [path for path in sorted((ROOT / "megatron_rl").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", DOCSTRINGS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_examples_of_a_docstring_are_right(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def names_of(fence: Fence) -> dict[str, object]:
    """What is ours among the imports of the fragment, and of the file that it is a fragment of."""
    sources = [fence.text, (ROOT / FRAGMENT.search(fence.comment)[1]).read_text(encoding="utf-8")]
    imports = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: getattr(importlib.import_module(node.module), alias.name)
        for node in imports
        if node.module.split(".")[0] == "megatron_rl"
        for alias in node.names
    }


def calls_of_ours(fence: Fence) -> list[tuple[str, str]]:
    """(name, what is wrong with the arguments, if anything) of each call of the fragment."""
    ours, calls = names_of(fence), []
    for node in ast.walk(ast.parse(fence.text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
            try:
                inspect.signature(ours[node.func.id]).bind(*node.args, **{word.arg: word.value for word in node.keywords})
                calls.append((node.func.id, ""))
            except TypeError as error:
                calls.append((node.func.id, str(error)))
    return calls


@pytest.mark.parametrize("fence", [case(fence) for fence in PYTHON if FRAGMENT.search(fence.comment)])
def test_a_fragment_calls_what_exists_with_arguments_that_exist(fence):
    """The file runs in a test of its own; the fragment beside a sentence must not fall behind it."""
    assert calls_of_ours(fence), "a fragment that calls nothing of ours shows nothing"
    assert [(name, wrong) for name, wrong in calls_of_ours(fence) if wrong] == []


# Command lines


def shell_lines(fence: Fence) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", fence.text).splitlines()
    if fence.language == "console":
        joined = [line.removeprefix("$ ") for line in joined if line.startswith("$ ")]
    return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


def command_lines() -> Iterator[tuple[str, str]]:
    """(where, line): of shell blocks, and of code in sentences that begins with a program of ours."""
    for fence in FENCES:
        if fence.language in ("bash", "console"):
            yield from ((str(fence), line) for line in shell_lines(fence))
    for page in PAGES:
        found = [span for span in spans(page) if re.match(r"(megatron-rl|torchrun|make|pip|python3?) ", span)]
        yield from ((page, span) for span in found)


@pytest.mark.parametrize(("where", "line"), sorted(set(command_lines())))
def test_a_command_line_is_one_that_its_program_takes(where, line):
    """A sentence may name a flag without its value."""
    try:
        check_line(line)
    except ValueError:
        if ":" in where or not re.search(r" --[\w-]+$", line):
            raise
        check_line(f"{line} VALUE")
