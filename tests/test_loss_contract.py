"""Every registered loss against its declaration: derivative and Triton twin; what a loss of one's own may return and may not do."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers import EXACT, KERNEL_DEVICE, PARAMETERS, loop_log_probs, random_batch, run_loss
from loss_backends import HAS_TRITON
from torch import Tensor

from megatron_rl.declare import LossValue, LossValues, evaluate, get_policy_loss, policy_loss_names, register_policy_loss
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.policy_loss import linear_policy_loss, policy_loss
from megatron_rl.policy_loss.api import loss_of_log_probs

WITH_TRITON = [name for name in policy_loss_names() if get_policy_loss(name).triton]
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
# Ratios that are exactly 1 - low and 1 + high in float64, and far from both; ratios that are bounded, at the bound and beyond.
EDGE = 0.3
CLIP = (1 - math.exp(-EDGE), math.exp(EDGE) - 1)
LOG_RATIOS = (0.0, EDGE, -EDGE, 0.2, -0.2, 0.5, -0.5, 20.0, -20.0, 20.5, -20.5, 1e4, -1e4)
ADVANTAGES = (-1.3, 0.0, 0.7)


def elements(loss, dtype: torch.dtype, log_ratios=LOG_RATIOS) -> dict:
    """All pairs of log-ratio and advantage, and what else the loss takes, of random numbers."""
    log_ratio, advantages = torch.tensor(list(itertools.product(log_ratios, ADVANTAGES)), dtype=dtype).T.contiguous()
    generator = torch.Generator().manual_seed(3)
    log_probs, *further = -9 * torch.rand(1 + len(loss.needs), len(log_ratio), generator=generator, dtype=torch.float64).to(dtype)
    return {
        "log_ratio": log_ratio,
        "advantages": advantages,
        "log_probs": log_probs,
        "vectors": dict(zip(loss.needs, further, strict=True)),
    }


# Numbers that the losses are tested with beside their defaults. clip_ratio_c is a ratio of LOG_RATIOS.
PARAMETERS = PARAMETERS | dict.fromkeys(("grpo", "gspo", "gspo_token"), {"clip_ratio_c": math.exp(0.5)})


def keywords(loss, clip: tuple[float, float], *, has_defaults: bool = True) -> dict[str, float]:
    clips = {} if loss.clip_ratios is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    return clips | loss.resolve_parameters({} if has_defaults else PARAMETERS[loss.name])


def with_numbers(names: list[str]) -> list:
    """(name, whether the parameters have their defaults)."""
    return [
        pytest.param(name, is_default, id=f"{name}{'' if is_default else ', other numbers'}")
        for name in names
        for is_default in (True, False)
        if is_default or get_policy_loss(name).parameters
    ]


def value_alone_of(loss):
    def value_alone(*args, **named):
        returned = loss.function(*args, **named)
        return returned.value if isinstance(returned, LossValue) else returned

    return replace(loss, function=value_alone)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=NEEDS_TRITON)])
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_the_probability_of_a_sampler_is_at_most_1(name, backend):
    """Its log-probability may be above 0 by rounding. pi = 0.9 and mu = 1: the fall of 0.1 is inside a bound of 0.1001, and that
    from e^0.01 = 1.01 is not. The KL is mu (0.01 - ln 0.9) = 0.1154 for mu = 1, and 0.1165 for mu = 1.01."""
    low = {"dppo_tv": 0.1001, "dppo_kl": 0.116}[name]
    log_probs = torch.tensor([math.log(0.9)], dtype=torch.float32 if backend == "triton" else torch.float64)
    packed = (None, -torch.ones(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1], dtype=torch.int32), torch.ones(1))
    options = {"rollout_log_probs": torch.tensor([0.01]), "loss_parameters": {"divergence_low": low}, "backend": backend}
    options = {key: value.to(KERNEL_DEVICE) if isinstance(value, Tensor) else value for key, value in options.items()}
    tensors = [tensor if tensor is None else tensor.to(KERNEL_DEVICE) for tensor in packed]
    output = loss_of_log_probs(name, log_probs.to(KERNEL_DEVICE), *tensors, **options, metrics="basic", advantages_per="sample")
    assert finalise_metrics(output.metrics)["policy/clipped_ratio_fraction"] == 0.0


@pytest.mark.parametrize("clip", [CLIP, (0.0, 0.0)], ids=["", "an edge at the ratio 1"])
@pytest.mark.parametrize(("name", "has_defaults"), with_numbers(policy_loss_names()))
def test_the_declared_derivative_is_that_of_the_declared_value(name, has_defaults, clip):
    """FB-93: in float64, at the edges of the clip and of the log-ratio, and at the advantage 0. A declared constant is detached."""
    loss = get_policy_loss(name)
    if loss.clip_ratios and clip == CLIP:
        bounds = torch.tensor([-EDGE, EDGE], dtype=torch.float64).exp().tolist()
        assert [1 - clip[0], 1 + clip[1]] == bounds, "the edges are among the ratios"
    given = elements(loss, torch.float64)
    numbers = keywords(loss, clip, has_defaults=has_defaults)
    got = evaluate(loss, **given, keywords=numbers)
    want = evaluate(value_alone_of(loss), **given, keywords=numbers)
    assert torch.equal(got.value, want.value) and torch.isfinite(got.value).all()
    torch.testing.assert_close(got.derivative, want.derivative, **EXACT)
    assert want.derivative.any(), "the value has a gradient"


# At ratio 1 each of these papers has the gradient of REINFORCE.
@pytest.mark.parametrize("name", policy_loss_names())
def test_at_ratio_1_the_coefficient_is_minus_the_advantage(name):
    batch = random_batch([4, 1, 6], num_masked=(1, 0, 2), noise=0.0)
    logits = loop_log_probs(batch.logits, batch.labels)
    options = {"rollout_log_probs": logits} if get_policy_loss(name).anchor == "rollout" else {}
    output = policy_loss(name, leaf := batch.logits.clone().requires_grad_(), *batch.arguments(), **options)
    output.loss.backward()
    coefficient = torch.cat(
        [
            -w * a * torch.ones(len(d), dtype=torch.float64)
            for d, w, a in zip(batch.documents, batch.token_weights, batch.advantages, strict=True)
        ]
    )
    one_hot = torch.nn.functional.one_hot(batch.labels, 11)
    want = torch.where(batch.loss_mask, coefficient, 0.0)[:, None] * (one_hot - batch.logits.softmax(-1))
    torch.testing.assert_close(leaf.grad, want, **EXACT)


@pytest.mark.parametrize("name", [name for name in policy_loss_names() if name != "dro"])
def test_an_advantage_of_zero_gives_nothing(name):
    """But in DRO, whose penalty stays."""
    loss = get_policy_loss(name)
    given = elements(loss, torch.float64)
    found = evaluate(loss, **given, keywords=keywords(loss, CLIP))
    for part in found:
        assert not part[given["advantages"] == 0].any()


def by_twin(loss, given: dict, clip: tuple[float, float], parameters: dict[str, float]) -> LossValues:
    from twin_kernel import twin_kernel

    from megatron_rl.policy_loss.reduce_triton import triton_of_loss

    vectors = [given["log_ratio"], given["advantages"], given["log_probs"], *given["vectors"].values()]
    log_ratio, advantages, log_probs, *further = (x.to(KERNEL_DEVICE) for x in vectors)
    outputs = [torch.full_like(log_ratio, math.nan) for _ in range(3)]
    twin_kernel[(1,)](
        *(log_ratio, advantages, log_probs, tuple(further) or None, *outputs, 1.0 - clip[0], 1.0 + clip[1]),
        tuple(parameters.values()) or None,
        log_ratio.numel(),
        LOSS=triton_of_loss(loss),
        IS_OF_RATIO=not loss.takes_log_probs,
        BLOCK=64,
    )
    value, derivative, is_clipped = (x.cpu() for x in outputs)
    return LossValues(value, derivative, is_clipped != 0)


def assert_twins(got: Tensor, want: Tensor) -> None:
    # Of float32: e^20 is good to 20 x 2^-24 and an ulp or two of exp.
    torch.testing.assert_close(got, want, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("clip", [(0.2, 0.25), (0.0, 0.0), (1.0, 0.28)], ids=str)
@pytest.mark.parametrize(
    ("name", "has_defaults"), with_numbers([name for name in policy_loss_names() if get_policy_loss(name).triton])
)
@pytest.mark.kernel
@NEEDS_TRITON
def test_the_triton_twin_is_the_torch_function(name, has_defaults, clip):
    """Value, derivative and is_clipped of each element; the edges of the clip are a step away, where both round to one side.
    clip_ratio_c is an edge that both round to itself, but on a GPU."""
    loss = get_policy_loss(name)
    beside = [math.log(edge) + step for edge in (1 - clip[0], 1 + clip[1]) if edge > 0 for step in (-1e-5, 1e-5)]
    # A GPU's exponential is off by a step or two, to either side of an edge.
    at_c = (0.5,) if KERNEL_DEVICE == "cpu" else (0.5 - 1e-5, 0.5 + 1e-5)
    given = elements(loss, torch.float32, (0.0, *beside, 0.1, -0.1, *at_c, -0.5, 19.9, -19.9, 20.5, -20.5, 1e4))
    numbers = keywords(loss, clip, has_defaults=has_defaults)
    parameters = {parameter.name: numbers[parameter.name] for parameter in loss.parameters}
    got, want = by_twin(loss, given, clip, parameters), evaluate(loss, **given, keywords=numbers)
    for of_twin, of_torch in zip(got, want, strict=True):
        assert_twins(of_twin, of_torch)
    assert loss.clip_ratios is None or want.is_clipped.any() and not want.is_clipped.all()


BATCH = random_batch([4, 3], num_masked=(1, 0))
HIDDEN_SIZE = 5
OPTIONS = {"advantages_per": "sample", "tp_group": SINGLE, "cp_group": SINGLE}
LEVELS = ("token", "sequence")
_number = iter(range(10_000))


def register(level: str, result, write=lambda log_ratio: None) -> str:
    """A loss of its own: `result` makes what it returns of a value and its derivative, `write` may do what is forbidden."""
    name = f"odd_{next(_number)}"

    def elementwise(log_ratio, advantages):
        value = -advantages * log_ratio
        write(log_ratio)
        return result(value, -advantages)

    register_policy_loss(name, level)(elementwise)
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
    "a Parameter": (lambda value, derivative: torch.nn.Parameter(value.detach()), "a gradient of its own, and none by log_ratio"),
    "meta": (lambda value, derivative: value.to("meta"), "torch.strided on meta as its value: .* with torch.strided on cpu"),
    "sparse": (lambda value, derivative: value.to_sparse(), "with torch.sparse_coo on cpu as its value"),
    "a sparse derivative": (
        lambda value, derivative: LossValue(value, derivative.to_sparse()),
        "sparse_coo on cpu as its derivative",
    ),
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
