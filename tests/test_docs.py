"""The pages: links lead somewhere, names and flags are somebody's, code runs, command lines parse, and the site builds.

Outputs are in tests/test_pages.py. Nothing is fetched from a network, and no command line is run.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import itertools
import os
import pkgutil
import posixpath
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import markdown_pages
import pytest
from markdown_pages import ROOT, Fence, fences, spans, text_of
from test_examples import FLAGS_OF_HOSTS, FLAGS_OF_MEGATRON

import benchmarks.__main__ as benchmarks
import megatron_rl
from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.main import COMMANDS, command_module
from megatron_rl.declare import policy_loss_names
from megatron_rl.hosts import roll, skyrl
from megatron_rl.hosts.args import OPTIONS
from megatron_rl.hosts.choice import CORRECTION_SETTINGS
from megatron_rl.hosts.heads import nemo_rl as nemo_rl_head
from megatron_rl.hosts.megatron_lm import FILTERS_OFF, MODE
from megatron_rl.validation import flag_of
from megatron_rl.weights import loss_aggregation_names

PAGES = markdown_pages.pages()
# The changelog names flags, files and command lines that went.
OF_TODAY = [page for page in PAGES if page != "CHANGELOG.md"]
FENCES = [fence for page in OF_TODAY for fence in fences(page)]
# tests/test_pages.py runs those of the notebook, in their order, and compares what they print.
PYTHON = [fence for fence in FENCES if fence.language == "python" and fence.page != markdown_pages.NOTEBOOK]

# Links


@cache
def files_of_git() -> frozenset[str]:
    """What git tracks or would track."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("which files belong to the repository is known in a git checkout alone")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return frozenset(subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines())


