"""Forks gloo ranks on this machine and keeps them for many calls. A rank that hangs is ended, and none outlives its caller."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.testing.rank_process import Job, serve

# After the first failure: how long the other ranks may take to report their own.
_GRACE_SECONDS = 30.0
# No answer within this is a hang, on a machine whose cores others share too.
HANG_SECONDS = 300.0
# This process's ends of all ranks' pipes. A forked rank closes its copies, so that a pipe ends with its owner.
_callers_ends: weakref.WeakSet[Connection] = weakref.WeakSet()


class RankError(RuntimeError):
    """Some ranks failed. `errors` maps each to its traceback, or to how it ended; the first to fail comes first."""

    def __init__(self, errors: dict[int, str], world_size: int):
        self.errors = errors
        names = ", ".join(str(rank) for rank in errors)
        reports = "\n".join(f"--- rank {rank}: {error.rstrip()}" for rank, error in errors.items())
        super().__init__(f"{len(errors)} of {world_size} ranks failed (first to last: {names})\n{reports}")


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args,
    timeout: float = HANG_SECONDS,
    use_megatron: bool = True,
    **model_parallel,
) -> list[Any]:
    """[function(rank, *args) for each rank], computed on `world_size` new gloo ranks with an initialised Megatron.

    The ranks are forked from this process: it imports torch and Megatron once, and `function` may be a closure. Results
    are pickled. RankPool has the details, and is faster for many calls.

        run_ranks(lambda rank: rank * 10, 2)  ->  [0, 10]
    """
    with RankPool(world_size, timeout=timeout, use_megatron=use_megatron) as pool:
        return pool.run(function, *args, **model_parallel)


@dataclass
class _Rank:
    process: Any
    connection: Connection
    stack_file: str
    # A fork copies this object into the ranks; only the process that started a rank may end it.
    owner: int = field(default_factory=os.getpid)


class RankPool:
    """Up to `world_size` gloo ranks that stay alive between calls and change their layout from call to call.

        with RankPool(4) as pool:
            pool.run(function, 1, 2, tensor_model_parallel_size=2)                  # function(rank, 1, 2) at TP2 x DP2
            pool.run(function, 3, 4, world_size=2, context_parallel_size=2)         # on ranks 0 and 1 alone, at CP2

    The first call forks the ranks from this process, which takes 0.2 to 0.6 s. Later a function that can be pickled is sent
    to the living ranks; a closure, or a function of a module that was imported since, makes the pool fork again. A rank
    sees this process as it was at the fork, without later patches.

    Each call begins with the same random state on every rank. Ranks are not daemons: dist_checkpointing may start
    processes.

    A rank that raises, dies or gives no answer within `timeout` seconds makes `run` raise RankError, which names the
    ranks and holds their tracebacks, or the stack where they hang; the pool then ends all its ranks, and the next call
    starts new ones.

    use_megatron=False starts plain torch.distributed ranks, for functions that need no megatron-core.
    """

    def __init__(self, world_size: int = 4, *, timeout: float = HANG_SECONDS, use_megatron: bool = True):
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} must be at least 1")
        self.world_size, self.timeout, self.use_megatron = world_size, timeout, use_megatron
        self._ranks: list[_Rank] = []
        self._known_modules: frozenset[str] = frozenset()
        self._folder: tempfile.TemporaryDirectory | None = None
        self._last: Job | None = None
        self._num_jobs = 0
        # Also runs when the interpreter ends, before multiprocessing waits for its children there.
        self._finalizer = weakref.finalize(self, _end_ranks, self._ranks, kill=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args,
        world_size: int | None = None,
        timeout: float | None = None,
        **model_parallel,
    ) -> list[Any]:
        """[function(rank, *args) for each rank], in rank order; model_parallel goes to initialize_model_parallel."""
        world_size = self.world_size if world_size is None else world_size
        timeout = self.timeout if timeout is None else timeout
        if not 1 <= world_size <= self.world_size:
            raise ConfigError(f"world_size={world_size} must be in [1, {self.world_size}], the size of this pool")
        if model_parallel and not self.use_megatron:
            raise ConfigError(f"use_megatron=False has no use for {sorted(model_parallel)}")
        job = Job(function, args, world_size, timeout, self.use_megatron, model_parallel, rendezvous="")
        payload = self._pickled(self._with_rendezvous(job)) if self._is_alive() else None
        if payload is None:
            self.close()
            self._start(job)
        else:
            for rank in self._ranks[:world_size]:
                rank.connection.send_bytes(payload)
        return self._collect(self._ranks[:world_size], timeout)

    def close(self) -> None:
        """Ends all ranks; the pool may be used again and then starts new ones."""
        _end_ranks(self._ranks, kill=False)
        self._last = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _is_alive(self) -> bool:
        return bool(self._ranks) and all(rank.process.is_alive() for rank in self._ranks)

    def _with_rendezvous(self, job: Job) -> Job:
        """The job with the last job's rendezvous where the groups can stay, else with a new name, because a name works once."""
        self._num_jobs += 1
        rendezvous = f"rendezvous-{self._num_jobs}"
        if self._last is not None and self._last.layout() == job.layout():
            rendezvous = self._last.rendezvous
        self._last = Job(**{**vars(job), "rendezvous": rendezvous})
        return self._last

    def _pickled(self, job: Job) -> bytes | None:
        """The job for living ranks; None where only a fork can hand it over."""
        function = job.function
        while hasattr(function, "func"):  # functools.partial
            function = function.func
        # Functions are pickled as module and name: the ranks must have that module, as it was at the fork.
        if function.__module__ not in self._known_modules:
            return None
        try:
            return pickle.dumps(job)
        except (pickle.PicklingError, AttributeError, TypeError):  # what lambdas, local functions and handles give
            return None

    def _start(self, job: Job) -> None:
        """Forks all ranks; those that take part find the first job in their copy of this process's memory."""
        _check_may_fork()
        if self.use_megatron:
            _import_megatron()
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-rl-ranks-")
        job = self._with_rendezvous(job)
        # In an interactive session __main__ may change after the fork.
        self._known_modules = frozenset(sys.modules) - {"__main__"}
        context = multiprocessing.get_context("fork")
        with socket.create_server(("127.0.0.1", 0)) as listener:  # a free port, which rank 0 takes over
            for number in range(self.world_size):
                callers_end, ranks_end = context.Pipe()
                _callers_ends.add(callers_end)
                stack_file = os.path.join(self._folder.name, f"stack-{number}")
                first_job = job if number < job.world_size else None
                arguments = (number, ranks_end, _callers_ends, stack_file, listener, first_job)
                # Not a daemon: those may not start processes, and Megatron's checkpoint writers are processes.
                process = context.Process(target=serve, args=arguments, daemon=False)
                with warnings.catch_warnings():  # Python 3.12 warns of any fork beside threads; a rank uses none of them
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                ranks_end.close()
                self._ranks.append(_Rank(process, callers_end, stack_file))

    def _collect(self, ranks: list[_Rank], timeout: float) -> list[Any]:
        """Waits for all answers: at most `timeout`, and after a failure at most _GRACE_SECONDS."""
        deadline, reason = time.monotonic() + timeout, f"gave no answer within {timeout:g} s"
        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, str]] = {}  # when, what
        pending = dict(enumerate(ranks))
        try:
            while pending and (remaining := deadline - time.monotonic()) > 0:
                handles = [handle for rank in pending.values() for handle in (rank.connection, rank.process.sentinel)]
                ready = wait(handles, remaining)
                for number, rank in list(pending.items()):
                    if rank.connection not in ready and rank.process.sentinel not in ready:
                        continue
                    del pending[number]
                    is_result, answer = _receive(rank)
                    (results if is_result else failures)[number] = answer
                    if not is_result and len(failures) == 1 and time.monotonic() + _GRACE_SECONDS < deadline:
                        deadline = time.monotonic() + _GRACE_SECONDS
                        reason = f"was still busy {_GRACE_SECONDS:g} s after rank {number} had failed"
            for number, stack in zip(pending, _stacks(list(pending.values())), strict=True):
                failures[number] = (math.inf, f"{reason}; it was here:\n{stack}")
        except BaseException:  # Ctrl-C, or a test's timeout: the next call must not read the answers to this one
            _end_ranks(self._ranks, kill=True)
            raise
        if failures:
            _end_ranks(self._ranks, kill=True)
            in_order = sorted(failures.items(), key=lambda failure: failure[1][0])
            raise RankError({number: error for number, (_, error) in in_order}, len(ranks))
        return [results[number] for number in range(len(ranks))]


