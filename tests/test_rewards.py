"""A user's reward: on copies, once for each sample, within its time, and without ending the process. On forked ranks."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import error_of, pool_of
from trainer_cases import CP, PP, TP, tiny_trainer

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, RunError
from megatron_rl.layout import agreement
from megatron_rl.train import collection, reward_guard
from megatron_rl.train.collection import SampledRollouts
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.reward_guard import TimeLimit, keeps_process_alive
from megatron_rl.train.rollout_files import record_of
from megatron_rl.train.tasks import make_task

pytestmark = pytest.mark.megatron

CONFIG = PolicyLossConfig(policy_loss="grpo", samples_per_prompt=4)
pool = pool_of(4)


def pure(prompt, response, record):
    return float(sum(response) % 3)


def greedy(prompt, response, record):
    """Takes apart what it is given, as `response.pop()` and `.sort()` in a real one do, and sets torch up for itself."""
    value = pure(prompt, response, record)
    prompt.append(10**9)
    response[:] = [0] * len(response)
    record.clear()
    record["prompt"] = "HACK"
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return value


def noted(prompt, response, record):
    """One line for each call, of all ranks together."""
    with open(record["calls"], "a") as file:
        file.write(f"{os.getpid()}\n")
    return pure(prompt, response, record)


def fails(prompt, response, record):
    raise KeyError("no\x1b[31m answer")


def stops(prompt, response, record):
    raise StopIteration("here")


def leaves(prompt, response, record):
    sys.exit(0)


def leaves_hard(prompt, response, record):
    os._exit(0)


def sleeps(prompt, response, record, caught=(), takes_the_signal=False):
    """For ever: once more after each error of the kinds that it catches. Libraries with time limits of their own take the
    signal."""
    if takes_the_signal:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(0)
    while True:
        try:
            time.sleep(1000)
        except caught:
            continue


def backtracks(prompt, response, record):
    re.match(r"(a+)+$", "a" * 64 + "b")


def slow(prompt, response, record):
    time.sleep(0.8)
    return 1.0


def forks() -> bool:
    """A sandbox: its process ends with os._exit, as multiprocessing's do."""
    process = multiprocessing.get_context("fork").Process(target=lambda: None)
    process.start()
    process.join()
    child = os.fork()
    if child == 0:
        os._exit(7)
    return process.exitcode == 0 and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def write_prompts(folder: Path, **others) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": [1, index], **others}) + "\n" for index in range(2, 6)))
    return path


def get_on_rank(rank, prompts, reward, timeout=240):
    """(headers of the first rollout and records of this rank's samples, or None, and what was raised)."""
    options = TrainOptions(prompts=str(prompts), reward=f"{__name__}.{reward}", prompts_per_rollout=2, reward_timeout=timeout)
    task = make_task(prompts=options.prompts, reward=options.reward, max_new_tokens=5)
    trainer = tiny_trainer(CONFIG, vocab_size=task.vocab_size, max_sequence_length=16)
    found = []
    message = error_of(lambda: found.append(SampledRollouts(trainer, task, options, 4).get(0)))
    return (found[0].headers, record_of(found[0].own)["samples"]) if found else None, message


def settings_on_rank(rank, prompts, reward):
    batch, message = get_on_rank(rank, prompts, reward)
    settings = torch.is_grad_enabled(), torch.get_default_dtype()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    return batch, message, settings


def test_a_reward_that_changes_what_it_is_given_changes_nothing_else(pool, tmp_path):
    """Catches training on tokens that were never sampled, prompts that a reward of an earlier sample has changed, and a run that
    goes on without gradients, in silence."""
    prompts = write_prompts(tmp_path)
    [(expected, *_)], [(batch, message, settings)] = (
        pool.run(settings_on_rank, prompts, reward, world_size=1) for reward in ("pure", "greedy")
    )
    assert message == "" and batch == expected and settings == (True, torch.float32)
    assert len({tuple(sample["tokens"]) for sample in batch[1]}) > 2


