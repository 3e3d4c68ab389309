"""Whether an elementwise loss of a user's own contradicts its declaration: what is found, what is let through, what it costs."""

from __future__ import annotations

import math
import re

import pytest
import torch

from megatron_rl import LossValue, Parameter, bounded_exp, register_policy_loss
from megatron_rl.config import PolicyLossConfig
from megatron_rl.loss_hub import FURTHER_INPUTS, get_policy_loss, is_built_in, policy_loss_names
from megatron_rl.validation import Settings, config_warnings, find_problems
from megatron_rl.validation.own_loss import cautions, contradictions

SCALE = Parameter("scale", default=0.0, help="multiplies the loss")
IDLE = {"zero_advantage_has_no_gradient": True}
OWN_NUMBERS = torch.Generator().manual_seed(3)


def found_in(function, level="token", *, name="mine", settings=None, **declared) -> tuple[str, ...]:
    """What a launch with this loss and these settings is told."""
    register_policy_loss(name, level, **declared)(function)
    config = PolicyLossConfig(policy_loss=name, loss_aggregation="token_mean", **(settings or {}))
    return tuple(find_problems(Settings(config=config)))


def surrogate(log_ratio, advantages):
    return -advantages * bounded_exp(log_ratio)


def own_derivative_of_a_mean(log_ratio, advantages):
    ratio = bounded_exp(log_ratio)
    return LossValue(-advantages * ratio, -advantages * ratio / ratio.mean())


def mean_below_zero(log_ratio, advantages):
    ratio = bounded_exp(log_ratio)
    return torch.where(advantages > 0, -advantages * ratio, -advantages * ratio / ratio.detach().mean())


def over_groups(log_ratio, advantages):
    return surrogate(log_ratio, advantages - advantages.view(-1, 4).mean(1).repeat_interleave(4))


ON_OTHERS = {
    "whitened": lambda x, a: surrogate(x, (a - a.mean()) / (a.std() + 1e-6)),
    "centred": lambda x, a: surrogate(x, a - a.mean()),
    "largest": lambda x, a: surrogate(x, a / a.abs().max().clamp(min=1e-6)),
    "count": lambda x, a: surrogate(x, a) / len(a),
    "groups": over_groups,
    "before": lambda x, a: surrogate(x, a) + 1e-3 * x.cumsum(0),
    "own derivative": own_derivative_of_a_mean,
    "below 0": mean_below_zero,
}


@pytest.mark.parametrize("name", ON_OTHERS)
def test_an_element_that_depends_on_the_others_is_found(name):
    (message,) = found_in(ON_OTHERS[name])
    what = "derivative" if name == "own derivative" else "value"
    assert re.search(f"its {what} at one token depends on the others.*layout", message), message


def test_a_sample_that_depends_on_the_others_is_found():
    (message,) = found_in(ON_OTHERS["centred"], "sequence")
    assert "value at one sample depends on the others" in message


STATISTICS = {"max": torch.max, "min": torch.min, "mean": torch.mean, "sum": torch.sum, "any": lambda x: (x > 0).any().float()}
# Of these the sign is one alone.
ONE_SIGN = ("log_probs", *FURTHER_INPUTS)


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("read", ["log_ratio", "advantages", "log_probs", *FURTHER_INPUTS])
def test_every_input_of_the_others_shows(read, level, statistic):
    """A loss that reads the longest sample of the batch was let through: the others had the same lengths."""
    if statistic == "any" and read in ONE_SIGN:
        pytest.skip("it is the same of all")
    element = "token" if level == "token" else "sample"

    def of_all(log_ratio, advantages, log_probs, **further):
        vector = {"log_ratio": log_ratio, "advantages": advantages, "log_probs": log_probs, **further}[read]
        return surrogate(log_ratio, advantages) * (1 + STATISTICS[statistic](vector).detach().abs().log1p() / 10)

    (message,) = found_in(of_all, level, needs=tuple(name for name in FURTHER_INPUTS if name == read))
    assert f"its value at one {element} depends on the others" in message


