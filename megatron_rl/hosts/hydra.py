"""The trainers that settings configure, and no flags: what doctor and explain ask of verl, NeMo-RL, ROLL and SkyRL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts import door_line, factors, nemo_rl, roll, skyrl, verl
from megatron_rl.hosts.door import Door
from megatron_rl.hosts.settings_line import ReadFile, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraHost:
    """A trainer that settings configure.

    recognises: whether the words of a line start it. judge: what becomes of the line. judge_settings: (settings that give the
    trainer ours, their problems). place: where they are typed. stages: factors of the chain, see hosts/factors.py. per_token: why
    explain refuses --calculate-per-token-loss; None: it is a setting there.
    """

    name: str
    starts: str  # what starts it, for the title of doctor
    recognises: Callable[[Sequence[str]], bool]
    judge: Callable[[Sequence[str], ReadFile], Iterator[Row]]
    judge_settings: Callable[[PolicyLossConfig], tuple[list[str], list[str]]]
    stages: Callable[..., factors.Stages]
    place: str = "overrides on the launch line"
    separator: str = " "
    per_token: str | None = None
    is_per_token: bool = False  # Megatron's per-token contract, whatever is typed


def of_door(door: Door) -> HydraHost:
    return HydraHost(
        name=door.name,
        starts=door.starts,
        recognises=door.recognises,
        judge=functools.partial(door_line.judge, door),
        judge_settings=functools.partial(door_line.write, door),
        stages=lambda weight, **named: factors.Stages(*door.stages(weight, **named)),
        place=door.place,
        separator=door.separator,
        per_token=door.why_not_per_token,
        is_per_token=door.is_per_token,
    )


HYDRA_HOSTS = {one.DOOR.name: of_door(one.DOOR) for one in (verl, nemo_rl, roll, skyrl)}


def hydra_host_of(words: Sequence[str]) -> HydraHost | None:
    """Whose launch line it is; None: none of these."""
    return next((host for host in HYDRA_HOSTS.values() if host.recognises(words)), None)
