"""Corrections for the gap between sampler and trainer: weights and dropped tokens, by hand, over layouts, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.config import CorrectionSettings
from megatron_rl.corrections import importance_correction
from megatron_rl.errors import ConfigError, DataError

# Three samples: w = old / rollout probability by token, and the policy in training equal to the old one.
RATIOS = [[0.4, 1.0], [6.0], [1.0, 2.5, 0.9]]
ADVANTAGES = [-1.0, 1.0, -0.5]


def corrected(ratios=RATIOS, advantages=ADVANTAGES, **settings):
    lengths = [len(row) for row in ratios]
    rollout = torch.linspace(-3.0, -0.5, sum(lengths), dtype=torch.float64)
    old = rollout + torch.tensor([w for row in ratios for w in row], dtype=torch.float64).log()
    return importance_correction(
        CorrectionSettings(**settings),
        old,
        rollout,
        torch.ones(sum(lengths), dtype=torch.bool),
        torch.tensor([0, *lengths]).cumsum(0).int(),
        log_probs=old,
        advantages=torch.tensor([a for a, row in zip(advantages, ratios, strict=True) for _ in row], dtype=torch.float64),
    )


MEANS = [math.sqrt(0.4), 6.0, (2.5 * 0.9) ** (1 / 3)]  # geometric: .632456, 6, 1.310371
PRODUCTS = [0.4, 6.0, 2.25]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"kind": "tis"}, [0.4, 1, 2, 1, 2, 0.9]),
        ({"kind": "tis", "low": 0.95}, [0.95, 1, 2, 1, 2, 0.95]),
        ({"kind": "icepop"}, [0, 1, 0, 1, 2.5, 0.9]),
        ({"kind": "mask", "low": 0.5, "high": 2.5}, [0, 1, 0, 1, 1, 1]),
        ({"kind": "tis", "level": "sequence_mean", "high": 1.2}, [MEANS[0]] * 2 + [1.2] * 4),
        ({"kind": "icepop", "level": "sequence_mean", "low": 0.7, "high": 1.4}, [0, 0, 0] + [MEANS[2]] * 3),
        ({"kind": "mask", "level": "sequence_sum", "low": 0.5, "high": 2.3}, [0, 0, 0, 1, 1, 1]),
        ({"kind": "tis", "level": "sequence_sum", "high": 2.0}, [PRODUCTS[0]] * 2 + [2.0] * 4),
        # The mean of log(rollout / trained) is -log of the geometric mean: .458145, -1.791759, -.270310.
        ({"sequence_delta": 0.4}, [0, 0, 1, 1, 1, 1]),
        ({"sequence_delta": 0.5}, [1, 1, 1, 1, 1, 1]),
        ({"kind": "tis", "sequence_delta": 0.4}, [0, 0, 2, 1, 2, 0.9]),
    ],
)
def test_weights_are_those_by_hand(settings, weights):
    found = corrected(**settings)
    # float64 exp of a log: a few roundings.
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0)
    is_kept = [weight != 0 for weight in weights]
    assert found.is_kept.tolist() == is_kept


def test_bounds_are_inclusive():
    assert corrected([[1.0, 1.0]], [1.0], kind="mask", low=1.0, high=1.0).is_kept.all()
    assert corrected([[1.0, 1.01]], [1.0], kind="mask", low=1.0, high=1.0).is_kept.tolist() == [True, False]


@pytest.mark.parametrize(("delta", "kept"), [(0.1, [0, 0, 1, 1, 1, 1]), (0.05, [0, 0, 1, 0, 0, 0]), (0.15, [1] * 6)])
def test_off_policy_samples_are_those_by_hand(delta, kept):
    """The means of log(rollout / trained) are .143841, -1.386294 and .064124; samples 0 and 2 have a negative advantage."""
    found = corrected([[1.5, 0.5], [4.0], [1.1, 0.6, 1.25]], sequence_delta=delta)
    assert found.is_kept.tolist() == [bool(bit) for bit in kept]


def test_only_samples_of_negative_advantage_are_dropped_as_off_policy():
    """The first sample diverged by .458; with a positive advantage it stays."""
    assert corrected(advantages=[1.0, 1.0, 1.0], sequence_delta=0.0).is_kept.all()
    assert corrected(advantages=[0.0, 0.0, 0.0], sequence_delta=0.0).is_kept.all()


def test_masked_tokens_may_hold_anything():
    mask = torch.tensor([True, False, True])
    old, rollout = torch.tensor([-1.0, math.nan, -2.0]), torch.tensor([-1.5, math.inf, -2.0])
    settings = CorrectionSettings(kind="tis", level="sequence_mean", high=3.0, sequence_delta=0.1)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    found = importance_correction(settings, old, rollout, mask, bounds, log_probs=old, advantages=torch.ones(3))
    # (0.5 + 0) / 2 over the two live tokens; float32 rounding.
    torch.testing.assert_close(found.weights, torch.tensor([math.exp(0.25), 0.0, math.exp(0.25)]))
    with pytest.raises(DataError, match="rollout_log_probs has unmasked values"):
        importance_correction(settings, torch.zeros(3), rollout, ~mask, bounds, log_probs=torch.zeros(3), advantages=torch.ones(3))


def test_an_exponent_is_bounded():
    """A sum over thousands of tokens overflows float32 beyond e^88; it is bounded to e^20 before the clamp."""
    long = torch.full((4000,), 0.1)
    bounds = torch.tensor([0, 4000], dtype=torch.int32)
    settings = CorrectionSettings(kind="tis", level="sequence_sum", high=1e9)
    found = importance_correction(settings, torch.zeros(4000), -long, torch.ones(4000, dtype=torch.bool), bounds)
    torch.testing.assert_close(found.weights, torch.full((4000,), math.exp(20)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "ticepop"}, "importance_correction='ticepop' is not one of none, tis, icepop, mask"),
        ({"kind": "tis", "level": "sample"}, "level='sample' is not one of token, sequence_mean, sequence_sum"),
        ({"kind": "tis", "high": -1.0}, "importance_correction_high=-1.0 must be a finite number at or above 0"),
        ({"kind": "tis", "high": math.inf}, "high=inf must be a finite number"),
        ({"kind": "icepop", "low": "a"}, "low='a' must be a finite number"),
        ({"kind": "icepop", "low": 3.0, "high": 2.0}, "low=3 is above importance_correction_high=2"),
        ({"kind": "tis", "high": 0.0}, "high=0 leaves no token a weight"),
        ({"kind": "mask", "low": 0.0, "high": 0.2}, r"bounds \[0, 0.2\] do not hold 1.*not distances from 1"),
        ({"kind": "mask"}, "mask at level token needs --importance-correction-low and --importance-correction-high"),
        ({"kind": "icepop", "level": "sequence_mean", "low": 0.9}, "needs --importance-correction-high: recipes do not agree"),
        ({"kind": "tis", "level": "sequence_sum"}, "needs --importance-correction-high"),
        ({"high": 2.0}, "importance_correction_high=2.0 has no effect without a correction"),
        ({"level": "sequence_sum"}, "importance_correction_level=sequence_sum has no effect without a correction"),
        ({"sequence_delta": -0.1}, "off_policy_sequence_delta=-0.1 must be a finite number at or above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        corrected(**settings)
