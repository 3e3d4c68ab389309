"""Asks rules of a launch. A rule is a function that yields what is wrong, why, and what to type. It takes values of any type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Launch = TypeVar("Launch")


def problems_of(rules: Iterable[Callable[[Launch], Iterable[str]]], launch: Launch) -> list[str]:
    """What the rules find, each text once, in their order."""
    return list(dict.fromkeys(text for rule in rules for text in rule(launch)))
