"""What verl_launch shares with the table of doors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import PolicyLossConfig, flag_fields
from megatron_rl.hosts.settings import UNKNOWN as UNKNOWN
from megatron_rl.hosts.settings import as_typed as as_typed
from megatron_rl.hosts.settings import put as put
from megatron_rl.hosts.settings import read_overrides as read_overrides
from megatron_rl.hosts.settings import read_value as read_value
from megatron_rl.validation import config_warnings, flag_of
from megatron_rl.validation.checks import Row as Row

# Our settings that reach the loss in each of these trainers.
LOSS_SETTINGS = ("policy_loss", "loss_aggregation", "loss_aggregation_divisor", "clip_ratio_low", "clip_ratio_high")
ReadFile = Callable[[Path], Mapping[str, Any]]


def in_words(given: Mapping[str, Any]) -> list[str]:
    return [f"{name}={as_typed(value)}" for name, value in given.items()]


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
