"""Every registered loss, KL estimator and correction against its declaration.

A new one of losses/ is tested here, and needs no further line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Context, Decimal, localcontext

import pytest
import torch
from helpers import EXACT, KERNEL_DEVICE, PARAMETERS
from loss_backends import KERNEL
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.declare import POLICY_LOSSES, LossValue, get_policy_loss
from megatron_rl.losses.corrections import CORRECTIONS, CorrectionValue
from megatron_rl.losses.kl import KL_ESTIMATORS, KLValue, kl_estimate
from megatron_rl.policy_loss.reduce_torch import LossValues, evaluate

# Losses

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


def value_alone_of(record):
    """Of a loss or an estimator: autograd then computes the derivative."""

    def value_alone(*args, **named):
        returned = record.function(*args, **named)
        return returned.value if isinstance(returned, LossValue | KLValue) else returned

    return replace(record, function=value_alone)


@pytest.mark.parametrize("clip", [CLIP, (0.0, 0.0)], ids=["", "an edge at the ratio 1"])
@pytest.mark.parametrize(("name", "has_defaults"), with_numbers(POLICY_LOSSES.names()))
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


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES.names() if name != "dro"])
def test_an_advantage_of_zero_gives_nothing(name):
    """But in DRO, whose penalty stays."""
    loss = get_policy_loss(name)
    given = elements(loss, torch.float64)
    found = evaluate(loss, **given, keywords=keywords(loss, CLIP))
    for part in found:
        assert not part[given["advantages"] == 0].any()


def by_triton(loss, given: dict, clip: tuple[float, float], parameters: dict[str, float]) -> LossValues:
    from triton_code import loss_kernel

    from megatron_rl.policy_loss.reduce_triton import triton_version

    vectors = [given["log_ratio"], given["advantages"], given["log_probs"], *given["vectors"].values()]
    log_ratio, advantages, log_probs, *further = (x.to(KERNEL_DEVICE) for x in vectors)
    outputs = [torch.full_like(log_ratio, math.nan) for _ in range(3)]
    loss_kernel[(1,)](
        *(log_ratio, advantages, log_probs, tuple(further) or None, *outputs, 1.0 - clip[0], 1.0 + clip[1]),
        tuple(parameters.values()) or None,
        log_ratio.numel(),
        LOSS=triton_version(loss),
        IS_OF_RATIO=not loss.takes_log_probs,
        BLOCK=64,
    )
    value, derivative, is_clipped = (x.cpu() for x in outputs)
    return LossValues(value, derivative, is_clipped != 0)


# Of float32: e^20 is good to 20 x 2^-24 and an ulp or two of exp.
OF_TRITON = {"rtol": 4e-6, "atol": 1e-6}


@pytest.mark.parametrize("of", [evaluate, pytest.param(by_triton, marks=KERNEL)], ids=["torch", "triton"])
@pytest.mark.parametrize(("name", "low"), [("dppo_tv", 0.1001), ("dppo_kl", 0.116)])
def test_the_probability_of_a_sampler_is_at_most_1(name, low, of):
    """Its log-probability may be above 0 by rounding. pi = 0.9 and mu = 1: the fall of 0.1 is inside a bound of 0.1001, and that
    from e^0.01 = 1.01 is not. The KL is mu (0.01 - ln 0.9) = 0.1154 for mu = 1, and 0.1165 for mu = 1.01."""
    loss, log_prob = get_policy_loss(name), torch.tensor([math.log(0.9)])
    given = {"log_ratio": log_prob - 0.01, "advantages": -torch.ones(1), "log_probs": log_prob, "vectors": {}}
    numbers = loss.resolve_parameters({"divergence_low": low})
    found = evaluate(loss, **given, keywords=numbers) if of is evaluate else by_triton(loss, given, CLIP, numbers)
    assert not found.is_clipped.any()


@pytest.mark.parametrize("clip", [(0.2, 0.25), (0.0, 0.0), (1.0, 0.28)], ids=str)
@pytest.mark.parametrize(
    ("name", "has_defaults"), with_numbers([name for name in POLICY_LOSSES.names() if get_policy_loss(name).triton])
)
@pytest.mark.kernel
@KERNEL[1]
def test_the_triton_version_is_the_torch_function(name, has_defaults, clip):
    """Value, derivative and is_clipped of each element; the edges of the clip are a step away, where both round to one side.
    clip_ratio_c is an edge that both round to itself, but on a GPU."""
    loss = get_policy_loss(name)
    beside = [math.log(edge) + step for edge in (1 - clip[0], 1 + clip[1]) if edge > 0 for step in (-1e-5, 1e-5)]
    # A GPU's exponential is off by a step or two, to either side of an edge.
    at_c = (0.5,) if KERNEL_DEVICE == "cpu" else (0.5 - 1e-5, 0.5 + 1e-5)
    given = elements(loss, torch.float32, (0.0, *beside, 0.1, -0.1, *at_c, -0.5, 19.9, -19.9, 20.5, -20.5, 1e4))
    numbers = keywords(loss, clip, has_defaults=has_defaults)
    parameters = {parameter.name: numbers[parameter.name] for parameter in loss.parameters}
    got, want = by_triton(loss, given, clip, parameters), evaluate(loss, **given, keywords=numbers)
    for of_triton, of_torch in zip(got, want, strict=True):
        torch.testing.assert_close(of_triton, of_torch, **OF_TRITON)
    assert loss.clip_ratios is None or want.is_clipped.any() and not want.is_clipped.all()


# KL estimators

# Those with an exp of the difference.
BOUNDED = ("k3", "k3+", "unbiased")


def differences(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:  # log_probs, ref_log_probs, log_ratio
    """At the bound of the exponents, on both sides of it and far beyond, in all combinations."""
    sizes = (0.0, 0.3, -0.3, 2.0, -2.0, 20.0, -20.0, 20.5, -20.5, 1e4, -1e4)
    difference, log_ratio = torch.tensor(list(itertools.product(sizes, sizes)), dtype=dtype).T.contiguous()
    return difference, torch.zeros_like(difference), log_ratio


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_the_derivative_is_that_of_the_value_where_this_is_declared(name):
    """FB-59, FB-132: by autograd in float64, through the ratio too, however far the policies are apart. Beyond the bound of the
    exponents a derivative is finite, and may be cut."""
    estimator, given = KL_ESTIMATORS[name], differences(torch.float64)
    value, derivative = kl_estimate(estimator, *given)
    same, of_value = kl_estimate(value_alone_of(estimator), *given)
    assert torch.equal(value, same) and value.isfinite().all() and derivative.isfinite().all() and derivative.any()
    if estimator.is_gradient_of_value:
        bound = LOG_RATIO_BOUND if name in BOUNDED else math.inf
        is_inside = (given[0].abs() <= bound) & (given[2].abs() <= bound)
        # At d = -20 autograd adds two parts of e^20 = 5e8 that cancel to 20: 5e8 x 2^-53 is 3e-9 of it.
        torch.testing.assert_close(derivative[is_inside], of_value[is_inside], rtol=1e-8, atol=1e-12)
    else:
        assert not torch.allclose(derivative, of_value), "then it may be declared"
    far = torch.tensor([-1e3, -30.0, -LOG_RATIO_BOUND], dtype=torch.float64)
    value, _ = kl_estimate(name, far, torch.zeros_like(far), torch.zeros_like(far))
    assert len(set(value.tolist())) == (1 if name in BOUNDED else 3), "exponents stop at the bound"


def kl_by_triton(name: str, *given: Tensor) -> list[Tensor]:
    from triton_code import kl_kernel

    from megatron_rl.policy_loss.reduce_triton import triton_version

    got = [torch.full_like(given[0], math.nan, device=KERNEL_DEVICE) for _ in range(2)]
    inputs = [x.to(KERNEL_DEVICE) for x in given]
    kl_kernel[(1,)](*inputs, *got, len(given[0]), KL_FUNCTION=triton_version(KL_ESTIMATORS[name]), BLOCK=128)
    return [part.cpu() for part in got]


@pytest.mark.parametrize("name", [name for name in KL_ESTIMATORS.names() if KL_ESTIMATORS[name].triton])
@pytest.mark.kernel
@KERNEL[1]
def test_the_triton_version_of_an_estimator_is_the_torch_function(name):
    given = differences(torch.float32)
    for one, other in zip(kl_by_triton(name, *given), kl_estimate(name, *given), strict=True):
        torch.testing.assert_close(one, other, **OF_TRITON)


# Of float32: a step is 1.2e-7 of a number, and a few of them are taken. A GPU's e^20 is good to 20 x 2^-24 and a step or two.
# Of float64: at 1e-6 the difference of e^d - 1 and d keeps 2^-53 / 1e-6 of its digits.
K3_IN = [
    pytest.param(kl_estimate, torch.float32, 1e-6, id="torch"),
    pytest.param(kl_estimate, torch.float64, 1e-9, id="torch, float64"),
    pytest.param(kl_by_triton, torch.float32, 1e-6 if KERNEL_DEVICE == "cpu" else 4e-6, id="triton", marks=KERNEL),
]


@pytest.mark.parametrize(("estimate", "dtype", "tolerance"), K3_IN)
def test_k3_keeps_its_digits_near_0_and_far_from_it(estimate: Callable, dtype, tolerance):
    """exp(d) - d - 1 and 1 - exp(d) of float32 numbers are 97 % and 2e-4 off at d = 1e-4: what two close policies are told by.
    The truth has 50 digits. Up to 1 the Triton version takes a series, so 1 and its neighbours are among the numbers."""
    one = torch.ones((), dtype=dtype)
    sizes = torch.cat([torch.logspace(-6, math.log10(20), 60, dtype=dtype).clamp(max=20), one.nextafter(0 * one)[None], one[None]])
    d = torch.cat([sizes, -sizes])
    with localcontext(Context(prec=50)):
        exact = [(Decimal(x).exp(), Decimal(x)) for x in d.tolist()]
        wanted = [[float(e - x - 1) for e, x in exact], [float(1 - e) for e, _ in exact]]
    for found, truth in zip(estimate("k3", torch.zeros_like(d), d, torch.zeros_like(d)), wanted, strict=True):
        torch.testing.assert_close(found.double(), torch.tensor(truth, dtype=torch.float64), rtol=tolerance, atol=0)


# Corrections


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_a_correction_gives_what_it_drops_the_factor_0(name):
    """Of ratios on both sides of the bounds, at them and at 1; what is dropped has factor 0, and nothing else has."""
    kind, (low, high) = CORRECTIONS[name], (0.5, 2.0)
    ratios = torch.tensor([math.exp(-20), 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, math.exp(20)], dtype=torch.float64)
    returned = kind.function(ratios.clone(), low, high)
    result = returned if isinstance(returned, CorrectionValue) else CorrectionValue(returned)
    is_kept = torch.ones_like(ratios, dtype=torch.bool) if result.is_kept is None else result.is_kept
    assert result.weights.isfinite().all() and (result.weights >= 0).all()
    assert torch.equal(is_kept, result.weights != 0)
    assert is_kept[2:7].all(), "bounds are inclusive"
    assert float(result.weights[4]) == 1.0, "where both policies agree nothing changes"
