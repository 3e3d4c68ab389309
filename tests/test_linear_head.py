"""The fused head's matmuls, its bins and chunks as plain host data, what autocast leaves alone, and the bytes of a call."""

from __future__ import annotations

import dataclasses
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import CLIP
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import budget, by_logits, head_batch, plan_of, run, worst_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES
from megatron_rl.errors import ConfigError
from megatron_rl.layout import SINGLE
from megatron_rl.ops import linear_gradient, linear_head
from megatron_rl.ops.linear_gradient import cut, document_bins, make_gradient, schedule_documents, schedule_rows
from megatron_rl.ops.linear_head import (
    Chunk,
    HeadOptions,
    add_weight_gradient,
    blocks,
    bytes_per_logit,
    chunk_capacity,
    head_logits,
    make_head,
    multiply_into,
    rows_per_chunk,
    warn_of_small_chunks,
    weight_gradient,
)
from megatron_rl.ops.log_probs_torch import RowResult
from megatron_rl.policy_loss import linear_gspo_loss

GIB = 1024**3


# A torch without a form: the product is made in blocks


class OnDevice:
    """A CPU tensor's stand-in that says it is on CUDA; what is cut from it says so too."""

    def __init__(self, tensor):
        self.tensor, self.is_cuda = tensor, True

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    def __getitem__(self, index):
        return self.tensor[index]


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
    linear_head.add_weight_gradient(OnDevice(gradient), hidden, out=out)
    torch.testing.assert_close(out, 0.5 + gradient.float().t() @ hidden.float())
    assert max(widths) == 7 * 12 and sum(widths) == 40 * 12


@pytest.mark.parametrize(("num_columns", "bytes_per_column"), [(0, 4), (1, 10**12), (1000, 10**6), (5, 0)])
def test_blocks_hold_each_column_once(num_columns, bytes_per_column):
    cut = [index for columns in blocks(num_columns, bytes_per_column) for index in range(num_columns)[columns]]
    assert cut == list(range(num_columns))


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
    assert which == "rows of a larger one" or not hidden.is_contiguous()
    _, *rest = case.batch.arguments()
    want = by_logits("gspo", case)
    for rows in (6, 1000):
        hidden.grad = weight.grad = None
        output = linear_gspo_loss(hidden, weight, labels, *rest, **CLIP, max_logits_bytes=budget(case, rows))
        output.loss.backward()
        got = SimpleNamespace(output=output, hidden_gradient=hidden.grad, weight_gradient=weight.grad)
        assert max(worst_error(got, want).values()) < 1e-12


# The memory of a call, from the buffers that the code makes


def most_extra_bytes(num_tokens: int, max_logits_bytes: int, *, has_main_grad: bool = False, fp32_logits: bool = False):
    """(rows of a chunk, bytes beside the inputs when most are held) of plans in-chunk and row-by-row at V 131072, H 4096, bfloat16
    on CUDA. Tensors without storage, so that any machine can tell."""
    columns, hidden_size = 131072, 4096
    with FakeTensorMode():
        weight = torch.empty(columns, hidden_size, dtype=torch.bfloat16, device="cuda")
        hidden = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16, device="cuda")
        labels = torch.empty(num_tokens, dtype=torch.int64, device="cuda")
        main_grad = torch.empty(columns, hidden_size, device="cuda") if has_main_grad else None
        capacity = chunk_capacity(weight, max_logits_bytes, fp32_logits, num_tokens)
        rows = max(chunk.numel() for item in schedule_rows(torch.arange(num_tokens), capacity) for chunk in item.chunks)
        head = make_head(hidden, weight, labels, HeadOptions(1.0, None, SINGLE, True, "torch", False, fp32_logits), rows)
        gradient = make_gradient(head, needs_hidden=True, needs_weight=True, main_grad=main_grad, scale=None, has_entropy_term=True)
    assert head.weight.dtype == torch.bfloat16 and head.hidden.shape == hidden.shape
    assert (gradient.weight is None) != has_main_grad, "the first product makes it"
    chunk = head.logits.nbytes + (0 if head.gradient is head.logits else head.gradient.nbytes)
    assert chunk <= max_logits_bytes
    rows_of_hidden = rows * hidden_size * 2
    numbers = 16 * num_tokens * 4  # statistics, log-probabilities, coefficients: float32, one a row
    # One product writes 16 bits; several are added to float32.
    of_weight = 0 if has_main_grad else columns * hidden_size * (2 if rows == num_tokens else 4)
    # Rows of hidden that were gathered, and the gradient of those rows, or the rows times their coefficients.
    return rows, chunk + gradient.hidden.nbytes + of_weight + numbers + 2 * rows_of_hidden


