"""Checks a launch before its first step and reports every problem with its remedy. It changes no setting."""

from __future__ import annotations

from megatron_rl.config import PolicyLossConfig
from megatron_rl.validation.checks import checks_in, problems_of, warnings_of
from megatron_rl.validation.routes import (
    CHOICES,
    HOST_SWITCHES,
    REGISTRIES,
    ROUTES_OF_FLAG,
    Settings,
    field_of,
    flag_of,
    routes_of_flags,
)

__all__ = [
    "CHECKS_OF_SETTINGS",
    "CHOICES",
    "REGISTRIES",
    "HOST_SWITCHES",
    "ROUTES_OF_FLAG",
    "Settings",
    "config_warnings",
    "field_of",
    "find_problems",
    "flag_of",
    "routes_of_flags",
]

# What is asked of each launch's settings, whatever trains. A file of `rules` refuses, one of `advice` warns.
CHECKS_OF_SETTINGS = checks_in("megatron_rl.validation.rules", "megatron_rl.validation.advice")


def find_problems(settings: Settings) -> list[str]:
    """The messages of all rules, in their order; empty where the launch has no problem."""
    return problems_of(CHECKS_OF_SETTINGS, settings)


def config_warnings(config: PolicyLossConfig) -> list[str]:
    """The warnings about a configuration without problems, for the start of a run."""
    return warnings_of(CHECKS_OF_SETTINGS, Settings(config=config))
