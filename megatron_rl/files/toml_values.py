"""Reads TOML of settings, bounded in size, depth and digits. tomllib parses: it makes plain values alone."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from typing import Any

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.bounds import MOST_DEPTH, check_tree

# A file of a launch has some thousand bytes.
LARGEST_TOML = 2**18
# TOML has whole numbers of 64 bits; tomllib reads any, and Python prints none of some thousand digits.
LARGEST_WHOLE = 2**63
# A key of so many parts: tomllib takes time by the square of their number.
LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MOST_DEPTH}}}""")


def parse_toml(text: str, name: object) -> dict[str, Any]:
    """The settings of one file. ConfigError, which names the file, for all that is no TOML or beyond a bound."""
    if len(text) > LARGEST_TOML:
        raise ConfigError(f"{name} has {len(text)} characters: at most {LARGEST_TOML} are read")
    try:
        if LONG_KEY.search(text):
            raise ValueError(f"a key of more than {MOST_DEPTH} parts")
        value = tomllib.loads(text)
        check_tree(value, most_values=len(text) + 1)
        _check_numbers([value])
    # RecursionError: arrays in arrays. ValueError: what tomllib raises for bad TOML, and Python for a number of too many digits.
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is no TOML: {printable(' '.join(str(error).split()))[:400]}") from error
    return value


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, dict | list):
            _check_numbers(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and abs(value) > LARGEST_WHOLE:
            raise ValueError("a whole number of more than 64 bits")