@pytest.mark.parametrize("clip", [{}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}])
def test_a_clip_that_is_narrower_by_the_longest_sample_shows(clip):
    """It acts on few elements alone: those on one side of the clip."""

    def narrowed(log_ratio, advantages, *, token_counts, clip_ratio_low, clip_ratio_high):
        high = clip_ratio_high * (1 - token_counts / token_counts.max() / 2)
        ratio = bounded_exp(log_ratio)
        clipped = torch.minimum(ratio.clamp(min=1 - clip_ratio_low), 1 + high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    (message,) = found_in(narrowed, "sequence", needs=("token_counts",), clip_ratios=(0.2, 0.28), settings=clip)
    assert "its value at one sample depends on the others" in message


def test_the_longest_samples_left_out_shows():
    def without_longest(log_ratio, advantages, *, token_counts):
        return surrogate(log_ratio, advantages) * (token_counts < token_counts.max())

    (message,) = found_in(without_longest, "sequence", needs=("token_counts",))
    assert "its value at one sample depends on the others" in message


def barrier(log_ratio, advantages, *, radius):
    return -bounded_exp(log_ratio) * advantages - 0.1 * torch.log(1 - (log_ratio / radius) ** 2)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_loss_that_is_not_finite_everywhere_is_found(level):
    """It would end the run at the first log-ratio beyond its radius. No other contradiction is told of it."""
    radius = Parameter("radius", default=0.2, help="of the barrier")
    (message,) = found_in(barrier, level, parameters=(radius,))
    found = re.search(
        r"policy_loss=mine with radius=0.2 is not finite for (\d+) of 4096 .* smallest log-ratio (\S+) and advantage", message
    )
    # Sizes are drawn evenly from 1e-5 to 10 in powers of 10; a 16th is 0, and an 8th above 20.
    assert int(found[1]) == pytest.approx(4096 / 16 * (13 * math.log10(10 / 0.2) / 6 + 2), rel=0.1)
    assert 0.2 <= abs(float(found[2])) < 0.203
    assert f"a {'sample' if level == 'sequence' else 'token'} there would end the run" in message and "torch.where" in message


def test_the_numbers_of_the_run_count():
    """A coefficient of 0 by default hides what it multiplies."""

    def pulled(log_ratio, advantages, *, scale):
        return surrogate(log_ratio, advantages) + scale * log_ratio.square()

    declared = {"parameters": (SCALE,), **IDLE}
    assert found_in(pulled, **declared) == ()
    (message,) = found_in(pulled, settings={"loss_parameters": {"scale": 0.5}}, **declared)
    assert "with scale=0.5 declares zero_advantage_has_no_gradient, and has a gradient at advantage 0" in message


def test_the_clip_of_the_run_counts():
    def clipped(log_ratio, advantages, *, clip_ratio_low, clip_ratio_high):
        whole = log_ratio.mean() if clip_ratio_high > 0.5 else 0.0
        return -advantages * bounded_exp(log_ratio).clamp(1 - clip_ratio_low, 1 + clip_ratio_high) + whole

    assert found_in(clipped, clip_ratios=(0.2, 0.2)) == ()
    (message,) = found_in(clipped, clip_ratios=(0.2, 0.2), settings={"clip_ratio_high": 0.9})
    assert "mine with clip_ratio_low=0.2, clip_ratio_high=0.9 is declared elementwise" in message


def test_numbers_that_are_refused_are_not_tried():
    def scaled(log_ratio, advantages, *, scale):
        return scale * log_ratio.mean() * advantages

    (message,) = found_in(scaled, parameters=(SCALE,), settings={"loss_parameters": {"scale": math.nan}})
    assert "--scale: scale=nan must be" in message


def test_a_value_at_advantage_0_is_found():
    """The fused head leaves the row out, and its loss would be another number."""
    (message,) = found_in(lambda log_ratio, advantages: surrogate(log_ratio, advantages) + 1.0, **IDLE)
    assert "has a value at advantage 0" in message


def detached(log_ratio, advantages):
    return -advantages * bounded_exp(log_ratio.detach())


def rounded(log_ratio, advantages):
    return -advantages * bounded_exp(log_ratio).round()


@pytest.mark.parametrize("function", [detached, rounded, lambda log_ratio, advantages: -advantages])
def test_a_value_without_a_derivative_is_found(function):
    (message,) = found_in(function)
    assert "has derivative 0" in message


@pytest.mark.parametrize("factor", [-1.0, 0.5])
def test_a_derivative_that_is_a_multiple_is_found(factor):
    """The usual slip of a derivative by hand is its sign."""
    (message,) = found_in(lambda x, a: LossValue(surrogate(x, a), factor * surrogate(x, a) * (x.abs() <= 20)))
    assert f"returns {factor:g} times the derivative of its value" in message


def test_a_derivative_of_something_else_is_found():
    """CISPO by hand whose value is not detached: autograd and the fused head's second pass would train another loss. ASPO, whose
    derivative has the other sign for one sign of the advantage."""

    def aspo(log_ratio, advantages):
        weight = torch.where(advantages > 0, bounded_exp(-log_ratio), bounded_exp(log_ratio))
        return LossValue(-weight * advantages, -weight * advantages * (log_ratio.abs() <= 20))

    for name, function in (("one", truncated(is_detached=False)), ("other", aspo)):
        (message,) = found_in(function, name=name)
        assert "returns a derivative that its value does not have" in message and "detach" in message


def test_a_derivative_beyond_the_bound_that_the_value_does_not_have_is_found():
    """Of a loss that takes log_probs the package cannot tell it from a derivative by them. PPO's clip leaves it a quarter of the
    places: A < 0 and a ratio above 1."""

    def clipped(log_ratio, advantages, log_probs):
        unclipped, bound = surrogate(log_ratio, advantages), -advantages * bounded_exp(log_ratio).clamp(0.8, 1.2)
        return LossValue(torch.maximum(unclipped, bound), torch.where(unclipped >= bound, unclipped, 0.0))

    (message,) = found_in(clipped)
    assert "returns a derivative that its value does not have" in message
    assert "beyond a log-ratio of +-20 the derivative through it is 0" in message


class Counting:
    """A loss with a state: its first calls are smaller."""

    def __init__(self):
        self.calls = 0

    def __call__(self, log_ratio, advantages):
        self.calls += 1
        return surrogate(log_ratio, advantages) * min(1.0, self.calls / 100)


def truncated(*, is_detached):
    """CISPO, its derivative written by hand."""

    def cispo(log_ratio, advantages, log_probs):
        weight = bounded_exp(log_ratio.detach() if is_detached else log_ratio).clamp(max=1.2)
        return LossValue(-weight * advantages * log_probs, -weight * advantages)

    return cispo


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
    "large advantages alone": lambda x, a: surrogate(x, a) * (a.abs() > 50),
    "small advantages alone": lambda x, a: surrogate(x, a) * (a.abs() < 2e-3),
    "ratios from 1.15 to 1.25": lambda x, a: surrogate(x, a) * ((x > math.log(1.15)) & (x < math.log(1.25))),
    "a ratio of exactly 1": lambda x, a: -a * bounded_exp(x).clamp(1.0, 1.0),
    "ratios near 1": lambda x, a: -a * bounded_exp(x).clamp(1 - 3e-4, 1 + 4e-4),
    "dropout": lambda x, a: torch.nn.functional.dropout(surrogate(x, a), 0.1),
    "noise": lambda x, a: surrogate(x, a) * (1 + 0.01 * torch.rand_like(x)),
    "a generator of its own": lambda x, a: surrogate(x, a) * (1 + torch.rand(x.shape, generator=OWN_NUMBERS)),
    "a state": Counting(),
    "CISPO by hand": truncated(is_detached=True),
    "bfloat16": in_bfloat16,
    "apart by sign": apart_by_sign,
    "one length": lambda x, a: surrogate(x, a) * torch.ones(5),
    "root": lambda x, a: -a.abs().sqrt() * a.sign() * bounded_exp(x),
    "no bound": lambda x, a: -a * x.exp().square(),
}


