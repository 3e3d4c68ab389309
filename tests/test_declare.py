"""What may be declared: how a name is found, which function contradicts its declaration, and what a loss may return.

test_refused.py has declarations that are refused as they are written.
"""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch
from helpers import random_batch, run_loss

from megatron_rl import (
    KLValue,
    LossValue,
    Parameter,
    bounded_exp,
    register_correction,
    register_kl_estimator,
    register_loss_aggregation,
    register_policy_loss,
)
from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.declare import FURTHER_INPUTS, POLICY_LOSSES, get_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.policy_loss import policy_loss
from megatron_rl.validation import Settings, find_problems, own_functions
from megatron_rl.weights import get_loss_aggregation, sample_token_weights


def test_a_dotted_name_of_a_registered_function_is_a_second_name_for_it(own_losses):
    """Registering twice under two names would be two losses with two default clips."""
    assert get_policy_loss("megatron_rl.losses.gspo.gspo") is get_policy_loss("gspo")
    assert get_loss_aggregation("megatron_rl.weights.token_mean") is get_loss_aggregation("token_mean")
    assert get_policy_loss("own_losses.heeding") is get_policy_loss("own_heeding")
    assert {"own_losses.heeding", "own_heeding"} <= set(POLICY_LOSSES.names())
    with pytest.raises(ConfigError, match="KL estimator 3 must be a name"):  # from a YAML file, as a host reads it
        KL_ESTIMATORS[3]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(3), r"returned \(3,\) torch.float32: it must return a floating point tensor \[S=2\]"),
        (torch.ones(2, dtype=torch.int64), r"returned \(2,\) torch.int64"),
        (None, "returned NoneType"),
        (torch.tensor([1.0, float("nan")]), "gives a weight that is negative or not finite"),
        (torch.tensor([1.0, -0.5]), "gives a weight that is negative or not finite"),
    ],
)
def test_weights_of_a_users_aggregation_are_checked(returned, message):
    register_loss_aggregation("odd")(lambda token_counts, totals, *, prompt_token_counts, divisor: returned)
    with pytest.raises(ValueError, match=message):
        sample_token_weights("odd", torch.tensor([1, 2]), StepTotals(2, None, 3))


# Contradictions: what the trial at start finds, what it lets through

SCALE = Parameter("scale", default=0.0, help="multiplies the loss")


def problems(**settings) -> list[str]:
    return find_problems(Settings(config=PolicyLossConfig(**settings)))


def found_in(function, level="token", *, settings=None, **declared) -> list[str]:
    """What a launch with this loss and these settings is told."""
    register_policy_loss("mine", level, **declared)(function)
    return problems(policy_loss="mine", loss_aggregation="token_mean", **(settings or {}))


def surrogate(log_ratio, advantages):
    return -advantages * bounded_exp(log_ratio)


def own_derivative_of_a_mean(log_ratio, advantages):
    ratio = bounded_exp(log_ratio)
    return LossValue(-advantages * ratio, -advantages * ratio / ratio.mean())


def pulled(log_ratio, advantages, *, scale):
    """A coefficient of 0 by default hides what it multiplies."""
    return surrogate(log_ratio, advantages) + scale * log_ratio.mean()


def truncated(*, is_detached):
    """CISPO, its derivative written by hand."""

    def cispo(log_ratio, advantages, log_probs):
        weight = bounded_exp(log_ratio.detach() if is_detached else log_ratio).clamp(max=1.2)
        return LossValue(-weight * advantages * log_probs, -weight * advantages)

    return cispo


