"""The sets of ids that a sampler kept: SamplingSupport."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import DataError
from megatron_rl.layout.sampling_support import SamplingSupport

SETS = [[5, 1], [], [3], [2, 0, 9]]


def as_lists(support: SamplingSupport) -> list[list[int]]:
    return [ids.tolist() for ids in support.ids.split(support.sizes.tolist())]


def test_sets_are_sorted_and_come_from_lists():
    support = SamplingSupport.from_lists(SETS)
    assert as_lists(support) == [[1, 5], [], [3], [0, 2, 9]]
    assert (support.num_rows, support.num_pairs) == (4, 6)
    assert support.ids.dtype == torch.int32 and support.offsets.dtype == torch.int64
    assert support.rows.tolist() == [0, 0, 2, 3, 3, 3]


def test_rows_are_taken_in_any_order_and_joined():
    support = SamplingSupport.from_lists(SETS)
    taken = support.take(torch.tensor([3, 1, 3, 0]))
    assert as_lists(taken) == [[0, 2, 9], [], [0, 2, 9], [1, 5]]
    assert as_lists(support.take(torch.tensor([1]))) == [[]] and support.take(torch.tensor([], dtype=torch.int64)).num_rows == 0
    assert as_lists(support.take(torch.tensor([-1, -3]))) == [[0, 2, 9], []]  # from the end, as in all of torch
    joined = SamplingSupport.cat([taken, support])
    assert joined.bound == 10
    assert as_lists(joined) == as_lists(taken) + as_lists(support)


def test_a_set_has_its_token_and_an_id_is_repeated_in_its_own_row_alone():
    support = SamplingSupport.from_lists([[3, 1, 3], [3], [], [4, 5]])
    assert support.have(torch.tensor([3, 1, 3, 5])).tolist() == [True, False, False, True]
    assert support.are_repeated.tolist() == [False, False, True, False, False, False]  # sorted: 1 3 3, 3, 4 5
    assert SamplingSupport.from_lists([]).have(torch.tensor([], dtype=torch.int64)).tolist() == []


def test_other_rows_are_emptied_with_what_is_wrong_in_them():
    support = SamplingSupport.from_lists([[5, 1], [7, 7, 900], [3]])
    live = support.only(torch.tensor([True, False, True]))
    assert as_lists(live) == [[1, 5], [], [3]]
    assert live.is_inside(6) and not support.is_inside(901)


def test_blocks_are_neighbouring_rows_of_few_ids_or_one_row():
    support = SamplingSupport.from_lists([*SETS, [], [4, 6]])
    cut = {most: [(rows, pairs, as_lists(sets)) for rows, pairs, sets in support.blocks(most)] for most in (1, 3, 100)}
    assert cut[3] == [
        (slice(0, 3), slice(0, 3), [[1, 5], [], [3]]),
        (slice(3, 5), slice(3, 6), [[0, 2, 9], []]),
        (slice(5, 6), slice(6, 8), [[4, 6]]),
    ]
    assert [sets for _, _, sets in cut[1]] == [[[1, 5]], [[], [3]], [[0, 2, 9]], [[]], [[4, 6]]]
    assert cut[100] == [(slice(0, 6), slice(0, 8), as_lists(support))]
    assert list(SamplingSupport.from_lists([]).blocks()) == []


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1, 2], [0, 1], "rise from 0 to the 2 ids"),
        ([1, 2], [1, 2], "rise from 0 to the 2 ids"),
        ([1, 2, 3], [0, 2, 1, 3], "rise from 0 to the 3 ids"),
        ([1], [], "rise from 0 to the 1 ids, got 0 offsets"),
        ([1.0], [0, 1], "ids must be a vector of torch.int32, got .* torch.float32"),
    ],
)
def test_wrong_offsets_and_dtypes_are_refused(ids, offsets, message):
    with pytest.raises(DataError, match=message):
        SamplingSupport(torch.tensor(ids), torch.tensor(offsets, dtype=torch.int64))


def test_a_fraction_is_no_id():
    with pytest.raises(DataError, match=r"ids must be a vector of torch.int32, got .* torch.float32"):
        SamplingSupport.from_lists([[1, 2.5]])
