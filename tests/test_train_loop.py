"""Whole runs in the ranks of a pool: each kind is the same on one rank and on a layout, its rows count what was trained on, and it
learns."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import error_of, pool_of
from trainer_cases import (
    CP,
    PP,
    TP,
    make_batch,
    masked,
    metrics_of,
    ragged_batches,
    relative_difference,
    run_loop,
    unlike_metrics,
    whole,
    write_file,
)

from megatron_rl.config import PolicyLossConfig
from megatron_rl.train.collection import reads_old_log_probs
from megatron_rl.train.options import PRESETS, TrainOptions
from megatron_rl.train.rollout_files import load_rollouts, record_of, save_rollouts
from megatron_rl.train.tasks import make_task

pytestmark = pytest.mark.megatron

GSPO = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, watchdog="raise")
GSPO = replace(GSPO, policy_temperature=0.8, policy_metrics="with_entropy")
GRPO = replace(GSPO, policy_loss="grpo", loss_aggregation="token_mean")
WITH_TERMS = replace(GSPO, kl_coefficient=0.2, entropy_coefficient=0.05)
TOP_P = {"top_p": 0.8}
FUSED = {"fused_lm_head_loss": True}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.0}
# Float32 scores of one engine, sampled row by row and trained row by row: some 1e-7 each.
SAME = 1e-6
# Gradients of two layouts differ by some 1e-6, and Adam's first steps divide each by its own size.
WEIGHTS_TOLERANCE = 1e-4
pool = pool_of(4)


def run_on_rank(rank, output_dir, config, options, settings=None):
    """(outcome, final weights, what the loop and the watchdog have said) of a run."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron_rl.train")
    logger.addHandler(handler)
    try:
        outcome, weights = run_loop(output_dir, config, options, settings=settings)
    finally:
        logger.removeHandler(handler)
    return outcome, weights, lines


def error_on_rank(rank, output_dir, config, options):
    return error_of(lambda: run_loop(output_dir, config, options))