LAYOUTS = [
    pytest.param(2, {PP: 2}, id="PP2"),
    pytest.param(2, {CP: 2}, id="CP2"),
    pytest.param(4, {TP: 2}, id="DP2xTP2"),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_each_sample_is_rewarded_once(pool, tmp_path, world_size, layout):
    """A judge that is paid for each call, or that is random: one rank of each data-parallel rank asks it, all hear the answer. A
    sample's tokens are on its own data-parallel rank."""
    prompts = write_prompts(tmp_path, calls=str(tmp_path / "calls"))
    answers = pool.run(get_on_rank, prompts, "noted", world_size=world_size, **layout)
    callers = (tmp_path / "calls").read_text().split()
    assert len(callers) == 8 and len(set(callers)) == world_size // 2
    headers, first = answers[0][0]
    for (found, own), message in answers:
        assert found == headers and not message
        dp_ranks = {headers[sample["index"]].dp_rank for sample in own}
        assert len(dp_ranks) == 1 and len(own) == 8 // (world_size // 2)
        assert own == first or dp_ranks == {1}


BAD_REWARDS = [
    pytest.param("fails", "KeyError: 'no\\x1b[31m answer' (raised by the reward test_rewards.fails for", id="raises"),
    pytest.param("stops", "StopIteration: here (raised by the reward test_rewards.stops for", id="raises StopIteration"),
    pytest.param("leaves", "called sys.exit(0): return a value or raise an error instead", id="sys.exit"),
    pytest.param("leaves_hard", "called os._exit(0): return a value or raise an error instead", id="os._exit"),
    pytest.param("sleeps", "has not returned after 1 s: make it faster, or raise --reward-timeout", id="sleeps"),
]


@pytest.mark.parametrize(("reward", "says"), BAD_REWARDS)
def test_a_reward_that_fails_on_one_rank_ends_all_of_them_with_its_words(pool, tmp_path, reward, says):
    """Catches ranks that wait for one that has ended, an exit code of 0 for a run that trained nothing, a hang without a word."""
    prompts = write_prompts(tmp_path)
    seconds = 1.0 if reward == "sleeps" else 240.0
    (_, first), (_, second) = pool.run(get_on_rank, prompts, reward, seconds, world_size=2, **{TP: 2})
    assert second.startswith("RunError: rank 0: ") and says in second
    if reward in ("fails", "stops"):
        assert first.startswith(("KeyError: ", "StopIteration: "))  # with its traceback
    else:
        assert first.startswith("RunError: ") and says in first
        assert re.search(rf"the reward {__name__}.{reward}, rollout 0, sample 0, prompt 'line-\d#0',", first)


def wait_longer_than_a_collective_on_rank(rank, prompts):
    """Eight rewards of 0.8 s, where a collective ends after 5 s."""
    patience = mock.patch.object(collection, "COLLECTIVE_TIMEOUT", datetime.timedelta(seconds=0))
    with patience, mock.patch.object(agreement, "SECONDS_BETWEEN_SIGNS_OF_LIFE", 0.2):
        return get_on_rank(rank, prompts, "slow", 5.0)


def test_ranks_wait_for_rewards_as_long_as_these_take(pool, tmp_path):
    """A judge of twenty seconds a sample outlasts the time limit of any collective."""
    answers = pool.run(wait_longer_than_a_collective_on_rank, write_prompts(tmp_path), world_size=2, **{TP: 2})
    assert [message for _, message in answers] == ["", ""]


@pytest.mark.parametrize("reward", [sleeps, partial(sleeps, caught=Exception), backtracks], ids=["sleeps", "tries again", "re"])
def test_a_reward_that_hangs_is_interrupted(reward):
    """In a system call, in a loop that catches Exception, in a regular expression that would take years."""
    handler = signal.getsignal(signal.SIGALRM)
    with TimeLimit(0.2) as limit, pytest.raises(RunError, match=r"^the reward of sample 7 has not returned after 0.2 s"):
        limit.call(lambda: reward([], [], {}), "the reward of sample 7")
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def end_of_process(function, *arguments) -> tuple[int, str]:
    """(exit code, standard error) of a forked process that calls it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        sys.stderr = open(2, "w", closefd=False)
        function(*arguments)
        os._exit(0)
    os.close(writer)
    with open(reader) as errors:
        text = errors.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def call_with_a_grace_of_a_second(reward):
    reward_guard.GRACE_SECONDS = reward_guard.SECONDS_BETWEEN_SIGNALS = 0.5
    with TimeLimit(0.2) as limit:
        limit.call(lambda: reward([], [], {}), "the reward of sample 7")


@pytest.mark.parametrize("how", [{"caught": BaseException}, {"takes_the_signal": True}], ids=["tries again", "takes the signal"])
def test_a_reward_that_cannot_be_interrupted_ends_the_process_with_the_same_words(how):
    code, errors = end_of_process(call_with_a_grace_of_a_second, partial(sleeps, **how))
    assert code == 1
    assert errors.startswith("megatron-rl train: RunError: the reward of sample 7 has not returned after 0.2 s: make it faster")


def test_a_reward_in_time_is_left_alone():
    """Many calls under one limit, one of which takes the signal for itself and leaves its own handler behind."""

    def own_alarm():
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.05)
        return 5

    with TimeLimit(1.0) as limit:
        assert [limit.call(lambda value=value: value, "a call") for value in range(100)] == list(range(100))
        assert limit.call(own_alarm, "a call") == 5
        with pytest.raises(RunError):
            limit.call(lambda: time.sleep(1000), "a call")


def test_processes_that_a_reward_forks_may_end_as_they_like():
    with keeps_process_alive("the reward"):
        assert forks()
    assert os._exit is reward_guard._exit_process


def test_a_module_of_rewards_that_exits_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    exits = [("sys.exit(0)", "sys.exit(0)"), ("os._exit(0)", "os._exit(0)"), ("exit()", "sys.exit(None)")]
    for number, (code, says) in enumerate(exits):
        (tmp_path / f"exits_{number}.py").write_text(f"import os, sys\n{code}\n")
        message = f"--reward 'exits_{number}.f': importing the module called {says}: return a value"
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_task("add", reward=f"exits_{number}.f")
