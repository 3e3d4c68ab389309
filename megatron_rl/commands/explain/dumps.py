"""Reads what miles and slime write with --save-debug-rollout-data, a file of torch.save, as plain data. No code of the file runs.

Every object that is no number, text, container, tensor or array becomes a stand-in, whatever the file asks for: a class that takes
any arguments and does nothing. So a dump is read without the host, and one from a stranger without risk. Arrays and scalars of
numpy are decoded here, because numpy's own constructors trust what they are given.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_rl.errors import DataError, printable
from megatron_rl.plain_pickle import DAMAGED, PlainUnpickler

# What pickle calls for plain data: none of it does more than build the value.
PLAIN = frozenset(
    [
        ("_codecs", "encode"),
        ("collections", "OrderedDict"),
        *((module, name) for module in ("builtins", "__builtin__") for name in ("frozenset", "set")),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
    ]
)
# numpy's names of element types -> those of struct.
CODES = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f4": "f", "f8": "d"}


class StandIn:
    """In the place of an object that was not read."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        self.arguments = args

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        pass


class Array(StandIn):
    """numpy.ndarray: its state is (version, shape, element type, is Fortran's order, bytes)."""

    def tolist(self) -> list:
        """The elements of a row of numbers. ValueError for anything else."""
        _, shape, kind, _, content = self.state
        if len(shape) != 1:
            raise ValueError(f"an array of {len(shape)} dimensions is no list of numbers")
        return _decode(kind, content, shape[0])


class Scalar(StandIn):
    """numpy.core.multiarray.scalar(element type, bytes)."""

    def item(self) -> int | float | bool:
        kind, content = self.arguments
        return _decode(kind, content, 1)[0]


NUMPY: dict[tuple[str, str], type] = {("numpy", "ndarray"): Array, ("numpy", "dtype"): StandIn}
for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
    NUMPY |= {(core, "_reconstruct"): Array, (core, "scalar"): Scalar}


def _decode(kind: StandIn, content: bytes, count: int) -> list:
    order = ">" if kind.state[1] == ">" else "<"
    return list(struct.unpack(f"{order}{count}{CODES[kind.arguments[0]]}", content))


def load_samples(path: str, flag: str) -> tuple[list, list[str]]:
    """(the samples of {"samples": [Sample.to_dict(), ...]}, or of that list alone; the names of what was not read). DataError names
    the flag, the file and what is wrong with it."""
    if not Path(path).is_file():
        problem = "is a folder" if Path(path).is_dir() else "cannot be read: there is no such file"
        raise DataError(f"{flag} {path} {problem}; give the file that the host wrote")
    not_read: dict[str, None] = {}

    class Unpickler(PlainUnpickler):
        def find_plain(self, module: str, name: str) -> object:
            if (module, name) in PLAIN:
                return self.import_plain(module, name)
            if (module, name) not in NUMPY:
                not_read[printable(f"{module}.{name}")] = None
            return NUMPY.get((module, name), StandIn)

    pickle_module = ModuleType("plain_pickle")  # what torch.load takes for the module pickle
    vars(pickle_module)["Unpickler"] = Unpickler
    try:
        if kind := _kind_of_archive(path):
            raise DataError(f"{flag} {path} is {kind}: a file of torch.save, which is a zip archive, is needed")
        content = torch.load(path, map_location="cpu", pickle_module=pickle_module, weights_only=False)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error}") from error
    except DAMAGED as error:
        text = printable(f"{type(error).__name__}: {error}")
        raise DataError(f"{flag} {path} is damaged, or not of this kind: {text}") from error
    samples, found = content, type(content).__name__
    if isinstance(content, dict):
        samples, found = content.get("samples"), f"a dict with the keys {printable(', '.join(map(str, content)))}"
    if not isinstance(samples, list) or not samples:
        raise DataError(f'{flag} {path} holds {found}: a list of samples is needed, or a dict with one at "samples"')
    return samples, sorted(not_read)


def plain_number(value: Any) -> Any:
    """A scalar of numpy or of a tensor as Python's number; anything else as it is."""
    if isinstance(value, Scalar) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        try:
            return value.item()
        except DAMAGED:
            return value
    return value


def _kind_of_archive(path: str) -> str | None:
    """What the file is where it is not torch.save's. torch.load would unpickle one kind by itself and hand another to torch.jit.

    Raises ValueError for an archive that is larger inside than outside: a small file would fill the memory. torch.save compresses
    nothing.
    """
    if not zipfile.is_zipfile(path):
        return "no archive"
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    names = {member.filename.rpartition("/")[2] for member in members}
    if "constants.pkl" in names or "data.pkl" not in names:  # TorchScript has both
        return "an archive of another kind"
    size, inside = Path(path).stat().st_size, sum(member.file_size for member in members)
    if inside > size:
        raise ValueError(f"its members hold {inside} bytes together, and the file has {size}")
    return None
