"""GRPO and GSPO on one rank: loss and logits gradient against loops in float64, and every way in which bad input is met."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from helpers import (
    clipped,
    loop_entropy_sum,
    loop_kl,
    loop_log_probs,
    loop_policy_loss,
    padded,
    random_batch,
    run_loss,
    with_gradient,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_rl.loss_hub as loss_hub
from megatron_rl.aggregation import count_step, sample_token_weights
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.collectives import all_reduce_sum
from megatron_rl.layout.packing import document_ids, document_sums, spread
from megatron_rl.loss_hub import loss_aggregation_names, policy_loss_names, register_loss_aggregation, register_policy_loss
from megatron_rl.losses import grpo_loss, gspo_loss, policy_loss

LOSSES = {"grpo": grpo_loss, "gspo": gspo_loss}
# About a third of the ratios of random_batch is clipped; low and high differ, so that swapping them shows (FB-62).
CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
# float64 throughout: what is left are roundings.
EXACT = {"rtol": 1e-10, "atol": 1e-12}
BATCHES = {
    "ragged": random_batch([5, 1, 9, 3]),
    "FB-60 one-token responses alone, first and last": random_batch([1, 6, 1], num_masked=(0, 2, 0), seed=1),
    "FB-64 zero-length documents at start, middle and end": random_batch([0, 4, 0, 0, 3, 0], seed=2),
    "FB-55 a fully masked document": random_batch([4, 3, 5], num_masked=(1, 3, 0), seed=3),
    "one document": random_batch([12], seed=4),
}


def by_loop(kind, batch, low=0.1, high=0.15, **options):
    return with_gradient(lambda logits: loop_policy_loss(kind, batch, logits, low=low, high=high, **options), batch.logits)


def assert_same(got, want, **tolerance):
    """(output, gradient) against (loss, gradient)."""
    torch.testing.assert_close(got[0].loss.detach(), want[0], **(tolerance or EXACT))
    torch.testing.assert_close(got[1], want[1], **(tolerance or EXACT))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("name", BATCHES)
def test_loss_and_gradient_are_those_of_a_loop(kind, name):
    """FB-65: the packed loss equals a loop over samples, each by itself; FB-19: GSPO's gradient does not grow with length."""
    batch = BATCHES[name]
    output, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    assert_same((output, gradient), by_loop(kind, batch))
    torch.testing.assert_close(output.policy_loss, output.loss.detach())
    truth = torch.where(batch.loss_mask, loop_log_probs(batch.logits, batch.labels), 0)
    torch.testing.assert_close(output.log_probs, truth, **EXACT)
    assert (output.kl_loss, output.entropy, output.metrics) == (None, None, None), "what is off is None"
    assert output.num_nonfinite.tolist() == [0] * len(batch.documents) and output.num_nonfinite.dtype == torch.int32
    if name == "ragged":
        assert (gradient[batch.loss_mask] == 0).all(1).any(), "the test means nothing without a clipped token"


def test_step_s_by_hand_through_the_whole_loss():
    """FB-06, FB-19: V = 2 equal logits, on-policy, A = (1, 2, 3, -) negated: the losses of step S for both levels."""
    lengths, masks = (2, 4, 1, 3), [torch.ones(2), torch.ones(4), torch.ones(1), torch.zeros(3)]
    totals, counts, prompt_counts = count_step(masks, ["a", "a", "b", "b"])
    bounds = torch.tensor([0, 2, 6, 7, 10])
    expected = {"sample_mean": 3 / 2, "prompt_mean": 7 / 3, "token_mean": 13 / 7, "constant": 13 / 32}
    for mode, total in expected.items():
        divisor = 8.0 if mode == "constant" else None
        weights = sample_token_weights(mode, counts, totals, prompt_token_counts=prompt_counts, divisor=divisor)
        for loss in LOSSES.values():
            # Tails of padding change nothing (FB-05).
            for tail in (0, 7, 64):
                logits = torch.zeros(10 + tail, 2, requires_grad=True)
                mask = torch.cat([*masks, torch.ones(tail)]).bool()
                advantages = torch.tensor([-1.0, -2.0, -3.0, 5.0])
                output = loss(logits, torch.zeros(10 + tail, dtype=torch.int64), None, advantages, mask, bounds, weights)
                assert output.loss.item() == pytest.approx(total, rel=1e-6)
                output.loss.backward()
                # d value / d log_prob = -A, d log_prob / d logits = (1 - p, -p) = (1/2, -1/2).
                rows = [w * a / 2 for w, a, n in zip(weights.tolist(), (1, 2, 3, 0), lengths, strict=True) for _ in range(n)]
                assert logits.grad[:10, 0].tolist() == pytest.approx(rows, rel=1e-6)
                assert (logits.grad[10:] == 0).all() and (logits.grad[:, 1] == -logits.grad[:, 0]).all()


