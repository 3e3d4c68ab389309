"""Forks gloo ranks on this machine and keeps them for many calls. A rank that hangs is ended, and none outlives its caller."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import IO, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError
from megatron_rl.megatron.cpu import import_megatron, install_cpu_support

# After the first failure: how long the other ranks may take to report their own.
_GRACE_SECONDS = 30.0
# No answer within this is a hang, on a machine whose cores others share too.
HANG_SECONDS = 300.0
_SEED = 123


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

    `function` may be a closure, and results are pickled. RankPool has the details, and is faster for many calls.

        run_ranks(lambda rank: rank * 10, 2)  ->  [0, 10]
    """
    with RankPool(world_size, timeout=timeout, use_megatron=use_megatron) as pool:
        return pool.run(function, *args, **model_parallel)


@dataclass(frozen=True)
class _Job:
    """One call of `function(rank, *args)` on `world_size` ranks. Their groups meet under `rendezvous`, a name that works once."""

    function: Callable[..., Any]
    args: tuple
    world_size: int
    model_parallel: dict[str, Any]
    rendezvous: str


class _Rank(NamedTuple):
    """A rank as its caller has it."""

    process: Any
    connection: Connection
    stack: IO[bytes]  # where the rank writes its stack when it gets SIGUSR1


class RankPool:
    """Up to `world_size` gloo ranks that stay alive between calls and change their layout from call to call.

        with RankPool(4) as pool:
            pool.run(function, 1, 2, tensor_model_parallel_size=2)                  # function(rank, 1, 2) at TP2 x DP2
            pool.run(function, 3, 4, world_size=2, context_parallel_size=2)         # on ranks 0 and 1 alone, at CP2

    The first call forks the ranks from this process, which takes 0.2 to 0.6 s. Later a function that can be pickled is sent to the
    living ranks; a closure, or a function of __main__, makes the pool fork again. A rank sees this process as it was at the fork,
    without later patches. Each call begins with the same random state on every rank.

    Where a rank raises, dies or gives no answer within `timeout` seconds, `run` raises RankError with tracebacks, or the stacks
    where they hang; the pool then ends all its ranks, and the next call starts new ones.

    use_megatron=False starts plain torch.distributed ranks, for functions that need no megatron-core.
    """

    def __init__(self, world_size: int = 4, *, timeout: float = HANG_SECONDS, use_megatron: bool = True):
        self.world_size, self.timeout, self.use_megatron = world_size, timeout, use_megatron
        self._ranks: list[_Rank] = []
        self._layout: tuple[int, dict[str, Any]] | None = None
        self._num_layouts = 0
        # Also runs when the interpreter ends, before multiprocessing waits for its children there.
        Finalize(self, _end_ranks, args=(self._ranks,), exitpriority=0)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args, world_size: int | None = None, **model_parallel) -> list[Any]:
        """[function(rank, *args) for each rank], in rank order; model_parallel goes to initialize_model_parallel."""
        world_size = self.world_size if world_size is None else world_size
        if not 1 <= world_size <= self.world_size:
            raise ConfigError(f"world_size={world_size} must be in [1, {self.world_size}], the size of this pool")
        if model_parallel and not self.use_megatron:
            raise ConfigError(f"use_megatron=False has no use for {sorted(model_parallel)}")
        if self._layout != (world_size, model_parallel):  # else the groups of the last call stay
            self._layout, self._num_layouts = (world_size, model_parallel), self._num_layouts + 1
        job = _Job(function, args, world_size, model_parallel, rendezvous=str(self._num_layouts))
        payload = b""
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):  # what lambdas, local functions and handles give
            payload = pickle.dumps(job)
        is_alive = bool(self._ranks) and all(rank.process.is_alive() for rank in self._ranks)
        if is_alive and payload and b"__main__" not in payload:  # in an interactive session it may have changed since the fork
            for rank in self._ranks[:world_size]:
                rank.connection.send_bytes(payload)
        else:
            self.close()
            self._start(job)
        return self._collect(self._ranks[:world_size])

    def close(self) -> None:
        """Ends all ranks; the pool may be used again and then starts new ones."""
        _end_ranks(self._ranks)

    def _start(self, job: _Job) -> None:
        """Forks all ranks; those that take part find the first job in their copy of this process's memory."""
        if self.use_megatron:  # once here and not in each rank: 2 s, not 2 s times the ranks that share a core
            import_megatron()
            import torch._dynamo  # noqa: F401  # an optimiser's first step imports it
        context = multiprocessing.get_context("fork")
        with socket.create_server(("127.0.0.1", 0)) as listener:  # a free port, which rank 0 takes over
            for number in range(self.world_size):
                callers_end, ranks_end = context.Pipe()
                served = _ServedRank(number, self.timeout, self.use_megatron, listener, tempfile.TemporaryFile())
                arguments = (callers_end, ranks_end, job if number < job.world_size else None)
                # Not a daemon: those may not start processes, and Megatron's checkpoint writers are processes.
                process = context.Process(target=served.serve, args=arguments, daemon=False)
                with warnings.catch_warnings():  # Python 3.12 warns of any fork beside threads; a rank uses none of them
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                ranks_end.close()
                self._ranks.append(_Rank(process, callers_end, served.stack))

    def _collect(self, ranks: list[_Rank]) -> list[Any]:
        """Waits for all answers: at most the timeout, and after a failure at most _GRACE_SECONDS."""
        deadline = time.monotonic() + self.timeout
        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, str]] = {}  # when, what
        pending = dict(enumerate(ranks))
        try:
            while pending and (remaining := deadline - time.monotonic()) > 0:
                handles = [handle for rank in pending.values() for handle in (rank.connection, rank.process.sentinel)]
                ready = wait(handles, remaining)
                for number, rank in list(pending.items()):
                    if rank.connection in ready or rank.process.sentinel in ready:
                        del pending[number]
                        is_result, answer = _receive(rank)
                        (results if is_result else failures)[number] = answer
                if failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            for rank in pending.values():
                os.kill(rank.process.pid, signal.SIGUSR1)  # not yet collected, so the number still belongs to it
            for number, rank in pending.items():
                failures[number] = (math.inf, f"gave no answer in time; it was here:\n{_stack_of(rank)}")
            if failures:
                in_order = sorted(failures.items(), key=lambda failure: failure[1][0])
                raise RankError({number: error for number, (_, error) in in_order}, len(ranks))
        except BaseException:  # also Ctrl-C, or a test's timeout: the next call must not read the answers to this one
            _end_ranks(self._ranks)
            raise
        return [results[number] for number in range(len(ranks))]


