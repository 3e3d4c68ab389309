"""Metrics of a user's own, without an edit of the package: by hand, the same for every split, and refused at start where wrong."""

from __future__ import annotations

import functools
from dataclasses import replace

import own_metrics
import pytest
from helpers import CLIP, counted_collectives, loop_log_probs, pool_of, random_batch, run_loss
from loss_backends import LOSSES, over_backends
from trainer_cases import metrics_of, run_loop

from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.losses import grpo_loss
from megatron_rl.metrics.custom import named_metrics
from megatron_rl.metrics.policy import sample_mean
from megatron_rl.metrics.step import combine_statistics, finalise_metrics, neutral_statistics, report_pairs
from megatron_rl.validation import Settings, find_problems

ROWS = named_metrics(own_metrics.ALL)
BATCH = random_batch([5, 1, 9, 4], num_masked=(1, 0, 3, 4), seed=40)


def by_loop(batch, kind: str) -> dict[str, float]:
    """The three metrics of samples with unmasked tokens, one token after another."""
    log_ratio = loop_log_probs(batch.logits, batch.labels) - batch.old_log_probs
    of_samples = [log_ratio[[t for t in document if batch.loss_mask[t]]] for document in batch.documents]
    ratios = [(one.mean().expand_as(one) if kind == "gspo" else one).exp().tolist() for one in of_samples if one.numel()]
    far = [sum(abs(ratio - 1) > 0.1 for ratio in one) / len(one) for one in ratios]
    tokens = [ratio for one in ratios for ratio in one]
    return {
        "policy/far_tokens": sum(far) / len(far),
        "policy/smallest_ratio": min(tokens),
        "policy/raised_tokens": sum(ratio > 1 for ratio in tokens) / len(tokens),
    }


@over_backends
@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_rows_of_a_user_by_hand_and_over_micro_batches(backend, kind):
    """Torch, Triton and the fused head; the whole step, and samples apart: a sample without a token counts nowhere."""
    of_loss = functools.partial(backend.run, LOSSES[kind], metrics="basic", custom_metrics=ROWS, **CLIP)
    whole = of_loss(BATCH)[0].metrics
    parts = [of_loss(BATCH.take([BATCH.documents[i] for i in some], some))[0].metrics for some in ([3], [2, 0], [1])]
    parts.append(neutral_statistics(has_entropy=False, custom=ROWS))
    plain = finalise_metrics(backend.run(LOSSES[kind], BATCH, metrics="basic", **CLIP)[0].metrics)
    expected = by_loop(BATCH, kind)
    assert 0 < expected["policy/far_tokens"] < 1 and 0 < expected["policy/raised_tokens"] < 1
    for statistics in (whole, combine_statistics(parts)):
        found = finalise_metrics(statistics)
        assert {name: found.pop(name) for name in expected} == pytest.approx(expected, rel=1e-5)  # float32 log-probabilities
        assert found == pytest.approx(plain, rel=1e-5, abs=1e-6)
    # A minimum is no quotient of sums.
    reported = {f"policy/{row.name}": row.name for row in ROWS} | dict.fromkeys(plain)
    assert reported.keys() - report_pairs(whole, 1).keys() == {
        "policy/smallest_ratio", "policy/max_advantage", "policy/min_advantage", "policy/effective_sample_size"
    }  # fmt: skip


def test_without_rows_nothing_runs_and_with_them_no_collective_is_added(monkeypatch):
    """At cp 1; the one all-gather of a step holds more numbers."""
    calls = []
    row = sample_mean("seen", lambda tokens: calls.append(tokens) or tokens.ratios, **own_metrics.WORDS)
    with counted_collectives() as collectives:
        plain = run_loss(grpo_loss, BATCH, metrics="basic", **CLIP)[0].metrics
        assert calls == [] and plain.custom == ()
        run_loss(grpo_loss, BATCH, metrics="basic", custom_metrics=(row,), **CLIP)
    assert len(calls) == 1 and collectives == []


def problems_of(name: str, **settings) -> list[str]:
    given = {"custom_policy_metrics": f"own_metrics.{name}", **settings}
    return list(find_problems(Settings(config=PolicyLossConfig(**given), route=Route.TRAIN)))