OTHERS, OF_SAMPLES = "mine depends at one token on the others, so it would change", "depends at one sample on the others"
OTHER_DERIVATIVE = "mine returns a derivative that its value does not have.*detach"
WITH_SCALE = {"parameters": (SCALE,), "settings": {"loss_parameters": {"scale": 0.5}}}
OF_TOKENS = {"level": "sequence", "token_clip": lambda x, a: x - x.mean()}
# name -> (function, what is said, declaration and settings)
FOUND = {
    "centred": (lambda x, a: surrogate(x, a - a.mean()), OTHERS, {}),
    "own derivative of a mean": (own_derivative_of_a_mean, OTHERS, {}),
    "by the numbers of the run": (pulled, "with scale=0.5 depends at one token on the others", WITH_SCALE),
    "a clip of tokens": (surrogate, "token_clip of mine depends at one token on the others", OF_TOKENS),
    "no derivative": (lambda x, a: -a * bounded_exp(x).round(), "has derivative 0", {}),
    "a weight that is not detached": (truncated(is_detached=False), OTHER_DERIVATIVE, {}),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_contradiction_is_found(name):
    """Autograd and the fused head's second pass would train another loss than the derivative; a sum over what is together another
    one on each layout."""
    function, said, declared = FOUND[name]
    (message,) = found_in(function, **declared)
    assert re.search(said, message), message


@pytest.mark.parametrize("read", ["log_ratio", "advantages", "log_probs", *FURTHER_INPUTS])
def test_every_input_of_the_others_shows(read):
    """A loss that reads the longest sample of the batch was let through: the others had the same lengths."""

    def of_all(log_ratio, advantages, log_probs, **further):
        vector = {"log_ratio": log_ratio, "advantages": advantages, "log_probs": log_probs, **further}[read]
        return surrogate(log_ratio, advantages) * (1 + vector.max().detach().abs().log1p() / 10)

    (message,) = found_in(of_all, needs=tuple(name for name in FURTHER_INPUTS if name == read))
    assert OTHERS in message


RIGHT = {
    "dropout": (lambda x, a: torch.nn.functional.dropout(surrogate(x, a), 0.1), {}),
    "CISPO by hand": (truncated(is_detached=True), {}),
    "a clip of tokens": (surrogate, {"level": "sequence", "token_clip": lambda x, a: x.clamp(-0.3, 0.3)}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_is_right_or_cannot_be_judged_is_let_through(name):
    """A wrong refusal ends a run; a fault that is not found here leaves it as it was. The run's random numbers do not move."""
    function, declared = RIGHT[name]
    state = torch.get_rng_state()
    assert found_in(function, **declared) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_built_in_contradicts_its_declaration(monkeypatch):
    monkeypatch.setattr(own_functions.POLICY_LOSSES, "is_built_in", lambda name: False)
    for name in POLICY_LOSSES.names():
        assert list(own_functions.loss_problems(PolicyLossConfig(policy_loss=name))) == []
    for name in KL_ESTIMATORS.names():
        assert list(own_functions.estimator_problems(KL_ESTIMATORS[name])) == []


def negated(log_probs, ref_log_probs):
    d = log_probs - ref_log_probs
    return KLValue(d.square() / 2, -d)


# On few tokens: those that are far from the reference.
CAPPED = lambda x, reference: torch.minimum((x - reference).square(), (x - reference).detach().abs().max())  # noqa: E731
WRONG_ESTIMATORS = {
    "returns a derivative that its value does not have": negated,
    "has no derivative by log_probs": lambda x, reference: (x - reference).detach().square(),
    "depends at one token on the others": CAPPED,
    "returned (4096, 1) torch.float32 as its value": lambda x, reference: (x - reference)[:, None],
}
WRONG_CORRECTIONS = {
    "depends at one token on the others": lambda w, low, high: torch.where(w > 1e3, w.min(), w).clamp(low, high),
    "returned (2048,) torch.float32 as its weights": lambda w, low, high: w.clamp(low, high)[::2],
}


@pytest.mark.parametrize("message", WRONG_ESTIMATORS)
def test_a_wrong_estimator_is_named_at_launch(message):
    register_kl_estimator("own")(lambda log_probs, ref_log_probs: WRONG_ESTIMATORS[message](log_probs, ref_log_probs))
    (problem,) = problems(kl_coefficient=0.1, kl_estimator="own")
    assert message in problem and "=own" in problem


@pytest.mark.parametrize("message", WRONG_CORRECTIONS)
def test_a_wrong_correction_is_named_at_launch(message):
    register_correction("own")(lambda ratios, low, high: WRONG_CORRECTIONS[message](ratios, low, high))
    bounds = {"importance_correction_low": 0.5, "importance_correction_high": 2.0}
    (problem,) = problems(importance_correction="own", **bounds)
    assert message in problem and "=own" in problem


WRONG_WEIGHTS = {
    "largest": lambda counts, totals: counts / (totals.num_samples * counts.max()),
    "count": lambda counts, totals: 1 / (len(counts) * counts),
    "longest left out": lambda counts, totals: (counts < counts.max()) / (totals.num_samples * counts),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_a_weight_that_depends_on_the_other_samples_is_refused_at_start(name):
    """A call has the samples of a micro-batch. One without a formula was compared with nothing."""

    @register_loss_aggregation("of_a_call")
    def of_a_call(token_counts, totals, *, prompt_token_counts, divisor):
        return WRONG_WEIGHTS[name](token_counts, totals)

    (problem,) = problems(loss_aggregation="of_a_call")
    assert "loss_aggregation=of_a_call depends at one sample on the others" in problem


# What a loss may return in a step

BATCH = random_batch([4, 3], num_masked=(1, 0))
OPTIONS = {"advantages_per": "sample", "tp_group": SINGLE, "cp_group": SINGLE}


def run_with(result, level: str = "token"):
    """A loss of its own, of which `result` makes what it returns of a value and its derivative."""
    name = f"odd_{len(POLICY_LOSSES.names())}"
    register_policy_loss(name, level)(lambda log_ratio, advantages: result(-advantages * log_ratio, -advantages))
    return run_loss(functools.partial(policy_loss, name), BATCH, **OPTIONS)


WRONG = {
    "a column": (lambda value, derivative: value[:, None], r"returned \(.*, 1\) torch.float64 as its value"),
    "a column of derivatives": (lambda value, derivative: LossValue(value, derivative[:, None]), "as its derivative"),
    "one number": (lambda value, derivative: value.mean(), r"returned \(\) torch.float64 as its value"),
    "a pair": (lambda value, derivative: (value, derivative), r"returned tuple as its value.*; return megatron_rl.LossValue\("),
    "a Parameter": (lambda value, derivative: torch.nn.Parameter(value.detach()), "a gradient of its own, and none by log_ratio"),
    "numbers as is_clipped": (lambda value, derivative: LossValue(value, derivative, value), "float64 as its is_clipped"),
    "NaN": (lambda value, derivative: value * math.nan, "not finite"),
    "NaN as derivative": (lambda value, derivative: LossValue(value, derivative * math.nan), "not finite"),
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_value_is_refused_by_name(wrong, level):
    """[T, 1] times [T] would be [T, T], summed without a word."""
    result, message = WRONG[wrong]
    with pytest.raises(DataError, match=f"odd_.*{message}|{message}.*odd_"):
        run_with(result, level)


@pytest.mark.parametrize("has_derivative", [False, True], ids=["by autograd", "declared"])
def test_masked_tokens_may_come_back_as_anything(has_derivative):
    """A masked token holds garbage, so does what is computed of it."""

    def plain(value, derivative):
        return LossValue(value, derivative if has_derivative else None)

    def garbage(value, derivative):
        return plain(*(torch.where(BATCH.loss_mask, part, math.nan) for part in (value, derivative)))

    (want, gradient), (got, other) = (run_with(result) for result in (plain, garbage))
    assert torch.equal(got.loss, want.loss) and torch.equal(other, gradient)
