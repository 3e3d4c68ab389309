"""The first step of a rollout in `megatron-rl train`: it is on-policy, and no forward measures its old log-probabilities.

What reads them before that step keeps the forward. A run without the forward trains as one with it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import pool_of
from test_layouts import config_of
from trainer_cases import (
    CP,
    PP,
    metrics_of,
    relative_difference,
    run_loop,
    unlike_metrics,
    whole,
)

from megatron_rl.config import PolicyLossConfig
from megatron_rl.declare import get_policy_loss, policy_loss_names
from megatron_rl.train.rollout_files import load_rollouts, save_rollouts

pytestmark = pytest.mark.megatron

GSPO = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, watchdog="raise")
GRPO = PolicyLossConfig(loss_aggregation="token_mean", samples_per_prompt=4)
# Losses whose ratio is to the old policy; that of the others is to the sampler, whose log-probabilities are measured.
OF_THE_OLD_POLICY = [name for name in policy_loss_names() if get_policy_loss(name).anchor == "old"]
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
PHANTOMS = "policy/num_phantom_tokens"
pool = pool_of(4)


class Passes:
    """Counts the forward passes of a trainer's model by the method that makes them: sample, log_probs or step."""

    def __init__(self):
        self.of_method, self._method = Counter(), None

    def watch(self, trainer) -> None:
        for name in ("sample", "log_probs", "step"):
            setattr(trainer, name, partial(self._call, name, getattr(trainer, name)))
        trainer.model.register_forward_pre_hook(lambda *_: self.of_method.update([self._method]))

    def _call(self, name, method, *arguments, **keywords):
        self._method = name
        return method(*arguments, **keywords)


def run_on_rank(rank, output_dir, config, options, settings=None, measures_all=False):
    """(forward passes by method, final weights) of a run. measures_all: with the forward that the first steps do without."""
    passes = Passes()
    patch = mock.patch("megatron_rl.train.loop.reads_old_log_probs", lambda *_: True)
    with patch if measures_all else contextlib.nullcontext():
        _, weights = run_loop(output_dir, config, options, settings=settings, on_trainer=passes.watch)
    return dict(passes.of_method), weights


DPPO = replace(GRPO, policy_loss="dppo_tv")
DELTA = replace(GRPO, off_policy_sequence_delta=0.1)
READERS = [
    pytest.param(GRPO, {"save_rollouts": "saved.jsonl"}, {}, id="a file of rollouts"),
    pytest.param(GRPO, {"router_replay": "old_log_probs"}, EXPERTS, id="routes of that forward"),
    pytest.param(DPPO, {}, {}, id="a ratio to the sampler"),
    pytest.param(DELTA, {}, {}, id="off-policy sequences"),
]


@pytest.mark.parametrize(("config", "options", "experts"), READERS)
def test_what_reads_old_log_probs_before_the_step_keeps_the_forward(pool, tmp_path, config, options, experts):
    options = {"num_rollouts": 1, "steps_per_rollout": 2, **options}
    if "save_rollouts" in options:
        options["save_rollouts"] = str(tmp_path / options["save_rollouts"])
    [(passes, _)] = pool.run(run_on_rank, tmp_path / "run", config, options, {"experts": experts}, world_size=1)
    assert passes["step"] == passes["log_probs"] == 2


# Which numbers


def rows_of_losses_on_rank(rank, folder, names) -> list[list[dict]]:
    rows = []
    for name in names:
        run_loop(folder / name, config_of(name, "token_mean", samples_per_prompt=4), {"num_rollouts": 1, "steps_per_rollout": 2})
        rows.append(metrics_of(folder / name))
    return rows


def test_the_first_ratio_is_exactly_1_and_the_second_is_not(pool, tmp_path):
    """No metric is missing but the count of phantoms, which looks at log-probabilities that somebody else has measured."""
    [rows_of_losses] = pool.run(rows_of_losses_on_rank, tmp_path, OF_THE_OLD_POLICY, world_size=1)
    for name, (first, second) in zip(OF_THE_OLD_POLICY, rows_of_losses, strict=True):
        found = {metric: first[f"policy/{metric}"] for metric in ("ratio_new_old", "kl_new_old", "effective_sample_size")}
        assert found == {"ratio_new_old": 1.0, "kl_new_old": 0.0, "effective_sample_size": 1.0}, name
        assert first["policy/clipped_ratio_fraction"] == 0.0, name
        assert first["policy/old_logprobs"] == first["policy/new_logprobs"], name
        assert abs(second["policy/ratio_new_old"] - 1.0) > 1e-4 and second["policy/kl_new_old"] > 0.0, name
        assert first.keys() == second.keys() and PHANTOMS not in first, name


