"""What a training process finds wrong with its groups, its kernels, and a model that a host has built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.installed import expert_replicas_drift, unscaled_indexer
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.validation import flag_of
from megatron_rl.validation.experts import drift_problem

# The arguments' name of a size -> the group that must have it.
SIZES = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp"}


def group_problems(args: Mapping[str, object]) -> Iterator[str]:
    """Sizes of the arguments against the process groups, which losses follow."""
    groups = resolve_groups()
    for option, name in SIZES.items():
        size = getattr(groups, name).size()
        if option in args and args[option] != size:
            yield (
                f"{flag_of(option)} {args[option]} and the {name} process group has {size} ranks, which losses follow: "
                "the arguments were changed after Megatron was initialised, or it was not initialised"
            )


def kernel_problems(backend: str) -> list[str]:
    try:
        resolve_backend(backend, torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"))
    except ConfigError as error:
        return list(error.problems)
    return []


def release_problems(settings: Mapping[str, object]) -> Iterator[str]:
    """What the installed Megatron-Core would train wrongly, by the names of its config. Process groups must be up."""
    problem = drift_problem(settings)
    if problem is not None and expert_replicas_drift():
        yield problem
    yield from unscaled_indexer(settings)


def check_model(config: Any) -> None:
    """config: the built model's, which a bridge or a checkpoint may have changed. Raises one ConfigError with every problem."""
    if problems := [*release_problems(vars(config))]:
        raise ConfigError(problems)