def test_what_cannot_be_a_result_is_told_at_start():
    scalar = found_in(lambda x, a: surrogate(x, a).mean())
    assert "one number for each; the package weighs them and adds them up" in scalar[0] and len(scalar) == 1
    assert "returned tuple as its value" in found_in(lambda x, a: (surrogate(x, a), {"clipped": 0.0}), name="pair")[0]


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_loss_that_is_right_or_cannot_be_judged_is_let_through(name, level):
    """A wrong refusal ends a run; a fault that is not found here leaves it as it was."""
    assert found_in(RIGHT[name], level, **(IDLE if name == "CISPO by hand" else {})) == ()


def test_a_loss_that_is_switched_off_is_let_through():
    """Its KL term may be what trains."""

    def scaled(log_ratio, advantages, *, scale):
        return scale * surrogate(log_ratio, advantages)

    assert found_in(scaled, parameters=(SCALE,)) == ()


@pytest.mark.parametrize("name", [name for name in policy_loss_names() if is_built_in(name)])
def test_no_built_in_loss_contradicts_its_declaration(name):
    loss = get_policy_loss(name)
    assert contradictions(loss, loss.clip_ratios, loss.resolve_parameters({})) == ()


def test_a_loss_is_tried_a_few_times_a_launch():
    """Each trial calls the function with and without its derivative, twice, as a random result shows nothing."""
    calls = []

    def counted(log_ratio, advantages):
        calls.append(len(log_ratio))
        return surrogate(log_ratio, advantages)

    assert found_in(counted) == ()
    assert 0 < len(calls) < 10


