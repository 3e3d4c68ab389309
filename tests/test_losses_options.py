"""The options of the losses: clips, importance weights, KL and entropy terms, temperature, dtypes, memory."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
import torch
from helpers import (
    BATCHES,
    CLIP,
    EXACT,
    assert_same,
    by_loop,
    loop_entropy_sum,
    loop_kl,
    loop_log_probs,
    random_batch,
    run_loss,
    with_gradient,
)
from loss_backends import LOSSES, over_backends

from megatron_rl.losses import gspo_loss
from megatron_rl.losses.options import (
    LinearLossKeywords,
    LinearLossOptions,
    LogitsLossKeywords,
    LogitsLossOptions,
    LossKeywords,
    LossOptions,
)
from megatron_rl.metrics import finalise_metrics


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_without_old_log_probs_the_step_is_on_policy(kind, backend):
    """The ratio is 1 and the gradient -w A, as with the current log-probabilities passed as old ones."""
    batch = BATCHES["ragged"]
    current = replace(batch, old_log_probs=loop_log_probs(batch.logits, batch.labels))
    on_policy = backend.run(LOSSES[kind], replace(batch, old_log_probs=None), metrics="basic")
    assert_same(on_policy, by_loop(kind, current, 0.2, 0.2), **backend.tolerance)
    assert (on_policy[1][batch.loss_mask] != 0).any(1).all(), "nothing is clipped"


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_importance_weights(kind, backend):
    """By token: each one's value and coefficient times u_t. By sample: W_i = w_i sum_t u_t, one coefficient for all tokens."""
    batch = BATCHES["ragged"]
    weights = torch.linspace(0.2, 1.8, 18, dtype=torch.float64)
    got = backend.run(LOSSES[kind], batch, importance_weights=weights, **CLIP)
    assert_same(got, by_loop(kind, batch, importance_weights=weights), **backend.tolerance)


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_numpys_numbers_are_numbers(kind, backend):
    """They come out of everybody's configuration, and no compiled kernel knows their type."""
    numpy = pytest.importorskip("numpy")
    batch = BATCHES["ragged"]
    values = {**CLIP, "temperature": 0.7, "entropy_coefficient": 0.3}
    got, want = (
        backend.run(LOSSES[kind], batch, regularizer_weights=batch.token_weights, **{k: number(v) for k, v in values.items()})
        for number in (numpy.float32, lambda value: float(numpy.float32(value)))
    )
    assert torch.equal(got[0].loss, want[0].loss) and torch.equal(got[1], want[1])


def test_gspo_importance_weights_by_hand():
    """w = 1/2, m = 2, u = (1, 3), A = 1, on-policy: loss -1/2 x 4; coefficient W / m = (1/2 x 4) / 2 = 1 for both."""
    logits = torch.zeros(2, 2, requires_grad=True)
    output = gspo_loss(
        logits,
        torch.tensor([0, 0]),
        None,
        torch.tensor([1.0]),
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0, 2]),
        torch.tensor([0.5]),
        importance_weights=torch.tensor([1.0, 3.0]),
    )
    output.loss.backward()
    assert output.loss.item() == -2.0
    assert logits.grad.tolist() == [[-0.5, 0.5], [-0.5, 0.5]]


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_regularizers_add_their_weighted_sums(kind, backend):
    """FB-75: KL and entropy have their own weights; value, parts and gradient against loops."""
    batch = random_batch([5, 3, 4], seed=15)
    generator = torch.Generator().manual_seed(16)
    reference = batch.old_log_probs + 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)
    v = torch.rand(3, generator=generator, dtype=torch.float64)
    output, gradient = backend.run(
        LOSSES[kind],
        batch,
        ref_log_probs=reference,
        kl_coefficient=0.7,
        entropy_coefficient=0.3,
        regularizer_weights=v,
        **CLIP,
    )
    policy, kl, entropy = (
        by_loop(kind, batch),
        with_gradient(lambda x: loop_kl(batch, x, reference, v), batch.logits),
        with_gradient(lambda x: loop_entropy_sum(batch, x, v), batch.logits),
    )
    parts = (output.policy_loss, output.kl_loss, output.entropy)
    for part, want in zip(parts, (policy[0], kl[0], entropy[0]), strict=True):
        torch.testing.assert_close(part, want, **backend.tolerance)
        assert not part.requires_grad
    whole = [p + 0.7 * k - 0.3 * e for p, k, e in zip(policy, kl, entropy, strict=True)]
    assert_same((output, gradient), whole, **backend.tolerance)


