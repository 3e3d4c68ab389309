"""`megatron-rl train` on rollouts of another engine: a sampler in bfloat16, a trainer in float32, and corrections."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import error_of, pool_of
from trainer_cases import metrics_of, run_loop

from megatron_rl.config import PolicyLossConfig
from megatron_rl.train.rollout_files import load_rollouts, save_rollouts

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

GRPO = PolicyLossConfig(samples_per_prompt=4)
ONCE = {"num_rollouts": 1, "steps_per_rollout": 1}
TIS = {"importance_correction": "tis"}
pool = pool_of(1)


def on_rank(rank, output_dir, config, options, bf16=False):
    """(the first row of metrics, error) of a run."""
    error = error_of(lambda: run_loop(output_dir, config, options, settings={"bf16": bf16}))
    return (metrics_of(output_dir)[0] if not error else {}), error


@pytest.fixture(scope="module")
def sampled(pool, tmp_path_factory):
    """Two files: rollouts that a bfloat16 engine has sampled and measured, and the same without the engine's measurement."""
    folder = tmp_path_factory.mktemp("sampled")
    [(_, error)] = pool.run(on_rank, folder / "bf16", GRPO, {**ONCE, "save_rollouts": str(folder / "own.jsonl")}, True)
    assert error == ""
    batch = next(load_rollouts(folder / "own.jsonl"))
    samples = [replace(s, old_log_probs=None, rollout_log_probs=s.old_log_probs) for s in batch.samples]
    save_rollouts(folder / "measured.jsonl", replace(batch, samples=samples))
    save_rollouts(folder / "plain.jsonl", replace(batch, samples=[replace(s, rollout_log_probs=None) for s in samples]))
    return folder


def run(pool, sampled, name, config, **options):
    [found] = pool.run(
        on_rank, sampled / name.replace(" ", "_"), config, {**ONCE, "rollouts": str(sampled / "measured.jsonl"), **options}
    )
    return found


def test_the_gap_of_two_engines_is_seen_and_corrected(pool, sampled):
    """Rounding to bfloat16 moves a log-probability by 1e-3 to 1e-1. Under tis no token is dropped, and the step is another one."""
    plain, error = run(pool, sampled, "plain", GRPO)
    assert error == "" and plain["policy/train_rollout_logprob_abs_diff"] > 1e-4
    corrected, error = run(pool, sampled, "tis", replace(GRPO, **TIS))
    assert error == ""
    assert corrected["policy/correction_kept_tokens"] == 1.0
    assert 1e-5 < abs(corrected["policy/correction_weight"] - 1) < 0.1
    assert 1 < corrected["policy/correction_largest_ratio"] < 1.5
    assert corrected["grad_norm"] != plain["grad_norm"]
    assert "policy/correction_weight" not in plain


def test_a_mask_drops_what_differs_and_dropped_tokens_are_counted(pool, sampled):
    """Bounds that about half of the tokens leave. The counts stay those of all unmasked tokens."""
    mask = {
        "entropy_coefficient": 0.1,
        "importance_correction": "mask",
        "importance_correction_low": 1.0,
        "importance_correction_high": 2.0,
    }
    kept, error = run(pool, sampled, "mask", replace(GRPO, **mask, watchdog="off"), steps_per_rollout=2)
    assert error == "" and 0.05 < kept["policy/correction_kept_tokens"] < 0.95
    assert abs(kept["loss/policy"]) > 1e-3, "each sample has what is left of it, and the advantages of a group do not cancel"


@pytest.mark.parametrize("settings", [TIS, {"off_policy_sequence_delta": 0.1}], ids=["tis", "off-policy"])
def test_rollouts_without_the_sampler_s_log_probs_are_refused(pool, sampled, settings):
    """FB-120: what the trainer measures again in their place is itself, and off-policy samples would never be found."""
    _, error = run(pool, sampled, "missing", replace(GRPO, **settings), rollouts=str(sampled / "plain.jsonl"))
    assert "plain.jsonl, rollout 0: no rollout_log_probs, which the correction compares with" in error


def test_off_policy_samples_of_the_run_s_own_engine_are_dropped_after_a_step(pool, tmp_path):
    """Without a file the sampler is the trainer before the first step: the second step of a rollout may have moved away."""
    config = replace(GRPO, off_policy_sequence_delta=0.0, clip_ratio_low=0.99, clip_ratio_high=9.0)
    options = {"num_rollouts": 1, "steps_per_rollout": 2}
    error = pool.run(on_rank, tmp_path / "own", config, options)[0][1]
    assert error == ""
    first, second = metrics_of(tmp_path / "own")
    assert first["policy/correction_off_policy"] == 0.0 < second["policy/correction_off_policy"]
