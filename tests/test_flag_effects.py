"""Each setting of the policy loss changes something that can be seen: none is accepted and dead. Numbers are tested elsewhere."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import fields, replace
from typing import NamedTuple

import pytest
from helpers import error_of, pool_of
from launches import counted_launches
from loss_backends import HAS_TRITON
from test_forward_step import SeenShapes
from test_fused_head import most_rows
from trainer_cases import (
    STILL,
    gradients_of,
    metrics_of,
    ragged_step,
    relative_difference,
    run_loop,
    tiny_trainer,
    whole,
)

from megatron_rl.config import PolicyLossConfig
from megatron_rl.train.rollout_files import load_rollouts, save_rollouts

pytestmark = pytest.mark.megatron

HIDDEN, VOCABULARY = 32, 246  # no other sizes of the tiny model's tensors


class Effect(NamedTuple):
    """What of a step differs, with the setting and without it; `beside` is set in both."""

    value: object
    changes: str
    beside: dict = {}
    is_bf16: bool = False
    has_experts: bool = False


# With a loss of the router whose mean over two micro-batches is not the mean over their tokens.
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_z_loss_coeff": 1.0}
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": 8.0}
TIS = {"importance_correction": "tis"}
ICEPOP = {"importance_correction": "icepop", "importance_correction_low": 0.9, "importance_correction_high": 1.2}
OF_A_STEP = {
    "policy_loss": Effect("gspo", "gradient"),
    "loss_aggregation": Effect("token_mean", "gradient"),
    "loss_aggregation_divisor": Effect(16.0, "gradient", CONSTANT),
    "samples_per_prompt": Effect(3, "error"),
    "allow_partial_prompt_groups": Effect(True, "error", {"samples_per_prompt": 3}),
    "clip_ratio_low": Effect(0.02, "gradient"),
    "clip_ratio_high": Effect(0.02, "gradient"),
    "loss_parameters": Effect({"scale": 0.5}, "gradient", {"policy_loss": "own_losses.reinforce"}),
    "policy_temperature": Effect(0.5, "gradient"),
    "importance_correction": Effect("icepop", "gradient"),
    "importance_correction_level": Effect("sequence_mean", "gradient", TIS | {"importance_correction_high": 1.5}),
    "importance_correction_low": Effect(0.95, "gradient", TIS),
    "importance_correction_high": Effect(1.1, "gradient", TIS),
    "off_policy_sequence_delta": Effect(0.0, "gradient"),
    "kl_coefficient": Effect(0.5, "gradient"),
    "kl_estimator": Effect("k2", "gradient", {"kl_coefficient": 0.5}),
    "entropy_coefficient": Effect(0.5, "gradient"),
    "policy_metrics": Effect("none", "metrics"),
    "policy_loss_backend": Effect("triton", "kernels"),
    "fused_lm_head_loss": Effect(True, "rows of logits"),
    "max_logits_bytes": Effect(8 * 4 * VOCABULARY, "rows of logits", {"fused_lm_head_loss": True}),
    "fp32_lm_head": Effect(True, "gradient", is_bf16=True),
    "gradient_divisor": Effect("num_samples", "gradient"),
    "router_aux_loss": Effect("exact", "gradient", has_experts=True),
}
OF_A_RUN = ("docs_per_step", "empty_step", "watchdog", "sampling_support")
OF_A_HOST = ("one_sample_per_rollout", "skip_old_log_probs")  # tests/test_packed_bins.py, tests/test_skipped_log_probs.py


pool = pool_of(1)


def step_of(config, is_bf16, has_experts):
    """What can be seen of one step of two micro-batches."""
    import own_losses

    own_losses.declare()
    experts = EXPERTS if has_experts else {}
    trainer = tiny_trainer(config, vocab_size=VOCABULARY, hidden_size=HIDDEN, bf16=is_bf16, experts=experts, **STILL)
    # Near log(1 / 246) = -5.5, and equal for every setting: the policy's own would move with some of them.
    old = [replace(s, old_log_probs=[-5.5 + 0.1 * (-1) ** t for t in range(len(s.loss_mask))]) for s in ragged_step()]
    step = [
        replace(
            s,
            ref_log_probs=[value - 0.2 for value in s.old_log_probs],
            rollout_log_probs=[value + 0.3 * (t % 2) - 0.1 for t, value in enumerate(s.old_log_probs)],
        )
        for s in old
    ]
    metrics, seen = {}, SeenShapes()
    with seen, counted_launches() if HAS_TRITON else contextlib.nullcontext([]) as launches:
        error = error_of(lambda: metrics.update(trainer.step([step[:3], step[3:]])))
    return {
        "error": error,
        "metrics": sorted(metrics),
        "gradient": whole([gradients_of(trainer)]) if not error else {},
        "kernels": bool(launches) or "triton" in error,
        "rows of logits": most_rows(seen, VOCABULARY),
    }


@functools.cache
def step_without(is_bf16, has_experts, **beside):
    """Of settings that several rows share."""
    return step_of(PolicyLossConfig(**beside), is_bf16, has_experts)


def steps_on_rank(rank, name):
    """(without the setting, with it)."""
    effect = OF_A_STEP[name]
    with_it = PolicyLossConfig(**{**effect.beside, name: effect.value})
    return step_without(*effect[3:], **effect.beside), step_of(with_it, *effect[3:])


def test_every_setting_has_a_row():
    assert sorted([*OF_A_STEP, *OF_A_RUN, *OF_A_HOST]) == sorted(setting.name for setting in fields(PolicyLossConfig))


@pytest.mark.parametrize("name", OF_A_STEP)
def test_a_setting_changes_what_its_row_says(pool, name):
    """FB-69: accepted, written into the configuration, and read by nobody."""
    [(without, with_it)], changes = pool.run(steps_on_rank, name), OF_A_STEP[name].changes
    assert with_it["error"] == without["error"] == "" or changes in ("error", "kernels")
    if changes == "gradient":
        assert relative_difference(with_it["gradient"], without["gradient"]) > 1e-3
    else:
        assert with_it[changes] != without[changes]
    if name == "max_logits_bytes":
        assert with_it["rows of logits"] <= 8


def run_on_rank(rank, output_dir, config, options):
    """(rows of metrics, error) of a run."""
    error = error_of(lambda: run_loop(output_dir, config, options))
    return metrics_of(output_dir), error


def spread_over(sample) -> list[float]:
    """Of another policy, and not of one that keeps a part of the vocabulary: the differences are of both signs."""
    return [-0.1 if place % 2 else -8.0 for place in range(len(sample.old_log_probs))]


def test_settings_of_a_run_change_it(pool, tmp_path):
    """FB-69: documents of a step, and what the watchdog does about log-probabilities of another policy."""
    once = {"num_rollouts": 1, "steps_per_rollout": 1}
    config, path = PolicyLossConfig(samples_per_prompt=4), tmp_path / "rollouts.jsonl"
    [(rows, error)] = pool.run(run_on_rank, tmp_path / "plain", config, {**once, "save_rollouts": str(path)})
    assert error == "" and [row["num_samples"] for row in rows] == [16]
    [(rows, error)] = pool.run(run_on_rank, tmp_path / "docs", replace(config, docs_per_step=4), {"num_rollouts": 1})
    assert error == "" and [row["num_samples"] for row in rows] == [4, 4, 4, 4]
    batch = next(load_rollouts(path))
    kept = replace(batch, samples=[replace(s, kept_ids=[[int(t)] for t in s.tokens[-4:]]) for s in batch.samples])
    save_rollouts(tmp_path / "kept.jsonl", kept)
    given, of_file = replace(config, sampling_support="refuse", watchdog="off"), {"rollouts": str(tmp_path / "kept.jsonl")}
    [(_, error)] = pool.run(run_on_rank, tmp_path / "refused", given, {**once, **of_file})
    assert "kept_ids with --sampling-support refuse" in error
    save_rollouts(tmp_path / "masked.jsonl", replace(batch, samples=[replace(s, loss_mask=[0] * 4) for s in batch.samples]))
    of_file = {**once, "rollouts": str(tmp_path / "masked.jsonl")}
    for empty_step, says in (("raise", "not a single unmasked token"), ("skip", "")):
        [(rows, error)] = pool.run(run_on_rank, tmp_path / empty_step, replace(config, empty_step=empty_step), of_file)
        assert says in error and bool(error) == bool(says) and rows == []
    path = tmp_path / "others.jsonl"
    save_rollouts(path, replace(batch, samples=[replace(s, old_log_probs=spread_over(s)) for s in batch.samples]))
    for watchdog, says in (("off", ""), ("raise", "mean importance ratio")):
        given = replace(config, watchdog=watchdog)
        [(_, error)] = pool.run(run_on_rank, tmp_path / watchdog, given, {**once, "rollouts": str(path)})
        assert says in error and bool(error) == bool(says)
