"""What only a training actor can know of a launch in a host: its groups, kernels and model, and the installed Megatron-Core."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.base import HostLaunch
from megatron_rl.hosts.model_names import FIELDS, ModelNames, rows_of_fields
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.installed import expert_replicas_drift, unscaled_indexer
from megatron_rl.ops.backends import check_backend
from megatron_rl.validation import flag_of
from megatron_rl.validation.auxiliary_losses import settings_of_model
from megatron_rl.validation.checks import Asker, check
from megatron_rl.validation.experts import drift_problem

# This variable asks for doctor's report instead of the launch; `python -m megatron_rl.hosts.launch` prints it.
CHECK_VARIABLE = "MEGATRON_RL_CHECK"
# The arguments' name of a size -> the group that must have it.
SIZES = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp"}


def is_check() -> bool:
    return os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")


@check(asked_by=(Asker.INIT_HOOK,))
def no_report_was_asked_for(launch: HostLaunch) -> Iterator[str]:
    if is_check():
        yield (
            f"{CHECK_VARIABLE}={os.environ[CHECK_VARIABLE]} asks for a report without a run, and this run has started: a host "
            "calls the init hook when Ray, process groups and GPUs are up; unset it, or give the launch line to megatron-rl "
            "doctor --, or start with python -m megatron_rl.hosts.launch, which stops at the variable in time"
        )


@check(asked_by=(Asker.INIT_HOOK,), when=HostLaunch.has_our_loss)
def kernels_are_there(launch: HostLaunch) -> Iterator[str]:
    try:
        check_backend(launch.config.policy_loss_backend, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except ConfigError as error:  # of the settings too
        yield from error.problems


@check(asked_by=(Asker.INIT_HOOK,))
def groups_have_the_sizes_of_the_arguments(launch: HostLaunch) -> Iterator[str]:
    groups = resolve_groups()
    for option, name in SIZES.items():
        size, given = getattr(groups, name).size(), launch.options[option]
        if launch.options.has(option) and given != size:
            yield (
                f"{flag_of(option)} {given} and the {name} process group has {size} ranks, which losses follow: "
                "the arguments were changed after Megatron was initialised, or it was not initialised"
            )


@check(asked_by=(Asker.INIT_HOOK,))
def this_release_trains_the_model(launch: HostLaunch) -> Iterator[str]:
    yield from release_problems(launch.options.of_model)


def release_problems(settings: Mapping[str, object]) -> Iterator[str]:
    """What the installed Megatron-Core would train wrongly. Process groups must be up."""
    problem = drift_problem(settings)
    if problem is not None and expert_replicas_drift():
        yield problem
    yield from unscaled_indexer(settings)


def notes_of_model(names: ModelNames, config: Any, **others: Any) -> list[str]:
    """What a model that Megatron has built adds to a step, in words. config: the model's, which a bridge or a checkpoint may have
    changed. others: fields that it does not have. Raises one ConfigError with all that makes a step depend on layout or chance."""
    settings = {name: value for name, value in vars(config).items() if name in FIELDS} | settings_of_model(config) | others
    rows = [*rows_of_fields(names, settings)]
    if problems := [*(row.text for row in rows if row.is_wrong), *release_problems(settings)]:
        raise ConfigError([names.in_words(text) for text in problems])
    return [names.in_words(row.text) for row in rows if row.is_note]
