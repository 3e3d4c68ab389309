"""Reads a launch line of pydantic-config, as prime-rl has it: files after an @, and --a.b-c VALUE for the setting a.b_c.

    rl @ base.toml @ more.toml --trainer @ trainer.toml --trainer.loss.type custom --no-clean

A later file wins over an earlier one, a file of a section over a file of all settings, and the line over files. A value that only
the shell knows is UNKNOWN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.hosts.door import ReadFile
from megatron_rl.hosts.settings import UNKNOWN, read_value

SIGN = "@"


def read_pydantic_line(words: Sequence[str], read_file: ReadFile) -> tuple[dict[str, Any], list[str]]:
    """(the settings, nested; files that only the shell knows). words: those behind the program. Raises ConfigError for a file that
    cannot be read."""
    settings, unknown = dict[str, Any](), []
    parts = [*_parts(words)]
    for name, value in sorted(parts, key=lambda part: bool(part[0])):
        if not isinstance(value, Path):
            continue
        if read_value(str(value)) is UNKNOWN:
            unknown.append(str(value))
        else:
            settings = merged(settings, _nested(name, dict(read_file(value))))
    for name, value in parts:
        if not isinstance(value, Path):
            settings = merged(settings, _nested(name, value))
    return settings, unknown


def _parts(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each setting, a Path for a file; the name "" of a file of all settings."""
    at = 0
    while at < len(words):
        word, behind = words[at], words[at + 1] if at + 1 < len(words) else ""
        name, _, value = word[2:].partition("=")
        at += 1
        if word == SIGN:
            yield "", Path(behind)
        elif not word.startswith("--") or not name:
            continue
        elif "=" in word:
            yield name, _value(value)
            continue
        elif behind.startswith(SIGN):
            at += behind == SIGN
            yield name, Path(behind[1:] or "".join(words[at : at + 1]))
        elif behind and not behind.startswith("--"):
            yield name, _value(behind)
        else:
            yield name.removeprefix("no-"), not name.startswith("no-")
            continue
        at += 1


def _value(text: str) -> Any:
    if text == "None":
        return None
    try:
        return json.loads(text) if text.startswith(("{", "[")) and read_value(text) is not UNKNOWN else read_value(text)
    except (ValueError, RecursionError):
        return text


def _nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.replace("-", "_").split(".") if name else []):
        value = {part: value}
    return dict(value)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, of which those above win."""
    both = {name: merged(below[name], value) for name, value in above.items() if _is_deeper(below.get(name), value)}
    return {**below, **above, **both}


def _is_deeper(below: Any, above: Any) -> bool:
    return isinstance(below, Mapping) and isinstance(above, Mapping)