def toy_policy():
    """One context, V = 4: a batch that holds each token in proportion to the policy's own probability (as weights)."""
    logits = torch.tensor([0.1, -0.3, 0.8, 0.0], dtype=torch.float64)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.3], dtype=torch.float64), 0)
    return logits, reference


def regularized(logits, reference, **coefficients):
    """All four tokens as four samples, each weighing its probability: sums are exact expectations under the policy."""
    rows = logits.expand(4, 4)
    return gspo_loss(
        rows,
        torch.arange(4),
        None,
        torch.zeros(4),
        torch.ones(4, dtype=torch.bool),
        torch.arange(5, dtype=torch.int32),
        torch.ones(4, dtype=torch.float64),
        ref_log_probs=reference,
        regularizer_weights=torch.softmax(logits.detach(), 0),
        **coefficients,
    )


def test_kl_term_and_its_gradient_on_a_toy_policy():
    """FB-92, FB-93: the value is KL(policy, reference), its path-wise gradient that of KL(reference, policy): p - ref.

    One step of SGD on it lowers the divergence.
    """
    start, reference = toy_policy()
    logits = start.clone().requires_grad_()
    output = regularized(logits, reference, kl_coefficient=1.0)
    log_p = torch.log_softmax(start, 0)
    kl = (log_p.exp() * (log_p - reference)).sum()
    torch.testing.assert_close(output.kl_loss, kl, **EXACT)
    output.loss.backward()
    torch.testing.assert_close(logits.grad, log_p.exp() - reference.exp(), **EXACT)
    after = torch.log_softmax(start - 0.1 * logits.grad, 0)
    assert (after.exp() * (after - reference)).sum() < kl


def test_entropy_bonus_raises_the_entropy():
    """FB-92: one step of SGD; the gradient is that of the full entropy."""
    start, reference = toy_policy()
    logits = start.clone().requires_grad_()
    output = regularized(logits, reference, entropy_coefficient=1.0)
    output.loss.backward()

    def entropy(x):
        return torch.distributions.Categorical(logits=x).entropy()

    leaf = start.clone().requires_grad_()
    entropy(leaf).backward()
    torch.testing.assert_close(output.entropy, entropy(start), **EXACT)
    torch.testing.assert_close(logits.grad, -leaf.grad, **EXACT)
    assert entropy(start - 0.1 * logits.grad) > entropy(start)


@pytest.mark.parametrize(("kind", "edges"), [("grpo", (0.8, 1.2)), ("gspo", (1 - 3e-4, 1 + 4e-4)), ("cispo", (0.0, 1.28))])
def test_clip_none_is_the_losss_default(kind, edges):
    """FB-72: ratios just inside and just outside, both signs; 1e-6 is far above float64's roundings."""
    for edge, advantage, outward in ((edges[0], -1.0, -1e-6), (edges[1], 1.0, 1e-6)):
        if edge == 0:
            continue  # every ratio lies above it
        for ratio, is_clipped in ((edge - outward, False), (edge + outward, True)):
            batch = random_batch([1], num_masked=(0,))
            old = loop_log_probs(batch.logits, batch.labels) - math.log(ratio)
            batch = replace(batch, old_log_probs=old, advantages=torch.tensor([advantage], dtype=torch.float64))
            output, _ = run_loss(LOSSES[kind], batch, metrics="basic")
            assert finalise_metrics(output.metrics)["policy/clipped_ratio_fraction"] == is_clipped, (ratio, advantage)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_a_ratio_exactly_on_the_edge_keeps_its_gradient(kind):
    """FB-62, through the whole loss: low != high, both signs; one step of rounding beyond the edge it is gone."""
    logits = torch.zeros(2, 4, dtype=torch.float64)
    new = -torch.tensor(4.0, dtype=torch.float64).log()
    for log_ratio, advantage in ((0.3, 1.0), (-0.3, -1.0)):
        old = (new - log_ratio).expand(2).clone()
        edge = (new - old[0]).exp().item()
        batch = replace(
            random_batch([2], num_masked=(0,), vocab_size=4),
            logits=logits,
            old_log_probs=old,
            advantages=torch.tensor([advantage], dtype=torch.float64),
        )
        for step, is_alive in ((0.0, True), (2.0**-52, False)):
            clip = {"clip_ratio_low": 0.01, "clip_ratio_high": edge - 1 - step}
            if advantage < 0:
                clip = {"clip_ratio_low": 1 - edge - step, "clip_ratio_high": 0.01}
            _, gradient = run_loss(LOSSES[kind], batch, **clip)
            assert bool((gradient != 0).all()) == is_alive, (log_ratio, step)


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_temperature_and_padded_vocabulary_reach_the_loss(kind, backend):
    """FB-37, FB-39, FB-82: each option changes the result as the loop says, call after call."""
    batch = BATCHES["ragged"]
    for temperature in (0.5, 2.0):
        got = backend.run(LOSSES[kind], batch, temperature=temperature, **CLIP)
        assert_same(got, by_loop(kind, batch, temperature=temperature), **backend.tolerance)
    wide = replace(batch, logits=torch.cat([batch.logits, torch.full((18, 5), 7.0, dtype=torch.float64)], 1))
    output, gradient = backend.run(LOSSES[kind], wide, vocab_size=11, **CLIP)
    assert_same((output, gradient[:, :11]), by_loop(kind, batch), **backend.tolerance)
    assert (gradient[:, 11:] == 0).all()
    for low, high in ((0.05, 0.3), (0.3, 0.05)):
        got = backend.run(LOSSES[kind], batch, clip_ratio_low=low, clip_ratio_high=high)
        assert_same(got, by_loop(kind, batch, low, high), **backend.tolerance)


