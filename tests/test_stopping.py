"""How a run ends: signals become requests, ranks decide together, and the lock of its folder is taken from the dead alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict

import pytest
from helpers import error_of, pool_of

from megatron_rl.testing.ranks import HANG_SECONDS
from megatron_rl.train import run_lock
from megatron_rl.train.run_lock import LOCK_FILE, Holder, RunLock
from megatron_rl.train.stopping import StopRule, StopSignals

pool = pool_of(2, use_megatron=False)


def rule_of(signals=None, **others) -> StopRule:
    values = {"max_seconds": None, "target_reward": None, "window": 3, "recent_rewards": [], **others}
    return StopRule(StopSignals() if signals is None else signals, **values)


def test_signals_are_remembered_and_a_second_ctrl_c_alone_interrupts():
    """Catches a Ctrl-C that ends the process between a checkpoint's files, and handlers that stay behind."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RuntimeError, match="in the middle"), StopSignals() as signals:
        assert signals.received == 0
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            time.sleep(0)
            assert signals.received == number
        raise RuntimeError("in the middle")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def decide_on_rank(rank, signals_of_rank, rewards, settings, age=0.0):
    """(number of the rollout that ended the run, reason, exit code, rewards kept); signals arrive in rollout 1. The run of each
    rank is older by `age` seconds than that of the rank before."""
    signals = StopSignals()
    rule = rule_of(signals, **settings)
    rule._started -= age * rank
    for number, reward in enumerate(rewards):
        signals.received = signals_of_rank[rank] if number == 1 else signals.received
        if rule.should_stop(reward):
            return number, rule.reason, rule.exit_code, list(rule.recent_rewards)
    return None, rule.reason, rule.exit_code, list(rule.recent_rewards)


# By hand, window 3: 0.9, 0.9, 0.2 give 0.667; 0.9, 0.2, 1.0 give 0.7; 0.2, 1, 1 give 0.733. Before three there is no mean.
REWARDS = [0.9, 0.9, 0.2, 1.0, 1.0, 1.0]
REACHED = "mean reward 0.733 of the last 3 rollouts reached the target"
AT_ONCE = {"target_reward": 0.0, "window": 1}
INT, TERM = signal.SIGINT, signal.SIGTERM
ENDS = [
    # signals of the ranks, rewards, settings, (rollout, reason, exit code, rewards kept)
    pytest.param((0, INT), [0.1, 0.2, 0.3], {}, (1, "stopped by SIGINT", 130, [0.1, 0.2]), id="Ctrl-C reached one rank alone"),
    pytest.param((TERM, 0), [0.1, 0.2, 0.3], {}, (1, "stopped by SIGTERM", 143, [0.1, 0.2]), id="SIGTERM on the other"),
    pytest.param((INT, TERM), [0.1, 0.2, 0.3], {}, (1, "stopped by SIGTERM", 143, [0.1, 0.2]), id="unlike signals: one answer"),
    pytest.param((0, 0), REWARDS, {"target_reward": 0.72}, (4, REACHED, 0, [0.2, 1.0, 1.0]), id="the target is a mean of 3"),
    pytest.param((0, 0), REWARDS[:2], {"target_reward": 0.1}, (None, None, 0, [0.9, 0.9]), id="no mean before three"),
    pytest.param(
        *((0, 0), [1.0], {"target_reward": 0.72, "recent_rewards": [0.9, 0.2, 1.0]}, (0, REACHED, 0, [0.2, 1.0, 1.0])),
        id="FB-90 rewards before a resume count",
    ),
    pytest.param((0, 0), [0.0], {"max_seconds": 5.0}, (0, "--max-seconds 5 are over", 0, [0.0]), id="one rank's clock is enough"),
    pytest.param(
        *((INT, 0), [0.5, 0.5], {**AT_ONCE, "window": 2}, (1, "stopped by SIGINT", 130, [0.5, 0.5])),
        id="a signal comes before the target",
    ),
    pytest.param(
        *((0, 0), [0.5], {"target_reward": 0.5, "window": 1, "max_seconds": 1e-9}),
        (0, "mean reward 0.500 of the last 1 rollouts reached the target", 0, [0.5]),
        id="the target itself is enough, and comes before the clock",
    ),
]


