"""Each registered loss on one rank: loss and logits gradient against loops in float64, for every form of advantages."""

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
    loop_log_probs,
    padded,
    random_batch,
    run_loss,
    with_gradient,
)
from loss_backends import LOSSES, over_backends

from megatron_rl.aggregation import count_step, sample_token_weights
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.losses import grpo_loss, gspo_loss, linear_grpo_loss, linear_gspo_loss, linear_policy_loss, policy_loss
from megatron_rl.metrics import finalise_metrics
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.testing.ranks import RankPool

BATCH = BATCHES["ragged"]


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("name", BATCHES)
@over_backends
def test_loss_and_gradient_are_those_of_a_loop(kind, name, backend):
    """FB-65: the packed loss equals a loop over samples; FB-19: GSPO's gradient does not grow with length."""
    batch = BATCHES[name]
    output, gradient = backend.run(LOSSES[kind], batch, **CLIP)
    assert_same((output, gradient), by_loop(kind, batch), **backend.tolerance)
    torch.testing.assert_close(output.policy_loss, output.loss.detach())
    truth = torch.where(batch.loss_mask, loop_log_probs(batch.logits, batch.labels), 0)
    torch.testing.assert_close(output.log_probs, truth, **backend.tolerance)
    assert (output.kl_loss, output.entropy, output.metrics) == (None, None, None), "what is off is None"
    assert output.num_nonfinite.tolist() == [0] * len(batch.documents) and output.num_nonfinite.dtype == torch.int32
    if name == "ragged":
        wide = by_loop(kind, batch, 0.9, 9.0)
        assert not torch.equal(wide[1], by_loop(kind, batch)[1]), "the test means nothing without a clipped token"


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_loss_with_a_function_of_its_own_is_policy_loss_of_its_name(name):
    function, fused = {"grpo": (grpo_loss, linear_grpo_loss), "gspo": (gspo_loss, linear_gspo_loss)}[name]
    arguments = (BATCH.logits, *BATCH.arguments())
    assert torch.equal(function(*arguments, **CLIP).loss, policy_loss(name, *arguments, **CLIP).loss)
    arguments = (BATCH.logits, torch.eye(11, dtype=torch.float64), *BATCH.arguments())
    assert torch.equal(fused(*arguments, **CLIP).loss, linear_policy_loss(name, *arguments, **CLIP).loss)


def test_step_s_by_hand_through_the_whole_loss():
    """FB-06, FB-19: V = 2 equal logits, on-policy, A = (1, 2, 3, -) negated: the losses of step S, one for each level."""
    lengths, masks = (2, 4, 1, 3), [torch.ones(2), torch.ones(4), torch.ones(1), torch.zeros(3)]
    totals, counts, prompt_counts = count_step(masks, ["a", "a", "b", "b"])
    bounds = torch.tensor([0, 2, 6, 7, 10])
    expected = {"sample_mean": 3 / 2, "prompt_mean": 7 / 3, "token_mean": 13 / 7, "constant": 13 / 32}
    for mode, total in expected.items():
        divisor = 8.0 if mode == "constant" else None
        weights = sample_token_weights(mode, counts, totals, prompt_token_counts=prompt_counts, divisor=divisor)
        for loss in (grpo_loss, gspo_loss):
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
    """FB-19: (1/N) sum_i min(s_i A_i, clip(s_i) A_i) of arXiv:2507.18071, equation 5, from a loop."""
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
    (first, gradient), (second, gradient_2) = (run_loss(loss, batch, **CLIP) for loss in (grpo_loss, gspo_loss))
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
@over_backends
def test_tool_tokens_in_the_middle_count_nowhere(kind, backend):
    """FB-10: mask 1 1 0 0 1: m = 3 in GSPO's exponent, which a length of 5 would draw towards 1, and in every metric."""
    batch = random_batch([5, 6], num_masked=(0, 0), seed=17)
    mask = torch.tensor([True, True, False, False, True, True, False, True, False, True, True])
    batch = replace(batch, loss_mask=mask)
    wide = {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0}
    output, gradient = backend.run(LOSSES[kind], batch, metrics="basic", **wide)
    assert_same((output, gradient), by_loop(kind, batch, 0.9, 9.0), **backend.tolerance)
    log_ratios = loop_log_probs(batch.logits, batch.labels) - batch.old_log_probs
    parts = [log_ratios[document][mask[document]] for document in batch.documents]
    ratios = [part.mean().exp() if get_policy_loss(kind).level == "sequence" else part.exp().mean() for part in parts]
    metrics = finalise_metrics(output.metrics)
    assert metrics["policy/num_tokens"] == 3 + 4
    assert metrics["policy/ratio_new_old"] == pytest.approx(float(sum(ratios)) / 2, rel=1e-5)


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


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("per", [None, "token"])
@over_backends
def test_advantages_per_token_equal_those_per_sample(kind, per, backend):
    """FB-65, FB-68: [N] and [T] mean the same; masked positions and padding of [T] may hold anything."""
    batch = padded(BATCHES["FB-55 a fully masked document"], 2)
    token_advantages = torch.full((14,), math.nan, dtype=torch.float64)
    for i, document in enumerate(batch.documents):
        for t in document:
            if batch.loss_mask[t]:
                token_advantages[t] = batch.advantages[i]
    per_sample = backend.run(LOSSES[kind], batch, **CLIP)
    per_token = backend.run(LOSSES[kind], replace(batch, advantages=token_advantages), advantages_per=per, **CLIP)
    assert torch.equal(per_token[0].loss, per_sample[0].loss)
    assert torch.equal(per_token[1], per_sample[1])