# Both runs compute in float32 with other roundings: a ratio is 1 here and 1 +- 1e-7 there. Adam divides a gradient by its own size,
# so weights differ by as much of an update.
SAME = 1e-6
TIS = {"importance_correction": "tis", "importance_correction_high": 1.5}
ICEPOP = {"importance_correction": "icepop", "importance_correction_low": 0.9, "importance_correction_high": 1.1}
OF_SAMPLES = ICEPOP | {"importance_correction_level": "sequence_mean", "off_policy_sequence_delta": 0.01, "watchdog": "off"}
# (config, ranks, layout, options, experts); "sampled": its rollouts are those of another engine.
RUNS = [
    pytest.param(replace(GSPO, kl_coefficient=0.2), 2, {PP: 2}, {"packed": True}, {}, id="gspo with KL, packed, PP2"),
    pytest.param(replace(GRPO, fused_lm_head_loss=True), 2, {CP: 2}, {}, {}, id="grpo, fused head, CP2"),
    pytest.param(GSPO, 1, {}, {"steps_per_rollout": 1}, {}, id="gspo, one step a rollout"),
    pytest.param(replace(GSPO, docs_per_step=8), 1, {}, {"steps_per_rollout": 1}, {}, id="gspo, steps of documents"),
    pytest.param(GRPO, 1, {}, {"router_replay": "rollout"}, EXPERTS, id="experts, R3"),
    pytest.param(replace(GRPO, **TIS), 1, {}, {"rollouts": "sampled"}, {}, id="grpo, tis"),
    pytest.param(replace(GSPO, **OF_SAMPLES), 1, {}, {"rollouts": "sampled"}, {}, id="gspo, icepop and off-policy samples"),
    pytest.param(
        replace(GRPO, **OF_SAMPLES, fused_lm_head_loss=True), 1, {}, {"rollouts": "sampled"}, {}, id="grpo, the same, fused head"
    ),
    pytest.param(replace(DPPO, watchdog="off"), 1, {}, {"rollouts": "sampled"}, {}, id="dppo_tv"),
]


@pytest.fixture(scope="module")
def sampled(pool, tmp_path_factory):
    """Rollouts of another engine: its log-probabilities lie up to 0.2 beside the trainer's, which are not recorded."""
    folder = tmp_path_factory.mktemp("sampled")
    options = {"num_rollouts": 2, "save_rollouts": str(folder / "own.jsonl")}
    pool.run(run_on_rank, folder / "own", GRPO, options, world_size=1)
    for batch in load_rollouts(folder / "own.jsonl"):
        samples = [
            replace(
                sample,
                old_log_probs=None,
                rollout_log_probs=sample.old_log_probs + 0.2 * torch.sin(torch.arange(sample.response_length) + sample.index),
            )
            for sample in batch.samples
        ]
        save_rollouts(folder / "measured.jsonl", replace(batch, samples=samples))
    return folder / "measured.jsonl"


@pytest.mark.parametrize(("config", "world_size", "layout", "options", "experts"), RUNS)
def test_a_run_trains_as_one_with_the_forward(pool, tmp_path, sampled, config, world_size, layout, options, experts):
    """It saves the forward of the first step of each of its two rollouts. Where no forward has measured, the policy in training is
    the trainer's side of a correction: of factors, of drops and of their metrics."""
    options = {"num_rollouts": 2, "steps_per_rollout": 2, **options}
    is_sampled = "rollouts" in options
    if is_sampled:
        options["rollouts"] = str(sampled)
    given = (config, options, {"experts": experts})
    without = pool.run(run_on_rank, tmp_path / "without", *given, world_size=world_size, **layout)
    measured = pool.run(run_on_rank, tmp_path / "with", *given, True, world_size=world_size, **layout)
    rows, truth = metrics_of(tmp_path / "without"), metrics_of(tmp_path / "with")
    truth[0].pop(PHANTOMS, None)
    rows[0].pop(PHANTOMS, None)
    if options["steps_per_rollout"] == 1 and not config.docs_per_step:
        truth[1].pop(PHANTOMS, None)
    assert unlike_metrics(rows, truth) == []
    weights = [whole([weights for _, weights in answers]) for answers in (without, measured)]
    assert relative_difference(*weights) < SAME
    for (few, _), (all_passes, _) in zip(without, measured, strict=True):
        assert few["step"] == all_passes["step"]
        if config.policy_loss != "dppo_tv" and not is_sampled:
            assert all_passes["log_probs"] - few.get("log_probs", 0) >= 2 * all_passes["step"] // 4, (few, all_passes)
    assert not is_sampled or rows[0]["policy/train_rollout_logprob_abs_diff"] > 0.01
    if config.importance_correction == "icepop":
        assert 0.05 < rows[0]["policy/correction_kept_tokens"] < 0.95
    elif config.importance_correction == "tis":
        assert rows[0]["policy/correction_largest_ratio"] > 1.1
