"""Judges a command line that a page shows by the parsers that would read it; it must never run one."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from test_examples import FLAGS_OF_HOSTS, FLAGS_OF_MEGATRON

import benchmarks.__main__ as benchmarks
from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.main import COMMANDS, command_module
from megatron_rl.hosts.args import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
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
