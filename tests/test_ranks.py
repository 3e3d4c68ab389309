"""run_ranks and RankPool: results in order, layouts that change, forks from a process that has worked before."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.testing.ranks import RankError, RankPool, run_ranks

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def plain_pool():
    with RankPool(4, use_megatron=False) as pool:
        yield pool


@pytest.fixture(scope="module")
def megatron_pool():
    with RankPool(4) as pool:
        yield pool


def sum_of_ranks(rank, factor=1.0):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=dist.group.WORLD)
    return rank, dist.get_world_size(), total.item() * factor


def layout_sizes(rank):
    groups = resolve_groups()
    return tuple(group.size() for group in (groups.tp, groups.cp, groups.dp, groups.pp))


def own_process(rank):
    return os.getpid()


def backward_through_a_model(rank):
    """Enough layers to need autograd's worker threads, were there any; the gradient is summed over the ranks."""
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn(64, 64, generator=generator, requires_grad=True)
    hidden = torch.randn(256, 64, generator=generator)
    for _ in range(4):
        hidden = torch.nn.functional.gelu(hidden @ weight)
    hidden.square().sum().backward()
    gradient = weight.grad.clone()
    dist.all_reduce(gradient, group=dist.group.WORLD)
    return gradient.norm().item()


def test_results_come_in_rank_order_and_closures_work():
    """Catches answers in the order of arrival, and a function that has to be importable."""
    offset = torch.tensor(10)
    delays = [0.1, 0.0]

    def work(rank):
        time.sleep(delays[rank])
        return rank + offset

    assert run_ranks(work, 2, use_megatron=False) == [10, 11]
    assert run_ranks(sum_of_ranks, 2, 3.0, use_megatron=False) == [(0, 2, 3.0), (1, 2, 3.0)]


@pytest.mark.megatron
def test_four_ranks_with_megatron_start_in_about_a_second():
    """Catches an import of Megatron in each rank, which costs two seconds times four ranks on two cores."""
    run_ranks(layout_sizes, 1)  # imports megatron.core here
    durations = []
    for _ in range(3):
        start = time.monotonic()
        assert run_ranks(layout_sizes, 4, tensor_model_parallel_size=2) == [(2, 1, 2, 1)] * 4
        durations.append(time.monotonic() - start)
    assert min(durations) < 2.0  # measured 0.25; the rest is for a busy machine


@pytest.mark.megatron
def test_a_pool_changes_its_layout_and_keeps_its_processes(megatron_pool):
    """FB-30: groups are those of the call, also after a layout on fewer ranks, and not those of the first call."""
    processes = megatron_pool.run(own_process)
    sizes = {
        (4, "tensor_model_parallel_size", 2): (2, 1, 2, 1),
        (4, "tensor_model_parallel_size", 4): (4, 1, 1, 1),
        (2, "context_parallel_size", 2): (1, 2, 1, 1),
        (4, "pipeline_model_parallel_size", 4): (1, 1, 1, 4),
        (1, "context_parallel_size", 1): (1, 1, 1, 1),
    }
    for (world_size, name, size), expected in sizes.items():
        for _ in range(2):
            answer = megatron_pool.run(layout_sizes, world_size=world_size, **{name: size})
            assert answer == [expected] * world_size
        # The ranks that sat the last layout out must notice that the groups of the call before it are gone.
        assert megatron_pool.run(layout_sizes, pipeline_model_parallel_size=4) == [(1, 1, 1, 4)] * 4
    assert megatron_pool.run(own_process) == processes


@pytest.mark.megatron
def test_a_call_does_not_see_the_random_numbers_of_the_call_before(megatron_pool):
    """Catches tests whose numbers depend on which tests ran before them on the same pool."""
    first = megatron_pool.run(functools.partial(random_numbers, 2))
    megatron_pool.run(functools.partial(random_numbers, 5))
    for before, after in zip(first, megatron_pool.run(functools.partial(random_numbers, 2)), strict=True):
        assert torch.equal(before, after)


def random_numbers(count, rank):
    return torch.randn(count)


