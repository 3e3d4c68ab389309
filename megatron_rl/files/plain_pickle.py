"""Unpickles only classes and functions that the caller allows by name. It imports and calls nothing else that a file names."""

from __future__ import annotations

import enum
import pickle
import struct
import types
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

# The exceptions of reading a file that is cut short, overwritten or of another format.
DAMAGED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
)


class NotPlain(pickle.UnpicklingError):
    """A file asks for a class or function that is not plain data."""


def opcodes(**handlers: Callable[[Any], None]) -> dict[int, Callable[[Any], None]]:
    """A table of an unpickler, by the opcodes' names."""
    return {getattr(pickle, name)[0]: handler for name, handler in handlers.items()}


class PlainUnpickler(pickle._Unpickler):  # the one in Python: the one in C allocates as much memory as a damaged file asks for
    """Asks `find_plain` for each class and function that the file names.

    A pickle can also set attributes of a class or function, which would change this process, and share buffers with it: that raises
    NotPlain. A whole number of more than 64 bits is damage: no file of ours or of a host has one.
    """

    def find_class(self, module: str, name: str) -> object:
        return self.find_plain(module, name)

    def find_plain(self, module: str, name: str) -> object:
        """The object for module.name; raises NotPlain where it is not allowed. `import_plain` imports the named object."""
        raise NotPlain(f"it asks for {module}.{name}")

    def import_plain(self, module: str, name: str) -> object:
        return super().find_class(module, name)

    stack: list[Any]  # an attribute of the base class; its type stub lacks this and the handlers

    def check_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | enum.Enum):
            raise NotPlain(f"it sets attributes of {target!r}")

    def load_build(self) -> None:
        self.check_build()
        _LOAD[pickle.BUILD[0]](self)

    def refuse(self) -> None:
        raise NotPlain("it asks for a buffer or for an extension of pickle")


def _whole_number(opcode: bytes) -> Callable[[Any], None]:
    def load(self: PlainUnpickler) -> None:
        _LOAD[opcode[0]](self)
        if not -(2**63) <= self.stack[-1] < 2**64:
            raise pickle.UnpicklingError("it has a whole number of more than 64 bits")

    return load


_LOAD: Mapping[int, Callable[[Any], None]] = pickle._Unpickler.dispatch
_REFUSED = ("BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4")
DISPATCH: Mapping[int, Callable[[Any], None]] = {
    **_LOAD,
    **opcodes(BUILD=PlainUnpickler.load_build, **dict.fromkeys(_REFUSED, PlainUnpickler.refuse)),
    **opcodes(**{name: _whole_number(getattr(pickle, name)) for name in ("INT", "LONG", "LONG1", "LONG4")}),
}
PlainUnpickler.dispatch = dict(DISPATCH)
