"""Reads one line of a JSON lines file strictly: any fault is a DataError that names the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, DataError, printable


def read_saved(path: str | Path, field: str) -> Any:
    """The field of a JSON file that a run wrote. ConfigError where it cannot be read."""
    try:
        return json.loads(Path(path).read_bytes())[field]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read as {field!r} of a run ({type(error).__name__}): restore it from where the run was copied, and "
            "resume with the --prompts and --hf-checkpoint that it began with"
        ) from error


def parse_json_line(line: bytes, place: str, remedy: str = "") -> Any:
    """The value of a line in UTF-8. place: the file and the number of the line."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        where = f"byte {error.object[error.start]:#x} at position {error.start}"
        raise DataError(f"{place}: not UTF-8 ({where}); save the file as UTF-8") from error
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({printable(str(error))}){remedy}") from error
    except RecursionError as error:
        raise DataError(f"{place}: lists or objects that are nested too deeply to be read{remedy}") from error
