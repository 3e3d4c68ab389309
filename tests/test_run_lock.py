"""The lock of an output directory: held by the living, taken from the dead, never guessed about another machine."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict

import pytest
from helpers import error_of

from megatron_rl.training import run_lock
from megatron_rl.training.run_lock import LOCK_FILE, Holder, RunLock


def hold(folder, ready, orphan: bool) -> None:
    lock = RunLock()
    lock.acquire(folder)
    if orphan:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,), daemon=False).start()
    ready.set()
    time.sleep(30)


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the lock of tmp_path, with a child of its own where that is asked for."""
    started = []

    def start(orphan: bool = False):
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        process = context.Process(target=hold_in_a_group, args=(tmp_path, ready, orphan))
        process.start()
        started.append(process)
        assert ready.wait(20)
        return process

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.join()


def hold_in_a_group(folder, ready, orphan: bool) -> None:
    os.setpgid(0, 0)
    hold(folder, ready, orphan)


def refusal(folder) -> str:
    return error_of(lambda: RunLock().acquire(folder))


def test_a_run_that_lives_keeps_others_out_and_is_named(tmp_path, holder):
    process = holder()
    message = refusal(tmp_path)
    assert message.startswith(
        f"ConfigError: {tmp_path} is in use by another run, process {process.pid} on host {os.uname().nodename}"
    )
    assert "since 2" in message and message.endswith(": wait for it, end it, or name another --output-dir")


@pytest.mark.parametrize("orphan", [False, True], ids=["alone", "with a child that lives on"])
def test_a_killed_run_s_lock_is_taken_over_with_a_line(tmp_path, holder, orphan):
    """kill -9 releases nothing by itself; a child that the run forked must not hold what its parent held."""
    process = holder(orphan)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    lock = RunLock()
    line = lock.acquire(tmp_path)
    assert line.startswith(f"{tmp_path} was left in use by process {process.pid} on host ") and line.endswith(
        ", which is gone: taken over"
    )
    lock.release()
    assert (tmp_path / LOCK_FILE).read_bytes() == b""
    assert RunLock().acquire(tmp_path) is None


def test_a_run_that_ended_leaves_nothing_to_say(tmp_path):
    lock = RunLock()
    assert lock.acquire(tmp_path) is None
    lock.release()
    lock.release()
    assert lock.acquire(tmp_path) is None


def write(folder, **changes) -> None:
    (folder / LOCK_FILE).write_text(json.dumps({**asdict(Holder.of_this_process()), **changes}))


def test_a_run_on_another_machine_is_not_guessed_about(tmp_path):
    """Its process cannot be seen: the message gives the line that takes the lock from it."""
    write(tmp_path, host="node7\x1b[2J", machine="other", pid=1)
    message = refusal(tmp_path)
    assert "left in use by a run on another machine, process 1 on host node7\\x1b[2J, since" in message
    assert message.endswith(f"type: rm {tmp_path / LOCK_FILE}")
    (tmp_path / LOCK_FILE).unlink()
    assert refusal(tmp_path) == ""


def test_another_container_of_this_machine_is_no_other_machine(tmp_path):
    """A restarted container has another host name; the kernel, whose lock it is, is the same."""
    write(tmp_path, host="pod-1", pid=2**22 + 1)
    assert "which is gone: taken over" in RunLock().acquire(tmp_path)


@pytest.fixture
def without_locks(monkeypatch):
    def lockf(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)


def test_without_locks_the_text_decides(tmp_path, without_locks):
    """Some network file systems have none: the process that the file names is looked for, by pid and by its start."""
    write(tmp_path)
    assert f"is in use by another run, process {os.getpid()} on host" in refusal(tmp_path)
    write(tmp_path, process_start="1")  # an earlier process of this pid
    assert "which is gone: taken over" in RunLock().acquire(tmp_path)
    write(tmp_path, pid=2**22 + 1)
    assert "which is gone: taken over" in RunLock().acquire(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "x", "[]", "{}", '{"host": 1}', "\x00\xff", json.dumps({**asdict(Holder.of_this_process()), "pid": "1"})]
)
def test_a_file_that_no_run_wrote_is_taken(tmp_path, text):
    (tmp_path / LOCK_FILE).write_text(text)
    lock = RunLock()
    assert lock.acquire(tmp_path) is None
    assert Holder.of_text((tmp_path / LOCK_FILE).read_bytes()).pid == os.getpid()
    lock.release()


def test_the_start_of_a_process_survives_its_name():
    """/proc/<pid>/stat holds the name, which may look like the rest of the line."""
    assert run_lock._start_of_process(os.getpid()).isdigit() and run_lock._start_of_process(2**22 + 1) == ""
