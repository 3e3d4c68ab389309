"""A user's reward: on copies, once for each sample, and its error ends all ranks. On forked ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from helpers import error_of, pool_of
from trainer_cases import CP, PP, TP, tiny_trainer

from megatron_rl.config import PolicyLossConfig
from megatron_rl.train.collection import SampledRollouts
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollout_files import record_of
from megatron_rl.train.tasks import make_task

pytestmark = pytest.mark.megatron

CONFIG = PolicyLossConfig(policy_loss="grpo", samples_per_prompt=4)
pool = pool_of(4)


def pure(prompt, response, record):
    return float(sum(response) % 3)


def greedy(prompt, response, record):
    """Takes apart what it is given, as `response.pop()` and `.sort()` in a real one do."""
    value = pure(prompt, response, record)
    prompt.append(10**9)
    response[:] = [0] * len(response)
    record.clear()
    record["prompt"] = "HACK"
    return value


def noted(prompt, response, record):
    """One line for each call, of all ranks together."""
    with open(record["calls"], "a") as file:
        file.write(f"{os.getpid()}\n")
    return pure(prompt, response, record)


def fails(prompt, response, record):
    raise KeyError("no\x1b[31m answer")


def is_refused(prompt, response, record):
    raise ConnectionRefusedError("no judge")


def leaves(prompt, response, record):
    sys.exit(0)


def write_prompts(folder: Path, **others) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": [1, index], **others}) + "\n" for index in range(2, 6)))
    return path


def get_on_rank(rank, prompts, reward):
    """(headers of the first rollout and records of this rank's samples, or None, and what was raised)."""
    options = TrainOptions(prompts=str(prompts), reward=f"{__name__}.{reward}", prompts_per_rollout=2)
    task = make_task(prompts=options.prompts, reward=options.reward, max_new_tokens=5)
    trainer = tiny_trainer(CONFIG, vocab_size=task.vocab_size, max_sequence_length=16)
    found = []
    message = error_of(lambda: found.append(SampledRollouts(trainer, task, options, 4).get(0)))
    return (found[0].headers, record_of(found[0].own)["samples"]) if found else None, message


def test_a_reward_that_changes_what_it_is_given_changes_nothing_else(pool, tmp_path):
    """Catches training on tokens that were never sampled, and prompts that a reward of an earlier sample has changed."""
    prompts = write_prompts(tmp_path)
    [(expected, _)], [(batch, message)] = (pool.run(get_on_rank, prompts, reward, world_size=1) for reward in ("pure", "greedy"))
    assert message == "" and batch == expected
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


# By reward: what its own rank raises, and what the others hear of it.
BAD_REWARDS = [
    pytest.param("fails", "KeyError: ", "answer' (raised by the reward test_rewards.fails for", id="raises"),
    pytest.param("is_refused", "RunError: no judge (raised by", "no judge (raised by the reward", id="OSError"),
    pytest.param("leaves", "RunError: the reward", "test_rewards.leaves called sys.exit(0): return a value", id="sys.exit"),
]


@pytest.mark.parametrize(("reward", "own", "heard"), BAD_REWARDS)
def test_a_reward_that_fails_on_one_rank_ends_all_of_them_with_its_words(pool, tmp_path, reward, own, heard):
    """Catches ranks that wait for one that has ended, and an exit code of 0 for a run that trained nothing."""
    (_, first), (_, second) = pool.run(get_on_rank, write_prompts(tmp_path), reward, world_size=2, **{TP: 2})
    assert first.startswith(own)
    assert second.startswith("RunError: rank 0: ") and heard in second
