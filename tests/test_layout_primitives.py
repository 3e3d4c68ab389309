"""Who owns which token under context parallelism, sums of packed documents, and which process group is found, and when.

Tokens against brute force, the rank lists of layouts by hand. Ranks run gloo on this machine.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import error_of, zigzag
from trainer_cases import CP, PP, TP

from megatron_rl.count import count_step
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.context_parallel import local_cu_seqlens, local_positions, padded_length, response_spans
from megatron_rl.layout.groups import (
    SINGLE,
    ParallelGroups,
    all_gather_stack,
    all_reduce_max,
    all_reduce_sum,
    broadcast_from_last,
    document_ids,
    document_sums,
    resolve_group,
    resolve_groups,
    spread,
    world_group,
)
from megatron_rl.testing.ranks import run_ranks


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


def test_rows_padded_to_one_length_are_cut_by_that_length():
    """FB-26: 6 tokens, prompt 2, in a row of 16 at cp 2. Without the padded length the chunks of 4 would be 2 long."""
    # Response index j stands at position 1 + j: rank 0 owns positions 0..3 and 12..15, rank 1 owns 4..11.
    assert response_spans(6, 4, 0, 2, padded_to=16) == [(0, 3), (0, 0)]
    assert response_spans(6, 4, 1, 2, padded_to=16) == [(3, 4), (0, 0)]
    # By itself the sample is padded to 8 in chunks of 2: rank 0 owns 0, 1, 6, 7 and rank 1 owns 2..5.
    assert response_spans(6, 4, 0, 2) == [(0, 1), (0, 0)]
    assert response_spans(6, 4, 1, 2) == [(1, 3), (3, 4)]


@pytest.mark.parametrize("layout", DEAL)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_local_bounds_are_those_of_the_ranks_slices(cp_size, layout):
    """The prefix sums of what each rank holds of each document; padding of the row stays padding."""
    lengths = [2 * cp_size * n for n in (3, 1, 0, 5)]
    whole = torch.tensor([sum(lengths[:i]) for i in range(5)], dtype=torch.int32)
    for rank in range(cp_size):
        own = [len(DEAL[layout](list(range(length)), rank, cp_size)) for length in lengths]
        assert local_cu_seqlens(whole, cp_size, layout=layout).tolist() == [sum(own[:i]) for i in range(5)]
    assert local_cu_seqlens(whole, cp_size, layout=layout).dtype == torch.int32


def test_local_bounds_refuse_a_document_that_does_not_divide():
    for layout, num_chunks in (("zigzag", 8), ("contiguous", 4)):
        with pytest.raises(DataError, match=f"no multiple of {num_chunks}, the chunks of {layout} at cp_size=4: pad each document"):
            local_cu_seqlens(torch.tensor([0, 8, 14], dtype=torch.int32), 4, layout=layout)


@pytest.mark.parametrize("layout", DEAL)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_padded_lengths_are_the_smallest_that_divide(cp_size, layout):
    num_chunks = 1 if cp_size == 1 else cp_size * (2 if layout == "zigzag" else 1)
    for length, multiple in itertools.product(range(1, 50), (1, 2, 3)):
        fits = [n for n in range(length, 200) if n % num_chunks == 0 and (n // num_chunks) % multiple == 0]
        assert padded_length(length, cp_size, layout=layout, multiple=multiple) == fits[0]


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


def test_spread_gives_each_token_its_documents_value_and_padding_zero():
    documents = torch.tensor([0, 0, 2, 3, 3])
    assert spread(torch.tensor([1.5, 7.0, float("nan")]), documents).tolist()[:2] == [1.5, 1.5]
    assert spread(torch.tensor([1.5, 7.0, 2.0]), documents).tolist() == [1.5, 1.5, 2.0, 0.0, 0.0]


# Process groups

# Arguments of initialize_model_parallel on 4 ranks -> all groups of each kind, by hand; tp varies first, then cp, dp
ALONE = [[0], [1], [2], [3]]
PAIRS, STRIDED, ALL = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]
LAYOUTS = [
    ({TP: 2}, {"tp": PAIRS, "cp": ALONE, "dp": STRIDED, "dp_cp": STRIDED, "pp": ALONE}),
    ({TP: 4}, {"tp": ALL, "cp": ALONE, "dp": ALONE, "dp_cp": ALONE, "pp": ALONE}),
    ({CP: 2}, {"tp": ALONE, "cp": PAIRS, "dp": STRIDED, "dp_cp": ALL, "pp": ALONE}),
    ({TP: 2, CP: 2}, {"tp": PAIRS, "cp": STRIDED, "dp": ALONE, "dp_cp": STRIDED, "pp": ALONE}),
    ({PP: 2}, {"tp": ALONE, "cp": ALONE, "dp": PAIRS, "dp_cp": PAIRS, "pp": STRIDED}),
    ({TP: 2, PP: 2}, {"tp": PAIRS, "cp": ALONE, "dp": ALONE, "dp_cp": ALONE, "pp": STRIDED}),
    # Rollouts and counts belong to the whole data-parallel group: expert groups must not be taken for it.
    ({"expert_model_parallel_size": 2}, {"tp": ALONE, "cp": ALONE, "dp": ALL, "dp_cp": ALL, "pp": ALONE}),
]


def ranks_of(group) -> list[int]:
    return [dist.get_rank()] if group is SINGLE else sorted(dist.get_process_group_ranks(group))


def visit_layouts(rank, layouts):
    """Initialises and destroys each layout in turn; gives what was resolved in each, and what was between them."""
    from megatron.core import parallel_state

    answers = []
    for keywords, _ in layouts:
        parallel_state.destroy_model_parallel()
        is_single = resolve_groups() == ParallelGroups() and resolve_group(None, "dp") is SINGLE
        parallel_state.initialize_model_parallel(**keywords)
        groups = resolve_groups()
        found = {name: ranks_of(getattr(groups, name)) for name in ("tp", "cp", "dp", "dp_cp", "pp")}
        with_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        candidates = (groups.dp, with_cp, dist.group.WORLD)
        refusals = [error_of(lambda group=group: count_step([torch.ones(1)], None, group)) for group in candidates]
        # Each rank gives one sample: the step holds as many as there are dp ranks, cp ranks not counted twice.
        answers.append((found, is_single, refusals, count_step([torch.ones(3)])[0].num_samples))
    return answers


@pytest.mark.megatron
def test_groups_hold_the_ranks_of_each_layout_in_turn():
    """FB-43: a neighbouring group (expert-dp, dp with cp) has the same type and often the same size. FB-30: an import-time or
    cached group would survive the next layout; without a layout there is one process. FB-02: a dp group that holds cp ranks is
    refused, as each sample would be counted cp times. The world group of a cp layout is such a group as well."""
    for rank, answers in enumerate(run_ranks(visit_layouts, 4, LAYOUTS)):
        for (found, is_single, refusals, num_samples), (keywords, groups) in zip(answers, LAYOUTS, strict=True):
            expected = {name: next(ranks for ranks in all_of if rank in ranks) for name, all_of in groups.items()}
            assert found == expected and is_single, f"rank {rank}, {keywords}"
            assert num_samples == len(groups["dp"][0])
            says = "ConfigError: dp_group holds the context-parallel ranks"
            assert [says in refusal for refusal in refusals] == [False, CP in keywords, CP in keywords]
            others = [name for name, flag in (("tensor", TP), ("pipeline", PP)) if flag in keywords and CP not in keywords]
            says = f"dp_group holds the {others[0]}-parallel ranks" if others else "parallel ranks" if CP in keywords else ""
            assert says in refusals[2] and bool(says) == bool(refusals[2])
            assert refusals[0] == ""


def collectives_over_a_subgroup(rank):
    """Ranks (1, 3) of 4, whose group ranks are 0 and 1."""
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    group = odd if rank % 2 else even
    values = torch.tensor([[1.0 + rank, 2.0]]).t()  # not contiguous
    before = values.clone()
    stacked = all_gather_stack(values, group).tolist()
    assert all_gather_stack(values[0, 0], group).shape == (2,) and all_gather_stack(values[:0], group).shape == (2, 0, 1)
    total, largest = all_reduce_sum(values, group).tolist(), all_reduce_max(values, group).tolist()
    assert torch.equal(values, before), "the caller's tensor is left alone"
    return stacked, total, largest, broadcast_from_last(torch.tensor([float(rank)]), group).tolist()


def test_collectives_run_over_subgroups_in_group_order():
    """A group rank taken for a global one fails, or mixes values up, on ranks (1, 3) of 4."""
    results = run_ranks(collectives_over_a_subgroup, 4, use_megatron=False)
    assert results[1] == results[3] == ([[[2.0], [2.0]], [[4.0], [2.0]]], [[6.0], [4.0]], [[4.0], [2.0]], [3.0])
    assert results[0] == results[2] == ([[[1.0], [2.0]], [[3.0], [2.0]]], [[4.0], [4.0]], [[3.0], [2.0]], [2.0])


def test_one_process_without_megatron_is_a_single_rank_whose_collectives_do_nothing():
    """FB-30: nothing has to be initialised, and asking does not import Megatron's groups."""
    groups, values = resolve_groups(), torch.tensor([1.0, 2.0])
    assert groups == ParallelGroups()
    assert (groups.tp.size(), groups.tp.rank(), repr(groups.dp)) == (1, 0, "SINGLE")
    assert all_gather_stack(values, SINGLE).tolist() == [[1.0, 2.0]]
    assert all(f(values, SINGLE) is values for f in (all_reduce_sum, all_reduce_max, broadcast_from_last))


def test_work_of_one_process_has_its_own_error():
    def fails():
        raise KeyError("no answer")

    assert on_all_ranks(lambda: 1) == [1]
    with pytest.raises(KeyError, match="no answer"):
        on_all_ranks(fails)
    with pytest.raises(ConfigError, match="torch.distributed is not initialised"):
        world_group()


def test_a_models_own_groups_are_found_through_its_wrappers():
    """Megatron-Core 0.15 and later keep them on the model; DDP and Float16Module wrap it as `.module`."""
    tp = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    model = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(pg_collection=SimpleNamespace(tp=tp, cp=None))))
    groups = resolve_groups(model)
    assert groups.tp is tp
    assert groups.cp is SINGLE and groups.dp is SINGLE
    assert resolve_groups(SimpleNamespace(module=None)) == ParallelGroups()
