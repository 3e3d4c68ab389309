"""Process groups: which one is found, when, and the rank lists of layouts by hand. Ranks run gloo on this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import error_of
from trainer_cases import CP, PP, TP

from megatron_rl.count import count_step
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import (
    SINGLE,
    ParallelGroups,
    all_gather_stack,
    all_reduce_max,
    all_reduce_sum,
    broadcast_from_last,
    resolve_group,
    resolve_groups,
    world_group,
)
from megatron_rl.testing.ranks import run_ranks

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


def test_an_explicit_group_wins_and_what_is_no_group_is_refused():
    given = SimpleNamespace(size=lambda: 4, rank=lambda: 2)
    assert resolve_group(given, "tp") is given
    with pytest.raises(ConfigError, match="group name 'xp' is not one of"):
        resolve_group(None, "xp")
    with pytest.raises(ConfigError, match=r"tp_group=\[0, 1\] is not a process group"):
        resolve_group([0, 1], "tp")


def test_a_models_own_groups_are_found_through_its_wrappers():
    """Megatron-Core 0.15 and later keep them on the model; DDP and Float16Module wrap it as `.module`."""
    tp = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    model = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(pg_collection=SimpleNamespace(tp=tp, cp=None))))
    groups = resolve_groups(model)
    assert groups.tp is tp
    assert groups.cp is SINGLE and groups.dp is SINGLE
    assert resolve_groups(SimpleNamespace(module=None)) == ParallelGroups()
