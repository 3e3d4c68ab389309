"""Watches the other ranks of a run: when one ends, every rank names it and ends too, also in a collective, a save or a forward."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

from megatron_rl.errors import printable
from megatron_rl.layout.agreement import all_gather_objects
from megatron_rl.train.run_lock import Holder

# A rank may end by its own message, which says more, before the watch ends its process: after the loss of a peer a collective of
# gloo raises at once; after a peer's error the peer's connections are still there for a moment.
GRACE_AFTER_LOSS, GRACE_AFTER_ERROR = 3.0, 10.0
# A process that ends closes its connection at once. A machine that is gone does not: the system asks it, and gives up after 9 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
CONNECT_SECONDS = 30.0
LONGEST_LINE, LONGEST_TEXT = 8192, 1000
WELCOME, GOODBYE, FAILED, ENDED = "welcome", "goodbye", "failed", "ended"
_exit_process = os._exit  # a user's code may replace it
_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()
# Held from a connection's first moment until its watch has it, and while this process forks: a child closes what a watch has, and a
# copy that it kept would hide the end of its parent from the other ranks.
_registering = threading.Lock()


class PeerWatch:
    """`with PeerWatch() as watch:` encloses what the ranks do together; leaving the block says goodbye, or why this rank fails.

    Each rank keeps a connection to rank 0, which the system closes when its process ends, however it ends. Nothing is sent while
    all ranks live, so a slow or busy rank is never taken for a dead one. Rank 0 tells the others who ended. A rank that has not
    ended by itself GRACE_AFTER_LOSS or GRACE_AFTER_ERROR seconds later is ended by a thread, with exit code 1.

    A rank that cannot connect says so, and goes on: a lost peer then shows when a collective fails. One rank has no peers.
    Communication: two all-gathers of objects over all ranks in __enter__; none later, and none through torch.
    """

    def __init__(self) -> None:
        self._text: str | None = None
        self._deadline = float("inf")
        self._is_known = threading.Event()
        self._last_words = {"event": GOODBYE, "text": ""}
        self._is_over = False
        self._sockets = selectors.PollSelector()
        self._thread: threading.Thread | None = None
        self._rank = 0
        self._names: list[str] = []
        self._token = ""

    def __enter__(self) -> PeerWatch:
        if dist.get_world_size() == 1:
            return self
        self._rank, own = dist.get_rank(), Holder.of_this_process()
        places = all_gather_objects((own.host, own.machine))
        self._names = [f"rank {number} on host {printable(host)}" for number, (host, _) in enumerate(places)]
        address = "127.0.0.1" if len(set(places)) == 1 else os.environ["MASTER_ADDR"]
        listener = _listen(address, len(places)) if self._rank == 0 else None
        port = None if listener is None else listener.getsockname()[1]
        port, self._token = all_gather_objects((port, secrets.token_hex(16)))[0]
        self._wakes, self._woken = socket.socketpair()
        self._sockets.register(self._woken, selectors.EVENT_READ)
        if listener is not None:
            listener.setblocking(False)  # an accept must not wait while it keeps this process from forking
            self._sockets.register(listener, selectors.EVENT_READ)
        else:
            try:
                peer = _Peer(socket.create_connection((address, port), CONNECT_SECONDS), 0)
                peer.send({"token": self._token, "rank": self._rank})
                while not (heard := peer.messages()):  # the welcome: from now on rank 0 says goodbye to this rank
                    if heard is None:
                        raise ConnectionError("rank 0 has closed the connection")
                for message in heard:
                    self._take(peer, message)
                self._sockets.register(peer.socket, selectors.EVENT_READ, peer)
            except OSError as error:
                logging.getLogger(__name__).warning(
                    f"rank {self._rank} cannot connect to rank 0 at {address}, port {port} ({error}): if a rank ends, this one may "
                    "wait for it until a collective runs out of time; allow connections between the hosts of the run"
                )
        _watches.add(self)
        self._thread = threading.Thread(target=self._watch, name="watch over the other ranks", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._thread is None:
            return
        if error is not None:
            self._last_words = {"event": FAILED, "text": f"{type(error).__name__}: {error}"[:LONGEST_TEXT]}
        self._is_over = True
        self._wakes.send(b"x")  # the thread may have ended already, woken by another rank: it closes nothing
        self._thread.join()
        self._close()

    def who_ended(self) -> str | None:
        """As in "rank 3 on host a ended", where the watch knows it or hears it within a moment; else None."""
        if self._thread is not None:
            self._is_known.wait(GRACE_AFTER_LOSS)
        return self._text

    def _watch(self) -> None:
        while not self._is_over:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                self._end_process()
            for key, _ in self._sockets.select(None if remaining == float("inf") else remaining):
                if key.data is not None:
                    self._read(key.data)
                elif isinstance(key.fileobj, socket.socket) and key.fileobj is not self._woken:
                    self._accept(key.fileobj)
        for peer in self._peers():
            peer.send(self._last_words)

    def _end_process(self) -> None:
        print(
            f"\nmegatron-rl train: RunError: {self._text}: no step is possible without it, so this rank ends too; --resume goes on "
            "from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        _exit_process(1)

    def _accept(self, listener: socket.socket) -> None:
        try:
            with _registering:
                connection, _ = listener.accept()
                self._sockets.register(connection, selectors.EVENT_READ, _Peer(connection, None))
        except BlockingIOError:  # who asked is gone
            return
        except OSError as error:  # no file descriptor is left: it would be asked for again at once
            logging.getLogger(__name__).warning(f"the watch over the ranks takes no further connection: {error}")
            self._sockets.unregister(listener)

    def _read(self, peer: _Peer) -> None:
        try:
            messages = peer.messages()
        except (OSError, ValueError, RecursionError):  # the last two: no rank sends such lines
            messages = None
        for message in messages or ():
            if peer.rank is None:
                if not isinstance(message, dict) or message.get("token") != self._token:
                    messages = None
                    break
                peer.rank = message["rank"]
                peer.send({"event": WELCOME})
                if self._text is not None:
                    peer.send(self._news())
            else:
                self._take(peer, message)
        if messages is None:
            self._sockets.unregister(peer.socket)
            peer.socket.close()
            if peer.rank is not None and not peer.has_left:
                self._hear(f"{self._names[peer.rank]} ended", GRACE_AFTER_LOSS)

    def _take(self, peer: _Peer, message: dict) -> None:
        """One message of a rank."""
        event, peer.has_left = message["event"], peer.has_left or message["event"] in (GOODBYE, FAILED)
        if event == FAILED:
            self._hear(f"{self._names[peer.rank or 0]} ended with {printable(message['text'])}", GRACE_AFTER_ERROR)
        elif event == ENDED:
            self._hear(message["text"], message["grace"])

    def _news(self) -> dict:
        return {"event": ENDED, "text": self._text, "grace": max(0.0, self._deadline - time.monotonic())}

    def _hear(self, text: str, grace: float) -> None:
        """Keeps the first end, and on rank 0 tells the others."""
        if self._text is not None:
            return
        self._text, self._deadline = text, time.monotonic() + grace
        self._is_known.set()
        if self._rank == 0:
            for peer in self._peers():
                peer.send(self._news())

    def _peers(self) -> Iterator[_Peer]:
        """The other ends that are there, and are ranks."""
        keys = list((self._sockets.get_map() or {}).values())
        return (key.data for key in keys if key.data is not None and key.data.rank is not None)

    def _close(self) -> None:
        for key in list((self._sockets.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wakes.close()
        self._sockets.close()


class _Peer:
    """One connection, and the rank at its other end; None: it has not said its token."""

    def __init__(self, connection: socket.socket, rank: int | None):
        connection.settimeout(CONNECT_SECONDS)
        with contextlib.suppress(OSError):  # a stranger may have closed it already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self.rank, self.has_left, self._bytes = connection, rank, False, b""

    def send(self, message: dict) -> None:
        with contextlib.suppress(OSError):  # it has ended, which reading shows
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> list[dict] | None:
        """The lines that have come; None at the end. Raises ValueError for what is no message."""
        received = self.socket.recv(LONGEST_LINE)
        if not received:
            return None
        *lines, self._bytes = (self._bytes + received).split(b"\n")
        if len(self._bytes) > LONGEST_LINE:
            raise ValueError("a line without an end")
        return [json.loads(line) for line in lines]


def _listen(address: str, num_ranks: int) -> socket.socket:
    """On the loopback address where the ranks are on one machine, else on all, as torch's own store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * num_ranks + 256 and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * num_ranks + 1024), hard))
    if address == "127.0.0.1":
        return socket.create_server((address, 0), backlog=num_ranks)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=num_ranks)
    return socket.create_server(("", 0), backlog=num_ranks)


def _leave_to_the_parent() -> None:
    """In a forked process, such as a writer of checkpoints: the connection is its parent's, and ends with that."""
    _registering.release()
    for watch in list(_watches):
        watch._close()


os.register_at_fork(before=_registering.acquire, after_in_parent=_registering.release, after_in_child=_leave_to_the_parent)
