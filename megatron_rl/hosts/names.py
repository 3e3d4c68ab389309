"""What a launch line has wrong by name: a flag that a parser drops, a name that is nearly right, a path that leads nowhere.

No parser takes a name that is nearly right, and some hosts drop unknown flags without a message. `check_launch` asks these checks
first, because such a fault causes others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module

from megatron_rl.config import flag_fields
from megatron_rl.hosts.base import (
    CONVERT_LINE,
    CUSTOM_LOSS_LINE,
    INIT_LINE,
    OPTIONS,
    REDUCER_LINE,
    REWARD_LINE,
    Host,
    HostLaunch,
    HostOptions,
)
from megatron_rl.loss_hub import declared_parameters
from megatron_rl.validation import field_of, flag_of, routes_of_flags
from megatron_rl.validation.checks import Asker, check

# Only a prefix with at least this many characters is treated as an abbreviation of our flag.
SHORTEST_ABBREVIATION = len("--loss-agg")
# A name that is more similar than this to one of our fields is a misspelling: no option of a host or of Megatron is.
CLOSEST_NAME = 0.85
# The same for the names of a host that our checks read: 1,172 flags of miles, slime and Megatron are less similar to another one.
CLOSEST_HOST_NAME = 0.91
# What other frameworks call ours; none of the hosts has such a flag.
NAMES_ELSEWHERE = {"--loss-agg-mode": "--loss-aggregation", "--epsilon": "--clip-ratio-low", "--epsilon-high": "--clip-ratio-high"}
# Of these: what a script of one's own may well call a flag of its own.
COMMON_NAMES = ("--epsilon", "--epsilon-high")
OUR_FUNCTIONS = tuple(line.split()[-1] for line in (REDUCER_LINE, CUSTOM_LOSS_LINE, INIT_LINE, REWARD_LINE, CONVERT_LINE))
OUR_HOOKS = tuple(option for option in OPTIONS if option.endswith("_path"))


def meant_flag(flag: str) -> str | None:
    """Our flag that `flag` misspells: other dashes, an abbreviation, a typing error. None for our flags and for other people's."""
    if not flag.startswith("--"):
        return None
    name = field_of(flag)
    if flag in routes_of_flags() or name in OPTIONS:
        return None
    with_dashes = "--" + flag.lstrip("-").replace("_", "-").lower()
    if with_dashes in NAMES_ELSEWHERE:
        return NAMES_ELSEWHERE[with_dashes]
    longer = [ours for ours in routes_of_flags() if ours.startswith(with_dashes) and len(flag) >= SHORTEST_ABBREVIATION]
    if longer:
        return min(longer, key=len)
    field = likely_field(field_of(with_dashes), our_fields())
    return flag_of(field) if field is not None else None


def meant_host_flag(flag: str, host: Host) -> str | None:
    """The flag of a host that `flag` misspells, of those that our checks read. None for these, and where none is very similar or
    one of ours is more so."""
    known = {*OPTIONS, *host.own_options, *host.parser_defaults, *host.turned_off}
    if not flag.startswith("--") or field_of(flag) in known or flag in routes_of_flags():
        return None
    name, names = field_of(flag), sorted({*known, *our_fields()})
    swapped = [one for one in names if sorted(one) == sorted(name)]  # two letters of a short name, as esp_clip, are less similar
    longer = [one for one in known if one.startswith(name) and len(flag) >= SHORTEST_ABBREVIATION]
    close = (
        swapped or sorted(longer, key=lambda one: (len(one), one)) or get_close_matches(name, names, n=1, cutoff=CLOSEST_HOST_NAME)
    )
    return flag_of(close[0]) if close and close[0] in known else None


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


@cache  # launcher, hooks and losses of a process judge one launch each, and a host has a thousand names
def likely_field(name: str, fields: tuple[str, ...]) -> str | None:
    """Our field that `name` misspells; None for a field, for a host's option, and for a name that is similar to no field."""
    # A key with dashes is reported by megatron_rl.arguments.
    if name in fields or name in OPTIONS or "-" in name:
        return None
    return next(iter(get_close_matches(name, fields, n=1, cutoff=CLOSEST_NAME)), None)


def dropped_flags(options: HostOptions, words: Sequence[str]) -> Iterator[str]:
    """A message for each of our flags on the command line, misspelt ones included, that the host's parser has dropped."""
    typed = {word.partition("=")[0] for word in words}
    for flag in routes_of_flags():
        if flag in typed and not options.has(field_of(flag)):
            yield (
                f"{flag} is on the command line and not in args: this launcher drops flags that it does not know; put "
                f"{field_of(flag)} into the file of --custom-config-path, or start with python -m megatron_rl.hosts.launch"
            )
    yield from (f"{word} has no effect: {misspelling_hint(word)}" for word in sorted(typed) if meant_flag(word) is not None)


def _closest_function(dotted: str) -> str | None:
    return next(iter(get_close_matches(dotted, OUR_FUNCTIONS, n=1)), None)


def meant_function(path: object) -> str | None:
    """Our function that a path misspells; None: it loads, or means none of them."""
    if not isinstance(path, str) or not path.startswith("megatron_rl.") or path_problem(path) is None:
        return None
    return _closest_function(path.replace(":", "."))


def path_problem(path: str) -> str | None:
    """Why a host's loader, which splits on the last dot, would not find this function; None: nothing is known against it.

    Only our paths are imported. Another path is checked for a colon alone, because importing a user's module may do anything.
    """
    dotted = path.replace(":", ".")
    if dotted.split(".")[0] != "megatron_rl":
        return f"{path}: a loader splits on the last dot and cannot load it; write {dotted}" if ":" in path else None
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        meant = _closest_function(dotted)
        remedy = f"did you mean {meant}?" if meant else f"write module.function, as in {OUR_FUNCTIONS[0]}"
        return f"{path} cannot be loaded ({why}): a loader splits on the last dot; {remedy}"
    return None if callable(found) else f"{path} is {type(found).__name__}, not a function"


@check(asked_by=(Asker.LAUNCHER, Asker.INIT_HOOK))
def paths_load(launch: HostLaunch) -> Iterator[str]:
    """The host's loader would find them. Doctor looks at more paths than these, and says what it found."""
    for option in OUR_HOOKS:
        path = launch.options[option]
        problem = path_problem(path) if isinstance(path, str) else None
        if problem is not None:
            yield f"{flag_of(option)} {problem}"


@check(asked_by=(Asker.LAUNCHER, Asker.INIT_HOOK))
def flags_reach_the_arguments(launch: HostLaunch) -> Iterator[str]:
    """Doctor reads the words of the line, and says of each flag what becomes of it."""
    yield from dropped_flags(launch.options, sys.argv[1:])


@check()
def names_are_spelled_right(launch: HostLaunch) -> Iterator[str]:
    """A host merges any key of its YAML file into the arguments; a misspelt one has no effect."""
    fields = our_fields()
    for name in launch.options.names():
        field = likely_field(name, fields)
        if field is not None and launch.options.ours(name) is not None:
            yield f"{name}={launch.options.ours(name)!r} has no effect: did you mean {field}? Write {field}, or remove it"
