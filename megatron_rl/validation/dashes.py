"""Flags whose dash is another character than a hyphen, as chats and word processors make of --."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_rl.errors import ConfigError

_DASHES = r"\u2010-\u2015\u2212\ufe58\ufe63\uff0d"
_FOREIGN = re.compile(rf"-?(?P<dash>[{_DASHES}])[-{_DASHES}]?(?P<name>[A-Za-z][\w.-]*)(=.*)?", re.DOTALL)


def foreign_dashes(words: Iterable[str]) -> list[str]:
    found = {word[0].partition("=")[0]: word for word in map(_FOREIGN.fullmatch, words) if word is not None}
    return [
        f"{flag} begins with a dash that is no hyphen (U+{ord(word['dash']):04X}): type --{word['name']}"
        for flag, word in found.items()
    ]


def require_hyphens(words: Iterable[str]) -> None:
    """Raises ConfigError with each such flag. A parser takes it for a value of the flag before it."""
    if found := foreign_dashes(words):
        raise ConfigError(found)
