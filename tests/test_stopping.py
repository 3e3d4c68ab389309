"""How a run ends: signals become requests, and ranks decide together."""

from __future__ import annotations

import os
import signal
import time

import pytest
from helpers import pool_of

from megatron_rl.train.stopping import StopRule, StopSignals

pool = pool_of(2, use_megatron=False)


def rule_of(signals=None, **others) -> StopRule:
    values = {"target_reward": None, "recent_rewards": [], **others}
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


def decide_on_rank(rank, signals_of_rank, rewards, settings):
    """(number of the rollout that ended the run, reason, exit code, rewards kept); signals arrive in rollout 1."""
    signals = StopSignals()
    rule = rule_of(signals, **settings)
    for number, reward in enumerate(rewards):
        signals.received = signals_of_rank[rank] if number == 1 else signals.received
        if rule.should_stop(reward):
            return number, rule.reason, rule.exit_code, list(rule.recent_rewards)
    return None, rule.reason, rule.exit_code, list(rule.recent_rewards)


# By hand, means of five: 0.9, 0.9, 0.9, 0.9, 0.2 give 0.76; then 0.78 with 1.0 for the first 0.9, and 0.8 with a second 1.0.
REWARDS = [0.9, 0.9, 0.9, 0.9, 0.2, 1.0, 1.0, 1.0]
REACHED = "mean reward 0.800 of the last 5 rollouts reached the target"
FULL = [0.5] * 5
INT, TERM = signal.SIGINT, signal.SIGTERM
ENDS = [
    # signals of the ranks, rewards, settings, (rollout, reason, exit code, rewards kept)
    pytest.param((0, INT), [0.1, 0.2, 0.3], {}, (1, "stopped by SIGINT", 130, [0.1, 0.2]), id="Ctrl-C reached one rank alone"),
    pytest.param((TERM, 0), [0.1, 0.2, 0.3], {}, (1, "stopped by SIGTERM", 143, [0.1, 0.2]), id="SIGTERM on the other"),
    pytest.param((INT, TERM), [0.1, 0.2, 0.3], {}, (1, "stopped by SIGTERM", 143, [0.1, 0.2]), id="unlike signals: one answer"),
    pytest.param(
        *((0, 0), REWARDS, {"target_reward": 0.79}, (6, REACHED, 0, [0.9, 0.9, 0.2, 1.0, 1.0])), id="the target is a mean of five"
    ),
    pytest.param((0, 0), REWARDS[:4], {"target_reward": 0.1}, (None, None, 0, [0.9] * 4), id="no mean before five"),
    pytest.param(
        *((0, 0), [1.0], {"target_reward": 0.79, "recent_rewards": [0.7, 0.9, 0.9, 0.2, 1.0]}),
        (0, REACHED, 0, [0.9, 0.9, 0.2, 1.0, 1.0]),
        id="FB-90 rewards before a resume count",
    ),
    pytest.param(
        *((INT, 0), [0.5, 0.5], {"target_reward": 0.5, "recent_rewards": [0.1, 0.5, 0.5, 0.5]}),
        (1, "stopped by SIGINT", 130, FULL),
        id="a signal comes before the target",
    ),
    pytest.param(
        *((0, 0), [0.5], {"target_reward": 0.5, "recent_rewards": FULL}),
        (0, "mean reward 0.500 of the last 5 rollouts reached the target", 0, FULL),
        id="the target itself is enough",
    ),
]


@pytest.mark.parametrize(("signals", "rewards", "settings", "expected"), ENDS)
def test_all_ranks_stop_at_the_same_rollout_for_the_same_reason(pool, signals, rewards, settings, expected):
    """A rank that stops alone leaves the others in the next collective. The exit code is a shell's 128 + signal."""
    first, second = pool.run(decide_on_rank, signals, rewards, settings)
    assert first == second == expected
