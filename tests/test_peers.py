"""The watch over the other ranks: an end is named on all that are left, whatever they do; nothing else is taken for one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import wait_until

from megatron_rl.train import peers
from megatron_rl.train.peers import PeerWatch

HOST = socket.gethostname()

pytestmark = pytest.mark.timeout(120)  # each takes a second or two; what waits for an end that nobody hears waits for ever


class Ranks:
    """Ranks of gloo, forked from this process: each runs `body(rank, watch, folder)` under a watch and says that it is inside."""

    def __init__(self, body: Callable[[int, PeerWatch, Path], object], size: int, folder: Path):
        self.folder, self.body, self.size = folder, body, size
        context = multiprocessing.get_context("fork")
        self.processes = [context.Process(target=self._serve, args=(rank,), daemon=False) for rank in range(size)]
        for process in self.processes:
            process.start()

    def _serve(self, rank: int) -> None:
        os.setsid()
        os.dup2(os.open(self.folder / f"stderr.{rank}", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = open(2, "w", closefd=False)
        store = dist.FileStore(str(self.folder / "store"), self.size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size)
        try:
            with PeerWatch() as watch:
                self.say(f"inside-{rank}")
                self.body(rank, watch, self.folder)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)
        os._exit(0)

    def say(self, name: str) -> None:
        (self.folder / name).touch()

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in names))

    def kill(self, rank: int) -> None:
        self.wait_for(*(f"inside-{number}" for number in range(self.size)))
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def ends(self) -> list[int]:
        """The exit codes. Not by join, which waits for the children of a rank too."""
        wait_until(lambda: all(process.exitcode is not None for process in self.processes))
        return [process.exitcode for process in self.processes]

    def said(self, rank: int) -> str:
        return (self.folder / f"stderr.{rank}").read_text()

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            process.join()


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[..., Ranks]]:
    # What a rank gets to end by itself is not what is tested here.
    monkeypatch.setattr(peers, "GRACE_AFTER_LOSS", 0.2)
    monkeypatch.setattr(peers, "GRACE_AFTER_ERROR", 0.2)
    started = []

    def begin(body, size: int = 2) -> Ranks:
        started.append(Ranks(body, size, tmp_path))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.close()


def forward(rank: int, watch: PeerWatch, folder: Path) -> None:
    """Matmul after matmul, none of which needs another rank."""
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)


def system_call(rank: int, watch: PeerWatch, folder: Path) -> None:
    """As a wait of NCCL or of a file system: nothing that Python can interrupt returns."""
    while True:
        signal.pause()


def save(rank: int, watch: PeerWatch, folder: Path) -> None:
    """Waits for a writer that it has forked, which holds copies of all connections and outlives its rank."""
    child = os.fork()
    if child == 0:
        (folder / f"child-{rank}").touch()
        while True:
            signal.pause()
    os.waitpid(child, 0)


def unheard_collective(rank: int, watch: PeerWatch, folder: Path) -> None:
    """The rank that is killed has a child, so gloo's connections stay open, and the collective of the others waits."""
    if rank == 1:
        save(rank, watch, folder)
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("body", [forward, system_call, save], ids=lambda body: body.__name__)
def test_a_killed_rank_is_named_on_the_others(body, victim, start):
    ranks = start(body)
    if body is save:
        ranks.wait_for(f"child-{victim}")
    ranks.kill(victim)
    codes, other = ranks.ends(), 1 - victim
    assert codes[other] == 1 and codes[victim] == -signal.SIGKILL
    assert f"megatron-rl train: RunError: rank {victim} on host {HOST} ended: no step is possible" in ranks.said(other)


@pytest.mark.parametrize("victim", [0, 2])
def test_all_ranks_that_are_left_name_the_same_one(victim, start):
    ranks = start(system_call, 4)
    ranks.kill(victim)
    left = [rank for rank in range(4) if rank != victim]
    codes = ranks.ends()
    assert [codes[rank] for rank in left] == [1, 1, 1]
    assert all(f"RunError: rank {victim} on host {HOST} ended:" in ranks.said(rank) for rank in left)


def test_a_collective_whose_connections_outlive_their_rank_ends_too(start):
    ranks = start(unheard_collective)
    ranks.wait_for("child-1")
    ranks.kill(1)
    assert ranks.ends()[0] == 1 and f"rank 1 on host {HOST} ended" in ranks.said(0)