@pytest.mark.parametrize(("signals", "rewards", "settings", "expected"), ENDS)
def test_all_ranks_stop_at_the_same_rollout_for_the_same_reason(pool, signals, rewards, settings, expected):
    """A rank that stops alone leaves the others in the next collective. The exit code is a shell's 128 + signal."""
    age = 10.0 if settings.get("max_seconds") == 5.0 else 0.0
    first, second = pool.run(decide_on_rank, signals, rewards, settings, age)
    assert first == second == expected


def hold(folder, ready, has_child: bool) -> None:
    os.setpgid(0, 0)
    lock = RunLock()
    lock.acquire(folder)
    if has_child:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=False).start()
    ready.set()
    time.sleep(1000)


@contextlib.contextmanager
def holder(folder, has_child: bool = False):
    """A process that holds the lock of the folder, with a child of its own where that is asked for."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(folder, ready, has_child))
    process.start()
    try:
        assert ready.wait(HANG_SECONDS)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def refusal(folder) -> str:
    return error_of(lambda: RunLock().acquire(folder))


@pytest.mark.parametrize("has_child", [False, True], ids=["alone", "with a child that lives on"])
def test_a_run_that_lives_keeps_others_out_and_a_killed_one_does_not(tmp_path, has_child):
    """kill -9 releases nothing by itself; a child that the run forked must not hold what its parent held."""
    with holder(tmp_path, has_child) as process:
        message = refusal(tmp_path)
        in_use = f"{tmp_path} is in use by another run, process {process.pid} on host {os.uname().nodename}, since 2"
        assert message.startswith(f"ConfigError: {in_use}")
        assert message.endswith(": wait for it, end it, or name another --output-dir")
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        lock = RunLock()
        line = lock.acquire(tmp_path)
        assert line.startswith(f"{tmp_path} was left in use by process {process.pid} on host ")
        assert line.endswith(", which is gone: taken over")
    for _ in range(2):
        lock.release()
    assert (tmp_path / LOCK_FILE).read_bytes() == b"" and lock.acquire(tmp_path) is None


def write(folder, **changes) -> None:
    (folder / LOCK_FILE).write_text(json.dumps({**asdict(Holder.of_this_process()), **changes}))


def test_a_run_on_another_machine_is_not_guessed_about(tmp_path):
    """Its process cannot be seen. A restarted container has another host name; the kernel, whose lock it is, is the same."""
    write(tmp_path, host="node7\x1b[2J", machine="other", pid=1)
    message = refusal(tmp_path)
    assert "left in use by a run on another machine, process 1 on host node7\\x1b[2J, since" in message
    assert message.endswith(f"type: rm {tmp_path / LOCK_FILE}")
    (tmp_path / LOCK_FILE).unlink()
    assert refusal(tmp_path) == ""
    write(tmp_path, host="pod-1", pid=2**22 + 1)
    assert "which is gone: taken over" in RunLock().acquire(tmp_path)


def test_without_locks_the_text_decides(tmp_path, monkeypatch):
    """Some network file systems have none: the process that the file names is looked for, by pid and by its start."""

    def lockf(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    write(tmp_path)
    assert f"is in use by another run, process {os.getpid()} on host" in refusal(tmp_path)
    for changes in ({"process_start": "1"}, {"pid": 2**22 + 1}):  # an earlier process of this pid, and none
        write(tmp_path, **changes)
        assert "which is gone: taken over" in RunLock().acquire(tmp_path)
    # /proc/<pid>/stat holds the name, which may look like the rest of the line.
    assert run_lock._start_of_process(os.getpid()).isdigit() and run_lock._start_of_process(2**22 + 1) == ""


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"host": 1}', "\x00\xff", "its pid is a text"])
def test_a_file_that_no_run_wrote_is_taken(tmp_path, text):
    # Made here: workers that collect at different moments must see the same tests.
    text = json.dumps({**asdict(Holder.of_this_process()), "pid": "1"}) if text.startswith("its pid") else text
    (tmp_path / LOCK_FILE).write_text(text)
    lock = RunLock()
    assert lock.acquire(tmp_path) is None
    assert Holder.of_text((tmp_path / LOCK_FILE).read_bytes()).pid == os.getpid()
    lock.release()
