"""Whether a loss of a user's own contradicts its declaration: what the trial finds, what it lets through, what it costs."""

from __future__ import annotations

import math
import re

import pytest
import torch

from megatron_rl import LossValue, Parameter, bounded_exp, register_policy_loss
from megatron_rl.config import PolicyLossConfig
from megatron_rl.declare import FURTHER_INPUTS, policy_loss_names
from megatron_rl.validation import Settings, find_problems, own_functions

SCALE = Parameter("scale", default=0.0, help="multiplies the loss")
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


ON_OTHERS = {
    "centred": ("token", lambda x, a: surrogate(x, a - a.mean())),
    "centred samples": ("sequence", lambda x, a: surrogate(x, a - a.mean())),
    "count": ("token", lambda x, a: surrogate(x, a) / len(a)),
    "before": ("token", lambda x, a: surrogate(x, a) + 1e-3 * x.cumsum(0)),
    "own derivative": ("token", own_derivative_of_a_mean),
    "below 0": ("token", mean_below_zero),
}


@pytest.mark.parametrize("name", ON_OTHERS)
def test_an_element_that_depends_on_the_others_is_found(name):
    level, function = ON_OTHERS[name]
    (message,) = found_in(function, level)
    element = "token" if level == "token" else "sample"
    assert f"policy_loss=mine depends at one {element} on the others, so it would change with the layout" in message


@pytest.mark.parametrize("read", ["log_ratio", "advantages", "log_probs", *FURTHER_INPUTS])
def test_every_input_of_the_others_shows(read):
    """A loss that reads the longest sample of the batch was let through: the others had the same lengths."""

    def of_all(log_ratio, advantages, log_probs, **further):
        vector = {"log_ratio": log_ratio, "advantages": advantages, "log_probs": log_probs, **further}[read]
        return surrogate(log_ratio, advantages) * (1 + vector.max().detach().abs().log1p() / 10)

    (message,) = found_in(of_all, needs=tuple(name for name in FURTHER_INPUTS if name == read))
    assert "depends at one token on the others" in message


