"""Reads what torch.save wrote as plain data: numbers, text, containers, tensors. torch.load is not asked; no code of a file runs.

A file of torch.save is a zip archive whose members are stored one behind the other, from the first byte to the directory at its
end. Readers of zip differ where a file has gaps, a second directory or a prefix: one is shown other members than the next, and
torch.load hands some to TorchScript, which writes files. So an archive that is not exactly of this layout is refused.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megatron_rl.errors import printable
from megatron_rl.files.bounds import check_tree
from megatron_rl.files.plain_pickle import DISPATCH, PlainUnpickler, opcodes, plain_set

# APPNOTE.TXT of PKWARE: the end of the directory, its forms of 64 bits, an entry of it, a member, and what may stand behind one.
END, LOCATOR, END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
ENTRY, MEMBER = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
FULL16, FULL32, ZIP64 = 0xFFFF, 0xFFFFFFFF, 1
HAS_DESCRIPTOR, IS_UTF8 = 0x8, 0x800
# The members that torch.save writes, in a folder of any name; those with a dot say how, and are not needed to read it.
NAMES = re.compile(r"data\.pkl|data/\w+|version|byteorder|\.\w+(/\w+)?")
LARGEST_PICKLE = 2**31
OTHER_KIND = "an archive of another kind than torch.save's"


class Readable(Protocol):
    def seek(self, position: int, /) -> int: ...
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Member:
    start: int
    size: int
    checksum: int  # 0: torch was told to write none


def read_layout(file: Readable, size: int) -> dict[str, Member]:
    """The members of an archive of `size` bytes by name, without their folder. Raises ValueError for another layout."""
    names: dict[str, Member] = {}
    folders, position = set(), 0
    directory, start = _read_directory(file, size)
    for name, member_start, member in _entries(directory):
        folder, _, rest = name.partition("/")
        folders.add(folder)
        if not NAMES.fullmatch(rest) or len(folders) > 1 or rest in names:
            raise ValueError(f"{OTHER_KIND}: it holds {name}")
        if member_start != position:
            raise ValueError(f"{name} begins at byte {member_start}, and what stands before it ends at {position}")
        names[rest], position = _placed(file, name, member_start, member)
        if position > start:
            raise ValueError(f"{name} ends behind its archive")
    if position != start:
        raise ValueError(f"its directory begins at byte {start}, and its members end at {position}")
    if "data.pkl" not in names:
        raise ValueError(f"{OTHER_KIND}: it holds no data.pkl")
    return names


def _read_directory(file: Readable, size: int) -> tuple[bytes, int]:
    """The directory, and where it begins. Behind it stand the records that say where it is, and nothing else."""
    end = _unpacked(END, file, size - END.size, b"PK\x05\x06", "no archive, and torch.save writes one")
    values, position = [*end[3:7], *end[7:]], size - END.size
    _, disk, disk_of_directory, count_here, count, length, start, comment = end
    if disk or disk_of_directory or comment or count_here != count:
        raise ValueError("an archive in parts, or with a comment")
    file.seek(max(position - LOCATOR.size, 0))
    if file.read(4) == b"PK\x06\x07":
        position -= LOCATOR.size
        _, disk, where, disks = _unpacked(LOCATOR, file, position, b"PK\x06\x07")
        position -= END64.size
        if where != position or disk or disks != 1:
            raise ValueError("the end of its directory is not where it says")
        _, rest, _, _, disk, other, *values = _unpacked(END64, file, position, b"PK\x06\x06")
        given = count_here, count, length, start
        if (
            rest != END64.size - 12
            or disk
            or other
            or any(
                small not in (large, full)
                for small, large, full in zip(given, values, (FULL16, FULL16, FULL32, FULL32), strict=True)
            )
        ):
            raise ValueError("the two ends of its directory differ")
        count_here, count, length, start = values
    if count_here != count or start + length != position:
        raise ValueError(f"its directory ends at byte {start + length}, and its end stands at {position}")
    file.seek(start)
    directory = file.read(length)
    if count * ENTRY.size > length:
        raise ValueError(f"a directory of {length} bytes for {count} members")
    return directory, start


def _entries(directory: bytes) -> Iterator[tuple[str, int, tuple[Any, ...]]]:
    """(name, where the member begins, what its own header must say) of each."""
    position = 0
    while position < len(directory):
        if len(directory) - position < ENTRY.size or directory[position : position + 4] != b"PK\x01\x02":
            raise ValueError("its directory is damaged")
        _, _, _, flags, method, _, _, checksum, packed, size, name_size, extra_size, comment, disk, _, _, start = ENTRY.unpack_from(
            directory, position
        )
        position += ENTRY.size
        raw, extra = directory[position : position + name_size], directory[position + name_size :][:extra_size]
        position += name_size + extra_size
        if position > len(directory) or comment or disk:
            raise ValueError("its directory is damaged")
        name = raw.decode("utf-8")
        large = iter(_sizes_of_64_bits(extra))
        size, packed, start = (next(large, FULL32) if value == FULL32 else value for value in (size, packed, start))
        if method or packed != size or flags & ~(HAS_DESCRIPTOR | IS_UTF8):
            raise ValueError(f"{name} is compressed or encrypted, and torch.save stores its members as they are")
        yield name, start, (flags, raw, checksum, size)


def _sizes_of_64_bits(extra: bytes) -> tuple[int, ...]:
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == ZIP64 and length % 8 == 0 and position + 4 + length <= len(extra):
            return struct.unpack_from(f"<{length // 8}Q", extra, position + 4)
        position += 4 + length
    return ()


def _placed(file: Readable, name: str, start: int, expected: tuple[Any, ...]) -> tuple[Member, int]:
    """The member, and where what belongs to it ends."""
    flags, raw, checksum, size = expected
    _, _, own_flags, method, _, _, *sizes, name_size, extra_size = _unpacked(MEMBER, file, start, b"PK\x03\x04")
    content = start + MEMBER.size + name_size + extra_size
    if own_flags != flags or method or file.read(name_size) != raw:
        raise ValueError(f"{name} is another member in the directory than at its place")
    end = content + size
    if flags & HAS_DESCRIPTOR:
        for form in ("<4sLLL", "<4sLQQ") if size < FULL32 else ("<4sLQQ",):
            file.seek(end)
            if file.read(struct.calcsize(form)) == struct.pack(form, b"PK\x07\x08", checksum, size, size):
                return Member(content, size, checksum), end + struct.calcsize(form)
        raise ValueError(f"{name} does not end where the directory says")
    is_large = size >= FULL32 and sizes[1:] == [FULL32, FULL32]
    if sizes != [checksum, size, size] and not is_large:
        raise ValueError(f"{name} has another size in the directory than at its place")
    return Member(content, size, checksum), end


def _unpacked(
    form: struct.Struct, file: Readable, start: int, mark: bytes, problem: str = "its records are damaged"
) -> tuple[Any, ...]:
    if start < 0:
        raise ValueError(problem)
    file.seek(start)
    content = file.read(form.size)
    if len(content) < form.size or content[:4] != mark:
        raise ValueError(problem)
    return form.unpack(content)


# What a pickle of plain data calls: each builds a value and does nothing else.


class StandIn:
    """In the place of an object that was not read. tensors: those of its state, by their attribute."""

    tensors: Mapping[str, Tensor]

    def __new__(cls, *args, **kwargs):
        made = object.__new__(cls)
        made.tensors = {}
        return made

    def __init__(self, *args, **kwargs):
        pass

    def append(self, value):
        pass


@dataclass(frozen=True, slots=True)
class StorageKind:
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Storage:
    elements: Tensor  # [number of elements], of the file


_FLOATS = {"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16}
_WHOLE = {
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
STORAGES = {("torch", f"{name}Storage"): StorageKind(dtype) for name, dtype in (_FLOATS | _WHOLE).items()}


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(plain_set(items))


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _size(sizes: Any = ()) -> torch.Size:
    return torch.Size(sizes)


def _encoded(text: str, codec: str) -> bytes:
    """How a pickle of protocol 2 holds bytes."""
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise ValueError(f"bytes of the codec {codec!r}")
    return text.encode("latin-1")


CALLS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encoded,
    ("collections", "OrderedDict"): _ordered,
    **{(module, "set"): plain_set for module in ("builtins", "__builtin__")},
    **{(module, "frozenset"): _frozenset for module in ("builtins", "__builtin__")},
    ("torch", "Size"): _size,
}


class ArchiveUnpickler(PlainUnpickler):
    """The values of data.pkl. `not_read`: the names of what has a StandIn in its place."""

    def __init__(self, file: Readable, size: int, members: Mapping[str, Member]):
        self.file, self.members, self.elements_left = file, members, 8 * size
        self.storages: dict[str, Tensor] = {}  # bytes
        self.truths: dict[str, Tensor] = {}  # of the storages that are booleans
        self.not_read: dict[str, None] = {}
        super().__init__(io.BytesIO(self.read_member("data.pkl", LARGEST_PICKLE)), encoding="utf-8")

    def read_member(self, name: str, most: int) -> bytearray:
        member = self.members.get(name)
        if member is None or member.size > most:
            raise ValueError(f"{name} is missing" if member is None else f"{name} has {member.size} bytes: at most {most} are read")
        self.file.seek(member.start)
        content = bytearray(self.file.read(member.size))
        if len(content) != member.size or member.checksum not in (0, zlib.crc32(content)):
            raise ValueError(f"the checksum of {name} differs: it was damaged, or is being written")
        return content

    def find_plain(self, module: str, name: str) -> object:
        if (module, name) in (("torch._utils", "_rebuild_tensor"), ("torch._utils", "_rebuild_tensor_v2")):
            return self.tensor
        if (module, name) in CALLS:
            return partial(self.call, CALLS[module, name])
        found = STORAGES.get((module, name))
        if found is None:
            self.not_read[printable(f"{module}.{name}")] = None
        return found or StandIn

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Its result is a copy of what it is given, and a few bytes may give the same text or list again and again."""
        self.spend(sum(len(part) for part in args if isinstance(part, str | list | tuple)))
        return function(*args)

    def spend(self, elements: int) -> None:
        self.elements_left -= elements
        if self.elements_left < 0:
            raise ValueError("tensors, sets or bytes of more elements than the file has room for")

    def persistent_load(self, pid: Any) -> Storage:
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[2]) is not str:
            raise ValueError("a reference that is no storage of a tensor")
        _, kind, key, _, count = pid
        if not isinstance(kind, StorageKind):
            raise ValueError("a tensor of a type that is not read")
        if key not in self.storages:
            content = self.read_member(f"data/{key}", 2**62)
            self.storages[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        raw = self.storages[key]
        if type(count) is not int or count * kind.dtype.itemsize != raw.numel():
            raise ValueError(f"data/{key} has {raw.numel()} bytes, which are not {count} elements of {kind.dtype}")
        if kind.dtype != torch.bool:
            return Storage(raw.view(kind.dtype))
        if key not in self.truths:  # a copy, so one alone
            self.truths[key] = torch.ne(raw, 0)
        return Storage(self.truths[key])

    def tensor(self, storage: Any, offset: Any, sizes: Any, strides: Any, *others: Any) -> Tensor:
        if not isinstance(storage, Storage) or not all(isinstance(part, tuple) and len(part) <= 64 for part in (sizes, strides)):
            raise ValueError("a tensor without storage, sizes and strides")
        if not all(type(part) is int and 0 <= part < 2**62 for part in (offset, *sizes, *strides)):
            raise ValueError("a tensor whose sizes and strides are no numbers of at least 0")
        self.spend(math.prod(sizes))
        return storage.elements.as_strided(sizes, strides, offset)

    def load_build(self) -> None:
        """A state would be attributes: a StandIn keeps its tensors by their names, and everything else is left out."""
        self.check_build()
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, StandIn) and type(state) is dict:
            made.tensors = {name: value for name, value in state.items() if type(name) is str and isinstance(value, Tensor)}

    def set_items(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], StandIn):
            super().set_items(items)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**DISPATCH, **opcodes(BUILD=load_build)}


def read_archive(file: Readable, size: int) -> tuple[Any, list[str]]:
    """(the value of torch.save, the names of what was not read), of `size` bytes from the start of the file.

    Memory: at most the value's, which its bytes bound. Raises one of DAMAGED for what cannot be read.
    """
    members = read_layout(file, size)
    unpickler = ArchiveUnpickler(file, size, members)
    if "byteorder" in members and unpickler.read_member("byteorder", 16) != b"little":
        raise ValueError("it was written on a big-endian machine")
    value = unpickler.load()
    # Each value has a byte at least; what is shared counts at each place, and a host shares little.
    check_tree(value, most_values=10**6 + 8 * members["data.pkl"].size)
    return value, sorted(unpickler.not_read)
