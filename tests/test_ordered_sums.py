"""Sums over later and earlier tokens: values by hand, loops on cp ranks in both orders, derivatives, what is refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from helpers import EXACT, error_of, zigzag
from torch import Tensor

from megatron_rl import policy_loss, register_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE, Group, world_group
from megatron_rl.layout.packing import document_ids
from megatron_rl.losses.token_batch import JointSums, TokenBatch
from megatron_rl.testing.ranks import RankPool

# Whole documents: several tokens, none, one live, all masked, live ones in the last chunk alone, a length without its padding, one.
LENGTHS = [16, 0, 8, 8, 24, 13, 1]
LIVE = {0: range(3, 16, 2), 2: [5], 3: [], 4: range(21, 24), 5: range(13), 6: [0]}
DECAYS = (1.0, 0.7)


def contiguous(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    size = -(-len(document) // cp_size)
    return document[cp_rank * size : (cp_rank + 1) * size]


def ragged(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    """Contiguous slices of unlike sizes: the last rank has most, those between the first and the last nothing."""
    bounds = [0, *[len(document) // 4] * (cp_size - 1), len(document)]
    return document[bounds[cp_rank] : bounds[cp_rank + 1]]


DEALS = {"zigzag": (zigzag, "zigzag"), "contiguous": (contiguous, "contiguous"), "ragged": (ragged, "contiguous")}


def whole() -> tuple[list[list[int]], Tensor, Tensor, Tensor]:
    """(documents, mask [T], values [T, 2], weights [T, 2])."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    documents = [list(range(start, start + length)) for start, length in zip(starts[:-1], LENGTHS, strict=True)]
    mask = torch.zeros(starts[-1], dtype=torch.bool)
    for document, places in LIVE.items():
        mask[[starts[document] + place for place in places]] = True
    drawn = torch.randn(2, starts[-1], 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return documents, mask, drawn[0], drawn[1]


def by_loop(values: Tensor, documents: list[list[int]], mask: Tensor, decay: float, from_the_end: bool) -> Tensor:
    found = torch.zeros_like(values)
    for document in documents:
        live = [token for token in document if mask[token]]
        for t, token in enumerate(live):
            for k, other in enumerate(live):
                if (k >= t) if from_the_end else (k <= t):
                    found[token] = found[token] + decay ** abs(k - t) * values[other]
    return found


def batch_of(mask: Tensor, lengths: list[int], cp_group: Group, cp_layout: str | None, *, is_checked: bool = False) -> TokenBatch:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    nothing = torch.zeros(len(mask), dtype=torch.float64)
    return TokenBatch(
        log_ratio=nothing,
        log_probs=nothing,
        advantages=nothing,
        loss_mask=mask,
        documents=document_ids(bounds, len(mask)),
        token_counts=torch.zeros(len(lengths)),
        cu_seqlens=bounds,
        sums=JointSums(cp_group, len(lengths), torch.device("cpu"), is_checked),
        cp_layout=cp_layout,
    )


def sum_of(batch: TokenBatch, from_the_end: bool):
    return batch.suffix_sum if from_the_end else batch.prefix_sum


def test_sums_by_hand():
    """Tokens 2, -, 3, 5 of one sample, the second one masked, and a token of another sample. From the end: 2 + 3 + 5 = 10, 3 + 5 =
    8, 5. With the decay 1/2: 5; 3 + 5/2 = 5.5; 2 + 5.5/2 = 4.75, as the masked token is no step. Up to a token: 2; 3 + 2/2 = 4; 5 +
    4/2 = 7."""
    batch = batch_of(torch.tensor([True, False, True, True, True]), [4, 1], SINGLE, None)
    values = torch.tensor([2.0, math.nan, 3.0, 5.0, 9.0])
    assert batch.suffix_sum(values).tolist() == [10.0, 0.0, 8.0, 5.0, 9.0]
    assert batch.suffix_sum(values, decay=0.5).tolist() == [4.75, 0.0, 5.5, 5.0, 9.0]
    assert batch.prefix_sum(values, decay=0.5).tolist() == [2.0, 0.0, 4.0, 7.0, 9.0]


def test_a_sum_of_float32_is_added_in_float64():
    """2^24 + 1 + ... + 1: each 1 alone would be lost in float32."""
    values = torch.ones(65)
    values[-1] = 2.0**24
    got = batch_of(torch.ones(65, dtype=torch.bool), [65], SINGLE, None).suffix_sum(values)
    assert got.dtype == torch.float32 and got[0] == 2.0**24 + 64


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("from_the_end", [True, False], ids=["suffix", "prefix"])
def test_other_documents_and_padding_change_no_bit(from_the_end, tail):
    """Not even where they hold what is not finite."""
    values = torch.randn(9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    alone = sum_of(batch_of(torch.ones(9, dtype=torch.bool), [9], SINGLE, None), from_the_end)(values, decay=0.9)
    around = torch.cat([torch.full((4,), math.inf), values, torch.full((5 + tail,), math.nan)]).double()
    mask = torch.arange(len(around)) < 18
    among = sum_of(batch_of(mask, [4, 9, 5], SINGLE, None), from_the_end)(around, decay=0.9)
    assert torch.equal(among[4:13], alone)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("from_the_end", [True, False], ids=["suffix", "prefix"])
def test_one_rank_has_the_sums_of_a_loop(from_the_end, decay):
    documents, mask, values, weights = whole()
    batch, leaf = batch_of(mask, LENGTHS, SINGLE, None), values.clone().requires_grad_()
    got = sum_of(batch, from_the_end)(leaf, decay=decay)
    want = by_loop(leaf, documents, mask, decay, from_the_end)
    torch.testing.assert_close(got, want, **EXACT)
    assert torch.equal(sum_of(batch, from_the_end)(values[:, 0], decay=decay), got[:, 0]), "a vector is a column"
    gradients = [torch.autograd.grad((weights * found).sum(), leaf)[0] for found in (got, want)]
    torch.testing.assert_close(*gradients, **EXACT)


def sums_on_a_rank(rank: int, cp_size: int) -> dict:
    documents, mask, values, weights = whole()
    cp_group, found = world_group(), {}
    for deal, (of_rank, cp_layout) in DEALS.items():
        mine = [of_rank(document, cp_group.rank(), cp_size) for document in documents]
        flat = [token for document in mine for token in document]
        for is_checked in (False, True):
            batch = batch_of(mask[flat], [len(part) for part in mine], cp_group, cp_layout, is_checked=is_checked)
            for from_the_end in (True, False):
                for decay in DECAYS:
                    leaf = values[flat].clone().requires_grad_()
                    got = sum_of(batch, from_the_end)(leaf, decay=decay)
                    # A token's sum meets others on other ranks: so does its gradient.
                    (gradient,) = torch.autograd.grad((weights[flat] * got).sum(), leaf)
                    found[deal, from_the_end, decay, is_checked] = (flat, got.detach(), gradient)
    return found


@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_ranks_have_the_sums_of_a_loop(cp_size):
    """In zigzag order a rank's second chunk lies behind all chunks of the others; a cumulative sum of its slice would be wrong."""
    documents, mask, values, weights = whole()
    with RankPool(cp_size, use_megatron=False) as pool:
        ranks = pool.run(partial(sums_on_a_rank, cp_size=cp_size))
    for case in ranks[0]:
        _, from_the_end, decay, _ = case
        leaf = values.clone().requires_grad_()
        want = by_loop(leaf, documents, mask, decay, from_the_end)
        (gradient,) = torch.autograd.grad((weights * want).sum(), leaf)
        covered = sorted(token for of_rank in ranks for token in of_rank[case][0])
        assert covered == list(range(len(mask))), case
        for flat, got, of_leaf in (of_rank[case] for of_rank in ranks):
            torch.testing.assert_close(got, want[flat], **EXACT)
            torch.testing.assert_close(of_leaf, gradient[flat], **EXACT)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5, math.nan])
