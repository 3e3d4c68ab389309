"""Reads a file of a launch's settings, as its suffix says: YAML, JSON or TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.bounds import is_regular, read_regular
from megatron_rl.files.json_values import parse_json
from megatron_rl.files.toml_values import parse_toml
from megatron_rl.files.yaml_values import parse_yaml


def read_settings_file(path: Path) -> dict[str, Any]:
    """The settings by name. ConfigError, which names the file, where it cannot be read or has none."""
    if not is_regular(path):
        raise ConfigError(f"{path} is no file here: start from the folder that the launch starts from")
    try:
        text = read_regular(path).decode("utf-8")
        value = parse_toml(text, path) if path.suffix == ".toml" else None
        value = parse_json(text) if path.suffix == ".json" else value
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {printable(str(error))}") from error
    value = parse_yaml(text, path) or {} if value is None else value
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}: it must be key: value lines")
    return {str(key): value for key, value in value.items()}