@pytest.mark.filterwarnings("ignore:max_logits_bytes gives chunks")
def test_extra_memory_at_16k_tokens_and_128k_columns_is_below_the_target():
    """4.3 GiB at the default budget, 2.3 GiB with main_grad and chunks of 4096 rows; 3.2 GiB for 8192 tokens, which are one chunk.
    Plan scale-last has one more buffer of float32 weights where it cannot scale the one there is."""
    rows, plain = most_extra_bytes(16384, DEFAULT_MAX_LOGITS_BYTES)
    assert rows == 8192 and plain < 4.3 * GIB, "two full chunks"
    rows, one = most_extra_bytes(8192, DEFAULT_MAX_LOGITS_BYTES)
    assert rows == 8192 and one < 3.2 * GIB, "2 GiB hold exactly its logits"
    rows, with_main_grad = most_extra_bytes(16384, 4096 * 131072 * 2, has_main_grad=True)
    assert rows == 4096 and with_main_grad < 2.3 * GIB
    rows, exact = most_extra_bytes(16384, DEFAULT_MAX_LOGITS_BYTES, fp32_logits=True)
    assert exact < 4.2 * GIB


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


def test_rows_of_known_sizes():
    """2 GiB of bfloat16 logits at 128,256 columns are 8371 rows, at 131,072 columns 8192."""
    assert rows_per_chunk(2 * 1024**3, 2 * 128_256) == 8371
    assert rows_per_chunk(2 * 1024**3, 2 * 131_072) == 8192
    assert rows_per_chunk(10, 10) == rows_per_chunk(19, 10) == 1
    assert rows_per_chunk(20, 10) == 2


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_alone_is_rounded_once_to_what_is_asked(monkeypatch, operands, dtype):
    """In blocks on a CPU, where no matmul gives float32 from 16 bits; float32 sums, so that 16 bits have one rounding."""
    monkeypatch.setattr(linear_head, "CPU_TEMPORARY_BYTES", 7 * 4 * 300)  # seven columns of 300 rows
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = (torch.randn(size, generator=generator).to(operands) for size in ((300, 40), (300, 50)))
    out = weight_gradient(gradient, hidden, dtype)
    exact = gradient.double().T @ hidden.double()
    assert out.dtype == dtype and out.shape == (50, 40)
    limit = 2**-8 if dtype == torch.bfloat16 else 0.0
    # 1e-6: sums of 300 products in float32.
    assert ((out.double() - exact).abs() <= limit * exact.abs() + 1e-6 * exact.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_factor_and_a_cast_are_one_rounding(monkeypatch, dtype):
    monkeypatch.setattr(linear_head, "CPU_TEMPORARY_BYTES", 4 * 3 * 20)  # three rows
    tensor = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    want = (tensor * (1 / 3)).to(dtype)
    out = torch.empty_like(tensor, dtype=dtype)
    assert torch.equal(multiply_into(tensor, torch.tensor(1 / 3), out), want) and torch.equal(out, want)
    sixteen = tensor.bfloat16()
    want = (sixteen.float() * (1 / 3)).bfloat16()
    assert torch.equal(multiply_into(sixteen, torch.tensor(1 / 3), sixteen), want), "the factor itself is not rounded"
