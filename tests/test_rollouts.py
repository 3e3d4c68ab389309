"""Rollouts: advantages, the cut into steps and micro-batches, and the file that a run can be replayed from."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pages import fences

from megatron_rl.errors import DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollout_files import cut_rollouts, load_rollouts, record_of, save_rollouts
from megatron_rl.train.rollouts import (
    RolloutBatch,
    Sample,
    SharedRollout,
    group_advantages,
    mean_reward,
    partition,
    share_without_signal,
    split_into_steps,
)


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
    assert share_without_signal(samples) == pytest.approx(1 / 3)


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


BAD_SAMPLES = [
    ({"tokens": [8, 9, 1, 2]}, r"tokens: 9 must be below 9, the vocabulary .* type the --vocab-size"),
    ({"tokens": [1, 2]}, "response_length: 2 of 2 tokens leaves"),
    ({"loss_mask": [1]}, "loss_mask: 1 values for a response of 2"),
    ({"old_log_probs": [-1.0, -math.inf]}, "old_log_probs: -inf must be a finite number, at most 0"),
    ({"rollout_log_probs": [5.0, -1.0]}, "rollout_log_probs: 5.0 must be"),
    ({"kept_mass": [0.5, 0.0]}, "kept_mass: 0.0 must be above 0 and at most 1"),
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


TWICE = line_of(sample_record(index=3), sample_record(), sample_record(index=3))
MIXED = line_of(sample_record(), sample_record(index=1, old_log_probs=None))
BAD_FILES = [
    ('{"rollout_index": 0, "samples"\n', "line 1: not JSON"),
    ('{"rollout_index": 0, "rollout_index": 1, "samples": []}\n', "the key 'rollout_index' stands twice"),
    (TWICE, "line 1: index: two samples have the same: each has its own"),
    (MIXED, "line 1: old_log_probs: null in some samples and not in others: give it for all, or for none"),
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
    assert mean_reward(rows_of_rollouts()) == 0.25


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
