"""Ranks as threads of this process: their groups, and the collectives of torch.distributed over these. No socket, no fork."""

from __future__ import annotations

import ast
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.layout.groups import GATHER_INTO_ONE, REDUCE_SCATTER, SINGLE, Group, ParallelGroups

# A rank that waits longer has lost its peers: they met other collectives.
SECONDS = 60.0


class Meeting:
    """Where the ranks of one group put what they send, and wait for each other."""

    def __init__(self, ranks: list[int]):
        self.ranks, self.sent, self.combined = ranks, [None] * len(ranks), None
        self.barrier = threading.Barrier(len(ranks), timeout=SECONDS)

    def exchange(self, rank: int, value: Any, combine: Callable[[list[Any]], Any] = list) -> Any:
        """What `combine` makes of what each rank has sent, in the order of the group. The first rank computes it for all."""
        self.sent[rank] = value
        self.barrier.wait()
        if rank == 0:
            self.combined = combine(self.sent)
        self.barrier.wait()
        return self.combined


@dataclass(frozen=True, eq=False)
class SimulatedGroup:
    """One rank's view of a group."""

    meeting: Meeting
    own_rank: int
    calls: list[tuple[str, Any]] = field(default_factory=list)  # (kind, shape) of each collective

    def size(self) -> int:
        return len(self.meeting.ranks)

    def rank(self) -> int:
        return self.own_rank

    def exchange(self, kind: str, value: Any, combine: Callable[[list[Any]], Any] = list) -> Any:
        """Raises where another rank meets another collective, or another shape."""
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        self.calls.append((kind.split()[0], shape))

        def combined(found: list[Any]) -> tuple[set[tuple[str, Any]], Any]:
            kinds = {(kind, shape) for kind, shape, _ in found}
            return kinds, combine([value for _, _, value in found]) if len(kinds) == 1 else None

        sent = (kind, shape, value.clone() if isinstance(value, Tensor) else value)
        kinds, found = self.meeting.exchange(self.own_rank, sent, combined)
        if len(kinds) > 1:
            raise AssertionError(f"ranks {self.meeting.ranks} meet unlike collectives: {sorted(map(str, kinds))}")
        return found


class Done:
    """The handle of an asynchronous collective."""

    def wait(self) -> None:
        return None


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Done:
    def reduce(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).amax(0) if op == dist.ReduceOp.MAX else torch.stack(parts).sum(0)

    tensor.copy_(group.exchange(f"all_reduce {op}", tensor, reduce))
    return Done()


def all_gather_into_one(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Done:
    output.copy_(torch.cat(group.exchange("all_gather", tensor)))
    return Done()


def reduce_scatter(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Done:
    parts = torch.stack(group.exchange("reduce_scatter", tensor)).sum(0)
    output.copy_(parts.chunk(group.size())[group.rank()])
    return Done()


def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Done:
    tensor.copy_(group.exchange("broadcast", tensor)[group.meeting.ranks.index(src)])
    return Done()


def get_global_rank(group: Any, group_rank: int) -> int:
    return group.meeting.ranks[group_rank]


COLLECTIVES = {
    "all_reduce": all_reduce,
    GATHER_INTO_ONE: all_gather_into_one,
    REDUCE_SCATTER: reduce_scatter,
    "broadcast": broadcast,
    "get_global_rank": get_global_rank,
}


def groups_of_ranks(*, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1) -> list[ParallelGroups]:
    """The groups of each rank, in Megatron's order: tp is the innermost, then cp, dp, pp."""
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    places = [{"tp": t, "cp": c, "dp": d, "pp": p} for p in range(pp) for d in range(dp) for c in range(cp) for t in range(tp)]
    meetings: dict[tuple, Meeting] = {}
    found: list[dict[str, Group]] = [{} for _ in places]
    for name, members in {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "dp_cp": ("dp", "cp"), "pp": ("pp",)}.items():
        for number, place in enumerate(places):
            shared = tuple(place[axis] for axis in sizes if axis not in members)
            ranks = [n for n, other in enumerate(places) if tuple(other[axis] for axis in sizes if axis not in members) == shared]
            meeting = meetings.setdefault((name, shared), Meeting(ranks))
            found[number][name] = SINGLE if len(ranks) == 1 else SimulatedGroup(meeting, ranks.index(number))
    return [ParallelGroups(**of_rank) for of_rank in found]


@contextlib.contextmanager
def simulated_collectives() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, function in COLLECTIVES.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        with contextlib.suppress(ImportError):
            stack.enter_context(one_kernel_at_a_time())
        yield


@contextlib.contextmanager
def one_kernel_at_a_time() -> Iterator[None]:
    """Triton's interpreter keeps the place in the grid, and what it replaces in triton.language, for the whole process. On a GPU
    each rank would compile what the others are compiling too."""
    from triton import JITFunction
    from triton.runtime.interpreter import GridExecutor

    lock = threading.RLock()

    def locked(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return launch(*args, **kwargs)

        return run

    with (
        mock.patch.object(GridExecutor, "__call__", locked(GridExecutor.__call__)),
        mock.patch.object(JITFunction, "run", locked(JITFunction.run)),
        # Triton's interpreter parses a kernel at its first call. CPython 3.11 counts the depth of a tree for all threads together.
        mock.patch.object(ast, "parse", locked(ast.parse)),
    ):
        yield


def on_simulated_ranks(
    function: Callable[[ParallelGroups], Any], groups: list[ParallelGroups], others: Sequence[ParallelGroups] = ()
) -> list[Any]:
    """[function(groups of the rank) for each rank]. others: what the function uses besides.

    The first error of a rank is raised, with its traceback; the others stop.
    """
    if len(groups) == 1:
        return [function(groups[0])]
    answers: list[Any] = [None] * len(groups)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            # The backward of CUDA tensors runs in one thread of the device, for all ranks: the first to wait there for the others,
            # as a loss with sums over samples does, keeps theirs from starting. Without it each rank runs its own, as on a CPU.
            with torch.autograd.set_multithreading_enabled(False):
                answers[number] = function(groups[number])
        except BaseException as error:
            errors.append(error)
            for of_rank in (*groups, *others):  # whoever waits for this rank, or will
                for group in (of_rank.tp, of_rank.cp, of_rank.dp, of_rank.dp_cp, of_rank.pp):
                    if isinstance(group, SimulatedGroup):
                        group.meeting.barrier.abort()

    with simulated_collectives():
        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        raise (own or errors)[0]
    return answers
