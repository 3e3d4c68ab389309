"""Unpickles only classes and functions that the caller allows by name. It imports and calls nothing else that a file names."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import struct
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
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


SCALARS = frozenset([str, bytes, int, float, bool, types.NoneType])


def check_keys(keys: Iterable[Any]) -> None:
    """Keys are hashed, and the hash of nested tuples that share their parts takes for ever: so a key is a scalar, a tuple of them,
    or a dataclass that holds only these."""
    for key in keys:
        is_record = dataclasses.is_dataclass(key)
        parts = [getattr(key, one.name, None) for one in dataclasses.fields(key)] if is_record else [key]
        for part in parts:
            if type(part) not in SCALARS and not (isinstance(part, tuple) and SCALARS.issuperset(map(type, part))):
                raise pickle.UnpicklingError(f"a key of the kind {type(part).__name__}: keys are numbers or text")


def plain_set(items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise pickle.UnpicklingError("a set that is made of no list")
    check_keys(items)
    return set(items)


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
        if isinstance(target, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | partial | enum.Enum):
            raise NotPlain(f"it sets attributes of {target!r}")

    def load_build(self) -> None:
        self.check_build()
        _LOAD[pickle.BUILD[0]](self)

    pop_mark: Callable[[], list[Any]]

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def set_items(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target) not in (dict, OrderedDict):
            raise pickle.UnpicklingError(f"items of {type(target).__name__}")
        check_keys(keys)
        target.update(zip(keys, items[1::2], strict=True))

    def load_additems(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set:
            raise pickle.UnpicklingError(f"items of {type(target).__name__}")
        target |= plain_set(items)

    def load_frozenset(self) -> None:
        self.stack.append(frozenset(plain_set(self.pop_mark())))

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
    **opcodes(SETITEM=PlainUnpickler.load_setitem, SETITEMS=PlainUnpickler.load_setitems),
    **opcodes(ADDITEMS=PlainUnpickler.load_additems, FROZENSET=PlainUnpickler.load_frozenset),
    **opcodes(**{name: _whole_number(getattr(pickle, name)) for name in ("INT", "LONG", "LONG1", "LONG4")}),
}
PlainUnpickler.dispatch = dict(DISPATCH)