def test_a_child_forked_while_its_rank_accepts_a_connection_keeps_none(start, monkeypatch, tmp_path):
    """A rank is inside before rank 0 has its connection, so rank 0 may fork in the middle of that."""
    accept = peers._Peer

    def accept_slowly(connection, rank):
        if rank is None:
            (tmp_path / "accepting").touch()
            time.sleep(0.5)
        return accept(connection, rank)

    def fork_then(rank, watch, folder):
        wait_until((tmp_path / "accepting").exists)
        save(rank, watch, folder)

    monkeypatch.setattr(peers, "_Peer", accept_slowly)
    ranks = start(fork_then)
    ranks.wait_for("child-0")
    ranks.kill(0)
    assert ranks.ends()[1] == 1 and f"rank 0 on host {HOST} ended" in ranks.said(1)


def test_an_error_of_one_rank_is_told_to_the_others(start):
    def body(rank, watch, folder):
        if rank == 1:
            raise ZeroDivisionError("of this rank alone\x1b[2J")
        system_call(rank, watch, folder)

    ranks = start(body, 3)
    assert ranks.ends() == [1, 3, 1]
    for rank in (0, 2):
        assert f"rank 1 on host {HOST} ended with ZeroDivisionError: of this rank alone\\x1b[2J: no step" in ranks.said(rank)


def test_a_rank_may_say_itself_who_ended(start, monkeypatch):
    """As it does after an error of a collective. The wait for the news is longer than a busy machine takes to kill the other."""
    monkeypatch.setattr(peers, "GRACE_AFTER_LOSS", 60.0)

    def body(rank, watch, folder):
        if rank == 1:
            system_call(rank, watch, folder)
        raise RuntimeError(f"{watch.who_ended()}, says gloo")

    ranks = start(body)
    ranks.kill(1)
    assert ranks.ends()[0] == 3 and f"rank 1 on host {HOST} ended, says gloo" in ranks.said(0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_that_are_done_one_after_the_other_say_nothing(order, start):
    def body(rank, watch, folder):
        before = order[: order.index(rank)]
        wait_until(lambda: all((folder / f"done-{number}").exists() for number in before))

    def and_say(rank, watch, folder):
        body(rank, watch, folder)
        (folder / f"done-{rank}").touch()

    ranks = start(and_say, 3)
    assert ranks.ends() == [0, 0, 0]
    assert all("RunError" not in ranks.said(rank) for rank in range(3))


def test_a_watch_that_another_rank_wakes_last_of_all_is_left_without_an_error(start):
    """A goodbye may come after this rank has said that it is over and before it wakes its thread, which has then ended."""

    class WokenBefore:
        def __init__(self, watch: PeerWatch):
            self.thread, self.socket = watch._thread, watch._wakes

        def send(self, data: bytes) -> None:
            self.socket.send(data)
            self.thread.join()
            self.socket.send(data)

        def close(self) -> None:
            self.socket.close()

    def body(rank, watch, folder):
        dist.barrier()
        watch._wakes = WokenBefore(watch)

    ranks = start(body)
    assert ranks.ends() == [0, 0], ranks.said(0) + ranks.said(1)


def test_a_child_that_ends_is_no_rank_that_ends(start):
    """Writers of checkpoints end all the time, and so do processes of a user's reward."""

    def body(rank, watch, folder):
        for _ in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        dist.barrier()

    ranks = start(body)
    assert ranks.ends() == [0, 0], ranks.said(0) + ranks.said(1)


def test_strangers_are_not_heard(start):
    """Lines without the token of the run, of any length."""

    def body(rank, watch, folder):
        if rank == 0:
            port = next(
                key.fileobj.getsockname()[1] for key in watch._sockets.get_map().values() if key.fileobj.family == socket.AF_INET
            )
            for line in (
                b"GET / HTTP/1.1\r\n\r\n",
                b'{"event": "failed", "text": "x"}\n',
                b"[]\n",
                b"1\n",
                b"x" * 100_000,
                b"\xff\n",
                b"[" * 8000 + b"\n",
            ):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    with contextlib.suppress(OSError):
                        stranger.sendall(line)
                        while stranger.recv(1000):
                            raise AssertionError("an answer")
            assert watch._thread.is_alive()
        dist.barrier()

    ranks = start(body)
    assert ranks.ends() == [0, 0], ranks.said(0) + ranks.said(1)


def test_one_rank_watches_nobody(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with PeerWatch() as watch:
            assert watch.who_ended() is None
    finally:
        dist.destroy_process_group()
