"""Checks a launch before its first step and reports every problem with its remedy. It changes no setting."""

from __future__ import annotations

from megatron_rl.config import PolicyLossConfig
from megatron_rl.validation.advice import config_warnings
from megatron_rl.validation.routes import (
    CHOICES,
    HOST_SWITCHES,
    ROUTES_OF_FLAG,
    LaunchOptions,
    field_of,
    flag_of,
    routes_of_flags,
)
from megatron_rl.validation.rules import RULES

__all__ = [
    "CHOICES",
    "HOST_SWITCHES",
    "ROUTES_OF_FLAG",
    "RULES",
    "LaunchOptions",
    "config_warnings",
    "field_of",
    "find_problems",
    "flag_of",
    "routes_of_flags",
]


def find_problems(config: PolicyLossConfig, options: LaunchOptions) -> list[str]:
    """The messages of all rules, in the order of `RULES`; empty where the launch has no problem."""
    return [problem for find in RULES for problem in find(config, options)]
