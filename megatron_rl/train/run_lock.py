"""Locks an output directory for one run. The lock ends with its process, however that ends. Nothing waits for it."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_rl.errors import ConfigError, printable

LOCK_FILE = "run.lock"
# The errors of a file system without locks: there the file's text alone says who holds it.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Holder:
    """The run that wrote the file."""

    host: str
    machine: str
    """Equal in all containers of a machine, and new after each start of the machine; "" where it is unknown."""
    pid: int
    process_start: str
    """Clock ticks, which tell a process from a later one with the same pid; "" where they are unknown."""
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {printable(self.host)}, since {printable(self.since)}"

    @classmethod
    def of_this_process(cls) -> Holder:
        now = datetime.datetime.fromtimestamp(time.time()).isoformat(" ", "seconds")
        pid = os.getpid()
        return cls(socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), pid, _start_of_process(pid), now)

    @classmethod
    def of_text(cls, text: bytes) -> Holder | None:
        """None for an empty file, and for one that no run wrote."""
        try:
            holder = cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
        kinds = (str, str, int, str, str)
        return holder if all(isinstance(v, kind) for v, kind in zip(asdict(holder).values(), kinds, strict=True)) else None

    def is_on_this_machine(self) -> bool:
        here = Holder.of_this_process()
        return self.host == here.host or self.machine == here.machine != ""

    def is_alive(self) -> bool:
        """For a holder on this machine."""
        return self.pid > 0 and Path(f"/proc/{self.pid}").exists() and self.process_start == _start_of_process(self.pid)


class RunLock:
    """Held from `acquire` until `release`, or until the process is gone, by kill -9 too.

    It is a POSIX record lock: the kernel, or a network file system's server, drops it with the process, and no forked process
    inherits it. The file's text names the holder. Only the text is left where a file system has no locks, and where a holder on
    another machine was killed: it does not say whether that one lives. Two cases are not noticed: a file system that gives each of
    two machines its own lock, and a run that writes to the same folder through another path on a file system without locks.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def acquire(self, output_dir: str | Path) -> str | None:
        """A line about an ended run whose lock was taken over, or None. ConfigError where another run holds it, or may hold it."""
        path = Path(output_dir) / LOCK_FILE
        file = path.open("a+b", buffering=0)
        try:
            line = self._acquire(file, path)
        except BaseException:
            file.close()
            raise
        self._file = file
        return line

    def _acquire(self, file: BinaryIO, path: Path) -> str | None:
        is_locked = has_locks = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                has_locks = False
            elif error.errno in (errno.EACCES, errno.EAGAIN):
                is_locked = False
            else:
                raise
        file.seek(0)
        holder = Holder.of_text(file.read(4096))
        if not is_locked or (holder is not None and not has_locks and holder.is_on_this_machine() and holder.is_alive()):
            who = "another run" if holder is None else f"another run, {holder}"
            raise ConfigError(f"{path.parent} is in use by {who}: wait for it, end it, or name another --output-dir")
        if holder is not None and not holder.is_on_this_machine():
            raise ConfigError(
                f"{path.parent} was left in use by a run on another machine, {holder}, which this one cannot look at: if that run "
                f"is gone, type: rm {path}"
            )
        file.truncate(0)
        file.write(json.dumps(asdict(Holder.of_this_process())).encode() + b"\n")
        return None if holder is None else f"{path.parent} was left in use by {holder}, which is gone: taken over"

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Leaves the file, empty: removing it could remove the lock of a run that has just begun."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _start_of_process(pid: int) -> str:
    """The 22nd field of /proc/<pid>/stat; the second one may hold spaces and parentheses."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
