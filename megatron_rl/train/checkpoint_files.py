"""Checks the files of a checkpoint: their checksums, and that they contain only plain data.

A checkpoint may come from another person. torch reads its `.metadata` with pickle.load, and objects that are no tensors with
weights_only=False. Megatron-Core 0.13, 0.17 and 0.18 read common.pt in the same way. All three would run code that a file names. So
`.metadata` is read here first by an unpickler that knows its classes alone, and the others with weights_only=True. Tensors are read
so by torch itself.
"""

from __future__ import annotations

import enum
import hashlib
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from megatron_rl.errors import printable
from megatron_rl.files.bounds import open_regular
from megatron_rl.files.json_values import read_json

# In the format of sha256sum, so that `sha256sum -c SHA256SUMS` checks a checkpoint without this package.
CHECKSUMS = "SHA256SUMS"
# The exceptions of reading a file that is cut short, overwritten or of another format.
DAMAGED = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, ArithmeticError, AssertionError, AttributeError, EOFError, ImportError),
    *(LookupError, MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError, struct.error),
)
METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
# The classes and functions that torch and Megatron-Core 0.13 to 0.19 write into .metadata, besides dtypes.
IN_METADATA = frozenset(
    [
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
                *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch.distributed.checkpoint.planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
        *(("megatron.core.dist_checkpointing.strategies.torch", name) for name in ("MCoreMetadata", "MCoreSavePlan")),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    ]
)


class FileProblems(NamedTuple):
    """The problems of a checkpoint's files, one line each."""

    damaged: list[str]
    foreign: list[str]
    """Files that ask for more than plain data."""


