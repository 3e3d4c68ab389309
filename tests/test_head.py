"""The fused head's matmuls: which rows are in them, its plans, bins and chunks, what surroundings change, and its memory.

Values are in tests/test_generated_steps.py."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import CLIP, error_of, last_rank_alone, without_needless_clip
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import (
    HeadBatch,
    budget,
    by_logits,
    every_term,
    head_batch,
    plan_of,
    run,
    seen,
    worst_error,
)
from simulated_ranks import groups_of_ranks, on_simulated_ranks

from megatron_rl.declare import LossValue, register_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import MESSAGE_BYTES
from megatron_rl.ops import log_probs_torch
from megatron_rl.ops.linear_gradient import cut, document_bins, schedule_documents, schedule_rows
from megatron_rl.ops.linear_head import (
    rows_per_chunk,
)
from megatron_rl.policy_loss import linear_gspo_loss, linear_policy_loss

# Sums of a few dozen float64 products in another order.
EXACT = 1e-12


# (loss, terms, the plans that its chunks of nine rows take: one document is longer)
KINDS = {
    "gspo": ("gspo", None, {"in-chunk", "scale-last"}),
    "gspo with every term": ("gspo", "every term", {"in-chunk", "two-pass"}),
    "gspo_token": ("gspo_token", None, {"in-chunk", "two-pass"}),
    "grpo": ("grpo", None, {"in-chunk"}),
    "grpo with every term": ("grpo", "every term", {"in-chunk"}),
    "gspo on-policy": ("gspo", "on-policy", {"in-chunk", "scale-last"}),
}


def fused(kind: str):
    return partial(without_needless_clip, linear_policy_loss, kind)


def options_of(name: str, case: HeadBatch) -> dict:
    terms = KINDS[name][1]
    options = every_term(case.batch) if terms == "every term" else {"metrics": "basic"}
    return {"on_policy": terms == "on-policy", "temperature": 0.7, **options}


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [
        *((name, 9, torch.float64) for name in KINDS),
        *((name, 2, torch.bfloat16) for name in KINDS),
        ("gspo", 16, torch.float32),
        ("gspo_token", 1, torch.bfloat16),
    ],
)
def test_a_loss_takes_the_plans_of_its_level_in_buffers_of_the_budget(name, rows, dtype, schedules, monkeypatch):
    """No tensor of [T, V], and all that is as wide as the vocabulary at one time fits into max_logits_bytes together."""
    # The torch kernels work on scratch rows of a constant size, beside the budget: one row here, and up to six tensors of it.
    monkeypatch.setattr(log_probs_torch, "CPU_CHUNK_BYTES", 1)
    case = head_batch([8, 24, 3, 9], vocab_size=256, hidden_size=7).to(dtype)
    limit, scratch = budget(case, rows), 6 * 256 * max(case.hidden.element_size(), 4)
    with seen(case) as record:
        run(fused(KINDS[name][0]), case, max_logits_bytes=limit, **options_of(name, case))
    assert rows // 2 < record.most_rows <= rows
    assert 0.5 * limit < record.peak_bytes <= limit + scratch
    if rows == 9:
        assert {plan_of(item) for items in schedules for item in items} == KINDS[name][-1]


def matmul_rows(case: HeadBatch, kind: str, **options) -> dict[str, int]:
    with seen(case) as record:
        run(fused(kind), case, **options)
    return record.rows


# Document 0 clipped, 1 alive, 2 of advantage 0, 3 masked as a whole; 12 tokens each, every second one masked elsewhere.
FATES = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}


def fates(kind: str) -> HeadBatch:
    case = head_batch([12, 12, 12, 12], seed=5, vocab_size=32)
    log_probs = torch.log_softmax(case.batch.logits, -1).gather(1, case.batch.labels[:, None])[:, 0]
    old = log_probs.clone()
    old[:12] -= 0.5  # ratio 1.65
    mask = case.batch.loss_mask.clone()
    mask[36:] = False
    return replace(
        case, batch=replace(case.batch, old_log_probs=old, advantages=torch.tensor([1.0, 1.0, 0.0, 1.0]).double(), loss_mask=mask)
    )


@pytest.mark.parametrize("rows", [8, 1000], ids=["a bin each", "one bin"])
@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
def test_rows_without_a_gradient_leave_the_matmuls(kind, rows):
    """Six tokens each: masked ones are in no matmul, clipped ones and those of advantage 0 in the first alone, the rest in three.
    FB-96: CISPO's clip takes no row's gradient."""
    alive = 12 if kind == "cispo" else 6
    case = fates(kind)
    options = {**FATES, "max_logits_bytes": budget(case, rows)}
    want = by_logits(kind, case, **FATES, metrics="with_entropy")
    got = run(fused(kind), case, **options, metrics="with_entropy")
    assert max(worst_error(got, want).values()) < EXACT
    for metrics in ("none", "with_entropy"):
        assert matmul_rows(case, kind, **options, metrics=metrics) == {"logits": 18, "hidden": alive, "weight": alive}
    # An entropy bonus gives every unmasked row a gradient.
    assert matmul_rows(case, kind, **options, **every_term(case.batch)) == {"logits": 18, "hidden": 18, "weight": 18}
    log_probs = torch.log_softmax(case.batch.logits, -1)
    entropy = torch.where(case.batch.loss_mask, -(log_probs.exp() * log_probs).sum(-1), 0.0)
    for found in (got, want):
        torch.testing.assert_close(found.output.entropy_per_token, entropy, rtol=EXACT, atol=EXACT)
    assert run(fused(kind), case, **options, metrics="basic").output.entropy_per_token is None


@pytest.mark.parametrize(
    ("kind", "options", "rows"),
    [
        # Three matmuls a row; of the last chunk of a clipped document, or one of advantage 0, one.
        pytest.param("gspo", FATES, {"logits": 18, "hidden": 14, "weight": 14}, id="scale-last"),
        # The tokens share one coefficient, which reads the sample's count. Nothing is clipped.
        pytest.param("vespo", {}, {"logits": 18, "hidden": 16, "weight": 16}, id="scale-last of vespo"),
        pytest.param("vespo", {"on_policy": True}, {"logits": 18, "hidden": 16, "weight": 16}, id="scale-last of vespo on-policy"),
        # All chunks but the last have their logits computed again.
        pytest.param("gspo", {**FATES, "has_terms": True}, {"logits": 30, "hidden": 18, "weight": 18}, id="two-pass"),
        pytest.param("gspo_token", FATES, {"logits": 18 + 4, "hidden": 6, "weight": 6}, id="two-pass, coefficients of a token"),
    ],
)
def test_long_documents_pay_what_their_plan_says(kind, options, rows):
    case, options = fates(kind), dict(options)
    terms = every_term(case.batch) if options.pop("has_terms", False) else {}
    assert matmul_rows(case, kind, **options, **terms, max_logits_bytes=budget(case, 2)) == rows  # three chunks of 2 rows each


def test_a_clipped_long_document_leaves_nothing_behind():
    """Plan scale-last multiplies before it knows the coefficient: what overflowed (float16 does soon) is dropped, not times 0."""
    case = head_batch([12], seed=9)
    case.hidden[:, 0], case.weight[:, 0], case.weight[0, 0] = 0.0, -1.7e308, 1.7e308  # no logit moves, (delta - p) W overflows
    labels = torch.zeros_like(case.batch.labels)
    old = torch.log_softmax(case.hidden @ case.weight.T, -1)[:, 0] - 0.5
    batch = replace(case.batch, labels=labels, old_log_probs=old, advantages=torch.ones(1).double())
    got = run(linear_gspo_loss, replace(case, batch=batch), max_logits_bytes=budget(case, 2), **FATES)
    assert not got.hidden_gradient.any() and not got.weight_gradient.any()
    alive = replace(case, batch=replace(batch, old_log_probs=old + 0.5))
    assert run(linear_gspo_loss, alive, max_logits_bytes=budget(case, 2), **FATES).hidden_gradient.isinf().any()


# What a caller's surroundings may not change


def test_autocast_changes_nothing():
    """Operands have the dtype that was asked for: under autocast the gradient of hidden alone would be a product of bfloat16."""
    case = head_batch().to(torch.float32)
    want = run(linear_gspo_loss, case, max_logits_bytes=budget(case, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(linear_gspo_loss, case, max_logits_bytes=budget(case, 6))
    assert torch.equal(got.hidden_gradient, want.hidden_gradient) and torch.equal(got.weight_gradient, want.weight_gradient)
    assert torch.equal(got.output.loss, want.output.loss)


# Chunks and bins


@given(budget=st.integers(1, 10**7), bytes_per_row=st.integers(1, 10**5), preferred=st.none() | st.integers(1, 10**6))
@settings(max_examples=200)
def test_a_chunk_has_the_rows_that_fit_the_budget(budget, bytes_per_row, preferred):
    """Never more bytes than were allowed, and no row less: a micro-batch that fits must not be two chunks."""
    if budget < bytes_per_row:
        with pytest.raises(ConfigError, match=f"{bytes_per_row} is the smallest budget that works"):
            rows_per_chunk(budget, bytes_per_row, preferred_bytes=preferred)
        return
    rows = rows_per_chunk(budget, bytes_per_row, preferred_bytes=preferred)
    allowed = budget if preferred is None else min(budget, max(preferred, bytes_per_row))
    assert rows >= 1 and rows * bytes_per_row <= allowed < (rows + 1) * bytes_per_row


@given(sizes=st.lists(st.integers(0, 40), max_size=30), capacity=st.integers(1, 30))
@settings(max_examples=200)
def test_each_document_is_in_one_bin_and_bins_are_full(sizes, capacity):
    """Every document once, masked ones too; no bin over its capacity but a long document's own; no two bins that fit in one."""
    bins = document_bins(sizes, capacity)
    assert sorted(document for documents in bins for document in documents) == list(range(len(sizes)))
    totals = [sum(sizes[document] for document in documents) for documents in bins]
    for documents, total in zip(bins, totals, strict=True):
        assert total <= capacity or len(documents) == 1
        assert list(documents) == sorted(documents)
    for first in range(len(bins)):
        for second in range(first):
            assert totals[first] + totals[second] > capacity
    is_long = [total > capacity for total in totals]
    assert is_long == sorted(is_long, reverse=True), "long documents first: the first of them needs no buffer beside dW"


