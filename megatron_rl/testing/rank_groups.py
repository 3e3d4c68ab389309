"""Makes the process groups of a layout without Megatron, for tests of losses alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.testing.layout_step import Layout


def make_groups(rank: int, layout: Layout, backend: str = "gloo") -> ParallelGroups:
    """This rank's groups in Megatron's order of ranks: tp fastest, then cp, then dp. Each rank makes every group."""
    ranks = torch.arange(layout.world_size).view(layout.data, layout.context, layout.tensor)
    both = ranks.reshape(-1, layout.tensor)
    groups = {}
    for members_of_all, name in ((ranks, "tp"), (ranks.movedim(1, -1), "cp"), (ranks.movedim(0, -1), "dp"), (both.T, "dp_cp")):
        for members in members_of_all.reshape(-1, members_of_all.shape[-1]).tolist():
            group = dist.new_group(members, backend=backend)
            if rank in members:
                groups[name] = group
    return ParallelGroups(**groups)
