"""Opens regular files alone, and bounds what was read from one: its bytes, how deep its values are nested, how many they are."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

# Settings, indexes and headers of weights; the largest known index, of 90,000 tensors, has 9 MB.
LARGEST_SETTINGS = 2**24
MOST_DEPTH = 64
CONTAINERS = frozenset([dict, list, tuple, set, frozenset, OrderedDict])


def open_regular(path: str | Path) -> BinaryIO:
    """The file, for reading. Raises OSError, also for what is no regular file: a fifo may wait for ever, a device has no end."""
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
        # Not blocking: something else may stand there by now.
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") if is_regular else None
    except ValueError as error:  # a name with a NUL, or one that the file system cannot have
        raise OSError(f"{error}") from error
    if file is not None and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    if file is not None:
        file.close()
    raise OSError("it is no regular file")


def read_regular(path: str | Path, most: int = LARGEST_SETTINGS) -> bytes:
    """All bytes of a regular file. Raises OSError, also for more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"it has more than {most} bytes, which is no size of such a file")
    return content


def check_regular(folder: Path, patterns: Sequence[str], most: int = 2**28) -> None:
    """Raises OSError for an entry of the folder that is no regular file, or too large: before a library reads it."""
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if not path.is_file() or path.stat().st_size > most:
            raise OSError(f"{path.name} is no regular file of at most {most} bytes")


def lines_of(path: str | Path, most: int = 2**31) -> Iterator[bytes]:
    """The lines of a regular file, one at a time. Raises OSError, also for a line of more than `most` bytes."""
    with open_regular(path) as file:
        while line := file.readline(most + 1):
            if len(line) > most:
                raise OSError(f"a line has more than {most} bytes")
            yield line


def check_tree(value: Any, *, most_values: int, most_depth: int = MOST_DEPTH) -> None:
    """Raises ValueError for values that are nested too deeply, contain themselves, or are too many when each place where a shared
    one stands counts. What passes can be walked, printed and copied. Each container is looked at once."""
    sizes: dict[int, tuple[int, int]] = {}  # id -> values in it, depth of it
    entered: set[int] = set()
    stack = [(value, False)] if type(value) in CONTAINERS else []
    while stack:
        item, is_counted = stack.pop()
        if is_counted:
            inner = [sizes[id(child)] for child in _containers_in(item)]
            count, depth = len(item) + sum(size for size, _ in inner), 1 + max((depth for _, depth in inner), default=0)
            if depth > most_depth:
                raise ValueError(f"lists or objects that are nested too deeply to be read: more than {most_depth} levels")
            if count > most_values:
                raise ValueError(f"more than {most_values} values, each counted wherever it stands")
            entered.discard(id(item))
            sizes[id(item)] = count, depth
        elif id(item) in entered:
            raise ValueError("a list or an object that contains itself")
        elif id(item) not in sizes:
            entered.add(id(item))
            stack.append((item, True))
            stack += ((child, False) for child in _containers_in(item))


def _containers_in(value: Collection[Any]) -> list[Any]:
    groups = (value.keys(), value.values()) if isinstance(value, Mapping) else (value,)
    # Long lists of numbers have none, which this finds without a loop in Python.
    return [
        child for group in groups if not CONTAINERS.isdisjoint(map(type, group)) for child in group if type(child) in CONTAINERS
    ]
