"""Whole runs in the ranks of a pool: each kind is the same on one rank and on a layout, its rows count what was trained on, and it
learns."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers import error_of, pool_of
from trainer_cases import (
    CP,
    PP,
    TIMING_METRICS,
    TP,
    lively,
    make_batch,
    masked,
    metrics_of,
    ragged_batches,
    relative_difference,
    run_loop,
    tiny_trainer,
    unlike_metrics,
    whole,
    write_file,
)

from megatron_rl.config import PolicyLossConfig, PolicyMetrics
from megatron_rl.errors import DataError
from megatron_rl.layout.agreement import all_gather_objects
from megatron_rl.layout.groups import SINGLE
from megatron_rl.metrics.further import CORRECTION_METRICS, CORRECTION_SAMPLE_SIZE, ROLLOUT_METRICS, SUPPORT_METRICS
from megatron_rl.train.collection import SampledRollouts, with_old_log_probs
from megatron_rl.train.loop import SKIPPED_STEPS
from megatron_rl.train.options import PRESETS, TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollout_files import load_rollouts, record_of, save_rollouts
from megatron_rl.train.rollouts import partition
from megatron_rl.train.tasks import make_task

pytestmark = pytest.mark.megatron

GSPO = PolicyLossConfig(
    policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, policy_metrics="with_entropy", watchdog="raise"
)
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
    """(progress, final weights, what the loop and the watchdog have said) of a run."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    loggers = [logging.getLogger(f"megatron_rl.train.{name}") for name in ("loop", "watchdog")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        outcome, weights = run_loop(output_dir, config, options, settings=settings)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    return outcome.progress, weights, lines


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
    "own prompts, token_mean": Kind(config=GRPO),
    "own prompts, constant": Kind(config=replace(GRPO, loss_aggregation="constant", loss_aggregation_divisor=4.0)),
    "kept ids": Kind(config=GRPO, options={"num_rollouts": 1, **TOP_P}),
    "kept ids, terms": Kind(config=WITH_TERMS, options={"num_rollouts": 1, **TOP_P}),
    "a file": Kind(config=GSPO, options={}, file="recorded"),
    "documents of own prompts": Kind(config=replace(GSPO, docs_per_step=8), options={"num_rollouts": 2, "micro_batch_size": 4}),
    # FB-88, FB-46: steps of 7 in micro-batches of 2 end with a prompt group: 8 of ragged lengths.
    "documents of a file": Kind(
        config=replace(GSPO, docs_per_step=7, watchdog="off"), options={"micro_batch_size": 2}, file="ragged"
    ),
    "skipped steps": Kind(
        config=replace(GRPO, empty_step="skip", watchdog="off"), options={"steps_per_rollout": 1}, file="with masked rollouts"
    ),
}
LAYOUTS = [
    # kind, ranks, layout, what else differs from the run of one rank
    ("own prompts, terms", 2, {TP: 2}, {}),
    ("own prompts, token_mean", 2, {PP: 2}, {"packed": True}),
    ("own prompts, constant", 4, {CP: 2, PP: 2}, {"micro_batch_size": 4}),
    ("kept ids", 2, {}, {}),
    ("kept ids", 2, {PP: 2}, {"packed": True}),
    ("kept ids, terms", 2, {CP: 2}, {"packed": True, **FUSED}),
    ("kept ids, terms", 4, {CP: 2, TP: 2}, {"micro_batch_size": 4}),
    ("kept ids, terms", 2, {TP: 2}, FUSED),
    ("a file", 4, {}, {"micro_batch_size": 3}),
    ("a file", 4, {PP: 2}, {}),
    ("documents of own prompts", 2, {}, {}),
    ("documents of a file", 4, {TP: 2, PP: 2}, {}),
    ("skipped steps", 2, {}, {"packed": True}),
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


@pytest.fixture(scope="module")
def files(recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_file(folder / "ragged.jsonl", ragged_batches())
    write_file(folder / "with masked rollouts.jsonl", WITH_MASKED)
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
            known[name] = *found, metrics_of(directory)
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
    """Catches a loss, an aggregation, a regulariser, a batch, a set of ids, or a cut into steps that knows one layout alone. The
    watchdog finds nothing in a healthy run: it would raise."""
    progress, weights, _, rows = of_one_rank(name)
    config = replace(KINDS[name].config, **{key: value for key, value in changes.items() if key in FUSED})
    options = options_of(name, files) | {key: value for key, value in changes.items() if key not in FUSED}
    answers = pool.run(run_on_rank, tmp_path, config, options, world_size=world_size, **layout)
    assert unlike_metrics(metrics_of(tmp_path), rows) == []
    assert all(found == progress for found, *_ in answers)
    found = whole([of_rank for _, of_rank, _ in answers], 9)
    assert relative_difference(found, whole([weights], 9)) < WEIGHTS_TOLERANCE


@pytest.mark.parametrize(
    ("config", "settings", "layout", "options"),
    [
        pytest.param({}, {}, {}, {}, id="dense"),
        pytest.param({}, {"experts": EXPERTS}, {"expert_model_parallel_size": 4}, {}, id="experts on 4 ranks"),
        pytest.param(FUSED, {}, {}, TOP_P, id="kept ids, fused head"),
    ],
)
def test_more_ranks_than_samples_train_all_the_same(pool, tmp_path, config, settings, layout, options):
    """FB-25: ranks without a sample meet every collective, from sampling and the reference to the step and its metrics. Their
    experts take part when the others measure old log-probabilities for a second step. They have no sets of ids."""
    config = PolicyLossConfig(policy_loss="gspo", samples_per_prompt=2, kl_coefficient=0.1, entropy_coefficient=0.1, **config)
    options = {"num_rollouts": 2, "prompts_per_rollout": 2, "steps_per_rollout": 2, **options}
    progress = [found for found, *_ in pool.run(run_on_rank, tmp_path, config, options, settings, **layout)]
    assert all(found == progress[0] for found in progress)
    assert (progress[0].samples_seen, progress[0].num_steps) == (8, 4)


# What the rows say


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


@pytest.mark.parametrize("name", ["own prompts, terms", "kept ids, terms"])
def test_the_terms_reach_the_loss_and_the_kl_term_starts_at_0(of_one_rank, name):
    """policy + 0.2 KL - 0.05 entropy. The reference is the initial policy; over other ids than the policy's it would differ from it
    at the first step."""
    *_, rows = of_one_rank(name)
    for row in rows:
        expected = row["loss/policy"] + 0.2 * row["loss/kl"] - 0.05 * row["loss/entropy"]
        assert row["loss"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert row["loss/entropy"] == pytest.approx(row["policy/entropy"], rel=1e-5)
    assert rows[0]["loss/kl"] == pytest.approx(0.0, abs=1e-8) and all(row["loss/kl"] > 1e-4 for row in rows[1:])


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


def metrics_on_rank(rank):
    trainer = tiny_trainer(replace(GSPO, policy_loss="grpo"), vocab_size=9)
    rollout = SampledRollouts(trainer, make_task("repeat"), TrainOptions(prompts_per_rollout=3, steps_per_rollout=1), 4).get(5)
    own = {sample.index: sample for sample in rollout.own.samples}
    parts = [[own[header.index] for header in part] for part in partition(rollout.headers, trainer.groups.dp.rank(), 2)]
    measured = with_old_log_probs(trainer, parts)
    assert all(len(sample.old_log_probs) == sample.response_length for part in measured for sample in part)
    return trainer.step(measured), rollout.headers, record_of(rollout.own), all_gather_objects([rank] * rank)


def test_headers_and_metrics_are_equal_on_all_ranks_and_samples_on_those_of_a_data_parallel_rank(pool):
    """FB-44, FB-51: a rank with other rewards would compute other advantages. Objects of all ranks come in rank order."""
    answers = pool.run(metrics_on_rank, world_size=4, **{PP: 2})
    (metrics, headers, first, objects), (_, _, second, _) = answers[:2]
    asked = [make_task("repeat").make_prompt(3 * 5 + number, 0).prompt_id for number in range(3)]
    assert (
        list(dict.fromkeys(header.prompt_id for header in headers)) == asked
        and [header.dp_rank for header in headers] == [0, 1] * 6
    )
    assert all(math.isfinite(value) for value in metrics.values()) and objects == [[], [1], [2, 2], [3, 3, 3]]
    assert answers == [(metrics, headers, own, objects) for own in (first, second, first, second)]
    for dp_rank, own in enumerate((first, second)):
        assert own["rollout_index"] == 5
        found = [(sample["index"], sample["reward"], sample["advantage"], sample["response_length"]) for sample in own["samples"]]
        mine = [header for header in headers if header.dp_rank == dp_rank]
        assert found == [(header.index, header.reward, header.advantage, header.response_length) for header in mine]


# Recorded rollouts


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
    """Written by two of them, of two stages each: each sample once, in its place."""
    options = {"num_rollouts": 3, "save_rollouts": str(tmp_path / "two.jsonl")}
    pool.run(run_on_rank, tmp_path / "two", GSPO, options, world_size=4, **{PP: 2})
    for found, truth in zip(load_rollouts(tmp_path / "two.jsonl"), load_rollouts(recorded[0]), strict=True):
        for mine, of_one in zip(record_of(found)["samples"], record_of(truth)["samples"], strict=True):
            # Sums in another order on two stages; two steps of Adam lie between the rollouts.
            assert mine.pop("old_log_probs") == pytest.approx(of_one.pop("old_log_probs"), abs=1e-4)
            assert mine == of_one


def test_a_rollout_file_that_starts_elsewhere_is_refused(recorded, tmp_path):
    """A run that is resumed with the file of another would train on rollouts twice, or on none of the first ones."""
    (tmp_path / "r.jsonl").write_text("".join(recorded[0].read_text().splitlines(keepends=True)[1:]))
    trainer = SimpleNamespace(settings=SimpleNamespace(vocab_size=9), groups=SimpleNamespace(dp=SINGLE))
    with pytest.raises(DataError, match=r"r\.jsonl holds rollout 1 where rollout 0 is due: it was cut or edited"):
        ReplayedRollouts(TrainOptions(rollouts=str(tmp_path / "r.jsonl")), trainer).get(0)


# Kept ids


def ratios_on_rank(rank):
    """Of the unmasked tokens of a rollout: probability by the trainer over the sampler's, with and without the sets; the mass."""
    trainer = lively(tiny_trainer(GRPO, vocab_size=9), 4.0)
    samples = SampledRollouts(trainer, make_task("repeat"), TrainOptions(prompts_per_rollout=16, **TOP_P), 4).get(0).own.samples
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


def test_kept_ids_go_through_the_file_and_a_run_says_where_they_are_missing_or_refused(pool, tmp_path):
    """Each step's scores are the sampler's own. A replay is the recorded run to the bit, and its watchdog is silent; that of a file
    without the sets names their mass."""
    path, bare = tmp_path / "r.jsonl", tmp_path / "bare.jsonl"
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
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for sample in (sample for line in lines for sample in line["samples"]):
        sample.update(kept_ids=None, kept_mass=None, old_log_probs=None)
    bare.write_text("".join(json.dumps(line) + "\n" for line in lines))
    warns = replace(GRPO, watchdog="warn")
    [(*_, [line, *_])] = pool.run(run_on_rank, tmp_path / "bare", warns, {"rollouts": str(bare)}, world_size=1)
    assert line.startswith("rollout_log_probs are 0.") and "reports log-probabilities among the tokens that it kept" in line
    refusing = replace(GSPO, sampling_support="refuse")
    [message] = pool.run(error_on_rank, tmp_path / "refused", refusing, {"rollouts": str(path)}, world_size=1)
    assert message.startswith("DataError: ") and "rollout 0: kept_ids with --sampling-support refuse: its sampler kept" in message


# Corrections


def test_the_gap_of_two_engines_is_seen_corrected_and_refused_where_nobody_measured_it(pool, tmp_path):
    """FB-120: rollouts that a bfloat16 engine has sampled and measured. Rounding moves a log-probability by 1e-3 to 1e-1. Under tis
    no token is dropped; a mask with bounds that about half of the tokens leave drops them, and they are counted. What the trainer
    would measure in the place of a missing measurement is itself, and off-policy samples would never be found."""
    grpo, once = PolicyLossConfig(samples_per_prompt=4, watchdog="off"), {"num_rollouts": 1, "steps_per_rollout": 1}
    own, measured, plain = (tmp_path / f"{name}.jsonl" for name in ("own", "measured", "plain"))
    pool.run(run_on_rank, tmp_path / "bf16", grpo, {**once, "save_rollouts": str(own)}, {"bf16": True}, world_size=1)
    batch = next(load_rollouts(own))
    samples = [replace(s, old_log_probs=None, rollout_log_probs=s.old_log_probs) for s in batch.samples]
    save_rollouts(measured, replace(batch, samples=samples))
    save_rollouts(plain, replace(batch, samples=[replace(s, rollout_log_probs=None) for s in samples]))

    def row_of(name, **settings):
        pool.run(run_on_rank, tmp_path / name, replace(grpo, **settings), {**once, "rollouts": str(measured)}, world_size=1)
        return metrics_of(tmp_path / name)[0]

    unchanged, corrected = row_of("unchanged"), row_of("tis", importance_correction="tis")
    assert unchanged["policy/train_rollout_logprob_abs_diff"] > 1e-4 and "policy/correction_weight" not in unchanged
    assert corrected["policy/correction_kept_tokens"] == 1.0
    assert 1e-5 < abs(corrected["policy/correction_weight"] - 1) < 0.1
    assert 1 < corrected["policy/correction_largest_ratio"] < 1.5
    assert corrected["grad_norm"] != unchanged["grad_norm"]
    kept = row_of("mask", importance_correction="mask", importance_correction_low=1.0, importance_correction_high=2.0)
    assert 0.05 < kept["policy/correction_kept_tokens"] < 0.95
    assert abs(kept["loss/policy"]) > 1e-3, "each sample has what is left of it, and the advantages of a group do not cancel"
    for settings in ({"importance_correction": "tis"}, {"off_policy_sequence_delta": 0.1}):
        options = {**once, "rollouts": str(plain)}
        [error] = pool.run(error_on_rank, tmp_path / "missing", replace(grpo, **settings), options, world_size=1)
        assert "plain.jsonl, rollout 0: no rollout_log_probs, which the correction compares with" in error


def test_off_policy_samples_of_the_run_s_own_engine_are_dropped_after_a_step(pool, tmp_path):
    """Without a file the sampler is the trainer before the first step: the second step of a rollout may have moved away."""
    config = PolicyLossConfig(samples_per_prompt=4, off_policy_sequence_delta=0.0, clip_ratio_low=0.99, clip_ratio_high=9.0)
    pool.run(run_on_rank, tmp_path, config, {"num_rollouts": 1, "steps_per_rollout": 2}, world_size=1)
    first, second = metrics_of(tmp_path)
    assert first["policy/correction_off_policy"] == 0.0 < second["policy/correction_off_policy"]


# Steps without a token, the learning rate, the end


@pytest.mark.parametrize("changes", [{}, {"kl_coefficient": 0.1, "docs_per_step": 8}], ids=["rollouts", "documents, KL term"])
def test_a_skipped_step_changes_no_weight_and_no_learning_rate(pool, files, tmp_path, changes):
    """As the run on the same file without these rollouts: weights to the bit, and each row. A line a step, of the first rank."""
    config = PolicyLossConfig(samples_per_prompt=4, watchdog="off", empty_step="skip", **changes)
    settings = {"lr_decay_style": "linear", "lr_decay_iters": 9}
    found, truth = (
        pool.run(run_on_rank, tmp_path / name, config, {"steps_per_rollout": 1, "rollouts": str(path)}, settings, world_size=2)
        for name, path in (
            ("all", files / "with masked rollouts.jsonl"),
            ("some", write_file(tmp_path / "some.jsonl", TRAINED)),
        )
    )
    for (_, own, _), (_, other, _) in zip(found, truth, strict=True):
        assert all(torch.equal(part[2], other[name][2]) for name, part in own.items())
    rows, expected = metrics_of(tmp_path / "all"), metrics_of(tmp_path / "some")
    assert [row.pop("skipped_steps") for row in rows] == [0, 1, 3] and [row.pop("rollout") for row in rows] == [0, 2, 5]
    assert rows == [{name: value for name, value in row.items() if name not in ("rollout", "skipped_steps")} for row in expected]
    assert all((progress.num_steps, progress.skipped_steps, progress.num_rollouts) == (3, 3, 6) for progress, *_ in found)
    (*_, lines), (*_, of_the_other) = found
    assert len(lines) == 3 and of_the_other == []
    assert lines[0].startswith(
        "rollout 1: a step is skipped (1 so far, after 1 that trained): the step has 8 samples and not a single"
    )


def test_a_step_without_a_token_ends_the_run_on_each_rank_by_default(pool, tmp_path):
    """Skipped, a run of nothing else trains nothing and saves nothing."""
    config, options = PolicyLossConfig(samples_per_prompt=4, watchdog="off"), {"steps_per_rollout": 1, "save_interval": 1}
    trained_first = {**options, "rollouts": str(write_file(tmp_path / "first.jsonl", WITH_MASKED[:2]))}
    errors = pool.run(error_on_rank, tmp_path / "ends", config, trained_first, world_size=2)
    assert all(error.startswith("EmptyStep: the step has 8 samples and not a single unmasked token") for error in errors), errors
    assert len(metrics_of(tmp_path / "ends")) == 1
    nothing_else = {**options, "rollouts": str(write_file(tmp_path / "only.jsonl", WITH_MASKED[3:5]))}
    [(progress, *_)] = pool.run(run_on_rank, tmp_path / "out", replace(config, empty_step="skip"), nothing_else, world_size=1)
    assert (progress.num_steps, progress.skipped_steps) == (0, 2)
    assert metrics_of(tmp_path / "out") == [] and not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, [0.01] * 4, id="constant"),
        pytest.param({"lr_warmup_iters": 3}, [0.01 / 3, 0.02 / 3, 0.01, 0.01], id="warm-up"),
        pytest.param(
            {"lr_decay_style": "cosine", "lr_decay_iters": 4},
            [0.005 * (1 + math.cos(math.pi * step / 4)) for step in range(1, 5)],
            id="cosine",
        ),
    ],
)
def test_the_learning_rate_of_each_step(pool, tmp_path, settings, expected):
    pool.run(run_on_rank, tmp_path, GRPO, {"num_rollouts": 2}, {"lr": 0.01, **settings}, world_size=1)
    assert [row["learning_rate"] for row in metrics_of(tmp_path)] == pytest.approx(expected, abs=1e-9)