@over_backends
def test_grpo_takes_advantages_that_vary_inside_a_sample(backend):
    batch = BATCHES["ragged"]
    advantages = torch.linspace(-2, 2, 18, dtype=torch.float64)
    got = backend.run(grpo_loss, replace(batch, advantages=advantages), **CLIP)
    assert_same(got, by_loop("grpo", batch, token_advantages=advantages), **backend.tolerance)


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


@pytest.mark.parametrize("kind", LOSSES)
def test_a_gradient_of_the_gradient_is_refused(kind):
    """create_graph=True would give a gradient that does not require grad: a penalty on it would have no effect."""
    logits = BATCH.logits.clone().requires_grad_()
    output = LOSSES[kind](logits, *BATCH.arguments(), **CLIP)
    with pytest.raises(ConfigError, match="create_graph=True"):
        torch.autograd.grad(output.loss, logits, create_graph=True)
    log_probs = vocab_parallel_log_probs(logits, BATCH.labels)
    with pytest.raises(ConfigError, match="create_graph=True"):
        torch.autograd.grad(log_probs.sum(), logits, create_graph=True)


def test_the_order_of_documents_moves_no_bit_of_a_float32_loss():
    """Sums are float64: 300 documents of very different sizes, forwards and backwards."""
    batch = random_batch([1 + number % 7 for number in range(300)], num_masked=(0,) * 300, seed=5)
    scale = torch.logspace(-4, 4, 300, dtype=torch.float64)
    batch = replace(batch, logits=batch.logits.float(), old_log_probs=batch.old_log_probs.float(), token_weights=scale)
    backwards = list(reversed(range(300)))
    turned = batch.take([batch.documents[number] for number in backwards], backwards)
    losses = [grpo_loss(one.logits, *one.arguments(), advantages_per="sample", **CLIP).loss for one in (batch, turned)]
    assert torch.equal(*losses) and losses[0].dtype == torch.float32


def test_a_lower_distance_of_one_is_no_bound():
    """clip_ratio_low=1 would keep ratios above 0, which they all are: refused, unless the loss declares it, as CISPO does."""
    with pytest.raises(ConfigError, match=r"clip_ratio_low=1.0 must be in \[0, 1\)"):
        grpo_loss(BATCH.logits, *BATCH.arguments(), clip_ratio_low=1.0)
    assert_same(run_loss(LOSSES["cispo"], BATCH, clip_ratio_low=1.0), by_loop("cispo", BATCH, 1.0, 0.28))
    with pytest.raises(ConfigError, match=r"clip_ratio_low=1.5 must be in \[0, 1\], where 1 is no bound"):
        run_loss(LOSSES["cispo"], BATCH, clip_ratio_low=1.5)


def on_two_context_ranks(rank: int, kind: str):
    """Rank 0 holds the last token of each document, rank 1 the others; advantages are given per token."""
    batch = BATCH
    mine = [document[-1:] if rank == 0 else document[:-1] for document in batch.documents]
    part = batch.take(mine)
    numbers = torch.tensor([number for number, document in enumerate(mine) for _ in document])
    part = replace(part, advantages=batch.advantages[numbers])
    groups = {"cp_group": torch.distributed.group.WORLD, "tp_group": SINGLE}
    output, gradient = run_loss(LOSSES[kind], part, advantages_per="token", **groups, **CLIP)
    return output.loss.detach(), mine, gradient


@pytest.mark.parametrize("kind", LOSSES)
def test_two_context_parallel_ranks_add_up_to_one(kind):
    """FB-28, FB-68, where test_losses_parallel.py has every layout: what cp reduces, and the mean of [T] advantages over it."""
    with RankPool(2, use_megatron=False) as pool:
        answers = pool.run(on_two_context_ranks, kind)
    expected, gradient = by_loop(kind, BATCH)
    torch.testing.assert_close(sum(answer[0] for answer in answers), expected, **EXACT)
    for _, mine, part in answers:
        torch.testing.assert_close(part, gradient[[token for document in mine for token in document]], **EXACT)
