"""The collectives of the package, each over an explicit group and free at size 1; none of them is differentiable, on purpose."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.layout.groups import Group, process_group

# torch 2.13 has other names for them and warns of the old ones.
GATHER_INTO_ONE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_stack(values: Tensor, group: Group) -> Tensor:  # [*] -> [size, *]
    """Each rank's tensor, stacked in group order. One all-gather; shapes must agree on all ranks."""
    if group.size() == 1:
        return values.unsqueeze(0)
    values = values.contiguous()
    gathered = values.new_empty((group.size(), *values.shape))
    if values.is_cuda:
        gather_into_one(gathered, values, group)
    else:
        dist.all_gather(list(gathered.unbind(0)), values, group=group)
    return gathered


def gather_into_one(gathered: Tensor, values: Tensor, group: Group) -> None:  # [size, *] and [*], both contiguous
    """One all-gather. A list of tensors NCCL would gather through a buffer of its own, and copy each of them out of it."""
    getattr(dist, GATHER_INTO_ONE)(gathered.view(-1), values.view(-1), group=group)


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
        torch_group = process_group(group)
        dist.broadcast(values, src=dist.get_global_rank(torch_group, group.size() - 1), group=torch_group)
    return values


def group_device(group: Group) -> torch.device:
    """Where a tensor must live to travel over the group: this rank's GPU for NCCL, else the CPU."""
    if isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Pending:
    """A collective under way: `wait` before the values are used. At group size 1 there is none, and nothing to wait for."""

    def __init__(self, values: Tensor, work: dist.Work | None):
        self._values, self._work = values, work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._values


def start_all_reduce_sum(values: Tensor, group: Group) -> Pending:
    """The sum over the group, in place. One all-reduce that runs beside what the caller does until it waits."""
    if group.size() == 1:
        return Pending(values, None)
    values = values.contiguous()
    return Pending(values, dist.all_reduce(values, group=group, async_op=True))


def start_reduce_scatter_sum(values: Tensor, group: Group) -> Pending:  # [size * n, *] -> [n, *]
    """This rank's n rows of the sum over the group. One reduce-scatter that runs beside what the caller does until it waits."""
    if group.size() == 1:
        return Pending(values, None)
    own = values.new_empty((values.shape[0] // group.size(), *values.shape[1:]))
    return Pending(own, getattr(dist, REDUCE_SCATTER)(own, values.contiguous(), group=group, async_op=True))