# The same on one rank and on a layout


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of run; `file`: the rollouts that it replays."""

    config: PolicyLossConfig
    options: dict[str, Any] = field(default_factory=lambda: {"num_rollouts": 2})
    file: str | None = None


KINDS = {
    "own prompts, terms": Kind(config=WITH_TERMS),
    "kept ids, terms": Kind(config=WITH_TERMS, options={"num_rollouts": 1, **TOP_P}),
    "a file": Kind(config=GSPO, options={}, file="recorded"),
    # FB-88, FB-46: steps of 7 in micro-batches of 2 end with a prompt group: 8 of ragged lengths.
    "a file with a teacher": Kind(config=replace(GRPO, distillation="topk"), options={}, file="taught"),
    "documents of a file": Kind(
        config=replace(GSPO, docs_per_step=7, watchdog="off"), options={"micro_batch_size": 2}, file="ragged"
    ),
}
LAYOUTS = [
    # kind, ranks, layout, what else differs from the run of one rank
    ("own prompts, terms", 2, {TP: 2}, {}),
    ("own prompts, terms", 4, {CP: 2, PP: 2}, {"micro_batch_size": 4}),
    ("kept ids, terms", 2, {CP: 2}, {"packed": True, **FUSED}),
    ("kept ids, terms", 4, {CP: 2, TP: 2}, {"micro_batch_size": 4}),
    ("a file", 4, {}, {"micro_batch_size": 3}),
    ("documents of a file", 4, {TP: 2, PP: 2}, {}),
    ("a file with a teacher", 2, {}, {"micro_batch_size": 2, **FUSED}),
]


@pytest.fixture(scope="module")
def recorded(pool, tmp_path_factory):
    """Three rollouts of two steps, sampled on one rank: (rollout file, directory of the run)."""
    directory = tmp_path_factory.mktemp("recorded")
    options = {"num_rollouts": 3, "save_rollouts": str(directory / "rollouts.jsonl")}
    pool.run(run_on_rank, directory / "run", GSPO, options, world_size=1)
    return directory / "rollouts.jsonl", directory / "run"


SIZES = [[1, 4, 2, 3], [2, 2, 3, 1]]
TRAINED = [make_batch(number, SIZES, old=None, seed=number) for number in range(3)]
WITH_MASKED = [TRAINED[0], masked(TRAINED[0]), TRAINED[1], masked(TRAINED[1]), masked(TRAINED[1]), TRAINED[2]]


def taught(batch):
    """Top 2 of 9 ids."""
    samples = []
    for sample in batch.samples:
        best = torch.randn(sample.response_length, 9, generator=torch.Generator().manual_seed(sample.index)).log_softmax(-1).topk(2)
        samples.append(replace(sample, teacher_topk_ids=best.indices, teacher_topk_log_probs=best.values))
    return replace(batch, samples=samples)


@pytest.fixture(scope="module")
def files(recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_file(folder / "ragged.jsonl", ragged_batches())
    write_file(folder / "with masked rollouts.jsonl", WITH_MASKED)
    write_file(folder / "taught.jsonl", [taught(batch) for batch in TRAINED])
    (folder / "recorded.jsonl").symlink_to(recorded[0])
    return folder


@pytest.fixture(scope="module")
def of_one_rank(pool, files, tmp_path_factory):
    """kind -> (progress, final weights, what was said, rows of metrics) of one rank; each is run once."""
    known = {}

    def of(name):
        if name not in known:
            directory = tmp_path_factory.mktemp("one")
            [found] = pool.run(run_on_rank, directory, KINDS[name].config, options_of(name, files), world_size=1)
            known[name] = found[0].progress, *found[1:], metrics_of(directory)
        return known[name]

    return of


def options_of(name, files):
    kind = KINDS[name]
    return kind.options | ({} if kind.file is None else {"rollouts": str(files / f"{kind.file}.jsonl")})


@pytest.mark.parametrize(
    ("name", "world_size", "layout", "changes"), LAYOUTS, ids=[f"{row[0]} {row[2] or row[1]}" for row in LAYOUTS]
)
def test_every_kind_of_run_trains_the_same_on_one_rank_and_on_a_layout(
    pool, of_one_rank, files, tmp_path, name, world_size, layout, changes
):
    """Catches a loss, an aggregation, a regulariser, a batch, a set of ids, or a cut into steps that knows one layout alone. FB-04:
    the terms beside the loss have the step's denominators too. The watchdog finds nothing in a healthy run: it would raise."""
    progress, weights, _, rows = of_one_rank(name)
    config = replace(KINDS[name].config, **{key: value for key, value in changes.items() if key in FUSED})
    options = options_of(name, files) | {key: value for key, value in changes.items() if key not in FUSED}
    answers = pool.run(run_on_rank, tmp_path, config, options, world_size=world_size, **layout)
    assert unlike_metrics(metrics_of(tmp_path), rows) == []
    assert all(outcome.progress == progress for outcome, *_ in answers)
    found = whole([of_rank for _, of_rank, _ in answers], 9)
    assert relative_difference(found, whole([weights], 9)) < WEIGHTS_TOLERANCE


@pytest.mark.parametrize(
    ("config", "settings", "layout", "options"),
    [
        pytest.param({}, {"experts": EXPERTS}, {"expert_model_parallel_size": 4}, {}, id="experts on 4 ranks"),
        pytest.param(FUSED, {}, {}, TOP_P, id="kept ids, fused head"),
    ],
)
def test_more_ranks_than_samples_train_all_the_same(pool, tmp_path, config, settings, layout, options):
    """FB-25: ranks without a sample meet every collective, from sampling and the reference to the step and its metrics. Their
    experts take part when the others measure old log-probabilities for a second step. They have no sets of ids."""
    config = PolicyLossConfig(policy_loss="gspo", samples_per_prompt=2, kl_coefficient=0.1, entropy_coefficient=0.1, **config)
    options = {"num_rollouts": 2, "prompts_per_rollout": 2, "steps_per_rollout": 2, **options}
    progress = [outcome.progress for outcome, *_ in pool.run(run_on_rank, tmp_path, config, options, settings, **layout)]
    assert all(found == progress[0] for found in progress)
    assert (progress[0].samples_seen, progress[0].num_steps) == (8, 4)


