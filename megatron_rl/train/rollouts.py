"""Prepares samples for the loss: advantages, and the cut into steps and micro-batches. No loss is weighted here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron_rl.config import AdvantageNormalization
from megatron_rl.errors import ConfigError
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.train.writers import LENGTH, REWARD, WITHOUT_SIGNAL

# Added to the standard deviation of a group, so that rewards that differ by rounding alone give advantages near 0.
DEVIATION_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    prompt_id: str
    """The name of the prompt group; each prompt of a run has its own."""
    tokens: list[int]
    """The prompt, at least one token."""
    record: dict
    """For the reward: the line of the prompts file, or what the task put there."""


# The tensors of a sample -> their dtype.
TENSORS = {
    "tokens": torch.int64,
    "loss_mask": torch.bool,
    "old_log_probs": torch.float32,
    "ref_log_probs": torch.float32,
    "rollout_log_probs": torch.float32,
    "kept_mass": torch.float32,
    "teacher_log_probs": torch.float32,
    "teacher_topk_ids": torch.int64,
    "teacher_topk_log_probs": torch.float32,
    "routes": torch.int16,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One response to one prompt. Lists are taken for the tensors too, and converted."""

    prompt_id: str
    """The prompt group it belongs to."""
    tokens: Tensor
    """[prompt and response] int64."""
    response_length: int
    """The last response_length tokens are the response."""
    loss_mask: Tensor
    """[response_length] bool, True where a token is trained on."""
    reward: float
    advantage: float
    """The reward relative to its prompt group."""
    old_log_probs: Tensor | None
    """[response_length] float32, by the policy that sampled the response; None: on-policy."""
    index: int
    """Position in the rollout batch, and the sample's number for the sampling noise."""
    ref_log_probs: Tensor | None = None
    """[response_length] float32, by the reference policy; only a KL term needs them."""
    rollout_log_probs: Tensor | None = None
    """[response_length] float32, by the engine that sampled, where that is not the trainer's; metrics compare the two."""
    policy_version: int | None = None
    """Optimiser steps that the policy had done when it sampled; metrics count how many more it has done since."""
    routes: Tensor | None = None
    """[num_moe_layers, tokens - 1, topk] int16, the experts of each token but the last, by the engine that sampled or, with
    --router-replay old_log_probs, where the old log-probabilities were measured."""
    kept_ids: SamplingSupport | None = None
    """A set of ids for each response token: what a sampler with top-p, top-k or min-p drew it from. Log-probabilities are then over
    these sets. None: the whole vocabulary."""
    kept_mass: Tensor | None = None
    """[response_length] float32, what each set had of the sampler's softmax; a metric shows it."""
    teacher_log_probs: Tensor | None = None
    """[response_length] float32, by a teacher; for --distillation sampled."""
    teacher_topk_ids: Tensor | None = None
    """[response_length, K] int64, the teacher's likeliest ids at each response token; for --distillation topk."""
    teacher_topk_log_probs: Tensor | None = None
    """[response_length, K] float32, its log-probabilities of these."""
    rollout_id: str | int | None = None
    """Equal for the samples of one rollout, as its turns or agents; they share prompt_id and reward. None: it is a rollout."""

    def __post_init__(self) -> None:
        for name, dtype in TENSORS.items():
            values = getattr(self, name)
            if isinstance(values, list):
                object.__setattr__(self, name, torch.tensor(values, dtype=dtype))
        if isinstance(self.kept_ids, list):
            object.__setattr__(self, "kept_ids", SamplingSupport.from_lists(self.kept_ids))


