"""Takes from Megatron-LM's rollouts (megatron.rl.rl_utils, 0.17 and later) what our loss needs, without an edit of Megatron-LM.

Prompts are known before packing alone, and old log-probabilities are measured without the temperature. So `take_rollouts` puts a
function around three of rl_utils: compute_group_stats and prepare_trajectories, which see groups and rows of a step, and
selective_log_softmax, which sees the logits.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError, place_of
from megatron_rl.hosts.contract import OWN
from megatron_rl.layout.groups import Group, all_gather_stack, group_device, resolve_group

# Function -> the names that its first argument has had.
REPLACED = {
    "compute_group_stats": ("rollouts",),
    "prepare_trajectories": ("rollouts", "rollout_turns", "rows"),
    "selective_log_softmax": ("logits",),
}
# What an edit by hand leaves in their callers.
EDITS = {"prepare_data_for_update": "prompt_of_row", "get_logprobs": "rl_default_temperature"}
PADDING = (-1, -1)
BY_HAND = "record the prompts by hand, as docs/hosts/megatron_lm.md shows, and leave take_rollouts out"


class Rollouts:
    """The prompts and the rollouts of the rows of the current step."""

    def __init__(self, dp_group: Group | None = None):
        self._dp_group = dp_group  # None: Megatron's, without context parallelism, over which it gathers the rows
        # id of a rollout -> the rollout, the number of its group, its own number
        self._known: dict[int, tuple[object, int, int]] = {}
        self._rows: list[tuple[int | None, int | None]] | None = None

    def prompt_of_row(self) -> list[int | None]:
        """Of the rows of all data-parallel ranks, as seq_indices number them. None: a row of padding."""
        return [prompt for prompt, _ in self._rows_of_step()]

    def rollout_of_row(self) -> list[int | None]:
        """The same: the number of the rollout, which has a row for each of its turns."""
        return [rollout for _, rollout in self._rows_of_step()]

    def _rows_of_step(self) -> list[tuple[int | None, int | None]]:
        if self._rows is None:
            raise DataError("no rollout was prepared before this step: Megatron-LM's prepare_data_for_update records the prompts")
        return self._rows

    def see_groups(self, rollouts: Sequence[Sequence[object]]) -> None:
        pairs = [(rollout, number) for number, group in enumerate(rollouts) for rollout in group]
        self._known = {id(rollout): (rollout, group, number) for number, (rollout, group) in enumerate(pairs)}

    def see_rows(self, given: Sequence[Any], num_rows: int) -> None:
        """given: this rank's rows before padding to a length: a rollout, (rollout, turn), or None for a row of padding. Up to 0.18
        a rollout is a row for each turn. num_rows: what became of them.

        Communication: one all-gather of [num_rows, 2] over dp.
        """
        each = [entry if isinstance(entry, tuple) else (entry, None) for entry in given]
        if len(each) != num_rows:
            each = [(rollout, turn) for rollout, _ in each for turn in range(len(rollout.trajectory))]
        if len(each) != num_rows:
            made = f"{num_rows} rows of {len(given)} rollouts of {len(each)} turns"
            raise DataError(f"prepare_trajectories made {made}, which no known Megatron-LM does; {BY_HAND}")
        own = torch.tensor([PADDING if rollout is None else self._numbers_of(rollout) for rollout, _ in each])
        group = resolve_group(self._dp_group, "dp")
        rows = all_gather_stack(own.to(group_device(group)), group).flatten(0, 1).tolist()
        self._rows = [(None, None) if (prompt, rollout) == PADDING else (prompt, rollout) for prompt, rollout in rows]

    def _numbers_of(self, rollout: object) -> tuple[int, int]:
        """Of its group, and its own."""
        known, *numbers = self._known.get(id(rollout), (None, 0, 0))
        if known is not rollout:
            raise DataError(f"a row has a rollout that is in no group of this step, as no known Megatron-LM does; {BY_HAND}")
        prompt, own = numbers
        return prompt, own


def take_rollouts(
    utils: ModuleType,  # megatron.rl.rl_utils
    temperature: Callable[[], float],
    dp_group: Group | None = None,
) -> Rollouts:
    """Call it before training; one line of the first rank says what is replaced. Of two trainers, the last to call is served.

    Raises ConfigError for functions with other arguments than those that are known, and for a checkout that was edited by hand.
    """
    if problems := [*_problems(utils)]:
        raise ConfigError(problems)
    found = Rollouts(dp_group)
    own_stats, own_rows, own_softmax = own = [vars(getattr(utils, name)).get(OWN, getattr(utils, name)) for name in REPLACED]

    @functools.wraps(own_stats)
    def compute_group_stats(rollouts: Sequence[Sequence[object]], *others: Any, **named: Any) -> Any:
        found.see_groups(rollouts)
        return own_stats(rollouts, *others, **named)

    @functools.wraps(own_rows)
    def prepare_trajectories(rows: Sequence[Any], *others: Any, **named: Any) -> Any:
        result = own_rows(rows, *others, **named)
        found.see_rows(rows, len(result[0]))
        return result

    @functools.wraps(own_softmax)
    def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
        return own_softmax(logits if temperature() == 1 else logits / temperature(), index)

    ours = (compute_group_stats, prepare_trajectories, selective_log_softmax)
    for name, function, replaced in zip(REPLACED, ours, own, strict=True):
        vars(function)[OWN] = replaced
        setattr(utils, name, function)
    if os.environ.get("RANK", "0") == "0":  # before torch.distributed is initialised
        print(
            f"megatron_rl: replaced in {utils.__name__}: compute_group_stats and prepare_trajectories, which record prompt and "
            "rollout of each row; selective_log_softmax, which applies the temperature to old and reference log-probabilities",
            file=sys.stderr,
            flush=True,
        )
    return found


def _problems(utils: ModuleType) -> Iterator[str]:
    for name, known in REPLACED.items():
        first = next(iter(inspect.signature(getattr(utils, name)).parameters), None) if hasattr(utils, name) else None
        if first not in known:
            where = f" ({place_of(getattr(utils, name))})" if hasattr(utils, name) else ""
            yield f"{utils.__name__}.{name} takes {first} first{where}, and {' or '.join(known)} was expected: {BY_HAND}"
    for name, word in EDITS.items():
        if not hasattr(utils, name) or word in inspect.getsource(getattr(utils, name)):
            yield f"{utils.__name__}.{name} is missing or has {word} in it, as an edit by hand leaves it; undo the edit"