REFUSED = {
    "absent": "--custom-policy-metrics: policy metric 'own_metrics.absent': module 'own_metrics' has no 'absent'; write module.",
    "plain": "--custom-policy-metrics: policy metric 3 is int, not a Metric: make it with megatron_rl.metrics.policy.sample_mean",
    "taken": "policy metric 'entropy': another metric has that name; choose another one",
    "of_a_step": "policy metric 'mtp_loss': another metric has that name",
    "unspeakable": "policy metric 'far tokens' must have letters, digits and underscores as its name",
    "divided": "its normaliser 'num_far' is no sum of the step; choose of num_documents",
    "unguarded": "a step may have 0 of its normaliser 'clipped_low'; declare present_with='clipped_low'",
    "without_a_name": "policy metric 3 must have letters, digits and underscores as its name",
    "reduced": "policy metric 'reduced': reduction and weight must be members of metrics.policy.Reduction and Weight",
    "weighed": "policy metric 'weighed': reduction and weight must be members of",
    "present_nowhere": "its present_with 'num_far' is no sum of the step; choose of num_documents",
    "of_a_maximum": "'max_advantage' is no sum of the step",
    "of_far": "'num_far' is no sum of the step",
    "one_number": "'one_number' returned () torch.float32 on cpu: its value must be (4096,) real numbers or bool on cpu, one",
    "of_pairs": "'of_pairs' returned (4095,) torch.float32",
    "imaginary": "'imaginary' returned (4096,) torch.complex64",
    "number": "'number' returned float: its value must be (4096,)",
    "nothing": "=nothing with policy_metrics=basic cannot be computed: DataError: it has no value: return a vector",
    "centred": "custom_policy_metrics=centred with policy_metrics=basic depends at one token on the others",
    "far_from_the_rest": "=far_from_the_rest with policy_metrics=basic depends at one token on the others",
    "misspelt": "=misspelt with policy_metrics=basic cannot be computed: AttributeError: 'TokenValues' object has no",
    "infinite": "=infinite with policy_metrics=basic is not finite for 512 of 4096 probes",
    "writing": "=writing with policy_metrics=basic writes into its inputs: it must leave them as they are",
    "largest": "=largest with policy_metrics=basic depends at one token on the others",
    "surprise": "=surprise with policy_metrics=basic cannot be computed: TypeError: ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_row_is_refused_at_start(name):
    (problem,) = problems_of(name)
    assert REFUSED[name] in problem


def test_what_else_is_refused_and_what_is_not():
    assert problems_of("far_tokens") == problems_of("far_tokens,own_metrics.raised_tokens") == []
    assert problems_of("surprise", policy_metrics="with_entropy") == problems_of("num_far,own_metrics.of_far") == []
    assert [problem.count("has no 'absent") for problem in problems_of("absent,own_metrics.absent_too")] == [1, 1]
    (problem,) = problems_of("far_tokens,own_metrics.far_tokens")
    assert "policy metric 'far_tokens': another metric has that name" in problem
    (problem,) = problems_of("far_tokens,nowhere.at_all")
    assert "policy metric 'nowhere.at_all': module 'nowhere' cannot be imported" in problem
    (problem,) = problems_of("far_tokens,")
    assert "policy metric '' has no dot: write module.name" in problem
    (problem,) = problems_of("far_tokens", policy_metrics="none")
    assert problem.startswith("custom_policy_metrics='own_metrics.far_tokens' has no effect without metrics")
    given = PolicyLossConfig(custom_policy_metrics="own_metrics.far_tokens")
    (problem,) = find_problems(Settings(config=given, route=Route.REDUCER))
    assert "works on megatron_lm, train; remove it" in problem
    (problem,) = find_problems(Settings(config=replace(given, custom_policy_metrics=["own_metrics.far_tokens"])))
    assert "must be text: write module.name, several with commas between" in problem
    with pytest.raises(ConfigError, match="custom_metrics has no effect with metrics='none'"):
        run_loss(grpo_loss, BATCH, custom_metrics=ROWS, **CLIP)
    with pytest.raises(DataError, match="policy metric 'of_pairs' returned"):
        run_loss(grpo_loss, BATCH, metrics="basic", custom_metrics=(own_metrics.of_pairs,), **CLIP)


pool = pool_of(2)


def train_on_rank(rank, output_dir, config):
    run_loop(output_dir, config, {"num_rollouts": 1})


@pytest.mark.megatron
@pytest.mark.parametrize("layout", [{}, {"context_parallel_size": 2}])
def test_a_run_of_train_writes_them(pool, tmp_path, layout):
    config = PolicyLossConfig(policy_loss="gspo", samples_per_prompt=4, custom_policy_metrics=own_metrics.ALL)
    pool.run(train_on_rank, tmp_path, config, world_size=2, **layout)
    first, second = metrics_of(tmp_path)
    assert (first["policy/far_tokens"], first["policy/smallest_ratio"], first["policy/raised_tokens"]) == (0.0, 1.0, 0.0)
    assert second["policy/smallest_ratio"] < 1.0 and 0 < second["policy/raised_tokens"] < 1