@pytest.mark.parametrize(
    ("counts", "bins", "terms", "plans"),
    [
        pytest.param((3, 2), [(0, 1)], False, "in-chunk", id="two documents in one chunk"),
        pytest.param((12, 2), [(0,), (1,)], False, "scale-last in-chunk", id="a long one"),
        pytest.param((12, 2), [(0,), (1,)], True, "two-pass in-chunk", id="a long one with terms"),
        pytest.param((4, 3), [(0, 1)], False, "two-pass", id="a bin that holds more here than on other cp ranks"),
        pytest.param((0, 2), [(0,), (1,)], False, "in-chunk in-chunk", id="FB-25 a bin that is empty here is an item"),
        pytest.param((), [], False, "", id="no document"),
    ],
)
def test_the_plan_is_chosen_by_what_this_rank_holds(counts, bins, terms, plans):
    rows = list(torch.arange(sum(counts)).split(counts))
    items = schedule_documents(bins, rows, 5, is_shared=not terms)
    assert " ".join(plan_of(item) for item in items) == plans
    assert len(items) == len(bins), "one item for each bin, in their order: every rank meets its reduction"
    assert sum(chunk.numel() for item in items for chunk in item.chunks) == sum(counts)
    assert all(chunk.numel() <= 5 for item in items for chunk in item.chunks)
    for item in items:
        assert len(item.chunks) == -(-sum(chunk.numel() for chunk in item.chunks) // 5), "as few as can be"
        # Those of the last chunk are not computed again.
        assert plan_of(item) != "two-pass" or item.chunks[-1].numel() == 5


@given(num_rows=st.integers(0, 200), capacity=st.integers(1, 60))
@settings(max_examples=100)
def test_chunks_are_as_few_and_as_equal_as_can_be(num_rows, capacity):
    """A last chunk of a few rows would read and write the whole weight gradient for them."""
    rows = torch.arange(7, 7 + num_rows)
    chunks = cut(rows, capacity)
    sizes = [chunk.numel() for chunk in chunks]
    assert len(chunks) == -(-num_rows // capacity)
    assert not chunks or (max(sizes) <= capacity and max(sizes) - min(sizes) <= 1)
    assert torch.equal(torch.cat([*chunks, torch.zeros(0, dtype=torch.int64)]), rows)
    assert [plan_of(item) for item in schedule_rows(rows, capacity)] == ["in-chunk"] * len(chunks)


# Ranks: their collectives, and a fault of one of them


def uneven(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    """Three quarters on the first rank, nothing of the short ones on the second: more than an equal slice, and empty bins."""
    first = len(document) * 3 // 4 if len(document) > 8 else len(document)
    return document[first:] if cp_rank else document[:first]


DEALS = {"uneven": uneven, "last rank alone": last_rank_alone}


def of_rank(groups, deal: str = "uneven", has_terms: bool = False) -> tuple[HeadBatch, list[int], dict]:
    """This rank's tokens, with as many rows of junk that tp divides them, and its rows of the weight; their places; options."""
    case = head_batch([12, 22, 4, 0, 2, 12], seed=21)
    positions = [DEALS[deal](document, groups.cp.rank(), 2) for document in case.batch.documents]
    flat = [token for document in positions for token in document]
    take = flat + [0] * (len(flat) % 2)
    batch = replace(
        case.batch.take(positions), **{name: getattr(case.batch, name)[take] for name in ("labels", "old_log_probs", "loss_mask")}
    )
    options = every_term(case.batch) if has_terms else {"metrics": "basic"}
    options |= {name: options[name][take] for name in ("importance_weights", "ref_log_probs") if name in options}
    return HeadBatch(case.hidden[take], case.weight.chunk(2)[groups.tp.rank()], batch), flat, options


def loss_of_rank(groups, kind: str, case: HeadBatch, *, on_policy: bool = False, rows: int = 5, **options):
    labels, old, *rest = case.batch.arguments()
    hidden, weight = (leaf.clone().requires_grad_() for leaf in (case.hidden, case.weight))
    shared = {"temperature": 0.7, "advantages_per": "sample", "max_logits_bytes": budget(case, rows), **CLIP}
    shared |= {"tp_group": groups.tp, "cp_group": groups.cp}
    return fused(kind)(hidden, weight, labels, None if on_policy else old, *rest, **shared | options)


def gspo_by_tokens(log_ratio, advantages, log_probs, *, clip_ratio_low, clip_ratio_high, mean_log_ratio):
    ratio = (mean_log_ratio + log_probs - log_probs.detach()).exp()
    value = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages)
    return LossValue(value, is_clipped=value != -ratio * advantages)


@pytest.mark.parametrize(
    ("kind", "has_terms", "deal", "options"),
    [
        ("gspo", True, "uneven", {}),
        ("grpo", False, "uneven", {"sequence_parallel": True}),
        ("gspo", False, "uneven", {"rows": 1000, "sequence_parallel": True}),
        ("gspo", True, "last rank alone", {}),
        ("gspo by tokens", True, "uneven", {"sequence_parallel": True}),
    ],
    ids=str,
)
def test_collectives_are_those_that_are_promised(kind, has_terms, deal, options):
    """FB-27: tp one all-gather [rows, 3 or 4] a chunk and one reduction of dX; cp one all-reduce of [N, k], and one a bin, in the
    same number on every rank, or the simulation raises; nothing in backward."""
    # Its tokens have coefficients of their own, of their documents' means.
    register_policy_loss("gspo by tokens", needs=("mean_log_ratio",), clip_ratios=(3e-4, 4e-4))(gspo_by_tokens)
    is_parallel = options.get("sequence_parallel", False)

    def calls_of(groups) -> list[list[tuple]]:
        case, _, terms = of_rank(groups, deal, has_terms)
        if is_parallel:
            case = replace(case, hidden=case.hidden.chunk(2)[groups.tp.rank()])
        output = loss_of_rank(groups, kind, case, **terms, **options)
        found = [[call for call in group.calls if call[1] != (MESSAGE_BYTES,)] for group in (groups.tp, groups.cp)]
        num_calls = len(groups.tp.calls), len(groups.cp.calls)
        (output.loss * 3.0).backward()
        assert (len(groups.tp.calls), len(groups.cp.calls)) == num_calls, "forward alone"
        return found

    ranks = on_simulated_ranks(calls_of, groups_of_ranks(tp=2, cp=2))
    for over_tp, _ in ranks:
        gathers = [shape for name, shape in over_tp if name == "all_gather" and shape[1] == (4 if has_terms else 3)]
        assert all(shape[0] <= options.get("rows", 5) for shape in gathers)
        names = [name for name, _ in over_tp]
        assert names.count("reduce_scatter") == is_parallel
        assert names.count("all_reduce") <= (0 if is_parallel else len(gathers))
    is_free, over_cp = kind == "grpo", [shape for _, shape in ranks[0][1]]
    reductions = over_cp if is_free else over_cp[1:]  # sizes first
    assert {shape[0] for shape in reductions} == {6}
    of_results = [shape for shape in reductions if len(shape) == 1]  # after the means
    of_bins = [shape for shape in reductions if len(shape) == 2]
    assert len(of_results) == (len(of_bins) if kind == "gspo by tokens" else 0)
    assert len(of_bins) == 1 if is_free else len(of_bins) == 2 if "rows" in options else len(of_bins) > 2


@pytest.mark.parametrize(
    ("kind", "has_terms", "on_policy"),
    [
        pytest.param("gspo", False, False, id="in-chunk and scale-last"),
        pytest.param("gspo", True, False, id="two-pass"),
        pytest.param("grpo", False, False, id="row-by-row"),
        pytest.param("gspo", False, True, id="on-policy"),
    ],
)
def test_bad_data_on_one_rank_stops_all_of_them(kind, has_terms, on_policy):
    """The last cp rank alone has it, in one of several bins: all tp and cp ranks raise after the same all-reduce."""

    def told(groups) -> tuple[int, str]:
        case, flat, options = of_rank(groups, has_terms=has_terms)
        token = next(row for row in range(len(flat)) if flat[row] >= 20 and case.batch.loss_mask[row])  # of document 1
        if groups.cp.rank() == 1:
            case.hidden[token] = math.nan
        return groups.cp.rank(), error_of(partial(loss_of_rank, groups, kind, case, on_policy=on_policy, **options))

    for cp_rank, message in on_simulated_ranks(told, groups_of_ranks(tp=2, cp=2)):
        assert message.startswith("DataError: document 1 of the micro-batch has 1 unmasked tokens")
        assert ("in log_probs" if cp_rank else "on another context-parallel rank") in message
