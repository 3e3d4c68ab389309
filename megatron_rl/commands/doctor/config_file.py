"""Reads the file of --custom-config-path as a host would, with or without a YAML reader at hand; it never judges its keys."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.arguments import read_number, read_switch, read_whole_number
from megatron_rl.errors import ConfigError

FLAG = "--custom-config-path"
YAML_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def read_config_file(given: str, folder: Path) -> dict[str, object]:
    """Its keys; a host merges them over the command line. Raises ConfigError for what is no file of keys."""
    text = _text(given, folder)
    if find_spec("yaml") is None:
        # What launch-config writes: one `key: value` a line.
        pairs = [line.partition(":") for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        return {key.strip(): _scalar(value.strip()) for key, _, value in pairs}
    import yaml

    try:
        loaded = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{FLAG} {given} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{FLAG} {given} holds {type(loaded).__name__}: it must be key: value lines")
    return {str(key): value for key, value in loaded.items()}


def typed(given: Sequence[str]) -> object:
    """A number, true or false where a word is one; a flag without a word is a switch; several words stay words."""
    if not given:
        return True
    if len(given) > 1:
        return list(given)
    value = read_switch(read_whole_number(given[0]))
    return read_number(value) if isinstance(value, str) else value


def _scalar(value: str) -> object:
    """As YAML 1.1 reads it: text in quotes is text, a bare yes is true, a bare off false."""
    if value[:1] in ("'", '"'):
        return value.strip(value[0])
    return YAML_SWITCHES[value.lower()] if value.lower() in YAML_SWITCHES else typed([value])


def _text(given: str, folder: Path) -> str:
    if given.startswith("base64:"):
        try:
            return base64.b64decode(given.removeprefix("base64:")).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{FLAG} base64:... cannot be decoded: {error}") from error
    path = next((path for path in (Path(given), folder / given) if path.is_file()), None)
    if path is None:
        raise ConfigError(f"{FLAG} {given} is no file here: start from the folder that the launch starts from")
    return path.read_text(encoding="utf-8", errors="replace")
