"""A forked rank: it takes jobs from its pipe and answers each. It ends with its caller, and after a failure at once."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.megatron.cpu import install_cpu_support

_SEED = 123
# The caller ends a rank after the job's timeout. A rank that runs this much longer has lost its caller.
_ORPHAN_SECONDS = 15


@dataclass(frozen=True)
class Job:
    """One call of `function(rank, *args)` on `world_size` ranks; their groups meet under the name `rendezvous`."""

    function: Callable[..., Any]
    args: tuple
    world_size: int
    timeout: float
    use_megatron: bool
    model_parallel: dict[str, Any]
    rendezvous: str

    def layout(self) -> tuple:
        """What the process groups depend on; successive jobs of one layout share groups and rendezvous."""
        return self.world_size, self.timeout, self.model_parallel


def serve(
    number: int,
    connection: Connection,
    callers_ends: Iterable[Connection],
    stack_file: str,
    listener: socket.socket,
    job: Job | None,
) -> None:
    """Answers jobs, the first of them inherited, until one fails or the pipe ends.

    An answer is a pickled (True, result) or (False, (time of the failure, traceback)). After a failure the rank ends, so
    that peers that wait for it in a collective find a closed connection and need not wait for their timeout.
    """
    for end in callers_ends:  # copies that the fork made: a pipe ends when the caller's own end is closed
        end.close()
    gc.freeze()  # the caller's objects outlive the rank: Megatron's gc.collect() need not search them, which would also copy them
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the caller ends the ranks
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
        store, rendezvous = None, None
        while True:
            try:
                payload = connection.recv_bytes() if job is None else b""
            except EOFError:
                return
            try:
                asked: Job = pickle.loads(payload) if job is None else job
                signal.alarm(int(asked.timeout) + _ORPHAN_SECONDS)
                store = _make_store(number, listener, asked) if store is None else store
                _prepare(number, asked, store, rendezvous)
                answer = pickle.dumps((True, asked.function(number, *asked.args)))
            except BaseException:
                connection.send_bytes(pickle.dumps((False, (time.monotonic(), traceback.format_exc()))))
                return
            connection.send_bytes(answer)
            signal.alarm(0)
            job, rendezvous = None, asked.rendezvous


def _make_store(number: int, listener: socket.socket, job: Job) -> dist.Store:
    """The store through which the ranks of a pool find each other: rank 0 answers the others on the caller's port.

    A file store is slower: ranks read it only every 10 ms, and a layout has some fifty groups.
    """
    address, port = listener.getsockname()
    timeout = datetime.timedelta(seconds=job.timeout)
    # Rank 0 alone keeps the port open: after its end a connection is refused at once.
    if number > 0:
        listener.close()
        return dist.TCPStore(address, port, timeout=timeout)
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=timeout)


def _prepare(number: int, job: Job, store: dist.Store, rendezvous: str | None) -> None:
    """Sets the random state, and makes the job's process groups where its rendezvous is not the last job's."""
    if rendezvous is not None and rendezvous != job.rendezvous:
        _destroy_groups(job.use_megatron)
    if rendezvous != job.rendezvous:
        _make_groups(number, job, store)
    torch.manual_seed(_SEED)
    if job.use_megatron:
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(_SEED)
        _forget_router_losses()


def _forget_router_losses() -> None:
    """Megatron-Core sums the losses of routers for its log, in tensors of as many layers as the first model has."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker as forget  # since 0.18
    except ModuleNotFoundError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        forget = get_moe_layer_wise_logging_tracker().clear
    forget()


def _make_groups(number: int, job: Job, store: dist.Store) -> None:
    if sys.platform == "linux":  # the loopback device: a host name that does not resolve must not matter
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=job.timeout)
    store.set_timeout(timeout)
    names = dist.PrefixStore(job.rendezvous, store)
    with _groups_on_one_device():
        dist.init_process_group("gloo", store=names, rank=number, world_size=job.world_size, timeout=timeout)
        if job.use_megatron:
            install_cpu_support()
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(**job.model_parallel)


@contextlib.contextmanager
def _groups_on_one_device() -> Iterator[None]:
    """Each gloo device has a thread that wakes every 10 ms, and torch gives each group its own device: a layout has twenty."""
    c10d: Any = dist.distributed_c10d
    of_torch: Any = c10d.ProcessGroupGloo
    if not hasattr(of_torch, "_Options"):
        yield
        return
    device = of_torch.create_default_device()

    class OnOneDevice(of_torch):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **keywords):
            options = of_torch._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            if not all(hasattr(options, name) for name in keywords):  # of a later torch: groups with a device each are only slower
                super().__init__(store, rank, size, timeout=timeout, **keywords)
                return
            for name, value in keywords.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnOneDevice
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = of_torch


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