def test_the_run_s_random_numbers_are_as_if_nothing_was_tried():
    state = torch.get_rng_state()
    found_in(RIGHT["noise"])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_it_is_tried_on_the_cpu_in_every_context(context):
    """Where a model is built on another device, what the function makes would be there, and its inputs not."""

    def shifted(log_ratio, advantages):
        return surrogate(log_ratio, advantages - advantages.mean()) + torch.zeros(len(advantages))

    with context():
        (message,) = found_in(shifted)
    assert "depends on the others" in message


def test_it_is_tried_in_float32_under_every_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        (message,) = found_in(lambda log_ratio, advantages: ON_OTHERS["centred"](log_ratio, advantages).float())
    finally:
        torch.set_default_dtype(before)
    assert "depends on the others" in message


def tokens_of(batch):
    return -batch.of_tokens(batch.sample_mean(batch.log_ratio)) * batch.advantages


ON_OTHER_SAMPLES = {
    "largest": lambda batch: tokens_of(batch) * (1 + batch.advantages.abs().max() / 100),
    "smallest": lambda batch: tokens_of(batch) * (1 + batch.log_ratio.min().detach() / 100),
    "longest": lambda batch: tokens_of(batch) * batch.of_tokens(batch.token_counts / batch.token_counts.max()).to(batch.log_ratio),
    "count": lambda batch: tokens_of(batch) / len(batch.token_counts),
    "tokens": lambda batch: tokens_of(batch) / batch.loss_mask.sum(),
    "centred": lambda batch: tokens_of(batch) - batch.log_ratio.mean(),
    "before": lambda batch: tokens_of(batch) + 1e-3 * batch.log_ratio.cumsum(0),
}


@pytest.mark.parametrize("name", ON_OTHER_SAMPLES)
def test_a_sample_of_a_batch_that_depends_on_the_other_samples_is_found(name):
    (message,) = found_in(ON_OTHER_SAMPLES[name], "batch")
    assert "policy_loss=mine has a value at one sample that depends on the other samples" in message
    assert "sample_sum and sample_mean" in message


OF_BATCHES = [
    pytest.param(lambda batch: tokens_of(batch).mean(), "returned () torch.float32 as its value: it must", id="a scalar"),
    pytest.param(lambda batch: batch.sample_sum(batch.log_ratio), "returned (91,)", id="a value of each sample"),
    pytest.param(lambda batch: tokens_of(batch).half(), "float16", id="another dtype"),
    pytest.param(lambda batch: float(tokens_of(batch).sum()), "float", id="a number"),
    pytest.param(tokens_of, None, id="a value of each token"),
    pytest.param(lambda batch: -batch.suffix_sum(batch.log_ratio, decay=0.9) * batch.advantages, None, id="ordered sums"),
    pytest.param(lambda batch: torch.nn.functional.dropout(tokens_of(batch) / len(batch.documents), 0.1), None, id="a random one"),
    pytest.param(lambda batch: tokens_of(batch).view(-1, 999), None, id="one that raises in this batch alone"),
]


@pytest.mark.parametrize(("function", "said"), OF_BATCHES)
def test_a_loss_of_batches_that_returns_no_value_a_token_is_found_at_start(function, said):
    found = found_in(function, "batch")
    assert len(found) == (said is not None) and all("'mine'" in text and said in text for text in found), found


@pytest.mark.parametrize("name", [name for name in policy_loss_names() if get_policy_loss(name).level == "batch"])
def test_the_losses_of_batches_of_the_package_contradict_nothing(name):
    loss = get_policy_loss(name)
    assert contradictions(loss, loss.clip_bounds(None, None), loss.resolve_parameters({})) == ()


