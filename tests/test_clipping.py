"""The clipped objective and the k3 estimator by hand, and numbers that overflow. Edges and derivatives: test_loss_contract.py."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.declare import bounded_exp
from megatron_rl.losses.grpo import grpo
from megatron_rl.losses.kl import k3

LOW, HIGH = 0.2, 0.5


def objective(log_ratio: float, advantage: float) -> tuple[float, float]:
    given = (torch.tensor([number], dtype=torch.float64) for number in (log_ratio, advantage))
    found = grpo(*given, clip_ratio_low=LOW, clip_ratio_high=HIGH)
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
        pytest.param(0.7, -1.0, 0.8, 0.0, id="below 1 - low, above 1 - high: low and high not swapped"),
        pytest.param(1.3, 1.0, -1.3, -1.3, id="above 1 + low, below 1 + high: low and high not swapped"),
        pytest.param(2.0, 0.0, 0.0, 0.0, id="A = 0"),
    ],
)
def test_values_by_hand(ratio, advantage, value, derivative):
    assert objective(math.log(ratio), advantage) == pytest.approx((value, derivative), abs=1e-12)


def test_nan_is_not_swallowed():
    """A NaN policy must not look on-policy; what is not finite is counted and refused elsewhere."""
    assert math.isnan(objective(math.nan, 1.0)[0]) and math.isnan(objective(math.nan, -1.0)[0])
    assert math.isnan(bounded_exp(torch.tensor(math.nan)).item())
    assert math.isnan(k3(torch.tensor(math.nan), torch.tensor(-1.0)).value.item())


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_k3_is_bounded_like_the_ratio(difference):
    """FB-59, FB-93: where the value is saturated the derivative is 0, as autograd gives for the bounded function."""
    new = torch.tensor([0.0], dtype=torch.float64)
    found = k3(new, new + difference)
    value, derivative = found.value, found.derivative
    bounded = math.copysign(20, difference)
    assert value.item() == pytest.approx(math.exp(bounded) - bounded - 1, rel=1e-12)
    assert derivative.item() == 0.0


def test_k3_is_never_below_zero_in_float32():
    """exp(d) - d - 1 rounds to -1e-8 for some small d: a KL divergence below 0 in a log."""
    d = torch.linspace(-1e-3, 1e-3, 20_001)
    found = k3(torch.zeros_like(d), d)
    value, derivative = found.value, found.derivative
    assert ((d.exp() - d - 1.0) < 0).any(), "no d of this range shows the rounding"
    assert (value >= 0).all()
    torch.testing.assert_close(derivative, 1 - d.exp())
    assert k3(torch.tensor(0.0), torch.tensor(math.nan)).value.isnan()
