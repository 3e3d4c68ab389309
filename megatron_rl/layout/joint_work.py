"""Work whose failure on one rank ends all of them with the same words; it must never be used inside a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError, DataError, RunError
from megatron_rl.layout.collectives import all_reduce_sum, group_device
from megatron_rl.layout.groups import Group, process_group, world_group

T = TypeVar("T")
# How often ranks that wait hear of one that works: far below the time limit of a collective.
SECONDS_BETWEEN_SIGNS_OF_LIFE = 10.0


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """[what `work` gave on each rank], on every rank. Without torch.distributed there is one rank.

    A ConfigError, DataError, RunError or OSError of one rank is raised on all of them, an OSError as a RunError: none waits for a
    rank that has ended. Any other exception is this rank's own.
    Communication: one all-gather of objects over all ranks.
    """
    own: Exception | None = None
    answers: list[T] = []
    try:
        answers.append(work())
    except (ConfigError, DataError, RunError) as error:
        own = error
    except OSError as error:
        own = RunError(str(error))
    outcome = (answers, None if own is None else (type(own), str(own)))
    outcomes = all_gather_objects(outcome) if dist.is_initialized() else [outcome]
    if own is not None:
        raise own
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind, text = failure
            raise kind(f"rank {rank}: {text}")
    return [answer for answers, _ in outcomes for answer in answers]


def finish_together(work: Iterable[Callable[[], T]], group: Group) -> list[T]:
    """What each call of `work` gives on this rank, once every rank has done its own; `group` holds all ranks.

    However long it takes on one rank, no collective of the others waits longer than for one call and
    SECONDS_BETWEEN_SIGNS_OF_LIFE. An exception of one rank ends the work on all: it is raised there, a RunError with its words on
    the others. Communication: an all-reduce of two numbers for each sign of life; after an exception one all-gather of objects over
    all ranks.
    """
    found: list[T] = []
    calls, failure, is_done = iter(work), None, False
    while True:
        until = time.monotonic() + SECONDS_BETWEEN_SIGNS_OF_LIFE
        while not is_done and time.monotonic() < until:
            call = next(calls, None)
            if call is None:
                is_done = True
                break
            try:
                found.append(call())
            except Exception as error:
                failure, is_done = error, True
        state = torch.tensor([not is_done, failure is not None], dtype=torch.int64, device=group_device(group))
        num_working, num_failed = all_reduce_sum(state, group).tolist()
        if num_failed or not num_working:
            break
    if failure is not None and group.size() == 1:
        raise failure
    if num_failed:
        _raise_together(failure)
    return found


def _raise_together(failure: Exception | None) -> None:
    kind = "" if isinstance(failure, ConfigError | DataError | RunError) else f"{type(failure).__name__}: "
    notes = "" if failure is None else "".join(f" ({note})" for note in getattr(failure, "__notes__", []))
    words = all_gather_objects(None if failure is None else f"{kind}{failure}{notes}")
    if failure is not None:
        raise failure
    raise RunError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(words) if text is not None))


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone, or did not come in time."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or "/gloo/" in str(error)


def all_gather_objects(mine: T) -> list[T]:
    """Every rank's object, on every rank. One all-gather of objects over all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=process_group(world_group()))
    return everyone
