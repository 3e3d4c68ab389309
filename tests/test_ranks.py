"""run_ranks and RankPool: results in order, layouts that change, forks from a process that has worked before, and every way in
which a rank can fail: each is a RankError within the timeout, names the rank, and leaves no process."""

from __future__ import annotations

import datetime
import functools
import multiprocessing
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
from conftest import ROOT
from helpers import let_time_run_out, pool_of, wait_until
from trainer_cases import CP, PP, TP

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.testing import ranks
from megatron_rl.testing.ranks import RankError, RankPool, run_ranks

plain_pool = pool_of(4, use_megatron=False)


megatron_pool = pool_of(4)


def sum_of_ranks(rank, factor=1.0):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=dist.group.WORLD)
    return rank, dist.get_world_size(), total.item() * factor


def layout_sizes(rank):
    groups = resolve_groups()
    return tuple(group.size() for group in (groups.tp, groups.cp, groups.dp, groups.pp))


def own_process(rank):
    return os.getpid()


def test_results_come_in_rank_order_and_closures_work():
    """Catches answers in the order of arrival, a function that has to be importable, and ranks that are daemons."""
    offset, delays = torch.tensor(10), [0.1, 0.0]

    def work(rank):
        time.sleep(delays[rank])
        process = torch.multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        process.join()
        return rank + offset, process.exitcode

    assert run_ranks(work, 2, use_megatron=False) == [(10, 0), (11, 0)]
    assert run_ranks(sum_of_ranks, 2, 3.0, use_megatron=False) == [(0, 2, 3.0), (1, 2, 3.0)]


@pytest.mark.megatron
def test_a_pool_changes_its_layout_and_keeps_its_processes(megatron_pool):
    """FB-30: groups are those of the call, also after a layout on fewer ranks, and not those of the first call."""
    processes = megatron_pool.run(own_process)
    for world_size, layout, expected in ((4, {TP: 2}, (2, 1, 2, 1)), (2, {CP: 2}, (1, 2, 1, 1)), (1, {}, (1, 1, 1, 1))):
        for _ in range(2):
            assert megatron_pool.run(layout_sizes, world_size=world_size, **layout) == [expected] * world_size
        # The ranks that sat the last layout out must notice that the groups of the call before it are gone.
        assert megatron_pool.run(layout_sizes, **{PP: 4}) == [(1, 1, 1, 4)] * 4
    assert megatron_pool.run(own_process) == processes


def group_with_keywords(rank):
    c10d = dist.distributed_c10d
    with ranks._groups_on_one_device():
        group = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=60), group_name="named")
    return group.options.group_name


def test_a_group_takes_the_keywords_that_torch_gives(plain_pool):
    """torch 2.14 gives enable_reconfigure, which options have too."""
    assert plain_pool.run(group_with_keywords, world_size=1) == ["named"]


def random_numbers(count, rank):
    return torch.randn(count).tolist()


@pytest.mark.megatron
def test_a_call_does_not_see_the_random_numbers_of_the_call_before(megatron_pool):
    """Catches tests whose numbers depend on which tests ran before them on the same pool."""
    first, _, again = (megatron_pool.run(functools.partial(random_numbers, count)) for count in (2, 5, 2))
    assert first == again


def test_a_pool_sends_what_can_be_pickled_and_forks_for_the_rest(plain_pool):
    """Catches a closure that fails, and a module-level function that costs a fork at each call."""
    processes = plain_pool.run(own_process)
    assert plain_pool.run(functools.partial(sum_of_ranks, factor=2.0)) == [(rank, 4, 12.0) for rank in range(4)]
    assert plain_pool.run(own_process) == processes
    assert plain_pool.run(lambda rank: (rank, processes[rank])) == list(enumerate(processes))
    assert not set(processes) & set(plain_pool.run(own_process))


def big_result(rank):
    return 2 * torch.full((500_000,), float(rank), requires_grad=True)


def test_results_may_be_larger_than_a_pipe_and_may_need_a_gradient(plain_pool):
    """Catches a rank that blocks on a full pipe while the caller waits for its end, and tensors that are shared."""
    for rank, answer in enumerate(plain_pool.run(big_result)):
        assert answer.shape == (500_000,) and answer.requires_grad and answer[-1].item() == 2.0 * rank


def test_impossible_requests_are_refused(plain_pool):
    for keywords, message in (
        ({"world_size": 5}, r"world_size=5 must be in \[1, 4\]"),
        ({"world_size": 0}, r"world_size=0 must be in \[1, 4\]"),
        ({CP: 2}, "use_megatron=False has no use for"),
    ):
        with pytest.raises(ConfigError, match=message):
            plain_pool.run(own_process, **keywords)


