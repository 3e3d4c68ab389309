"""Reads what miles and slime write with --save-debug-rollout-data, a file of torch.save, as plain data. No code of the file runs.

Every object that is no number, text, container or tensor becomes a stand-in, whatever the file asks for: a class that takes any
arguments and does nothing. So a dump is read without the host, and one from a stranger without risk.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_rl.errors import DataError, printable
from megatron_rl.files.plain_pickle import DAMAGED, PlainUnpickler

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


class StandIn:
    """In the place of an object that was not read."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        pass


def load_samples(path: str, flag: str) -> tuple[list, list[str]]:
    """(the samples of {"samples": [Sample.to_dict(), ...]}, or of that list alone; the names of what was not read). DataError names
    the flag, the file and what is wrong with it."""
    if not Path(path).is_file():
        raise DataError(f"{flag} {path} is no file: give the one that the host wrote")
    not_read: dict[str, None] = {}

    class Unpickler(PlainUnpickler):
        def find_plain(self, module: str, name: str) -> object:
            if (module, name) in PLAIN:
                return self.import_plain(module, name)
            not_read[printable(f"{module}.{name}")] = None
            return StandIn

    pickle_module = ModuleType("plain_pickle")  # what torch.load takes for the module pickle
    vars(pickle_module)["Unpickler"] = Unpickler
    try:
        _check_archive(path)
        content = torch.load(path, map_location="cpu", pickle_module=pickle_module, weights_only=False)
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
    """A tensor of one element as Python's number; anything else as it is."""
    try:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    except DAMAGED:
        return value


def _check_archive(path: str) -> None:
    """ValueError for a file that torch.save has not written: torch.load would unpickle one kind by itself and hand another to
    torch.jit. An archive that is larger inside than outside is none either, and would fill the memory."""
    if not zipfile.is_zipfile(path):
        raise ValueError("no archive, and torch.save writes one")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    names = {member.filename.rpartition("/")[2] for member in members}
    if "constants.pkl" in names or "data.pkl" not in names:  # TorchScript has both
        raise ValueError("an archive of another kind than torch.save's")
    size, inside = Path(path).stat().st_size, sum(member.file_size for member in members)
    if inside > size:
        raise ValueError(f"its members hold {inside} bytes together, and the file has {size}")
