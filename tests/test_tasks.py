"""Tasks: prompts that every rank and every resumed run makes alike, rewards by hand, messages for a malformed task."""

from __future__ import annotations

import functools
import itertools
import json
import math
from fractions import Fraction

import pytest
import torch

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.train.tasks import BUILT_IN_TASKS, make_task
from megatron_rl.train.user_tasks import CharacterVocabulary

SEEN = []


def echo_reward(prompt, response, record):
    """Shows in SEEN what it was called with."""
    SEEN.append((prompt, response))
    return 1


def scaled_reward(prompt, response, record, scale):
    return scale


partial_reward = functools.partial(scaled_reward, scale=0.75)


def failing_reward(prompt, response, record):
    return record["no such field"]


def returning(name: str, value: object):
    def reward(prompt, response, record):
        return value

    reward.__qualname__ = name
    return reward


VALUES = {"whole": 2, "tensor": torch.tensor(0.25), "fraction": Fraction(1, 4), "none": None}
VALUES |= {"tensor_of_two": torch.ones(2), "digits": 10**400, "nan": math.nan}
globals().update({f"{name}_reward": returning(f"{name}_reward", value) for name, value in VALUES.items()})
not_a_function = 3


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


@pytest.mark.parametrize("name", BUILT_IN_TASKS)
def test_a_built_in_prompt_keeps_what_the_task_promises(name):
    """Every prompt of a run is a group of its own, also where the same symbols come up twice: their samples must not become one."""
    task = make_task(name)
    prompts, lengths = [task.make_prompt(index, 3) for index in range(200)], set()
    for prompt in prompts:
        assert len(prompt.tokens) == task.max_prompt_tokens
        assert all(0 <= token < task.vocab_size for token in prompt.tokens + prompt.record["answer"])
        answer = prompt.record["answer"]
        lengths.add(len(answer))
        assert all(
            (token in task.end_tokens) == (place == len(answer) - 1) for place, token in enumerate(answer) if task.end_tokens
        )
    if name == "tally":  # its responses end by themselves, and some are longer than any answer
        assert lengths == {2, 3, 4, 5, 6} and task.end_tokens == (0,) and task.max_new_tokens == 8
    else:
        assert lengths == {task.max_new_tokens} and task.end_tokens == ()
    assert len({prompt.prompt_id for prompt in prompts}) == 200 > len({tuple(prompt.tokens) for prompt in prompts})


# Five prompts of seed 7 for each task: 8 and 6 are the tokens that a prompt begins with.
GOLDEN = [[[8, 7], [8, 3], [8, 0], [8, 6], [8, 5]], [[6, 5], [6, 4], [6, 1], [6, 3], [6, 2]]]


def test_without_a_name_the_task_is_repeat():
    assert make_task().name == "repeat"


def test_a_prompt_depends_on_seed_and_index_alone():
    """Catches hash(), which differs from process to process: ranks would train on different prompts."""
    found = {seed: [[make_task(name).make_prompt(i, seed).tokens for i in range(5)] for name in BUILT_IN_TASKS] for seed in (7, 8)}
    assert found[7] == GOLDEN
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
    path, vocabulary = tmp_path / "vocabulary.json", CharacterVocabulary.of_texts(["ba", "\u00e9c"])
    vocabulary.save(path)
    assert json.loads(path.read_text()) == {"characters": "abc\u00e9", "end_token": 4}
    vocabulary.check_saved(path)
    with pytest.raises(ConfigError, match="holds the characters 'abc\u00e9', the prompts file has 'abcd'"):
        CharacterVocabulary.of_texts(["abcd"]).check_saved(path)


