"""The fused head's matmuls: which rows are in them, its plans, bins and chunks, what surroundings change, and its memory.

Values are in tests/test_generated_steps.py."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

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
from simulated_cuda import mark, simulated_cuda
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.declare import LossValue, register_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import MESSAGE_BYTES
from megatron_rl.ops import linear_gradient, linear_head, log_probs_torch
from megatron_rl.ops.linear_gradient import cut, document_bins, schedule_documents, schedule_rows
from megatron_rl.ops.linear_head import (
    Chunk,
    bytes_per_logit,
    rows_per_chunk,
    warn_of_small_chunks,
)
from megatron_rl.ops.log_probs_torch import RowResult
from megatron_rl.policy_loss import linear_gspo_loss, linear_policy_loss
from megatron_rl.policy_loss.linear import read_together

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


def test_what_the_host_reads_together_is_what_was_there():
    """The one copy from a device: bounds beyond int32's neighbours, and masks, with their dtypes."""
    given = [torch.tensor([0, 5, 2**30], dtype=torch.int32), torch.tensor([True, False]), torch.zeros(0, dtype=torch.bool)]
    assert all(torch.equal(got, want) and got.dtype == want.dtype for got, want in zip(read_together(*given), given, strict=True))


# A torch without a form: the product is made in blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/test_gpu.py asks it")
def test_a_sum_that_addmm_cannot_make_is_made_in_blocks(monkeypatch):
    """Of the weight gradient's size there would be a second one: 2 GiB at V = 128k and H = 4096."""
    widths = []

    def mm(left, right):
        widths.append(left.shape[0] * right.shape[1])
        return left.float() @ right.float()

    monkeypatch.setattr(linear_head, "_adds_to_float32", lambda dtype, device: False)
    monkeypatch.setattr(linear_head, "_float32_mm", mm)
    monkeypatch.setattr(linear_head, "TEMPORARY_BYTES", 7 * 4 * 12)  # seven columns of twelve float32
    generator = torch.Generator().manual_seed(0)
    gradient, hidden = (torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 40), (9, 12)))
    out = torch.full((40, 12), 0.5)
    with simulated_cuda():
        linear_head.add_weight_gradient(mark(gradient), mark(hidden), out=mark(out))
    torch.testing.assert_close(out, 0.5 + gradient.float().t() @ hidden.float())
    assert max(widths) == 7 * 12 and sum(widths) == 40 * 12


# What a caller's surroundings may not change


