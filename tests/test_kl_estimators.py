"""The estimators of KL(policy, reference): by hand, by enumeration over a small vocabulary, and numbers that overflow."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import CLIP, random_batch
from loss_backends import LOSSES, TORCH

from megatron_rl.losses.kl import kl_estimate

LOG_PROBS = torch.tensor([-1.0, -0.5, -2.0, -0.2, -1.5, -3.0], dtype=torch.float64)
REFERENCE = torch.tensor([-1.2, -0.5, -1.0, -0.9, -1.5, -2.0], dtype=torch.float64)
RATIOS = torch.tensor([1.5, 0.5, 4.0, 1.1, 0.6, 1.25], dtype=torch.float64)
# With d = log_prob - reference: .2, 0, -1, .7, 0, -1.
K3 = [math.exp(-d) + d - 1 for d in (0.2, 0.0, -1.0, 0.7, 0.0, -1.0)]
BY_HAND = {
    "k1": ([0.2, 0, -1, 0.7, 0, -1], [1] * 6),
    "k2": ([0.02, 0, 0.5, 0.245, 0, 0.5], [0.2, 0, -1, 0.7, 0, -1]),
    "k3": (K3, [0.181269, 0, -1.718282, 0.503415, 0, -1.718282]),
    "k3+": (K3, [0.2, 0, -1, 0.7, 0, -1]),
    "unbiased": ([rho * k3 for rho, k3 in zip(RATIOS.tolist(), K3, strict=True)], [0.3, 0, -4, 0.77, 0, -1.25]),
}


@pytest.mark.parametrize("estimator", BY_HAND)
def test_value_and_derivative_are_those_by_hand(estimator):
    """FB-92: where the policy is below the reference descent raises it."""
    value, derivative = kl_estimate(estimator, LOG_PROBS, REFERENCE, RATIOS.log())
    torch.testing.assert_close(value, torch.tensor(BY_HAND[estimator][0], dtype=torch.float64), rtol=1e-9, atol=1e-12)
    # Six decimals were written down.
    torch.testing.assert_close(derivative, torch.tensor(BY_HAND[estimator][1], dtype=torch.float64), rtol=0, atol=5e-7)


# Enumeration: each token of the vocabulary once, weighted by the probability that it is sampled with.

VOCABULARY = 7


def distribution(seed: int) -> torch.Tensor:  # [V] log-probabilities
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn(VOCABULARY, generator=generator, dtype=torch.float64), 0)


def gradient_of_kl(logits, reference):
    leaf = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(leaf, 0)
    value = (log_probs.exp() * (log_probs - reference)).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def expected(backend, estimator, logits, reference, sampler, name):
    """(value, gradient by the logits [V]) of the KL term, in expectation over samples of `sampler`, through the front door."""
    old = None if sampler is None else sampler
    weights = (torch.log_softmax(logits, 0) if sampler is None else sampler).exp()
    batch = random_batch([1] * VOCABULARY, num_masked=(0,) * VOCABULARY, vocab_size=VOCABULARY)
    actions = torch.arange(VOCABULARY)
    batch.logits[:], batch.labels[:], batch.advantages[:] = logits, actions, 0.0
    batch.old_log_probs[:] = torch.log_softmax(logits, 0)[actions] if old is None else old[actions]
    options = {"kl_coefficient": 1.0, "kl_estimator": estimator, "ref_log_probs": reference, "regularizer_weights": weights}
    output, gradient = backend.run(LOSSES[name], batch, advantages_per="sample", **options, **CLIP)
    return output.loss.detach(), gradient.sum(0)


def test_enumeration_shows_which_gradient_each_estimator_has():
    """On-policy k2 and k3+ have that of the KL, k1 none at all, k3 another one; off-policy only `unbiased` has it."""
    logits, reference, sampler = distribution(0), distribution(1), distribution(2)
    value, gradient = gradient_of_kl(logits, reference)
    backend, tolerance = TORCH, 1e-12  # float64; the next test compares the kernels' derivatives

    def error(estimator, sampled_by, name="grpo"):
        found = expected(backend, estimator, logits, reference, sampled_by, name)
        return float((found[1] - gradient).abs().max()), float((found[0] - value).abs())

    for estimator in ("k2", "k3+", "unbiased"):
        assert error(estimator, None)[0] < tolerance, estimator
    assert error("unbiased", sampler)[0] < tolerance
    assert error("unbiased", sampler, "gspo")[0] < tolerance  # FB-117: a sample of one token; its own ratio
    assert float(expected(backend, "k1", logits, reference, None, "grpo")[1].abs().max()) < tolerance
    for estimator in ("k1", "k3"):
        assert error(estimator, None)[0] > 1e-2, estimator
    for estimator in ("k2", "k3", "k3+"):
        assert error(estimator, sampler)[0] > 1e-2, estimator
    # The values: k1 and k3 are unbiased on-policy, `unbiased` off-policy too.
    for estimator, sampled_by in (("k1", None), ("k3", None), ("k3+", None), ("unbiased", None), ("unbiased", sampler)):
        assert error(estimator, sampled_by)[1] < tolerance, estimator
    assert error("k2", None)[1] > 1e-2 and error("k3", sampler)[1] > 1e-2


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_k3_is_bounded_like_the_ratio(difference):
    """FB-59, FB-93: where the value is saturated the derivative is 0, as autograd gives for the bounded function."""
    value, derivative = kl_estimate("k3", *torch.tensor([[0.0], [difference], [0.0]], dtype=torch.float64))
    bounded = math.copysign(20, difference)
    assert value.item() == pytest.approx(math.exp(bounded) - bounded - 1, rel=1e-12)
    assert derivative.item() == 0.0


def test_k3_is_never_below_zero_in_float32():
    """exp(d) - d - 1 rounds to -1e-8 for some small d: a KL divergence below 0 in a log. And NaN is not swallowed."""
    d = torch.linspace(-1e-3, 1e-3, 20_001)
    assert ((d.exp() - d - 1.0) < 0).any(), "no d of this range shows the rounding"
    assert (kl_estimate("k3", torch.zeros_like(d), d, d)[0] >= 0).all()
    assert kl_estimate("k3", *torch.tensor([[0.0], [math.nan], [0.0]]))[0].isnan()
