"""The errors a user meets: what was given, what is allowed, what to do; never raised for our own mistakes."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """The text with control characters, newlines among them, as escapes: what a file holds writes no lines of its own."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class ConfigError(ValueError):
    """A setting that would train on a wrong scale, or that nothing would honour. `problems` holds one line for each finding."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            super().__init__(f"{len(self.problems)} problems:\n{lines}")


class DataError(ValueError):
    """A batch that no loss can be computed from: a non-finite unmasked token, a wrong length, an empty step."""


class RunError(RuntimeError):
    """What ends a run that was set up rightly: a full disk, a reward that does not return, a rank that is gone."""