def test_gspo_with_sample_mean_is_the_papers_loop():
    """FB-19: (1/N) sum_i min(s_i A_i, clip(s_i) A_i) of arXiv:2507.18071, equation 5; a [B, 1] loss over the mask would grow."""
    batch = BATCHES["ragged"]
    masks = [batch.loss_mask[document] for document in batch.documents]
    totals, counts, _ = count_step(masks)
    batch = replace(batch, token_weights=sample_token_weights("sample_mean", counts, totals).double())

    def paper(logits):
        terms = []
        for i, document in enumerate(batch.documents):
            own = [t for t in document if batch.loss_mask[t]]
            new = loop_log_probs(logits[own], batch.labels[own])
            s, a = ((new - batch.old_log_probs[own]).sum() / len(own)).exp(), batch.advantages[i]
            terms.append(torch.minimum(s * a, torch.clamp(s, 1 - 0.1, 1 + 0.15) * a))
        return -sum(terms) / len(terms)

    # float32 weights: 1e-7.
    assert_same(run_loss(gspo_loss, batch, **CLIP), with_gradient(paper, batch.logits), rtol=1e-6, atol=1e-9)


def test_with_one_token_per_sample_gspo_is_grpo():
    """FB-19, FB-60: m_i = 1 makes the mean over the sample that one token."""
    batch = random_batch([1, 1, 3, 1], num_masked=(0, 0, 2, 0), seed=6)
    (first, gradient), (second, gradient_2) = (run_loss(loss, batch, **CLIP) for loss in LOSSES.values())
    torch.testing.assert_close(first.loss, second.loss, **EXACT)
    torch.testing.assert_close(gradient, gradient_2, **EXACT)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_response_of_one_token_is_trained(kind):
    """FB-60: the gradient lies in exactly the logit row that gives it, the last of the prompt."""
    for lengths, masked, row in (([4], (3,), 3), ([4, 5], (3, 5), 3), ([5, 4], (5, 3), 8)):
        batch = random_batch(lengths, num_masked=masked, seed=7, noise=0.01)
        _, gradient = run_loss(LOSSES[kind], batch, **CLIP)
        assert (gradient != 0).any(1).nonzero()[:, 0].tolist() == [row]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_pack_is_the_sum_of_its_samples_one_by_one(kind):
    """FB-64: wrong boundaries show in neither shape nor sum of a single sample."""
    batch = BATCHES["ragged"]
    output, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    parts = [run_loss(LOSSES[kind], batch.take([d], [i]), **CLIP) for i, d in enumerate(batch.documents)]
    torch.testing.assert_close(output.loss.detach(), sum(part.loss.detach() for part, _ in parts), **EXACT)
    torch.testing.assert_close(gradient, torch.cat([g for _, g in parts]), **EXACT)
    torch.testing.assert_close(output.log_probs, torch.cat([part.log_probs for part, _ in parts]))


@pytest.mark.parametrize("kind", LOSSES)
def test_permuting_the_samples_permutes_the_result(kind):
    """FB-47: an order that is not restored shows in .log_probs; loss and metrics do not move."""
    batch, order = BATCHES["ragged"], [2, 0, 3, 1]
    shuffled = batch.take([batch.documents[i] for i in order], order)
    positions = [t for i in order for t in batch.documents[i]]
    (output, gradient), (other, other_gradient) = (
        run_loss(LOSSES[kind], b, metrics="with_entropy", **CLIP) for b in (batch, shuffled)
    )
    torch.testing.assert_close(other.loss, output.loss, **EXACT)
    torch.testing.assert_close(other.metrics.values, output.metrics.values, **EXACT)
    assert torch.equal(other.log_probs, output.log_probs[positions])
    torch.testing.assert_close(other_gradient, gradient[positions], **EXACT)


