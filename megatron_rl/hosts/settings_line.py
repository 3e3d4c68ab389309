"""What the readers of launch lines with settings share: verl_launch, nemo_rl_launch, roll_launch, skyrl_launch."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import PolicyLossConfig, flag_fields
from megatron_rl.validation import config_warnings, flag_of
from megatron_rl.validation.checks import Row as Row

LONGEST_VALUE = 10_000
UNKNOWN = object()  # a value that only the shell or the trainer knows
# Our settings that reach the loss in each of these trainers.
LOSS_SETTINGS = ("policy_loss", "loss_aggregation", "loss_aggregation_divisor", "clip_ratio_low", "clip_ratio_high")
ReadFile = Callable[[Path], Mapping[str, Any]]


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """The settings a.b=value among the words, by name."""
    found = [word.partition("=") for word in words if "=" in word and not word.startswith("-")]
    return {name.lstrip("+~"): read_value(value) for name, _, value in found}


def read_value(text: str) -> Any:
    """As hydra reads a plain value."""
    if "$" in text or "`" in text:
        return UNKNOWN
    words = {"true": True, "false": False, "null": None, "none": None, "inf": math.inf}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text) if len(text) < LONGEST_VALUE else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two of deep nesting
        return text
    return value if isinstance(value, int | float | str | list | tuple | dict) else text


def put(settings: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Sets settings[a][b] for the names a, b."""
    *parents, last = names
    for parent in parents:
        if not isinstance(settings.get(parent), dict):
            settings[parent] = {}
        settings = settings[parent]
    settings[last] = value


def in_words(given: Mapping[str, Any]) -> list[str]:
    return [f"{name}={as_typed(value)}" for name, value in given.items()]


def as_typed(value: Any) -> str:
    """A number with all its digits, a whole one without a dot."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def idle_settings(config: PolicyLossConfig, honoured: Sequence[str], why: str) -> list[str]:
    """A problem for each of our settings that is not its default and reaches no loss there."""
    whys = {"rejected_tokens": f"{why.partition(':')[0]}: it counts the step before a loss knows which tokens are dropped"}
    return [
        f"{flag_of(one.name)}={getattr(config, one.name)} has no effect in {whys.get(one.name, why)}; remove it"
        for one in flag_fields()
        if one.name not in honoured and getattr(config, one.name) != one.default
    ]


def advice_of(config: PolicyLossConfig) -> Iterator[Row]:
    return (Row("advice", text, is_note=True) for text in config_warnings(config))
