"""The training loop in the ranks of a pool: replay on every layout, recording, metrics, the watchdog, and that it learns."""

from __future__ import annotations

import dataclasses
import logging
import math
import re

import pytest
from conftest import ROOT
from helpers import error_of
from trainer_cases import CP, PP, TP, metrics_of, run_loop, tiny_trainer, unlike_metrics

from megatron_rl.config import PolicyLossConfig, PolicyMetrics
from megatron_rl.errors import DataError
from megatron_rl.layout.joint_work import all_gather_objects
from megatron_rl.metrics import ROLLOUT_MEANS, ROLLOUT_TOTALS
from megatron_rl.testing.ranks import RankPool
from megatron_rl.training.collection import ReplayedRollouts, SampledRollouts, merge_samples, with_old_log_probs
from megatron_rl.training.loop import TIMING_METRICS
from megatron_rl.training.options import TrainOptions
from megatron_rl.training.rollout_files import load_rollouts, save_rollouts
from megatron_rl.training.rollouts import RolloutBatch, Sample, partition
from megatron_rl.training.tasks import make_task

pytestmark = pytest.mark.megatron

GSPO = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, policy_metrics="with_entropy")


@pytest.fixture(scope="module")
def pool():
    with RankPool(4, timeout=240) as ranks:
        yield ranks


def run_on_rank(rank, output_dir, config, options, settings=None):
    return run_loop(output_dir, config, options, settings=settings)[0]


@pytest.fixture(scope="module")
def recorded(pool, tmp_path_factory):
    """Five rollouts of two steps, sampled on one rank: (rollout file, directory of the run)."""
    directory = tmp_path_factory.mktemp("recorded")
    options = {"num_rollouts": 5, "save_rollouts": str(directory / "rollouts.jsonl")}
    pool.run(run_on_rank, directory / "run", GSPO, options, world_size=1)
    return directory / "rollouts.jsonl", directory / "run"


def test_the_first_step_of_a_run_has_ratio_1_and_the_second_has_not(recorded):
    """FB-39; and several steps a rollout whose ratios never move would be steps on other old log-probabilities."""
    rows = metrics_of(recorded[1])
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-5)
        assert abs(second["policy/ratio_new_old"] - 1.0) > 1e-3
        assert first["rollout"] == second["rollout"]


def test_staleness_counts_optimiser_steps_since_the_rollout(recorded):
    """Two steps a rollout: 0 and 1 behind. Phantoms are looked for at the first step alone, and there are none."""
    rows = metrics_of(recorded[1])
    assert [(row["policy/staleness"], row["policy/max_staleness"]) for row in rows] == [(0, 0), (1, 1)] * 5
    assert [row.get("policy/num_phantom_tokens") for row in rows] == [0.0] + [None] * 9
    assert [batch.samples[0].policy_version for batch in load_rollouts(recorded[0])] == [0, 2, 4, 6, 8]