def test_a_clip_that_is_narrower_by_the_longest_sample_shows():
    """It acts on few elements alone: those on one side of the clip."""

    def narrowed(log_ratio, advantages, *, token_counts, clip_ratio_low, clip_ratio_high):
        high = clip_ratio_high * (1 - token_counts / token_counts.max() / 2)
        ratio = bounded_exp(log_ratio)
        clipped = torch.minimum(ratio.clamp(min=1 - clip_ratio_low), 1 + high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    (message,) = found_in(narrowed, "sequence", needs=("token_counts",), clip_ratios=(3e-4, 4e-4))
    assert "depends at one sample on the others" in message


def test_a_loss_that_is_not_finite_everywhere_is_found():
    """It would end the run at the first log-ratio beyond its radius. No other contradiction is told of it."""

    def barrier(log_ratio, advantages, *, radius):
        return surrogate(log_ratio, advantages) - 0.1 * torch.log(1 - (log_ratio / radius) ** 2)

    (message,) = found_in(barrier, parameters=(Parameter("radius", default=0.2, help="of the barrier"),))
    found = re.search(r"policy_loss=mine with radius=0.2 is not finite for (\d+) of 4096 probes", message)
    # Sizes are drawn evenly from 1e-5 to 10 in powers of 10; a 16th is 0, and an 8th above 20.
    assert int(found[1]) == pytest.approx(4096 / 16 * (13 * math.log10(10 / 0.2) / 6 + 2), rel=0.1)


def test_a_loss_that_is_not_finite_at_advantage_0_is_found():
    (message,) = found_in(lambda log_ratio, advantages: surrogate(log_ratio, advantages) / advantages)
    assert "not finite for 512 of 4096" in message


def test_the_numbers_of_the_run_count():
    """A coefficient of 0 by default hides what it multiplies."""

    def pulled(log_ratio, advantages, *, scale):
        return surrogate(log_ratio, advantages) + scale * log_ratio.mean()

    assert found_in(pulled, parameters=(SCALE,)) == ()
    (message,) = found_in(pulled, settings={"loss_parameters": {"scale": 0.5}}, parameters=(SCALE,))
    assert "with scale=0.5 depends at one token on the others" in message


def test_the_clip_of_the_run_counts():
    def clipped(log_ratio, advantages, *, clip_ratio_low, clip_ratio_high):
        whole = log_ratio.mean() if clip_ratio_high > 0.5 else 0.0
        return -advantages * bounded_exp(log_ratio).clamp(1 - clip_ratio_low, 1 + clip_ratio_high) + whole

    assert found_in(clipped, clip_ratios=(0.2, 0.2)) == ()
    (message,) = found_in(clipped, clip_ratios=(0.2, 0.2), settings={"clip_ratio_high": 0.9})
    assert "mine with clip_ratio_low=0.2, clip_ratio_high=0.9 depends" in message


def test_a_value_without_a_derivative_is_found():
    (message,) = found_in(lambda log_ratio, advantages: -advantages * bounded_exp(log_ratio).round())
    assert "has derivative 0" in message


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


OTHER_DERIVATIVES = {
    "the other sign": lambda x, a: LossValue(surrogate(x, a), -surrogate(x, a) * (x.abs() <= 20)),
    "a weight that is not detached": truncated(is_detached=False),
    "the other sign on one side": aspo,
    "beyond the bound": clipped_beyond,
}


@pytest.mark.parametrize("name", OTHER_DERIVATIVES)
def test_a_derivative_that_the_value_does_not_have_is_found(name):
    """Autograd and the fused head's second pass would train another loss."""
    (message,) = found_in(OTHER_DERIVATIVES[name])
    assert "returns a derivative that its value does not have" in message and "detach" in message


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
    "large advantages alone": lambda x, a: surrogate(x, a) * (a.abs() > 50),
    "ratios from 1.15 to 1.25": lambda x, a: surrogate(x, a) * ((x > math.log(1.15)) & (x < math.log(1.25))),
    "a ratio of exactly 1": lambda x, a: -a * bounded_exp(x).clamp(1.0, 1.0),
    "dropout": lambda x, a: torch.nn.functional.dropout(surrogate(x, a), 0.1),
    "a generator of its own": lambda x, a: surrogate(x, a) * (1 + torch.rand(x.shape, generator=OWN_NUMBERS)),
    "a state": Counting(),
    "CISPO by hand": truncated(is_detached=True),
    "bfloat16": in_bfloat16,
    "apart by sign": apart_by_sign,
    "no bound": lambda x, a: -a * x.exp().square(),
    "switched off": lambda x, a: 0.0 * surrogate(x, a),  # a KL term may be what trains
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_is_right_or_cannot_be_judged_is_let_through(name):
    """A wrong refusal ends a run; a fault that is not found here leaves it as it was."""
    assert found_in(RIGHT[name]) == ()


def centred_clip(log_ratio, advantages):
    return log_ratio - log_ratio.mean()


def test_a_clip_of_tokens_that_depends_on_the_others_is_found():
    (message,) = found_in(surrogate, "sequence", token_clip=centred_clip)
    assert "token_clip of mine depends at one token on the others" in message
    assert found_in(surrogate, "sequence", token_clip=lambda x, a: x.clamp(-0.3, 0.3)) == ()


NO_RESULTS = {
    "a scalar": ("token", lambda x, a: surrogate(x, a).mean(), "one number for each of its inputs"),
    "a pair": ("token", lambda x, a: (surrogate(x, a), {}), "returned tuple as its value"),
    "an error": ("token", lambda x, a: surrogate(x, a) + torch.ones(5), "cannot be computed: RuntimeError: The size of tensor a"),
}


@pytest.mark.parametrize("name", NO_RESULTS)
def test_what_cannot_be_a_result_is_told_at_start(name):
    level, function, said = NO_RESULTS[name]
    (message,) = found_in(function, level)
    assert message.startswith("policy_loss=mine cannot be computed: ") and said in message


@pytest.mark.parametrize("name", policy_loss_names())
def test_no_built_in_loss_contradicts_its_declaration(name, monkeypatch):
    monkeypatch.setattr(own_functions.POLICY_LOSSES, "is_built_in", lambda name: False)
    assert list(own_functions.loss_problems(PolicyLossConfig(policy_loss=name))) == []


def test_the_run_s_random_numbers_are_as_if_nothing_was_tried():
    state = torch.get_rng_state()
    found_in(RIGHT["dropout"])
    assert torch.equal(torch.get_rng_state(), state)


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