def outcome_on_rank(rank, output_dir, config, options):
    return run_loop(output_dir, config, options)[0]


def test_a_run_that_reaches_its_target_saves_and_ends_with_0(pool, tmp_path):
    """--target-reward over five rollouts; a save after each rollout, and the last one not twice."""
    options = {"num_rollouts": 9, "target_reward": 0.0, "save_interval": 1, "steps_per_rollout": 1}
    for outcome in pool.run(outcome_on_rank, tmp_path, GSPO, options, world_size=2, **{TP: 2}):
        assert outcome.reason.endswith("of the last 5 rollouts reached the target") and outcome.exit_code == 0
        assert (outcome.progress.num_rollouts, outcome.checkpoint.name) == (5, "step_00000005")
    saved = [f"step_0000000{step}" for step in range(1, 6)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", *saved]


def test_the_demo_learns_from_below_a_fifth_to_above_nine_tenths_and_its_watchdog_is_silent(pool, tmp_path):
    """`--preset demo`: a wrong sign, advantage or mask learns nothing in 140 rollouts. They are more steps than an idle clip is
    judged by."""
    demo = dict(PRESETS["demo"])
    config = PolicyLossConfig(**{name: demo.pop(name) for name in ("policy_loss", "loss_aggregation", "samples_per_prompt")})
    options = demo | {"target_reward": 0.92, "save_interval": 1000}
    settings = {"hidden_size": 64, "lr": demo["lr"]}
    [(progress, _, messages)] = pool.run(run_on_rank, tmp_path, config, options, settings, world_size=1)
    assert progress.first_reward < 0.2 and progress.last_reward > 0.9
    assert progress.num_steps > 40 and messages == []
