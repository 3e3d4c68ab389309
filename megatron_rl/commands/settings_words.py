"""`megatron-rl train --settings FILE`: the flags of a file, YAML, TOML or JSON, as the words that would be typed."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.files.settings_file import read_settings_file
from megatron_rl.train.options import TrainOptions
from megatron_rl.validation import field_of, flag_of

SETTINGS = "--settings"


def with_settings_file(arguments: Sequence[str]) -> list[str]:
    """The arguments with the flags of the file before them, so that a flag that is typed wins. Raises ConfigError for a file that
    cannot be read, two of them, and a value that no flag has."""
    paths, rest = [], []
    words = iter(arguments)
    for word in words:
        name, is_joined, value = word.partition("=")
        if name != SETTINGS:
            rest.append(word)
            continue
        path = value if is_joined else next(words, "")
        if not path or path.startswith("--"):
            raise ConfigError(f"{SETTINGS} needs a file: YAML, TOML or JSON, with a line for each flag, as lr: 0.001")
        paths.append(path)
    if len(paths) > 1:
        raise ConfigError(f"{SETTINGS} is given {len(paths)} times ({', '.join(paths)}): one file has the settings of a run")
    return [*(word for path in paths for word in words_of(path)), *rest]


def words_of(path: str) -> list[str]:
    found: list[str] = []
    problems = []
    for name, value in read_settings_file(Path(path)).items():
        try:
            found += _words(flag_of(field_of(f"--{name}")), value)
        except ConfigError as error:
            problems.append(f"{path}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


def _words(flag: str, value: Any) -> Iterator[str]:
    name = field_of(flag)
    if flag == SETTINGS:
        raise ConfigError("settings: a file of settings names no other file; remove it")
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        raise ConfigError(f"{name} is a {kind}: write one line for each flag, {name}: value")
    is_switch, can_be_off = _switch(name)
    if isinstance(value, bool) and is_switch:
        if value:
            yield flag
        elif can_be_off:
            yield f"--no-{flag.removeprefix('--')}"
    elif value is not None:
        yield f"{flag}={str(value).lower() if isinstance(value, bool) else value}"


def _switch(name: str) -> tuple[bool, bool]:
    """(whether the flag is a switch, whether it has a form that turns it off: one that is off by default has none)."""
    for settings in (TrainOptions, PolicyLossConfig):
        kind = typing.get_type_hints(settings).get(name)
        if kind in (bool, bool | None):
            default = next(field.default for field in dataclasses.fields(settings) if field.name == name)
            return True, default is not False
    return False, False