def test_a_pool_sends_what_can_be_pickled_and_forks_for_the_rest(plain_pool):
    """Catches a closure that fails, and a module-level function that costs a fork at each call."""
    processes = plain_pool.run(own_process)
    assert plain_pool.run(functools.partial(sum_of_ranks, factor=2.0)) == [(rank, 4, 12.0) for rank in range(4)]
    assert plain_pool.run(own_process) == processes
    assert plain_pool.run(lambda rank: (rank, processes[rank])) == list(enumerate(processes))
    new_processes = plain_pool.run(own_process)
    assert not set(processes) & set(new_processes)


def test_results_may_be_larger_than_a_pipe_and_may_need_a_gradient(plain_pool):
    """Catches a rank that blocks on a full pipe while the caller waits for its end, and tensors that are shared."""
    for rank, answer in enumerate(plain_pool.run(big_result)):
        assert answer.shape == (500_000,)
        assert answer.requires_grad
        assert answer[-1].item() == 2.0 * rank


def big_result(rank):
    return 2 * torch.full((500_000,), float(rank), requires_grad=True)


def test_ranks_may_start_processes_of_their_own():
    """Catches daemons: Megatron's distributed checkpoints are written by processes that a rank starts."""

    def start_one(rank):
        process = torch.multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        process.join()
        return process.exitcode

    assert run_ranks(start_one, 2, use_megatron=False) == [0, 0]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        pytest.param({"world_size": 5}, r"world_size=5 must be in \[1, 4\]", id="too many"),
        pytest.param({"world_size": 0}, r"world_size=0 must be in \[1, 4\]", id="none"),
        pytest.param({"context_parallel_size": 2}, "use_megatron=False has no use for", id="a layout without megatron"),
    ],
)
def test_impossible_requests_are_refused(plain_pool, keywords, message):
    with pytest.raises(ConfigError, match=message):
        plain_pool.run(own_process, **keywords)
    with pytest.raises(ConfigError, match="world_size=0 must be at least 1"):
        RankPool(0)


def test_a_rank_does_not_fork_ranks():
    """Catches a helper that calls run_ranks inside a rank, whose children would answer in that rank's group."""
    with pytest.raises(RankError, match="ConfigError: this process has initialised torch.distributed"):
        run_ranks(lambda rank: run_ranks(own_process, 2, use_megatron=False), 1, use_megatron=False)


def test_ranks_without_megatron_core_are_refused_with_the_remedy(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron_rl\[megatron\]', or pass use_megatron=False"):
        run_ranks(own_process, 1)


def test_forks_after_a_backward_in_the_parent_work_each_time():
    """Catches autograd's or OpenMP's threads of the parent, which no fork inherits: the ranks would hang."""
    expected = None
    for _ in range(20):
        weight = torch.randn(256, 256, requires_grad=True)
        (weight @ weight).exp().sum().backward()
        answers = run_ranks(backward_through_a_model, 2, timeout=240, use_megatron=False)
        expected = expected or answers
        assert answers == expected


FORK_FROM_A_THREADED_PARENT = """
    import torch, torch.distributed as dist
    from megatron_rl.testing.ranks import run_ranks

    def work(rank):
        weight = torch.randn(512, 512, requires_grad=True)
        (weight @ weight).tanh().sum().backward()
        return bool(weight.grad.isfinite().all()), torch.get_num_threads()

    torch.set_num_threads(2)
    for _ in range(5):
        weight = torch.randn(1024, 1024, requires_grad=True)
        torch.softmax(weight @ weight, -1).square().sum().backward()   # starts OpenMP's threads in the parent
        assert run_ranks(work, 2, timeout=240, use_megatron=False) == [(True, 1)] * 2
    assert torch.get_num_threads() == 2
    print("done")
"""


def test_forks_work_from_a_parent_that_uses_two_threads():
    """Catches a rank that waits for the parent's OpenMP threads. Its own process: this one has a single thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(FORK_FROM_A_THREADED_PARENT)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert answer.stdout == "done\n", answer.stderr
