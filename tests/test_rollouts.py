"""Rollouts: prompts that every rank and every resumed run makes alike, rewards, advantages, the cut into steps and micro-batches,
and the file that a run can be replayed from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import error_of, pool_of
from hypothesis import example, given
from hypothesis import strategies as st
from pages import fences
from trainer_cases import TP, tiny_trainer

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.train.collection import SampledRollouts
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollout_files import cut_rollouts, load_rollouts, record_of, save_rollouts
from megatron_rl.train.rollouts import (
    RolloutBatch,
    Sample,
    SharedRollout,
    group_advantages,
    partition,
    rollout_values,
    split_into_steps,
)
from megatron_rl.train.tasks import BUILT_IN_TASKS, make_task
from megatron_rl.train.writers import REWARD, WITHOUT_SIGNAL


def make_sample(index: int, prompt_id: str = "p", **changes) -> Sample:
    values = {
        "prompt_id": prompt_id,
        "tokens": [8, 3, 1, 2],
        "response_length": 2,
        "loss_mask": [1, 1],
        "reward": 0.5,
        "advantage": 0.25,
        "old_log_probs": [-1.5, -2.5],
        "index": index,
    }
    return Sample(**values | changes)


def make_batch(prompt_ids: list[str], rollout_index: int = 0) -> RolloutBatch:
    samples = [make_sample(index, prompt_id) for index, prompt_id in enumerate(prompt_ids)]
    return RolloutBatch(samples=samples, rollout_index=rollout_index)


def records(batches) -> list[dict]:
    return [record_of(batch) for batch in batches]


def indices(samples: list[Sample]) -> list[int]:
    return [sample.index for sample in samples]


@example([("a", 0.7)])  # its unbiased deviation is 0/0
@example([("a", 0.1)] * 3)  # the sum / 3 is not 0.1
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-100, 100)), min_size=1, max_size=30))
def test_advantages_of_each_group_follow_the_textbook(pairs):
    """Catches a mean or a deviation taken over the batch instead of the group, NaN for a group of one, and noise of rounding turned
    into a training signal where a group has no contrast."""
    prompt_ids = [prompt_id for prompt_id, _ in pairs]
    rewards = [reward for _, reward in pairs]
    advantages, of_dr_grpo = group_advantages(rewards, prompt_ids), group_advantages(rewards, prompt_ids, "none")
    for place, (prompt_id, reward) in enumerate(pairs):
        group = [other for name, other in pairs if name == prompt_id]
        if len(set(group)) == 1:
            assert advantages[place] == 0.0
        else:
            centred = reward - statistics.fmean(group)
            assert advantages[place] == pytest.approx(centred / (statistics.stdev(group) + 1e-6), rel=1e-6, abs=1e-7)
            # Dr. GRPO does not divide.
            assert of_dr_grpo[place] == pytest.approx(centred, rel=1e-6, abs=1e-7)


def test_the_share_of_groups_without_signal_by_hand():
    """Of three groups one has no advantage at all."""
    pairs = [("p", 0.0), ("p", 0.0), ("q", 0.0), ("q", 1.0), ("r", 0.0), ("r", -1.0)]
    samples = [make_sample(index, name, advantage=value) for index, (name, value) in enumerate(pairs)]
    assert rollout_values(samples)[WITHOUT_SIGNAL] == [True, False, False]


def test_a_step_has_samples_of_each_data_parallel_rank():
    """p, q, p, q, ... dealt to two ranks in the order of the file would give rank 0 all of p."""
    shared = SharedRollout.of(make_batch(["p", "q"] * 3), 0, 2)
    assert all({header.dp_rank for header in step} == {0, 1} for step in split_into_steps(shared.headers, 2, 0))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_steps_partition_the_batch_by_prompt(prompts, data):
    """FB-07: every sample once, prompt by prompt in the order of their first samples, no prompt in two steps, whose prompt_mean
    would count it twice. Sizes in prompts differ by at most one, the larger ones first, and no step is empty."""
    steps_per_rollout = data.draw(st.integers(1, len(set(prompts))))
    steps = split_into_steps(make_batch([str(prompt) for prompt in prompts]).samples, steps_per_rollout, 0)
    by_prompt = [[index for index, other in enumerate(prompts) if other == prompt] for prompt in dict.fromkeys(prompts)]
    assert [sample.index for step in steps for sample in step] == sum(by_prompt, [])
    sizes = [len({sample.prompt_id for sample in step}) for step in steps]
    assert len(steps) == steps_per_rollout and sum(sizes) == len(by_prompt)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1 and sizes[-1] >= 1


@given(st.integers(1, 40), st.integers(1, 9), st.none() | st.integers(1, 9))
def test_ranks_hold_each_sample_once_in_equally_many_micro_batches(num_samples, dp_size, micro_batch_size):
    """Catches a dropped remainder, and ranks with unlike numbers of micro-batches, which hang in the schedule."""
    shared = [SharedRollout.of(make_batch(["p"] * num_samples), rank, dp_size) for rank in range(dp_size)]
    ranks = [partition(rollout.headers, rank, micro_batch_size) for rank, rollout in enumerate(shared)]
    for parts, rollout in zip(ranks, shared, strict=True):
        assert [sample.index for part in parts for sample in part] == indices(rollout.own.samples)
    assert len({len(parts) for parts in ranks}) == 1
    assert sorted(sample.index for parts in ranks for part in parts for sample in part) == list(range(num_samples))
    for parts in ranks:
        lengths = [len(part) for part in parts]
        assert micro_batch_size is None or max(lengths) <= micro_batch_size
        assert lengths == sorted(lengths, reverse=True), "empty micro-batches come last"
        assert any(lengths) or num_samples < dp_size


# The file


def test_what_is_saved_is_loaded_bit_by_bit(tmp_path):
    """Catches floats cut to some digits: a replay must see the run's own ratios. A masked value may be any. repr tells NaN and -0.0
    apart."""
    scores = [math.nan, -0.1, -1e-45]
    measured = {"old_log_probs": scores, "rollout_log_probs": [math.inf, -3.4e38, -0.0]}
    of_tokens = {"tokens": [8, 3, 1, 2], "response_length": 3, "loss_mask": [0, 1, 1], "kept_ids": [[], [0, 1], [2]]}
    of_tokens |= {
        "teacher_topk_ids": [[0, 0], [8, 1], [2, 3]],
        "teacher_topk_log_probs": [[math.nan, 1.0], [-0.1, -math.inf], [-1, -2]],
    }
    first = make_sample(0, "\u2028\n\x00", **of_tokens, **measured, kept_mass=[0.1, 1e-30, 1.0], reward=-1 / 3, advantage=-0.0)
    second = dataclasses.replace(first, index=1, prompt_id="", reward=1.7e308, advantage=5e-324)
    samples = [dataclasses.replace(sample, rollout_id=sample.index, policy_version=9) for sample in (first, second)]
    saved = [RolloutBatch(samples=samples[: index + 1], rollout_index=index) for index in range(2)]
    for batch in saved:
        save_rollouts(tmp_path / "deep" / "rollouts.jsonl", batch)
    assert repr(records(load_rollouts(tmp_path / "deep" / "rollouts.jsonl", vocab_size=9))) == repr(records(saved))


def sample_record(**changes) -> dict:
    return record_of(make_batch(["p"]))["samples"][0] | changes


def line_of(*samples: dict, index: int = 0) -> str:
    return json.dumps({"rollout_index": index, "samples": samples}) + "\n"


def vllm_entries(entries: dict[int, tuple[float, int]]) -> dict:
    return {str(name): {"logprob": x, "rank": rank, "decoded_token": ""} for name, (x, rank) in entries.items()}


OWN = [None, *(vllm_entries({token: (-1.0, 1)}) for token in sample_record()["tokens"][1:])]
BAD_SAMPLES = [
    ({"tokens": [8, 9, 1, 2]}, r"tokens: 9 must be below 9, the vocabulary .* type the --vocab-size"),
    ({"tokens": [1, 2]}, "response_length: 2 of 2 tokens leaves"),
    ({"loss_mask": [1]}, "loss_mask: 1 values for a response of 2"),
    ({"old_log_probs": [-1.0, -math.inf]}, "old_log_probs: -inf must be a finite number, at most 0"),
    ({"rollout_log_probs": [5.0, -1.0]}, "rollout_log_probs: 5.0 must be"),
    ({"kept_mass": [0.5, 0.0]}, "kept_mass: 0.0 must be above 0 and at most 1"),
    ({"teacher_topk_ids": [[1, 2], [1, 2.0]]}, r"teacher_topk_ids: \[1, 2.0\] must be a list of integers of at least 0"),
    (
        {"teacher_topk_log_probs": [[-1.0], [0.1]]},
        r"teacher_topk_log_probs: \[0.1\] must be a list of numbers of at most 0, or -Inf",
    ),
    ({"teacher_topk_ids": [[1, 2], [1]]}, "expected sequence of length 2"),
    ({"teacher_prompt_logprobs": [{}, {}]}, "teacher_prompt_logprobs: must be the prompt_logprobs of vLLM, null or"),
    ({"teacher_prompt_logprobs": [None, None, {}, {}]}, r"teacher_prompt_logprobs: must be .* own id among them \(KeyError"),
    ({"teacher_prompt_logprobs": OWN, "response_length": 1}, "loss_mask: 2 values for a response of 1"),
    ({"teacher_prompt_logprobs": OWN, "teacher_log_probs": [-1.0] * 2}, "teacher_prompt_logprobs: stands beside teacher_log_probs"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SAMPLES, ids=[row[-1] for row in BAD_SAMPLES])
def test_a_bad_sample_is_refused_with_file_line_and_field(tmp_path, changes, message):
    """Each would otherwise reach the loss, some as a silently wrong weight."""
    path = tmp_path / "r.jsonl"
    path.write_text(line_of(sample_record()) + line_of(sample_record(), sample_record(**changes), index=1))
    batches = load_rollouts(path, vocab_size=9)
    assert next(batches).rollout_index == 0
    with pytest.raises(DataError, match=rf"r\.jsonl, line 2, sample 1: {message}"):
        next(batches)


def test_the_prompt_logprobs_of_vllm_are_a_teacher(tmp_path):
    """The entry of a token that is none of the two likeliest is the third, whether its rank is 3 or more, and the only token of a
    sample may have rank 3. Entries have no order."""
    first, second = {6: (-4.0, 3), 3: (-0.5, 1), 8: (-1.5, 2)}, {2: (-5.0, 7), 1: (-0.75, 2), 5: (-0.625, 1)}
    prompt = [None, vllm_entries({3: (-9.0, 9)})]
    rows = [*prompt, vllm_entries(first), vllm_entries(second)]
    short = {"response_length": 1, "loss_mask": [1], "old_log_probs": [-1.0]}
    samples = (
        sample_record(tokens=[8, 3, 6, 2], teacher_prompt_logprobs=rows),
        sample_record(tokens=[8, 3, 6], teacher_prompt_logprobs=[*prompt, vllm_entries(first)], index=1, **short),
    )
    (tmp_path / "r.jsonl").write_text(line_of(*samples))
    [batch] = load_rollouts(tmp_path / "r.jsonl", vocab_size=9)
    found, one = batch.samples
    assert found.teacher_topk_ids.tolist() == [[3, 8], [5, 1]]
    assert found.teacher_topk_log_probs.tolist() == [[-0.5, -1.5], [-0.625, -0.75]]
    assert found.teacher_log_probs.tolist() == [-4.0, -5.0]
    assert (one.teacher_topk_ids.tolist(), one.teacher_log_probs.tolist()) == ([[3, 8]], [-4.0])


def test_the_log_probs_of_the_tokens_alone_are_a_sampled_teacher(tmp_path):
    """prompt_logprobs=0 of vLLM: an entry a token, whose server writes -9999 for -inf."""
    rows = [None, vllm_entries({3: (-9.0, 9)}), vllm_entries({6: (-0.5, 1)}), vllm_entries({2: (-9999.0, 7)})]
    sample = sample_record(tokens=[8, 3, 6, 2], loss_mask=[1, 0], teacher_prompt_logprobs=rows)
    (tmp_path / "r.jsonl").write_text(line_of(sample))
    [batch] = load_rollouts(tmp_path / "r.jsonl")
    [found] = batch.samples
    assert (found.teacher_log_probs.tolist(), found.teacher_topk_ids) == ([-0.5, -math.inf], None)


TWICE = line_of(sample_record(index=3), sample_record(), sample_record(index=3))
MIXED = line_of(sample_record(), sample_record(index=1, old_log_probs=None))
ONE_ID, TWO_IDS = (sample_record(teacher_topk_ids=[[*range(k)]] * 2) for k in (1, 2))
BAD_FILES = [
    ('{"rollout_index": 0, "samples"\n', "line 1: not JSON"),
    ('{"rollout_index": 0, "rollout_index": 1, "samples": []}\n', "the key 'rollout_index' stands twice"),
    (TWICE, "line 1: index: two samples have the same: each has its own"),
    (MIXED, "line 1: old_log_probs: null in some samples and not in others: give it for all, or for none"),
    (line_of(ONE_ID) + line_of(TWO_IDS, index=1), "line 2: teacher_topk_ids: lists of 1, 2: all of a file have one length, K"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES, ids=[row[-1] for row in BAD_FILES])
def test_a_bad_file_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        list(load_rollouts(path))


def test_a_line_that_a_killed_run_left_unfinished_is_no_rollout(tmp_path):
    """It is not read, and a resumed run cuts it, with the rollouts that it will write again (FB-90)."""
    path = tmp_path / "r.jsonl"
    with pytest.raises(DataError, match=r"r\.jsonl cannot be read"):
        next(load_rollouts(path))
    cut_rollouts(path, 2)
    assert not path.exists()
    batches = [make_batch(["a"], rollout_index=index) for index in range(4)]
    for batch in batches:
        save_rollouts(path, batch)
    whole = path.read_bytes()
    for rest in (b'{"rollout', whole.splitlines()[0]):  # cut within the line, and before its end alone
        path.write_bytes(whole + rest)
        assert records(load_rollouts(path)) == records(batches)
        cut_rollouts(path, 4)
        assert path.read_bytes() == whole
    cut_rollouts(path, 2)
    save_rollouts(path, batches[2])
    assert records(load_rollouts(path)) == records(batches[:3])


def test_a_file_that_starts_elsewhere_is_refused(tmp_path):
    """A run that is resumed with the file of another would train on rollouts twice, or on none of the first ones."""
    save_rollouts(tmp_path / "r.jsonl", make_batch(["a"], rollout_index=1))
    trainer = SimpleNamespace(settings=SimpleNamespace(vocab_size=9), groups=SimpleNamespace(dp=SINGLE))
    with pytest.raises(DataError, match=r"r\.jsonl holds rollout 1 where rollout 0 is due: it was cut or edited"):
        ReplayedRollouts(TrainOptions(rollouts=str(tmp_path / "r.jsonl")), trainer).get(0)


# Rollouts of several samples: A is 3 rows of reward 1, B and C are one each of reward 0, of prompt p; D is one of prompt q.
ROWS = [("A", "p", 1.0), ("B", "p", 0.0), ("A", "p", 1.0), ("C", "p", 0.0), ("A", "p", 1.0), ("D", "q", 0.0)]


def rows_of_rollouts(**changes) -> list[Sample]:
    return [
        make_sample(index, prompt, rollout_id=rollout, reward=reward, **changes)
        for index, (rollout, prompt, reward) in enumerate(ROWS)
    ]


def test_the_mean_reward_is_over_rollouts_and_not_over_rows():
    """FB-143: a rollout of many turns would pull the mean to its own reward. Of A, B, C, D it is 1/4, over rows 1/2."""
    assert rollout_values(rows_of_rollouts())[REWARD] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("dp_size", "size"), [(1, None), (2, 1), (2, 2), (3, 3)])
def test_the_samples_of_a_rollout_go_to_one_rank_and_one_micro_batch(dp_size, size):
    batch = RolloutBatch(samples=rows_of_rollouts(), rollout_index=0)
    shared = [SharedRollout.of(batch, rank, dp_size) for rank in range(dp_size)]
    parts = [partition(of_rank.headers, rank, size) for rank, of_rank in enumerate(shared)]
    assert len({len(of_rank) for of_rank in parts}) == 1, "ranks with unlike numbers of micro-batches hang"
    places = {}
    for rank, of_rank in enumerate(parts):
        for number, part in enumerate(of_rank):
            assert size is None or len(part) <= size or len({header.rollout_id for header in part}) == 1
            for header in part:
                places.setdefault(header.rollout_id, set()).add((rank, number))
    assert {name: len(found) for name, found in places.items()} == dict.fromkeys("ABCD", 1)
    assert sorted(header.index for of_rank in parts for part in of_rank for header in part) == list(range(6))


def test_the_converter_of_the_page_writes_what_is_read(tmp_path):
    """Two samples of one prompt as miles and slime dump them: rewards 0 and 1 have advantages of -+0.5 / sqrt(1/2)."""
    [text] = [fence.text for fence in fences("docs/training.md") if fence.language == "python" and "def line_of" in fence.text]
    namespace: dict = {}
    exec(text, namespace)
    shared = {"group_index": 7, "index": 40, "tokens": [8, 3, 1, 2], "response_length": 2, "status": "completed"}
    dump = [
        {**shared, "reward": 0.0, "loss_mask": [0, 1], "rollout_log_probs": [-1.5, -2.5]},
        {**shared, "reward": 1.0, "loss_mask": None, "rollout_log_probs": [-0.5, -1.0]},
    ]
    (tmp_path / "r.jsonl").write_text(namespace["line_of"](0, dump) + namespace["line_of"](1, dump))
    first, second = load_rollouts(tmp_path / "r.jsonl", vocab_size=9)
    assert (first.rollout_index, second.rollout_index) == (0, 1)
    assert [sample.advantage for sample in first.samples] == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    assert [sample.loss_mask.tolist() for sample in first.samples] == [[False, True], [True, True]]
    assert first.samples[1].rollout_log_probs.tolist() == [-0.5, -1.0] and first.samples[1].old_log_probs is None


# Tasks

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