# What the rows say


def test_the_rows_of_a_run_count_what_was_trained_on_and_how_far_behind_it_was(recorded):
    """FB-39, FB-90: 3 rollouts of 4 prompts x 4 samples x 4 tokens in 2 steps each, 0 and 1 optimiser steps behind. FB-64: a first
    ratio of 1 between measured log-probabilities and the loss's own has the temperature, the shift and the rows of both. One that
    never moves in the second step would be of other old log-probabilities. Phantoms are looked for at the first step alone."""
    rows = metrics_of(recorded[1])
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-5)
        assert abs(second["policy/ratio_new_old"] - 1.0) > 1e-3
    assert [(row["policy/staleness"], row["policy/max_staleness"]) for row in rows] == [(0, 0), (1, 1)] * 3
    assert [row.get("policy/num_phantom_tokens") for row in rows] == [0.0] + [None] * 5
    counted = [(row["step"], row["rollout"], row["documents_seen"], row["tokens_seen"]) for row in rows]
    assert counted == [(step, (step - 1) // 2, 8 * step, 32 * step) for step in range(1, 7)]
    assert all((row["num_samples"], row["num_prompts"], row["num_tokens"]) == (8, 2, 32) for row in rows)


def test_the_terms_reach_the_loss_and_the_kl_term_starts_at_0(of_one_rank):
    """policy + 0.2 KL - 0.05 entropy. The reference is the initial policy; over other ids than the policy's it would differ from it
    at the first step."""
    *_, rows = of_one_rank("kept ids, terms")
    for row in rows:
        expected = row["loss/policy"] + 0.2 * row["loss/kl"] - 0.05 * row["loss/entropy"]
        assert row["loss"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert row["loss/entropy"] == pytest.approx(row["policy/entropy"], rel=1e-5)
    assert rows[0]["loss/kl"] == pytest.approx(0.0, abs=1e-8) and all(row["loss/kl"] > 1e-4 for row in rows[1:])


def test_a_teacher_of_a_file_reaches_the_loss_and_the_rows(of_one_rank):
    *_, rows = of_one_rank("a file with a teacher")
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss/policy"] + row["loss/distillation"], rel=1e-6, abs=1e-7)
        assert row["policy/distillation"] > 0.1 and 0.1 < row["policy/teacher_mass"] < 0.99 and row["loss/distillation"] > 0.1


def test_a_file_and_the_flag_must_both_have_the_teacher(pool, files, tmp_path):
    for name, file, message in (
        (
            "topk",
            "recorded",
            "recorded.jsonl, rollout 0: no teacher_topk_ids and no teacher_topk_log_probs, which --distillation topk",
        ),
        ("none", "taught", "taught.jsonl, rollout 0: teacher_topk_ids and teacher_topk_log_probs without --distillation"),
    ):
        config, options = replace(GRPO, distillation=name), {"rollouts": str(files / f"{file}.jsonl")}
        [found] = pool.run(error_on_rank, tmp_path / name, config, options, world_size=1)
        assert found.startswith("DataError: ") and message in found


# Recorded rollouts


def test_the_file_of_rollouts_holds_what_the_loss_saw(recorded):
    """Catches samples of another rank, in another order, or without the log-probabilities of the policy that sampled them."""
    batches = list(load_rollouts(recorded[0], vocab_size=9))
    assert [batch.rollout_index for batch in batches] == [0, 1, 2]
    assert [batch.samples[0].policy_version for batch in batches] == [0, 2, 4]
    for batch, row in zip(batches, metrics_of(recorded[1])[::2], strict=True):
        assert [sample.index for sample in batch.samples] == list(range(16))
        asked = [make_task().make_prompt(4 * batch.rollout_index + number, 0).prompt_id for number in range(4)]
        assert [sample.prompt_id for sample in batch.samples[::4]] == asked
        assert sum(sample.reward for sample in batch.samples) / 16 == pytest.approx(row["rollout/reward"])
        mean = sum(sum(sample.old_log_probs) / 4 for sample in batch.samples[:8]) / 8
        assert mean == pytest.approx(row["policy/old_logprobs"], rel=1e-5)


def test_a_file_of_several_data_parallel_ranks_is_that_of_one_rank(pool, recorded, tmp_path):
    """FB-44, FB-51: a rank with other rewards would compute other advantages. Each sample once, in its place, with the
    log-probabilities of all its tokens."""
    options = {"num_rollouts": 3, "save_rollouts": str(tmp_path / "two.jsonl")}
    pool.run(run_on_rank, tmp_path / "two", GSPO, options, world_size=4, **{PP: 2})
    for found, truth in zip(load_rollouts(tmp_path / "two.jsonl"), load_rollouts(recorded[0]), strict=True):
        for mine, of_one in zip(record_of(found)["samples"], record_of(truth)["samples"], strict=True):
            # Sums in another order on two ranks; two steps of Adam lie between the rollouts.
            assert mine.pop("old_log_probs") == pytest.approx(of_one.pop("old_log_probs"), abs=1e-4)
            assert mine == of_one


# Kept ids


def test_kept_ids_go_through_the_file_and_a_run_says_where_they_are_refused(pool, tmp_path):
    """Each step's scores are the sampler's own. A replay is the recorded run to the bit, and its watchdog is silent."""
    path = tmp_path / "r.jsonl"
    recording = {"num_rollouts": 2, "save_rollouts": str(path), **TOP_P}
    [(_, weights, _)] = pool.run(run_on_rank, tmp_path / "run", GSPO, recording, world_size=1)
    rows = metrics_of(tmp_path / "run")
    for row in rows:
        assert row["policy/train_rollout_logprob_abs_diff"] < SAME
        assert 0.8 < row["policy/sampler_mass"] < 0.95 and 1 < row["policy/kept_ids"] < 9
    assert rows[0]["policy/ratio_new_old"] == pytest.approx(1.0, abs=SAME)
    assert abs(rows[1]["policy/ratio_new_old"] - 1.0) > 1e-3
    [(_, replayed, _)] = pool.run(run_on_rank, tmp_path / "replayed", GSPO, {"rollouts": str(path)}, world_size=1)
    assert metrics_of(tmp_path / "replayed") == rows
    assert all(torch.equal(replayed[name][2], value[2]) for name, value in weights.items())
    refusing = replace(GSPO, sampling_support="refuse")
    [message] = pool.run(error_on_rank, tmp_path / "refused", refusing, {"rollouts": str(path)}, world_size=1)
    assert message.startswith("DataError: ") and "rollout 0: kept_ids with --sampling-support refuse: its sampler kept" in message


# Corrections


@pytest.fixture(scope="module")
def sampled(recorded, tmp_path_factory):
    """Rollouts of another engine: its log-probabilities lie up to 0.2 beside the trainer's, which are not recorded."""
    path = tmp_path_factory.mktemp("sampled") / "measured.jsonl"
    for batch in load_rollouts(recorded[0]):
        samples = []
        for sample in batch.samples:
            gap = 0.2 * torch.sin(torch.arange(sample.response_length) + sample.index)
            samples.append(replace(sample, old_log_probs=None, rollout_log_probs=sample.old_log_probs + gap))
        save_rollouts(path, replace(batch, samples=samples))
    return path


def test_a_correction_is_refused_where_nobody_has_measured_the_sampler(pool, sampled, tmp_path):
    """FB-120: what the trainer would measure in the place of it is itself, and off-policy samples would never be found."""
    batch = next(load_rollouts(sampled))
    samples = [replace(sample, rollout_log_probs=None) for sample in batch.samples]
    save_rollouts(tmp_path / "plain.jsonl", replace(batch, samples=samples))
    options = {"rollouts": str(tmp_path / "plain.jsonl")}
    [error] = pool.run(error_on_rank, tmp_path / "out", replace(GRPO, importance_correction="tis"), options, world_size=1)
    assert "plain.jsonl, rollout 0: no rollout_log_probs, which the correction compares with" in error


def test_off_policy_samples_of_the_run_s_own_engine_are_dropped_after_a_step(pool, tmp_path):
    """Without a file the sampler is the trainer before the first step: the second step of a rollout may have moved away."""
    config = PolicyLossConfig(samples_per_prompt=4, off_policy_sequence_delta=0.0, clip_ratio_low=0.99, clip_ratio_high=9.0)
    pool.run(run_on_rank, tmp_path, config, {"num_rollouts": 1, "steps_per_rollout": 2}, world_size=1)
    first, second = metrics_of(tmp_path)
    assert first["policy/correction_off_policy"] == 0.0 < second["policy/correction_off_policy"]


# The first step of a rollout is on-policy: no forward measures its old log-probabilities, unless something reads them before it


def test_what_reads_old_log_probs_before_the_step_keeps_the_forward():
    """As a file of rollouts that is written does. With top-p the sampler reports its own."""
    off_policy = replace(GRPO, off_policy_sequence_delta=0.1)
    assert not reads_old_log_probs(TrainOptions(), GRPO)
    assert reads_old_log_probs(TrainOptions(router_replay="old_log_probs"), GRPO)
    assert reads_old_log_probs(TrainOptions(), off_policy) and not reads_old_log_probs(TrainOptions(**TOP_P), off_policy)


def measuring_run_on_rank(rank, *given):
    """A run that measures its first steps too."""
    with mock.patch("megatron_rl.train.loop.reads_old_log_probs", lambda *_: True):
        return run_on_rank(rank, *given)


ROUTED = {"experts": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}}
OFF_POLICY = replace(
    GRPO,
    watchdog="off",
    importance_correction="icepop",
    importance_correction_low=0.9,
    importance_correction_high=1.1,
    importance_correction_level="sequence_mean",
    off_policy_sequence_delta=0.01,
)
FIRST_STEPS = [
    # config, ranks, layout, options, settings; "sampled": the rollouts of another engine
    pytest.param(replace(GSPO, kl_coefficient=0.2), 2, {PP: 2}, {"packed": True}, {}, id="gspo with KL, packed, PP2"),
    pytest.param(GRPO, 1, {}, {"router_replay": "rollout"}, ROUTED, id="experts, R3"),
    pytest.param(OFF_POLICY, 1, {}, {"rollouts": "sampled"}, {}, id="icepop and off-policy samples"),
]


@pytest.mark.parametrize(("config", "world_size", "layout", "options", "settings"), FIRST_STEPS)
def test_a_run_trains_as_one_that_measures_its_first_steps(pool, tmp_path, sampled, config, world_size, layout, options, settings):
    """Of the two steps of each rollout the first one costs no forward. Where no forward has measured, the policy in training is the
    trainer's side of a correction: of factors, of drops and of their metrics. FB-120: they see the gap of the two engines."""
    options = {"num_rollouts": 2, "steps_per_rollout": 2, **options}
    is_sampled = "rollouts" in options
    if is_sampled:
        options["rollouts"] = str(sampled)
    without, measured = (
        pool.run(run, tmp_path / run.__name__, config, options, settings, world_size=world_size, **layout)
        for run in (run_on_rank, measuring_run_on_rank)
    )
    rows, truth = metrics_of(tmp_path / "run_on_rank"), metrics_of(tmp_path / "measuring_run_on_rank")
    phantoms = [row.pop("policy/num_phantom_tokens", None) for row in (rows[0], truth[0])]
    assert unlike_metrics(rows, truth) == [] and (is_sampled or phantoms == [None, 0.0])
    weights = [whole([of_rank for _, of_rank, _ in answers], 9) for answers in (without, measured)]
    assert relative_difference(*weights) < SAME
    if is_sampled:
        assert rows[0]["policy/train_rollout_logprob_abs_diff"] > 0.01
        assert 0.05 < rows[0]["policy/correction_kept_tokens"] < 0.95
    else:
        assert rows[0]["policy/ratio_new_old"] == 1.0 and abs(rows[1]["policy/ratio_new_old"] - 1.0) > 1e-4


# Steps without a token, the end


def test_a_skipped_step_changes_no_weight_and_no_learning_rate(pool, files, tmp_path):
    """As the run on the same file without these rollouts: weights to the bit, and each row. A line a step, of the first rank."""
    config = PolicyLossConfig(samples_per_prompt=4, watchdog="off", empty_step="skip")
    settings = {"lr": 0.09, "lr_decay_style": "linear", "lr_decay_iters": 9}
    paths = {"all": files / "with masked rollouts.jsonl", "some": write_file(tmp_path / "some.jsonl", TRAINED)}
    found, truth = (
        pool.run(run_on_rank, tmp_path / name, config, {"steps_per_rollout": 1, "rollouts": str(path)}, settings, world_size=2)
        for name, path in paths.items()
    )
    for (_, own, _), (_, other, _) in zip(found, truth, strict=True):
        assert all(torch.equal(part[2], other[name][2]) for name, part in own.items())
    rows, expected = metrics_of(tmp_path / "all"), metrics_of(tmp_path / "some")
    assert [row.pop("skipped_steps") for row in rows] == [0, 1, 3] and [row.pop("rollout") for row in rows] == [0, 2, 5]
    assert rows == [{name: value for name, value in row.items() if name not in ("rollout", "skipped_steps")} for row in expected]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.08, 0.07, 0.06])
    for progress in (outcome.progress for outcome, *_ in found):
        assert (progress.num_steps, progress.skipped_steps, progress.num_rollouts) == (3, 3, 6)
    (*_, lines), (*_, of_the_other) = found
    assert len(lines) == 3 and of_the_other == []
    says = "rollout 1: a step is skipped (1 so far, after 1 that trained): the step has 8 samples and not a single"
    assert lines[0].startswith(says)


