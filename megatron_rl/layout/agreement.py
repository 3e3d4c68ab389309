"""Has ranks compare their arguments before a loss, and end their work together.

Ranks with different arguments would hang, abort inside a collective, or continue with different losses. So an error of one rank
ends the work on all of them. A rank that refuses its own arguments takes part too: the other ranks raise its message and do not
wait for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from numbers import Real
from types import TracebackType
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError, RunError
from megatron_rl.layout.groups import (
    Group,
    ParallelGroups,
    all_gather_stack,
    all_reduce_max,
    group_device,
    process_group,
    world_group,
)

# One message of a rank, padded to this size: about thirty values of 60 characters, or the text of an error.
MESSAGE_BYTES = 4096
PROBLEM_CHARACTERS = 650  # of at most six bytes each
_DIGEST_MARK = " with digest "
# The first micro-batches of a run are compared on CUDA too, though that waits for the device: a wrong launch shows at once.
NUM_CHECKED_MICROBATCHES = 2


def checks_microbatch(number: int) -> bool | None:
    """check_ranks for micro-batch `number` that a cp group has in a run: True for the first ones, then None."""
    return True if number < NUM_CHECKED_MICROBATCHES else None


class Message(TypedDict):
    """What a rank sends."""

    problem: list[str] | None  # kind of error, text
    values: dict[str, str]  # name -> value as text


class RankAgreement:
    """`with RankAgreement(...) as agreement:` encloses all checks of arguments; `agreement.add` adds a value that must be equal.

    At the end of the block the ranks of the tp group, then of the cp group, exchange their values or their errors. All of
    them raise the same error: ConfigError where a rank raised that, else DataError.
    check_ranks: whether to compare; None: where the group communicates through the CPU. Equal on all ranks of both groups.

    Communication: one all-gather of [MESSAGE_BYTES] uint8 over each compared group; none at size 1. Synchronises on CUDA.
    """

    def __init__(self, tp_group: Group, cp_group: Group, *, check_ranks: bool | None):
        named = (("tensor-parallel", tp_group), ("context-parallel", cp_group))
        self._groups = [(name, group) for name, group in named if _is_compared(group, check_ranks)]
        self._values: dict[str, dict[str, str]] = {name: {} for name, _ in self._groups}

    @property
    def is_active(self) -> bool:
        """Whether anything is compared. If not, the values need not be computed."""
        return bool(self._groups)

    def add(self, name: str, value: object, *, is_sliced: bool = False) -> None:
        """value: a number, a text, None, a shape or a tensor. is_sliced: cp ranks hold different parts of it, so over cp only
        whether it is None is compared."""
        for group_name, values in self._values.items():
            if is_sliced and group_name == "context-parallel":
                values[name] = "None" if value is None else "given"
            else:
                values[name] = _described(value)

    def __enter__(self) -> RankAgreement:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        problem = None if error is None else [type(error).__name__, str(error)]
        for name, group in self._groups:
            messages = _exchange({"problem": problem, "values": self._values[name]}, group)
            problem = problem or _problem_of(name, messages)
        if error is None and problem is not None:
            raise (ConfigError if problem[0] == "ConfigError" else DataError)(problem[1])


def _is_compared(group: Group, check_ranks: bool | None) -> bool:
    if group.size() == 1:
        return False
    return group_device(group).type == "cpu" if check_ranks is None else check_ranks


def _problem_of(name: str, messages: list[Message]) -> list[str] | None:
    """[kind of error, text]: the error of a rank, else the first value that differs; None where there is neither."""
    for rank, message in enumerate(messages):
        if message["problem"] is not None:
            kind, text = message["problem"]
            return [kind, f"{name} rank {rank}: {text}"]
    values_of_ranks = [message["values"] for message in messages]
    arguments = dict.fromkeys(argument for own in values_of_ranks for argument in own)
    # Sizes and settings first: where they differ, tensors do too.
    for argument in sorted(arguments, key=lambda argument: any(_DIGEST_MARK in own.get(argument, "") for own in values_of_ranks)):
        values = [own.get(argument, "nothing") for own in values_of_ranks]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            return [
                "DataError",
                f"{argument} differs between {name} ranks: rank 0 has {values[0]}, rank {other} has {values[other]}. They compute "
                f"one loss together and must be given the same, or {name[0]}p_group is not the {name} group",
            ]
    return None


def _described(value: object) -> str:
    """The value as text. Equal values give equal texts in every process."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}{_DIGEST_MARK}{_digest(value)}"
    if isinstance(value, bool) or not isinstance(value, Real):
        text = str(value)
        return text if len(text) <= 60 else f"{text[:40]}... {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return repr(float(value))


def _digest(values: Tensor) -> str:
    """A hash of the numbers: -0.0 counts as 0.0, and all NaNs are equal. Reads the tensor on the host."""
    values = values.detach().cpu()
    if values.is_floating_point():
        values = torch.where(values.isnan(), float("nan"), values.double() + 0.0)
    return hashlib.blake2b(values.contiguous().numpy().tobytes(), digest_size=8).hexdigest()


T = TypeVar("T")


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Runs `work` on each rank; returns the results of all ranks. Without torch.distributed there is one rank.

    An exception of one rank is raised on all of them, so that no rank waits for one that has ended: ConfigError, DataError and
    RunError as they are, an OSError as a RunError; any other on its rank, and as a RunError with its text on the others.
    Communication: one all-gather of objects over all ranks.
    """
    own: Exception | None = None
    failure: tuple[type[Exception], str] | None = None
    answers: list[T] = []
    try:
        answers.append(work())
    except Exception as error:
        own = RunError(_with_notes(error)) if isinstance(error, OSError) else error
        is_ours = isinstance(own, ConfigError | DataError | RunError)
        failure = (type(own), str(own)) if is_ours else (RunError, f"{type(own).__name__}: {_with_notes(own)}")
    outcomes = all_gather_objects((answers, failure))
    if own is not None:
        raise own
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            kind, text = problem
            raise kind(f"rank {rank}: {text}")
    return [answer for answers, _ in outcomes for answer in answers]


def _with_notes(error: Exception) -> str:
    return str(error) + "".join(f" ({note})" for note in getattr(error, "__notes__", []))


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone, or did not join it in time.

    gloo has no type for it: it raises a RuntimeError that begins with its own source file.
    """
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or "/gloo/" in str(error)


def _exchange(message: Message, group: Group) -> list[Message]:
    if message["problem"] is not None:
        kind, text = message["problem"]
        message = {"problem": [kind, text[:PROBLEM_CHARACTERS]], "values": {}}
    content = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    buffer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = all_gather_stack(buffer.to(group_device(group)), group).cpu()
    return [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in gathered]


def all_gather_objects(mine: T) -> list[T]:
    """The objects of all ranks, on every rank. Communication: one all-gather of objects over all ranks."""
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=process_group(world_group()))
    return everyone


def maxima_anywhere(values: Tensor, groups: ParallelGroups) -> list[int]:  # [k]
    """The maxima over all ranks: over dp-cp, then pp, then tp, which together reach each rank. An all-reduce each; synchronises."""
    for group in (groups.dp_cp, groups.pp, groups.tp):
        if group.size() > 1:
            values = all_reduce_max(values.to(group_device(group)), group)
    return values.tolist()
