"""Finds what a launch line has wrong by name: our flags that are misspelt or dropped, and functions that do not load.

No parser takes a name that is nearly right, and some hosts drop unknown flags without a message.
"""

from __future__ import annotations

from argparse import Namespace
from difflib import get_close_matches
from functools import cache
from importlib import import_module

from megatron_rl.config import flag_fields
from megatron_rl.hosts.base import OPTIONS, HostOptions
from megatron_rl.loss_hub import declared_parameters
from megatron_rl.validation import field_of, flag_of, routes_of_flags

# A flag of this length that begins one of our flags is an abbreviation of it; a shorter one may be anything.
SHORTEST_ABBREVIATION = len("--loss-agg")
# A name that is more similar than this to one of our fields is a misspelling: no option of a host or of Megatron is.
CLOSEST_NAME = 0.85
OUR_HOOKS = tuple(option for option in OPTIONS if option.endswith("_path"))


def meant_flag(flag: str) -> str | None:
    """Our flag that `flag` misspells: other dashes, an abbreviation, a typing error. None for our flags and for those of others."""
    if not flag.startswith("--"):
        return None
    name = field_of(flag)
    if flag in routes_of_flags() or name in OPTIONS:
        return None
    with_dashes = "--" + flag.lstrip("-").replace("_", "-").lower()
    longer = [ours for ours in routes_of_flags() if ours.startswith(with_dashes) and len(flag) >= SHORTEST_ABBREVIATION]
    if longer:
        return min(longer, key=len)
    field = likely_field(field_of(with_dashes), our_fields())
    return flag_of(field) if field is not None else None


def misspelling_hint(flag: str) -> str:
    meant = meant_flag(flag)
    if meant is not None and "_" in flag:
        return f"did you mean {meant}? Flags have dashes"
    if meant is not None and meant.startswith(flag):
        return f"did you mean {meant}? These parsers take no abbreviations"
    return f"did you mean {meant}?"


def is_hook_place(flag: str) -> bool:
    """Whether this flag of a host takes one of our functions."""
    return field_of(flag) in OUR_HOOKS


def our_fields() -> tuple[str, ...]:
    """The names of our settings and of the parameters that registered losses declare."""
    return (*(field.name for field in flag_fields()), *declared_parameters())


@cache  # our hooks judge a launch in each micro-batch, and a host has a thousand names
def likely_field(name: str, fields: tuple[str, ...]) -> str | None:
    """Our field that `name` misspells; None for a field, for a host's option, and for a name that is similar to no field."""
    # A key with dashes is reported by megatron_rl.arguments.
    if name in fields or name in OPTIONS or "-" in name:
        return None
    return next(iter(get_close_matches(name, fields, n=1, cutoff=CLOSEST_NAME)), None)


def dropped_flags(args: Namespace, argv: list[str], flags) -> list[str]:
    """A message for each of our flags on the command line, misspelt ones included, that the host's parser has dropped."""
    typed = {word.partition("=")[0] for word in argv}
    misspelt = [f"{word} has no effect: {misspelling_hint(word)}" for word in sorted(typed) if meant_flag(word) is not None]
    dropped = [
        f"{flag} is on the command line and not in args: this launcher drops flags that it does not know; put "
        f"{field_of(flag)} into the file of --custom-config-path, or start with python -m megatron_rl.hosts.launch"
        for flag in flags
        if flag in typed and not HostOptions(args).has(field_of(flag))
    ]
    return [*dropped, *misspelt]


def path_problems(args: Namespace) -> list[str]:
    """A message for each path on the launch line that the host's loader would not find. The loader splits on the last dot.

    Only our paths are imported. Another path is checked for a colon alone, because importing a user's module may do anything.
    """
    options, problems = HostOptions(args), []
    for option in OPTIONS:
        path = options[option] if option.endswith("_path") else None
        if not isinstance(path, str):
            continue
        flag, is_ours = flag_of(option), path.replace(":", ".").split(".")[0] == "megatron_rl"
        if not is_ours and ":" in path:
            problems.append(f"{flag} {path}: the host splits on the last dot and cannot load it; write {path.replace(':', '.')}")
        elif is_ours:
            problems += _problem_of_path(flag, path)
    return problems


def _problem_of_path(flag: str, path: str) -> list[str]:
    module, _, attribute = path.rpartition(".")
    dotted = path.replace(":", ".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        return [
            f"{flag} {path} cannot be loaded ({type(error).__name__}: {error}): the host splits on the last dot; write "
            f"module.function, as in {dotted}"
        ]
    return [] if callable(found) else [f"{flag} {path} is {type(found).__name__}, not a function"]
