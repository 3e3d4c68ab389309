"""When a run ends: signals become requests, and ranks decide together from what each of them has seen."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megatron_rl.testing.ranks import RankPool
from megatron_rl.training.stopping import StopRule, StopSignals


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, use_megatron=False) as ranks:
        yield ranks


def rule_of(signals=None, **others) -> StopRule:
    values = {"max_seconds": None, "target_reward": None, "window": 3, "recent_rewards": [], **others}
    return StopRule(StopSignals() if signals is None else signals, **values)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_remembered_and_the_work_under_way_goes_on(number):
    """Catches a Ctrl-C that ends the process between a checkpoint's files."""
    with StopSignals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), number)
        time.sleep(0)
        assert signals.received == number


def test_a_second_ctrl_c_interrupts_at_once():
    """Somebody who does not want to wait for the rollout and the checkpoint need not."""
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_sigterm_after_ctrl_c_does_not_interrupt():
    """torchrun answers a Ctrl-C of its own with further signals: none of them may cut the checkpoint off."""
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM


def test_the_handlers_that_were_there_before_come_back():
    """Otherwise Ctrl-C is dead in whatever runs afterwards in the process."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RuntimeError, match="in the middle"), StopSignals():
        assert signal.getsignal(signal.SIGINT) != before[0]
        raise RuntimeError("in the middle")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def decide_on_rank(rank, signals_of_rank, rewards, settings):
    """(number of the rollout that ended the run, reason, exit code, rewards kept); signals arrive in rollout 1."""
    signals = StopSignals()
    rule = rule_of(signals, **settings)
    for number, reward in enumerate(rewards):
        signals.received = signals_of_rank[rank] if number == 1 else signals.received
        if rule.should_stop(reward):
            return number, rule.reason, rule.exit_code, list(rule.recent_rewards)
    return None, rule.reason, rule.exit_code, list(rule.recent_rewards)


@pytest.mark.parametrize(
    ("signals", "name", "code"),
    [
        pytest.param((0, signal.SIGINT), "SIGINT", 130, id="Ctrl-C reached one rank alone"),
        pytest.param((signal.SIGTERM, 0), "SIGTERM", 143, id="a scheduler's SIGTERM on the other"),
        pytest.param((signal.SIGINT, signal.SIGTERM), "SIGTERM", 143, id="unlike signals: one answer"),
    ],
)
def test_all_ranks_stop_at_the_same_rollout_for_a_signal_that_one_of_them_got(pool, signals, name, code):
    """A rank that stops alone leaves the others in the next collective. The exit code is a shell's 128 + signal."""
    answers = pool.run(decide_on_rank, signals, [0.1, 0.2, 0.3], {})
    assert answers == [(1, f"stopped by {name}", code, [0.1, 0.2])] * 2


def test_the_target_is_the_mean_of_the_last_rollouts_and_ends_with_exit_code_0(pool):
    """By hand, window 3: 0.9, 0.9, 0.2 give 0.667; 0.9, 0.2, 1.0 give 0.7; 0.2, 1, 1 give 0.733. Before three there is no mean."""
    rewards = [0.9, 0.9, 0.2, 1.0, 1.0, 1.0]
    answers = pool.run(decide_on_rank, (0, 0), rewards, {"target_reward": 0.72})
    reason = "mean reward 0.733 of the last 3 rollouts reached the target"
    assert answers == [(4, reason, 0, [0.2, 1.0, 1.0])] * 2
    assert pool.run(decide_on_rank, (0, 0), rewards[:2], {"target_reward": 0.1})[0][0] is None


def test_a_resumed_run_averages_over_the_rewards_before_it_too(pool):
    """FB-90: a window that starts anew would stop a resumed run later than the uninterrupted one."""
    settings = {"target_reward": 0.72, "recent_rewards": [0.9, 0.2, 1.0]}
    assert pool.run(decide_on_rank, (0, 0), [1.0, 1.0], settings)[0][:2] == (
        0,
        "mean reward 0.733 of the last 3 rollouts reached the target",
    )


def decide_late_on_rank(rank):
    """Rank 1 began ten seconds ago."""
    rule = rule_of(max_seconds=5.0)
    rule._started -= 10.0 * rank
    return rule.should_stop(0.0), rule.reason, rule.exit_code


def test_the_clock_of_one_rank_is_enough(pool):
    """Clocks of ranks differ: each alone would stop at another rollout."""
    assert pool.run(decide_late_on_rank) == [(True, "--max-seconds 5 are over", 0)] * 2


def test_a_signal_comes_before_the_target_and_the_target_before_the_clock(pool):
    """The exit code of a run that was interrupted must not be that of one that was done, nor the reason that of a lack of time."""
    both = pool.run(decide_on_rank, (signal.SIGINT, 0), [0.5, 0.5], {"target_reward": 0.0, "window": 2})
    assert both == [(1, "stopped by SIGINT", 130, [0.5, 0.5])] * 2
    both = pool.run(decide_on_rank, (0, 0), [0.5], {"target_reward": 0.0, "window": 1, "max_seconds": 1e-9})
    assert both == [(0, "mean reward 0.500 of the last 1 rollouts reached the target", 0, [0.5])] * 2
