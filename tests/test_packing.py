"""Packed documents: bounds that are refused, each token's document, sums in a fixed order. References are slices."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import DataError
from megatron_rl.layout.groups import document_ids, document_sums, spread
from megatron_rl.policy_loss.inputs import check_cu_seqlens

# One row per thing that can go wrong: (document lengths, tokens past the last document).
CASES = [
    pytest.param([3, 1, 4], 0, id="ragged documents"),
    pytest.param([3, 1, 4], 1, id="FB-63 tail of one"),
    pytest.param([3, 1, 4], 63, id="FB-63 long tail"),
    pytest.param([0, 3, 0, 0, 2, 0], 2, id="FB-64 empty documents at start, middle and end"),
    pytest.param([0, 0], 0, id="no token at all"),
    pytest.param([], 0, id="neither document nor token"),
    pytest.param([], 5, id="padding alone"),
    pytest.param([1], 0, id="one token"),
]


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype)


@pytest.mark.parametrize(("lengths", "tail"), CASES)
def test_each_token_has_its_document_and_sums_are_those_of_slices(lengths, tail):
    """FB-63, FB-64: padding gets the number N, one past the last document; an empty document owns no token and sums to 0, and a
    tail full of NaN changes no sum."""
    owners = [i for i, length in enumerate(lengths) for _ in range(length)]
    assert document_ids(bounds(lengths), sum(lengths) + tail).tolist() == owners + [len(lengths)] * tail
    values = torch.randn(sum(lengths) + tail, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values[sum(lengths) :] = float("nan")
    for of_columns in (values, values[:, 0]):
        sums = document_sums(of_columns, bounds(lengths, torch.int64))
        expected = [of_columns[[t for t, owner in enumerate(owners) if owner == i]].sum(0) for i in range(len(lengths))]
        torch.testing.assert_close(sums, torch.stack(expected) if expected else of_columns[:0])


def test_a_sum_over_many_small_numbers_keeps_the_digits_that_a_gspo_clip_looks_at():
    """A float32 sum of 200 k log-ratios of 3e-4 is off by 1e-3 relative, more than the width of a GSPO clip."""
    values = torch.full((200_000,), 3e-4, dtype=torch.float32)
    exact = 200_000 * values[0].double()
    torch.testing.assert_close(document_sums(values, torch.tensor([0, 200_000])), exact[None], rtol=1e-12, atol=0)


def test_sums_are_the_same_bits_on_every_run():
    """Atomic adds would change the order; a clip decision could then differ between two runs or ranks."""
    values = torch.randn(5000, 2, generator=torch.Generator().manual_seed(2)) * 10.0 ** torch.arange(-4, 6).repeat(500)[:, None]
    cu_seqlens = torch.tensor([0, 1, 1700, 1700, 4900], dtype=torch.int32)
    first = document_sums(values, cu_seqlens)
    assert all(torch.equal(document_sums(values, cu_seqlens), first) for _ in range(5))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        pytest.param(torch.tensor([0, 3, 2], dtype=torch.int32), "decreases from 3 to 2 at document 1", id="decreases"),
        pytest.param(torch.tensor([1, 3], dtype=torch.int32), "starts with 1, it must start with 0", id="starts late"),
        pytest.param(torch.tensor([0, 9], dtype=torch.int32), "ends at 9 but there are 8 tokens", id="ends past T"),
        pytest.param(torch.tensor([0.0, 8.0]), "int32", id="float"),
        pytest.param(torch.tensor([[0, 8]]), r"\[N \+ 1\]", id="two dimensions"),
        pytest.param(torch.tensor([], dtype=torch.int32), r"\[N \+ 1\]", id="empty"),
    ],
)
def test_wrong_bounds_are_refused_with_a_message(cu_seqlens, message):
    """FB-63: the segment sum would read out of bounds, on CUDA as a device-side assert far away."""
    with pytest.raises(DataError, match=message):
        check_cu_seqlens(cu_seqlens, 8)


def test_spread_gives_each_token_its_documents_value_and_padding_zero():
    documents = torch.tensor([0, 0, 2, 3, 3])
    assert spread(torch.tensor([1.5, 7.0, float("nan")]), documents).tolist()[:2] == [1.5, 1.5]
    assert spread(torch.tensor([1.5, 7.0, 2.0]), documents).tolist() == [1.5, 1.5, 2.0, 0.0, 0.0]
