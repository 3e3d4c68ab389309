"""The options of the losses: clips, importance weights, KL and entropy terms, temperature, dtypes, memory."""

from __future__ import annotations

import math
from dataclasses import replace

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
from loss_backends import LOSSES, over_backends, over_losses

from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.losses import gspo_loss
from megatron_rl.metrics import finalise_metrics

SMALL = random_batch([4, 1, 3], seed=15)


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_without_old_log_probs_the_step_is_on_policy(kind, backend):
    """The gradient is -w A, as with the current log-probabilities as old ones; the ratio is 1, unclipped at distance 0."""
    current = replace(SMALL, old_log_probs=loop_log_probs(SMALL.logits, SMALL.labels))
    clip = {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}
    output, gradient = backend.run(LOSSES[kind], replace(SMALL, old_log_probs=None), metrics="basic", **clip)
    assert_same((output, gradient), by_loop(kind, current, 0.2, 0.2), **backend.tolerance)
    metrics = finalise_metrics(output.metrics)
    assert (
        metrics["policy/ratio_new_old"] == 1.0 and metrics["policy/clipped_ratio_fraction"] == metrics["policy/kl_new_old"] == 0.0
    )


@over_backends
def test_numpys_numbers_are_numbers(backend):
    """They come out of everybody's configuration, and no compiled kernel knows their type."""
    numpy = pytest.importorskip("numpy")
    values = {**CLIP, "temperature": 0.7, "entropy_coefficient": 0.3}
    got, want = (
        backend.run(LOSSES["grpo"], SMALL, regularizer_weights=SMALL.token_weights, **{k: number(v) for k, v in values.items()})
        for number in (numpy.float32, lambda value: float(numpy.float32(value)))
    )
    assert torch.equal(got[0].loss, want[0].loss) and torch.equal(got[1], want[1])


def test_gspo_importance_weights_by_hand():
    """w = 1/2, m = 2, u = (1, 3), A = 1, on-policy: loss -1/2 x 4; coefficient W / m = (1/2 x 4) / 2 = 1 for both."""
    logits = torch.zeros(2, 2, requires_grad=True)
    given = (torch.tensor([0, 0]), None, torch.tensor([1.0]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    output = gspo_loss(logits, *given, torch.tensor([0.5]), importance_weights=torch.tensor([1.0, 3.0]))
    output.loss.backward()
    assert output.loss.item() == -2.0
    assert logits.grad.tolist() == [[-0.5, 0.5], [-0.5, 0.5]]


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_importance_weights_and_regularizers_add_their_weighted_sums(kind, backend):
    """FB-75: KL and entropy have weights of their own, and no importance weight; value, parts and gradient against loops."""
    generator = torch.Generator().manual_seed(16)
    reference = SMALL.old_log_probs + 0.3 * torch.randn(8, generator=generator, dtype=torch.float64)
    v, u = torch.rand(3, generator=generator, dtype=torch.float64), torch.linspace(0.2, 1.8, 8, dtype=torch.float64)
    terms = {"ref_log_probs": reference, "kl_coefficient": 0.7, "entropy_coefficient": 0.3, "regularizer_weights": v}
    output, gradient = backend.run(LOSSES[kind], SMALL, importance_weights=u, **terms, **CLIP)
    policy, kl, entropy = (
        by_loop(kind, SMALL, importance_weights=u),
        with_gradient(lambda x: loop_kl(SMALL, x, reference, v), SMALL.logits),
        with_gradient(lambda x: loop_entropy_sum(SMALL, x, v), SMALL.logits),
    )
    for part, (want, _) in zip((output.policy_loss, output.kl_loss, output.entropy), (policy, kl, entropy), strict=True):
        torch.testing.assert_close(part, want, **backend.tolerance)
        assert not part.requires_grad
    whole = [p + 0.7 * k - 0.3 * e for p, k, e in zip(policy, kl, entropy, strict=True)]
    assert_same((output, gradient), whole, **backend.tolerance)


def test_kl_and_entropy_terms_and_their_gradients_on_a_toy_policy():
    """FB-92, FB-93: the KL term is KL(policy, reference), its path-wise gradient that of KL(reference, policy): p - ref. A step of
    SGD lowers it, and one on the bonus raises the entropy. All four tokens are samples that weigh their probability."""
    start = torch.tensor([0.1, -0.3, 0.8, 0.0], dtype=torch.float64)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.3], dtype=torch.float64), 0)

    def kl(x):
        log_p = torch.log_softmax(x, 0)
        return (log_p.exp() * (log_p - reference)).sum()

    def entropy(x):
        return torch.distributions.Categorical(logits=x).entropy()

    gradients = {"kl_coefficient": start.softmax(0) - reference.exp(), "entropy_coefficient": -with_gradient(entropy, start)[1]}
    for name, gradient in gradients.items():
        logits = start.clone().requires_grad_()
        given = (torch.arange(4), None, torch.zeros(4), torch.ones(4, dtype=torch.bool), torch.arange(5, dtype=torch.int32))
        terms = {"ref_log_probs": reference, "regularizer_weights": start.softmax(0), name: 1.0}
        output = gspo_loss(logits.expand(4, 4), *given, torch.ones(4, dtype=torch.float64), **terms)
        output.loss.backward()
        torch.testing.assert_close(logits.grad, gradient, **EXACT)
        found, wanted = (output.kl_loss, kl(start)) if name == "kl_coefficient" else (output.entropy, entropy(start))
        torch.testing.assert_close(found, wanted, **EXACT)
        after = start - 0.1 * logits.grad
        assert kl(after) < kl(start) if name == "kl_coefficient" else entropy(after) > entropy(start)