def test_autocast_changes_nothing():
    """Operands have the dtype that was asked for: under autocast the gradient of hidden alone would be a product of bfloat16."""
    case = head_batch().to(torch.float32)
    want = run(linear_gspo_loss, case, max_logits_bytes=budget(case, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(linear_gspo_loss, case, max_logits_bytes=budget(case, 6))
    assert torch.equal(got.hidden_gradient, want.hidden_gradient) and torch.equal(got.weight_gradient, want.weight_gradient)
    assert torch.equal(got.output.loss, want.output.loss)


@pytest.mark.parametrize("which", ["transposed", "every second", "rows of a larger one"])
def test_operands_may_have_any_strides(which):
    """Views of larger tensors, as slices of a fused parameter or a transposed head are."""
    case = head_batch()

    def view(tensor):
        if which == "transposed":
            return tensor.t().contiguous().t()
        if which == "every second":
            return torch.stack([tensor, torch.full_like(tensor, float("nan"))], -1)[..., 0]
        return torch.cat([torch.full_like(tensor, float("nan")), tensor])[len(tensor) :]

    labels = torch.stack([case.batch.labels, case.batch.labels], -1)[:, 0]
    hidden, weight = view(case.hidden).requires_grad_(), view(case.weight).requires_grad_()
    _, *rest = case.batch.arguments()
    want = by_logits("gspo", case)
    for rows in (6, 1000):
        hidden.grad = weight.grad = None
        output = linear_gspo_loss(hidden, weight, labels, *rest, **CLIP, max_logits_bytes=budget(case, rows))
        output.loss.backward()
        got = SimpleNamespace(output=output, hidden_gradient=hidden.grad, weight_gradient=weight.grad)
        assert max(worst_error(got, want).values()) < 1e-12


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


def test_bytes_of_float32_logits_of_16_bits_are_theirs_alone():
    """The gradient lies over them. Of the other dtypes the test of the budget counts the bytes."""
    found = [bytes_per_logit(torch.zeros(2, 2, dtype=dtype), True) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    assert found == [4, 4, 8]


def test_small_chunks_are_warned_of_once():
    """On CUDA: the weight gradient is read and written once a chunk."""
    warn_of_small_chunks.cache_clear()
    with pytest.warns(UserWarning, match="chunks of 640 rows; below 4096 .* 4096000 bytes would hold 4096 rows"):
        warn_of_small_chunks(640, 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_small_chunks(640, 1000)


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


class NewMemory(TorchDispatchMode):
    """The storages [*, columns] that did not exist before."""

    def __init__(self, columns: int, *known: torch.Tensor):
        super().__init__()
        self.columns, self.known, self.num_new = columns, {tensor.untyped_storage().data_ptr() for tensor in known}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] == self.columns:
            self.num_new += result.untyped_storage().data_ptr() not in self.known
        return result


@given(is_kept=st.lists(st.booleans(), min_size=2, max_size=200).filter(lambda rows: 0 < sum(rows) < len(rows)))
@settings(max_examples=100, deadline=None)
def test_rows_move_without_memory_beside_them(is_kept):
    """2 GiB may hold the logits exactly. A row goes alone, then blocks go through the rows that are free."""
    num_rows, kept = len(is_kept), torch.tensor(is_kept).nonzero()[:, 0]
    logits = torch.arange(num_rows * 3.0).view(num_rows, 3)
    numbers = torch.arange(num_rows, dtype=torch.float32)
    result = RowResult(**{field.name: numbers for field in dataclasses.fields(RowResult)})
    hidden, before = numbers[:, None].repeat(1, 2), logits.clone()
    chunk = Chunk(slice(5, 5 + num_rows), hidden, numbers.long(), logits, result)
    with NewMemory(3, logits) as memory:
        small, order = linear_gradient._keep_rows(chunk, kept)
    assert memory.num_new == 0 and small.logits.data_ptr() == logits.data_ptr()
    assert torch.equal(order.sort().values, kept) and torch.equal(small.logits, before[order])
    assert torch.equal(small.rows, order + 5) and torch.equal(small.hidden, hidden[order])
    assert torch.equal(small.labels, order)


@pytest.mark.parametrize("num_dropped", [1, 7, 500])
def test_few_blocks_move_many_rows(monkeypatch, num_dropped):
    blocks_moved, select = [], torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *args, out: (blocks_moved.append(len(out)), select(*args, out=out))[1])
    logits = torch.arange(1000.0)[:, None].repeat(1, 2)
    holes, sources = torch.arange(num_dropped), torch.arange(1000 - num_dropped, 1000)
    linear_gradient._move_rows(logits, sources, holes, 1000 - num_dropped, sources.tolist())
    assert logits[:num_dropped, 0].tolist() == sources.tolist()
    # One row alone, then 1, 2, 4, ... rows.
    assert sum(blocks_moved) == num_dropped - 1 and len(blocks_moved) <= math.log2(num_dropped) + 1


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
        ("gspo", False, "uneven", {"sequence_parallel": True}),
        ("gspo", True, "uneven", {}),
        ("grpo", False, "uneven", {"sequence_parallel": True}),
        ("grpo", True, "last rank alone", {}),
        ("gspo", True, "uneven", {"on_policy": True, "sequence_parallel": True}),
        ("gspo", False, "uneven", {"rows": 1000, "sequence_parallel": True}),
        ("gspo", True, "last rank alone", {}),
        ("gspo by tokens", False, "uneven", {}),
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


NAN_HIDDEN, INFINITE_OLD, VARIED = "NaN hidden", "infinite old log-probability", "advantages that vary"


@pytest.mark.parametrize(
    ("fault", "kind", "has_terms", "on_policy"),
    [
        pytest.param(NAN_HIDDEN, "gspo", False, False, id="in-chunk and scale-last"),
        pytest.param(NAN_HIDDEN, "gspo", True, False, id="two-pass"),
        pytest.param(NAN_HIDDEN, "grpo", False, False, id="row-by-row"),
        pytest.param(NAN_HIDDEN, "gspo", False, True, id="on-policy"),
        (INFINITE_OLD, "gspo", False, False),
        (VARIED, "gspo", False, False),
        (VARIED, "gspo", False, True),
    ],
)
def test_bad_data_on_one_rank_stops_all_of_them(fault, kind, has_terms, on_policy):
    """The last cp rank alone has it, in one of several bins: all tp and cp ranks raise after the same all-reduce."""

    def told(groups, has_fault: bool) -> str:
        case, flat, options = of_rank(groups, has_terms=has_terms)
        token = next(row for row in range(len(flat)) if flat[row] >= 20 and case.batch.loss_mask[row])  # of document 1
        spread = case.batch.advantages.repeat_interleave(case.batch.cu_seqlens.diff())
        if fault == VARIED:
            spread = torch.cat([spread, spread.new_zeros(len(case.hidden) - len(spread))])
            case, options["advantages_per"] = replace(case, batch=replace(case.batch, advantages=spread)), "token"
        at = {NAN_HIDDEN: case.hidden, INFINITE_OLD: case.batch.old_log_probs, VARIED: spread}[fault]
        if has_fault and groups.cp.rank() == 1:
            at[token] = {NAN_HIDDEN: math.nan, INFINITE_OLD: math.inf, VARIED: 7.0}[fault]
        return error_of(partial(loss_of_rank, groups, kind, case, on_policy=on_policy, **options))

    def both(groups) -> tuple[int, str, str]:
        return groups.cp.rank(), told(groups, True), told(groups, False)

    for cp_rank, message, healthy in on_simulated_ranks(both, groups_of_ranks(tp=2, cp=2)):
        assert healthy == ""
        if fault == VARIED:
            assert message.startswith("DataError: advantages vary inside document 1: ")
        else:
            name = "log_probs" if fault == NAN_HIDDEN else "old_log_probs"
            where = f"in {name}" if cp_rank else "on another context-parallel rank"
            assert message.startswith("DataError: document 1 of the micro-batch has 1 unmasked tokens")
            assert where in message