MALFORMED = [
    pytest.param(b'{"prompt": "a"', ", line 1: not JSON", id="not JSON"),
    pytest.param(b'{"prompt": "a"}\n\n[1]', ", line 3: prompt: missing", id="not an object, blank line counted"),
    pytest.param(b'{"text": "a"}', ", line 1: prompt: missing", id="no prompt"),
    pytest.param(b'{"prompt": ""}', ", line 1: prompt: it has no token", id="empty prompt"),
    pytest.param(b'{"prompt": [1, -2]}', r", line 1: prompt: must be text, or a list", id="negative token"),
    pytest.param(b'{"prompt": [true]}', r", line 1: prompt: must be", id="bool as token"),
    pytest.param(b'{"prompt": 3}', ", line 1: prompt: must be", id="number as prompt"),
    pytest.param(b'{"prompt": "a"}\n{"prompt": [1]}', ", line 2: prompt: must be text, .* as the first", id="both kinds"),
    pytest.param(b"", ": the file holds no prompt", id="empty file"),
    pytest.param(b'{"prompt": "ab"}\n{"prompt": "\xe9"}', ", line 2: not JSON .*byte 0xe9 in position 12", id="latin-1"),
    pytest.param(b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", ", line 1: .* nested too deeply", id="nested"),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED)
def test_a_malformed_prompts_file_is_refused_with_line_and_field(tmp_path, content, message):
    """Catches UnicodeDecodeError and RecursionError."""
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"p\.jsonl{message}") as raised:
        make_task(prompts=tmp_path / "p.jsonl", reward=f"{__name__}.echo_reward")
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0c"], ids=ascii)
def test_characters_that_end_lines_elsewhere_are_part_of_a_prompt(tmp_path, character):
    """JSON allows them as they are inside a string (the last one as an escape): only a newline ends a line."""
    text = f"a{character}b"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    (tmp_path / "p.jsonl").write_bytes(f'{line}\r\n{{"prompt": "c"}}\n'.encode())
    task = make_task(prompts=tmp_path / "p.jsonl", reward=f"{__name__}.echo_reward")
    assert [prompt.record["prompt"] for prompt in task.prompts] == [text, "c"]


NO_NUMBERS = [
    ("none_reward", TypeError, r"must be .* real number, not 'NoneType'"),
    ("tensor_of_two_reward", (RuntimeError, ValueError), "element"),
    ("digits_reward", OverflowError, "too large"),
    ("nan_reward", DataError, r"nan_reward returned nan for prompt 'line-1#0', it must return a finite number"),
]


def test_a_reward_may_be_any_kind_of_number(tmp_path):
    """Catches NaN in the advantages of a group."""
    for reward, value in (("whole_reward", 2.0), ("tensor_reward", 0.25), ("fraction_reward", 0.25), ("partial_reward", 0.75)):
        task = user_task(tmp_path, {"prompt": [1]}, reward=reward)
        result = task.reward(task.make_prompt(0, 0), [1, 0])
        assert (result, type(result)) == (value, float)
    for reward, kind, message in NO_NUMBERS:
        task = user_task(tmp_path, {"prompt": [1]}, reward=reward)
        with pytest.raises(kind, match=message):
            task.reward(task.make_prompt(0, 0), [1])


def test_a_reward_that_raises_keeps_its_error_and_names_the_prompt(tmp_path):
    task = user_task(tmp_path, {"prompt": [1]}, reward="failing_reward")
    with pytest.raises(KeyError, match="no such field") as caught:
        task.reward(task.make_prompt(0, 0), [1])
    assert caught.value.__notes__ == [f"raised by the reward {__name__}.failing_reward for prompt 'line-1#0'"]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        pytest.param("no_dot", "--reward 'no_dot' has no dot", id="no dot"),
        pytest.param("no_such_module.f", "'no_such_module' cannot be imported .*PYTHONPATH", id="no module"),
        pytest.param(f"{__name__}.no_such_function", "has no 'no_such_function'", id="no function"),
        pytest.param(f"{__name__}.not_a_function", "is int, not a function", id="not a function"),
    ],
)
def test_a_reward_that_cannot_be_imported_says_what_failed(reward, message):
    with pytest.raises(ConfigError, match=message):
        make_task(prompts="none.jsonl", reward=reward)
