"""Makes and compares the context-parallel groups of single micro-batches, which need not be the model's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group, all_gather_stack, group_device, process_group, resolve_group, world_group


def have_same_ranks(first: Group, second: Group) -> bool:
    """Whether both groups of this rank hold the same ranks. No communication."""
    if first is second or first.size() == second.size() == 1:
        return True
    members = [dist.get_process_group_ranks(process_group(group)) for group in (first, second) if group.size() > 1]
    return len(members) == 2 and members[0] == members[1]


def make_context_groups(sizes: Iterable[int], dp_cp_group: Group | None = None) -> dict[int, Group]:
    """{size: this rank's context-parallel group of that size}, of neighbours in the dp-cp group, as Megatron-Core makes them.

    They are for micro-batches with groups of their own. torch.distributed.new_group makes each, so every rank of the world calls
    this function, with the same sizes, in the same order as its other calls of new_group. A group of one rank is a process group
    too, because the layers of a model ask torch for its ranks.
    Communication: one all-gather over the world, and the making of groups.
    Raises ConfigError for a size that does not divide the dp-cp group.
    """
    dp_cp_group = resolve_group(dp_cp_group, "dp_cp")
    sizes = sorted(set(sizes))
    wrong = [size for size in sizes if size < 1 or dp_cp_group.size() % size]
    if wrong:
        size = dp_cp_group.size()
        choices = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise ConfigError(f"context-parallel sizes {wrong} do not divide the {size} ranks of dp x cp: choose of {choices}")
    world = world_group()
    own = dist.get_process_group_ranks(process_group(dp_cp_group)) if dp_cp_group.size() > 1 else [dist.get_rank()]
    ranks = torch.tensor(own, device=group_device(world))
    found: dict[int, Group] = {}
    for members in sorted({tuple(row) for row in all_gather_stack(ranks, world).tolist()}):
        for size in sizes:
            for start in range(0, len(members), size):
                group = dist.new_group(list(members[start : start + size]))
                if dist.get_rank() in members[start : start + size]:
                    found[size] = group
    return found
