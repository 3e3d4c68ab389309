"""Our flags in a host's parser, and a host's flags for the same thing as one of ours: both must have one value."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import LaunchMethod, PolicyLossConfig
from megatron_rl.declare import get_policy_loss
from megatron_rl.errors import ConfigError, name_of
from megatron_rl.validation import flag_of


def with_host_values(
    given: Mapping[str, Any],
    theirs: Mapping[str, tuple[str, Any, bool]],  # our field -> the host's flag, its value, whether it may contradict ours
) -> tuple[dict[str, Any], list[str]]:
    """(arguments with the host's value where ours is unset, a problem for each setting that has two values)."""
    merged, problems = dict(given), []
    for field, (flag, value, may_contradict) in theirs.items():
        ours = merged.get(field)
        if ours is None:
            # A host's clip always has a value, and a loss without a clip refuses it.
            is_clip = field in ("clip_ratio_low", "clip_ratio_high")
            merged[field] = None if is_clip and clip_of_loss(merged.get("policy_loss")) is None else value
        elif may_contradict and value is not None and not _is_same(ours, value):
            problems.append(f"{flag_of(field)} {ours} and {flag} {value} are the same thing with two values: remove one of them")
    return merged, problems


def _is_same(ours: Any, value: Any) -> bool:
    """Values from a file may be text."""
    try:
        return float(ours) == float(value)
    except (TypeError, ValueError):
        return str(ours).strip() == str(value)


def validated(merged: Mapping[str, object], method: LaunchMethod, found: Sequence[str]) -> PolicyLossConfig:
    """Our settings from arguments by name. Raises one ConfigError with the problems that the caller has found, then its own."""
    try:
        config = validate_megatron_rl_args(Namespace(**merged), method)
    except ConfigError as error:
        raise ConfigError([*found, *error.problems]) from error
    if found:
        raise ConfigError(found)
    return config


def clip_of_loss(policy_loss: object) -> tuple[float, float] | None:
    """The loss's own clip, None where it has none. A loss of a wrong name has any."""
    try:
        return get_policy_loss(policy_loss).clip_ratios if isinstance(policy_loss, str) else (0.0, 0.0)
    except ConfigError:
        return (0.0, 0.0)


ArgsProvider = Callable[[ArgumentParser], ArgumentParser]
# The first of our flags: a parser that has it has all of them.
OWN_FLAG = "--loss-aggregation"


def compose_extra_args_provider(provider: ArgsProvider | None = None) -> ArgsProvider:
    """`provider`'s flags and ours, for extra_args_provider and for a host's add_custom_arguments; flags that the parser has
    already are not added again. Raises ConfigError when `provider` does not return the parser."""

    def add_args(parser: ArgumentParser) -> ArgumentParser:
        if provider is not None:
            parser = provider(parser)
            if not isinstance(parser, ArgumentParser):
                raise ConfigError(f"{name_of(provider)} returned {type(parser).__name__}: an arguments provider returns the parser")
        known = {flag for action in parser._actions for flag in action.option_strings}
        return parser if OWN_FLAG in known else add_megatron_rl_args(parser)

    return add_args


def parsed_line(parser_module: str, words: Sequence[str], keyword: str = "add_custom_arguments") -> Namespace:
    """A launch line by the parser of miles, slime or Megatron-LM, with our flags in it. keyword: by which it takes further flags.

    The script is the first word that ends in .py. Raises ImportError where the host is not installed, SystemExit as its parser.
    """
    parse_args = import_module(parser_module).parse_args
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        raise ConfigError(f"{' '.join(words)}: no word ends in .py; give the line as it starts the train script")
    given, sys.argv = sys.argv, list(words[script:])
    try:
        found: Namespace = parse_args(**{keyword: compose_extra_args_provider()})
    finally:
        sys.argv = given
    return found