# ---- advantages


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("per", [None, "token"])
def test_advantages_per_token_equal_those_per_sample(kind, per):
    """FB-65, FB-68: [N] and [T] mean the same; masked positions and padding of [T] may hold anything."""
    batch = padded(BATCHES["FB-55 a fully masked document"], 2)
    token_advantages = torch.full((14,), math.nan, dtype=torch.float64)
    for i, document in enumerate(batch.documents):
        for t in document:
            if batch.loss_mask[t]:
                token_advantages[t] = batch.advantages[i]
    per_sample = run_loss(LOSSES[kind], batch, **CLIP)
    per_token = run_loss(LOSSES[kind], replace(batch, advantages=token_advantages), advantages_per=per, **CLIP)
    assert torch.equal(per_token[0].loss, per_sample[0].loss)
    assert torch.equal(per_token[1], per_sample[1])


def test_grpo_takes_advantages_that_vary_inside_a_sample():
    batch = BATCHES["ragged"]
    advantages = torch.linspace(-2, 2, 18, dtype=torch.float64)
    got = run_loss(grpo_loss, replace(batch, advantages=advantages), **CLIP)
    assert_same(got, by_loop("grpo", batch, token_advantages=advantages))


def test_gspo_refuses_advantages_that_vary_inside_a_sample():
    """FB-68: never an average. A difference of 1e-3 in one token of nine is found."""
    batch = BATCHES["ragged"]
    advantages = torch.ones(18, dtype=torch.float64)
    advantages[9] += 1e-3
    with pytest.raises(DataError, match="advantages vary inside document 2: a sequence-level loss takes one advantage"):
        run_loss(gspo_loss, replace(batch, advantages=advantages), **CLIP)


@pytest.mark.parametrize("kind", LOSSES)
def test_advantages_that_fit_both_readings_need_a_word(kind):
    """N == T = 3 with documents of 2, 0 and 1 tokens: [3] could be either, and a guess would be silently wrong."""
    batch = random_batch([2, 0, 1], num_masked=(0, 0, 0), seed=8)
    with pytest.raises(DataError, match='fit both 3 samples and 3 tokens.*advantages_per="sample" or "token"'):
        run_loss(LOSSES[kind], batch, **CLIP)
    assert_same(run_loss(LOSSES[kind], batch, advantages_per="sample", **CLIP), by_loop(kind, batch))
    per_token = torch.tensor([0.5, 0.5, -1.0], dtype=torch.float64)
    got = run_loss(LOSSES[kind], replace(batch, advantages=per_token), advantages_per="token", **CLIP)
    assert_same(got, by_loop(kind, batch, token_advantages=per_token))


def test_documents_of_one_token_each_need_no_word():
    batch = random_batch([1, 1, 1], num_masked=(0, 0, 0), seed=9)
    assert_same(run_loss(gspo_loss, batch, **CLIP), by_loop("gspo", batch))


