"""Which rows meet which matmul: bins, chunks and their size, as plain host data."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.ops import linear_head
from megatron_rl.ops.linear_head import add_weight_gradient, bytes_per_logit, head_logits
from megatron_rl.ops.linear_schedule import (
    MOVE_DIVISOR,
    Plan,
    cut,
    document_bins,
    rows_per_chunk,
    schedule_documents,
    schedule_rows,
    warn_of_small_chunks,
)


@given(budget=st.integers(1, 10**7), bytes_per_row=st.integers(1, 10**5), preferred=st.none() | st.integers(1, 10**6))
@settings(max_examples=200, deadline=None)
def test_chunk_and_the_block_that_moves_rows_fit_the_budget(budget, bytes_per_row, preferred):
    """The buffers of a chunk, and in the same moment a copy of up to one row in 32, are never more than was allowed."""
    if budget < bytes_per_row:
        with pytest.raises(ConfigError, match=f"{bytes_per_row} is the smallest budget that works"):
            rows_per_chunk(budget, bytes_per_row, preferred_bytes=preferred)
        return
    rows = rows_per_chunk(budget, bytes_per_row, preferred_bytes=preferred)
    moved = 0 if rows == 1 else max(1, rows // MOVE_DIVISOR)
    assert rows >= 1 and (rows + moved) * bytes_per_row <= budget
    assert rows < 128 or rows % 128 == 0
    if preferred is not None and rows > 1:
        assert rows * bytes_per_row <= preferred


def test_rows_of_known_sizes():
    """2 GiB of bfloat16 logits at 128,256 columns are 8372 rows; one in 33 of them is for moving, 8064 = 63 x 128 remain."""
    assert rows_per_chunk(2 * 1024**3, 2 * 128_256) == 8064
    assert rows_per_chunk(10, 10) == rows_per_chunk(29, 10) == 1
    assert rows_per_chunk(30, 10) == 2


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "2G", None])
def test_a_budget_that_holds_no_row_is_refused(budget):
    with pytest.raises(ConfigError, match="max_logits_bytes="):
        rows_per_chunk(budget, 64)


def test_small_chunks_are_warned_of_once():
    """On CUDA: the weight gradient is read and written once a chunk."""
    warn_of_small_chunks.cache_clear()
    with pytest.warns(UserWarning, match="chunks of 640 rows; below 4096 .* 4096000 bytes would hold 4096 rows"):
        warn_of_small_chunks(640, 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_small_chunks(640, 1000)


@given(sizes=st.lists(st.integers(0, 40), max_size=30), capacity=st.integers(1, 30))
@settings(max_examples=200, deadline=None)
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


def rows_of(*counts: int) -> list[torch.Tensor]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]


@pytest.mark.parametrize(
    ("counts", "bins", "terms", "idle", "plans"),
    [
        pytest.param((3, 2), [(0, 1)], False, (), "in-chunk", id="two documents in one chunk"),
        pytest.param((12, 2), [(0,), (1,)], False, (), "scale-last in-chunk", id="a long one"),
        pytest.param((12, 2), [(0,), (1,)], True, (), "two-pass in-chunk", id="a long one with terms"),
        pytest.param((12, 2), [(0,), (1,)], False, (0,), "two-pass in-chunk", id="a long one of advantage 0 stops early"),
        pytest.param((4, 3), [(0, 1)], False, (), "two-pass", id="a bin that holds more here than on other cp ranks"),
        pytest.param((0, 2), [(0,), (1,)], False, (), "in-chunk in-chunk", id="FB-25 a bin that is empty here is an item"),
        pytest.param((), [()], False, (), "in-chunk", id="no document"),
    ],
)
def test_the_plan_is_chosen_by_what_this_rank_holds(counts, bins, terms, idle, plans):
    items = schedule_documents(
        bins, rows_of(*counts), 5, has_row_terms=terms, is_idle=[number in idle for number in range(len(counts))]
    )
    assert " ".join(item.plan for item in items) == plans
    assert [item.documents for item in items] == bins, "one item for each bin, in their order: every rank meets its reduction"
    assert sum(item.num_rows for item in items) == sum(counts)
    assert all(chunk.numel() <= 5 for item in items for chunk in item.chunks)
    for item in items:
        assert len(item.chunks) == -(-item.num_rows // 5), "as few as can be"
        # Those of the last chunk are not computed again.
        assert item.plan != Plan.TWO_PASS or item.chunks[-1].numel() == 5


@given(num_rows=st.integers(0, 200), capacity=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_chunks_are_as_few_and_as_equal_as_can_be(num_rows, capacity):
    """A last chunk of a few rows would read and write the whole weight gradient for them."""
    rows = torch.arange(7, 7 + num_rows)
    chunks = cut(rows, capacity)
    sizes = [chunk.numel() for chunk in chunks]
    assert len(chunks) == -(-num_rows // capacity)
    assert not chunks or (max(sizes) <= capacity and max(sizes) - min(sizes) <= 1)
    assert torch.equal(torch.cat([*chunks, torch.zeros(0, dtype=torch.int64)]), rows)
    assert [item.plan for item in schedule_rows(rows, capacity)] == [Plan.ROW_BY_ROW] * len(chunks)


@pytest.mark.parametrize(
    ("dtype", "fp32_logits", "expected"),
    [
        pytest.param(torch.float32, False, 4, id="float32"),
        pytest.param(torch.float32, True, 4, id="float32 logits of float32"),
        pytest.param(torch.float64, True, 8, id="float64 stays"),
        pytest.param(torch.bfloat16, False, 6, id="bfloat16 with the float32 copy of its gradient on the CPU"),
        pytest.param(torch.bfloat16, True, 4, id="float32 logits of bfloat16, the gradient over them"),
    ],
)
def test_bytes_of_a_logit_count_all_buffers(dtype, fp32_logits, expected):
    assert bytes_per_logit(torch.zeros(2, 2, dtype=dtype), fp32_logits) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_products_are_summed_in_float32_or_better(dtype):
    """FB-85: out += G^T X and float32 logits, of 16-bit operands, against float64 of the same operands."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, gradient = (torch.randn(size, generator=generator).to(dtype) for size in ((300, 40), (50, 40), (300, 50)))
    start = torch.randn(50, 40, generator=generator, dtype=linear_head.accumulator_dtype(weight))
    out = add_weight_gradient(gradient, hidden, out=start.clone())
    exact = start.double() + gradient.double().T @ hidden.double()
    # 300 products: a float32 sum is exact to 1e-6 of the largest element; a 16-bit one would be off by 1e-3 and more.
    tolerance = 1e-6 if out.dtype == torch.float32 else 1e-14
    assert (out.double() - exact).abs().max() <= tolerance * exact.abs().max()
    logits = head_logits(hidden, weight, out=torch.empty(300, 50, dtype=out.dtype))
    exact = hidden.double() @ weight.double().T
    assert (logits.double() - exact).abs().max() <= tolerance * exact.abs().max()
