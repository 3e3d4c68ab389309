"""Corrections for the gap between sampler and trainer, and estimators of KL(policy, reference): by hand, and by enumeration.

test_generated_steps.py has every one of them in whole steps, on every layout, test_contracts.py each against its declaration.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import CLIP, random_batch, run_loss
from loss_backends import LOSSES, TORCH, over_backends

from megatron_rl.errors import DataError
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.losses.kl import kl_estimate
from megatron_rl.metrics.further import CORRECTION_STATISTICS
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.policy_loss import importance_correction

# Three samples: w = old / rollout probability by token, and the policy in training equal to the old one.
RATIOS = [[0.4, 1.0], [6.0], [1.0, 2.5, 0.9]]
ADVANTAGES = [-1.0, 1.0, -0.5]


def corrected_and_counted(ratios=RATIOS, advantages=ADVANTAGES, **settings):
    lengths = [len(row) for row in ratios]
    rollout = torch.linspace(-3.0, -0.5, sum(lengths), dtype=torch.float64)
    old = rollout + torch.tensor([w for row in ratios for w in row], dtype=torch.float64).log()
    return importance_correction(
        CorrectionSettings(**settings),
        old,
        rollout,
        torch.ones(sum(lengths), dtype=torch.bool),
        torch.tensor([0, *lengths]).cumsum(0).int(),
        log_probs=old,
        advantages=torch.tensor([a for a, row in zip(advantages, ratios, strict=True) for _ in row], dtype=torch.float64),
    )


def corrected(*rows, **settings):
    return corrected_and_counted(*rows, **settings)[0]


MEANS = [math.sqrt(0.4), 6.0, (2.5 * 0.9) ** (1 / 3)]  # geometric: .632456, 6, 1.310371
PRODUCTS = [0.4, 6.0, 2.25]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"kind": "tis"}, [0.4, 1, 2, 1, 2, 0.9]),
        ({"kind": "tis", "low": 0.95}, [0.95, 1, 2, 1, 2, 0.95]),
        ({"kind": "icepop"}, [0, 1, 0, 1, 2.5, 0.9]),
        ({"kind": "mask", "low": 0.5, "high": 2.5}, [0, 1, 0, 1, 1, 1]),
        ({"kind": "tis", "level": "sequence_mean", "high": 1.2}, [MEANS[0]] * 2 + [1.2] * 4),
        ({"kind": "icepop", "level": "sequence_mean", "low": 0.7, "high": 1.4}, [0, 0, 0] + [MEANS[2]] * 3),
        ({"kind": "mask", "level": "sequence_sum", "low": 0.5, "high": 2.3}, [0, 0, 0, 1, 1, 1]),
        ({"kind": "tis", "level": "sequence_sum", "high": 2.0}, [PRODUCTS[0]] * 2 + [2.0] * 4),
        # The mean of log(rollout / trained) is -log of the geometric mean: .458145, -1.791759, -.270310.
        # Masked by the geometric means .632456, 6 and 1.310371, or by the products .4, 6 and 2.25; the weights are the tokens' own.
        ({"kind": "seq_mask_tis", "level": "sequence_mean", "low": 0.6, "high": 1.4}, [0.4, 1, 0, 1, 2.5, 0.9]),
        ({"kind": "seq_mask_tis", "level": "sequence_mean", "low": 0.7, "high": 1.4}, [0, 0, 0, 1, 2.5, 0.9]),
        ({"kind": "seq_mask_tis", "level": "sequence_sum", "low": 0.3, "high": 2.0}, [0.4, 1, 0, 0, 0, 0]),
        (
            {"kind": "seq_mask_tis", "level": "sequence_mean", "low": 0.6, "high": 1.4, "sequence_delta": 0.4},
            [0, 0, 0, 1, 2.5, 0.9],
        ),
        ({"sequence_delta": 0.4}, [0, 0, 1, 1, 1, 1]),
        ({"sequence_delta": 0.5}, [1, 1, 1, 1, 1, 1]),
        ({"kind": "tis", "sequence_delta": 0.4}, [0, 0, 2, 1, 2, 0.9]),
    ],
)
def test_weights_are_those_by_hand(settings, weights):
    """FB-121: the ratio of a sample is the product of its tokens' ratios or their geometric mean, never the sum of ratios."""
    found = corrected(**settings)
    # float64 exp of a log: a few roundings.
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0)
    is_kept = [weight != 0 for weight in weights]
    assert found.is_kept.tolist() == is_kept