# ---- masks, overflow, non-finite values


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
def test_masked_positions_may_hold_anything(kind, junk):
    """FB-56, FB-57: bit-equal to clean input, for the policy, KL and entropy terms, importance weights and all metrics.

    The masked tokens lie inside samples whose other tokens keep their gradient.
    """
    clean = random_batch([6, 5, 2], num_masked=(2, 1, 2), seed=10)
    dirty_rows = ~clean.loss_mask
    per_token = {
        "importance_weights": torch.linspace(0.5, 1.5, 13, dtype=torch.float64),
        "ref_log_probs": clean.old_log_probs - 0.1,
    }

    def dirty(x):
        return torch.where(dirty_rows if x.dim() == 1 else dirty_rows[:, None], junk, x)

    labels = torch.where(dirty_rows, -100 if junk < 0 else 11 + 5, clean.labels)
    # The advantage of the fully masked third document.
    advantages = clean.advantages.clone()
    advantages[2] = junk
    batch = replace(
        clean, logits=dirty(clean.logits), labels=labels, old_log_probs=dirty(clean.old_log_probs), advantages=advantages
    )
    options = {
        "regularizer_weights": clean.token_weights,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "metrics": "with_entropy",
        **CLIP,
    }
    got, gradient = run_loss(LOSSES[kind], batch, **{k: dirty(v) for k, v in per_token.items()}, **options)
    want, clean_gradient = run_loss(LOSSES[kind], clean, **per_token, **options)
    for name in ("loss", "policy_loss", "kl_loss", "entropy", "log_probs", "num_nonfinite"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.metrics.values, want.metrics.values)
    assert torch.equal(gradient, clean_gradient)
    assert (gradient[clean.loss_mask] != 0).any(1).all(), "FB-57: the other tokens keep a gradient"


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("tail", [1, 63])
def test_a_tail_of_padding_changes_nothing(kind, tail):
    """FB-63: padding past cu_seqlens[-1] is out of every document, whatever its mask and contents."""
    batch = BATCHES["ragged"]
    got, gradient = run_loss(LOSSES[kind], padded(batch, tail), metrics="basic", **CLIP)
    want, clean_gradient = run_loss(LOSSES[kind], batch, metrics="basic", **CLIP)
    # The sums run over other lengths and so round in another order; nothing else may differ by a bit.
    torch.testing.assert_close(got.loss, want.loss, **EXACT)
    torch.testing.assert_close(got.metrics.values, want.metrics.values, **EXACT)
    assert torch.equal(gradient[:-tail], clean_gradient) and (gradient[-tail:] == 0).all()
    assert torch.equal(got.log_probs[:-tail], want.log_probs)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_no_log_ratio_makes_the_loss_or_its_gradient_infinite(kind, log_ratio, advantage):
    """FB-59: exp before clip, or 0 x inf in backward; A = 0 is exactly 0, a saturated or clipped gradient exactly 0."""
    batch = random_batch([3, 4], num_masked=(0, 1), seed=11)
    log_probs = loop_log_probs(batch.logits, batch.labels)
    batch = replace(batch, old_log_probs=log_probs - log_ratio, advantages=torch.full((2,), advantage, dtype=torch.float64))
    output, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    assert (gradient == 0).all()
    if advantage == 0:
        assert output.loss.item() == 0.0
    # Both documents have 3 unmasked tokens, all with the same value: that of the ratio bounded to e^(+-20).
    ratio = torch.tensor(math.copysign(20, log_ratio), dtype=torch.float64).exp()
    expected = 3 * batch.token_weights.sum() * clipped(ratio, advantage, 0.1, 0.15)
    torch.testing.assert_close(output.loss.detach(), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["logits", "old_log_probs", "advantages", "importance_weights", "ref_log_probs", "labels"])
def test_an_unmasked_value_that_is_not_finite_stops_the_step(kind, value, tensor):
    """FB-58, FB-41: never a NaN policy that trains as if on-policy; the message names document and tensor."""
    batch = random_batch([3, 4, 2], num_masked=(0, 1, 0), seed=12)
    options = {
        "importance_weights": torch.ones(9),
        "ref_log_probs": batch.old_log_probs.clone(),
        "kl_coefficient": 0.1,
        "regularizer_weights": torch.ones(3),
    }
    # Token 5 is unmasked and belongs to document 1.
    if tensor in options:
        options[tensor][5] = value
    elif tensor == "labels":
        batch.logits[5, batch.labels[5]] = -math.inf
    else:
        getattr(batch, tensor)[1 if tensor == "advantages" else 5] = value
    named = "log_probs" if tensor in ("logits", "labels") else tensor
    with pytest.raises(DataError, match=f"document 1 of the micro-batch has .* not finite, in .*{named}.*; 1 documents"):
        run_loss(LOSSES[kind], batch, **options, **CLIP)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_masked_label_of_probability_zero_is_no_fault(kind):
    """FB-41, the allowing half."""
    batch = random_batch([3, 4], num_masked=(1, 1), seed=13)
    batch.logits[3, batch.labels[3]] = -math.inf
    assert_same(run_loss(LOSSES[kind], batch, **CLIP), by_loop(kind, batch))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("lengths", [[3, 2], [0, 0], []], ids=["all masked", "no token", "no document"])