@pytest.mark.parametrize("kind", LOSSES)
def test_inplace_and_given_token_counts_change_no_bit(kind):
    """FB-33: inplace writes the same gradient; token_counts given are the ones that would be counted."""
    batch = BATCHES["ragged"]
    want, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    base = batch.logits.clone().requires_grad_()
    counts = torch.tensor([int(batch.loss_mask[d].sum()) for d in batch.documents])
    logits = base * 1
    output = LOSSES[kind](logits, *batch.arguments(), inplace=True, token_counts=counts, **CLIP)
    output.loss.backward()
    assert torch.equal(output.loss, want.loss) and torch.equal(base.grad, gradient)
    assert torch.equal(logits.detach(), gradient), "the gradient took the logits' place"


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_upstream_factors_scale_the_gradient_and_the_report_is_not_aliased(kind, backend):
    """FB-52: the schedule divides the returned loss in place; the detached parts and the gradient keep their values."""
    batch = BATCHES["ragged"]
    want, gradient = backend.run(LOSSES[kind], batch, metrics="basic", **CLIP)
    output, divided = backend.run(LOSSES[kind], batch, divisor=4, metrics="basic", **CLIP)
    assert torch.equal(output.loss, want.loss / 4)
    assert torch.equal(output.policy_loss, want.policy_loss)
    assert torch.equal(output.metrics.values, want.metrics.values)
    torch.testing.assert_close(divided, gradient / 4, **EXACT)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_precision_follows_the_logits(kind, dtype):
    """FB-34: float32 inside for 16-bit logits, gradient in the logits' dtype, loss in float32."""
    batch = BATCHES["ragged"]
    batch = replace(
        batch,
        logits=batch.logits.to(dtype),
        old_log_probs=batch.old_log_probs.float(),
        advantages=batch.advantages.float(),
    )
    output, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    assert (output.loss.dtype, gradient.dtype) == (torch.float32, dtype)
    loss, exact = by_loop(kind, replace(batch, logits=batch.logits.double()))
    # float32: 1e-6 of numbers near 1. bfloat16: the one rounding of each gradient element to 8 bits.
    torch.testing.assert_close(output.loss.detach().double(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        pytest.param(LossKeywords, LossOptions, id="of both heads"),
        pytest.param(LogitsLossKeywords, LogitsLossOptions, id="policy_loss"),
        pytest.param(LinearLossKeywords, LinearLossOptions, id="linear_policy_loss"),
    ],
)
def test_a_type_checker_knows_the_keywords_that_the_losses_take(keywords, options):
    """Catches an option that is added to one of the two: refused by a type checker, or by the loss behind it."""
    of_options = get_type_hints(options)
    assert get_type_hints(keywords) == {field.name: of_options[field.name] for field in fields(options)}
    assert not keywords.__required_keys__, "each has a default"
