"""The training loop in the ranks of a pool: replay on every layout, recording, metrics, the watchdog, and that it learns."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT
from helpers import pool_of
from trainer_cases import CP, PP, TIMING_METRICS, TP, metrics_of, run_loop, tiny_trainer, unlike_metrics

from megatron_rl.config import PolicyLossConfig, PolicyMetrics
from megatron_rl.errors import DataError
from megatron_rl.layout.agreement import all_gather_objects
from megatron_rl.layout.groups import SINGLE
from megatron_rl.metrics.further import CORRECTION_METRICS, CORRECTION_SAMPLE_SIZE, ROLLOUT_METRICS, SUPPORT_METRICS
from megatron_rl.train.collection import SampledRollouts, with_old_log_probs
from megatron_rl.train.loop import SKIPPED_STEPS
from megatron_rl.train.options import PRESETS, TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollout_files import load_rollouts, record_of
from megatron_rl.train.rollouts import partition
from megatron_rl.train.tasks import make_task

pytestmark = pytest.mark.megatron

GSPO = PolicyLossConfig(
    policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, policy_metrics="with_entropy", watchdog="raise"
)
pool = pool_of(4)


def run_on_rank(rank, output_dir, config, options, settings=None):
    return run_loop(output_dir, config, options, settings=settings)[0]


@pytest.fixture(scope="module")
def recorded(pool, tmp_path_factory):
    """Three rollouts of two steps, sampled on one rank: (rollout file, directory of the run)."""
    directory = tmp_path_factory.mktemp("recorded")
    options = {"num_rollouts": 3, "save_rollouts": str(directory / "rollouts.jsonl")}
    pool.run(run_on_rank, directory / "run", GSPO, options, world_size=1)
    return directory / "rollouts.jsonl", directory / "run"


def test_the_rows_of_a_run_count_what_was_trained_on_and_how_far_behind_it_was(recorded):
    """FB-39, FB-90: 3 rollouts of 4 prompts x 4 samples x 4 tokens in 2 steps each, 0 and 1 optimiser steps behind. Ratios that
    never move in the second step would be those of other old log-probabilities. Phantoms are looked for at the first step alone."""
    rows = metrics_of(recorded[1])
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-5)
        assert abs(second["policy/ratio_new_old"] - 1.0) > 1e-3
    assert [(row["policy/staleness"], row["policy/max_staleness"]) for row in rows] == [(0, 0), (1, 1)] * 3
    assert [row.get("policy/num_phantom_tokens") for row in rows] == [0.0] + [None] * 5
    counted = [(row["step"], row["rollout"], row["documents_seen"], row["tokens_seen"]) for row in rows]
    assert counted == [(step, (step - 1) // 2, 8 * step, 32 * step) for step in range(1, 7)]
    assert all((row["num_samples"], row["num_prompts"], row["num_tokens"]) == (8, 2, 32) for row in rows)


def test_the_file_of_rollouts_holds_what_the_loss_saw(recorded):
    """Catches samples of another rank, in another order, or without the log-probabilities of the policy that sampled them."""
    batches = list(load_rollouts(recorded[0], vocab_size=9))
    assert [batch.rollout_index for batch in batches] == [0, 1, 2]
    assert [batch.samples[0].policy_version for batch in batches] == [0, 2, 4]
    for batch, row in zip(batches, metrics_of(recorded[1])[::2], strict=True):
        assert [sample.index for sample in batch.samples] == list(range(16))
        assert sum(sample.reward for sample in batch.samples) / 16 == pytest.approx(row["rollout/reward"])
        mean = sum(sum(sample.old_log_probs) / 4 for sample in batch.samples[:8]) / 8
        assert mean == pytest.approx(row["policy/old_logprobs"], rel=1e-5)


def test_a_file_of_several_data_parallel_ranks_is_that_of_one_rank(pool, recorded, tmp_path):
    """Written by two of them, of two stages each, then by four that replay it in micro-batches: each sample once, in its place."""
    options = {"num_rollouts": 3, "save_rollouts": str(tmp_path / "two.jsonl")}
    pool.run(run_on_rank, tmp_path / "two", GSPO, options, world_size=4, **{PP: 2})
    options = {"rollouts": str(tmp_path / "two.jsonl"), "save_rollouts": str(tmp_path / "four.jsonl"), "micro_batch_size": 3}
    pool.run(run_on_rank, tmp_path / "four", GSPO, options, world_size=4)
    assert unlike_metrics(metrics_of(tmp_path / "four"), metrics_of(recorded[1]), relative=1e-4) == []
    for name in ("two", "four"):
        for found, truth in zip(load_rollouts(tmp_path / f"{name}.jsonl"), load_rollouts(recorded[0]), strict=True):
            for mine, of_one in zip(record_of(found)["samples"], record_of(truth)["samples"], strict=True):
                # Sums in another order on two stages; two steps of Adam lie between the rollouts.
                assert mine.pop("old_log_probs") == pytest.approx(of_one.pop("old_log_probs"), abs=1e-4)
                assert mine == of_one


OF_TERMS = PolicyLossConfig(policy_loss="gspo", samples_per_prompt=4, kl_coefficient=0.2, entropy_coefficient=0.05)
OF_TOKENS = PolicyLossConfig(policy_loss="grpo", loss_aggregation="token_mean", samples_per_prompt=4)
CONSTANT = dataclasses.replace(OF_TOKENS, loss_aggregation="constant", loss_aggregation_divisor=4.0)
VARIANTS = [
    pytest.param(OF_TERMS, 2, {TP: 2}, {}, id="gspo, KL and entropy terms, TP2"),
    pytest.param(OF_TOKENS, 2, {PP: 2}, {"packed": True}, id="grpo, token_mean, packed, PP2"),
    pytest.param(CONSTANT, 4, {CP: 2, PP: 2}, {"micro_batch_size": 4}, id="grpo, constant, CP2xPP2"),
]


@pytest.mark.parametrize(("config", "world_size", "layout", "options"), VARIANTS)
def test_every_kind_of_run_trains_the_same_on_one_rank_and_on_a_layout(pool, tmp_path, config, world_size, layout, options):
    """Sampling by itself, two rollouts: a loss, an aggregation, a regulariser or a batch that knows one layout alone. The terms
    reach the loss, policy + 0.2 KL - 0.05 entropy, and their metrics; the reference is the initial policy, so KL starts at 0. The
    watchdog finds nothing in a healthy run."""
    config = dataclasses.replace(config, policy_metrics="with_entropy", watchdog="raise")
    options = {"num_rollouts": 2, **options}
    pool.run(run_on_rank, tmp_path / "one", config, {**options, "packed": False}, world_size=1)
    pool.run(run_on_rank, tmp_path / "many", config, options, world_size=world_size, **layout)
    rows = metrics_of(tmp_path / "one")
    assert unlike_metrics(metrics_of(tmp_path / "many"), rows) == []
    if config.kl_coefficient:
        for row in rows:
            expected = row["loss/policy"] + 0.2 * row["loss/kl"] - 0.05 * row["loss/entropy"]
            assert row["loss"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
            assert row["loss/entropy"] == pytest.approx(row["policy/entropy"], rel=1e-5)
        assert rows[0]["loss/kl"] == pytest.approx(0.0, abs=1e-8) and all(row["loss/kl"] > 1e-4 for row in rows[1:])


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.0}


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        pytest.param({}, {}, id="dense"),
        pytest.param({"experts": EXPERTS}, {"expert_model_parallel_size": 4}, id="experts on 4 ranks"),
    ],
)
def test_more_ranks_than_samples_train_all_the_same(pool, tmp_path, settings, layout):
    """FB-25: ranks without a sample meet every collective, from sampling and the reference to the step and its metrics. Their
    experts take part when the others measure old log-probabilities for a second step."""
    config = PolicyLossConfig(policy_loss="gspo", samples_per_prompt=2, kl_coefficient=0.1, entropy_coefficient=0.1)
    options = {"num_rollouts": 2, "prompts_per_rollout": 2, "steps_per_rollout": 2}
    progress = [outcome.progress for outcome in pool.run(run_on_rank, tmp_path, config, options, settings, **layout)]
    assert all(found == progress[0] for found in progress)
    assert (progress[0].samples_seen, progress[0].num_steps) == (8, 4)


def metrics_on_rank(rank):
    trainer = tiny_trainer(dataclasses.replace(GSPO, policy_loss="grpo"), vocab_size=9)
    rollout = SampledRollouts(trainer, make_task("repeat"), TrainOptions(prompts_per_rollout=3, steps_per_rollout=1), 4).get(5)
    own = {sample.index: sample for sample in rollout.own.samples}
    parts = [[own[header.index] for header in part] for part in partition(rollout.headers, trainer.groups.dp.rank(), 2)]
    measured = with_old_log_probs(trainer, parts)
    assert all(len(sample.old_log_probs) == sample.response_length for part in measured for sample in part)
    return trainer.step(measured), rollout.headers, record_of(rollout.own), all_gather_objects([rank] * rank)


def test_the_page_defines_every_metric_of_a_row_and_no_other(recorded):
    """Catches a metric without its formula, and a row of the page that nothing writes any more."""
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## A healthy run")[0]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    defined = [name for cell in cells for name in re.findall(r"`([a-z_/]+)`", cell) if name not in set(PolicyMetrics)]
    rows = (*ROLLOUT_METRICS, *CORRECTION_METRICS, *SUPPORT_METRICS)
    optional = {f"policy/{row.name}" for row in rows if row.is_reported} | {f"policy/{CORRECTION_SAMPLE_SIZE}"}
    optional |= {
        "loss/kl",
        "loss/entropy",
        "eval/reward",
        "eval/response_length",
        *TIMING_METRICS,
        SKIPPED_STEPS,
        *("num_rollouts", "rollout/rows"),  # where samples have a rollout_id
        "policy/mtp_loss",
    }
    assert len(defined) == len(set(defined))
    assert set(defined) == set(metrics_of(recorded[1])[0]) | optional


def test_headers_and_metrics_are_equal_on_all_ranks_and_samples_on_those_of_a_data_parallel_rank(pool):
    """FB-44, FB-51: a rank with other rewards would compute other advantages. Objects of all ranks come in rank order."""
    answers = pool.run(metrics_on_rank, world_size=4, **{PP: 2})
    (metrics, headers, first, objects), (_, _, second, _) = answers[:2]
    assert len({header.prompt_id for header in headers}) == 3 and [header.dp_rank for header in headers] == [0, 1] * 6
    assert all(math.isfinite(value) for value in metrics.values()) and objects == [[], [1], [2, 2], [3, 3, 3]]
    assert answers == [(metrics, headers, own, objects) for own in (first, second, first, second)]
    for dp_rank, own in enumerate((first, second)):
        assert own["rollout_index"] == 5
        found = [(sample["index"], sample["reward"], sample["advantage"], sample["response_length"]) for sample in own["samples"]]
        mine = [header for header in headers if header.dp_rank == dp_rank]
        assert found == [(header.index, header.reward, header.advantage, header.response_length) for header in mine]


def test_a_rollout_file_that_starts_elsewhere_is_refused(recorded, tmp_path):
    """A run that is resumed with the file of another would train on rollouts twice, or on none of the first ones."""
    (tmp_path / "r.jsonl").write_text("".join(recorded[0].read_text().splitlines(keepends=True)[1:]))
    trainer = SimpleNamespace(settings=SimpleNamespace(vocab_size=9), groups=SimpleNamespace(dp=SINGLE))
    with pytest.raises(DataError, match=r"r\.jsonl holds rollout 1 where rollout 0 is due: it was cut or edited"):
        ReplayedRollouts(TrainOptions(rollouts=str(tmp_path / "r.jsonl")), trainer).get(0)


def test_a_run_that_reaches_its_target_saves_and_ends_with_0(pool, tmp_path):
    """--target-reward over five rollouts; a save after each rollout, and the last one not twice."""
    options = {"num_rollouts": 9, "target_reward": 0.0, "save_interval": 1, "steps_per_rollout": 1}
    for outcome in pool.run(run_on_rank, tmp_path, GSPO, options, world_size=2, **{TP: 2}):
        assert outcome.reason.endswith("of the last 5 rollouts reached the target") and outcome.exit_code == 0
        assert (outcome.progress.num_rollouts, outcome.checkpoint.name) == (5, "step_00000005")
    saved = [f"step_0000000{step}" for step in range(1, 6)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", *saved]


def learning_run_on_rank(rank, output_dir):
    """(progress, what the watchdog says) of the values of `--preset demo`."""
    demo = dict(PRESETS["demo"])
    config = PolicyLossConfig(**{name: demo.pop(name) for name in ("policy_loss", "loss_aggregation", "samples_per_prompt")})
    settings = {"hidden_size": 64, "lr": demo["lr"]}
    options = demo | {"target_reward": 0.92, "save_interval": 1000}
    logger, messages = logging.getLogger("megatron_rl.train.watchdog"), []
    with mock.patch.object(logger, "warning", lambda *given: messages.append(given)):
        return run_loop(output_dir, config, options, settings=settings)[0].progress, messages


def test_the_demo_learns_from_below_a_fifth_to_above_nine_tenths_and_its_watchdog_is_silent(pool, tmp_path):
    """A wrong sign, advantage or mask learns nothing in 140 rollouts. They are more steps than an idle clip is judged by."""
    [(progress, messages)] = pool.run(learning_run_on_rank, tmp_path, world_size=1)
    assert progress.first_reward < 0.2 and progress.last_reward > 0.9
    assert progress.num_steps > 40 and messages == []


def first_steps_on_rank(rank, output_dir, task):
    """The first step of a run under two aggregations: its rollout is the same."""
    found = []
    for aggregation in ("sample_mean", "token_mean"):
        config = PolicyLossConfig(policy_loss="grpo", loss_aggregation=aggregation, samples_per_prompt=4)
        run_loop(output_dir / aggregation, config, {"num_rollouts": 1, "task": task})
        found.append(metrics_of(output_dir / aggregation)[0])
    return found


@pytest.mark.parametrize(("task", "differ"), [("tally", True), ("repeat", False)])
def test_aggregations_differ_where_responses_end_by_themselves(pool, tmp_path, task, differ):
    """In responses of one length all weigh alike, and the demo would show nothing of a loss that reads lengths."""
    [(of_samples, of_tokens)] = pool.run(first_steps_on_rank, tmp_path, task, world_size=1)
    assert of_samples["num_tokens"] == of_tokens["num_tokens"]
    assert (of_samples["grad_norm"] != pytest.approx(of_tokens["grad_norm"], rel=1e-3)) == differ
