"""What a registered policy loss returns is checked, with its name; what it is given cannot be overwritten."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import random_batch, run_loss

from megatron_rl import LossValue, linear_policy_loss, policy_loss
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import register_policy_loss

BATCH = random_batch([4, 3], num_masked=(1, 0))
HIDDEN_SIZE = 5
OPTIONS = {"advantages_per": "sample", "tp_group": SINGLE, "cp_group": SINGLE}
LEVELS = ("token", "sequence", "batch")
_number = iter(range(10_000))


def register(level: str, result, write=lambda log_ratio: None) -> str:
    """A loss of its own: `result` makes what it returns of a value and its derivative, `write` may do what is forbidden."""
    name = f"odd_{next(_number)}"

    def elementwise(log_ratio, advantages):
        value = -advantages * log_ratio
        write(log_ratio)
        return result(value, -advantages)

    function = elementwise if level != "batch" else lambda batch: elementwise(batch.log_ratio, batch.advantages)
    register_policy_loss(name, level)(function)
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
    "a column": (lambda value, derivative: value[:, None], r"returned \(.*, 1\) torch.float64 as its value"),
    "a column of derivatives": (lambda value, derivative: LossValue(value, derivative[:, None]), "as its derivative"),
    "one number": (lambda value, derivative: value.mean(), r"returned \(\) torch.float64 as its value"),
    "one element": (lambda value, derivative: value[:1], r"returned \(1,\) torch.float64 as its value"),
    "integers": (lambda value, derivative: LossValue(value.long(), derivative), "torch.int64 as its value"),
    "another precision": (lambda value, derivative: LossValue(value.half(), derivative), "torch.float16 as its value"),
    "a Python number": (lambda value, derivative: 0.5, "returned float as its value"),
    "a number as derivative": (lambda value, derivative: LossValue(value, 0.5), "returned float as its derivative"),
    "nothing": (lambda value, derivative: None, "returned NoneType as its value"),
    "a pair": (lambda value, derivative: (value, derivative), r"returned tuple as its value.*; return megatron_rl.LossValue\("),
    "numbers as is_clipped": (lambda value, derivative: LossValue(value, derivative, value), "float64 as its is_clipped"),
    "one flag": (lambda value, derivative: LossValue(value, is_clipped=torch.tensor(True)), r"\(\) torch.bool as its is_clipped"),
    "NaN": (lambda value, derivative: value * math.nan, "not finite"),
    "NaN as derivative": (lambda value, derivative: LossValue(value, derivative * math.nan), "not finite"),
    "an infinite derivative": (lambda value, derivative: LossValue(value, derivative + math.inf), "not finite"),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_value_is_refused_by_name(wrong, level, head):
    """[T, 1] times [T] would be [T, T], summed without a word."""
    result, message = WRONG[wrong]
    name = register(level, result)
    with pytest.raises(DataError, match=message) as caught:
        HEADS[head](name)
    assert name in str(caught.value)


RIGHT = {
    "a tensor": lambda value, derivative: value,
    "value and derivative": LossValue,
    "all": lambda value, derivative: LossValue(value, derivative, value > 0),
    "a value without a gradient": lambda value, derivative: value.detach(),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("right", RIGHT)
def test_what_is_right_is_believed(right, level, head):
    output = HEADS[head](register(level, RIGHT[right]))
    assert math.isfinite(output.loss.item()) and output.num_nonfinite.tolist() == [0, 0]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("level", LEVELS)
def test_what_a_loss_raises_is_what_its_user_sees(level, head):
    def result(value, derivative):
        raise KeyError("of the user's own")

    with pytest.raises(KeyError, match="of the user's own"):
        HEADS[head](register(level, result))


@pytest.mark.parametrize("has_derivative", [False, True], ids=["by autograd", "declared"])
@pytest.mark.parametrize("level", LEVELS)
def test_masked_tokens_may_come_back_as_anything(level, has_derivative):
    """A masked token holds garbage, so does what is computed of it."""

    def plain(value, derivative):
        return LossValue(value, derivative if has_derivative else None)

    def garbage(value, derivative):
        if value.numel() == len(BATCH.labels):
            value, derivative = (torch.where(BATCH.loss_mask, part, math.nan) for part in (value, derivative))
        return plain(value, derivative)

    results = []
    for result in (plain, garbage):
        name = register(level, result)
        results.append(run_loss(lambda *args, name=name, **kw: policy_loss(name, *args, **kw), BATCH, **OPTIONS))
    assert torch.equal(results[0][0].loss, results[1][0].loss) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("is_inference", [False, True], ids=["", "under inference_mode"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_that_writes_into_its_inputs_is_refused_by_name(level, is_inference):
    name = register(level, LossValue, write=lambda log_ratio: log_ratio.zero_())
    with torch.inference_mode(is_inference), pytest.raises(DataError, match=f"policy loss '{name}' writes into log_ratio"):
        policy_loss(name, BATCH.logits, *BATCH.arguments(), **OPTIONS)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda log_ratio: log_ratio.data.zero_(), id="through .data"),
        pytest.param(lambda log_ratio: log_ratio.detach().numpy().fill(0.0), id="through numpy"),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_a_write_that_cannot_be_seen_meets_a_copy(level, write):
    expected = through_logits(register(level, LossValue), metrics="basic")
    got = through_logits(register(level, LossValue, write), metrics="basic")
    assert torch.equal(got.loss, expected.loss) and torch.equal(got.log_probs, expected.log_probs)
    assert torch.equal(got.metrics.values, expected.metrics.values)
