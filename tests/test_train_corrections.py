"""`megatron-rl train` on rollouts of another engine: a sampler in bfloat16, a trainer in float32, and corrections."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from helpers import error_of, pool_of
from trainer_cases import metrics_of, ragged_step, run_loop, tiny_trainer

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


def test_a_mask_drops_what_differs_and_dropped_tokens_leave_the_counts(pool, sampled):
    """Bounds that about half of the tokens leave. The step's own counts stay those of all unmasked tokens."""
    mask = {
        "entropy_coefficient": 0.1,
        "importance_correction": "mask",
        "importance_correction_low": 1.0,
        "importance_correction_high": 2.0,
    }
    kept, error = run(pool, sampled, "mask", replace(GRPO, **mask, watchdog="off"), steps_per_rollout=2)
    assert error == "" and 0.05 < kept["policy/correction_kept_tokens"] < 0.95
    dropped, error = run(
        pool, sampled, "dropped", replace(GRPO, **mask, rejected_tokens="dropped", watchdog="off"), steps_per_rollout=2
    )
    assert error == "" and dropped["policy/correction_kept_tokens"] == kept["policy/correction_kept_tokens"]
    assert dropped["num_tokens"] == kept["num_tokens"] and dropped["loss/entropy"] == kept["loss/entropy"]
    # At ratio 1 the policy term is the weighted sum of advantages, which cancel in a group if the kept tokens of a sample share its
    # whole weight. Otherwise each sample has what is left of it.
    assert abs(dropped["loss/policy"]) < 1e-6 < 1e-3 < abs(kept["loss/policy"])


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "prompt_mean"])
def test_dropped_tokens_of_a_single_step_need_no_old_log_probs(pool, sampled, aggregation):
    """The samples have none. prompt_mean needs the kept tokens before the step, so there they are measured."""
    config = replace(GRPO, importance_correction="icepop", rejected_tokens="dropped", loss_aggregation=aggregation)
    row, error = run(pool, sampled, "single", config)
    assert error == "" and row["policy/correction_kept_tokens"] > 0.9


def test_dropped_tokens_of_rollouts_of_several_samples_are_measured_before_the_step(pool, sampled):
    """The samples have no old log-probabilities, and a sample's weight depends on what the others of its rollout keep."""
    batch = next(load_rollouts(sampled / "measured.jsonl"))
    first = {sample.prompt_id: sample for sample in reversed(batch.samples)}
    samples = [
        replace(sample, rollout_id=f"of {sample.prompt_id}", reward=one.reward, advantage=one.advantage)
        for sample in batch.samples
        for one in [first[sample.prompt_id]]
    ]
    save_rollouts(sampled / "several.jsonl", replace(batch, samples=samples))
    config = replace(GRPO, importance_correction="icepop", rejected_tokens="dropped", samples_per_prompt=None)
    row, error = run(pool, sampled, "several", config, rollouts=str(sampled / "several.jsonl"))
    assert error == "" and row["policy/correction_kept_tokens"] > 0.9


def dropped_step_on_rank(rank, **changes):
    of_step = {"importance_correction": "icepop", "rejected_tokens": "dropped", "samples_per_prompt": 2, **changes}
    trainer = tiny_trainer(replace(GRPO, **of_step))
    samples = [replace(sample, rollout_log_probs=[-2.0] * len(sample.loss_mask)) for sample in ragged_step()]
    return error_of(lambda: trainer.step([samples]))


def test_a_step_of_ones_own_loop_needs_to_know_what_is_dropped(pool):
    """prompt_mean weighs by what other samples keep; one factor T / K on the gradient would be on a KL term too."""
    assert pool.run(dropped_step_on_rank) == [""]
    [error] = pool.run(functools.partial(dropped_step_on_rank, loss_aggregation="prompt_mean"))
    assert "with loss_aggregation=prompt_mean needs old_log_probs of each sample before the step, because its weights" in error
    [error] = pool.run(functools.partial(dropped_step_on_rank, loss_aggregation="token_mean", entropy_coefficient=0.1))
    assert "before the step, because one factor on the whole gradient would multiply entropy_coefficient=0.1 too" in error


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
