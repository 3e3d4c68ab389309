"""The sparse head's products of pairs, their scores and their gradients: the torch functions and the kernels, against float64.

Kernels are interpreted on a CPU, compiled on a GPU. Their machine code: tests/test_kernel_code.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import KERNEL_DEVICE

from megatron_rl.config import Backend
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops import sparse_head
from megatron_rl.ops.log_probs import vocab_shard
from megatron_rl.ops.log_probs_torch import working_dtype
from megatron_rl.ops.sparse_head import (
    SPARSE_ROW_LIMIT,
    Pairs,
    add_hidden_reference,
    add_weight_reference,
    make_pairs,
    pair_gradient,
    pair_results,
    single_log_probs,
    sort_rows,
    without_zeros,
)
from megatron_rl.ops.support_head import pair_kernels

pytestmark = pytest.mark.kernel
TEMPERATURE, VOCAB_SIZE = 0.7, 37
# Empty, alone, two, a block of pairs and one more, more than two blocks, all but one, all. Row 3 and 8 share most ids with others.
SIZES = [0, 1, 2, 8, 9, 20, 36, 37, 3]
# Rows that are in no product: masked, alone, empty, whole.
IDLE = [0, 1, 5, 7]
LIVE = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8])  # row 5 is masked
# float32 sums of H products in another order: 1040 terms of size 1/32 keep five digits. A 16-bit dX has one rounding more, and
# the interpreter truncates to bfloat16.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
BACKENDS = {Backend.TORCH: tuple(TOLERANCES), Backend.TRITON: (torch.float32, torch.bfloat16, torch.float16)}
CASES = [pytest.param(backend, dtype, id=f"{backend} {dtype}") for backend, dtypes in BACKENDS.items() for dtype in dtypes]


class Case:
    """Hidden states and a weight with NaN wherever the sparse head must not read."""

    def __init__(self, dtype: torch.dtype, width: int, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lists = [torch.randperm(VOCAB_SIZE, generator=generator)[:size].tolist() for size in SIZES]
        self.support = SamplingSupport.from_lists(lists)
        self.labels = torch.tensor([ids[-1] if ids else 0 for ids in lists])
        self.hidden = torch.randn(len(SIZES), width, generator=generator, dtype=torch.float64).to(dtype)
        self.weight = (torch.randn(VOCAB_SIZE + 1, width, generator=generator, dtype=torch.float64) / width**0.5).to(dtype)
        self.c = torch.randn(len(SIZES), generator=generator, dtype=torch.float64).to(working_dtype(self.hidden))
        self.shard = vocab_shard(VOCAB_SIZE + 1, TEMPERATURE, VOCAB_SIZE, SINGLE)
        self.hidden[IDLE], self.weight[VOCAB_SIZE] = math.nan, math.nan

    def pairs(self) -> Pairs:
        kinds = sort_rows(self.support, LIVE, VOCAB_SIZE, limit=SPARSE_ROW_LIMIT)
        assert (kinds.single.tolist(), kinds.sparse.tolist(), kinds.dense.tolist()) == ([0, 1], [2, 3, 4, 6, 8], [7])
        return make_pairs(self.support, kinds.sparse, self.labels.to(KERNEL_DEVICE), self.shard)

    def run(self, backend: Backend, *, max_bytes: int = 2**31) -> dict[str, torch.Tensor]:
        pairs, kernels, options = self.pairs(), pair_kernels(backend), {"max_bytes": max_bytes}
        hidden, weight, c = (tensor.to(KERNEL_DEVICE) for tensor in (self.hidden, self.weight, self.c))
        z = kernels.multiply(hidden, weight, pairs, **options)
        result = pair_results(z, pairs, self.shard, SINGLE)
        g = pair_gradient(z, pairs, result, c[pairs.rows], self.shard)
        of_hidden, of_weight = torch.zeros_like(hidden), torch.ones_like(weight, dtype=working_dtype(weight))
        kernels.add_hidden(g, pairs, weight, out=of_hidden, **options)
        kernels.add_weight(g, pairs, hidden, out=of_weight, **options)
        found = {"log_probs": result.log_probs, "of_hidden": of_hidden, "of_weight": of_weight}
        return {name: tensor.cpu() for name, tensor in found.items()}

    def truth(self) -> dict[str, torch.Tensor]:
        """Row by row, in float64, by autograd."""
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.double().requires_grad_()
        log_probs = []
        for row in (2, 3, 4, 6, 8):
            kept = self.support.ids[self.support.offsets[row] : self.support.offsets[row + 1]].long()
            z = weight[kept] @ hidden[row] / TEMPERATURE
            log_probs.append(z.log_softmax(0)[kept == self.labels[row]][0])
            (log_probs[-1] * self.c[row]).backward()
        return {"log_probs": torch.stack(log_probs).detach(), "of_hidden": hidden.grad, "of_weight": weight.grad + 1}


# One vector and less, whole blocks, blocks and a rest, no whole vector.
@pytest.mark.parametrize("width", [8, 1024, 1040, 21])
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_scores_and_gradients_are_those_of_the_kept_columns_alone(backend, dtype, width):
    """NaN in masked, single, whole and padded rows says that nothing else was read."""
    case = Case(dtype, width)
    found, wanted = case.run(backend), case.truth()
    for name, tensor in found.items():
        tolerance = TOLERANCES[dtype] if name == "of_hidden" else TOLERANCES[working_dtype(case.hidden)]
        largest = float(wanted[name].abs().max())
        assert torch.allclose(tensor.double(), wanted[name], rtol=0, atol=tolerance * largest), name
    assert not found["of_hidden"][IDLE].any() and (found["of_weight"][VOCAB_SIZE] == 1).all()


def test_pairs_without_a_gradient_are_left_out():
    """Rows 1 and 3 of four have none, and their columns of the weight hold NaN. A row keeps its place where it has no pair left."""
    support, labels = SamplingSupport.from_lists([[0, 1], [2, 3], [0, 5], [3, 4]]), torch.tensor([0, 2, 5, 4])
    weight, hidden = torch.arange(12.0).reshape(6, 2), torch.ones(4, 2)
    weight[[2, 3, 4]] = math.nan
    pairs = make_pairs(support, torch.arange(4), labels, vocab_shard(6, 1.0, None, SINGLE))
    g = torch.tensor([0.5, -0.5, 0.0, 0.0, -1.0, 1.0, 0.0, 0.0])
    left, few = without_zeros(g, pairs)
    assert left.tolist() == [0.5, -0.5, -1.0, 1.0] and few.offsets.tolist() == [0, 2, 2, 4, 4]
    out = torch.zeros(4, 2)
    add_hidden_reference(left, few, weight, out=out, max_bytes=2**20)
    # 0.5 (0, 1) - 0.5 (2, 3) and -(0, 1) + (10, 11)
    assert out.tolist() == [[-1.0, -1.0], [0.0, 0.0], [10.0, 10.0], [0.0, 0.0]]
    of_weight = torch.zeros(6, 2)
    add_weight_reference(left, few, hidden, out=of_weight, max_bytes=2**20)
    assert of_weight[:, 0].tolist() == [-0.5, -0.5, 0.0, 0.0, 0.0, 1.0]
    assert without_zeros(left, few)[1] is few


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_two_runs_agree_in_each_bit(backend, dtype):
    first, second = (Case(dtype, 40).run(backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("max_bytes", [1, 3 * 40 * 8 * 9])
def test_little_memory_changes_the_order_of_the_weights_sum_alone(max_bytes):
    """One pair at a time, or 9 of them; a row is never cut."""
    case = Case(torch.float64, 40)
    small, large = case.run(Backend.TORCH, max_bytes=max_bytes), case.run(Backend.TORCH)
    assert all(torch.equal(small[name], large[name]) for name in ("log_probs", "of_hidden"))
    assert torch.allclose(small["of_weight"], large["of_weight"], rtol=0, atol=1e-13)


def test_an_id_of_many_rows_is_added_once(monkeypatch):
    """On CUDA index_add has no order: the sum has one only where each id comes once."""
    case, seen, sums = Case(torch.float32, 8), [], sparse_head._sum_segments
    monkeypatch.setattr(sparse_head, "_sum_segments", lambda values, counts, of: seen.append(counts) or sums(values, counts, of))
    pairs = case.pairs()
    weight = torch.zeros(case.weight.shape, device=KERNEL_DEVICE)
    ones, hidden = torch.ones(pairs.columns.numel(), device=KERNEL_DEVICE), case.hidden.to(KERNEL_DEVICE)
    sparse_head.add_weight_reference(ones, pairs, hidden, out=weight, max_bytes=2**31)
    counts = pairs.columns.bincount()
    assert [tuple(found.tolist()) for found in seen] == [tuple(counts[counts > 0].tolist())] and int(counts.max()) > 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_pair_is_no_launch_and_no_error(backend):
    """A tp rank may own no column of any set, a cp rank may have no row."""
    case = Case(torch.float32, 8)
    shard = vocab_shard(VOCAB_SIZE + 1, TEMPERATURE, VOCAB_SIZE, SINGLE)
    for rows in (torch.zeros(0, dtype=torch.int64), torch.tensor([0])):
        pairs, kernels = make_pairs(case.support, rows, case.labels.to(KERNEL_DEVICE), shard), pair_kernels(backend)
        hidden, weight = case.hidden.to(KERNEL_DEVICE), case.weight.to(KERNEL_DEVICE)
        z = kernels.multiply(hidden, weight, pairs, max_bytes=100)
        result = pair_results(z, pairs, shard, SINGLE)
        assert result.log_probs.numel() == rows.numel() and not result.log_probs.isfinite().any()
        out = torch.zeros_like(hidden)
        kernels.add_hidden(z, pairs, weight, out=out, max_bytes=100)
        kernels.add_weight(z, pairs, hidden, out=torch.zeros_like(weight), max_bytes=100)
        assert not out.any()


def test_a_pair_of_another_rank_is_left_out_and_its_row_stays():
    """Columns 20 to 36 of 37: row 2's ids lie below, so it has no pair here; of row 1 rank 0 has one id."""
    support = SamplingSupport.from_lists([[5, 9], [3, 20, 36, 21], [7]])
    labels = torch.tensor([9, 36, 7])
    assert make_pairs(support, torch.tensor([1]), labels, vocab_shard(20, 1.0, VOCAB_SIZE, _OfTwo(0))).columns.tolist() == [3]
    shard = vocab_shard(20, 1.0, VOCAB_SIZE, _OfTwo(1))
    pairs = make_pairs(support, torch.tensor([0, 1]), labels, shard)
    assert pairs.columns.tolist() == [0, 1, 16] and pairs.places.tolist() == pairs.tokens.tolist() == [1, 1, 1]
    assert pairs.offsets.tolist() == pairs.bounds.tolist() == [0, 0, 3] and pairs.is_label.tolist() == [False, False, True]


