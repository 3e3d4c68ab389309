"""Resolves the TP, CP, DP and PP process groups at call time; never caches a group and never falls back to the world group."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch.distributed as dist

from megatron_rl.errors import ConfigError


class Group(Protocol):
    """What the package asks of a process group: torch's ProcessGroup, or SINGLE."""

    def size(self) -> int: ...

    def rank(self) -> int: ...


class SingleProcess:
    """The group of one rank: no collective is ever launched over it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "SINGLE"


SINGLE = SingleProcess()


def process_group(group: Group) -> dist.ProcessGroup:
    """torch's own type, for torch's own functions: a group of more than one rank is always torch's."""
    return cast(dist.ProcessGroup, group)


def world_group() -> Group:
    """All ranks of torch.distributed. Raises ConfigError before it is initialised."""
    world = dist.group.WORLD
    if world is None:
        raise ConfigError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    return world


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The resolved groups of one rank. `dp` excludes context parallelism (its ranks hold unlike samples), `dp_cp` includes it."""

    tp: Group = SINGLE
    cp: Group = SINGLE
    dp: Group = SINGLE
    dp_cp: Group = SINGLE
    pp: Group = SINGLE


# Our name -> accessor in megatron.core.parallel_state, attribute of a ProcessGroupCollection. Expert groups are never used.
_ACCESSORS = {
    "tp": ("get_tensor_model_parallel_group", {}, "tp"),
    "cp": ("get_context_parallel_group", {}, "cp"),
    "dp": ("get_data_parallel_group", {}, "dp"),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}, "dp_cp"),
    "pp": ("get_pipeline_model_parallel_group", {}, "pp"),
}


def _initialised_parallel_state() -> Any:  # the module, or None
    # Whoever initialised Megatron imported it. Looking it up instead of importing keeps `import megatron_rl` free of megatron.core.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state


def resolve_group(group: Group | None, name: str) -> Group:
    """The given group, else parallel_state's group of that name (tp, cp, dp, dp_cp, pp) if initialised, else SINGLE."""
    if name not in _ACCESSORS:
        raise ConfigError(f"group name {name!r} is not one of {sorted(_ACCESSORS)}")
    if group is not None:
        if not (hasattr(group, "size") and hasattr(group, "rank")):
            raise ConfigError(
                f"{name}_group={group!r} is not a process group: pass a torch.distributed ProcessGroup, None to take Megatron's, "
                "or layout.groups.SINGLE for one rank"
            )
        return group
    parallel_state = _initialised_parallel_state()
    if parallel_state is None:
        return SINGLE
    accessor, keywords, _ = _ACCESSORS[name]
    found: Group = getattr(parallel_state, accessor)(**keywords)
    return found


def resolve_groups(model: object = None) -> ParallelGroups:
    """All groups: those of the model's `pg_collection` where it carries one, else parallel_state's, else SINGLE."""
    collection = _find_collection(model)
    names = {name: getattr(collection, attribute, None) for name, (_, _, attribute) in _ACCESSORS.items()}
    return ParallelGroups(**{name: resolve_group(group, name) for name, group in names.items()})


def _find_collection(model: object) -> object:  # a ProcessGroupCollection, or None
    """Megatron-Core 0.15 and later keep the groups on the model; DDP and Float16Module wrap it as `.module`."""
    while model is not None:
        collection = getattr(model, "pg_collection", None)
        if collection is not None:
            return collection
        model = getattr(model, "module", None)
    return None


def check_dp_group_excludes_cp(dp_group: Group) -> None:
    """Counts of whole samples add up over dp alone: every cp rank holds them whole, and dp-cp would count them cp times."""
    parallel_state = _initialised_parallel_state()
    if parallel_state is None or dp_group.size() == 1 or parallel_state.get_context_parallel_world_size() == 1:
        return
    cp_ranks = dist.get_process_group_ranks(parallel_state.get_context_parallel_group())
    shared = set(cp_ranks).intersection(dist.get_process_group_ranks(process_group(dp_group)))
    if len(shared) > 1:
        raise ConfigError(
            f"dp_group holds the context-parallel ranks {sorted(shared)}, whose samples are the same: each would be counted "
            f"{len(shared)} times; pass get_data_parallel_group() or None"
        )
