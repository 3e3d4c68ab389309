"""Reads a file of torch.save as plain data: numbers, text, containers, tensors and arrays. It must never run code of the file.

Every other object becomes a stand-in, whatever the file asks for: a class that takes any arguments and does nothing. So a host's
dump is read without the host, and one from a stranger without risk. Arrays and scalars of numpy are decoded here, because numpy's
own constructors trust what they are given.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from types import ModuleType

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


NUMPY = {
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): StandIn,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): Scalar for core in ("core", "_core")},
}


def _decode(kind: StandIn, content: bytes, count: int) -> list:
    order = ">" if kind.state[1] == ">" else "<"
    return list(struct.unpack(f"{order}{count}{CODES[kind.arguments[0]]}", content))


def load_plain(path: str, flag: str) -> tuple[object, list[str]]:
    """(the content, the names of what was not read). DataError names the flag, the file and what is wrong with it."""
    if not Path(path).is_file():
        problem = "is a folder" if Path(path).is_dir() else "cannot be read: there is no such file"
        raise DataError(f"{flag} {path} {problem}; give the file that the host wrote")
    not_read: dict[str, None] = {}
    try:
        kind = _kind_of_archive(path)
        content = None if kind else torch.load(path, map_location="cpu", pickle_module=_pickle_module(not_read), weights_only=False)
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error}") from error
    except DAMAGED as error:
        text = printable(f"{type(error).__name__}: {error}")
        raise DataError(f"{flag} {path} is damaged, or not of this kind: {text}") from error
    if kind:
        raise DataError(f"{flag} {path} is {kind}: a file of torch.save, which is a zip archive, is needed")
    return content, [printable(name) for name in not_read]


def plain_number(value: object) -> object:
    """A scalar of numpy or of a tensor as Python's number; anything else as it is."""
    if isinstance(value, Scalar) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        try:
            return value.item()
        except DAMAGED:
            return value
    return value


def _kind_of_archive(path: str) -> str | None:
    """What the file is where it is not torch.save's. torch.load would unpickle one kind by itself and hand another to torch.jit.

    Raises ValueError for an archive that is larger inside than outside: a small file would fill the memory.
    """
    if not zipfile.is_zipfile(path):
        return "no archive"
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    names = {member.filename.rpartition("/")[2] for member in members}
    if "constants.pkl" in names:
        return "a TorchScript archive"
    if "data.pkl" not in names:
        return "an archive of another kind"
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} is compressed, which torch.save never does")
    size, inside = Path(path).stat().st_size, sum(member.file_size for member in members)
    if inside > size:
        raise ValueError(f"its members hold {inside} bytes together, and the file has {size}")
    return None


def _pickle_module(not_read: dict[str, None]) -> ModuleType:
    """What torch.load takes for the module pickle."""

    class Unpickler(PlainUnpickler):
        def find_plain(self, module: str, name: str) -> object:
            if (module, name) in PLAIN:
                return self.import_plain(module, name)
            if (module, name) in NUMPY:
                return NUMPY[module, name]
            not_read[f"{module}.{name}"] = None
            return StandIn

    module = ModuleType("plain_pickle")
    vars(module)["Unpickler"] = Unpickler
    return module
