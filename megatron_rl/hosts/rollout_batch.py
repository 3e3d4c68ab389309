"""What the rollout process knows before training data exist: final masks, prompts, rollouts, steps. It never changes a sample."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.facts import Host, HostArgs

_printed: set[str] = set()


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One entry a sample, in the host's order. A rollout with several samples (compaction, sub-agents) has one key for them all."""

    masks: list[Tensor]  # S tensors [response_length]
    prompts: list[Hashable] | None
    rollouts: list[Hashable]
    is_multimodal: bool = False


def read_batch(samples: Sequence, host: Host, *, needs_prompts: bool) -> RolloutBatch:
    """Raises DataError for a mask of another length than its response, prompts that are missing or known for a part of the
    samples alone, a sample without identity, and a rollout that belongs to two prompts."""
    is_multimodal = any(getattr(sample, "multimodal_train_inputs", None) is not None for sample in samples)
    batch = RolloutBatch(final_masks(samples), prompt_groups(samples, needs_prompts), rollout_keys(samples, host), is_multimodal)
    if batch.prompts is not None:
        for rollout, positions in positions_of(batch.rollouts).items():
            prompts = {batch.prompts[position] for position in positions}
            if len(prompts) > 1:
                raise DataError(
                    f"rollout {rollout} has samples of the prompt groups {sorted(map(str, prompts))}: rollout_id must be unique "
                    "over the rollout batch, and only the segments of one rollout share it"
                )
    return batch


def final_masks(samples: Sequence) -> list[Tensor]:
    """The masks that training will see. The hooks run before the host clears the mask of a sample with remove_sample."""
    masks = []
    for position, sample in enumerate(samples):
        length = sample.response_length
        if sample.loss_mask is not None and len(sample.loss_mask) != length:
            raise DataError(
                f"sample {position} has a loss_mask of {len(sample.loss_mask)} for a response_length of {length}: one entry a token"
            )
        if sample.remove_sample:
            masks.append(torch.zeros(length, dtype=torch.int64))
        elif sample.loss_mask is None:
            masks.append(torch.ones(length, dtype=torch.int64))
        else:
            masks.append(torch.as_tensor(sample.loss_mask))
    return masks


def prompt_groups(samples: Sequence, needed: bool) -> list[Hashable] | None:
    prompts = [sample.group_index for sample in samples]
    missing = [position for position, prompt in enumerate(prompts) if prompt is None]
    if missing and (needed or len(missing) < len(prompts)):
        raise DataError(
            f"{len(missing)} of {len(prompts)} samples have no group_index (the first is sample {missing[0]}): which prompt they "
            "belong to is unknown; set Sample.group_index where the rollout function makes its samples"
        )
    return None if missing else prompts


def rollout_keys(samples: Sequence, host: Host) -> list[Hashable]:
    """The rollout of each sample, as the host will count them: without a rollout_id miles takes the index, slime a fresh number."""
    keys: list[Hashable] = []
    for position, sample in enumerate(samples):
        if sample.rollout_id is not None:
            keys.append(sample.rollout_id)
        elif host == Host.SLIME:
            keys.append(("sample", position))
        elif sample.index is not None:
            keys.append(sample.index)
        else:
            raise DataError(
                f"sample {position} has neither rollout_id nor index: the host would count all such samples as one rollout; set "
                "one of them where the rollout function makes its samples"
            )
    return keys


def steps_of(batch: RolloutBatch, view: HostArgs) -> list[list[int]]:
    """The samples of each optimiser step that the host will make of this rollout batch, by position.

    Both hosts cut the rollouts, in order of first appearance, into steps of --global-batch-size rollouts and drop the rest;
    miles may keep the rest as a smaller step. Raises ConfigError or DataError where a step's number of rollouts, which is what
    the host divides by, cannot be known.
    """
    rollouts, num_samples = list(positions_of(batch.rollouts).values()), len(batch.rollouts)
    if view["use_dynamic_global_batch_size"]:
        # The host has already cut the batch to that size, which counts samples, and makes one step of it.
        if len(rollouts) != num_samples:
            raise ConfigError(
                f"--use-dynamic-global-batch-size with {num_samples} samples of {len(rollouts)} rollouts: the host would divide by "
                "samples where it counts rollouts elsewhere; remove it, or give each rollout one sample"
            )
        return [list(range(num_samples))]
    size = view["global_batch_size"]
    if not size:
        raise ConfigError("neither --global-batch-size nor --num-steps-per-rollout is set: what a step divides by is unknown")
    if len(rollouts) < size:
        raise DataError(
            f"{len(rollouts)} rollouts do not fill one step of --global-batch-size {size}: what the host would divide by is "
            "unknown; lower it, or return more samples from the rollout function"
        )
    reason = reason_for_split_by_samples(batch, view)
    if reason is not None and not len(rollouts) == num_samples == size:
        raise ConfigError(
            f"{reason}: miles then splits samples without looking at rollouts, and which of these {num_samples} samples "
            f"({len(rollouts)} rollouts) share a step of --global-batch-size {size} is unknown; make the rollout batch one step of "
            "one sample a rollout (--num-steps-per-rollout 1), or remove the option"
        )
    keeps_rest = view["allow_partial_train_step"] and view["use_dynamic_batch_size"]
    end = len(rollouts) if keeps_rest else len(rollouts) - len(rollouts) % size
    chunks = [rollouts[start : min(start + size, end)] for start in range(0, end, size)]
    return [sorted(position for rollout in chunk for position in rollout) for chunk in chunks]


def reason_for_split_by_samples(batch: RolloutBatch, view: HostArgs) -> str | None:
    """miles schedules steps by rollout only where its training side has said how it is laid out and samples are plain text."""
    if view.host != Host.MILES:
        return None
    if view["train_backend"] != "megatron":
        return f"--train-backend {view['train_backend']}"
    for option in ("delay_split_train_data_by_dp", "indep_dp"):
        if view[option]:
            return f"--{option.replace('_', '-')}"
    return "samples with multimodal_train_inputs" if batch.is_multimodal else None


def positions_of(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """The positions of each key, keys in order of first appearance."""
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return positions


def print_once(line: str) -> None:
    """The rollout process runs a hook for each rollout batch: what does not change is said for the first alone."""
    if line not in _printed:
        _printed.add(line)
        print(line, flush=True)