def test_only_samples_of_negative_advantage_are_dropped_as_off_policy():
    """FB-96: the sample decides, and the sign. The first one diverged by .458; with a positive advantage it stays."""
    assert corrected(advantages=[1.0, 1.0, 1.0], sequence_delta=0.0).is_kept.all()
    assert corrected(advantages=[0.0, 0.0, 0.0], sequence_delta=0.0).is_kept.all()


def test_the_function_gives_its_statistics_too():
    """Those of the loss: they add up over micro-batches and ranks."""
    _, statistics = corrected_and_counted(kind="icepop")
    known = dict(zip(CORRECTION_STATISTICS, statistics.tolist(), strict=True))
    assert (known["num_corrected_tokens"], known["correction_kept_tokens"], known["num_negative_tokens"]) == (6, 4, 5)
    assert known["correction_kept_samples"] == pytest.approx(1 / 2 + 0 + 1)


def test_an_exponent_is_bounded():
    """FB-115: a sum over thousands of tokens overflows float32 beyond e^88; it is bounded to e^20 before the clamp."""
    long = torch.full((4000,), 0.1)
    bounds = torch.tensor([0, 4000], dtype=torch.int32)
    settings = CorrectionSettings(kind="tis", level="sequence_sum", high=4.8e8)
    found, _ = importance_correction(settings, torch.zeros(4000), -long, torch.ones(4000, dtype=torch.bool), bounds)
    torch.testing.assert_close(found.weights, torch.full((4000,), 4.8e8))
    assert found.ratios.unique().tolist() == pytest.approx([math.exp(20)])


# Inside the losses


def test_the_metrics_of_a_correction_are_those_by_hand():
    batch = random_batch([2, 3], num_masked=(0, 0), noise=0.0)
    batch = replace(batch, advantages=torch.tensor([1.0, -1.0], dtype=torch.float64))
    rollout = batch.old_log_probs - torch.tensor([0.4, 1.0, 6.0, 1.0, 2.5], dtype=torch.float64).log()
    options = {"correction": CorrectionSettings(kind="icepop"), "rollout_log_probs": rollout, "metrics": "basic"}
    output, _ = run_loss(LOSSES["grpo"], batch, **options, **CLIP)
    found = finalise_metrics(output.metrics)
    # Factors 0, 1 | 0, 1, 2.5: the sum is 4.5 and that of the squares 8.25.
    want = {
        "kept_tokens": 3 / 5,
        "kept_samples": (1 / 2 + 2 / 3) / 2,
        "kept_positive": 1 / 2,
        "kept_negative": 2 / 3,
        "off_policy": 0.0,
        "weight": (0.5 + 3.5 / 3) / 2,
        "at_low": 1 / 5,
        "at_high": 1 / 5,
        "largest_ratio": 6.0,
        "largest_weight": 2.5,
        "effective_sample_size": 4.5**2 / (5 * 8.25),
    }
    assert {name: found[f"policy/correction_{name}"] for name in want} == pytest.approx(want, rel=1e-6)
    plain, _ = run_loss(LOSSES["grpo"], batch, metrics="basic", **CLIP)
    assert not [name for name in finalise_metrics(plain.metrics) if "correction" in name]


OF_SAMPLES = {"kind": "tis", "level": "sequence_mean", "high": 2.0}
OF_BOTH = {"kind": "mask", "level": "sequence_mean", "low": 0.8, "high": 1.2, "sequence_delta": 0.02}


@over_backends
@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize(("settings", "value"), [({"kind": "tis"}, math.nan), (OF_SAMPLES, math.inf), (OF_BOTH, math.nan)])
def test_a_sampler_s_log_prob_that_is_not_finite_stops_the_step(backend, name, settings, value):
    """Also where it enters a sum of the sample alone, which the kernels do not read, and a bound would hide it. It is told alone:
    the weights of its sample are made from it, and nobody gave importance weights."""
    batch = random_batch([4, 3], num_masked=(1, 1))
    rollout = batch.old_log_probs.clone()
    rollout[[0, 5]] = value  # token 0 is masked
    options = {"correction": CorrectionSettings(**settings), "rollout_log_probs": rollout.to(backend.device, backend.dtype)}
    if backend.device == "cuda":  # where nobody looks, it is counted
        assert backend.run(LOSSES[name], batch, **options, **CLIP)[0].num_nonfinite.tolist() == [0, 1]
        return
    with pytest.raises(DataError, match="document 1 .*has 1 unmasked tokens .*not finite, in rollout_log_probs;"):
        backend.run(LOSSES[name], batch, **options, **CLIP)