def _receive(rank: _Rank) -> tuple[bool, Any]:
    """(True, result) or (False, (when, what went wrong)). A dead rank cannot say when: it counts as the first to fail."""
    # A rank that answered and ended at once is ready twice: its answer counts. One that dies while sending: OSError.
    with contextlib.suppress(EOFError, OSError):
        if rank.connection.poll():
            return pickle.loads(rank.connection.recv_bytes())
    rank.process.join(_GRACE_SECONDS)
    return False, (-math.inf, f"ended without an answer, exit code {rank.process.exitcode}")


def _stack_of(rank: _Rank) -> str:
    """What a rank writes at SIGUSR1, also inside a C call, as soon as it does not grow any more."""
    text, deadline = b"", time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, text = text, os.pread(rank.stack.fileno(), 1 << 20, 0)
        if text and text == before:
            break
    return text.decode()


def _end_ranks(ranks: list[_Rank]) -> None:
    """Ends the processes and collects them: no zombie stays."""
    for rank in ranks:
        rank.connection.close()
        rank.stack.close()
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
    ranks.clear()


@dataclass
class _ServedRank:
    """A rank in its own process."""

    number: int
    timeout: float
    use_megatron: bool
    listener: socket.socket
    stack: IO[bytes]
    store: dist.Store | None = None
    rendezvous: str | None = None  # of the groups that it has

    def serve(self, callers_end: Connection, connection: Connection, job: _Job | None) -> None:
        """Answers jobs, the first of them inherited, until one fails or the pipe ends.

        An answer is a pickled (True, result) or (False, (time of the failure, traceback)). After a failure the rank ends, so
        that peers that wait for it in a collective find a closed connection and need not wait for their timeout.
        """
        callers_end.close()  # the pipe ends with the caller, and with later ranks, which have a copy
        gc.freeze()  # the caller's objects outlive the rank: Megatron's gc.collect() need not search and so copy them
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the caller ends the ranks
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=True, chain=False)
        while True:
            try:
                payload = connection.recv_bytes() if job is None else b""
            except EOFError:
                return
            try:
                job = pickle.loads(payload) if job is None else job
                signal.alarm(int(self.timeout + _GRACE_SECONDS))  # the caller ends it before; it has lost its caller
                self._prepare(job)
                answer = pickle.dumps((True, job.function(self.number, *job.args)))
            except BaseException:
                connection.send_bytes(pickle.dumps((False, (time.monotonic(), traceback.format_exc()))))
                return
            connection.send_bytes(answer)
            signal.alarm(0)
            job = None

    def _prepare(self, job: _Job) -> None:
        """Makes the job's process groups where its rendezvous is not the last job's, and sets the random state."""
        if self.rendezvous != job.rendezvous:
            if self.rendezvous is not None:
                _destroy_groups(self.use_megatron)
            with _groups_on_one_device():
                self._make_groups(job)
            self.rendezvous = job.rendezvous
        torch.manual_seed(_SEED)
        if self.use_megatron:
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(_SEED)
            _forget_router_losses()

    def _make_groups(self, job: _Job) -> None:
        """Ranks meet in a store on the caller's port. A file store is read every 10 ms: too slow for fifty groups."""
        if sys.platform == "linux":  # the loopback device: a host name that does not resolve must not matter
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = datetime.timedelta(seconds=self.timeout)
        if self.store is None:
            address, port = self.listener.getsockname()
            owned: dict[str, Any] = {}
            if self.number == 0:  # it alone keeps the port open: after its end a connection is refused at once
                owned = {"is_master": True, "wait_for_workers": False, "master_listen_fd": self.listener.detach()}
            self.listener.close()
            self.store = dist.TCPStore(address, port, timeout=timeout, **owned)
        names = dist.PrefixStore(job.rendezvous, self.store)
        dist.init_process_group("gloo", store=names, rank=self.number, world_size=job.world_size, timeout=timeout)
        if self.use_megatron:
            install_cpu_support()
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(**job.model_parallel)


