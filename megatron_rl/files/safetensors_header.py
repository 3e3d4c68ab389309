"""Reads the header of a safetensors file: which tensors it holds, of which type and shape, and where. No tensor is read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from megatron_rl.files.bounds import LARGEST_SETTINGS, open_regular
from megatron_rl.files.json_values import parse_json

# Bytes of an element. Weights that are integers, booleans or of 8 bits belong to a scale in another place.
AGAIN = "fetch the file again"
FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
BYTES = {"U8": 1}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """start, end: bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_safetensors_header(path: str | Path, *, takes_bytes: bool = False) -> dict[str, TensorEntry]:
    """By the tensor's name.

    Raises OSError, and ValueError unless the file is exactly the header and its tensors, one behind the other, all of FLOATS, or
    with takes_bytes of BYTES.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size, LARGEST_SETTINGS):
            raise ValueError(
                f"a header of {length} bytes in a file of {size + 8}: it is cut short, or no safetensors file: {AGAIN}"
            )
        content = parse_json(file.read(length).decode("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"its header is no object: {AGAIN}")
    sizes = FLOATS | BYTES if takes_bytes else FLOATS
    entries = {name: _entry_of(name, value, sizes) for name, value in content.items() if name != "__metadata__"}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise ValueError(f"{name} begins at byte {entry.start}, and the tensor before it ends at {end}: {AGAIN}")
        end = entry.end
    if end != size - length:
        raise ValueError(f"its tensors have {end} bytes, and the file has {size - length} for them: {AGAIN}")
    return entries


def _entry_of(name: str, value: Any, sizes: Mapping[str, int]) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has no dtype, shape and data_offsets of two bytes: {AGAIN}")
    if dtype not in sizes:
        raise ValueError(
            f"{name} is {dtype}; weights are read as {', '.join(FLOATS)} alone: take the folder of the model that is not quantised"
        )
    if offsets[1] - offsets[0] != math.prod(shape) * sizes[dtype]:
        raise ValueError(f"{name} of {dtype} {shape} has {offsets[1] - offsets[0]} bytes: {AGAIN}")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 8 and all(type(size) is int and 0 <= size < 2**48 for size in value)
