"""Adds the flags of the package to a parser, and makes a PolicyLossConfig of a Namespace, which it does not change."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from megatron_rl.config import LaunchMethod, PolicyLossConfig, flag_fields
from megatron_rl.declare import POLICY_LOSSES, Parameter, declared_parameters
from megatron_rl.errors import ConfigError
from megatron_rl.validation import CHOICES, REGISTRIES, Settings, field_of, find_problems, flag_of, methods_of_flags

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def add_megatron_rl_args(parser: ArgumentParser, command_line: Sequence[str] | None = None) -> ArgumentParser:
    """Adds the argument group `megatron_rl` and returns the parser: a flag for each field of PolicyLossConfig, and for each
    parameter of a registered loss.

    command_line: the arguments of the launch; None: those of this process. The module of its `--policy-loss module.function` is
    imported, because the loss in it declares parameters. Raises ConfigError where the parser already has a flag of that name.

    Megatron's `extra_args_provider` and the hosts' `add_custom_arguments` take this function as it is. A flag that is
    not given is None, and `validate_megatron_rl_args` fills in the default, so that a host can set its own value first.
    A value that cannot be read stays text, so that it is reported together with every other problem.
    """
    meanings = field_meanings()
    group = parser.add_argument_group(title="megatron_rl")
    for field in flag_fields():
        description = f"{meanings[field.name]} Default: {default_text(field)}."
        description = description.replace("%", "%%")
        if _kind(field) == "bool":
            group.add_argument(flag_of(field.name), action="store_true", default=None, help=description)
        else:
            reader, metavar = _READERS[_kind(field)], metavar_of(field)
            group.add_argument(flag_of(field.name), type=reader, default=None, metavar=metavar, help=description)
    _import_named_loss(sys.argv[1:] if command_line is None else command_line)
    for name, losses in declared_parameters().items():
        description = "; ".join(f"{', '.join(owners)}: {text}" for text, owners in meanings_of_parameter(losses).items()) + "."
        description = description.replace("%", "%%")
        try:
            group.add_argument(flag_of(name), type=read_number, default=None, metavar="NUMBER", help=description)
        except ArgumentError as error:
            raise ConfigError(
                f"{flag_of(name)} of policy loss {', '.join(losses)} is a flag of this parser already: rename the parameter"
            ) from error
    return parser


def validate_megatron_rl_args(args: Namespace, method: LaunchMethod = LaunchMethod.MEGATRON_LM) -> PolicyLossConfig:
    """The configuration in `args`, with defaults filled in. `args` is not changed.

    Values may be strings, because a host may merge a YAML file into `args`. Raises one ConfigError with every problem: flags that
    the launcher dropped, and the problems that the rules of `megatron_rl.validation` find.
    """
    given = vars(args)
    set_flags: set[str] = set()
    settings: dict[str, Any] = {}
    for field in flag_fields():
        if given.get(field.name) is not None:
            value = _READERS[_kind(field)](given[field.name])
            settings[field.name] = value
            # A store_true flag cannot be given as false, so false counts as not given.
            if value is not False:
                set_flags.add(flag_of(field.name))
    POLICY_LOSSES.find(settings.get("policy_loss"))  # its import declares parameters; a rule reports a wrong name
    # A value that cannot be read stays as it is; the rules report it.
    parameters: dict[str, Any] = {name: read_number(given[name]) for name in declared_parameters() if given.get(name) is not None}
    launch = Settings(
        config=PolicyLossConfig(**settings, loss_parameters=parameters),
        method=LaunchMethod(method),
        set_flags=frozenset(set_flags),
        arguments=given,
    )
    problems = [*_dropped_flags(given), *find_problems(launch)]
    if problems:
        raise ConfigError(problems)
    return launch.config


def meanings_of_parameter(losses: Mapping[str, Parameter]) -> dict[str, list[str]]:
    """Meaning and default as text -> the losses that share it."""
    found: dict[str, list[str]] = {}
    for loss, one in losses.items():
        default = "off" if math.isinf(one.default) else f"{one.default:g}"
        found.setdefault(f"{one.help}. Default: {default}", []).append(loss)
    return found


def _import_named_loss(command_line: Sequence[str]) -> None:
    for argument, following in pairwise([*command_line, ""]):
        flag, equals, value = argument.partition("=")
        name = value if equals else following
        if flag == "--policy-loss" and "." in name:  # any other is built in
            POLICY_LOSSES.find(name)


def given_settings(args: Namespace) -> dict[str, object]:
    """The settings in a parsed Namespace: those of flag_fields, None where unset, and the parameters that were given."""
    values = {field.name: vars(args)[field.name] for field in flag_fields()}
    return values | {name: vars(args)[name] for name in declared_parameters() if vars(args).get(name) is not None}


@functools.cache
def field_meanings() -> dict[str, str]:
    """Field name -> the docstring line under it in PolicyLossConfig, the one place where a setting is explained."""
    (declaration,) = ast.parse(inspect.getsource(PolicyLossConfig)).body
    body = declaration.body if isinstance(declaration, ast.ClassDef) else []
    return {
        statement.target.id: str(line.value.value)
        for statement, line in pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(line, ast.Expr)
        if isinstance(statement.target, ast.Name) and isinstance(line.value, ast.Constant)
    }


def read_number(value: object) -> object:
    """A float where the value is a number or its text. Any other value (a bool, 8k, nan) is returned as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Real) or (isinstance(value, str) and _NUMBER.fullmatch(value.strip())):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return value


def read_whole_number(value: object) -> object:
    """An int where the value is a whole number or its digits. Any other value is returned as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral) or (isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value.strip())):
        return int(value)
    return value


def read_switch(value: object) -> object:
    """A bool where the value is a bool, or the text true or false. Any other value is returned as it is."""
    switches = {"true": True, "false": False}
    return switches.get(value.strip().lower(), value) if isinstance(value, str) else value


def read_name(value: object) -> object:
    return value.strip() if isinstance(value, str) else value


_READERS: dict[str, Callable[[object], object]] = {
    "float": read_number,
    "int": read_whole_number,
    "bool": read_switch,
    "str": read_name,
}
_METAVARS = {"float": "NUMBER", "int": "COUNT", "bool": None, "str": "NAME"}


def _dropped_flags(given: Mapping[str, object]) -> Iterator[str]:
    """A message for each setting that a launcher dropped, or whose key is misspelled: the run would train with the default."""
    if "loss_aggregation" not in given:
        yield (
            "loss_aggregation is missing from args: the launcher dropped --loss-aggregation, as some do with flags that they do "
            "not know, or its key is misspelt; start with python -m megatron_rl.hosts.launch"
        )
    for flag in methods_of_flags():
        key = flag.removeprefix("--")
        if "-" in key and key in given:
            yield f"{key}={given[key]!r} has no effect: keys have underscores; write {field_of(flag)}"


def _kind(field: Field) -> str:
    """float, int, bool or str: the annotation of the field (text here), without its None."""
    return field.type.removesuffix(" | None")


def metavar_of(field: Field) -> str | None:
    if field.name in CHOICES:
        return "{" + ",".join(CHOICES[field.name]) + "}"
    if field.name in REGISTRIES:
        return "{" + ",".join(dict.fromkeys((str(field.default), *REGISTRIES[field.name].names()))) + "}"
    return _METAVARS[_kind(field)]


def default_text(field: Field) -> str:
    if field.default is None:
        return "unset"
    return "off" if field.default is False else str(field.default)
