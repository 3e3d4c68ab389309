"""What a run is told while it trains, how it ends, and what it leaves: rows and events. Ranks decide together."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import time

import pytest
from helpers import pool_of

from megatron_rl.errors import DataError
from megatron_rl.train.loop import Start
from megatron_rl.train.stopping import StopRule, StopSignals
from megatron_rl.train.watchdog import WatchdogState, look, watch
from megatron_rl.train.writers import (
    KL,
    METRICS_FILE,
    REWARD,
    MetricsWriter,
    read_metrics,
)

pytestmark = pytest.mark.megatron

pool = pool_of(2)
HEALTHY = {
    "num_tokens": 40,
    "num_samples": 8,
    "policy/ratio_new_old": 1.0,
    "policy/max_advantage": 1.5,
    "policy/min_advantage": -1.5,
    "policy/num_phantom_tokens": 0.0,
    "policy/num_tokens": 40.0,
    "policy/num_documents": 8.0,
}


def names(step, **changes) -> list[str]:
    row = HEALTHY | {name if name in HEALTHY else f"policy/{name}": value for name, value in changes.items()}
    return [*watch(WatchdogState(), step, row)[0]]


def watched(rows) -> list[tuple[int, str, str]]:
    """(step, name, line) of all that is told while the rows come, one a step from step 2 on."""
    told, state = [], WatchdogState()
    for step, row in enumerate(rows, 2):
        found, state = watch(state, step, row)
        told += [(step, *of_name) for of_name in found.items()]
    return told


FIRST_STEP = [
    # metric, what is reported of it, what is allowed, finding
    pytest.param("ratio_new_old", 0.89, 0.91, "first_ratio", id="FB-39 ratio too low"),
    pytest.param("ratio_new_old", 1.11, 1.09, "first_ratio", id="FB-39 ratio too high"),
    pytest.param("num_phantom_tokens", 1.0, 0.0, "first_phantom_tokens", id="a token that nobody measured"),
    pytest.param("kl_new_old", 0.051, 0.049, "first_kl", id="FB-39 another policy, of mean ratio 1"),
]


@pytest.mark.parametrize(("metric", "bad", "good", "finding"), FIRST_STEP)
def test_the_first_step_is_held_to_a_policy_that_has_not_moved(metric, bad, good, finding):
    """Any later step may do so: the policy has moved. What moves the ratio moves the KL: it says nothing of its own."""
    assert names(1, **{metric: bad}) == [finding]
    if finding in ("first_ratio", "first_phantom_tokens"):
        assert names(1, kl_new_old=1.0, **{metric: bad}) == [finding]
    assert names(1, **{metric: good}) == names(2, **{metric: bad}) == []


SILENT = HEALTHY | {"policy/max_advantage": 0.0, "policy/min_advantage": 0.0}


@pytest.mark.parametrize(
    ("before", "reward", "said"),
    [
        pytest.param([0.1, 0.4], 0.2, "reward 0.200, best of the run 0.400", id="collapsed"),
        pytest.param([0.1, 0.9], 1.0, None, id="solved"),
    ],
)
def test_a_run_without_a_signal_is_told_once_after_twenty_steps(before, reward, said):
    """A step of equal rewards trains nothing, and its KL of 0 and clip fraction of 0 look healthy."""
    rows = [HEALTHY | {"rollout/reward": value} for value in before]
    silent = SILENT | {"rollout/reward": reward}
    rows += [silent] * 19 + [HEALTHY | {"rollout/reward": reward}] + [silent] * 25
    told = watched(rows)
    assert [found[:2] for found in told] == [(2 + len(before) + 19 + 20, "no_signal")] * (said is not None)
    assert all(said in line for _, _, line in told)


def test_a_gradient_that_stays_0_beside_advantages_is_told_once():
    """Where every token is clipped, all metrics but the norm look alive."""
    still = HEALTHY | {"grad_norm": 0.0, "policy/max_advantage": 1.0, "policy/min_advantage": -1.0}
    rows = [still] * 4 + [still | {"grad_norm": 1e-3}] + [still] * 6 + [SILENT | {"grad_norm": 0.0}] * 6
    [(step, name, _)] = watched(rows)
    assert (step, name) == (2 + 5 + 4, "zero_gradient")


@pytest.mark.parametrize("metric", ["policy/num_tokens", "num_tokens"])
def test_the_loss_must_see_what_the_step_is_divided_by(metric):
    """FB-09: a token that was not counted, a masked sample counted as one. At any step, since a mask may change at any."""
    for step in (1, 7):
        assert [*watch(WatchdogState(), step, HEALTHY | {metric: 41.0})[0]] == ["phantom_num_tokens"]


def test_a_healthy_row_and_a_row_without_metrics_say_nothing():
    """--policy-metrics none has none of them, and a step without a token has no policy/ metric at all."""
    assert names(1) == []
    assert watch(WatchdogState(), 1, {"rollout": 0, "num_tokens": 40, "num_samples": 8, "loss": 1.0})[0] == {}
    broken = HEALTHY | {"policy/ratio_new_old": None, "policy/kl_new_old": float("nan")}
    assert watch(WatchdogState(), 1, broken)[0] == {}


SAMPLERS = [
    # Mean and KL of d = log pi - log mu, over 400 tokens of 500 logits each of deviation 3, where two engines differ by 0.02;
    # whether each d is the logarithm of one mass.
    pytest.param(-0.2125, 0.0214, True, id="FB-114 top-p 0.8"),
    pytest.param(0.0003, 0.0002, False, id="top-p 0.8, scored over the whole vocabulary"),
    pytest.param(-0.2851, 0.2607, False, id="temperature 0.6"),
    pytest.param(-0.4124, 0.3534, False, id="a policy that has moved"),
]


@pytest.mark.parametrize(("mean", "kl", "is_truncated"), SAMPLERS)
def test_the_kept_mass_is_told_from_noise_temperature_and_another_policy(mean, kl, is_truncated):
    """At any step of the sampler's scores, at the first of old ones, in the place of what else would be said of it there."""
    rollout = {"train_rollout_logprob_diff": mean, "train_rollout_kl": kl}
    old = {"new_logprobs": mean - 1, "old_logprobs": -1.0, "kl_new_old": kl}
    assert names(9, **rollout) == ["truncated_rollout"] * is_truncated
    assert ("truncated_old" in names(1, **old)) == is_truncated
    assert names(9, **old) == []
    if is_truncated:
        assert names(1, **old, ratio_new_old=0.8) == ["truncated_old"]
        row = HEALTHY | {f"policy/{name}": value for name, value in rollout.items()}
        [line] = watch(WatchdogState(), 9, row)[0].values()
        assert f"by a mass of {math.exp(mean):.2f}" in line and "sample with top_p 1, top_k -1 and min_p 0" in line