def test_a_decay_outside_its_range_is_refused(decay):
    batch = batch_of(torch.ones(2, dtype=torch.bool), [2], SINGLE, None)
    with pytest.raises(ConfigError, match=r"must be in \(0, 1\]"):
        batch.suffix_sum(torch.ones(2), decay=decay)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 1), ()])
def test_values_of_another_shape_are_refused(shape):
    """[T, T, k] would be added up by other rules without a word."""
    batch = batch_of(torch.ones(2, dtype=torch.bool), [2], SINGLE, None)
    with pytest.raises(DataError, match=r"takes \[T=2\] or \[T, k\]"):
        batch.prefix_sum(torch.ones(shape))


class PretendedPair:
    """Two cp ranks, of which the other one is empty."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def test_slices_whose_order_is_not_known_are_refused():
    batch = batch_of(torch.ones(2, dtype=torch.bool), [2], PretendedPair(), None)
    with pytest.raises(ConfigError, match='pass cp_layout="zigzag"'):
        batch.suffix_sum(torch.ones(2))


def slices_on_a_rank(rank: int) -> str:
    """Of 8 tokens in zigzag order over two ranks each has 4; here the first one has 5."""
    lengths = [4, 5] if rank == 0 else [4, 3]
    batch = batch_of(torch.ones(sum(lengths), dtype=torch.bool), lengths, world_group(), "zigzag")
    return error_of(lambda: batch.prefix_sum(torch.ones(sum(lengths))))


def test_slices_that_are_not_in_zigzag_order_are_refused():
    with RankPool(2, use_megatron=False) as pool:
        told = pool.run(slices_on_a_rank)
    assert "slices of [4, 5] tokens, of samples of [8, 8] tokens, are not in zigzag order" in told[0]
    assert "slices of [4, 3] tokens" in told[1] and "r and 3 - r of 4 equal ones" in told[1]


def test_a_wrong_name_of_the_order_is_refused():
    logits, bounds = torch.zeros(2, 3), torch.tensor([0, 2], dtype=torch.int32)
    arguments = (torch.zeros(2, dtype=torch.int64), None, torch.ones(1), torch.ones(2, dtype=torch.bool), bounds, torch.ones(1))
    with pytest.raises(ConfigError, match="cp_layout='ring' is not one of zigzag, contiguous, or None"):
        policy_loss("grpo", logits, *arguments, cp_layout="ring")


def fails_on_a_rank(rank: int) -> list[str]:
    """A loss that raises on rank 1 between two ordered sums, and one whose slices are odd on rank 1 alone."""
    cp_group = world_group()

    @register_policy_loss("breaks_on_rank_1", "batch")
    def breaks(batch):
        later = batch.suffix_sum(batch.log_ratio)
        if cp_group.rank() == 1:
            raise ValueError("of this rank")
        return -batch.advantages * batch.prefix_sum(later)

    told = []
    options = {"advantages_per": "sample", "cp_group": cp_group, "tp_group": SINGLE, "cp_layout": "zigzag"}
    for lengths in ([4, 2], [4, 5 if cp_group.rank() == 1 else 2]):
        size = sum(lengths)
        logits = torch.zeros(size, 5, dtype=torch.float64, requires_grad=True)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        tensors = (torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.float64), torch.ones(2))
        tensors = (*tensors, torch.ones(size, dtype=torch.bool), bounds, torch.ones(2))
        told.append(error_of(lambda tensors=tensors, x=logits: policy_loss("breaks_on_rank_1", x, *tensors, **options)))
    return told


def test_an_error_on_one_rank_between_two_sums_reaches_the_others():
    """They wait in the second sum for a rank that has left."""
    with RankPool(2, use_megatron=False) as pool:
        ranks = pool.run(fails_on_a_rank)
    assert all("of this rank" in told for told, _ in ranks)
    assert all("are not in zigzag order" in told for _, told in ranks)