def test_a_step_without_a_token_ends_the_run_on_each_rank_by_default(pool, tmp_path):
    """Skipped, a run of nothing else trains nothing and saves nothing."""
    config, options = PolicyLossConfig(samples_per_prompt=4, watchdog="off"), {"steps_per_rollout": 1, "save_interval": 1}
    trained_first = {**options, "rollouts": str(write_file(tmp_path / "first.jsonl", WITH_MASKED[:2]))}
    errors = pool.run(error_on_rank, tmp_path / "ends", config, trained_first, world_size=2)
    assert all(error.startswith("EmptyStep: the step has 8 samples and not a single unmasked token") for error in errors), errors
    assert len(metrics_of(tmp_path / "ends")) == 1
    nothing_else = {**options, "rollouts": str(write_file(tmp_path / "only.jsonl", WITH_MASKED[3:5]))}
    [(outcome, *_)] = pool.run(run_on_rank, tmp_path / "out", replace(config, empty_step="skip"), nothing_else, world_size=1)
    assert (outcome.progress.num_steps, outcome.progress.skipped_steps, outcome.checkpoint) == (0, 2, None)
    assert metrics_of(tmp_path / "out") == []


def test_the_demo_learns_from_below_a_fifth_to_above_nine_tenths_and_its_watchdog_is_silent(pool, tmp_path):
    """`--preset demo`: a wrong sign, advantage or mask learns nothing in 140 rollouts. They are more steps than an idle clip is
    judged by. The run ends where five rollouts have reached its target, and saves."""
    demo = dict(PRESETS["demo"])
    config = PolicyLossConfig(**{name: demo.pop(name) for name in ("policy_loss", "loss_aggregation", "samples_per_prompt")})
    options = demo | {"target_reward": 0.92, "save_interval": 1000}
    settings = {"hidden_size": 64, "lr": demo["lr"]}
    [(outcome, _, messages)] = pool.run(run_on_rank, tmp_path, config, options, settings, world_size=1)
    progress = outcome.progress
    assert progress.first_reward < 0.2 and progress.last_reward > 0.9
    assert progress.num_steps > 40 and messages == []
    assert outcome.reason.endswith("of the last 5 rollouts reached the target") and outcome.exit_code == 0
    assert outcome.checkpoint == tmp_path / "checkpoints" / f"step_{progress.num_steps:08}" and outcome.checkpoint.is_dir()
