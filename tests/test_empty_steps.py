"""`--empty-step`: a step in which no token trains ends the run, or leaves no trace but its count, on all ranks alike."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import trainer_cases as shared
from helpers import error_of, pool_of
from test_train_docs_per_step import make_batch

from megatron_rl.config import PolicyLossConfig
from megatron_rl.train.rollout_files import save_rollouts

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

SIZES = [[1, 4, 2, 3], [2, 2, 3, 1]]
RAISE = PolicyLossConfig(samples_per_prompt=4, watchdog="off")
SKIP = replace(RAISE, empty_step="skip")
DECAY = {"lr_decay_style": "linear", "lr_decay_iters": 9}
ONE_STEP = {"steps_per_rollout": 1, "save_interval": 1}
pool = pool_of(2)


def write(path, kinds: str):
    """A letter for each rollout: t is trained, m is masked, each token. Those of one place among the trained ones are alike in all
    files."""
    for index, letter in enumerate(kinds):
        number = kinds[:index].count("t")
        made = make_batch(number, SIZES, old=None, seed=number)
        if letter == "m":
            made = replace(made, samples=[replace(sample, loss_mask=[0] * sample.response_length) for sample in made.samples])
        save_rollouts(path, replace(made, rollout_index=index))
    return str(path)


def run_on_rank(rank, output_dir, config, options, resume=False):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron_rl.train.loop").addHandler(handler)
    try:
        outcome, weights = shared.run_loop(output_dir, config, options, settings=DECAY, resume=resume)
    finally:
        logging.getLogger("megatron_rl.train.loop").removeHandler(handler)
    return outcome.progress, weights, lines


def rows_of(folder) -> list[dict]:
    return [
        {name: value for name, value in row.items() if name not in ("rollout", "skipped_steps")}
        for row in shared.metrics_of(folder)
    ]


def assert_same_weights(found: list, truth: list) -> None:
    for (_, own, _), (_, other, _) in zip(found, truth, strict=True):
        assert all(torch.equal(part[2], other[name][2]) for name, part in own.items())


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        pytest.param({}, {}, id="sample_mean"),
        pytest.param({"loss_aggregation": "token_mean"}, {"packed": True}, id="token_mean"),
        pytest.param({"kl_coefficient": 0.1}, {}, id="KL term"),
        pytest.param({"docs_per_step": 8}, {"micro_batch_size": 2}, id="docs per step"),
    ],
)
def test_a_skipped_step_changes_no_weight_and_no_learning_rate(pool, tmp_path, changes, options):
    """As the run on the same file without these rollouts: weights to the bit, and each row."""
    config, options = replace(SKIP, **changes), {**ONE_STEP, **options}
    with_empty = {**options, "rollouts": write(tmp_path / "all.jsonl", "tmtmmt")}
    without = {**options, "rollouts": write(tmp_path / "some.jsonl", "ttt")}
    found = pool.run(run_on_rank, tmp_path / "all", config, with_empty, world_size=2)
    truth = pool.run(run_on_rank, tmp_path / "some", config, without, world_size=2)
    assert_same_weights(found, truth)
    assert rows_of(tmp_path / "all") == rows_of(tmp_path / "some")
    assert [row["skipped_steps"] for row in shared.metrics_of(tmp_path / "all")] == [0, 1, 3]
    for rank, (progress, _, lines) in enumerate(found):
        assert (progress.num_steps, progress.skipped_steps, progress.num_rollouts) == (3, 3, 6)
        assert len(lines) == (3 if rank == 0 else 0), "one line a step, of the first rank"
    told = found[0][2]
    assert told[0].startswith(
        "rollout 1: a step is skipped (1 so far, after 1 that trained): the step has 8 samples and not a single"
    )
    assert all(progress.skipped_steps == 0 for progress, *_ in truth)


def test_a_resumed_run_counts_each_skipped_step_once(pool, tmp_path):
    """The checkpoint is of the last trained step, so a step that was skipped after it is met again."""
    options = {"rollouts": write(tmp_path / "all.jsonl", "tmtmmt"), **ONE_STEP}
    whole = pool.run(run_on_rank, tmp_path / "whole", SKIP, options, world_size=2)
    for num_rollouts in (2, 4):
        pool.run(run_on_rank, tmp_path / "cut", SKIP, {**options, "num_rollouts": num_rollouts}, num_rollouts > 2, world_size=2)
    found = pool.run(run_on_rank, tmp_path / "cut", SKIP, options, True, world_size=2)
    assert_same_weights(found, whole)
    assert [progress for progress, *_ in found] == [progress for progress, *_ in whole]
    assert shared.metrics_of(tmp_path / "cut") == shared.metrics_of(tmp_path / "whole")


def error_on_rank(rank, output_dir, config, options):
    return error_of(lambda: shared.run_loop(output_dir, config, options))


def test_by_default_it_ends_the_run_on_each_rank(pool, tmp_path):
    options = {"rollouts": write(tmp_path / "r.jsonl", "tm"), **ONE_STEP}
    errors = pool.run(error_on_rank, tmp_path / "out", RAISE, options, world_size=2)
    assert all(error.startswith("EmptyStep: the step has 8 samples and not a single unmasked token") for error in errors), errors
    assert len(shared.metrics_of(tmp_path / "out")) == 1


def test_a_run_of_nothing_else_trains_nothing(pool, tmp_path):
    options = {"rollouts": write(tmp_path / "r.jsonl", "mm"), **ONE_STEP}
    found = pool.run(run_on_rank, tmp_path / "out", SKIP, options, world_size=1)
    assert (found[0][0].num_steps, found[0][0].skipped_steps) == (0, 2)
    assert shared.metrics_of(tmp_path / "out") == [] and not (tmp_path / "out" / "checkpoints").exists()