AnySample = TypeVar("AnySample", bound="Sample | SampleHeader")
Microbatches = Sequence[Sequence[Sample]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Everything sampled between two weight updates, or the part of it that one data-parallel rank holds."""

    samples: list[Sample]
    """In the order of their index, or of a file that another system wrote."""
    rollout_index: int
    """0 for the first rollout of a run."""
    vocab_size: int | None = None
    """Of the policy that the tokens are for; None: not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleHeader:
    """What every rank knows of a sample. Its tokens are on its data-parallel rank alone."""

    prompt_id: str
    index: int
    response_length: int
    reward: float
    advantage: float
    dp_rank: int
    rollout_id: str | int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRollout:
    """A rollout as a rank holds it: the headers of all samples, and the samples of its data-parallel rank."""

    headers: list[SampleHeader]
    """Equal on all ranks, in the order of the batch."""
    own: RolloutBatch

    @classmethod
    def of(cls, batch: RolloutBatch, dp_rank: int, dp_size: int) -> SharedRollout:
        """Of a rollout that every rank has read whole. The samples of one prompt go to the ranks in turn, and the next
        prompt goes on from there, so that no rank is idle in a step of few prompts. The samples of one rollout go together."""
        in_groups = [rollout for group in prompt_groups(batch.samples) for rollout in rollouts_of(group)]
        rank_of = {sample.index: place % dp_size for place, rollout in enumerate(in_groups) for sample in rollout}
        names = ("prompt_id", "index", "response_length", "reward", "advantage", "rollout_id")
        headers = [
            SampleHeader(dp_rank=rank_of[sample.index], **{name: getattr(sample, name) for name in names})
            for sample in batch.samples
        ]
        own = [sample for sample in batch.samples if rank_of[sample.index] == dp_rank]
        return cls(headers=headers, own=dataclasses.replace(batch, samples=own))


def group_advantages(
    rewards: Sequence[float], prompt_ids: Sequence[str], normalization: str = AdvantageNormalization.STD
) -> list[float]:
    """(reward - mean of its group) / (unbiased standard deviation of its group + 1e-6); 0 in a group of equal rewards.

    arXiv:2402.03300, section 4.1.2, with a floor under the deviation. normalization "none": reward - mean, as in Dr. GRPO,
    arXiv:2503.20783, section 3.2. A group of one gets 0; groups may be scattered.
    Example: rewards 0, 1, 1 of one prompt: mean 2/3, deviation 0.57735, advantages -1.1547, 0.57735, 0.57735.
    """
    groups: dict[str, list[float]] = {}
    for reward, prompt_id in zip(rewards, prompt_ids, strict=True):
        groups.setdefault(prompt_id, []).append(reward)
    baselines = {prompt_id: _mean_and_deviation(group) for prompt_id, group in groups.items()}
    is_divided = AdvantageNormalization(normalization) == AdvantageNormalization.STD
    return [
        (reward - baselines[prompt_id][0]) / (baselines[prompt_id][1] + DEVIATION_FLOOR if is_divided else 1.0)
        for reward, prompt_id in zip(rewards, prompt_ids, strict=True)
    ]


def _mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Mean and unbiased standard deviation. Exact for equal values, where a computed mean could have a rounding error."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def prompt_groups(samples: Sequence[AnySample]) -> list[list[AnySample]]:
    """The samples of each prompt, in the order of their first samples."""
    groups: dict[str, list[AnySample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_id, []).append(sample)
    return list(groups.values())


def rollouts_of(samples: Sequence[AnySample]) -> list[list[AnySample]]:
    """The samples of each rollout, in the order of their first samples."""
    rollouts: dict[object, list[AnySample]] = {}
    for place, sample in enumerate(samples):
        rollouts.setdefault((None, place) if sample.rollout_id is None else sample.rollout_id, []).append(sample)
    return list(rollouts.values())


def cut_at_rollouts(samples: Sequence[AnySample], size: int) -> list[list[AnySample]]:
    """Micro-batches of at most `size` samples, in their order. The samples of one rollout stay together: a rollout that is larger
    makes a larger micro-batch, and its samples come where the first of them is."""
    parts: list[list[AnySample]] = []
    for rollout in rollouts_of(samples):
        if not parts or len(parts[-1]) + len(rollout) > size:
            parts.append([])
        parts[-1] += rollout
    return parts


def rollout_values(samples: Sequence[AnySample]) -> dict[str, list[float]]:
    """What each rollout/ metric is the mean of."""
    return {
        REWARD: [rollout[0].reward for rollout in rollouts_of(samples)],  # the samples of a rollout share one reward
        LENGTH: [sample.response_length for sample in samples],
        # A prompt group whose advantages are all 0, as where its rewards are equal, trains nothing.
        WITHOUT_SIGNAL: [all(sample.advantage == 0.0 for sample in group) for group in prompt_groups(samples)],
    }


def split_into_steps(samples: Sequence[AnySample], steps_per_rollout: int, rollout_index: int) -> list[list[AnySample]]:
    """The samples of each optimiser step: whole prompt groups, in the order of their first samples, as even as possible.

    Where prompts do not divide by steps, the first steps take one prompt more: 5 prompts in 2 steps are 3 and 2.
    """
    groups = prompt_groups(samples)
    if not 1 <= steps_per_rollout <= len(groups):
        raise ConfigError(
            f"--steps-per-rollout {steps_per_rollout} does not fit rollout {rollout_index} of {len(groups)} "
            "prompts: each optimiser step takes at least one whole prompt group; choose 1 or more, at most that many"
        )
    smaller, num_larger = divmod(len(groups), steps_per_rollout)
    in_order = iter(groups)
    steps = []
    for step in range(steps_per_rollout):
        mine = itertools.islice(in_order, smaller + (step < num_larger))
        steps.append([sample for group in mine for sample in group])
    return steps


def partition(samples: Sequence[SampleHeader], dp_rank: int, micro_batch_size: int | None) -> list[list[SampleHeader]]:
    """The micro-batches of one data-parallel rank: of the step's samples those that it holds. None: one micro-batch.

    Each rank gets the same number of micro-batches, because the schedule's collectives need it; a rank with too few
    samples gets empty ones at the end. Together the ranks hold each sample once; they split prompt groups. The samples of one
    rollout stay in one micro-batch where they are on one rank.
    """
    shares: dict[int, list[SampleHeader]] = {dp_rank: []}
    for sample in samples:
        shares.setdefault(sample.dp_rank, []).append(sample)
    size = len(samples) if micro_batch_size is None else micro_batch_size
    parts = {rank: cut_at_rollouts(share, size) for rank, share in shares.items()}
    most = max(map(len, parts.values()))
    return [*parts[dp_rank], *([] for _ in range(most - len(parts[dp_rank])))]