@pytest.mark.parametrize("kind", LOSSES)
def test_clip_none_is_the_losss_default(kind):
    """FB-72: ratios just inside and just outside, both signs; 1e-6 is far above float64's roundings."""
    low, high = get_policy_loss(kind).clip_ratios
    for edge, advantage, outward in ((1 - low, -1.0, -1e-6), (1 + high, 1.0, 1e-6)):
        if edge == 0:
            continue  # every ratio lies above it
        for ratio, is_clipped in ((edge - outward, False), (edge + outward, True)):
            batch = random_batch([1], num_masked=(0,))
            old = loop_log_probs(batch.logits, batch.labels) - math.log(ratio)
            batch = replace(batch, old_log_probs=old, advantages=torch.tensor([advantage], dtype=torch.float64))
            output, _ = run_loss(LOSSES[kind], batch, metrics="basic")
            assert finalise_metrics(output.metrics)["policy/clipped_ratio_fraction"] == is_clipped, (ratio, advantage)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@over_backends
def test_a_ratio_exactly_on_the_edge_keeps_its_gradient(kind, backend):
    """FB-62: low != high, both signs; a rounding step beyond the edge it is gone. The edge is the backend's own ratio."""
    step = torch.finfo(backend.dtype).eps
    for log_ratio, advantage in ((0.3, 1.0), (-0.3, -1.0)):
        batch = replace(
            random_batch([1], num_masked=(0,), vocab_size=4),
            logits=torch.zeros(1, 4, dtype=torch.float64),
            old_log_probs=torch.full((1,), -math.log(4) - log_ratio, dtype=torch.float64),
            advantages=torch.tensor([advantage], dtype=torch.float64),
        )
        wide, _ = backend.run(LOSSES[kind], batch, metrics="basic", clip_ratio_low=0.9, clip_ratio_high=9.0)
        edge = finalise_metrics(wide.metrics)["policy/ratio_new_old"]
        assert edge == pytest.approx(math.exp(log_ratio), rel=1e-6)
        for beyond, is_alive in ((0.0, True), (step if advantage > 0 else step / 2, False)):
            clip = {"clip_ratio_low": 0.01, "clip_ratio_high": edge - 1 - beyond}
            if advantage < 0:
                clip = {"clip_ratio_low": 1 - edge - beyond, "clip_ratio_high": 0.01}
            _, gradient = backend.run(LOSSES[kind], batch, **clip)
            assert bool((gradient != 0).all()) == is_alive, (log_ratio, beyond)


@over_losses
def test_temperature_padded_vocabulary_and_clips_reach_the_loss(kind, backend, _):
    """FB-37, FB-39, FB-82: each option changes the result as the loop says, call after call."""
    got = backend.run(LOSSES[kind], SMALL, temperature=0.5, **CLIP)
    assert_same(got, by_loop(kind, SMALL, temperature=0.5), **backend.tolerance)
    wide = replace(SMALL, logits=torch.cat([SMALL.logits, torch.full((8, 5), 7.0, dtype=torch.float64)], 1))
    output, gradient = backend.run(LOSSES[kind], wide, vocab_size=11, **CLIP)
    assert_same((output, gradient[:, :11]), by_loop(kind, SMALL), **backend.tolerance)
    assert (gradient[:, 11:] == 0).all()
    got = backend.run(LOSSES[kind], SMALL, clip_ratio_low=0.3, clip_ratio_high=0.05)
    assert_same(got, by_loop(kind, SMALL, 0.3, 0.05), **backend.tolerance)


@pytest.mark.parametrize("kind", LOSSES)
def test_inplace_and_given_token_counts_change_no_bit(kind):
    """FB-33: inplace writes the same gradient; token_counts given are the ones that would be counted."""
    want, gradient = run_loss(LOSSES[kind], SMALL, **CLIP)
    base = SMALL.logits.clone().requires_grad_()
    counts = torch.tensor([int(SMALL.loss_mask[d].sum()) for d in SMALL.documents])
    logits = base * 1
    output = LOSSES[kind](logits, *SMALL.arguments(), inplace=True, token_counts=counts, **CLIP)
    output.loss.backward()
    assert torch.equal(output.loss, want.loss) and torch.equal(base.grad, gradient)
    assert torch.equal(logits.detach(), gradient), "the gradient took the logits' place"


@over_losses
def test_upstream_factors_scale_the_gradient_and_the_report_is_not_aliased(kind, backend, _):
    """FB-52: the schedule divides the returned loss in place; the detached parts and the gradient keep their values."""
    want, gradient = backend.run(LOSSES[kind], SMALL, metrics="basic", **CLIP)
    output, divided = backend.run(LOSSES[kind], SMALL, divisor=4, metrics="basic", **CLIP)
    assert torch.equal(output.loss, want.loss / 4)
    assert torch.equal(output.policy_loss, want.policy_loss)
    assert torch.equal(output.metrics.values, want.metrics.values)
    torch.testing.assert_close(divided, gradient / 4, **EXACT)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_precision_follows_the_logits(kind, dtype):
    """FB-34: float32 inside for 16-bit logits, gradient in the logits' dtype, loss in float32."""
    batch = BATCHES["ragged"]
    others = {"old_log_probs": batch.old_log_probs.float(), "advantages": batch.advantages.float()}
    batch = replace(batch, logits=batch.logits.to(dtype), **others)
    output, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    assert (output.loss.dtype, gradient.dtype) == (torch.float32, dtype)
    loss, exact = by_loop(kind, replace(batch, logits=batch.logits.double()))
    # float32: 1e-6 of numbers near 1. bfloat16: the one rounding of each gradient element to 8 bits.
    torch.testing.assert_close(output.loss.detach().double(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
