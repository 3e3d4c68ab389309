"""run_ranks and RankPool: results in order, layouts that change, forks from a process that has worked before, and every way in
which a rank can fail: each is a RankError within the timeout, names the rank, and leaves no process.

Then the plugin that pytest loads by entry point: costs nothing unused, and holds anybody's loss against itself over layouts.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, let_time_run_out, pool_of, wait_until
from trainer_cases import CP, PP, TP

from megatron_rl import grpo_loss, gspo_loss, sample_token_weights, vocab_parallel_log_probs
from megatron_rl.count import StepTotals
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.testing import loss_property
from megatron_rl.testing.invariance import Layout
from megatron_rl.testing.ranks import RankError, RankPool, run_ranks
from megatron_rl.testing.reference import ragged_samples

pool = pool_of(4, use_megatron=False)
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


def test_a_pool_sends_what_can_be_pickled_and_forks_for_the_rest(pool):
    """Catches a closure that fails, and a module-level function that costs a fork at each call."""
    processes = pool.run(own_process)
    assert pool.run(partial(sum_of_ranks, factor=2.0)) == [(rank, 4, 12.0) for rank in range(4)]
    assert pool.run(own_process) == processes
    assert pool.run(lambda rank: (rank, processes[rank])) == list(enumerate(processes))
    assert not set(processes) & set(pool.run(own_process))


FORK_FROM_A_THREADED_PARENT = """
    import torch
    from megatron_rl.testing.ranks import run_ranks

    def work(rank):
        weight = torch.randn(512, 512, requires_grad=True)
        (weight @ weight).tanh().sum().backward()
        return bool(weight.grad.isfinite().all()), torch.get_num_threads()

    torch.set_num_threads(2)
    for _ in range(2):
        weight = torch.randn(256, 256, requires_grad=True)
        torch.softmax(weight @ weight, -1).square().sum().backward()   # starts OpenMP's threads in the parent
        assert run_ranks(work, 2, use_megatron=False) == [(True, 1)] * 2
    assert torch.get_num_threads() == 2
    print("done")
"""


def test_ranks_of_a_threaded_parent_work():
    """Catches a rank that waits for the parent's OpenMP threads. Its own process: this one has a single thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(FORK_FROM_A_THREADED_PARENT)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.stdout == "done\n", answer.stderr


