"""The clipped objective and the k3 estimator: values by hand, the edges of the clip, and numbers that overflow."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from helpers import clipped
from hypothesis import example, given, settings
from hypothesis import strategies as st

import megatron_rl.losses.clipping as clipping_module
from megatron_rl.losses.clipping import clipped_objective
from megatron_rl.ops.ratios import LOG_RATIO_BOUND, bounded_exp, k3_estimate

LOW, HIGH = 0.2, 0.5


def objective(log_ratio: float, advantage: float, dtype=torch.float64, low=LOW, high=HIGH) -> tuple[float, float]:
    found = clipped_objective(
        torch.tensor([log_ratio], dtype=dtype),
        torch.tensor([advantage], dtype=dtype),
        clip_ratio_low=low,
        clip_ratio_high=high,
    )
    return found.value.item(), found.derivative.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "derivative"),
    [
        # -min(rho A, clip(rho, 0.8, 1.5) A), derivative by log rho: -rho A where the first is taken
        pytest.param(1.0, 2.0, -2.0, -2.0, id="on-policy"),
        pytest.param(1.0, -2.0, 2.0, 2.0, id="on-policy, negative"),
        pytest.param(1.4, 1.0, -1.4, -1.4, id="inside"),
        pytest.param(2.0, 1.0, -1.5, 0.0, id="FB-50 above, A > 0: clipped"),
        pytest.param(2.0, -1.0, 2.0, 2.0, id="FB-50 above, A < 0: alive"),
        pytest.param(0.5, 1.0, -0.5, -0.5, id="FB-50 below, A > 0: alive"),
        pytest.param(0.5, -1.0, 0.8, 0.0, id="FB-50 below, A < 0: clipped"),
        pytest.param(0.7, -1.0, 0.8, 0.0, id="FB-62 below 1 - low, above 1 - high: low and high not swapped"),
        pytest.param(1.3, 1.0, -1.3, -1.3, id="FB-62 above 1 + low, below 1 + high: low and high not swapped"),
        pytest.param(2.0, 0.0, 0.0, 0.0, id="A = 0"),
    ],
)
def test_values_by_hand(ratio, advantage, value, derivative):
    assert objective(math.log(ratio), advantage) == pytest.approx((value, derivative), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("advantage", "log_ratio"), [(1.0, 0.3), (-1.0, -0.3)])
def test_at_the_edge_the_unclipped_branch_counts(advantage, log_ratio, dtype):
    """FB-62: ratio exactly 1 + high (A > 0) or 1 - low (A < 0): full gradient there, none one rounding step beyond."""
    edge = torch.tensor([log_ratio], dtype=dtype).exp().item()
    low, high = (0.01, edge - 1) if advantage > 0 else (1 - edge, 0.01)
    assert 1 + high == edge or 1 - low == edge, "the edge is representable"
    assert objective(log_ratio, advantage, dtype, low, high) == (-edge * advantage, -edge * advantage)
    # One step of the ratio beyond the edge.
    step = math.copysign(torch.finfo(dtype).eps, log_ratio)
    beyond = (low, high - step) if advantage > 0 else (low + step, high)
    assert objective(log_ratio, advantage, dtype, *beyond)[1] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, -20.5, 20.5, 100.0, 1e4, 3e38, -3e38])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_no_log_ratio_overflows(log_ratio, advantage, dtype):
    """FB-59: beyond +-20 value and derivative are those of the bounded function; A = 0 is exactly 0, not 0 x inf."""
    value, derivative = objective(log_ratio, advantage, dtype)
    assert math.isfinite(value)
    assert derivative == 0.0
    if advantage == 0:
        assert value == 0.0
    else:
        bounded = torch.tensor(math.copysign(LOG_RATIO_BOUND, log_ratio), dtype=dtype)
        assert value == pytest.approx(clipped(bounded.exp(), advantage, LOW, HIGH).item(), rel=1e-6)


@pytest.mark.parametrize(("log_ratio", "advantage"), [(20.0, -1.0), (-20.0, 1.0)])
def test_the_bound_itself_still_has_a_gradient(log_ratio, advantage):
    """FB-59: the derivative of the bounded function is 0 beyond the bound, not at it."""
    ratio = math.exp(log_ratio)
    assert objective(log_ratio, advantage) == pytest.approx((-ratio * advantage, -ratio * advantage), rel=1e-12)


@given(
    log_ratio=st.floats(-25, 25),
    advantage=st.floats(-10, 10),
    low=st.floats(0, 0.99),
    high=st.floats(0, 5),
)
@example(log_ratio=0.0, advantage=1.0, low=0.0, high=0.0)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_value_and_derivative_are_those_of_a_loop_that_autograd_differentiates(log_ratio, advantage, low, high):
    leaf = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    expected = clipped(torch.clamp(leaf, -20, 20).exp(), advantage, low, high)
    gradient = torch.autograd.grad(expected, leaf)[0].item() if expected.requires_grad else 0.0
    # 1e-12: a handful of float64 roundings, relative to the ratio.
    scale = max(1.0, math.exp(min(log_ratio, 20.0))) * 10
    assert objective(log_ratio, advantage, low=low, high=high) == pytest.approx((expected.item(), gradient), abs=1e-12 * scale)


def test_an_on_policy_ratio_is_one_to_the_last_bit():
    """Both edges of a clip of width 0 count as inside: an on-policy step always has its gradient."""
    assert objective(0.0, 3.0, low=0.0, high=0.0) == (-3.0, -3.0)
    assert objective(0.0, -3.0, low=0.0, high=0.0) == (3.0, 3.0)


def test_nan_is_not_swallowed():
    """FB-58: a NaN policy must not look on-policy; what is not finite is counted and refused elsewhere."""
    assert math.isnan(objective(math.nan, 1.0)[0]) and math.isnan(objective(math.nan, -1.0)[0])
    assert math.isnan(bounded_exp(torch.tensor(math.nan)).item())
    value, _ = k3_estimate(torch.tensor(math.nan), torch.tensor(-1.0))
    assert math.isnan(value.item())


def test_k3_by_hand():
    """FB-92: d = ref - new = log 2: 2 - log 2 - 1; where the policy is below the reference descent raises it."""
    value, derivative = k3_estimate(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, math.log(2) - 1.0]))
    assert value.tolist() == pytest.approx([0.0, 1 - math.log(2)], abs=1e-6)
    assert derivative.tolist() == pytest.approx([0.0, -1.0], abs=1e-6)


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_k3_is_bounded_like_the_ratio(difference):
    """FB-59, FB-93: where the value is saturated the derivative is 0, as autograd gives for the bounded function."""
    new = torch.tensor([0.0], dtype=torch.float64)
    value, derivative = k3_estimate(new, new + difference)
    bounded = math.copysign(20, difference)
    assert value.item() == pytest.approx(math.exp(bounded) - bounded - 1, rel=1e-12)
    assert derivative.item() == 0.0


@given(new=st.floats(-8, 0), ref=st.floats(-8, 0))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_k3s_derivative_is_that_of_its_value(new, ref):
    """FB-93: value right and gradient wrong is the usual fault."""
    leaf = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    expected = (ref - leaf).exp() - (ref - leaf) - 1
    gradient = torch.autograd.grad(expected, leaf)[0].item()
    value, derivative = k3_estimate(leaf.detach(), torch.tensor(ref, dtype=torch.float64))
    assert (value.item(), derivative.item()) == pytest.approx((expected.item(), gradient), rel=1e-9, abs=1e-9)


def test_the_worked_example_is_right():
    assert doctest.testmod(clipping_module).failed == 0


def test_k3_is_never_below_zero_in_float32():
    """exp(d) - d - 1 rounds to -1e-8 for some small d: a KL divergence below 0 in a log."""
    d = torch.linspace(-1e-3, 1e-3, 20_001)
    value, derivative = k3_estimate(torch.zeros_like(d), d)
    assert ((d.exp() - d - 1.0) < 0).any(), "no d of this range shows the rounding"
    assert (value >= 0).all()
    torch.testing.assert_close(derivative, 1 - d.exp())
    assert k3_estimate(torch.tensor(0.0), torch.tensor(math.nan))[0].isnan()