def checksums_of(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """name -> SHA-256. Raises OSError."""
    found = {}
    for name in names:
        with (checkpoint / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def files_of_rank(checkpoint: Path, rank: int) -> list[str]:
    """The files that a rank has written: those with its number in the name, and for rank 0 all files without a number."""
    owners = {path.name: re.match(r"__(\d+)_", path.name) for path in checkpoint.iterdir()}
    return sorted(name for name, owner in owners.items() if (int(owner[1]) if owner else 0) == rank)


def write_checksums(checkpoint: Path, checksums: dict[str, str]) -> None:
    lines = [f"{digest}  {name}\n" for name, digest in sorted(checksums.items())]
    (checkpoint / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def find_problems(checkpoint: Path, rank: int = 0, num_ranks: int = 1) -> FileProblems:
    """Checks this rank's share of the files: first that they are as they were saved, then that they are plain data."""
    try:
        checksums = _read_checksums(checkpoint)
    except (OSError, ValueError) as error:
        return FileProblems([str(error)], [])
    damaged = [_damage_of(checkpoint, name, checksums[name]) for name in sorted(checksums)[rank::num_ranks]]
    problems = FileProblems([line for line in damaged if line], [])
    return problems if problems.damaged else _content_problems(checkpoint, set(checksums), rank, num_ranks)


def _read_checksums(checkpoint: Path) -> dict[str, str]:
    path = checkpoint / CHECKSUMS
    if not path.is_file():
        raise ValueError(
            f"{CHECKSUMS} is missing: the copy is incomplete, or the checkpoint is older than checksums; "
            f"`cd {checkpoint} && sha256sum {METADATA} * > {CHECKSUMS}` accepts its files as they are"
        )
    checksums = {}
    for line in path.read_bytes().splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  ([^/\0]+)", line.decode(errors="replace"))
        if match is None:
            raise ValueError(f"{CHECKSUMS} is damaged: {printable(line.decode(errors='replace')[:80])!r} is no line of sha256sum")
        checksums[match[2]] = match[1]
    read = (path.name for path in checkpoint.iterdir() if path.name in (METADATA, COMMON, FORMAT) or path.suffix == ".distcp")
    missing = sorted({METADATA, FORMAT, *read} - checksums.keys())
    if missing:
        raise ValueError(f"{CHECKSUMS} is damaged: it does not list {', '.join(map(printable, missing))}")
    return checksums


def _damage_of(checkpoint: Path, name: str, digest: str) -> str | None:
    try:
        if checksums_of(checkpoint, [name])[name] == digest:
            return None
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return f"{name} is not as it was saved (its SHA-256 differs)"


def _content_problems(checkpoint: Path, listed: set[str], rank: int, num_ranks: int) -> FileProblems:
    problems, name = FileProblems([], []), FORMAT
    try:
        _check_format(read_json(checkpoint / name))
        name = METADATA
        pieces = list(_pieces_of(_read_metadata(checkpoint), listed))
    except (OSError, *DAMAGED) as error:
        _note(problems, name, error)
        return problems
    if COMMON in listed:
        pieces.append((COMMON, 0, (checkpoint / COMMON).stat().st_size))
    for name, offset, length in pieces[rank::num_ranks]:
        try:
            with open_regular(checkpoint / name) as file:
                file.seek(offset)
                _check_plain(io.BytesIO(file.read(length)))
        except (OSError, *DAMAGED) as error:
            _note(problems, name, error)
    return problems


def _note(problems: FileProblems, name: str, error: Exception) -> None:
    if isinstance(error, NotPlain):
        problems.foreign.append(f"{name}: {printable(str(error))}")
    else:
        problems.damaged.append(f"{name} cannot be read ({type(error).__name__}: {printable(str(error))[:200]})")


def _check_format(value: Any) -> None:
    """Raises ValueError for another format. Megatron-Core up to 0.15 has some, but their readers may not be safe."""
    backends = value["sharded_backend"], value.get("common_backend", "torch")
    if backends != ("torch_dist", "torch"):
        raise ValueError(f"its backends are {backends[0]!r} and {backends[1]!r}: only torch_dist and torch are read")


class NotPlain(pickle.UnpicklingError):
    """A file asks for a class or function that is not plain data."""


SET_STATE: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]


# The unpickler in Python, because the one in C allocates as much memory as a damaged file asks for.
class _MetadataUnpickler(pickle._Unpickler):
    """Imports the classes of IN_METADATA and dtypes alone, and sets no attributes of a class or function."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> object:
        is_element_type = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_element_type and (module, name) not in IN_METADATA:
            raise NotPlain(f"it asks for {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        target = self.stack[-2]
        if callable(target) or isinstance(target, enum.Enum):
            raise NotPlain(f"it sets attributes of {target!r}")
        SET_STATE(self)

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def _read_metadata(checkpoint: Path) -> Any:  # -> torch.distributed.checkpoint.Metadata
    with open_regular(checkpoint / METADATA) as file:
        return _MetadataUnpickler(file).load()


def _pieces_of(metadata: Any, listed: set[str]) -> Iterator[tuple[str, int, int]]:
    """(file, offset, length) of each object that is no tensor. ValueError for a file that the checksums do not list."""
    for index, place in metadata.storage_data.items():
        if type(place.relative_path) is not str or type(index.fqn) is not str:
            raise ValueError("a file or a tensor whose name is no text")
        if place.relative_path not in listed:
            raise ValueError(f"it names the file {place.relative_path!r}, which {CHECKSUMS} does not list")
        if not all(type(number) is int and number >= 0 for number in (place.offset, place.length)):
            raise ValueError(f"it names the bytes {place.offset!r} and {place.length!r} of {place.relative_path}")
        if type(metadata.state_dict_metadata[index.fqn]).__name__ != "TensorStorageMetadata":
            yield place.relative_path, place.offset, place.length


def _check_plain(content: io.BytesIO) -> None:
    """Reads it as torch reads weights. Raises NotPlain where it asks for more, another of DAMAGED where it cannot be read."""
    try:
        torch.load(content, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        wanted = _more_than_plain(content)
        if wanted:
            raise NotPlain(f"it asks for {wanted[0]}") from error
        raise


def _more_than_plain(content: io.BytesIO) -> list[str]:
    """The classes and functions that a file of torch.save asks for, beyond what weights need."""
    content.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(content))
    except DAMAGED:
        return []