def test_an_idle_rank_stays_in_the_graph(kind, lengths):
    """FB-25, FB-55: the loss is 0, still depends on the logits, and backward returns zeros: no collective is skipped."""
    batch = random_batch(lengths, num_masked=tuple(lengths), seed=14)
    output, gradient = run_loss(LOSSES[kind], batch, metrics="with_entropy", **CLIP)
    assert output.loss.item() == 0.0 and output.loss.requires_grad
    assert gradient.shape == batch.logits.shape and (gradient == 0).all()


# ---- options


@pytest.mark.parametrize("kind", LOSSES)
def test_without_old_log_probs_the_step_is_on_policy(kind):
    """The ratio is 1 and the gradient -w A, as with the current log-probabilities passed as old ones."""
    batch = BATCHES["ragged"]
    current = replace(batch, old_log_probs=loop_log_probs(batch.logits, batch.labels))
    on_policy = run_loss(LOSSES[kind], replace(batch, old_log_probs=None), metrics="basic")
    assert_same(on_policy, by_loop(kind, current, 0.2, 0.2))
    counts = torch.tensor([int(batch.loss_mask[d].sum()) for d in batch.documents])
    assert on_policy[0].loss.item() == pytest.approx(-(batch.token_weights * counts * batch.advantages).sum().item())
    assert (on_policy[1][batch.loss_mask] != 0).any(1).all(), "nothing is clipped"


@pytest.mark.parametrize("kind", LOSSES)
def test_importance_weights(kind):
    """GRPO: each token's value and coefficient times u_t. GSPO: W_i = w_i sum_t u_t, the same coefficient for each token."""
    batch = BATCHES["ragged"]
    weights = torch.linspace(0.2, 1.8, 18, dtype=torch.float64)
    got = run_loss(LOSSES[kind], batch, importance_weights=weights, **CLIP)
    assert_same(got, by_loop(kind, batch, importance_weights=weights))