def is_gone(process_id):
    """A process that is a zombie still answers signal 0."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def fail(rank, failing, how):
    if rank in failing:
        if how == "raises":
            raise ValueError(f"rank {rank} has no labels")
        os.kill(os.getpid(), signal.SIGKILL)
    return sum_of_ranks(rank)


FAILURES = [
    pytest.param([2], "raises", "ValueError: rank {} has no labels", id="raises"),
    pytest.param([0], "is killed", "ended without an answer, exit code -9", id="rank 0, where all have met, is killed"),
    pytest.param([0, 1, 2, 3], "raises", "ValueError: rank {} has no labels", id="all raise"),
]


@pytest.mark.parametrize(("failing", "how", "message"), FAILURES)
def test_a_rank_that_fails_is_named_first_and_ends_the_others(pool, failing, how, message):
    """Catches a caller that waits for ever, and a report that names the ranks which only lost their peer."""
    processes = pool.run(own_process)
    with pytest.raises(RankError, match="of 4 ranks failed") as caught:
        pool.run(fail, failing, how)
    # The others are in a collective with that rank: they see it close, and nobody waits for a timeout.
    assert "gave no answer" not in str(caught.value)
    assert sorted([*caught.value.errors][: len(failing)]) == failing
    for rank in failing:
        assert message.format(rank) in caught.value.errors[rank] and message.format(rank) in str(caught.value)
    assert all(is_gone(process) for process in processes)
    assert pool.run(sum_of_ranks)[3] == (3, 4, 6.0)


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


# The property of a loss, and the plugin


def our_loss(loss, aggregation: str, logits, batch):
    totals = StepTotals(batch.num_samples, batch.num_prompts, batch.num_tokens)
    counts = {"prompt_token_counts": batch.prompt_token_counts, "divisor": 48.0 if aggregation == "constant" else None}
    weights = sample_token_weights(aggregation, batch.token_counts, totals, **counts)
    tensors = (batch.labels, batch.old_log_probs, batch.advantages, batch.loss_mask, batch.cu_seqlens, weights)
    groups = {"token_counts": batch.token_counts, "tp_group": batch.tp_group, "cp_group": batch.cp_group}
    return loss(logits, *tensors, **groups, advantages_per="sample").loss


def values(logits, batch):
    return torch.where(batch.loss_mask, torch.log_softmax(logits, -1).gather(1, batch.labels[:, None])[:, 0], 0.0)


def summed(logits, batch):
    return values(logits, batch).sum() / batch.num_tokens


def divided_by_cp(logits, batch):
    return summed(logits, batch) / batch.cp_group.size()


def for_a_mean(logits, batch):
    return summed(logits, batch) * batch.num_microbatches * batch.dp_group.size() * batch.cp_group.size()


def mean_of_the_batch(logits, batch):
    return values(logits, batch).sum() / batch.loss_mask.sum().clamp(min=1)


def foreign(kind, logits, batch):
    """Losses as others write them, by what is wrong or particular with them."""
    if kind == "a softmax of one shard":
        return torch.where(batch.loss_mask, torch.log_softmax(logits, -1)[:, 0], 0.0).sum() / batch.num_tokens
    if kind == "unmasked":
        return torch.log_softmax(logits, -1)[:, 0].sum() / batch.num_tokens
    if kind == "in place":
        logits /= 0.7
    return {
        "draws": lambda: (values(logits, batch) * torch.rand(len(batch.labels))).sum(),
        "by parallel state": lambda: (
            vocab_parallel_log_probs(logits, batch.labels, loss_mask=batch.loss_mask).sum() / batch.num_tokens
        ),
    }.get(kind, lambda: summed(logits, batch))()


def is_invariant(pool, loss, *layouts: Layout, **settings) -> None:
    settings |= {"layouts": layouts} if layouts else {}
    loss_property.assert_layout_invariant(pool, partial(foreign, loss) if isinstance(loss, str) else loss, **settings)


def refusal(pool, loss, *layouts: Layout, **settings) -> str:
    with pytest.raises(AssertionError) as caught:
        is_invariant(pool, loss, *layouts, **settings)
    return str(caught.value)


DP2, CP2, TP2, M3 = Layout(data=2), Layout(context=2), Layout(tensor=2), Layout(num_microbatches=3)
OTHERS = (Layout(data=2, num_microbatches=3), Layout(data=2, context=2))


def test_the_losses_of_the_package_and_a_sum_by_the_steps_count_hold(pool):
    """FB-21, FB-25: the same property that another framework would run on its own. An empty micro-batch is part of it: three
    samples over DP2 x M2. A loss may change the logits in place, as with a temperature: what a model returns is no leaf."""
    is_invariant(pool, partial(our_loss, gspo_loss, "prompt_mean"), tolerance=1e-6)
    is_invariant(pool, partial(our_loss, grpo_loss, "constant"), TP2, Layout(tensor=2, context=2), *OTHERS, tolerance=1e-6)
    is_invariant(pool, summed, *OTHERS)
    is_invariant(pool, for_a_mean, *OTHERS, reduction="mean")
    samples = [replace(sample, prompt_id="a") for sample in ragged_samples(vocab_size=64)[:3]]
    is_invariant(pool, "in place", Layout(data=2, num_microbatches=2), samples=samples)


TWO_MICROBATCHES = Layout(num_microbatches=2)
WRONG = [
    pytest.param(divided_by_cp, CP2, "sum", r"CP2, M1: gradient is 0\.5 of one process's = 1/cp", id="FB-21 1/cp"),
    pytest.param(summed, M3, "mean", r"M3: gradient is 0\.333333 of one process's = 1/micro-batches", id="FB-01 1/M"),
    pytest.param(summed, DP2, "mean", r"DP2, M1: gradient is 0\.5 of one process's = 1/dp", id="FB-03 1/dp"),
    pytest.param(for_a_mean, OTHERS[1], "sum", r"gradient is 4 of one process's = dp x cp", id="FB-03 dp x cp"),
    pytest.param(mean_of_the_batch, DP2, "mean", "gradient is no multiple of one process's", id="FB-02 a local mean"),
    pytest.param("a softmax of one shard", TP2, "sum", "TP2, M1: gradient is no multiple", id="a softmax of one shard"),
    pytest.param("draws", TWO_MICROBATCHES, "sum", "M2: gradient is no multiple of one process's", id="draws"),
    pytest.param("unmasked", CP2, "sum", "CP2, M1: padding has a gradient: mask it by batch.loss_mask$", id="unmasked"),
]


@pytest.mark.parametrize(("loss", "layout", "reduction", "message"), WRONG)
def test_a_loss_that_depends_on_the_layout_fails_with_the_layout_and_the_factor(pool, loss, layout, reduction, message):
    said = refusal(pool, loss, layout, reduction=reduction)
    assert said.startswith("the gradient depends on the layout:\n  ") and re.search(message, said)


def test_a_loss_that_raises_on_a_layout_is_told_after_the_layouts_before_it(pool):
    """A softmax over the columns of one shard is the first thing that a foreign loss meets. Every wrong layout is listed."""
    said = refusal(pool, divided_by_cp, DP2, CP2, Layout(context=4), TP2, CP2)
    title, of_slices, of_more_slices, of_shards, *_ = said.splitlines()
    assert of_slices.startswith("  CP2, M1: gradient is 0.5 of one process's = 1/cp") and of_more_slices.startswith("  CP4, M1: ")
    assert of_shards.startswith("  TP2, M1: rank") and "RuntimeError: index" in said and ", in divided_by_cp" in said
    is_invariant(pool, summed, TP2, DP2, CP2, Layout(tensor=4), whole_vocabulary=True)


@pytest.mark.megatron
def test_a_loss_may_read_its_groups_from_parallel_state(assert_layout_invariant):
    loss, layouts = partial(foreign, "by parallel state"), [TP2, Layout(tensor=2, context=2)]
    assert_layout_invariant(loss, layouts=layouts, use_megatron=True)
    with pytest.raises(AssertionError):  # without it each shard is taken for the whole vocabulary
        assert_layout_invariant(loss, layouts=layouts)


def for_a_mean_over_the_ranks_of_experts(logits, batch):
    """Right where each rank has all experts: the groups are the same then."""
    from megatron.core import parallel_state

    return summed(logits, batch) * batch.num_microbatches * parallel_state.get_expert_data_parallel_world_size()


@pytest.mark.megatron
def test_a_loss_may_not_take_the_ranks_of_experts_for_its_own(assert_layout_invariant):
    """FB-106: with expert sizes parallel_state has groups for them, and the message names the factor."""
    loss, settings = for_a_mean_over_the_ranks_of_experts, {"use_megatron": True, "reduction": "mean"}
    spread = [Layout(data=2, expert=2), Layout(context=2, data=2, expert=4)]
    assert_layout_invariant(for_a_mean, layouts=spread, **settings)
    with pytest.raises(AssertionError, match=r"DP2xEP2, M1: gradient is 0\.5 of one process's = 1/dp or 1/ep"):
        assert_layout_invariant(loss, layouts=spread[:1], **settings)


@pytest.fixture
def installed(tmp_path):
    """A folder that makes the entry point of pyproject.toml visible, as an installation does."""
    folder = tmp_path / "site"
    metadata = folder / "megatron_rl-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron_rl_under_test\nVersion: 0.0.1\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\npytest_megatron_rl = pytest_megatron_rl\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_other.py").write_text(
        "import sys\ndef test_other(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('pytest_megatron_rl')\n"
        "    assert not {'torch', 'megatron_rl', 'numpy'} & set(sys.modules)\n"
    )
    return folder, tests


def test_a_run_that_uses_no_fixture_imports_nothing_heavy(installed):
    """Catches an entry point that makes every pytest run of a user's environment import torch."""
    folder, tests = installed
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    finished = subprocess.run(command, check=False, cwd=tests, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0 and "1 passed" in finished.stdout, finished.stdout + finished.stderr
