"""Checks a launch before its first step and reports every problem with its remedy. It changes no setting."""

from __future__ import annotations

from megatron_rl.config import PolicyLossConfig
from megatron_rl.validation.advice import WARNINGS
from megatron_rl.validation.checks import problems_of
from megatron_rl.validation.launch_methods import CHOICES, HOST_SWITCHES, REGISTRIES, Settings, field_of, flag_of, methods_of_flags
from megatron_rl.validation.rules import RULES

__all__ = [
    "CHOICES",
    "HOST_SWITCHES",
    "REGISTRIES",
    "Settings",
    "config_warnings",
    "field_of",
    "find_problems",
    "flag_of",
    "methods_of_flags",
]


def find_problems(settings: Settings) -> list[str]:
    """The messages of all rules, in their order; empty where the launch has no problem."""
    return problems_of(RULES, settings)


def config_warnings(config: PolicyLossConfig) -> list[str]:
    """The warnings about a configuration without problems, for the start of a run."""
    return problems_of(WARNINGS, config)
