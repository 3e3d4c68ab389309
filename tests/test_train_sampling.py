"""Training on tokens drawn with top-p: scores over the kept ids, on every layout, and replayed."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers import error_of, pool_of
from trainer_cases import CP, PP, TP, lively, metrics_of, relative_difference, run_loop, tiny_trainer, unlike_metrics, whole

from megatron_rl.config import PolicyLossConfig
from megatron_rl.train.collection import SampledRollouts
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollout_files import load_rollouts
from megatron_rl.train.tasks import make_task

pytestmark = pytest.mark.megatron

GSPO = PolicyLossConfig(
    policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, policy_metrics="with_entropy", watchdog="raise"
)
GRPO = replace(GSPO, policy_loss="grpo", loss_aggregation="token_mean")
TOP_P = {"top_p": 0.8}
pool = pool_of(4)
# Float32 scores of one engine, sampled row by row and trained row by row: some 1e-7 each.
SAME = 1e-6


def run_on_rank(rank, output_dir, config, options):
    outcome, weights = run_loop(output_dir, config, options)
    return outcome.progress, weights


def test_a_run_scores_its_tokens_as_its_sampler_did(pool, tmp_path):
    """Of each rollout's first step the ratio is 1; of each step the sampler's own score, over its kept ids, is the trainer's. The
    watchdog, which knows a sampler that keeps a part, is silent: it would raise."""
    pool.run(run_on_rank, tmp_path, GRPO, {"num_rollouts": 3, **TOP_P}, world_size=1)
    rows = metrics_of(tmp_path)
    for number, row in enumerate(rows):
        assert row["policy/train_rollout_logprob_abs_diff"] < SAME
        assert 0.8 < row["policy/sampler_mass"] < 0.95 and 1 < row["policy/kept_ids"] < 9
        if number % 2 == 0:
            assert row["policy/ratio_new_old"] == pytest.approx(1.0, abs=SAME)
    assert abs(rows[1]["policy/ratio_new_old"] - 1.0) > 1e-3


def ratios_on_rank(rank):
    """Of the unmasked tokens of a rollout: probability by the trainer over the sampler's, with and without the sets; the mass."""
    trainer = lively(tiny_trainer(GRPO, vocab_size=9), 4.0)
    options = TrainOptions(prompts_per_rollout=16, **TOP_P)
    samples = SampledRollouts(trainer, make_task("repeat"), options, 4).get(0).own.samples
    found = []
    for of_trainer in (samples, [replace(sample, kept_ids=None) for sample in samples]):
        scores = torch.cat(trainer.log_probs([of_trainer])[0])
        found.append((scores - torch.cat([sample.rollout_log_probs for sample in samples])).exp())
    return *found, torch.cat([sample.kept_mass for sample in samples])


def test_without_the_sets_each_ratio_is_the_kept_mass(pool):
    """Why they are replayed: the policy is the one that sampled, and its mean ratio would be below 1 by a fifth and more."""
    [(with_sets, without, mass)] = pool.run(ratios_on_rank, world_size=1)
    assert with_sets == pytest.approx(torch.ones_like(with_sets), abs=SAME)
    assert without == pytest.approx(mass, abs=SAME)
    assert float(mass.mean()) < 0.9


def messages_on_rank(rank, path, output_dir, config):
    logger, messages = logging.getLogger("megatron_rl.train.watchdog"), []
    with mock.patch.object(logger, "warning", lambda *given: messages.extend(given)):
        run_loop(output_dir, config, {"rollouts": str(path)})
    return messages


@pytest.fixture(scope="module")
def recorded(pool, tmp_path_factory):
    """Three rollouts of two steps with top-p on one rank: (rollout file, directory of the run, its final weights)."""
    directory = tmp_path_factory.mktemp("recorded")
    options = {"num_rollouts": 3, "save_rollouts": str(directory / "rollouts.jsonl"), **TOP_P}
    [(_, weights)] = pool.run(run_on_rank, directory / "run", GSPO, options, world_size=1)
    return directory / "rollouts.jsonl", directory / "run", weights


def edited(path, into, change):
    """The file with each sample's record changed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for sample in line["samples"]:
            change(sample)
    into.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return into


def test_the_watchdog_knows_a_file_whose_sets_are_missing(pool, recorded, tmp_path):
    config = replace(GRPO, watchdog="warn")

    def without(sample):
        sample.update(kept_ids=None, kept_mass=None, old_log_probs=None)

    bare = edited(recorded[0], tmp_path / "bare.jsonl", without)
    whole, [line, *_] = (
        pool.run(messages_on_rank, path, tmp_path / path.stem, config, world_size=1)[0] for path in (recorded[0], bare)
    )
    assert whole == []
    assert line.startswith("rollout_log_probs are 0.") and "reports log-probabilities among the tokens that it kept" in line


def test_sets_are_refused_where_the_run_says_so(pool, recorded, tmp_path):
    config = replace(GSPO, sampling_support="refuse")
    [message] = pool.run(error_on_rank, tmp_path, config, {"rollouts": str(recorded[0])}, world_size=1)
    assert message.startswith("DataError: ") and "rollout 0: kept_ids with --sampling-support refuse: its sampler kept" in message


def error_on_rank(rank, output_dir, config, options):
    return error_of(lambda: run_loop(output_dir, config, options))


def test_a_replayed_run_is_the_recorded_one_to_the_bit(pool, recorded, tmp_path):
    """Sets, masses, the sampler's scores and old log-probabilities go through the file."""
    path, directory, weights = recorded
    [(_, replayed)] = pool.run(run_on_rank, tmp_path, GSPO, {"rollouts": str(path)}, world_size=1)
    assert metrics_of(tmp_path) == metrics_of(directory)
    assert all(torch.equal(replayed[name][2], value[2]) for name, value in weights.items())
    sets = [sample.kept_ids for batch in load_rollouts(path, vocab_size=9) for sample in batch.samples]
    assert len({int(size) for support in sets for size in support.sizes}) > 1


