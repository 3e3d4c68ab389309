"""Reads a file of settings, as its suffix says: YAML, JSON or TOML. It makes plain values, and runs nothing."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.bounds import read_regular
from megatron_rl.files.json_values import parse_json

# A file of settings has some thousand bytes; the parsers take seconds for a megabyte.
LARGEST_FILE = 2**18


def read_settings_file(path: Path) -> dict[str, Any]:
    """The settings by name. ConfigError, which names the file, where it cannot be read or has none."""
    try:
        text = read_regular(path, LARGEST_FILE).decode("utf-8")
        parsers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": parse_json}
        value = parsers.get(path.suffix, parse_yaml)(text)
    # RecursionError: lists in lists. ValueError: what the parsers raise for another format.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {printable(' '.join(str(error).split()))[:400]}") from error
    if not isinstance(value or {}, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}: it must be key: value lines")
    return {str(key): value for key, value in (value or {}).items()}


def parse_yaml(text: str) -> Any:
    """The value of one document. Raises ValueError for all that is no plain YAML, and for aliases, with which a small text becomes
    a large value."""
    try:
        import yaml
    except ImportError as error:
        raise ValueError("pyyaml is not installed: pip install pyyaml, or write the file as JSON or TOML") from error

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise ValueError("an alias: write the value in each place")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)
    # What the constructors raise for a date that is none, or a tag on a value of another kind.
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(str(error)) from error
