"""Reads what miles and slime write with --save-debug-rollout-data, a file of torch.save, as plain data. No code of the file runs.

Every object that is no number, text, container or tensor becomes a stand-in, whatever the file asks for: a class that takes any
arguments and does nothing. So a dump is read without the host, and one from a stranger without risk: files/archive.py reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import DataError, printable
from megatron_rl.files.archive import read_archive
from megatron_rl.files.bounds import open_regular
from megatron_rl.files.plain_pickle import DAMAGED


def load_samples(path: str, flag: str) -> tuple[list, list[str]]:
    """(the samples of {"samples": [Sample.to_dict(), ...]}, or of that list alone; the names of what was not read). DataError names
    the flag, the file and what is wrong with it."""
    if not Path(path).is_file():
        raise DataError(f"{flag} {path} is no file: give the one that the host wrote")
    try:
        with open_regular(path) as file:
            content, not_read = read_archive(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error}") from error
    except DAMAGED as error:
        text = printable(f"{type(error).__name__}: {error}")
        raise DataError(f"{flag} {path} is damaged, or not of this kind: {text}") from error
    samples, found = content, type(content).__name__
    if isinstance(content, dict):
        samples, found = content.get("samples"), f"a dict with the keys {printable(', '.join(map(str, list(content)[:20])))}"
    if not isinstance(samples, list) or not samples:
        raise DataError(f'{flag} {path} holds {found}: a list of samples is needed, or a dict with one at "samples"')
    return samples, not_read


def plain_number(value: Any) -> Any:
    """A tensor of one element as Python's number; anything else as it is."""
    try:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    except DAMAGED:
        return value
