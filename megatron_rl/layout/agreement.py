"""Work whose failure on one rank ends all of them with the same words; it must never be used inside a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_rl.errors import ConfigError, DataError, RunError

T = TypeVar("T")


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """[what `work` gave on each rank], on every rank. Without torch.distributed there is one rank.

    A ConfigError, DataError, RunError or OSError of one rank is raised on all of them, an OSError as a RunError: none waits for a
    rank that has ended. Any other exception is this rank's own.
    Communication: one all-gather of objects over all ranks.
    """
    own, answer = None, None
    try:
        answer = work()
    except (ConfigError, DataError, RunError) as error:
        own = error
    except OSError as error:
        own = RunError(str(error))
    outcome = (answer, None if own is None else (type(own), str(own)))
    outcomes = all_gather_objects(outcome) if dist.is_initialized() else [outcome]
    if own is not None:
        raise own
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind, text = failure
            raise kind(f"rank {rank}: {text}")
    return [answer for answer, _ in outcomes]


def all_gather_objects(mine: T) -> list[T]:
    """Every rank's object, on every rank. One all-gather of objects over all ranks."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=dist.group.WORLD)
    return everyone
