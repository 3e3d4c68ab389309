"""Whether a function of a user's own contradicts its declaration: what the trial finds, what it lets through, what it costs."""

from __future__ import annotations

import math
import re

import pytest
import torch

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
from megatron_rl.declare import FURTHER_INPUTS, policy_loss_names
from megatron_rl.losses.corrections import CorrectionValue
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.validation import Settings, find_problems, own_functions

SCALE = Parameter("scale", default=0.0, help="multiplies the loss")
RADIUS = Parameter("radius", default=0.2, help="of the barrier")
OWN_NUMBERS = torch.Generator().manual_seed(3)


def found_in(function, level="token", *, settings=None, **declared) -> tuple[str, ...]:
    """What a launch with this loss and these settings is told."""
    register_policy_loss("mine", level, **declared)(function)
    config = PolicyLossConfig(policy_loss="mine", loss_aggregation="token_mean", **(settings or {}))
    return tuple(find_problems(Settings(config=config)))


def surrogate(log_ratio, advantages):
    return -advantages * bounded_exp(log_ratio)


def own_derivative_of_a_mean(log_ratio, advantages):
    ratio = bounded_exp(log_ratio)
    return LossValue(-advantages * ratio, -advantages * ratio / ratio.mean())


def mean_below_zero(log_ratio, advantages):
    ratio = bounded_exp(log_ratio)
    return torch.where(advantages > 0, -advantages * ratio, -advantages * ratio / ratio.detach().mean())


