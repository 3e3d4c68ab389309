"""Reads JSON strictly: a file of settings whose fields are asked for by kind, and a line of a JSON lines file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, DataError, printable
from megatron_rl.files.bounds import LARGEST_SETTINGS, check_depth, open_regular, read_regular

REQUIRED = object()
LARGEST_WHOLE = 2**31 - 1


def parse_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, for a key that an object has twice, and for values that are nested too deeply."""
    try:
        value = json.loads(text, object_pairs_hook=_object_of)
    except RecursionError as error:
        raise ValueError("lists or objects that are nested too deeply to be read") from error
    if isinstance(value, dict | list):
        check_depth(value)
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def parse_json_line(line: bytes, place: str) -> Any:
    """The value of a line in UTF-8. place: the file and the number of the line. DataError names it."""
    try:
        return parse_json(line.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({printable(str(error))})") from error


def numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a regular file from 1 on, one at a time. DataError where it cannot be read."""
    try:
        with open_regular(path) as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def finished_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """As numbered_lines, without a last one that a killed run has left unfinished."""
    return ((number, line) for number, line in numbered_lines(path) if line.endswith(b"\n"))


def read_json(path: str | Path, most: int = LARGEST_SETTINGS) -> Any:
    """The value of a regular file in UTF-8. Raises OSError and ValueError."""
    return parse_json(read_regular(path, most).decode("utf-8"))


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a file, whose fields are asked for by kind. null means a field that is left out.

    Each method raises ConfigError, which names the place and the field, for another kind or value, and for a field that is
    REQUIRED and not there.
    """

    content: Mapping[str, Any]
    place: str

    @classmethod
    def from_file(cls, path: Path, what: str) -> Fields:
        """what: of which kind the folder is not, where this file cannot be read."""
        try:
            content = read_json(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({printable(str(error))}): {path.parent} is {what}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path} holds {type(content).__name__}, and no object of settings: {path.parent} is {what}")
        return cls(content, str(path))

    def whole(self, name: str, default: Any = REQUIRED, *, least: int = 1, most: int = LARGEST_WHOLE) -> Any:
        value = self._given(name, default)
        if not self.has(name) or (type(value) is int and least <= value <= most):
            return value
        raise self.wrong(name, f"a whole number of {least} to {most}")

    def number(self, name: str, default: Any = REQUIRED, *, above: float = 0.0, below: float = 1e38) -> Any:
        value = self._given(name, default)
        if not self.has(name) or (type(value) in (int, float) and above < value < below):
            return value
        raise self.wrong(name, f"a number above {above:g} and below {below:g}")

    def switch(self, name: str, default: Any = REQUIRED) -> bool:
        value: bool = self._given(name, default)
        if isinstance(value, bool):
            return value
        raise self.wrong(name, "true or false")

    def items(self, name: str, kind: type) -> list[Any]:
        """A list of values of one kind; an empty one where it is left out."""
        value = self._given(name, [])
        if isinstance(value, list) and all(type(item) is kind for item in value):
            return value
        raise self.wrong(name, f"a list, each {'text' if kind is str else 'a whole number'}")

    def table(self, name: str) -> Fields:
        """An object in the object; an empty one where it is left out."""
        value = self._given(name, {})
        if isinstance(value, dict):
            return Fields(value, f"{self.place}: {name}")
        raise self.wrong(name, "an object of settings")

    def wrong(self, name: str, wanted: str) -> ConfigError:
        text = repr(self.content[name])
        return ConfigError(f"{self.place}: {name}={text[:80]}{'...' * (len(text) > 80)} must be {wanted}")

    def has(self, name: str) -> bool:
        return self.content.get(name) is not None

    def _given(self, name: str, default: Any) -> Any:
        if not self.has(name) and default is REQUIRED:
            raise ConfigError(f"{self.place} has no {name!r}")
        return self.content[name] if self.has(name) else default
