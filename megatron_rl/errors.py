"""The errors that a user meets. Each message says what was given, what is allowed and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def printable(text: str) -> str:
    """The text with control characters and newlines as escapes, so that the content of a file cannot write lines of its own."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def name_of(function: object) -> str:
    """module.function, for a message. A functools.partial has no name."""
    return f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)


def place_of(function: Callable[..., Any]) -> str:
    """file:line of a function, for a message."""
    function = inspect.unwrap(function)
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):  # made by exec, or compiled
        return f"{getattr(function, '__module__', 'a module')}, no source"


class ConfigError(ValueError):
    """A setting that is wrong, would train on a wrong scale, or has no effect. `problems` holds one line for each problem."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            super().__init__(f"{len(self.problems)} problems:\n{lines}")


class DataError(ValueError):
    """Data from which no loss can be computed: a non-finite unmasked token, a wrong length, an empty step."""


class EmptyStep(DataError):
    """A step without a single unmasked token on any rank."""


class GroupSizeError(DataError):
    """A prompt group of a step that is larger or smaller than samples_per_prompt."""


class RunError(RuntimeError):
    """The end of a run with correct settings and data: a full disk, a reward that does not return, a rank that is gone."""
