"""Unpickles only classes and functions that the caller allows by name. It imports and calls nothing else that a file names."""

from __future__ import annotations

import enum
import pickle
import struct
import types
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

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


# Opcode -> its handler.
_LOAD: Mapping[int, Callable[[Any], None]] = pickle._Unpickler.dispatch


class PlainUnpickler(pickle._Unpickler):  # the one in Python: the one in C allocates as much memory as a damaged file asks for
    """Asks `find_plain` for each class and function that the file names.

    A pickle can also set attributes of a class or function, which would change this process: that raises NotPlain.
    """

    def find_class(self, module: str, name: str) -> object:
        return self.find_plain(module, name)

    def find_plain(self, module: str, name: str) -> object:
        """The object for module.name; raises NotPlain where it is not allowed. `import_plain` imports the named object."""
        raise NotPlain(f"it asks for {module}.{name}")

    def import_plain(self, module: str, name: str) -> object:
        return super().find_class(module, name)

    stack: list[Any]  # an attribute of the base class; its type stub lacks this and load_build

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type | types.FunctionType | types.BuiltinFunctionType | enum.Enum):
            raise NotPlain(f"it sets attributes of {self.stack[-2]!r}")
        _LOAD[pickle.BUILD[0]](self)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**_LOAD, pickle.BUILD[0]: load_build}
