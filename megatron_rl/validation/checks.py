"""The record and the decorator of every check, and whether what it finds is a problem or a warning.

A check judges one thing of one kind of launch: our settings, or a run of `megatron-rl train`. The files of a kind are its registry:
`checks_in` takes the checks that they define, file by file and line by line, so that the order in which they are asked does not
depend on what was imported before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

# Yields what is wrong with a launch, why, and what to type.
Find = Callable[[Any], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that may be wrong with a launch."""

    name: str
    find: Find
    is_warning: bool = False
    """It is printed at start, and the launch goes on."""

    def __call__(self, launch: Any) -> Iterator[str]:
        yield from self.find(launch)


def check(*, is_warning: bool = False) -> Callable[[Find], Check]:
    """Decorator: makes a function a Check of the function's name, which `checks_in` finds in its file, or which a host lists.

    The function must accept a launch with a value of any type for each setting, and changes nothing.
    """

    def make(find: Find) -> Check:
        return Check(find.__name__, find, is_warning)

    return make


@cache
def checks_in(*modules: str) -> tuple[Check, ...]:
    """The checks that these modules define, in this order; within a module in the order of its file. Imports the modules."""
    found = [(name, value) for name in modules for value in vars(import_module(name)).values()]
    return tuple(value for name, value in found if isinstance(value, Check) and value.find.__module__ == name)


def problems_of(checks: Iterable[Check], launch: Any) -> list[str]:
    """What is wrong, each once, in the order of the checks. Checks that warn are not asked."""
    return list(dict.fromkeys(text for one in checks if not one.is_warning for text in one(launch)))


def warnings_of(checks: Iterable[Check], launch: Any) -> list[str]:
    """What is said at start of a launch without problems, each once. Only checks that warn are asked."""
    return list(dict.fromkeys(text for one in checks if one.is_warning for text in one(launch)))
