"""Ranks that agree or end together: what they were given is compared before a loss, and work outside a step fails on all of them.

Ranks that disagree would hang, abort in the middle of a collective, or go on with two different losses. A rank that refuses its own
arguments takes part as well: the others raise its message instead of waiting for it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from numbers import Real
from types import TracebackType
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError, RunError
from megatron_rl.layout.groups import Group, all_gather_stack, all_reduce_sum, group_device, process_group, world_group

# One message of a rank, padded to this size: about thirty facts of 60 characters, and the text of an error.
MESSAGE_BYTES = 4096
PROBLEM_CHARACTERS = 1500
_DIGEST_MARK = " with digest "
# Micro-batches that a run checks on CUDA too, where the comparison waits for the device: a wrong launch is wrong from the start.
NUM_CHECKED_MICROBATCHES = 2


def checks_microbatch(number: int) -> bool | None:
    """check_ranks of a run's micro-batch `number`, the same on every tp and cp rank: True for the first, then the default."""
    return True if number < NUM_CHECKED_MICROBATCHES else None


class Message(TypedDict):
    """What a rank sends."""

    problem: list[str] | None  # kind of error, text
    facts: dict[str, str]


class RankAgreement:
    """`with RankAgreement(...) as agreement:` around all checks of arguments; inside, `agreement.add` names what must be equal.

    At the end of the block each rank of the tp group, then each of the cp group, sends its facts or its error, and all of them
    raise the same: DataError, or ConfigError where a rank raised that. check_ranks None: checked where the group communicates
    through the CPU. All ranks of both groups must pass the same check_ranks.

    Communication: one all-gather of [MESSAGE_BYTES] uint8 over each group, where checked; none at size 1. Synchronises on CUDA.
    """

    def __init__(self, tp_group: Group, cp_group: Group, *, check_ranks: bool | None):
        named = (("tensor-parallel", tp_group), ("context-parallel", cp_group))
        self._groups = [(name, group) for name, group in named if is_checked(group, check_ranks)]
        self._facts: dict[str, dict[str, str]] = {name: {} for name, _ in self._groups}

    @property
    def is_active(self) -> bool:
        """Whether anything is compared: else facts need not be computed."""
        return bool(self._groups)

    def add(self, name: str, value: object, *, is_sliced: bool = False) -> None:
        """A number, a text, None, a shape or a tensor. is_sliced: cp ranks hold other parts, and agree on whether it is None."""
        for group_name, facts in self._facts.items():
            if is_sliced and group_name == "context-parallel":
                facts[name] = "None" if value is None else "given"
            else:
                facts[name] = _described(value)

    def __enter__(self) -> RankAgreement:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        problem = None if error is None else [type(error).__name__, str(error)]
        for name, group in self._groups:
            messages = _exchange({"problem": problem, "facts": self._facts[name]}, group)
            problem = problem or _problem_of(name, messages)
        if error is None and problem is not None:
            raise (ConfigError if problem[0] == "ConfigError" else DataError)(problem[1])


def is_checked(group: Group, check_ranks: bool | None) -> bool:
    """Whether the ranks of this group compare what they were given, and tell each other what they refuse."""
    if group.size() == 1:
        return False
    return group_device(group).type == "cpu" if check_ranks is None else check_ranks


def _problem_of(name: str, messages: list[Message]) -> list[str] | None:
    """[kind of error, text]: a rank's own error first, else the first fact that differs."""
    for rank, message in enumerate(messages):
        if message["problem"] is not None:
            kind, text = message["problem"]
            return [kind, f"{name} rank {rank}: {text}"]
    facts = [message["facts"] for message in messages]
    names = dict.fromkeys(fact for own in facts for fact in own)
    # Sizes and settings first: where they differ, tensors do too.
    for fact in sorted(names, key=lambda fact: any(_DIGEST_MARK in own.get(fact, "") for own in facts)):
        values = [own.get(fact, "nothing") for own in facts]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            return [
                "DataError",
                f"{fact} differs between {name} ranks: rank 0 has {values[0]}, rank {other} has {values[other]}. They compute one "
                "loss together and must be given the same",
            ]
    return None


def _described(value: object) -> str:
    """Equal texts for equal values, in every process."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}{_DIGEST_MARK}{_digest(value)}"
    if isinstance(value, bool) or not isinstance(value, Real):
        text = str(value)
        return text if len(text) <= 60 else f"{text[:40]}... {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return repr(float(value))


def _digest(values: Tensor) -> str:
    """Of the numbers: -0.0 counts as 0.0, and every NaN as the same. Reads the tensor on the host."""
    values = values.detach().cpu()
    if values.is_floating_point():
        values = torch.where(values.isnan(), float("nan"), values.double() + 0.0)
    return hashlib.blake2b(values.contiguous().numpy().tobytes(), digest_size=8).hexdigest()


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


def _exchange(message: Message, group: Group) -> list[Message]:
    problem = message["problem"]
    if problem is not None:
        kind, text = problem
        problem = [kind, text[:PROBLEM_CHARACTERS]]
        message = {"problem": problem, "facts": {}}
    content = json.dumps(message).encode()
    while problem is not None and len(content) > MESSAGE_BYTES:  # a character outside ASCII takes up to six bytes
        problem[1] = problem[1][: len(problem[1]) // 2]
        content = json.dumps(message).encode()
    buffer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = all_gather_stack(buffer.to(group_device(group)), group).cpu()
    return [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in gathered]


def all_gather_objects(mine: T) -> list[T]:
    """Every rank's object, on every rank. One all-gather of objects over all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=process_group(world_group()))
    return everyone
