"""The pages: links lead somewhere, names exist, code runs, command lines parse, what is generated is up to date, the site builds.

Nothing is fetched from a network, nothing is written into docs/, and no command line is run.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import posixpath
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec

import pages
import pytest
from pages import BLOCKS, ROOT, WHOLE_PAGES, Fence, fences, renewed, spans, text_of
from test_refused import only_built_in_names  # noqa: F401  (what other tests register would be in messages)

import benchmarks.__main__ as benchmarks
from megatron_rl.commands.main import COMMANDS, command_module
from megatron_rl.declare import POLICY_LOSSES
from megatron_rl.hosts import roll, skyrl
from megatron_rl.hosts.choice import CORRECTION_SETTINGS
from megatron_rl.hosts.heads import nemo_rl as nemo_rl_head
from megatron_rl.weights import AGGREGATIONS

# The changelog names flags, files and command lines that went.
OF_TODAY = [page for page in pages.all_pages() if page != "CHANGELOG.md"]
FENCES = [fence for page in OF_TODAY for fence in fences(page)]
# A block that is part of a file, as its comment says, does not run by itself; the notebook's blocks run in their order.
PYTHON = [
    fence for fence in FENCES if fence.language == "python" and fence.page != pages.NOTEBOOK and "fragment of" not in fence.comment
]


@pytest.mark.parametrize("page", OF_TODAY)
def test_every_link_and_image_leads_to_a_file(page):
    """Headings within docs/ are looked for where the site is built."""
    targets = [link.partition("#")[0] for link in pages.links(page) if not link.startswith(("https://", "#"))]
    assert [target for target in targets if not (ROOT / posixpath.dirname(page) / target).exists()] == []


def resolves(dotted: str) -> bool:
    """megatron_rl.module.name"""
    with suppress(ImportError, AttributeError):
        pkgutil.resolve_name(dotted)
        return True
    return False


# Files of checkouts that are not this one, and of the reader.
ELSEWHERE = tuple(
    "megatron/rl/ slime/ miles/ runs/ /path/to/ path/to/ examples/run_grpo.py examples/start_rlvr_pipeline.py "
    "scripts/run_qwen3_4b.py".split()
)


@pytest.mark.parametrize("page", OF_TODAY)
def test_every_module_and_path_of_a_page_exists(page):
    """In code, from the root of the repository, from megatron_rl/ or from the page; test_x.py stands in tests/."""
    words = [word.rstrip(",;") for text in [*spans(page), *(fence.text for fence in fences(page))] for word in text.split()]
    dotted = {found[0].rstrip(".") for word in words if (found := re.match(r"megatron_rl(\.(?!yaml)\w+)+", word))}
    in_verl = {f"megatron_rl.{loss}.{aggregation}" for loss in POLICY_LOSSES.names() for aggregation in AGGREGATIONS.names()}
    in_skyrl = {f"{skyrl.PREFIX}{name}" for name in CORRECTION_SETTINGS} | {skyrl.LOG_PROBS}
    beside_their_trainer = {roll.WORKER, nemo_rl_head.OUR_WORKER}
    assert sorted(name for name in dotted - in_verl - in_skyrl - beside_their_trainer if not resolves(name)) == []
    paths = {word for word in words if re.fullmatch(r"[\w./-]*/[\w.-]+\.(py|sh|md)|test_\w+\.py", word)}
    homes = (ROOT, ROOT / "megatron_rl", ROOT / "tests", (ROOT / page).parent)
    missing = [path for path in paths if not path.startswith(ELSEWHERE) and not any((home / path).exists() for home in homes)]
    assert sorted(missing) == []


# Python


def case(fence: Fence):
    starts_ranks = "RankPool(" in fence.text
    return pytest.param(fence, marks=[pytest.mark.megatron, pytest.mark.slow] if starts_ranks else [], id=str(fence))


@pytest.mark.parametrize("fence", [case(fence) for fence in PYTHON])
def test_a_python_block_runs_by_itself(fence):
    if fence.text.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(fence.text, {}, str(fence), fence.page, fence.line)
        said = io.StringIO()
        doctest.DocTestRunner(verbose=False).run(test, out=said.write)
        assert test.examples and said.getvalue() == ""
    else:
        exec(compile(fence.text, str(fence), "exec"), {"__name__": "__main__"})


DOCSTRINGS = [path for path in sorted((ROOT / "megatron_rl").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", DOCSTRINGS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_examples_of_a_docstring_are_right(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


# Command lines


def shell_lines(fence: Fence) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", fence.text).splitlines()
    if fence.language == "console":
        joined = [line.removeprefix("$ ") for line in joined if line.startswith("$ ")]
    return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


def command_lines() -> Iterator[str]:
    """Of shell blocks, and of code in sentences that begins with a program of ours."""
    for fence in FENCES:
        if fence.language in ("bash", "console"):
            yield from shell_lines(fence)
    for page in OF_TODAY:
        yield from (span for span in spans(page) if re.match(r"(megatron-rl|torchrun|python3?) ", span))


class Parser(ArgumentParser):
    """Raises instead of ending the process, but for a flag without its value, which a sentence may name."""

    def error(self, message: str):
        raise SystemExit if message.endswith("expected one argument") else ValueError(message)


def check_command(command: str, *words: str) -> None:
    """A word in capitals stands for a value, as in --framework NAME, and 1 for it."""
    if command not in COMMANDS:
        raise ValueError(f"megatron-rl has no {command}")
    parser = Parser(command, allow_abbrev=False)
    given = [word if not re.fullmatch("[A-Z]+", word) else "1" for word in words]
    command_module(command).add_arguments(parser, given)
    parser.parse_args(given)


@pytest.mark.parametrize("line", sorted(set(command_lines())))
def test_a_command_line_is_one_that_its_program_takes(line):
    """A word with ... stands for words of the reader."""
    for part in line.split(" && "):
        words = [word for word in shlex.split(part, comments=True) if "..." not in word]
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        module, *rest = words[words.index("-m") + 1 :] if "-m" in words else words or [""]
        with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):  # of --help
            if module in ("megatron-rl", "megatron_rl") and rest:
                check_command(*rest)
            elif module == "benchmarks":
                benchmarks.build_parser(Parser).parse_args(rest)
            elif module.startswith("megatron_rl."):
                importlib.import_module(module)


# Generated parts

WRITE = "write it anew: python tests/pages.py"


@pytest.mark.parametrize("page", WHOLE_PAGES)
def test_a_generated_page_is_up_to_date(page):
    """Catches a flag, a default, a launch method, a message or a test that was changed without its page."""
    assert text_of(page) == renewed(page, text_of(page)), f"{WRITE} {page}"


def block(page: str, begins: str, producer: pages.Producer):
    marks = [pytest.mark.slow] * producer.is_slow + [pytest.mark.megatron] * ("megatron" in producer.needs)
    return pytest.param(page, begins, marks=marks, id=f"{page} {begins}")


@pytest.mark.parametrize(("page", "begins"), [block(page, *row) for page, rows in BLOCKS.items() for row in rows.items()])
def test_a_block_shows_what_its_command_prints(page, begins, tmp_path, monkeypatch):
    """Catches an output that changed without its page."""
    monkeypatch.chdir(tmp_path)
    assert text_of(page) == renewed(page, text_of(page), only=begins), f"{WRITE} {page}"


def test_every_block_has_one_producer():
    """Catches an output that nothing would renew."""
    for page in OF_TODAY:
        for command, _ in pages.blocks(text_of(page)):
            assert len(pages.beginnings(page, command)) == 1, f"{page}: {command}"


# The ledger of field bugs: a row for each bug, `n/a` before what stands for it here where it needs no test. A test carries a number
# in a docstring or an id; a comment carries none.

LEDGER = "docs/field_bugs.md"
NUMBER, LEDGER_ROW = re.compile(r"\bFB-\d+\b"), re.compile(r'^\| <a id="(fb-\d+)"></a>(FB-\d+) \|')


def rows_of_ledger() -> dict[str, bool]:
    """number -> whether it needs a test; four cells a row, and the anchor of its number."""
    rows: dict[str, bool] = {}
    for line in text_of(LEDGER).splitlines():
        if found := LEDGER_ROW.match(line):
            anchor, number = found.groups()
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert number not in rows and anchor == number.lower() and len(cells) == 4, line[:80]
            rows[number] = not cells[3].startswith("n/a")
    return rows


def test_every_row_has_a_test_and_no_test_carries_an_unknown_number():
    """Catches a slip in a number, and a row whose test went."""
    rows, named, tested = rows_of_ledger(), set(), set()
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        named |= set(NUMBER.findall(source))
        if path.name.startswith("test_"):
            nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str))
            tested |= {number for node in nodes for number in NUMBER.findall(node.value)}
    assert sorted(named - set(rows)) == [], "unknown numbers"
    assert [number for number, needs_test in rows.items() if needs_test and number not in tested] == [], "no test"


def test_the_site_builds_without_a_warning(tmp_path):
    """Catches a dead link, and a heading that is not there."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