def _check_may_fork() -> None:
    if not hasattr(os, "fork"):
        raise ConfigError("ranks are forked, and this system cannot fork: use Linux or macOS")
    if dist.is_initialized():
        raise ConfigError(
            "this process has initialised torch.distributed, and a forked rank cannot leave that group: call run_ranks "
            "and RankPool from a process that is not a rank itself"
        )
    if torch.cuda.is_initialized():
        raise ConfigError("this process has used CUDA, which does not survive a fork: start it with CUDA_VISIBLE_DEVICES=''")


def _import_megatron() -> None:
    """Imports Megatron once here and not in each rank: 2 s, not 2 s times the ranks that share a core."""
    try:
        import_megatron()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the ranks initialise Megatron-Core, which cannot be imported ({error}): pip install "
            "'/path/to/megatron_rl[megatron]', or pass use_megatron=False for plain torch.distributed ranks"
        ) from error
    import torch._dynamo  # noqa: F401  # an optimiser's first step imports it, in each rank


def _receive(rank: _Rank) -> tuple[bool, Any]:
    """(True, result) or (False, (when, what went wrong)).

    A dead rank cannot say when it failed: it counts as the first, because its peers fail after it.
    """
    # A rank that answered and ended at once is ready twice: its answer counts. One that dies while sending: OSError.
    with contextlib.suppress(EOFError, OSError):
        if rank.connection.poll():
            return pickle.loads(rank.connection.recv_bytes())
    rank.process.join(_GRACE_SECONDS)
    code = rank.process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return False, (-math.inf, f"ended without an answer, {how}")


def _stacks(ranks: list[_Rank]) -> list[str]:
    """The stack of each of these ranks, also inside a C call: a rank writes it when it gets the signal."""
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGUSR1)  # not yet collected, so the number still belongs to it
    return [_whole_text(rank.stack_file) or "(it left no stack)" for rank in ranks]


def _whole_text(path: str) -> str:
    """What another process writes there, as soon as it does not grow any more; empty after _GRACE_SECONDS without a word."""
    text, deadline = "", time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        with open(path) as file:
            before, text = text, file.read()
        if text and text == before:
            break
    return text


def _end_ranks(ranks: list[_Rank], *, kill: bool) -> None:
    """Ends the processes and collects them: no zombie stays. A rank that waits for its next job ends by itself."""
    own = [rank for rank in ranks if rank.owner == os.getpid()]
    for rank in own:
        rank.connection.close()
        if kill:
            rank.process.kill()
    for rank in own:
        rank.process.join(_GRACE_SECONDS)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.process.close()
    ranks.clear()
