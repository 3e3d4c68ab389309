"""The trainers that settings configure, and no flags: the doors that doctor and explain ask."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.hosts import nemo_rl, roll, skyrl, verl
from megatron_rl.hosts.door import Door

HYDRA_HOSTS: dict[str, Door] = {one.DOOR.name: one.DOOR for one in (verl, nemo_rl, roll, skyrl)}


def hydra_host_of(words: Sequence[str]) -> Door | None:
    """Whose launch line it is; None: none of these."""
    return next((door for door in HYDRA_HOSTS.values() if door.recognises(words)), None)