def dead_links(page: str, links: list[str]) -> list[str]:
    dead = []
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        is_known = target in files_of_git() or any(name.startswith(f"{target}/") for name in files_of_git())
        has_anchor = not anchor or (target.endswith(".md") and is_known and anchor in markdown_pages.anchors(target))
        if not (is_known and has_anchor and (ROOT / target).exists()):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_image_leads_to_a_file_of_the_repository_and_to_a_heading_of_it(page):
    """A heading that GitHub and mkdocs call by two names is none: its link would work in one of the two alone."""
    assert dead_links(page, markdown_pages.links(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_row_of_a_table_is_torn(page):
    """Catches a generated cell with a line break: what is behind it becomes a row of its own."""
    lines = [*markdown_pages.prose(page).splitlines(), ""]
    behind = [line for row, line in itertools.pairwise(lines) if row.startswith("|") and line[:1] not in ("|", "")]
    assert behind == [] and [line for line in lines if line.startswith("|") and not line.endswith("|")] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_word_in_angle_brackets_is_lost_as_a_tag(page):
    """`<name>` outside code is HTML to both readers, and shown by neither. Anchors are wanted."""
    assert re.findall(r"<(?!a id=|/a>|https://)[A-Za-z/][^>]*>", re.sub(r"`[^`]*`", "", markdown_pages.prose(page))) == []


# Names

# Whose they are, in words.
FLAGS_OF_OTHERS = {
    "ncu": "--metrics --kernel-name --launch-skip --launch-count --kill",
    "pytest-xdist, and our own plugin": "--dist --require",
    "parameters of example losses": "--cap --ratio-cap --scale",
    "NeMo-RL; ROLL; hydra; uv": "--config --config_path --config_name --config-name --extra --isolated",
    "train_rl.py": "--grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-entropy-term-weight --grpo-kl-beta --grpo-iterations "
    "--rl-default-temperature --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef "
    + " ".join(map(flag_of, (*FILTERS_OFF, MODE))),
    "Megatron-LM": "--fp8-param-gather --recompute-granularity --mtp-loss-scaling-factor --mtp-num-layers "
    "--no-check-for-nan-in-loss-and-grad --use-megatron-fsdp --use-torch-fsdp2 --transformer-impl "
    "--dynamic-context-parallel --hybrid-context-parallel",
    "launch scripts of miles in Python, which hand its value on": "--extra-args",
    "OpenRLHF and prime-rl, up to the first dot; miles and slime": "--actor --trainer --algo --opsm-delta",
    "flags that other frameworks had, and vLLM's": "--pg-loss-divisor --quantization",
    "pip; hf": "--no-deps --no-index --local-dir",
    "TRL": "--loss_type --epsilon_high",
    ".ci/gpu_session.py": "--dry-run --seconds --stages",
    "srun": "--kill-on-bad-exit",
}


@pytest.mark.parametrize("page", OF_TODAY)
def test_every_flag_of_a_page_is_somebodys(page):
    """Catches a flag of ours that was renamed: no parser has it, and it is nobody else's."""
    known = our_flags() | flags_of_hosts() | flags_of_torchrun() | set(" ".join(FLAGS_OF_OTHERS.values()).split())
    named = set(re.findall(r"(?<![\w/-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*", text_of(page)))
    assert sorted(named - known) == []


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
    words = [word.rstrip(",;") for text in [*spans(page), *(f.text for f in markdown_pages.fences(page))] for word in text.split()]
    dotted = {found[0].rstrip(".") for word in words if (found := re.match(r"megatron_rl(\.(?!yaml)\w+)+", word))}
    in_verl = {f"megatron_rl.{loss}.{aggregation}" for loss in policy_loss_names() for aggregation in loss_aggregation_names()}
    in_roll = {roll.WORKER}  # importable beside ROLL alone; test_roll.py starts it
    in_skyrl = {f"{skyrl.PREFIX}{name}" for name in CORRECTION_SETTINGS} | {skyrl.LOG_PROBS}
    in_nemo_rl = {nemo_rl_head.OUR_WORKER}  # importable beside NeMo-RL alone
    here = dotted - in_verl - in_roll - in_skyrl - in_nemo_rl
    assert sorted(name for name in here if not resolves(name)) == []
    paths = {word for word in words if re.fullmatch(r"[\w./-]*/[\w.-]+\.(py|sh|md)|test_\w+\.py", word)}
    homes = (ROOT, ROOT / "megatron_rl", ROOT / "tests", (ROOT / page).parent)
    missing = [path for path in paths if not path.startswith(ELSEWHERE) and not any((home / path).exists() for home in homes)]
    assert sorted(missing) == []


def test_dir_lists_public_names_alone():
    assert dir(megatron_rl) == sorted([*megatron_rl.__all__, "__version__"])


# Python

FRAGMENT = re.compile(r"fragment of (\S+\.py)")


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


@pytest.mark.parametrize("fence", [case(fence) for fence in PYTHON if FRAGMENT.search(fence.comment)])
def test_a_fragment_calls_what_exists_with_arguments_that_exist(fence):
    """The file runs in a test of its own; the fragment beside a sentence must not fall behind it."""
    ours = names_of(fence)
    calls = [
        node for node in ast.walk(ast.parse(fence.text)) if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ours
    ]
    assert calls, "a fragment that calls nothing of ours shows nothing"
    for call in calls:
        inspect.signature(ours[call.func.id]).bind(*call.args, **{word.arg: word.value for word in call.keywords})


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
    for page in OF_TODAY:
        found = [span for span in spans(page) if re.match(r"(megatron-rl|torchrun|make|pip|python3?) ", span)]
        yield from ((page, span) for span in found)


# Flags of miles and slime that neither our rules nor our examples read.
OF_BOTH_HOSTS = {"--custom-config-path", "--save-debug-rollout-data"}
ADDED_FLAG = re.compile(r'\bparser\.add_argument\("(--[a-z-]+)"')


class Parser(ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str):
        raise ValueError(message)


def check_line(line: str) -> None:
    """Raises where one of our own programs would refuse the shell's line. A word with ... stands for words of the reader."""
    for part in line.split(" && "):
        words = [word for word in shlex.split(part, comments=True) if "..." not in word]
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:1] == ["megatron-rl"]:
            _check_command(words[1:])
        elif words[:1] in (["python"], ["python3"], ["torchrun"]) and "-m" in words:
            name, *rest = words[words.index("-m") + 1 :]
            if name == "megatron_rl":
                _check_command(rest)
            elif name == "benchmarks":
                with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):  # of --help
                    benchmarks.build_parser(Parser).parse_args(rest)
            elif name.startswith("megatron_rl."):
                importlib.import_module(name)


