"""Every way in which a rank can fail: each is a RankError within the timeout, names the rank, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.testing.ranks import RankError, RankPool, run_ranks

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pool():
    with RankPool(4, use_megatron=False) as pool:
        yield pool


def sum_of_ranks(rank):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=dist.group.WORLD)
    return total.item()


def own_process(rank):
    return os.getpid()


def raise_on_one_rank(rank, failing):
    if rank == failing:
        raise ValueError(f"rank {rank} has no labels")
    return sum_of_ranks(rank)


def exit_on_one_rank(rank, failing):
    if rank == failing:
        os._exit(7)
    return sum_of_ranks(rank)


def kill_one_rank(rank, failing):
    if rank == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    return sum_of_ranks(rank)


def sleep_on_one_rank(rank, sleeping):
    if rank == sleeping:
        time.sleep(1000)
    return rank


def skip_a_collective(rank):
    """What a loss behind `if mask.any()` does: rank 1 leaves, the others wait for it."""
    if rank != 1:
        dist.all_reduce(torch.zeros(1), group=dist.group.WORLD)
    return rank


def is_gone(process_id):
    """A process that is a zombie still answers signal 0."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("function", "failing", "how"),
    [
        pytest.param(raise_on_one_rank, 2, "ValueError: rank 2 has no labels", id="raises"),
        pytest.param(exit_on_one_rank, 2, "ended without an answer, exit code 7", id="exits"),
        pytest.param(kill_one_rank, 2, "ended without an answer, signal SIGKILL", id="is killed"),
        pytest.param(kill_one_rank, 0, "ended without an answer, signal SIGKILL", id="rank 0, where all have met, is killed"),
    ],
)
def test_a_rank_that_fails_is_named_first_and_ends_the_others(pool, function, failing, how):
    """Catches a caller that waits for ever, and a report that names the ranks which only lost their peer."""
    processes = pool.run(own_process)
    start = time.monotonic()
    with pytest.raises(RankError, match="of 4 ranks failed") as caught:
        pool.run(function, failing)
    # The others stand in a collective with that rank: they see it close, and nobody waits for a timeout or a grace of 5 s.
    assert time.monotonic() - start < 4
    assert next(iter(caught.value.errors)) == failing
    assert how in caught.value.errors[failing]
    assert how in str(caught.value)
    assert all(is_gone(process) for process in processes)
    assert pool.run(sum_of_ranks)[3] == 6.0


def test_the_errors_of_all_ranks_are_in_one_exception(pool):
    with pytest.raises(RankError) as caught:
        pool.run(raise_alike)
    assert sorted(caught.value.errors) == [0, 1, 2, 3]
    for rank, error in caught.value.errors.items():
        assert f"KeyError: 'labels of {rank}'" in error


def raise_alike(rank):
    raise KeyError(f"labels of {rank}")


def test_a_rank_that_hangs_is_named_with_the_place_where_it_hangs():
    """FB-25: a hang is a failure within the timeout, not a test run that never ends."""
    start = time.monotonic()
    with pytest.raises(RankError, match=r"1 of 3 ranks failed") as caught:
        run_ranks(sleep_on_one_rank, 3, 1, timeout=1.0, use_megatron=False)
    assert time.monotonic() - start < 4
    (report,) = caught.value.errors.values()
    assert "gave no answer within 1 s" in report
    assert "in sleep_on_one_rank" in report


def test_ranks_that_wait_in_a_collective_for_a_rank_that_left_are_named():
    """FB-25, FB-29: the ranks in the collective are named with their stacks, or with gloo's own timeout."""
    with pytest.raises(RankError, match=r"2 of 3 ranks failed") as caught:
        run_ranks(skip_a_collective, 3, timeout=1.0, use_megatron=False)
    assert sorted(caught.value.errors) == [0, 2]
    for report in caught.value.errors.values():
        assert "in skip_a_collective" in report


def test_no_process_and_no_zombie_is_left_behind(tmp_path):
    """Catches ranks that run on after a failure, and ended ones that nobody collects."""

    def sleep_or_work(rank, sleeping):
        (tmp_path / str(os.getpid())).touch()
        return sleep_on_one_rank(rank, sleeping)

    run_ranks(sleep_or_work, 3, None, use_megatron=False)
    with pytest.raises(RankError):
        run_ranks(sleep_or_work, 3, 1, timeout=0.5, use_megatron=False)
    processes = [int(path.name) for path in tmp_path.iterdir()]
    assert len(processes) == 6
    assert all(is_gone(process) for process in processes)


def test_a_pool_starts_anew_when_a_rank_died_between_calls():
    with RankPool(2, use_megatron=False) as pool:
        victim = pool.run(own_process)[1]
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.1)
        assert pool.run(sum_of_ranks) == [1.0, 1.0]


ABANDON_A_POOL = """
    import os, sys, time
    from megatron_rl.testing.ranks import RankPool

    pool = RankPool(2, use_megatron=False)
    print(*pool.run(lambda rank: os.getpid()), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["ends", "killed"])
def test_ranks_of_a_pool_that_nobody_closed_end_with_their_caller(end):
    """Catches a caller whose end waits for ranks that wait for it, and ranks that outlive a killed one."""
    command = [sys.executable, "-c", textwrap.dedent(ABANDON_A_POOL), end]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    processes = [int(word) for word in answer.stdout.split()]
    assert len(processes) == 2, answer.stderr
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all(is_gone_or_zombie(process) for process in processes):
        time.sleep(0.05)
    assert all(is_gone_or_zombie(process) for process in processes)


def is_gone_or_zombie(process_id):
    """Orphans are collected by the first process of the machine, which in some containers never does."""
    status = Path(f"/proc/{process_id}/stat")
    return is_gone(process_id) or (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