def _forget_router_losses() -> None:
    """Megatron-Core sums the losses of routers for its log, in tensors of as many layers as the first model has."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker as forget  # since 0.18
    except ModuleNotFoundError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        forget = get_moe_layer_wise_logging_tracker().clear
    forget()


def _groups_on_one_device() -> contextlib.AbstractContextManager[Any]:
    """Each gloo device has a thread that wakes every 10 ms, and torch gives each group its own device: a layout has twenty."""
    c10d: Any = dist.distributed_c10d
    gloo: Any = c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class OnOneDevice(gloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **keywords):
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            for name, value in keywords.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    return mock.patch.object(c10d, "ProcessGroupGloo", OnOneDevice)


def _destroy_groups(use_megatron: bool) -> None:
    """Each gloo group has threads and connections, and a group that a job made has a device: what is kept costs time."""
    if use_megatron:
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        parallel_state.destroy_model_parallel()
        getattr(RotaryEmbedding.forward, "cache_clear", lambda: None)()  # its keys are modules, which have groups
    dist.destroy_process_group()
    # What a module of the last job keeps of a forward, such as a dispatcher's probabilities, keeps the graph. The graph keeps DDP's
    # hooks, these keep the modules, and gc.collect() cannot see a cycle through the graph.
    for kept in gc.get_objects():
        if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
            with contextlib.suppress(RuntimeError):  # a view cannot be detached; what it is a view of can
                kept.detach_()
    gc.collect()  # the rest are cycles of Python objects
