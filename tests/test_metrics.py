"""Metrics of the loss and of rollouts: each by hand, and the same for every split."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers import random_batch, run_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_backends import LOSSES

from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.losses.grpo import grpo
from megatron_rl.metrics.further import ROLLOUT_METRICS, rollout_statistics
from megatron_rl.metrics.policy import NEUTRAL, PolicyStatistics, Reduction, TokenValues, policy_statistics
from megatron_rl.metrics.step import combine_statistics, finalise_metrics, neutral_statistics
from megatron_rl.policy_loss import grpo_loss, importance_correction

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}


def statistics(ratios, advantages, masks=None, *, low=0.2, high=0.2, old=-1.0) -> PolicyStatistics:
    """Of token-level samples given as lists of ratios, one advantage each, through the clipped objective itself."""
    counts = [len(r) for r in ratios]
    ratio = torch.tensor([x for sample in ratios for x in sample], dtype=torch.float64)
    mask = torch.ones(len(ratio), dtype=torch.bool) if masks is None else torch.tensor([x for m in masks for x in m]).bool()
    counts = [n if masks is None else sum(m) for n, m in zip(counts, masks or counts, strict=True)]
    per_token = torch.repeat_interleave(torch.arange(len(ratios)), torch.tensor([len(r) for r in ratios]).long())
    advantage = torch.tensor(advantages, dtype=torch.float64)[per_token]
    old_log_probs = torch.full_like(ratio, old)
    is_clipped = grpo(ratio.log(), advantage, clip_ratio_low=low, clip_ratio_high=high).is_clipped
    return policy_statistics(
        TokenValues(old_log_probs + ratio.log(), old_log_probs, ratio, is_clipped, advantage, entropy=None),
        loss_mask=mask,
        counts=torch.tensor(counts, dtype=torch.int64)[per_token],
        num_documents=len(ratios),
        is_sequence_level=False,
        cp_rank=0,
    )


def test_every_metric_by_hand():
    """FB-49: samples of 2 and 1 tokens: ratios (0.5, 1), A = -1 and (1.5), A = 1; old log-probs all -1."""
    metrics = finalise_metrics(statistics([[0.5, 1.0], [1.5]], [-1.0, 1.0]))
    kl = [r - 1 - math.log(r) for r in (0.5, 1.0, 1.5)]
    assert metrics == pytest.approx(
        {
            "policy/num_documents": 2,
            "policy/num_tokens": 3,
            "policy/old_logprobs": -1,
            # ((-1 + log 0.5 - 1) / 2 + (-1 + log 1.5)) / 2
            "policy/new_logprobs": ((-2 + math.log(0.5)) / 2 + (-1 + math.log(1.5))) / 2,
            "policy/ratio_new_old": (0.75 + 1.5) / 2,
            "policy/kl_new_old": ((kl[0] + kl[1]) / 2 + kl[2]) / 2,
            # 1 of 2 tokens below with A < 0, 1 of 1 above with A > 0
            "policy/clipped_ratio_fraction": 0.75,
            "policy/clipped_low": 0.25,
            "policy/clipped_high": 0.5,
            "policy/advantage": 0.0,
            "policy/max_advantage": 1.0,
            "policy/min_advantage": -1.0,
            "policy/ratio_new_old_sum": 3.0,
            "policy/ratio_new_old_squared_sum": 3.5,
            # 3^2 / 3.5 / 3
            "policy/effective_sample_size": 9 / 3.5 / 3,
        }
    )


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_largest_and_smallest_advantage_are_exact(sign):
    """FB-45, FB-49: no zero placeholder wins under MAX or MIN; masked samples and empty micro-batches give nothing."""
    healthy = statistics([[1.0], [1.0, 1.0]], [sign * 2, sign * 3])
    masked = statistics([[1.0]], [sign * 99], [[0]])
    empty = statistics([], [])
    metrics = finalise_metrics(combine_statistics([empty, healthy, masked, neutral_statistics(has_entropy=False)]))
    assert sorted((metrics["policy/max_advantage"], metrics["policy/min_advantage"])) == sorted((sign * 2, sign * 3))
    assert metrics["policy/max_advantage"] > metrics["policy/min_advantage"]
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_without_a_token_prints_nothing():
    """FB-45: no inf, no 0/0; a rank without tokens contributes the neutral element of each reduction."""
    for parts in ([statistics([], [])], [statistics([[1.0]], [1.0], [[0]])], [neutral_statistics(has_entropy=True)]):
        assert finalise_metrics(combine_statistics(parts)) == {}
    assert [NEUTRAL[kind] for kind in Reduction] == [0.0, math.inf, -math.inf]


def test_the_metrics_of_a_correction_are_those_by_hand():
    batch = random_batch([2, 3], num_masked=(0, 0), noise=0.0)
    batch = replace(batch, advantages=torch.tensor([1.0, -1.0], dtype=torch.float64))
    rollout = batch.old_log_probs - torch.tensor([0.4, 1.0, 6.0, 1.0, 2.5], dtype=torch.float64).log()
    options = {"correction": CorrectionSettings(kind="icepop"), "rollout_log_probs": rollout, "metrics": "basic"}
    output, _ = run_loss(LOSSES["grpo"], batch, **options, **CLIP)
    found = finalise_metrics(output.metrics)
    # Factors 0, 1 | 0, 1, 2.5: the sum is 4.5 and that of the squares 8.25.
    want = {
        "kept_tokens": 3 / 5,
        "off_policy": 0.0,
        "weight": (0.5 + 3.5 / 3) / 2,
        "at_low": 1 / 5,
        "at_high": 1 / 5,
        "largest_ratio": 6.0,
        "effective_sample_size": 4.5**2 / (5 * 8.25),
    }
    assert {name: found[f"policy/correction_{name}"] for name in want} == pytest.approx(want, rel=1e-6)
    of_tokens = {"log_probs": batch.old_log_probs, "advantages": batch.advantages.repeat_interleave(torch.tensor([2, 3]))}
    given = (options["correction"], batch.old_log_probs, rollout, batch.loss_mask, batch.cu_seqlens)
    torch.testing.assert_close(importance_correction(*given, **of_tokens)[1], output.metrics.correction)
    plain, _ = run_loss(LOSSES["grpo"], batch, metrics="basic", **CLIP)
    assert not [name for name in finalise_metrics(plain.metrics) if "correction" in name]


# What a rollout knows beside the loss's inputs: staleness, sampler against trainer, phantom tokens

NAMES = {f"policy/{row.name}" for row in ROLLOUT_METRICS if row.is_reported}


def doubles(rows) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def rollout_statistics_of(
    trained, sampled=None, kept_mass=None, *, masks=None, staleness=None, policy=None, is_on_policy=False
) -> PolicyStatistics:
    """Of samples given as lists of the trainer's (old) and the sampler's log-probabilities; `policy`: the current ones."""
    masks = [[1] * len(row) for row in trained] if masks is None else masks
    mask = torch.tensor([bit for row in masks for bit in row], dtype=torch.bool)
    values = rollout_statistics(
        log_probs=doubles(trained if policy is None else policy),
        old_log_probs=None if is_on_policy else doubles(trained),
        rollout_log_probs=None if sampled is None else doubles(sampled),
        kept_mass=None if kept_mass is None else doubles(kept_mass),
        staleness=None if staleness is None else torch.tensor(staleness, dtype=torch.int64),
        counts_phantoms=policy is not None,
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, *itertools.accumulate(map(len, trained))], dtype=torch.int32),
        token_counts=torch.tensor([sum(row) for row in masks], dtype=torch.int64),
    )
    return PolicyStatistics(LOSS_STATISTICS.values, has_entropy=False, rollout=values)


# What finalise_metrics needs beside: any step with a token.
LOSS_STATISTICS = run_loss(grpo_loss, random_batch([2, 3]), metrics="basic", **CLIP)[0].metrics


def found(*parts: PolicyStatistics) -> dict[str, float]:
    metrics = finalise_metrics(combine_statistics(parts))
    return {name: metrics[name] for name in NAMES & metrics.keys()}


def test_a_phantom_is_an_unmasked_placeholder_that_the_policy_does_not_share():
    """Old 0 and now 1/4: phantom. Old 0 and now 0.9999 (sure in both), masked, or a true old value: none."""
    old, now = [[0.0, 0.0, 0.0, -1.0]], [[math.log(0.25), math.log(0.9999), math.log(0.25), math.log(0.25)]]
    assert found(rollout_statistics_of(old, masks=[[1, 1, 0, 1]], policy=now)) == {"policy/num_phantom_tokens": 1.0}


# What stands at a masked token is not read.
SAMPLED = [[-1.1, math.nan, -2.0], [-0.4], [-3.0, math.inf], [-1.5, -1.0]]
KEPT_MASS = [[0.5, math.nan, 1.0], [0.9], [0.1, 0.1], [0.8, 0.6]]
TRAINED = [[-1.0, -1.0, -1.7], [-0.5], [-2.0, -0.2], [-1.5, -1.4]]
MASKS = [[1, 0, 1], [1], [0, 0], [1, 1]]
STALENESS = [-2, -1, 9, -5]  # negative, so that a 0 of an empty part shows in the largest


@given(where=st.lists(st.integers(0, 3), min_size=4, max_size=4), is_on_policy=st.booleans())
@settings(max_examples=30, derandomize=True, database=None)
def test_rollout_metrics_are_the_same_for_any_split_into_micro_batches(where, is_on_policy):
    """FB-46, FB-49: as nested loops over the whole step; empty micro-batches and a rank that was given nothing add nothing."""
    parts = []
    for part in range(4):
        mine = [i for i in range(4) if where[i] == part]
        pick = [[values[i] for i in mine] for values in (TRAINED, SAMPLED, KEPT_MASS, MASKS, STALENESS)]
        parts.append(rollout_statistics_of(*pick[:3], masks=pick[3], staleness=pick[4], is_on_policy=is_on_policy))
    samples = [i for i in range(4) if any(MASKS[i])]
    differences = [[t - s for t, s, m in zip(TRAINED[i], SAMPLED[i], MASKS[i], strict=True) if m] for i in samples]
    expected = {
        "policy/train_rollout_logprob_abs_diff": sum(sum(map(abs, row)) / len(row) for row in differences) / len(samples),
        "policy/train_rollout_logprob_diff": sum(sum(row) / len(row) for row in differences) / len(samples),
        "policy/train_rollout_kl": sum(sum(math.exp(d) - d - 1 for d in row) / len(row) for row in differences) / len(samples),
        "policy/sampler_mass": ((0.5 + 1.0) / 2 + 0.9 + (0.8 + 0.6) / 2) / 3,
        "policy/staleness": sum(STALENESS[i] for i in samples) / len(samples),
        "policy/max_staleness": max(STALENESS[i] for i in samples),
    }
    assert found(*parts, LOSS_STATISTICS) == pytest.approx(expected, rel=1e-12)
