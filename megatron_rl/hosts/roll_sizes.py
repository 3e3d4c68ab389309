"""The sizes of ROLL's batch and of its optimiser steps, as its YAML says them."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_rl.hosts.settings import Settings
from megatron_rl.hosts.step_sizes import whole_steps
from megatron_rl.validation.checks import Row

TRAIN = "actor_train."
TRAINING, STRATEGY_ARGS = f"{TRAIN}training_args.", f"{TRAIN}strategy_args."
BATCH = ("rollout_batch_size", "num_return_sequences_in_group")
STEP = (f"{TRAINING}per_device_train_batch_size", f"{TRAINING}gradient_accumulation_steps")
LAYOUT = tuple(f"{STRATEGY_ARGS}strategy_config.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
DEVICES, DYNAMIC = f"{TRAIN}device_mapping", f"{TRAIN}use_dynamic_batching_in_train"


def product(values: Sequence[Any]) -> int | None:
    return math.prod(values) if all(isinstance(value, int | float) for value in values) else None


def batch_of(settings: Settings) -> int | None:
    """Samples of a batch; None: a setting is no number."""
    return product([settings[name] for name in BATCH])


def step_of(settings: Settings) -> int | None:
    """Samples of an optimiser step; None where its devices are not known."""
    size = product([*(settings[name] for name in STEP), ranks_of(settings)])
    return None if size is None else int(size)


def ranks_of(settings: Settings) -> int | None:
    """Data-parallel ranks of the actor; None where its devices are not known."""
    devices, ranks = devices_of(settings[DEVICES]), product([settings[name] or 1 for name in LAYOUT])
    return None if devices is None or not ranks else int(len(devices) // ranks)


def has_whole_steps(settings: Settings) -> Iterable[Row]:
    """ROLL cuts a rank's part of the batch without dynamic batching. Its agentic pipeline fits the batch to the steps first."""
    is_cut = settings[DYNAMIC] is False and not any(name.startswith("train_env_manager.") for name in settings.given)
    return whole_steps("ROLL", settings, BATCH, STEP, {BATCH[1]: 1}, num_data=ranks_of(settings)) if is_cut else ()


def devices_of(given: Any) -> list[int] | None:
    """Of a list; in a YAML also of list(range(0,16)) and sums of such lists, which ROLL evaluates. None: of another text."""
    if not isinstance(given, str):
        return list(given) if isinstance(given, list | tuple) else None
    found: list[int] = []
    for part in given.split("+"):
        match = re.fullmatch(r"\s*list\(range\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)\)\s*", part)
        try:
            found += range(*(int(number) for number in match.groups() if number)) if match else ast.literal_eval(part.strip())
        except (ValueError, SyntaxError, TypeError):
            return None
    return found