def test_gspo_importance_weights_by_hand():
    """w = 1/2, m = 2, u = (1, 3), A = 1, on-policy: loss -1/2 x 4; coefficient (W/m) = (1/2 x 4)/2 = 1 for both tokens."""
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
def test_regularizers_add_their_weighted_sums(kind):
    """FB-75: KL and entropy have their own weights; value, parts and gradient against loops."""
    batch = random_batch([5, 3, 4], seed=15)
    generator = torch.Generator().manual_seed(16)
    reference = batch.old_log_probs + 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)
    v = torch.rand(3, generator=generator, dtype=torch.float64)
    output, gradient = run_loss(
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
        torch.testing.assert_close(part, want, **EXACT)
        assert not part.requires_grad
    assert_same((output, gradient), [p + 0.7 * k - 0.3 * e for p, k, e in zip(policy, kl, entropy, strict=True)])


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
    """FB-92, FB-93: the value is KL(policy, reference); its path-wise gradient is that of KL(reference, policy): p - ref.

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


@pytest.mark.parametrize(("kind", "edges"), [("grpo", (0.8, 1.2)), ("gspo", (1 - 3e-4, 1 + 4e-4))])
def test_clip_none_is_the_losss_default(kind, edges):
    """FB-72: ratios just inside and just outside, both signs; 1e-6 is far above float64's roundings."""
    for edge, advantage, outward in ((edges[0], -1.0, -1e-6), (edges[1], 1.0, 1e-6)):
        for ratio, is_clipped in ((edge - outward, False), (edge + outward, True)):
            batch = random_batch([1], num_masked=(0,))
            old = loop_log_probs(batch.logits, batch.labels) - math.log(ratio)
            batch = replace(batch, old_log_probs=old, advantages=torch.tensor([advantage], dtype=torch.float64))
            _, gradient = run_loss(LOSSES[kind], batch, metrics="none")
            assert bool((gradient == 0).all()) == is_clipped, (ratio, advantage)


@pytest.mark.parametrize("kind", LOSSES)
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
def test_temperature_and_padded_vocabulary_reach_the_loss(kind):
    """FB-37, FB-39, FB-82: each option changes the result as the loop says, call after call."""
    batch = BATCHES["ragged"]
    for temperature in (0.5, 2.0):
        assert_same(run_loss(LOSSES[kind], batch, temperature=temperature, **CLIP), by_loop(kind, batch, temperature=temperature))
    wide = replace(batch, logits=torch.cat([batch.logits, torch.full((18, 5), 7.0, dtype=torch.float64)], 1))
    output, gradient = run_loss(LOSSES[kind], wide, vocab_size=11, **CLIP)
    assert_same((output, gradient[:, :11]), by_loop(kind, batch))
    assert (gradient[:, 11:] == 0).all()
    for low, high in ((0.05, 0.3), (0.3, 0.05)):
        got = run_loss(LOSSES[kind], batch, clip_ratio_low=low, clip_ratio_high=high)
        assert_same(got, by_loop(kind, batch, low, high))


@pytest.mark.parametrize("kind", LOSSES)
def test_inplace_and_given_token_counts_change_no_bit(kind):
    """FB-33: inplace writes the same gradient; token_counts given are the ones that would be counted."""
    batch = BATCHES["ragged"]
    want, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    base = batch.logits.clone().requires_grad_()
    counts = torch.tensor([int(batch.loss_mask[d].sum()) for d in batch.documents])
    output = LOSSES[kind](base * 1, *batch.arguments(), inplace=True, token_counts=counts, **CLIP)
    output.loss.backward()
    assert torch.equal(output.loss, want.loss) and torch.equal(base.grad, gradient)


@pytest.mark.parametrize("kind", LOSSES)
def test_upstream_factors_scale_the_gradient_and_the_report_is_not_aliased(kind):
    """FB-52: the schedule divides the returned loss in place; the detached parts and the gradient keep their values."""
    batch = BATCHES["ragged"]
    want, gradient = run_loss(LOSSES[kind], batch, metrics="basic", **CLIP)
    leaf = batch.logits.clone().requires_grad_()
    output = LOSSES[kind](leaf, *batch.arguments(), metrics="basic", **CLIP)
    output.loss.div_(4)
    output.loss.backward()
    assert torch.equal(output.policy_loss, want.policy_loss)
    assert torch.equal(output.metrics.values, want.metrics.values)
    torch.testing.assert_close(leaf.grad, gradient / 4, **EXACT)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_precision_follows_the_logits(kind, dtype):
    """FB-34: float32 inside for 16-bit logits, gradient in the logits' dtype, loss in float32."""
    batch = BATCHES["ragged"]
    batch = replace(batch, logits=batch.logits.to(dtype), old_log_probs=batch.old_log_probs.float(), advantages=batch.advantages.float())
    output, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    assert (output.loss.dtype, gradient.dtype) == (torch.float32, dtype)
    loss, exact = by_loop(kind, replace(batch, logits=batch.logits.double()))
    # float32: 1e-6 of numbers near 1. bfloat16: the one rounding of each gradient element to 8 bits.
    torch.testing.assert_close(output.loss.detach().double(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


# ---- any layout of a step over micro-batches


def token_loss_of_a_user(log_probs, old_log_probs, advantages, loss_mask, cu_seqlens, token_counts, **settings):
    """Squared log-ratio times the advantage."""
    log_ratio = torch.where(loss_mask, log_probs - old_log_probs, 0.0)
    advantages = torch.where(loss_mask, advantages, 0.0)
    return advantages * log_ratio.square(), 2 * advantages * log_ratio


def sample_loss_of_a_user(log_probs, old_log_probs, advantages, loss_mask, cu_seqlens, token_counts, **settings):
    """Each token has its sample's summed log-ratio times the advantage: the derivative of the document's sum is m_i A_i."""
    sums = document_sums(torch.where(loss_mask, log_probs - old_log_probs, 0.0), cu_seqlens)
    sums = all_reduce_sum(sums, settings["cp_group"])
    documents = document_ids(cu_seqlens, log_probs.shape[0])
    values, derivative = spread(sums * advantages, documents), spread(token_counts * advantages, documents)
    return torch.where(loss_mask, values, 0.0), torch.where(loss_mask, derivative, 0.0)


def aggregation_of_a_user(token_counts, totals, *, prompt_token_counts, divisor):
    return 1.0 / (totals.num_samples * token_counts.sqrt())


@contextlib.contextmanager
def registered_by_a_user():
    """The hub with a token-level loss, a sequence-level loss and an aggregation of the user's; as before afterwards."""
    aggregations, losses = dict(loss_hub._AGGREGATIONS), dict(loss_hub._POLICY_LOSSES)
    register_policy_loss("user_token", "token")(token_loss_of_a_user)
    register_policy_loss("user_sample", "sequence")(sample_loss_of_a_user)
    register_loss_aggregation("user_root")(aggregation_of_a_user)
    try:
        yield
    finally:
        loss_hub._AGGREGATIONS.clear()
        loss_hub._AGGREGATIONS.update(aggregations)
        loss_hub._POLICY_LOSSES.clear()
        loss_hub._POLICY_LOSSES.update(losses)


# 12 ragged samples of 5 prompts; one sample is fully masked, one has a single token.
STEP = random_batch([5, 1, 9, 3, 2, 7, 4, 4, 1, 6, 3, 8], num_masked=(1, 0, 3, 0, 0, 2, 4, 1, 0, 0, 1, 7), seed=20)
STEP_PROMPTS = [0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("mode", [*loss_aggregation_names(), "user_root"])
@pytest.mark.parametrize("kind", [*policy_loss_names(), "user_token", "user_sample"])
@given(where=st.lists(st.integers(0, 5), min_size=12, max_size=12))
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
def test_any_partition_into_micro_batches_and_ranks_gives_the_same_step(kind, mode, where):
    """FB-01, FB-04, FB-07, FB-20: K micro-batches on dp ranks are nothing but parts of the step (bins 0..5, some empty).

    Covers everything in the hub, a loss and an aggregation registered here included: denominators reach every path.
    """
    with registered_by_a_user():
        masks = [STEP.loss_mask[document] for document in STEP.documents]
        totals, counts, prompt_counts = count_step(masks, STEP_PROMPTS)
        divisor = 8.0 if mode == "constant" else None
        weights = sample_token_weights(mode, counts, totals, prompt_token_counts=prompt_counts, divisor=divisor)
        step = replace(STEP, token_weights=weights)
        leaf = STEP.logits.clone().requires_grad_()
        whole = policy_loss(kind, leaf, *step.arguments(), **CLIP)
        whole.loss.backward()
        loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(leaf)
        for part in range(6):
            samples = [i for i in range(12) if where[i] == part]
            batch = step.take([step.documents[i] for i in samples], samples)
            output, of_part = run_loss(lambda *a, **k: policy_loss(kind, *a, **k), batch, **CLIP)
            loss += output.loss.detach()
            gradient[[t for i in samples for t in step.documents[i]]] = of_part
    torch.testing.assert_close(loss, whole.loss.detach(), **EXACT)
    torch.testing.assert_close(gradient, leaf.grad, **EXACT)
    if kind in LOSSES and mode != "user_root":
        assert_same((whole, leaf.grad), by_loop(kind, step))


def test_a_surrogate_and_its_full_function_are_one_loss():
    """FB-04, FB-73: the driver may take the short cut; a user who calls the registered function gets the same numbers."""
    batch = BATCHES["FB-55 a fully masked document"]
    for kind in LOSSES:
        entry = loss_hub.get_policy_loss(kind)
        before = dict(loss_hub._POLICY_LOSSES)
        try:
            register_policy_loss("full", entry.level)(entry.values)
            full = run_loss(lambda *a, **k: policy_loss("full", *a, **k), batch, **CLIP)
        finally:
            loss_hub._POLICY_LOSSES.clear()
            loss_hub._POLICY_LOSSES.update(before)
        short = run_loss(LOSSES[kind], batch, **CLIP)
        torch.testing.assert_close(full[0].loss, short[0].loss, **EXACT)
        torch.testing.assert_close(full[1], short[1], **EXACT)


# ---- what is refused


def call(**changes):
    """grpo_loss on a healthy batch of 2 documents and 5 tokens, with these arguments changed."""
    arguments = {
        "logits": torch.zeros(5, 4),
        "labels": torch.zeros(5, dtype=torch.int64),
        "old_log_probs": torch.zeros(5),
        "advantages": torch.ones(2),
        "loss_mask": torch.ones(5, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32),
        "token_weights": torch.ones(2),
    }
    return grpo_loss(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param({"loss_mask": torch.ones(5)}, DataError, r"loss_mask must be \[T=5\] bool", id="float mask"),
        pytest.param({"loss_mask": torch.ones(4, dtype=torch.bool)}, DataError, r"\[T=5\]", id="FB-61 short mask"),
        pytest.param({"old_log_probs": torch.zeros(6)}, DataError, r"old_log_probs must be \[T=5\], got \(6,\)", id="old"),
        pytest.param({"token_weights": torch.ones(3)}, DataError, r"token_weights must be \[N=2\]", id="weights"),
        pytest.param({"token_weights": torch.tensor([1, math.nan])}, DataError, "not finite", id="weights NaN"),
        pytest.param({"token_counts": torch.ones(3)}, DataError, r"token_counts must be \[N=2\]", id="counts"),
        pytest.param({"importance_weights": torch.ones(2)}, DataError, r"importance_weights must be \[T=5\]", id="u"),
        pytest.param({"advantages": torch.ones(3)}, DataError, r"must be \[N=2\], one a sample, or \[T=5\]", id="A"),
        pytest.param({"advantages": torch.ones(2, 1)}, DataError, r"must be \[N=2\]", id="FB-65 A [N, 1] is not broadcast"),
        pytest.param({"advantages_per": "token"}, DataError, r'advantages_per="token" must be \[5\]', id="A per token"),
        pytest.param({"advantages_per": "turn"}, ConfigError, 'must be "sample", "token" or None', id="per what"),
        pytest.param({"cu_seqlens": torch.tensor([0, 2, 6])}, DataError, "ends at 6 but there are 5", id="FB-63 bounds"),
        pytest.param({"labels": torch.zeros(5)}, DataError, "int64", id="float labels"),
        pytest.param({"clip_ratio_low": 1.3}, ConfigError, r"clip_ratio_low=1.3 must be in \[0, 1\)", id="FB-74 low"),
        pytest.param({"clip_ratio_low": -0.1}, ConfigError, "clip_ratio_low=-0.1", id="FB-74 low negative"),
        pytest.param({"clip_ratio_high": -0.1}, ConfigError, "clip_ratio_high=-0.1", id="FB-74 high negative"),
        pytest.param({"clip_ratio_high": math.nan}, ConfigError, "clip_ratio_high=nan", id="FB-74 high NaN"),
        pytest.param({"clip_ratio_low": math.nan}, ConfigError, "clip_ratio_low=nan", id="FB-74 low NaN"),
        pytest.param({"temperature": 0.0}, ConfigError, "temperature=0.0", id="FB-74 temperature"),
        pytest.param({"metrics": "all"}, ConfigError, "none, basic, with_entropy", id="metrics"),
        pytest.param({"kl_coefficient": 0.1}, ConfigError, "needs ref_log_probs", id="FB-80 KL without reference"),
        pytest.param({"entropy_coefficient": 0.1}, ConfigError, "need regularizer_weights", id="entropy without weights"),
        pytest.param({"backend": "triton"}, ConfigError, "no Triton kernel", id="FB-80 backend"),
    ],
)
def test_wrong_arguments_are_refused_with_a_message(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_the_healthy_call_of_the_table_above_is_healthy():
    assert math.isfinite(call().loss.item())