@cache
def our_flags() -> set[str]:
    """Of the package's commands, the benchmarks, and the programs in tests/ and examples/."""
    others = [add_megatron_rl_args(ArgumentParser()), benchmarks.build_parser()]
    parsers = [_parser_of(command, []) for command in COMMANDS] + others
    programs = [path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py") if path.stem[:5] != "test_"]
    of_programs = {flag for path in programs for flag in ADDED_FLAG.findall(path.read_text(encoding="utf-8"))}
    return of_programs | {flag for parser in parsers for flag in _options_of(parser)}


def flags_of_hosts() -> set[str]:
    """As far as our rules, our examples and the pages name them."""
    read_by_rules = {f"--{name.replace('_', '-')}" for name in OPTIONS}
    return read_by_rules | set(FLAGS_OF_HOSTS) | set(FLAGS_OF_MEGATRON) | OF_BOTH_HOSTS


@cache
def flags_of_torchrun() -> set[str]:
    from torch.distributed.run import get_args_parser

    return set(_options_of(get_args_parser()))


def _options_of(parser: ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, _SubParsersAction):
            for inner in action.choices.values():
                yield from _options_of(inner)


def _parser_of(command: str, words: list[str]) -> ArgumentParser:
    parser = Parser(command, allow_abbrev=False)
    command_module(command).add_arguments(parser, words)
    return parser


def _check_command(words: list[str]) -> None:
    if not words:
        return
    command, *rest = words
    if command not in COMMANDS:
        raise ValueError(f"megatron-rl has no {command}")
    parser = _parser_of(command, rest)
    # A word in capitals stands for a value, as in --framework NAME; the flag must exist all the same.
    stand_ins = [i for i, (flag, value) in enumerate(pairwise(rest)) if flag.startswith("--") and re.fullmatch("[A-Z]+", value)]
    if unknown := {rest[i] for i in stand_ins} - set(_options_of(parser)):
        raise ValueError(f"there is no {', '.join(sorted(unknown))}")
    typed = [word for i, word in enumerate(rest) if i not in stand_ins and i - 1 not in stand_ins]
    with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):  # of --help
        parser.parse_args(typed)


@pytest.mark.parametrize(("where", "line"), sorted(set(command_lines())))
def test_a_command_line_is_one_that_its_program_takes(where, line):
    """A sentence may name a flag without its value."""
    try:
        check_line(line)
    except ValueError:
        if ":" in where or not re.search(r" --[\w-]+$", line):
            raise
        check_line(f"{line} VALUE")


# The site


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    """Catches a font, a script or a picture that a reader without a network waits for, and dead links that a hook has written."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        is_ours = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
        (pytest.fail if is_ours else pytest.skip)("mkdocs-material is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len([page for page in PAGES if page.startswith("docs/")])
    for page in pages:
        html = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="?(?:https?:)?//[^>]*>|<link[^>]*href="?(?:https?:)?//[^>]*>', html)
        assert fetched == [], page
        for target in re.findall(r'(?:href|src)="(?!https:|data:)([^"#?]+)', html):
            path = tmp_path / target[1:] if target.startswith("/") else page.parent / target
            assert path.exists(), f"{page.relative_to(tmp_path)}: {target}"
