"""The record and the decorator of every check: who asks it, of which launches, and whether what it finds is a problem or a warning.

A check judges one thing of one kind of launch: our settings, a launch in a host, a run of `megatron-rl train`. The files of a kind
are its registry: `checks_in` takes the checks that they define, file by file and line by line, so that the order in which they are
asked does not depend on what was imported before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from typing import Any


class Asker(StrEnum):
    """Who asks whether a launch may run."""

    VALIDATION = "validation"
    """validate_megatron_rl_args, of our settings alone; each of those below calls it."""
    LAUNCHER = "launcher"
    """Before the host's script goes on: python -m megatron_rl.hosts.launch."""
    PLUGIN = "plugin"
    """In a host's process, where it looks up a loss or reads its settings file."""
    INIT_HOOK = "init hook"
    """In each training actor, with process groups and the installed Megatron-Core."""
    HOOK = "hook"
    """The reducer, our loss and the hooks of a rollout process, at their call."""
    DOCTOR = "doctor"
    """`megatron-rl doctor` and `megatron-rl explain`, on any machine."""
    TRAIN = "train"
    """`megatron-rl train`."""


EVERYONE = frozenset(Asker)


@dataclass(frozen=True, slots=True)
class Row:
    """What is said of one setting. is_wrong: the launch would be refused, or train another weight."""

    subject: str
    text: str
    is_wrong: bool = False
    is_note: bool = False


# Yields what is wrong with a launch, why, and what to type: a message, or a Row where the check itself names the setting.
Find = Callable[[Any], Iterable[str | Row]]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that may be wrong with a launch."""

    name: str
    find: Find
    is_warning: bool = False
    """It is printed at start, and the launch goes on."""
    asked_by: frozenset[Asker] = EVERYONE
    when: Callable[[Any], bool] | None = None
    """The launches that it is for; None: each."""
    subject: str = "rule"
    """The setting that it judges, in doctor's table."""

    def __call__(self, launch: Any) -> Iterator[Row]:
        """A row for each thing that it finds; none where the launch is not one that it is for."""
        if self.when is not None and not self.when(launch):
            return
        is_wrong, is_note = not self.is_warning, self.is_warning
        for found in self.find(launch):
            yield found if isinstance(found, Row) else Row(self.subject, found, is_wrong, is_note)


def check(
    *,
    is_warning: bool = False,
    asked_by: Iterable[Asker] = EVERYONE,
    when: Callable[[Any], bool] | None = None,
    subject: str = "rule",
) -> Callable[[Find], Check]:
    """Decorator: makes a function a Check of the function's name, which `checks_in` finds in its file, or which a host lists.

    The function must accept a launch with a value of any type for each setting, and changes nothing.
    """

    def make(find: Find) -> Check:
        return Check(find.__name__, find, is_warning, frozenset(asked_by), when, subject)

    return make


@cache
def checks_in(*modules: str) -> tuple[Check, ...]:
    """The checks that these modules define, in this order; within a module in the order of its file. Imports the modules."""
    found = [(name, value) for name in modules for value in vars(import_module(name)).values()]
    return tuple(value for name, value in found if isinstance(value, Check) and value.find.__module__ == name)


def ask(checks: Iterable[Check], launch: Any, asker: Asker) -> Iterator[Row]:
    """What the checks of `asker` find, in their order. Nothing is raised."""
    return (row for one in checks if asker in one.asked_by for row in one(launch))


def problems_of(checks: Iterable[Check], launch: Any, asker: Asker) -> list[str]:
    """The texts of what is wrong, each once. Checks that warn are not asked."""
    found = ask((one for one in checks if not one.is_warning), launch, asker)
    return list(dict.fromkeys(row.text for row in found if row.is_wrong))


def warnings_of(checks: Iterable[Check], launch: Any, asker: Asker) -> list[str]:
    """The texts that are said at start of a launch without problems, each once. Only checks that warn are asked."""
    found = ask((one for one in checks if one.is_warning), launch, asker)
    return list(dict.fromkeys(row.text for row in found if row.is_note))
