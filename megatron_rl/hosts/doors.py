"""The trainers that settings configure, by name: what doctor and explain ask is asked of their `Door`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from megatron_rl.hosts import DOOR_NAMES
from megatron_rl.hosts.door import Door

DOORS: dict[str, Door] = {name: import_module(f"megatron_rl.hosts.{name}").DOOR for name in DOOR_NAMES}


def door_of(words: Sequence[str], *, by_imports: bool = True) -> Door | None:
    """Whose launch line it is; None: none of these. by_imports: a script that is here may say so by what it imports."""
    doors = DOORS.values()
    found = next((door for door in doors if door.recognises(words) or door.programs.named(words)), None)
    return found or next((door for door in doors if by_imports and door.programs.imported(words)), None)
