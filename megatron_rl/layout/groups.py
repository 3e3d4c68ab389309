"""Finds the process groups of a launch in megatron.core.parallel_state, and has the collectives over them; sums over documents in a
fixed order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigError


class Group(Protocol):
    """What the package needs of a process group: torch's ProcessGroup, or SINGLE."""

    def size(self) -> int: ...

    def rank(self) -> int: ...


class SingleProcess:
    """The group of one rank. No collective is launched over it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "SINGLE"


SINGLE = SingleProcess()


def process_group(group: Group) -> dist.ProcessGroup:
    """The group as torch's type: a group of more than one rank is always a ProcessGroup."""
    return cast(dist.ProcessGroup, group)


def world_group() -> Group:
    """All ranks of torch.distributed. Raises ConfigError before it is initialised."""
    world = dist.group.WORLD
    if world is None:
        raise ConfigError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    return world


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The groups of one rank. `dp` excludes context parallelism, so its ranks hold different samples; `dp_cp` includes it."""

    tp: Group = SINGLE
    cp: Group = SINGLE
    dp: Group = SINGLE
    dp_cp: Group = SINGLE
    pp: Group = SINGLE


# Name here -> accessor in megatron.core.parallel_state, its keywords, attribute of a ProcessGroupCollection.
_ACCESSORS: dict[str, tuple[str, dict[str, bool], str]] = {
    "tp": ("get_tensor_model_parallel_group", {}, "tp"),
    "cp": ("get_context_parallel_group", {}, "cp"),
    "dp": ("get_data_parallel_group", {}, "dp"),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}, "dp_cp"),
    "pp": ("get_pipeline_model_parallel_group", {}, "pp"),
    # ep: ranks with different experts; expert_tp: with shards of one; expert_mp: both of these; expert_dp: with replicas.
    "ep": ("get_expert_model_parallel_group", {}, "ep"),
    "expert_tp": ("get_expert_tensor_parallel_group", {}, "expt_tp"),
    "expert_mp": ("get_expert_tensor_and_model_parallel_group", {}, "tp_ep"),
    "expert_dp": ("get_expert_data_parallel_group", {}, "expt_dp"),
}


def initialised_parallel_state() -> Any:
    """megatron.core.parallel_state; None before it is initialised. No import: where it is initialised, it has been imported."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state


def resolve_group(group: Group | None, name: str) -> Group:
    """The given group, else parallel_state's group of that name (a key of _ACCESSORS) if it is initialised, else SINGLE.

    Raises ConfigError for an unknown name and for an object that is not a group.
    """
    if name not in _ACCESSORS:
        raise ConfigError(f"group name {name!r} is not one of {sorted(_ACCESSORS)}")
    if group is not None:
        if not (hasattr(group, "size") and hasattr(group, "rank")):
            raise ConfigError(
                f"{name}_group={group!r} is not a process group: pass a torch.distributed ProcessGroup, None to take Megatron's, "
                "or layout.groups.SINGLE for one rank"
            )
        return group
    parallel_state = initialised_parallel_state()
    if parallel_state is None:
        return SINGLE
    accessor, keywords, _ = _ACCESSORS[name]
    found: Group = getattr(parallel_state, accessor)(**keywords)
    return found


def resolve_groups(model: object = None) -> ParallelGroups:
    """All groups: the model's `pg_collection` if it has one, else parallel_state's, else SINGLE."""
    collection = _find_collection(model)
    names = {field.name: getattr(collection, _ACCESSORS[field.name][2], None) for field in fields(ParallelGroups)}
    return ParallelGroups(**{name: resolve_group(group, name) for name, group in names.items()})


def _find_collection(model: object) -> object:  # a ProcessGroupCollection, or None
    """Megatron-Core 0.15 and later keep the groups on the model; DDP and Float16Module wrap it as `.module`."""
    while model is not None:
        collection = getattr(model, "pg_collection", None)
        if collection is not None:
            return collection
        model = getattr(model, "module", None)
    return None


# torch 2.13 has new names for them and warns about the old ones.
GATHER_INTO_ONE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_stack(values: Tensor, group: Group) -> Tensor:  # [*] -> [size, *]
    """Each rank's tensor, stacked in group order. One all-gather; shapes must agree on all ranks.

    Into one tensor: with a list of outputs NCCL gathers into a buffer and copies each output from it, and the host makes a tensor
    for each rank."""
    if group.size() == 1:
        return values.unsqueeze(0)
    values = values.contiguous()
    gathered = values.new_empty((group.size(), *values.shape))
    own = values if values.dim() else values.view(1)
    rows = group.size() * own.shape[0]  # not -1, which torch cannot find for tensors without an element
    getattr(dist, GATHER_INTO_ONE)(gathered.view(rows, *own.shape[1:]), own, group=group)
    return gathered


Gather = Callable[[Tensor, Group], Tensor]  # all_gather_stack, or what sends more with it


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
    """The device of tensors in collectives over the group: this rank's GPU for NCCL, else the CPU."""
    if isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Pending:
    """A collective that runs: call `wait` before the values are used. At group size 1 there is none, and `wait` returns at once."""

    def __init__(self, values: Tensor, work: dist.Work | None):
        self._values, self._work = values, work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._values


def start_all_reduce_sum(values: Tensor, group: Group) -> Pending:
    """The sum over the group, in place. Communication: one asynchronous all-reduce, until `wait`."""
    if group.size() == 1:
        return Pending(values, None)
    values = values.contiguous()
    return Pending(values, dist.all_reduce(values, group=group, async_op=True))


def have_same_ranks(first: Group, second: Group) -> bool:
    """Whether both groups of this rank hold the same ranks. No communication."""
    if first is second or first.size() == second.size() == 1:
        return True
    members = [dist.get_process_group_ranks(process_group(group)) for group in (first, second) if group.size() > 1]
    return len(members) == 2 and members[0] == members[1]


def start_reduce_scatter_sum(values: Tensor, group: Group) -> Pending:  # [size * n, *] -> [n, *]
    """This rank's n rows of the sum over the group. Communication: one asynchronous reduce-scatter, until `wait`."""
    if group.size() == 1:
        return Pending(values, None)
    own = values.new_empty((values.shape[0] // group.size(), *values.shape[1:]))
    return Pending(own, getattr(dist, REDUCE_SCATTER)(own, values.contiguous(), group=group, async_op=True))


def document_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:  # [num_tokens] int64
    """The document of each token; N for the padding past cu_seqlens[-1]. No synchronisation."""
    positions = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


def document_sums(
    values: Tensor,  # [T] or [T, k]
    cu_seqlens: Tensor,  # [N + 1] integer
) -> Tensor:  # [N] or [N, k] float64
    """Sum over each document without padding, in float64 and in the order of the tokens: the same bits in every run.

    float64, because a sum over 100 k tokens in float32 loses digits that a GSPO clip of 3e-4 needs.
    """
    num_tokens = values.shape[0]
    tail = cu_seqlens.new_full((1,), num_tokens)  # a fill: a copy from the host would synchronise
    offsets = torch.cat([cu_seqlens, tail]).to(torch.int64)  # the padding is one more segment, left out below
    sums = torch.segment_reduce(values.double(), "sum", offsets=offsets, axis=0, unsafe=True, initial=0.0)
    return sums[:-1]


def spread(
    per_document: Tensor,  # [N] or [N, k]
    token_documents: Tensor,  # [T] int64, N for padding
) -> Tensor:  # [T] or [T, k]
    """Gives each token the value of its document; padding tokens get 0."""
    return torch.cat([per_document, per_document.new_zeros(1, *per_document.shape[1:])])[token_documents]
