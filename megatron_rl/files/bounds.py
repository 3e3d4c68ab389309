"""Opens regular files alone, and bounds what is read from one: its bytes, and how deep its values are nested."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

# Settings, indexes and headers of weights; the largest known index, of 90,000 tensors, has 9 MB.
LARGEST_SETTINGS = 2**24
MOST_DEPTH = 64
_CONTAINERS = frozenset([dict, list])


def open_regular(path: str | Path) -> BinaryIO:
    """The file, for reading. Raises OSError, also for what is no regular file: a fifo may wait for ever, a device has no end."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except ValueError as error:  # a name with a NUL, or one that the file system cannot have
        raise OSError(f"{error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def read_regular(path: str | Path, most: int = LARGEST_SETTINGS) -> bytes:
    """All bytes of a regular file. Raises OSError, also for more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"it has more than {most} bytes, which is no size of such a file")
    return content


def check_depth(value: Any, levels: int = MOST_DEPTH) -> None:
    """Raises ValueError for lists and dicts in more levels: what passes can be walked, printed and copied."""
    if levels == 0:
        raise ValueError(f"lists or objects that are nested too deeply to be read: more than {MOST_DEPTH} levels")
    values = value.values() if isinstance(value, dict) else value
    if not _CONTAINERS.isdisjoint(map(type, values)):  # long lists of numbers have none, which this finds without a loop in Python
        for child in values:
            if type(child) in _CONTAINERS:
                check_depth(child, levels - 1)
