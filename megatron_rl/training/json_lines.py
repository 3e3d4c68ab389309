"""Reads one line of a JSON lines file strictly: any fault is a DataError that names the place."""

from __future__ import annotations

import json
from typing import Any

from megatron_rl.errors import DataError, printable


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
