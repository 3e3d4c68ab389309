"""Tasks: prompts that every rank and every resumed run makes alike, rewards by hand, messages for a malformed task."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from dataclasses import replace

import pytest
from helpers import error_of, pool_of
from trainer_cases import TP, tiny_trainer

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.train.collection import SampledRollouts
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollout_files import record_of
from megatron_rl.train.tasks import BUILT_IN_TASKS, make_task
from megatron_rl.train.user_tasks import CharacterVocabulary

SEEN = []
pool = pool_of(4)


def echo_reward(prompt, response, record):
    """Shows in SEEN what it was called with."""
    SEEN.append((prompt, response))
    return 1


def nan_reward(prompt, response, record):
    return math.nan


def user_task(tmp_path, *records, reward="echo_reward", **settings):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return make_task(prompts=str(tmp_path / "prompts.jsonl"), reward=f"{__name__}.{reward}", **settings)


@pytest.mark.parametrize(
    ("name", "symbol", "answer", "wrong", "reward"),
    [
        pytest.param("repeat", 5, [5, 5, 5, 5], [5, 5, 8, 0], 2 / 4, id="repeat: two of four"),
        pytest.param("tally", 3, [1, 1, 1, 0], [1, 0], 1 / 4, id="tally: ends too early"),
        pytest.param("tally", 1, [1, 0], [1, 1, 1, 1, 0], 1 / 5, id="tally: ends too late"),
    ],
)
def test_rewards_by_hand(name, symbol, answer, wrong, reward):
    """The share of tokens that are right at their place."""
    task = make_task(name)
    prompt = next(p for p in (task.make_prompt(index, 0) for index in itertools.count()) if p.tokens[1:] == [symbol])
    assert prompt.tokens[0] == task.vocab_size - 1
    assert task.reward(prompt, answer) == 1.0
    assert task.reward(prompt, wrong) == reward


# Five prompts of seed 7 for each task: 8 and 6 are the tokens that a prompt begins with.
GOLDEN = [[[8, 7], [8, 3], [8, 0], [8, 6], [8, 5]], [[6, 5], [6, 4], [6, 1], [6, 3], [6, 2]]]


def test_a_prompt_depends_on_seed_and_index_alone():
    """Catches hash(), which differs from process to process: ranks would train on different prompts."""
    found = {seed: [[make_task(name).make_prompt(i, seed).tokens for i in range(5)] for name in BUILT_IN_TASKS] for seed in (7, 8)}
    assert found[7] == GOLDEN and make_task().name == "repeat"
    assert found[8] != found[7]


def test_text_prompts_get_a_vocabulary_of_their_characters(tmp_path):
    """`+12345=ab`, and the end token is id 9. A response shows tokens beyond it, which a larger --vocab-size allows."""
    task = user_task(tmp_path, {"prompt": "1+2=", "answer": 35}, {"prompt": "4=", "hint": "ba", "x": ["q"]})
    assert task.vocabulary.characters == "+12345=ab"
    assert (task.vocab_size, task.end_tokens, task.max_prompt_tokens, task.max_new_tokens) == (10, (9,), 4, 16)
    prompt = next(p for p in (task.make_prompt(index, 0) for index in range(2)) if p.prompt_id == "line-1#0")
    assert prompt.tokens == [1, 0, 2, 6]
    assert task.reward(prompt, [3, 5, 9, 1]) == 1.0 and SEEN[-1] == ("1+2=", "35")
    assert task.reward(prompt, [3, 17, 5]) == 1.0 and SEEN[-1] == ("1+2=", "3\ufffd5")


def test_token_prompts_reach_the_reward_as_tokens(tmp_path):
    """The vocabulary reaches to the largest id of prompts and answers, and no token ends a response."""
    task = user_task(tmp_path, {"prompt": [4, 1], "answer": [11]}, max_new_tokens=5)
    assert (task.vocab_size, task.end_tokens, task.max_new_tokens, task.vocabulary) == (12, (), 5, None)
    prompt = task.make_prompt(0, 0)
    assert (prompt.prompt_id, prompt.tokens) == ("line-1#0", [4, 1])
    task.reward(prompt, [3, 6, 4])
    assert SEEN[-1] == ([4, 1], [3, 6, 4])


def test_each_epoch_visits_every_prompt_once_in_another_order(tmp_path):
    """Catches prompts that a run never sees, and two groups of one id where a rollout is larger than the file."""
    task = user_task(tmp_path, *({"prompt": [token]} for token in range(30)))
    epochs = [[task.make_prompt(30 * epoch + place, 5) for place in range(30)] for epoch in range(3)]
    orders = [[prompt.tokens[0] for prompt in epoch] for epoch in epochs]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert len({prompt.prompt_id for epoch in epochs for prompt in epoch}) == 90


def test_a_vocabulary_is_saved_and_compared_on_resume(tmp_path):
    """Catches a changed prompts file under an old checkpoint, whose token ids would mean other characters."""
    path, vocabulary = tmp_path / "vocabulary.json", CharacterVocabulary.from_texts(["ba", "\u00e9c"])
    vocabulary.save(path)
    assert json.loads(path.read_text()) == {"characters": "abc\u00e9", "end_token": 4}
    vocabulary.check_saved(path)
    with pytest.raises(ConfigError, match="holds the characters 'abc\u00e9', the prompts file has 'abcd'"):
        CharacterVocabulary.from_texts(["abcd"]).check_saved(path)


MALFORMED = [
    (b'{"prompt": "a"', ", line 1: not JSON"),
    (b'{"prompt": "a"}\n{"prompt": [1]}', ", line 2: prompt: must be text, .* as the first"),
    (b'{"prompt": "ab"}\n{"prompt": "\xe9"}', ", line 2: not JSON .*byte 0xe9 in position 12"),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED)
def test_a_malformed_prompts_file_is_refused_with_line_and_field(tmp_path, content, message):
    """A blank line is none, and counts. Catches UnicodeDecodeError."""
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"p\.jsonl{message}"):
        make_task(prompts=tmp_path / "p.jsonl", reward=f"{__name__}.echo_reward")


EVALUATED = [
    # --prompts, --eval-prompts, what is said
    pytest.param(["12", "3+4"], "1b", "--prompts, which makes the vocabulary, has no 'b'", id="other text"),
    pytest.param([[3, 1], [5, 4]], [6], "token 6 is not below 6, the vocabulary of the model", id="other ids"),
]


@pytest.mark.parametrize(("prompts", "held_out", "message"), EVALUATED)
def test_prompts_to_evaluate_that_the_run_cannot_read_are_refused(tmp_path, prompts, held_out, message):
    task = user_task(tmp_path, *({"prompt": prompt} for prompt in prompts))
    (tmp_path / "e.jsonl").write_text(json.dumps({"prompt": held_out}))
    with pytest.raises(DataError, match=f"e.jsonl, line 1: prompt: {message}"):
        task.with_prompts_of(tmp_path / "e.jsonl")


def test_a_reward_is_a_finite_number(tmp_path):
    """Catches NaN in the advantages of a group."""
    task = user_task(tmp_path, {"prompt": [1]}, reward="nan_reward")
    with pytest.raises(DataError, match=r"returned nan for prompt 'line-1#0', it must return a finite number"):
        task.reward(task.make_prompt(0, 0), [1])


# A reward on ranks

CONFIG = PolicyLossConfig(policy_loss="grpo", samples_per_prompt=4)


def pure_reward(prompt, response, record):
    return float(sum(response) % 3)


def greedy_reward(prompt, response, record):
    """A line for each call, of all ranks. Takes apart what it is given, as `response.pop()` and `.sort()` in a real one do."""
    value = pure_reward(prompt, response, record)
    with open(record["calls"], "a") as file:
        file.write(f"{os.getpid()}\n")
    prompt.append(10**9)
    response[:] = [0] * len(response)
    record.clear()
    return value


def refused_reward(prompt, response, record):
    raise ConnectionRefusedError("no\x1b[31m judge")


def leaving_reward(prompt, response, record):
    sys.exit(0)


def get_on_rank(rank, folder, reward):
    """(headers of the first rollout and records of this rank's samples, or None, and what was raised)."""
    records = [{"prompt": [1, index], "calls": str(folder / "calls")} for index in range(2, 6)]
    (folder / str(rank)).mkdir(exist_ok=True)
    task = user_task(folder / str(rank), *records, reward=reward, max_new_tokens=5)
    trainer = tiny_trainer(CONFIG, vocab_size=task.vocab_size, max_sequence_length=16)
    found = []
    options = TrainOptions(prompts="p.jsonl", reward=reward, prompts_per_rollout=2)
    message = error_of(lambda: found.append(SampledRollouts(trainer, task, options, 4).get(0)))
    return (found[0].headers, record_of(found[0].own)["samples"]) if found else None, message


@pytest.mark.megatron
def test_each_sample_is_rewarded_once_and_a_reward_changes_nothing_else(pool, tmp_path):
    """A judge that is paid for each call, or that is random: one rank of each data-parallel rank asks it, all hear the answer. A
    sample's tokens are on its own data-parallel rank. Catches training on tokens that were never sampled, and prompts that a reward
    of an earlier sample has changed."""
    [((of_one, samples), _)] = pool.run(get_on_rank, tmp_path, "pure_reward", world_size=1)
    assert len({tuple(sample["tokens"]) for sample in samples}) > 2
    answers = pool.run(get_on_rank, tmp_path, "greedy_reward", **{TP: 2})
    callers = (tmp_path / "calls").read_text().split()
    assert len(callers) == 8 and len(set(callers)) == 2
    headers = answers[0][0][0]
    assert [replace(header, dp_rank=0) for header in headers] == of_one
    for (found, own), message in answers:
        assert found == headers and not message
        assert len({headers[sample["index"]].dp_rank for sample in own}) == 1 and len(own) == 4
        assert own == [samples[sample["index"]] for sample in own]


BAD_REWARDS = [
    # what its own rank raises, and what the others hear of it
    pytest.param("refused_reward", "RunError: no", "judge (raised by the reward", id="OSError"),
    pytest.param("leaving_reward", "RunError: the reward", "leaving_reward called sys.exit(0): return a value", id="sys.exit"),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("reward", "own", "heard"), BAD_REWARDS)
def test_a_reward_that_fails_on_one_rank_ends_all_of_them_with_its_words(pool, tmp_path, reward, own, heard):
    """Catches ranks that wait for one that has ended, and an exit code of 0 for a run that trained nothing."""
    (_, first), (_, second) = pool.run(get_on_rank, tmp_path, reward, world_size=2, **{TP: 2})
    assert first.startswith(own)
    assert second.startswith("RunError: rank 0: ") and heard in second