def test_a_restart_neither_forgets_nor_repeats():
    """The state goes through a checkpoint, whose lists may come back for tuples: 12 + 8 silent steps are 20."""
    start, warned, silent = Start(), [], SILENT | {"rollout/reward": 0.0}
    for number in (12, 8, 30):
        found, watchdog = 0, start.watchdog
        for _ in range(number):
            lines, watchdog = watch(watchdog, 9, silent)
            found += len(lines)
        warned.append(found)
        state = json.loads(json.dumps(dataclasses.asdict(watchdog)))
        start = Start.from_counters({"progress": {"num_steps": 9}, "recent_rewards": [], "watchdog": state})
    assert warned == [0, 1, 0] and start.progress.num_steps == 9


BAD = HEALTHY | {"policy/ratio_new_old": 0.3, "policy/num_phantom_tokens": 2.0}


def test_warn_speaks_on_the_first_rank_raise_stops_every_rank_and_off_looks_at_nothing(caplog):
    """All findings in one error."""
    state = WatchdogState()
    for watchdog, speaks, number in (("warn", True, 2), ("warn", False, 0), ("off", True, 0)):
        caplog.clear()
        look(watchdog, state, 1, BAD, speaks=speaks)
        assert len(caplog.records) == number
    assert look("off", state, 1, BAD, speaks=True) is state
    for speaks in (True, False):
        with pytest.raises(DataError, match="mean importance ratio 0.300(.|\n)*2 phantom tokens"):
            look("raise", state, 1, BAD, speaks=speaks)


# How a run ends


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
    rule = StopRule(signals, **{"target_reward": None, "recent_rewards": [], **settings})
    for number, reward in enumerate(rewards):
        signals.received = signals_of_rank[rank] if number == 1 else signals.received
        if rule.should_stop(reward):
            return number, rule.reason, rule.exit_code, list(rule.recent_rewards)
    return None, rule.reason, rule.exit_code, list(rule.recent_rewards)