# Then two callers of a pool, of which one ends and one is killed.
FORK_FROM_A_THREADED_PARENT = """
    import os, torch, torch.distributed as dist
    from megatron_rl.testing.ranks import RankPool, run_ranks

    def work(rank):
        weight = torch.randn(512, 512, requires_grad=True)
        (weight @ weight).tanh().sum().backward()
        return bool(weight.grad.isfinite().all()), torch.get_num_threads()

    for is_killed in (False, True):
        if os.fork() == 0:
            pool = RankPool(2, use_megatron=False)
            print(*pool.run(lambda rank: os.getpid()), flush=True)
            if is_killed:
                os.kill(os.getpid(), 9)
            raise SystemExit
        os.wait()
    torch.set_num_threads(2)
    for _ in range(2):
        weight = torch.randn(256, 256, requires_grad=True)
        torch.softmax(weight @ weight, -1).square().sum().backward()   # starts OpenMP's threads in the parent
        assert run_ranks(work, 2, use_megatron=False) == [(True, 1)] * 2
    assert torch.get_num_threads() == 2
    print("done")
"""


def test_ranks_of_a_threaded_parent_work_and_those_of_an_abandoned_pool_end():
    """Catches a rank that waits for the parent's OpenMP threads; a caller whose end waits for ranks that wait for it, and ranks
    that outlive a killed one. Its own process: this one has a single thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(FORK_FROM_A_THREADED_PARENT)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    *of_pools, last = answer.stdout.splitlines()
    assert last == "done", answer.stderr
    processes = [int(word) for line in of_pools for word in line.split()]
    assert len(processes) == 4, answer.stderr
    wait_until(lambda: all(is_gone_or_zombie(process) for process in processes))


def is_gone(process_id):
    """A process that is a zombie still answers signal 0."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def is_gone_or_zombie(process_id):
    """Orphans are collected by the first process of the machine, which in some containers never does."""
    status = Path(f"/proc/{process_id}/stat")
    return is_gone(process_id) or (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def fail_on_one_rank(rank, failing, how):
    if failing in (rank, "all"):
        if how == "raises":
            raise ValueError(f"rank {rank} has no labels")
        os._exit(7) if how == "exits" else os.kill(os.getpid(), signal.SIGKILL)
    return sum_of_ranks(rank)


FAILURES = [
    pytest.param(2, "raises", "ValueError: rank 2 has no labels", id="raises"),
    pytest.param(2, "exits", "ended without an answer, exit code 7", id="exits"),
    pytest.param(0, "is killed", "ended without an answer, exit code -9", id="rank 0, where all have met, is killed"),
]


@pytest.mark.parametrize(("failing", "how", "message"), FAILURES)
def test_a_rank_that_fails_is_named_first_and_ends_the_others(plain_pool, failing, how, message):
    """Catches a caller that waits for ever, and a report that names the ranks which only lost their peer."""
    processes = plain_pool.run(own_process)
    with pytest.raises(RankError, match="of 4 ranks failed") as caught:
        plain_pool.run(fail_on_one_rank, failing, how)
    # The others are in a collective with that rank: they see it close, and nobody waits for a timeout.
    assert "gave no answer" not in str(caught.value)
    assert next(iter(caught.value.errors)) == failing
    assert message in caught.value.errors[failing] and message in str(caught.value)
    assert all(is_gone(process) for process in processes)
    assert plain_pool.run(sum_of_ranks)[3] == (3, 4, 6.0)


def test_the_errors_of_all_ranks_are_in_one_exception(plain_pool):
    with pytest.raises(RankError) as caught:
        plain_pool.run(fail_on_one_rank, "all", "raises")
    assert sorted(caught.value.errors) == [0, 1, 2, 3]
    assert all(f"ValueError: rank {rank} has no labels" in error for rank, error in caught.value.errors.items())


def test_ranks_that_hang_are_named_with_the_place_and_leave_no_process(tmp_path, monkeypatch):
    """FB-25, FB-29: a hang is a failure within the timeout, not a test run that never ends: the ranks in a collective that rank 1
    has left, as behind `if mask.any()`. Catches ranks that run on, and ended ones that nobody collects."""

    def skip_a_collective(rank):
        (tmp_path / str(os.getpid())).touch()
        if rank != 1:
            dist.all_reduce(torch.zeros(1), group=dist.group.WORLD)

    let_time_run_out(monkeypatch, 2, lambda: len([*tmp_path.iterdir()]) == 3)
    with pytest.raises(RankError, match=r"2 of 3 ranks failed") as caught:
        run_ranks(skip_a_collective, 3, use_megatron=False)
    assert sorted(caught.value.errors) == [0, 2]
    assert all("gave no answer in time" in report and "in skip_a_collective" in report for report in caught.value.errors.values())
    processes = [int(path.name) for path in tmp_path.iterdir()]
    assert len(processes) == 3 and all(is_gone(process) for process in processes)


def test_a_pool_starts_anew_when_a_rank_died_between_calls():
    with RankPool(2, use_megatron=False) as pool:
        killed = pool.run(own_process)[1]
        os.kill(killed, signal.SIGKILL)
        # Of a process with threads /proc says "zombie" before its parent can collect it.
        wait_until(lambda: killed not in [process.pid for process in multiprocessing.active_children()])
        assert pool.run(sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]
