"""SkyRL's driver: trajectories of several steps count once in the weights that it puts into the advantages.

SkyRL's driver divides the advantages of a mini-batch by counts of rows. With generator.step_wise_trajectories=true a row is a turn,
and is_last_step says where a trajectory ends. So two methods of SkyRL's trainer get a function of ours around them, in the process
of the driver: one notes the trajectory of each row, the other multiplies a row's advantages by the weight that it should have over
the one that SkyRL has given it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rl.count import count_step
from megatron_rl.errors import DataError, EmptyStep
from megatron_rl.hosts.choice import Launch
from megatron_rl.layout.groups import SINGLE
from megatron_rl.weights import sample_token_weights

TRAINER = "skyrl.train.trainer"
METHODS = {
    "RayPPOTrainer.convert_to_training_input": ("self", "generator_output", "uids"),
    "RayPPOTrainer._normalize_advantages": ("self", "data", "mini_batch_boundaries", "prompt_boundaries"),
}
# What SkyRL's batch has of its trajectories until it trains, and the key of ours beside it.
LAST_STEPS, TRAJECTORIES = "is_last_step", "megatron_rl_trajectories"


def count_trajectories(trainer: Any, launch_of: Callable[[Any], Launch]) -> None:
    """trainer: SkyRL's module of that name, with METHODS. launch_of: reads its section trainer.algorithm."""
    owner = trainer.RayPPOTrainer
    convert, normalize = owner.convert_to_training_input, owner._normalize_advantages

    @functools.wraps(convert)
    def convert_to_training_input(self: Any, generator_output: Any, uids: Any) -> Any:
        batch = convert(self, generator_output, uids)
        if (last_steps := batch.metadata.get(LAST_STEPS)) is not None:
            batch.metadata[TRAJECTORIES] = trajectories_of(last_steps)
        return batch

    @functools.wraps(normalize)
    def _normalize_advantages(self: Any, data: Any, mini_batch_boundaries: Any, prompt_boundaries: Any = None) -> Any:
        data = normalize(self, data, mini_batch_boundaries, prompt_boundaries)
        found = launch_of(self.cfg.trainer.algorithm)
        if not (found.record.counts_rollouts and found.rollouts.ids):
            return data
        trajectories, advantages = data.metadata.get(TRAJECTORIES), data["advantages"]
        if trajectories is None:
            raise DataError(
                f"SkyRL's batch has no {LAST_STEPS} beside {found.rollouts.several}, which says where a trajectory ends"
            )
        for start, end in mini_batch_boundaries:
            counts = data["loss_mask"][start:end].bool().sum(-1)
            divisor = found.config.loss_aggregation_divisor
            factors = factors_of(found.record.name, counts, trajectories[start:end], divisor)
            advantages[start:end] *= factors[:, None].to(advantages)
        return data

    owner.convert_to_training_input, owner._normalize_advantages = convert_to_training_input, _normalize_advantages


def trajectories_of(last_steps: list[bool]) -> list[int]:
    """The number of each row's trajectory: a new one begins behind a last step."""
    return [*accumulate([0, *map(int, last_steps[:-1])])]


# Aggregation -> the one by whose weights SkyRL has divided, where that is another one.
DIVIDED_BY = {"row_mean": "sample_mean"}


def factors_of(aggregation: str, token_counts: Tensor, trajectories: list[int], divisor: float | None) -> Tensor:  # [S] each
    """The weights of the mini-batch's rows over those that they have where each row is a rollout; 1 where a row has no token."""
    try:
        totals, counts, _, rollouts = count_step(None, None, SINGLE, token_counts=token_counts, rollout_ids=trajectories)
    except EmptyStep:
        return torch.ones(len(token_counts))
    assert rollouts is not None  # of the ids that were given
    wanted = sample_token_weights(
        aggregation, counts, totals, divisor=divisor, rollout_token_counts=rollouts.tokens, rows_of_rollout=rollouts.rows
    )
    plain = count_step(None, None, SINGLE, token_counts=token_counts).totals
    given = sample_token_weights(DIVIDED_BY.get(aggregation, aggregation), counts, plain, divisor=divisor)
    return torch.where(counts > 0, wanted / given, 1.0)
