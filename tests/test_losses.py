"""Each registered loss on one rank: loss and logits gradient against loops in float64, for every form of advantages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import BATCHES, CLIP, EXACT, assert_same, by_loop, loop_log_probs, padded, random_batch, run_loss
from loss_backends import LOSSES, over_backends, rows_of_losses

from megatron_rl.aggregation import count_step, sample_token_weights
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.losses import grpo_loss, gspo_loss, linear_grpo_loss, linear_gspo_loss, linear_policy_loss, policy_loss
from megatron_rl.metrics import finalise_metrics
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.testing.ranks import RankPool

BATCH = BATCHES["ragged"]


@pytest.mark.parametrize(("kind", "backend", "name"), rows_of_losses(list(BATCHES)))
def test_loss_and_gradient_are_those_of_a_loop(kind, backend, name):
    """FB-65, FB-47: the packed loss is a loop over samples in their order; FB-19: GSPO's gradient does not grow with length."""
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
    """FB-06, FB-19: V = 2 equal logits, on-policy, A = (1, 2, 3, -) negated: step S. A tail changes nothing (FB-05)."""
    lengths, masks = (2, 4, 1, 3), [torch.ones(2), torch.ones(4), torch.ones(1), torch.zeros(3)]
    totals, counts, prompt_counts = count_step(masks, ["a", "a", "b", "b"])
    bounds = torch.tensor([0, 2, 6, 7, 10])
    for mode, total in {"sample_mean": 3 / 2, "prompt_mean": 7 / 3, "token_mean": 13 / 7, "constant": 13 / 32}.items():
        divisor = 8.0 if mode == "constant" else None
        weights = sample_token_weights(mode, counts, totals, prompt_token_counts=prompt_counts, divisor=divisor)
        for loss in (grpo_loss, gspo_loss):
            for tail in (0, 7):
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


@pytest.mark.parametrize("kind", LOSSES)
def test_tool_tokens_in_the_middle_count_nowhere(kind):
    """FB-10: mask 1 1 0 0 1: m = 3 in GSPO's exponent, which a length of 5 would draw towards 1, and in every metric."""
    mask = torch.tensor([True, True, False, False, True, True, False, True, False, True, True])
    batch = replace(random_batch([5, 6], num_masked=(0, 0), seed=17), loss_mask=mask)
    output, gradient = run_loss(LOSSES[kind], batch, metrics="basic", clip_ratio_low=0.9, clip_ratio_high=9.0)
    assert_same((output, gradient), by_loop(kind, batch, 0.9, 9.0))
    log_ratios = loop_log_probs(batch.logits, batch.labels) - batch.old_log_probs
    parts = [log_ratios[document][mask[document]] for document in batch.documents]
    ratios = [part.mean().exp() if get_policy_loss(kind).level == "sequence" else part.exp().mean() for part in parts]
    metrics = finalise_metrics(output.metrics)
    assert metrics["policy/num_tokens"] == 3 + 4
    assert metrics["policy/ratio_new_old"] == pytest.approx(float(sum(ratios)) / 2, rel=1e-5)


@pytest.mark.parametrize(("kind", "backend", "per"), rows_of_losses(["token", None, "token"], [None, "token"]))
def test_advantages_per_token_equal_those_per_sample(kind, backend, per):
    """FB-65, FB-68: [N] and [T] mean the same; masked positions and padding of [T] may hold anything."""
    batch = padded(random_batch([4, 3, 2], num_masked=(1, 3, 0), seed=3), 2)
    token_advantages = torch.full((11,), math.nan, dtype=torch.float64)
    for i, document in enumerate(batch.documents):
        for t in document:
            if batch.loss_mask[t]:
                token_advantages[t] = batch.advantages[i]
    per_sample = backend.run(LOSSES[kind], batch, **CLIP)
    per_token = backend.run(LOSSES[kind], replace(batch, advantages=token_advantages), advantages_per=per, **CLIP)
    assert torch.equal(per_token[0].loss, per_sample[0].loss)
    assert torch.equal(per_token[1], per_sample[1])


@pytest.mark.parametrize("kind", LOSSES)
@over_backends
def test_advantages_that_vary_inside_a_sample_are_taken_at_token_level_and_refused_elsewhere(kind, backend):
    """FB-68: never an average. A difference of 1e-3 in one token of nine is found."""
    varying = replace(BATCH, advantages=torch.linspace(-2, 2, 18, dtype=torch.float64))
    if get_policy_loss(kind).level == "token":
        got = backend.run(LOSSES[kind], varying, **CLIP)
        assert_same(got, by_loop(kind, BATCH, token_advantages=varying.advantages), **backend.tolerance)
        return
    varying.advantages[:] = 1.0
    varying.advantages[9] += 1e-3
    if backend.device == "cuda":
        assert backend.run(LOSSES[kind], varying, **CLIP)[0].num_nonfinite.tolist() == [0, 0, 6, 0]
        return
    with pytest.raises(DataError, match="advantages vary inside document 2: a sequence-level loss takes one advantage"):
        backend.run(LOSSES[kind], varying, **CLIP)


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
    one_each = random_batch([1, 1, 1], num_masked=(0, 0, 0), seed=9)
    assert_same(run_loss(LOSSES[kind], one_each, **CLIP), by_loop(kind, one_each))


@pytest.mark.parametrize("kind", LOSSES)
def test_a_gradient_of_the_gradient_is_refused(kind):
    """create_graph=True would give a gradient that does not require grad: a penalty on it would have no effect."""
    logits = BATCH.logits.clone().requires_grad_()
    output = LOSSES[kind](logits, *BATCH.arguments(), **CLIP)
    for value in (output.loss, vocab_parallel_log_probs(logits, BATCH.labels).sum()):
        with pytest.raises(ConfigError, match="create_graph=True"):
            torch.autograd.grad(value, logits, create_graph=True)


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


def on_two_context_ranks(rank: int):
    """Rank 0 holds the last token of each document, rank 1 the others; advantages are given per token."""
    mine = [document[-1:] if rank == 0 else document[:-1] for document in BATCH.documents]
    numbers = torch.tensor([number for number, document in enumerate(mine) for _ in document])
    part = replace(BATCH.take(mine), advantages=BATCH.advantages[numbers])
    groups = {"cp_group": torch.distributed.group.WORLD, "tp_group": SINGLE}
    found = {kind: run_loss(LOSSES[kind], part, advantages_per="token", **groups, **CLIP) for kind in LOSSES}
    return {kind: (output.loss.detach(), mine, gradient) for kind, (output, gradient) in found.items()}


def test_two_context_parallel_ranks_add_up_to_one():
    """FB-28, FB-68, where test_losses_parallel.py has every layout: what cp reduces, and the mean of [T] advantages over it."""
    with RankPool(2, use_megatron=False) as pool:
        ranks = pool.run(on_two_context_ranks)
    for kind in LOSSES:
        expected, gradient = by_loop(kind, BATCH)
        torch.testing.assert_close(sum(answer[kind][0] for answer in ranks), expected, **EXACT)
        for _, mine, part in (answer[kind] for answer in ranks):
            torch.testing.assert_close(part, gradient[[token for document in mine for token in document]], **EXACT)