def test_metrics_count_what_was_trained_on(recorded):
    """FB-90: 5 rollouts of 4 prompts x 4 samples x 4 tokens in 2 steps each."""
    rows = metrics_of(recorded[1])
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["rollout"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [row["documents_seen"] for row in rows] == [8 * step for step in range(1, 11)]
    assert [row["tokens_seen"] for row in rows] == [32 * step for step in range(1, 11)]
    assert all((row["num_samples"], row["num_prompts"], row["num_tokens"]) == (8, 2, 32) for row in rows)


def test_the_file_of_rollouts_holds_what_the_loss_saw(recorded):
    """Catches samples of another rank, in another order, or without the log-probabilities of the policy that sampled them."""
    batches = list(load_rollouts(recorded[0], vocab_size=9))
    assert [batch.rollout_index for batch in batches] == [0, 1, 2, 3, 4]
    for batch, row in zip(batches, metrics_of(recorded[1])[::2], strict=True):
        assert [sample.index for sample in batch.samples] == list(range(16))
        assert sum(sample.reward for sample in batch.samples) / 16 == pytest.approx(row["rollout/reward"])
        mean = sum(sum(sample.old_log_probs) / 4 for sample in batch.samples[:8]) / 8
        assert mean == pytest.approx(row["policy/old_logprobs"], rel=1e-5)


REPLAYS = [
    pytest.param(4, {TP: 2, CP: 2}, {}, {}, id="TP2xCP2"),
    pytest.param(4, {PP: 2}, {"micro_batch_size": 2}, {}, id="PP2xDP2, two samples a micro-batch"),
    pytest.param(2, {TP: 2}, {"packed": True}, {"sequence_parallel": True}, id="TP2+SP, packed"),
    pytest.param(2, {}, {"micro_batch_size": 3}, {"use_distributed_optimizer": True}, id="DP2, distributed optimiser"),
]


@pytest.mark.parametrize(("world_size", "layout", "options", "settings"), REPLAYS)
def test_recorded_rollouts_train_the_same_on_every_layout(pool, recorded, tmp_path, world_size, layout, options, settings):
    """FB-14, FB-46: every metric of ten steps equals that of the run that recorded them, 1e-5 relative or 1e-6 absolute: gradients
    that a layout scales would pass through Adam and show in the next ratios."""
    options = {"rollouts": str(recorded[0]), **options}
    outcomes = pool.run(run_on_rank, tmp_path, GSPO, options, settings, world_size=world_size, **layout)
    assert unlike_metrics(metrics_of(tmp_path), metrics_of(recorded[1])) == []
    assert {outcome.reason for outcome in outcomes} == {"every rollout of the file is trained on"}


def test_a_sampling_run_on_another_layout_samples_the_same_rollouts(pool, recorded, tmp_path):
    """Prompts, noise and weights are no functions of the layout: the first rollouts are equal token by token."""
    options = {"num_rollouts": 2, "save_rollouts": str(tmp_path / "rollouts.jsonl")}
    pool.run(run_on_rank, tmp_path / "run", GSPO, options, world_size=4, **{PP: 2})  # two data-parallel ranks
    for found, expected in zip(load_rollouts(tmp_path / "rollouts.jsonl"), load_rollouts(recorded[0]), strict=False):
        assert [sample.tokens for sample in found.samples] == [sample.tokens for sample in expected.samples]
        assert [sample.advantage for sample in found.samples] == [sample.advantage for sample in expected.samples]


VARIANTS = [
    pytest.param(
        PolicyLossConfig(policy_loss="grpo", loss_aggregation="token_mean", samples_per_prompt=4),
        2,
        {PP: 2},
        {"packed": True},
        id="grpo, token_mean, packed, PP2",
    ),
    pytest.param(
        PolicyLossConfig(policy_loss="gspo", samples_per_prompt=4, kl_coefficient=0.2, entropy_coefficient=0.05),
        2,
        {TP: 2},
        {},
        id="KL and entropy terms, TP2",
    ),
    pytest.param(
        PolicyLossConfig(policy_loss="grpo", loss_aggregation="constant", loss_aggregation_divisor=4.0, samples_per_prompt=4),
        4,
        {CP: 2, PP: 2},
        {"micro_batch_size": 4},
        id="grpo, constant, CP2xPP2",
    ),
]


@pytest.mark.parametrize(("config", "world_size", "layout", "options"), VARIANTS)
def test_every_kind_of_run_trains_the_same_on_one_rank_and_on_a_layout(pool, tmp_path, config, world_size, layout, options):
    """Sampling by itself, three rollouts: a loss, an aggregation, a regulariser or a batch that knows one layout alone."""
    config = dataclasses.replace(config, policy_metrics="with_entropy")
    options = {"num_rollouts": 3, **options}
    pool.run(run_on_rank, tmp_path / "one", config, {**options, "packed": False}, world_size=1)
    pool.run(run_on_rank, tmp_path / "many", config, options, world_size=world_size, **layout)
    assert unlike_metrics(metrics_of(tmp_path / "many"), metrics_of(tmp_path / "one")) == []


def test_the_kl_and_entropy_terms_reach_the_loss_and_their_metrics(pool, tmp_path):
    """FB-75: loss = policy + 0.2 KL - 0.05 entropy in each step; the reference is the initial policy, so KL starts at 0."""
    config = dataclasses.replace(GSPO, kl_coefficient=0.2, entropy_coefficient=0.05)
    pool.run(run_on_rank, tmp_path, config, {"num_rollouts": 3}, world_size=1)
    rows = metrics_of(tmp_path)
    for row in rows:
        expected = row["loss/policy"] + 0.2 * row["loss/kl"] - 0.05 * row["loss/entropy"]
        assert row["loss"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert row["loss/entropy"] == pytest.approx(row["policy/entropy"], rel=1e-5)
    assert rows[0]["loss/kl"] == pytest.approx(0.0, abs=1e-8)
    assert all(row["loss/kl"] > 1e-4 for row in rows[1:])


def few_samples_on_rank(rank, output_dir):
    """One prompt of two samples on four data-parallel ranks: two of them have nothing, in sampling, in the reference's
    log-probabilities and in the step."""
    config = PolicyLossConfig(policy_loss="gspo", samples_per_prompt=2, kl_coefficient=0.1, entropy_coefficient=0.1)
    return run_loop(output_dir, config, {"num_rollouts": 2, "prompts_per_rollout": 1, "steps_per_rollout": 1})[0].progress


def test_more_ranks_than_samples_train_all_the_same(pool, tmp_path):
    """FB-25: ranks without a sample meet every collective, from sampling to the metrics."""
    progress = pool.run(few_samples_on_rank, tmp_path, timeout=240)
    assert all(found == progress[0] for found in progress)
    assert (progress[0].samples_seen, progress[0].num_steps) == (4, 2)


def metrics_on_rank(rank):
    config = dataclasses.replace(GSPO, policy_loss="grpo")
    trainer = tiny_trainer(config, vocab_size=9)
    options = TrainOptions(prompts_per_rollout=3, steps_per_rollout=1)
    batch = SampledRollouts(trainer, make_task("repeat"), options, 4).get(5)
    mine = partition(batch.samples, trainer.groups.dp.rank(), trainer.groups.dp.size(), 2)
    measured = with_old_log_probs(trainer, mine)
    return trainer.step(measured), merge_samples(measured, batch), batch


def test_the_page_defines_every_metric_of_a_row_and_no_other(recorded):
    """Catches a metric without its formula, and a row of the page that nothing writes any more."""
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## A healthy run")[0]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    defined = [name for cell in cells for name in re.findall(r"`([a-z_/]+)`", cell) if name not in set(PolicyMetrics)]
    optional = {f"policy/{name}" for name in (*ROLLOUT_MEANS, *ROLLOUT_TOTALS)} | {"loss/kl", "loss/entropy", *TIMING_METRICS}
    assert len(defined) == len(set(defined))
    assert set(defined) == set(metrics_of(recorded[1])[0]) | optional


@pytest.mark.parametrize("layout", [{PP: 2}, {CP: 2}, {TP: 2}], ids=["DP2xPP2", "DP2xCP2", "DP2xTP2"])
def test_batches_and_metrics_are_equal_on_all_ranks(pool, layout):
    """FB-44, FB-51: a rank with other rewards would compute other advantages; one with another loss would log nonsense."""
    (metrics, whole, batch), *others = pool.run(metrics_on_rank, world_size=4, **layout)
    assert batch.rollout_index == 5 and len({sample.prompt_id for sample in batch.samples}) == 3
    assert all(sample.old_log_probs is not None for sample in whole.samples)
    assert [sample.tokens for sample in whole.samples] == [sample.tokens for sample in batch.samples]
    assert all(math.isfinite(value) for value in metrics.values())
    for other in others:
        assert other == (metrics, whole, batch)


def sample_of(index, **others):
    values = {"prompt_id": "a", "tokens": [8, 1, 1, 2], "response_length": 3, "loss_mask": [1, 1, 1], "reward": 0.5}
    values |= {"advantage": 0.5, "old_log_probs": [-2.0, -2.0, -2.0], "index": index}
    return Sample(**{**values, **others})


def watched_run_on_rank(rank, output_dir, path, watchdog):
    config = PolicyLossConfig(policy_loss="grpo", watchdog=watchdog, samples_per_prompt=2)
    messages = []
    logger = logging.getLogger("megatron_rl.training.watchdog")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    error = error_of(lambda: run_loop(output_dir, config, {"rollouts": str(path), "steps_per_rollout": 1}))
    logger.removeHandler(handler)
    return error, messages


@pytest.mark.parametrize("watchdog", ["off", "warn", "raise"])
def test_old_log_probs_of_another_policy_are_noticed_at_the_first_step(pool, tmp_path, watchdog):
    """FB-39: log-probabilities of -1 for tokens of probability 1/9 give a mean ratio of 0.3 where 1 is due."""
    old = [-1.0, -1.0, -1.0]
    save_rollouts(tmp_path / "r.jsonl", RolloutBatch(samples=[sample_of(n, old_log_probs=old) for n in range(2)], rollout_index=0))
    answers = pool.run(watched_run_on_rank, tmp_path / "run", tmp_path / "r.jsonl", watchdog, world_size=2, **{TP: 2})
    text = "at the first step, expected 1: check --policy-temperature"
    if watchdog == "raise":
        assert all(error.startswith("DataError: mean importance ratio 0.") and text in error for error, _ in answers)
    else:
        assert [error for error, _ in answers] == ["", ""]
        warnings = [message for _, messages in answers for message in messages]
        assert len(warnings) == (watchdog == "warn") and all(text in message for message in warnings)


def test_a_rollout_file_that_starts_elsewhere_is_refused(tmp_path):
    """A run that is resumed with the file of another would train on rollouts twice, or on none of the first ones."""
    path = tmp_path / "r.jsonl"
    for index in (1, 2):
        save_rollouts(path, RolloutBatch(samples=[sample_of(0)], rollout_index=index))
    with pytest.raises(DataError, match=r"r\.jsonl holds rollout 1 where rollout 0 is due: it was cut or edited"):
        ReplayedRollouts(str(path), vocab_size=9, first=0).get(0)


def stopped_run_on_rank(rank, output_dir, options):
    outcome = run_loop(output_dir, GSPO, options)[0]
    return outcome.reason, outcome.exit_code, outcome.checkpoint.name, outcome.progress.num_rollouts


def test_a_run_that_reaches_its_target_saves_and_ends_with_0(pool, tmp_path):
    """--target-reward over a window of two; a save after each rollout, and the last one not twice."""
    options = {"num_rollouts": 9, "target_reward": 0.0, "target_reward_window": 2, "save_interval": 1}
    answers = pool.run(stopped_run_on_rank, tmp_path, options, world_size=2, **{TP: 2})
    assert len(set(answers)) == 1
    reason, code, checkpoint, rollouts = answers[0]
    assert reason.endswith("of the last 2 rollouts reached the target") and (code, rollouts) == (0, 2)
    assert checkpoint == "step_00000004"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000002", "step_00000004"]


def gathered_on_rank(rank):
    return all_gather_objects([rank] * rank)


def test_every_rank_hears_of_every_rank_s_objects_in_rank_order(pool):
    assert pool.run(gathered_on_rank) == [[[], [1], [2, 2], [3, 3, 3]]] * 4


def learning_run_on_rank(rank, output_dir):
    config = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=8)
    options = {"prompts_per_rollout": 16, "num_rollouts": 140, "target_reward": 0.97, "save_interval": None}
    settings = {"hidden_size": 64}
    outcome = run_loop(output_dir, config, options, settings=settings)[0]
    return outcome.progress


def test_the_demo_learns_from_below_a_fifth_to_above_nine_tenths(pool, tmp_path):
    """The values of `--preset demo`, at TP2. A sign, an advantage or a mask that is wrong learns nothing in 140 rollouts."""
    progress = pool.run(learning_run_on_rank, tmp_path, timeout=240, world_size=2, **{TP: 2})
    assert progress[0] == progress[1]
    assert progress[0].first_reward < 0.2 and progress[0].last_reward > 0.9