# Estimators of the KL divergence

LOG_PROBS = torch.tensor([-1.0, -0.5, -2.0, -0.2, -1.5, -3.0], dtype=torch.float64)
REFERENCE = torch.tensor([-1.2, -0.5, -1.0, -0.9, -1.5, -2.0], dtype=torch.float64)
POLICY_RATIOS = torch.tensor([1.5, 0.5, 4.0, 1.1, 0.6, 1.25], dtype=torch.float64)
# With d = log_prob - reference: .2, 0, -1, .7, 0, -1.
K3 = [math.exp(-d) + d - 1 for d in (0.2, 0.0, -1.0, 0.7, 0.0, -1.0)]
BY_HAND = {
    "k1": ([0.2, 0, -1, 0.7, 0, -1], [1] * 6),
    "k2": ([0.02, 0, 0.5, 0.245, 0, 0.5], [0.2, 0, -1, 0.7, 0, -1]),
    "k3": (K3, [0.181269, 0, -1.718282, 0.503415, 0, -1.718282]),
    "k3+": (K3, [0.2, 0, -1, 0.7, 0, -1]),
    "unbiased": ([rho * k3 for rho, k3 in zip(POLICY_RATIOS.tolist(), K3, strict=True)], [0.3, 0, -4, 0.77, 0, -1.25]),
}


@pytest.mark.parametrize("estimator", BY_HAND)
def test_value_and_derivative_are_those_by_hand(estimator):
    """FB-92: where the policy is below the reference descent raises it."""
    value, derivative = kl_estimate(estimator, LOG_PROBS, REFERENCE, POLICY_RATIOS.log())
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


def expected(estimator, logits, reference, sampler, name):
    """(value, gradient by the logits [V]) of the KL term, in expectation over samples of `sampler`, through the front door."""
    policy = torch.log_softmax(logits, 0)
    sampler = policy if sampler is None else sampler
    batch = random_batch([1] * VOCABULARY, num_masked=(0,) * VOCABULARY, vocab_size=VOCABULARY)
    batch.logits[:], batch.labels[:], batch.advantages[:] = logits, torch.arange(VOCABULARY), 0.0
    batch.old_log_probs[:] = sampler
    options = {"kl_coefficient": 1.0, "kl_estimator": estimator, "ref_log_probs": reference, "regularizer_weights": sampler.exp()}
    output, gradient = TORCH.run(LOSSES[name], batch, advantages_per="sample", **options, **CLIP)
    return output.loss.detach(), gradient.sum(0)


def test_enumeration_shows_which_gradient_each_estimator_has():
    """On-policy k2 and k3+ have that of the KL, k1 none at all, k3 another one; off-policy only `unbiased` has it."""
    logits, reference, sampler = distribution(0), distribution(1), distribution(2)
    value, gradient = gradient_of_kl(logits, reference)
    exact = 1e-12  # float64

    def error(estimator, sampled_by, name="grpo"):
        found = expected(estimator, logits, reference, sampled_by, name)
        return float((found[1] - gradient).abs().max()), float((found[0] - value).abs())

    for estimator in ("k2", "k3+", "unbiased"):
        assert error(estimator, None)[0] < exact, estimator
    assert error("unbiased", sampler)[0] < exact
    assert error("unbiased", sampler, "gspo")[0] < exact  # FB-117: a sample of one token; its own ratio
    assert float(expected("k1", logits, reference, None, "grpo")[1].abs().max()) < exact
    for estimator in ("k1", "k3"):
        assert error(estimator, None)[0] > 1e-2, estimator
    for estimator in ("k2", "k3", "k3+"):
        assert error(estimator, sampler)[0] > 1e-2, estimator
    # The values: k1 and k3 are unbiased on-policy, `unbiased` off-policy too.
    for estimator, sampled_by in (("k1", None), ("k3", None), ("k3+", None), ("unbiased", None), ("unbiased", sampler)):
        assert error(estimator, sampled_by)[1] < exact, estimator
    assert error("k2", None)[1] > 1e-2 and error("k3", sampler)[1] > 1e-2


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_k3_is_bounded_like_the_ratio(difference):
    """FB-59, FB-93: where the value is saturated the derivative is 0, as autograd gives for the bounded function."""
    value, derivative = kl_estimate("k3", *torch.tensor([[0.0], [difference], [0.0]], dtype=torch.float64))
    bounded = math.copysign(20, difference)
    assert value.item() == pytest.approx(math.exp(bounded) - bounded - 1, rel=1e-12)
    assert derivative.item() == 0.0