def at_level(level, function):
    """A function of log_ratio, advantages and log_probs as a loss of this level."""
    if level == "batch":
        return lambda batch: function(batch.log_ratio, batch.advantages, batch.log_probs)
    return lambda log_ratio, advantages, log_probs: function(log_ratio, advantages, log_probs)


LEVELS = ("token", "sequence", "batch")


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_whose_minus_is_missing_is_found(level):
    """At ratio 1 it is trained away from the advantage. One that reads none, or turns later, is no such loss."""
    for name, away in {
        "minus": lambda x, a, p: 0.3 * torch.tanh(x / 0.3) * a,
        "swapped": lambda x, a, p: -torch.tanh(-x / 0.3) * a,
    }.items():
        (message,) = found_in(at_level(level, away), level, name=name)
        assert "makes likelier what has a negative advantage" in message
        assert "is the minus missing, or are old and new swapped in the ratio?" in message
    assert found_in(at_level(level, lambda x, a, p: bounded_exp(x)), level, name="without") == ()
    later = at_level(level, lambda x, a, p: torch.where(x == 0, surrogate(x, a), -surrogate(x, a)))
    assert found_in(later, level, name="later") == ()


def test_a_sample_s_mean_whose_minus_is_missing_is_found():
    """Of a mean a token's gradient is that of the whole sample."""
    (message,) = found_in(lambda batch: -tokens_of(batch), "batch")
    assert "is the minus missing" in message


def cispo_of(weigh):
    return lambda x, a, p: -weigh(x) * a * p


def warned_of(function, level="token", **declared) -> list[str]:
    register_policy_loss("mine", level, **declared)(function)
    return config_warnings(PolicyLossConfig(policy_loss="mine", loss_aggregation="token_mean"))


WEIGHTS = {
    "above": lambda x: bounded_exp(x).clamp(0, 1.28),
    "both sides": lambda x: bounded_exp(x).clamp(0.8, 1.28),
    "no clip": lambda x: x.exp(),
    "of the log-ratio": lambda x: x.clamp(-0.2, 0.2).exp(),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_weight_that_is_not_detached_is_told_at_start(weight, level):
    """By hand, at ratio 1: d(-rho A log pi) / d log pi = -A (1 + log pi), which turns its sign at pi = 1/e = 0.37."""
    function = at_level(level, cispo_of(WEIGHTS[weight]))
    assert warned_of(function, level) == [
        "policy_loss=mine at ratio 1 makes tokens of negative advantage likelier where their probability is under 0.37: is a "
        "weight not detached?"
    ]
    loss = get_policy_loss("mine")
    assert contradictions(loss, None, {}) == ()


FOLLOWING = {
    "detached": cispo_of(lambda x: bounded_exp(x).clamp(0, 1.28).detach()),
    "ratio": lambda x, a, p: surrogate(x, a),
    "probability": lambda x, a, p: -a * p.exp(),
    "focal": lambda x, a, p: -a * (1 - p.exp()).square() * p,
    "pulled": lambda x, a, p: surrogate(x, a) + (bounded_exp(x) - 1).square(),
    "entropy": lambda x, a, p: surrogate(x, a) + 0.5 * p * p.exp(),
    "without advantages": lambda x, a, p: p * p.exp(),
    "noise": lambda x, a, p: surrogate(x, a) * torch.randn_like(x),
    "scalar": lambda x, a, p: surrogate(x, a).mean(),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FOLLOWING)
def test_a_loss_that_follows_the_advantages_is_not_told(name, level):
    assert warned_of(at_level(level, FOLLOWING[name]), level) == []


def test_a_pull_to_the_reference_is_not_told():
    """Its sign at a token turns with the probability too, for one sign of the advantage."""

    def pulled(log_ratio, advantages, log_probs, *, ref_log_probs):
        return surrogate(log_ratio, advantages) + 0.5 * (log_probs - ref_log_probs - 1).square()

    assert warned_of(pulled, needs=("ref_log_probs",)) == []


@pytest.mark.parametrize("name", [name for name in policy_loss_names() if is_built_in(name)])
def test_no_built_in_loss_is_told(name):
    loss = get_policy_loss(name)
    assert cautions(loss, loss.clip_bounds(None, None), loss.resolve_parameters({})) == ()