def narrowed_by_the_longest(log_ratio, advantages, *, token_counts, clip_ratio_low, clip_ratio_high):
    """It acts on few elements alone: those on one side of the clip."""
    high = clip_ratio_high * (1 - token_counts / token_counts.max() / 2)
    ratio = bounded_exp(log_ratio)
    clipped = torch.minimum(ratio.clamp(min=1 - clip_ratio_low), 1 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def pulled(log_ratio, advantages, *, scale):
    """A coefficient of 0 by default hides what it multiplies."""
    return surrogate(log_ratio, advantages) + scale * log_ratio.mean()


def centred_when_wide(log_ratio, advantages, *, clip_ratio_low, clip_ratio_high):
    whole = log_ratio.mean() if clip_ratio_high > 0.5 else 0.0
    return -advantages * bounded_exp(log_ratio).clamp(1 - clip_ratio_low, 1 + clip_ratio_high) + whole


def aspo(log_ratio, advantages):
    """Its derivative has the other sign for one sign of the advantage."""
    weight = torch.where(advantages > 0, bounded_exp(-log_ratio), bounded_exp(log_ratio))
    return LossValue(-weight * advantages, -weight * advantages * (log_ratio.abs() <= 20))


def truncated(*, is_detached):
    """CISPO, its derivative written by hand."""

    def cispo(log_ratio, advantages, log_probs):
        weight = bounded_exp(log_ratio.detach() if is_detached else log_ratio).clamp(max=1.2)
        return LossValue(-weight * advantages * log_probs, -weight * advantages)

    return cispo


def clipped_beyond(log_ratio, advantages, log_probs):
    """Of a loss that takes log_probs the package cannot tell a derivative beyond the bound from one by them. PPO's clip leaves it
    a quarter of the places: A < 0 and a ratio above 1."""
    unclipped, bound = surrogate(log_ratio, advantages), -advantages * bounded_exp(log_ratio).clamp(0.8, 1.2)
    return LossValue(torch.maximum(unclipped, bound), torch.where(unclipped >= bound, unclipped, 0.0))


OTHERS, OF_SAMPLES = "mine depends at one token on the others, so it would change", "depends at one sample on the others"
OTHER_DERIVATIVE = "mine returns a derivative that its value does not have.*detach"
WITH_COUNTS = {"level": "sequence", "needs": ("token_counts",), "clip_ratios": (3e-4, 4e-4)}
WIDE = {"clip_ratios": (0.2, 0.2), "settings": {"clip_ratio_high": 0.9}}
# name -> (function, what is said, declaration and settings)
FOUND = {
    "centred": (lambda x, a: surrogate(x, a - a.mean()), OTHERS, {}),
    "centred samples": (lambda x, a: surrogate(x, a - a.mean()), OF_SAMPLES, {"level": "sequence"}),
    "count": (lambda x, a: surrogate(x, a) / len(a), OTHERS, {}),
    "before": (lambda x, a: surrogate(x, a) + 1e-3 * x.cumsum(0), OTHERS, {}),
    "own derivative of a mean": (own_derivative_of_a_mean, OTHERS, {}),
    "below 0": (mean_below_zero, OTHERS, {}),
    "the longest sample": (narrowed_by_the_longest, OF_SAMPLES, WITH_COUNTS),
    "by the numbers of the run": (
        *(pulled, "with scale=0.5 depends at one token on the others"),
        {"parameters": (SCALE,), "settings": {"loss_parameters": {"scale": 0.5}}},
    ),
    "by the clip of the run": (centred_when_wide, "mine with clip_ratio_low=0.2, clip_ratio_high=0.9 depends", WIDE),
    "a clip of tokens": (
        *(surrogate, "token_clip of mine depends at one token on the others"),
        {"level": "sequence", "token_clip": lambda x, a: x - x.mean()},
    ),
    "not finite at advantage 0": (lambda x, a: surrogate(x, a) / a, "not finite for 512 of 4096", {}),
    "no derivative": (lambda x, a: -a * bounded_exp(x).round(), "has derivative 0", {}),
    "the other sign": (lambda x, a: LossValue(surrogate(x, a), -surrogate(x, a) * (x.abs() <= 20)), OTHER_DERIVATIVE, {}),
    "a weight that is not detached": (truncated(is_detached=False), OTHER_DERIVATIVE, {}),
    "the other sign on one side": (aspo, OTHER_DERIVATIVE, {}),
    "beyond the bound": (clipped_beyond, OTHER_DERIVATIVE, {}),
    "a scalar": (lambda x, a: surrogate(x, a).mean(), "^policy_loss=mine cannot be computed: .*one number for each", {}),
    "a pair": (lambda x, a: (surrogate(x, a), {}), "^policy_loss=mine cannot be computed: .*returned tuple as its value", {}),
    "an error": (lambda x, a: surrogate(x, a) + torch.ones(5), "^policy_loss=mine cannot be computed: RuntimeError: The size", {}),
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


def test_a_loss_that_is_not_finite_everywhere_is_found():
    """It would end the run at the first log-ratio beyond its radius. No other contradiction is told of it."""

    def barrier(log_ratio, advantages, *, radius):
        return surrogate(log_ratio, advantages) - 0.1 * torch.log(1 - (log_ratio / radius) ** 2)

    (message,) = found_in(barrier, parameters=(RADIUS,))
    found = re.search(r"policy_loss=mine with radius=0.2 is not finite for (\d+) of 4096 probes", message)
    # Sizes are drawn evenly from 1e-5 to 10 in powers of 10; a 16th is 0, and an 8th above 20.
    assert int(found[1]) == pytest.approx(4096 / 16 * (13 * math.log10(10 / 0.2) / 6 + 2), rel=0.1)


class Counting:
    """A loss with a state: its first calls are smaller."""

    def __init__(self):
        self.calls = 0

    def __call__(self, log_ratio, advantages):
        self.calls += 1
        return surrogate(log_ratio, advantages) * min(1.0, self.calls / 100)


def in_bfloat16(log_ratio, advantages):
    x = log_ratio.bfloat16()
    return (-advantages.bfloat16() * (x.exp() * x.tanh() - x.sigmoid())).to(log_ratio.dtype)


def apart_by_sign(log_ratio, advantages):
    """sigmoid rounds in another way in the rest of a loop than in its vectors; which elements are there depends on the others."""
    value = torch.zeros_like(log_ratio)
    for is_here in (advantages > 0, advantages < 0):
        x = log_ratio[is_here]
        value[is_here] = -advantages[is_here] * (torch.sigmoid(x) - 0.5 - x / 4) / 1e-3
    return value


RIGHT = {
    "large advantages alone": (lambda x, a: surrogate(x, a) * (a.abs() > 50), {}),
    "ratios from 1.15 to 1.25": (lambda x, a: surrogate(x, a) * ((x > math.log(1.15)) & (x < math.log(1.25))), {}),
    "a ratio of exactly 1": (lambda x, a: -a * bounded_exp(x).clamp(1.0, 1.0), {}),
    "dropout": (lambda x, a: torch.nn.functional.dropout(surrogate(x, a), 0.1), {}),
    "a generator of its own": (lambda x, a: surrogate(x, a) * (1 + torch.rand(x.shape, generator=OWN_NUMBERS)), {}),
    "a state": (Counting(), {}),
    "CISPO by hand": (truncated(is_detached=True), {}),
    "bfloat16": (in_bfloat16, {}),
    "apart by sign": (apart_by_sign, {}),
    "no bound": (lambda x, a: -a * x.exp().square(), {}),
    "switched off": (lambda x, a: 0.0 * surrogate(x, a), {}),  # a KL term may be what trains
    "a coefficient of 0": (pulled, {"parameters": (SCALE,)}),
    "a narrow clip": (centred_when_wide, {"clip_ratios": (0.2, 0.2)}),
    "a clip of tokens": (surrogate, {"level": "sequence", "token_clip": lambda x, a: x.clamp(-0.3, 0.3)}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_is_right_or_cannot_be_judged_is_let_through(name):
    """A wrong refusal ends a run; a fault that is not found here leaves it as it was. The run's random numbers do not move."""
    function, declared = RIGHT[name]
    state = torch.get_rng_state()
    assert found_in(function, **declared) == ()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", policy_loss_names())
def test_no_built_in_loss_contradicts_its_declaration(name, monkeypatch):
    monkeypatch.setattr(own_functions.POLICY_LOSSES, "is_built_in", lambda name: False)
    assert list(own_functions.loss_problems(PolicyLossConfig(policy_loss=name))) == []


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.device("meta")])
def test_it_is_tried_on_the_cpu_in_every_context(context):
    """Where a model is built on another device, what the function makes would be there, and its inputs not."""

    def shifted(log_ratio, advantages):
        return surrogate(log_ratio, advantages - advantages.mean()) + torch.zeros(len(advantages))

    with context():
        (message,) = found_in(shifted)
    assert "on the others" in message


def test_it_is_tried_in_float32_under_every_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        (message,) = found_in(lambda log_ratio, advantages: surrogate(log_ratio, advantages - advantages.mean()).float())
    finally:
        torch.set_default_dtype(before)
    assert "on the others" in message


# Estimators, corrections and aggregations


def negated(log_probs, ref_log_probs):
    d = log_probs - ref_log_probs
    return KLValue(d.square() / 2, -d)


# On few tokens: those that are far from the reference.
CAPPED = lambda x, reference: torch.minimum((x - reference).square(), (x - reference).detach().abs().max())  # noqa: E731
WRONG_ESTIMATORS = {
    "returns a derivative that its value does not have": negated,
    "has no derivative by log_probs": lambda x, reference: (x - reference).detach().square(),
    "has derivative 0 everywhere": lambda x, reference: KLValue(x - reference, torch.zeros_like(x)),
    "depends at one token on the others": CAPPED,
    "is not finite for": lambda x, reference: (5 * (reference - x)).exp(),
    "returned (4096, 1) torch.float32 as its value": lambda x, reference: (x - reference)[:, None],
    "writes into its inputs": lambda x, reference: x.sub_(reference).square(),
}
WRONG_CORRECTIONS = {
    "is not finite": lambda w, low, high: 1 / (w - w),
    "depends at one token on the others": lambda w, low, high: torch.where(w > 1e3, w.min(), w).clamp(low, high),
    "returned (4096,) torch.int32 as is_kept: it must be (4096,) torch.bool": lambda w, low, high: CorrectionValue(
        w, (w <= high).int()
    ),
    "returned (2048,) torch.float32 as its weights": lambda w, low, high: w.clamp(low, high)[::2],
}
WRONG_WEIGHTS = {
    "largest": lambda counts, totals: counts / (totals.num_samples * counts.max()),
    "sum": lambda counts, totals: counts / (totals.num_samples * counts.sum()),
    "smallest": lambda counts, totals: counts.min() / (totals.num_samples * counts),
    "count": lambda counts, totals: 1 / (len(counts) * counts),
    "longest left out": lambda counts, totals: (counts < counts.max()) / (totals.num_samples * counts),
}


def problems(**settings) -> list[str]:
    return find_problems(Settings(config=PolicyLossConfig(**settings)))


@pytest.mark.parametrize(
    ("kind", "message"), [("estimator", message) for message in WRONG_ESTIMATORS] + [("correction", m) for m in WRONG_CORRECTIONS]
)
def test_a_wrong_term_is_named_at_launch(kind, message):
    if kind == "estimator":
        function, settings = WRONG_ESTIMATORS[message], {"kl_coefficient": 0.1, "kl_estimator": "own"}
        register_kl_estimator("own")(lambda log_probs, ref_log_probs: function(log_probs, ref_log_probs))
    else:
        function, settings = WRONG_CORRECTIONS[message], {"importance_correction": "own"}
        settings |= {"importance_correction_low": 0.5, "importance_correction_high": 2.0}
        register_correction("own")(lambda ratios, low, high: function(ratios, low, high))
    (problem,) = problems(**settings)
    assert message in problem and "=own" in problem


def test_a_gradient_of_another_value_may_be_declared():
    register_kl_estimator("own", is_gradient_of_value=False)(negated)
    assert problems(kl_coefficient=0.1, kl_estimator="own") == []


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_no_built_in_estimator_contradicts_its_declaration(name):
    assert list(own_functions.estimator_problems(KL_ESTIMATORS[name])) == []


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_a_weight_that_depends_on_the_other_samples_is_refused_at_start(name):
    """A call has the samples of a micro-batch. One without a formula was compared with nothing."""

    @register_loss_aggregation("of_a_call")
    def of_a_call(token_counts, totals, *, prompt_token_counts, divisor):
        return WRONG_WEIGHTS[name](token_counts, totals)

    (problem,) = problems(loss_aggregation="of_a_call")
    assert "loss_aggregation=of_a_call depends at one sample on the others" in problem
