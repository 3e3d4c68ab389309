"""Unpickles what a file may ask for, by name, and nothing else. It must never import or call what only the file names."""

from __future__ import annotations

import enum
import pickle
import struct
import types
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

# What reading a file can raise that is cut short, overwritten or was never what its name says.
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
    """A file asks for what is no plain data."""


# By opcode.
_LOAD: Mapping[int, Callable[[Any], None]] = pickle._Unpickler.dispatch


class PlainUnpickler(pickle._Unpickler):  # the one in Python: that in C allocates what a damaged file asks for
    """Asks `find_plain` for whatever the file names, and leaves what it gave as it was.

    A pickle can also set attributes of a class or function that it was given, which would change this process: it raises NotPlain.
    """

    def find_class(self, module: str, name: str) -> object:
        return self.find_plain(module, name)

    def find_plain(self, module: str, name: str) -> object:
        """What stands for module.name, or raises NotPlain. `import_plain` gives the thing itself."""
        raise NotPlain(f"it asks for {module}.{name}")

    def import_plain(self, module: str, name: str) -> object:
        return super().find_class(module, name)

    stack: list[Any]  # of the base class, whose stub has neither this nor load_build

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type | types.FunctionType | types.BuiltinFunctionType | enum.Enum):
            raise NotPlain(f"it sets attributes of {self.stack[-2]!r}")
        _LOAD[pickle.BUILD[0]](self)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**_LOAD, pickle.BUILD[0]: load_build}
