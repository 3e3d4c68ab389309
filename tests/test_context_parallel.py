"""Who owns which token under context parallelism, against brute force over every token; sums of packed documents against slices."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import zigzag

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.context_parallel import (
    chunk_spans,
    local_cu_seqlens,
    local_positions,
    padded_length,
    response_spans,
)
from megatron_rl.layout.groups import document_ids, document_sums, spread
from megatron_rl.policy_loss.inputs import check_cu_seqlens


def contiguous(tokens: list[int], cp_rank: int, cp_size: int) -> list[int]:
    size = -(-len(tokens) // cp_size)
    return tokens[cp_rank * size : (cp_rank + 1) * size]


DEAL = {"zigzag": zigzag, "contiguous": contiguous}


def padded_tokens(length: int, num_chunks: int) -> list[int]:
    return list(range(-(-length // num_chunks) * num_chunks))


@pytest.mark.parametrize("layout", DEAL)
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_each_response_token_is_computed_by_exactly_one_rank_in_order(cp_size, layout):
    """FB-23: every prompt of 1..40 x response of 1..40 tokens; prompts that fill whole chunks leave ranks empty.

    The logits at position q give token q + 1, so a rank owns response token j if it owns position prompt - 1 + j.
    """
    num_chunks = 2 * cp_size if layout == "zigzag" else cp_size
    for prompt in range(1, 41):
        for response in range(1, 41):
            tokens = padded_tokens(prompt + response, num_chunks)
            found = []
            for rank in range(cp_size):
                spans = response_spans(prompt + response, response, rank, cp_size, layout=layout)
                indices = [j for a, b in spans for j in range(a, b)]
                own = [q - (prompt - 1) for q in DEAL[layout](tokens, rank, cp_size)]
                assert indices == [j for j in own if 0 <= j < response], (prompt, response, rank)
                found += indices
            assert sorted(found) == list(range(response)), (prompt, response)


@pytest.mark.parametrize("layout", DEAL)
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 7, 16, 33])
def test_positions_are_those_of_the_deal(length, cp_size, layout):
    """FB-24: with the other layout's order the shapes agree and the tokens are scrambled."""
    tokens = padded_tokens(length, 1 if cp_size == 1 else cp_size * (2 if layout == "zigzag" else 1))
    for rank in range(cp_size):
        assert local_positions(length, rank, cp_size, layout=layout).tolist() == DEAL[layout](tokens, rank, cp_size)


def test_the_two_layouts_differ_and_a_wrong_name_is_refused():
    """FB-24: 8 tokens at cp 2, by hand."""
    assert local_positions(8, 0, 2, layout="zigzag").tolist() == [0, 1, 6, 7]
    assert local_positions(8, 1, 2, layout="zigzag").tolist() == [2, 3, 4, 5]
    assert local_positions(8, 0, 2, layout="contiguous").tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="layout='ring' is not one of"):
        local_positions(8, 0, 2, layout="ring")


def test_rows_padded_to_one_length_are_cut_by_that_length():
    """FB-26: 6 tokens, prompt 2, in a row of 16 at cp 2. Without the padded length the chunks of 4 would be 2 long."""
    # Response index j stands at position 1 + j: rank 0 owns positions 0..3 and 12..15, rank 1 owns 4..11.
    assert response_spans(6, 4, 0, 2, padded_to=16) == [(0, 3), (0, 0)]
    assert response_spans(6, 4, 1, 2, padded_to=16) == [(3, 4), (0, 0)]
    # By itself the sample is padded to 8 in chunks of 2: rank 0 owns 0, 1, 6, 7 and rank 1 owns 2..5.
    assert response_spans(6, 4, 0, 2) == [(0, 1), (0, 0)]
    assert response_spans(6, 4, 1, 2) == [(1, 3), (3, 4)]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_local_bounds_are_those_of_the_ranks_slices(cp_size):
    """The prefix sums of what each rank holds of each document; padding of the row stays padding."""
    lengths = [2 * cp_size * n for n in (3, 1, 0, 5)]
    whole = torch.tensor([sum(lengths[:i]) for i in range(5)], dtype=torch.int32)
    for rank in range(cp_size):
        own = [len(zigzag(list(range(length)), rank, cp_size)) for length in lengths]
        assert local_cu_seqlens(whole, cp_size).tolist() == [sum(own[:i]) for i in range(5)]
    assert local_cu_seqlens(whole, cp_size).dtype == torch.int32


def test_local_bounds_refuse_a_document_that_does_not_divide():
    with pytest.raises(DataError, match="no multiple of 8, the chunks of zigzag at cp_size=4: pad each document"):
        local_cu_seqlens(torch.tensor([0, 8, 14], dtype=torch.int32), 4)
    assert local_cu_seqlens(torch.tensor([0, 3, 7], dtype=torch.int32), 1).tolist() == [0, 3, 7]
    assert local_cu_seqlens(torch.tensor([0, 4, 12], dtype=torch.int32), 4, layout="contiguous").tolist() == [0, 1, 3]
    with pytest.raises(DataError, match="no multiple of 4, the chunks of contiguous at cp_size=4"):
        local_cu_seqlens(torch.tensor([0, 6], dtype=torch.int32), 4, layout="contiguous")


@pytest.mark.parametrize("layout", DEAL)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_padded_lengths_are_the_smallest_that_divide(cp_size, layout):
    num_chunks = 1 if cp_size == 1 else cp_size * (2 if layout == "zigzag" else 1)
    for length, multiple in itertools.product(range(1, 50), (1, 2, 3)):
        fits = [n for n in range(length, 200) if n % num_chunks == 0 and (n // num_chunks) % multiple == 0]
        assert padded_length(length, cp_size, layout=layout, multiple=multiple) == fits[0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(lambda: response_spans(5, 5, 0, 2), DataError, "a prompt of at least one token", id="no prompt"),
        pytest.param(lambda: response_spans(5, 0, 0, 2), DataError, "response of at least one", id="no response"),
        pytest.param(lambda: response_spans(9, 3, 0, 2, padded_to=8), DataError, "padded_to=8 is shorter", id="short row"),
        pytest.param(lambda: chunk_spans(8, 2, 2), ConfigError, r"cp_rank=2 must be in \[0, cp_size=2\)", id="rank"),
        pytest.param(lambda: chunk_spans(8, -1, 2), ConfigError, "cp_rank=-1", id="negative rank"),
    ],
)
def test_impossible_slices_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


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
