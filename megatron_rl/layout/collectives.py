"""The collectives of the package, each over an explicit group and free at size 1; none of them is differentiable, on purpose."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.layout.groups import Group


def all_gather_stack(values: Tensor, group: Group) -> Tensor:  # [*] -> [size, *]
    """Each rank's tensor, stacked in group order. One all-gather; shapes must agree on all ranks."""
    if group.size() == 1:
        return values.unsqueeze(0)
    values = values.contiguous()
    gathered = values.new_empty((group.size(), *values.shape))
    dist.all_gather(list(gathered.unbind(0)), values, group=group)
    return gathered


def all_reduce_sum(values: Tensor, group: Group) -> Tensor:
    """The sum over the group in a new tensor. One all-reduce."""
    if group.size() == 1:
        return values
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_reduce_max(values: Tensor, group: Group) -> Tensor:
    """The maximum over the group in a new tensor. One all-reduce."""
    if group.size() == 1:
        return values
    largest = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def broadcast_from_last(values: Tensor, group: Group) -> Tensor:
    """The last rank's tensor on every rank, in place (pipeline groups: the last stage has the loss). One broadcast."""
    if group.size() > 1:
        dist.broadcast(values, src=dist.get_global_rank(group, group.size() - 1), group=group)
    return values


def group_device(group: Group) -> torch.device:
    """Where a tensor must live to travel over the group: this rank's GPU for NCCL, else the CPU."""
    if isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