WITH_KL = replace(GSPO, kl_coefficient=0.2, entropy_coefficient=0.05)
LAYOUTS = [
    pytest.param(GRPO, 2, {}, {}, id="grpo, DP2"),
    pytest.param(WITH_KL, 2, {TP: 2}, {}, id="gspo, KL and entropy, TP2"),
    pytest.param(WITH_KL, 2, {CP: 2}, {"packed": True}, id="gspo, packed, CP2"),
    pytest.param(WITH_KL, 4, {CP: 2, TP: 2}, {"micro_batch_size": 4}, id="CP2xTP2, micro-batches"),
    pytest.param(GRPO, 2, {PP: 2}, {"packed": True}, id="grpo, packed, PP2"),
]


@pytest.fixture(scope="module")
def truth(pool, tmp_path_factory):
    """config -> (metrics, final weights) of one rank."""
    known = {}

    def of(config):
        key = repr(config)
        if key not in known:
            directory = tmp_path_factory.mktemp("one")
            [(_, weights)] = pool.run(run_on_rank, directory, config, {"num_rollouts": 1, **TOP_P}, world_size=1)
            known[key] = metrics_of(directory), whole([weights], 9)
        return known[key]

    return of


# Gradients of two layouts differ by some 1e-6, and Adam's first steps divide each by its own size.
WEIGHTS_TOLERANCE = 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("config", "world_size", "layout", "options"), LAYOUTS)
def test_every_layout_trains_the_same(pool, truth, tmp_path, config, world_size, layout, options):
    """Two steps of one rollout: metrics, and parameters after Adam, whose first steps have the size of --lr."""
    metrics, weights = truth(config)
    answers = pool.run(run_on_rank, tmp_path, config, {"num_rollouts": 1, **TOP_P, **options}, world_size=world_size, **layout)
    assert unlike_metrics(metrics_of(tmp_path), metrics) == []
    assert relative_difference(whole([of_rank for _, of_rank in answers], 9), weights) < WEIGHTS_TOLERANCE
    assert metrics[0]["policy/sampler_mass"] < 0.95


@pytest.mark.parametrize("is_fused", [False, True], ids=["logits", "fused head"])
def test_ranks_without_a_sample_take_part(pool, tmp_path, is_fused):
    """They have no sets, and a KL term over sets is asked of them too."""
    config = replace(WITH_KL, samples_per_prompt=2, fused_lm_head_loss=is_fused)
    options = {"num_rollouts": 2, "prompts_per_rollout": 1, "steps_per_rollout": 1, **TOP_P}
    progress = [found for found, _ in pool.run(run_on_rank, tmp_path, config, options)]
    assert all(found == progress[0] for found in progress) and progress[0].samples_seen == 4
    assert all(row["policy/train_rollout_logprob_abs_diff"] < SAME for row in metrics_of(tmp_path))


FUSED = [
    pytest.param(replace(GRPO, policy_metrics="basic"), 1, {}, id="grpo, the kept columns alone"),
    pytest.param(replace(WITH_KL, policy_metrics="basic", entropy_coefficient=0.0), 2, {TP: 2}, id="KL, TP2"),
    pytest.param(WITH_KL, 2, {CP: 2}, id="KL, and the entropy over the vocabulary, CP2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "world_size", "layout"), FUSED)
def test_the_fused_head_trains_the_same(pool, truth, tmp_path, config, world_size, layout):
    """Old, reference and new scores without logits."""
    metrics, weights = truth(config)
    fused = replace(config, fused_lm_head_loss=True)
    answers = pool.run(run_on_rank, tmp_path, fused, {"num_rollouts": 1, **TOP_P}, world_size=world_size, **layout)
    assert unlike_metrics(metrics_of(tmp_path), metrics) == []
    assert relative_difference(whole([of_rank for _, of_rank in answers], 9), weights) < WEIGHTS_TOLERANCE


def test_the_kl_term_starts_at_0(truth):
    """The reference is the initial policy. Over other ids than the policy's it would differ from it at the first step."""
    rows = truth(WITH_KL)[0]
    assert rows[0]["loss/kl"] == pytest.approx(0.0, abs=1e-8) and rows[1]["loss/kl"] > 1e-4
