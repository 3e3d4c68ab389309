"""Each registered loss on one rank: loss and logits gradient against float64 loops, for each form of advantages and each option."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from helpers import (
    BATCHES,
    CLIP,
    EXACT,
    assert_same,
    by_loop,
    loop_log_probs,
    loop_regularizer,
    padded,
    random_batch,
    run_loss,
    with_gradient,
)
from loss_backends import LOSSES, over_backends, over_losses, rows_of_losses

from megatron_rl.aggregation import count_step, sample_token_weights
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import get_policy_loss, loss_aggregation_names
from megatron_rl.losses import (
    grpo_loss,
    gspo_loss,
    linear_grpo_loss,
    linear_gspo_loss,
    linear_policy_loss,
    loss_of_log_probs,
    policy_loss,
)
from megatron_rl.losses.settings import DEFAULTS, LinearLossKeywords, LogitsLossKeywords, LossKeywords
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.step_metrics import finalise_metrics
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
    if name == "ragged" and get_policy_loss(kind).clip_ratios is not None:
        wide = by_loop(kind, batch, 0.9, 9.0)
        assert not torch.equal(wide[1], by_loop(kind, batch)[1]), "the test means nothing without a clipped token"


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_loss_with_a_function_of_its_own_is_policy_loss_of_its_name(name):
    function, fused = {"grpo": (grpo_loss, linear_grpo_loss), "gspo": (gspo_loss, linear_gspo_loss)}[name]
    arguments = (BATCH.logits, *BATCH.arguments())
    assert torch.equal(function(*arguments, **CLIP).loss, policy_loss(name, *arguments, **CLIP).loss)
    arguments = (BATCH.logits, torch.eye(11, dtype=torch.float64), *BATCH.arguments())
    assert torch.equal(fused(*arguments, **CLIP).loss, linear_policy_loss(name, *arguments, **CLIP).loss)


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo"])
def test_a_loss_of_log_probs_is_that_of_their_logits(name):
    """The chain rule through the log-probabilities is all that logits add."""
    logits = BATCH.logits.clone().requires_grad_()
    log_probs = torch.log_softmax(logits, -1).gather(-1, BATCH.labels[:, None])[:, 0]
    found = loss_of_log_probs(name, log_probs, *BATCH.arguments()[1:], metrics="basic")
    whole = BATCH.logits.clone().requires_grad_()
    expected = policy_loss(name, whole, *BATCH.arguments(), metrics="basic")
    gradients = [torch.autograd.grad(output.loss, of)[0] for output, of in ((found, logits), (expected, whole))]
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12) and torch.allclose(found.loss, expected.loss)
    assert finalise_metrics(found.metrics) == pytest.approx(finalise_metrics(expected.metrics))
    with pytest.raises(ConfigError, match="need logits"):
        loss_of_log_probs(name, log_probs, *BATCH.arguments()[1:], temperature=0.7)


@pytest.mark.parametrize("mode", loss_aggregation_names())
@pytest.mark.parametrize("parameters", [{}, {"clip_ratio_c": 1.2}], ids=["", "dual clip"])
def test_gspo_token_is_gspo_where_a_sample_has_one_advantage(mode, parameters):
    """arXiv:2507.18071, section 4.3, for the whole clip on both sides."""
    batch = replace(BATCH, old_log_probs=BATCH.old_log_probs + torch.linspace(-0.4, 0.4, 18, dtype=torch.float64))
    masks = [batch.loss_mask[document] for document in batch.documents]
    totals, counts, prompt_counts = count_step(masks, [0, 0, 1, 1])
    divisor = 8.0 if mode == "constant" else None
    weights = sample_token_weights(mode, counts, totals, prompt_token_counts=prompt_counts, divisor=divisor).double()
    options = {"metrics": "basic", "loss_parameters": parameters, **CLIP}
    of_tokens, of_samples = (
        run_loss(LOSSES[kind], replace(batch, token_weights=weights), **options) for kind in ("gspo_token", "gspo")
    )
    assert_same(of_tokens, (of_samples[0].loss.detach(), of_samples[1]))
    fractions = [finalise_metrics(output.metrics)["policy/clipped_ratio_fraction"] for output, _ in (of_tokens, of_samples)]
    assert fractions[0] == fractions[1] and 0 < fractions[0] < 1


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
    """FB-65: [N] and [T] mean the same; masked positions and padding of [T] may hold anything."""
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


@over_losses("grpo", "gspo")
def test_advantages_that_vary_inside_a_sample_are_taken_and_at_sequence_level_refused(kind, backend):
    """Never an average. A difference of 1e-3 in one token of nine is found."""
    varying = replace(BATCH, advantages=torch.linspace(-2, 2, 18, dtype=torch.float64))
    if get_policy_loss(kind).level != "sequence":
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


def on_two_context_ranks(rank: int):
    """Rank 0 holds the last token of each document, rank 1 the others; advantages are given per token."""
    mine = [document[-1:] if rank == 0 else document[:-1] for document in BATCH.documents]
    numbers = torch.tensor([number for number, document in enumerate(mine) for _ in document])
    part = replace(BATCH.take(mine), advantages=BATCH.advantages[numbers])
    groups = {"cp_group": torch.distributed.group.WORLD, "tp_group": SINGLE}
    found = {kind: run_loss(LOSSES[kind], part, advantages_per="token", **groups, **CLIP) for kind in LOSSES}
    return {kind: (output.loss.detach(), mine, gradient) for kind, (output, gradient) in found.items()}


def test_two_context_parallel_ranks_add_up_to_one():
    """FB-28, where test_losses_parallel.py has every layout: what cp reduces, and the mean of [T] advantages over it."""
    with RankPool(2, use_megatron=False) as pool:
        ranks = pool.run(on_two_context_ranks)
    for kind in LOSSES:
        expected, gradient = by_loop(kind, BATCH)
        torch.testing.assert_close(sum(answer[kind][0] for answer in ranks), expected, **EXACT)
        for _, mine, part in (answer[kind] for answer in ranks):
            torch.testing.assert_close(part, gradient[[token for document in mine for token in document]], **EXACT)


SMALL = random_batch([4, 1, 3], seed=15)


@over_losses("gspo", names=[kind for kind in LOSSES if get_policy_loss(kind).anchor == "old"])
def test_without_old_log_probs_the_step_is_on_policy(kind, backend):
    """The gradient is -w A, as with the current log-probabilities as old ones; the ratio is 1, unclipped at distance 0."""
    current = replace(SMALL, old_log_probs=loop_log_probs(SMALL.logits, SMALL.labels))
    clip = {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}
    output, gradient = backend.run(LOSSES[kind], replace(SMALL, old_log_probs=None), metrics="basic", **clip)
    assert_same((output, gradient), by_loop(kind, current, 0.2, 0.2), **backend.tolerance)
    metrics = finalise_metrics(output.metrics)
    assert metrics["policy/ratio_new_old"] == 1.0
    assert metrics["policy/clipped_ratio_fraction"] == metrics["policy/kl_new_old"] == 0.0


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


@over_losses("grpo", "gspo", "sapo")
def test_importance_weights_and_regularizers_add_their_weighted_sums(kind, backend):
    """FB-119: KL and entropy have weights of their own, and no importance weight; value and gradient by loops."""
    generator = torch.Generator().manual_seed(16)
    reference = SMALL.old_log_probs + 0.3 * torch.randn(8, generator=generator, dtype=torch.float64)
    v, u = torch.rand(3, generator=generator, dtype=torch.float64), torch.linspace(0.2, 1.8, 8, dtype=torch.float64)
    terms = {"ref_log_probs": reference, "kl_coefficient": 0.7, "entropy_coefficient": 0.3, "regularizer_weights": v}
    output, gradient = backend.run(LOSSES[kind], SMALL, importance_weights=u, **terms, **CLIP)
    policy, kl, entropy = (
        by_loop(kind, SMALL, importance_weights=u),
        with_gradient(lambda x: loop_regularizer(SMALL, x, v, reference), SMALL.logits),
        with_gradient(lambda x: loop_regularizer(SMALL, x, v), SMALL.logits),
    )
    for part, (want, _) in zip((output.policy_loss, output.kl_loss, output.entropy), (policy, kl, entropy), strict=True):
        torch.testing.assert_close(part, want, **backend.tolerance)
        assert not part.requires_grad
    whole = [p + 0.7 * k - 0.3 * e for p, k, e in zip(policy, kl, entropy, strict=True)]
    assert_same((output, gradient), whole, **backend.tolerance)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@over_backends
def test_a_ratio_exactly_on_the_edge_keeps_its_gradient(kind, backend):
    """Low != high, both signs; a rounding step beyond the edge it is gone. The edge is the backend's own ratio."""
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