# By hand, means of five: 0.9, 0.9, 0.9, 0.9, 0.2 give 0.76; then 0.78 with 1.0 for the first 0.9, and 0.8 with a second 1.0.
REWARDS = [0.9, 0.9, 0.9, 0.9, 0.2, 1.0, 1.0, 1.0]
REACHED, LAST = "mean reward 0.800 of the last 5 rollouts reached the target", [0.9, 0.9, 0.2, 1.0, 1.0]
RESUMED = {"target_reward": 0.79, "recent_rewards": [0.7, 0.9, 0.9, 0.2, 1.0]}
AT_TARGET = {"target_reward": 0.8, "recent_rewards": [0.8] * 4}
INT, TERM = signal.SIGINT, signal.SIGTERM
ENDS = [
    # signals of the ranks, rewards, settings, (rollout, reason, exit code, rewards kept)
    pytest.param((0, INT), [0.1, 0.2, 0.3], {}, (1, "stopped by SIGINT", 130, [0.1, 0.2]), id="Ctrl-C reached one rank alone"),
    pytest.param((INT, TERM), [0.1, 0.2, 0.3], {}, (1, "stopped by SIGTERM", 143, [0.1, 0.2]), id="unlike signals: one answer"),
    pytest.param((0, 0), REWARDS, {"target_reward": 0.79}, (6, REACHED, 0, LAST), id="the target is a mean of five"),
    pytest.param((0, 0), [1.0], RESUMED, (0, REACHED, 0, LAST), id="FB-90 rewards before a resume count"),
    pytest.param((0, 0), [0.8], AT_TARGET, (0, REACHED, 0, [0.8] * 5), id="the target itself is enough"),
]


@pytest.mark.parametrize(("signals", "rewards", "settings", "expected"), ENDS)
def test_all_ranks_stop_at_the_same_rollout_for_the_same_reason(pool, signals, rewards, settings, expected):
    """A rank that stops alone leaves the others in the next collective. The exit code is a shell's 128 + signal."""
    first, second = pool.run(decide_on_rank, signals, rewards, settings)
    assert first == second == expected


# What it leaves for people


def write_steps(output_dir, steps, resume_step=0) -> list[dict]:
    with MetricsWriter(output_dir, resume_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, {REWARD: step / 10, KL: 1e-4 * step})
    return read_metrics(output_dir / METRICS_FILE)


def test_a_row_is_one_line_of_strict_json_that_is_on_disk_before_the_next_step(tmp_path):
    """Catches NaN, which not every JSON reader takes, and a buffer that a killed run loses."""
    with MetricsWriter(tmp_path / "deep" / "run", 0, tensorboard=False) as writer:
        writer.write(1, {"loss": 0.5, "count": 3, "worst": math.nan, "note": "x", "none": None, "best": -math.inf})
        (line,) = (tmp_path / "deep" / "run" / METRICS_FILE).read_text().splitlines()
    assert line == '{"step": 1, "loss": 0.5, "count": 3, "worst": null, "note": "x", "none": null, "best": null}'


def test_a_resumed_file_continues_exactly(tmp_path):
    """FB-90: rows past the checkpoint are written again, once. A new run starts an empty file, a lost one is begun again."""
    write_steps(tmp_path / "whole", range(1, 9))
    write_steps(tmp_path / "cut", range(1, 6))
    write_steps(tmp_path / "cut", range(4, 9), resume_step=3)
    whole, cut = ((tmp_path / name / METRICS_FILE).read_bytes() for name in ("whole", "cut"))
    assert cut == whole
    assert [row["step"] for row in write_steps(tmp_path / "cut", [1])] == [1]
    (tmp_path / "cut" / METRICS_FILE).unlink()
    assert [row["step"] for row in write_steps(tmp_path / "cut", [5], resume_step=4)] == [5]


@pytest.mark.parametrize("rest", ['{"step": 3, "los', '{"step": 3}', "\u00e9"])
def test_the_unfinished_line_of_a_killed_run_is_dropped_and_replaced(tmp_path, rest):
    """Catches a reader that fails on such a file, and a new row glued to half of an old one."""
    write_steps(tmp_path, [1, 2])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(rest)
    assert [row["step"] for row in read_metrics(tmp_path / METRICS_FILE)] == [1, 2]
    assert [row["step"] for row in write_steps(tmp_path, [3], resume_step=2)] == [1, 2, 3]
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2: not JSON"):  # in the middle it would be a gap in the curve
        read_metrics(tmp_path / METRICS_FILE)


def read_events(output_dir) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output_dir / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_holds_the_numbers_and_continues_after_a_resume(tmp_path):
    """FB-90: catches two branches after a resume, and events of an earlier run."""
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    for resume_step, steps in ((0, [1, 2]), (0, [1, 2, 3, 4]), (2, [3, 4])):
        with MetricsWriter(tmp_path, resume_step, tensorboard=True) as writer:
            for step in steps:
                writer.write(step, {"loss": step + resume_step * 10.0, "note": "text", "bad": math.nan})
    assert read_events(tmp_path) == {"loss": [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]}