class _OfTwo:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_logits_far_below_the_others_and_below_0_keep_their_digits(backend):
    """Their own maximum: z = -300 and -301 beside 0. e^-300 is 0 in float32. log_prob = -ln(1 + e^-1)."""
    weight = torch.tensor([[-300.0], [-301.0], [0.0]], device=KERNEL_DEVICE)
    support, shard = SamplingSupport.from_lists([[0, 1]]), vocab_shard(3, 1.0, None, SINGLE)
    pairs = make_pairs(support, torch.tensor([0]), torch.tensor([0], device=KERNEL_DEVICE), shard)
    z = pair_kernels(backend).multiply(torch.ones(1, 1, device=KERNEL_DEVICE), weight, pairs, max_bytes=100)
    result = pair_results(z, pairs, shard, SINGLE)
    assert float(result.log_probs) == pytest.approx(-math.log1p(math.exp(-1)), rel=1e-6)
    g = pair_gradient(z, pairs, result, torch.ones(1, device=KERNEL_DEVICE), shard)
    p = 1 / (1 + math.exp(-1))
    assert g.tolist() == pytest.approx([1 - p, -(1 - p)], rel=1e-6)


def test_a_set_of_one_id_scores_exactly_0_and_another_label_minus_infinity():
    support = SamplingSupport.from_lists([[4], [], [6], [2, 3], [1]])
    rows, labels = torch.tensor([0, 1, 2, 4]), torch.tensor([4, 0, 5, 2, 1])
    assert single_log_probs(support, rows, labels, torch.float32).tolist() == [0.0, -math.inf, -math.inf, 0.0]


def test_the_limit_and_the_whole_vocabulary_decide_which_rows_are_dense():
    support = SamplingSupport.from_lists([[1], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]])
    rows = torch.arange(5)
    for vocab_size, limit, dense in ((5, 3, [3, 4]), (5, 9, [4]), (9, 9, [])):
        kinds = sort_rows(support, rows, vocab_size, limit=limit)
        assert kinds.dense.tolist() == dense and kinds.single.tolist() == [0]
        assert kinds.sparse.tolist() == [row for row in range(1, 5) if row not in dense]
    assert sort_rows(SamplingSupport.from_lists([[0]]), torch.tensor([0]), 1, limit=9).dense.tolist() == [0], "whole and alone"


def test_a_wrong_id_makes_a_row_dense_where_its_score_is_nan():
    """On CUDA no check has read the sets: an id below 0, one twice, one past the vocabulary, and a right row."""
    support = SamplingSupport.from_lists([[-1, 2], [2, 2], [5], [1, 2]])
    kinds = sort_rows(support, torch.arange(4), 5, limit=9)
    assert kinds.dense.tolist() == [0, 1, 2] and kinds.sparse.tolist() == [3] and kinds.single.numel() == 0