@over_losses("grpo")
def test_temperature_padded_vocabulary_and_clips_reach_the_loss(kind, backend):
    """FB-39: each option changes the result as the loop says, call after call."""
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


@over_losses("grpo")
def test_upstream_factors_scale_the_gradient_and_the_report_is_not_aliased(kind, backend):
    """The schedule divides the returned loss in place; the detached parts and the gradient keep their values."""
    want, gradient = backend.run(LOSSES[kind], SMALL, metrics="basic", **CLIP)
    output, divided = backend.run(LOSSES[kind], SMALL, divisor=4, metrics="basic", **CLIP)
    assert torch.equal(output.loss, want.loss / 4)
    assert torch.equal(output.policy_loss, want.policy_loss)
    assert torch.equal(output.metrics.values, want.metrics.values)
    torch.testing.assert_close(divided, gradient / 4, **EXACT)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_precision_follows_the_logits(kind, dtype):
    """Float32 inside for 16-bit logits, gradient in the logits' dtype, loss in float32."""
    batch = BATCHES["ragged"]
    others = {"old_log_probs": batch.old_log_probs.float(), "advantages": batch.advantages.float()}
    batch = replace(batch, logits=batch.logits.to(dtype), **others)
    output, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    assert (output.loss.dtype, gradient.dtype) == (torch.float32, dtype)
    loss, exact = by_loop(kind, replace(batch, logits=batch.logits.double()))
    # float32: 1e-6 of numbers near 1. bfloat16: the one rounding of each gradient element to 8 bits.
    torch.testing.assert_close(output.loss.detach().double(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [LossKeywords, LogitsLossKeywords, LinearLossKeywords])
def test_a_keyword_that_is_left_out_has_a_value_of_its_type(kind):
    """Catches a keyword that is added without a default: it would be None, which its type does not have."""
    assert not kind.__required_keys__
    without = [name for name in get_type_hints(kind) if name not in DEFAULTS]
    assert [name for name in without if type(None) not in get_args(get_type_hints(kind)[name])] == []


def test_a_default_is_one_of_a_keyword():
    assert DEFAULTS.keys() <= get_type_hints(LogitsLossKeywords).keys() | get_type_hints(LinearLossKeywords).keys()
