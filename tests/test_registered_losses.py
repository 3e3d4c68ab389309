"""What a registered policy loss returns is checked, with its name; what it is given cannot be overwritten."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import CLIP, random_batch, run_loss

from megatron_rl import linear_policy_loss, policy_loss
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import register_policy_loss
from megatron_rl.metrics import finalise_metrics

BATCH = random_batch([4, 3], num_masked=(1, 0))
HIDDEN_SIZE = 5
OPTIONS = {"advantages_per": "sample", "tp_group": SINGLE, "cp_group": SINGLE}


def as_function(result):
    """A registered loss of its own, whose (value, derivative) are changed by `result`."""

    def values(
        log_probs, old_log_probs, advantages, loss_mask, cu_seqlens, token_counts, *, clip_ratio_low, clip_ratio_high, cp_group
    ):
        return result(-advantages * log_probs, -advantages)

    return {"level": "token"}, values


def as_surrogate(level: str):
    """The same as a function of the log-ratio, at level "token" or "sequence"."""

    def make(result):
        def surrogate(log_ratio, advantages, *, clip_ratio_low, clip_ratio_high):
            return result(-advantages * log_ratio, -advantages)

        return {"level": level, "surrogate": surrogate}, lambda *args, clip_ratio_low, clip_ratio_high, cp_group: None

    return make


KINDS = {"function": as_function, "token surrogate": as_surrogate("token"), "sequence surrogate": as_surrogate("sequence")}
_number = iter(range(10_000))


def register(kind: str, result) -> str:
    name = f"odd_{next(_number)}"
    keywords, function = KINDS[kind](result)
    register_policy_loss(name, **keywords)(function)
    return name


def through_logits(name: str, **options):
    return run_loss(lambda *args, **kw: policy_loss(name, *args, **kw), BATCH, **OPTIONS, **options)[0]


def through_the_fused_head(name: str, **options):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, HIDDEN_SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    return linear_policy_loss(name, hidden, weight, *BATCH.arguments(), **OPTIONS, **options)


HEADS = {"logits": through_logits, "fused head": through_the_fused_head}
WRONG = {
    "a column": (lambda value, derivative: (value[:, None], derivative), r"returned \(.*, 1\) torch.float64 as its value"),
    "a column of derivatives": (lambda value, derivative: (value, derivative[:, None]), "as its derivative"),
    "one number": (lambda value, derivative: (value.mean(), derivative), r"returned \(\) torch.float64 as its value"),
    "one element": (lambda value, derivative: (value[:1], derivative), r"returned \(1,\) torch.float64 as its value"),
    "integers": (lambda value, derivative: (value.long(), derivative), "torch.int64 as its value"),
    "another precision": (lambda value, derivative: (value.half(), derivative), "torch.float16 as its value"),
    "a Python number": (lambda value, derivative: (0.5, derivative), "returned float as its value"),
    "nothing": (lambda value, derivative: None, "must return two or three tensors .* got NoneType"),
    "one tensor": (lambda value, derivative: value, "got Tensor"),
    "four": (lambda value, derivative: (value,) * 4, "got 4 of them"),
    "numbers as is_clipped": (lambda value, derivative: (value, derivative, value), "as its is_clipped"),
    "NaN": (lambda value, derivative: (value * math.nan, derivative), "not finite"),
    "an infinite derivative": (lambda value, derivative: (value, derivative + math.inf), "not finite"),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_value_is_refused_by_name(wrong, kind, head):
    """[T, 1] times [T] would be [T, T], summed without a word."""
    result, message = WRONG[wrong]
    name = register(kind, result)
    with pytest.raises(DataError, match=message) as caught:
        HEADS[head](name)
    assert name in str(caught.value)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_is_believed(kind, head):
    output = HEADS[head](register(kind, lambda value, derivative: (value, derivative)))
    assert math.isfinite(output.loss.item()) and output.num_nonfinite.tolist() == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_may_come_back_as_anything(kind):
    """A masked token holds garbage, so does what is computed of it."""

    def garbage(value, derivative):
        if value.numel() == len(BATCH.labels):
            value, derivative = (torch.where(BATCH.loss_mask, part, math.nan) for part in (value, derivative))
        return value, derivative

    plain, odd = (through_logits(register(kind, result)).loss for result in (lambda *both: both, garbage))
    assert torch.equal(plain, odd)


def writes_through_its_inputs(write):
    def values(
        log_probs, old_log_probs, advantages, loss_mask, cu_seqlens, token_counts, *, clip_ratio_low, clip_ratio_high, cp_group
    ):
        value, derivative = -advantages * log_probs, -advantages
        write(log_probs)
        return value, derivative

    return values


def test_a_loss_that_writes_into_its_inputs_is_refused_by_name():
    name = f"writes_{next(_number)}"
    register_policy_loss(name)(writes_through_its_inputs(lambda log_probs: log_probs.zero_()))
    with pytest.raises(DataError, match=f"policy loss '{name}' writes into log_probs"):
        through_logits(name)

    def surrogate(log_ratio, advantages, *, clip_ratio_low, clip_ratio_high):
        advantages.mul_(-1)
        return -advantages * log_ratio, -advantages

    name = f"writes_{next(_number)}"
    register_policy_loss(name, surrogate=surrogate)(lambda *args, clip_ratio_low, clip_ratio_high, cp_group: None)
    with pytest.raises(DataError, match=f"policy loss '{name}' writes into advantages"):
        through_logits(name)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda log_probs: log_probs.data.zero_(), id="through .data"),
        pytest.param(lambda log_probs: log_probs.numpy().fill(0.0), id="through numpy"),
    ],
)
def test_a_write_that_cannot_be_seen_meets_a_copy(write):
    honest, other = f"honest_{next(_number)}", f"writes_{next(_number)}"
    register_policy_loss(honest)(writes_through_its_inputs(lambda log_probs: None))
    register_policy_loss(other)(writes_through_its_inputs(write))
    expected, got = through_logits(honest, metrics="basic"), through_logits(other, metrics="basic")
    assert torch.equal(got.loss, expected.loss) and torch.equal(got.log_probs, expected.log_probs)
    assert torch.equal(got.metrics.values, expected.metrics.values)


def test_a_write_under_inference_mode_meets_a_copy():
    """No write is counted there."""
    name = f"writes_{next(_number)}"
    register_policy_loss(name)(writes_through_its_inputs(lambda log_probs: log_probs.zero_()))
    with torch.inference_mode():
        output = policy_loss(name, BATCH.logits, *BATCH.arguments(), **OPTIONS)
    assert output.log_probs[BATCH.loss_mask].abs().min() > 0


def test_a_loss_says_itself_which_tokens_it_clips():
    """CISPO keeps the gradient of a clipped token, so that a derivative of 0 would find none of them."""

    @register_policy_loss("cispo_here")
    def cispo(
        log_probs, old_log_probs, advantages, loss_mask, cu_seqlens, token_counts, *, clip_ratio_low, clip_ratio_high, cp_group
    ):
        ratio = (log_probs - old_log_probs).exp()
        weight = ratio.clamp(max=1 + clip_ratio_high)
        return -weight * advantages * log_probs, -weight * advantages, ratio > weight

    batch = random_batch([30, 20], noise=0.3)
    output = policy_loss("cispo_here", batch.logits, *batch.arguments(), metrics="basic", **OPTIONS, **CLIP)
    ratio = (output.log_probs - batch.old_log_probs).exp()
    is_clipped = (ratio > 1 + CLIP["clip_ratio_high"]) & batch.loss_mask
    share = [float(is_clipped[document].sum() / batch.loss_mask[document].sum()) for document in batch.documents]
    assert 0.05 < sum(share) / 2 < 0.6
    assert finalise_metrics(output.metrics)["policy/clipped_ratio_fraction"] == pytest.approx(sum(share) / 2)
