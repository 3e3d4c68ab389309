"""The hook of the rollout process: it gives each sample its weight through its reward, because a host's loss knows no prompts.

Final masks, prompts, rollouts and steps are known there. No sample is changed, and aggregation does the counting.

Each supported loss is positively homogeneous in the advantage: PPO clip, dual clip, GSPO, CISPO, times a truncated
importance weight. So advantage x w gives loss x w and the same clip decision. With a sample's sum S_i a host returns

    L_host = (1/N) sum_i w_i S_i / d_i        N rollouts of the step, d_i the host's denominator

and with the weight omega_i that aggregation gives each token of the sample, L = sum_i omega_i S_i:

    w_i = N d_i omega_i        prompt_mean: (N/P) d_i / M_g      token_mean: N d_i / T      constant: d_i / L
                               sample_mean: d_i / M_roll(i), the share of the sample in its rollout

d_i is what divides the sample later: the unmasked tokens of its whole rollout with the host's own reducer and with
hooks.custom_loss, its own unmasked tokens with reducers.get_pg_loss_reducer, which sees no rollouts.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals, count_step
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.args import REWARD_LINE, Host, HostLaunch, names_ours, read_launch
from megatron_rl.hosts.checks import check_launch
from megatron_rl.layout.groups import SINGLE
from megatron_rl.weights import get_loss_aggregation, sample_token_weights

# The hosts add it to the standard deviation of a prompt's rewards before they divide.
DEVIATION_FLOOR = 1e-6


def reward_post_process(
    args: Namespace,  # the host's, in its rollout process
    samples: Sequence,  # the host's Samples of one rollout batch, flat
) -> tuple[list, list[float]]:  # raw rewards as they are, rewards normalised and weighted
    """`--custom-reward-post-process-path megatron_rl.hooks.reward_post_process`, miles and slime.

    It replaces the host's reward normalisation, so it normalises first: per prompt group (group_index), minus the mean over
    the group's rollouts, over the standard deviation. A group of one rollout is not divided, and a batch of unequal groups is
    not one large group. A fully masked sample, one with remove_sample included, gets 0; the host drops a trailing part of a
    step, and its samples get 0 too. Logged rewards, advantages and returns carry the weight; raw rewards do not.

    Raises ConfigError, with every problem, for a launch where the weights would not stay exact until the loss; DataError for
    samples whose prompt, rollout, reward or step cannot be known.
    """
    launch = _checked_launch(args)
    is_normalized = launch["rewards_normalization"]
    needs_prompts = is_normalized or get_loss_aggregation(launch.config.loss_aggregation).needs_prompts
    batch = read_batch(samples, launch.host, needs_prompts=needs_prompts)
    raw_rewards = [sample.get_reward_value(args) for sample in samples]
    rewards = [_finite_reward(position, reward) for position, reward in enumerate(raw_rewards)]
    if is_normalized:
        rewards = normalize_rewards(rewards, batch, by_deviation=launch["grpo_std_normalization"])
    weights = reward_weights(batch, launch).tolist()
    return raw_rewards, [reward * weight for reward, weight in zip(rewards, weights, strict=True)]


def normalize_rewards(rewards: Sequence[float], batch: HostRollouts, *, by_deviation: bool) -> list[float]:
    """The hosts' group normalisation in float32: one reward a rollout, which all its samples share."""
    normalized = [0.0] * len(rewards)
    for in_group in positions_of(batch.prompts or ()).values():
        by_rollout = positions_of(batch.rollouts[position] for position in in_group)
        rollouts = {key: [in_group[index] for index in indices] for key, indices in by_rollout.items()}
        shared = torch.tensor([_shared_reward(key, rows, rewards) for key, rows in rollouts.items()], dtype=torch.float32)
        centered = shared - shared.mean()
        if by_deviation and len(shared) > 1 and float(shared.std()) > 0:
            centered = centered / (shared.std() + DEVIATION_FLOOR)
        for positions, value in zip(rollouts.values(), centered.tolist(), strict=True):
            for position in positions:
                normalized[position] = value
    return normalized


def reward_weights(batch: HostRollouts, launch: HostLaunch) -> Tensor:  # [S] float64
    """The w_i of the module's docstring; 0 where a sample is fully masked or the host drops it."""
    config = launch.config
    record = get_loss_aggregation(config.loss_aggregation)
    by_rollout = not names_ours(launch["custom_pg_loss_reducer_function_path"], "get_pg_loss_reducer")
    # These weights hold no count of the step: any way of cutting the batch gives the same.
    is_any_step = record.missing_where_a_host_divides_by("N") == ()
    steps = [list(range(len(batch.masks)))] if is_any_step else steps_of(batch, launch)
    if len(steps) > 1 and record.is_of_one_step:
        raise ConfigError(
            f"the rollout batch makes {len(steps)} steps of --global-batch-size {launch['global_batch_size']}: {record.name} "
            "through reward weights needs one step per rollout batch; set --num-steps-per-rollout 1"
        )
    if record.needs_prompts:
        _check_groups_are_whole(batch, steps)
    size = config.samples_per_prompt
    if size is None and record.needs_prompts:  # such weights need whole groups: the host's number
        size = launch["n_samples_per_prompt"]
    weights, totals = torch.zeros(len(batch.masks), dtype=torch.float64), []
    for positions in steps:
        prompts = None if batch.prompts is None else [batch.prompts[position] for position in positions]
        masks, rollouts = [batch.masks[position] for position in positions], [batch.rollouts[position] for position in positions]
        counts = count_rollouts(masks, prompts, rollouts, config, size)
        denominators = counts.rollout_tokens if by_rollout else counts.tokens
        # A rollout counts as one sample with the tokens of all its segments, as the hosts divide.
        weights[positions] = counts.totals.num_samples * denominators * counts.token_weights(config)
        totals.append(counts.totals)
    _check_steps_are_equal(totals)
    return weights


# A rollout batch, as the hosts count it


@dataclass(frozen=True, slots=True)
class HostRollouts:
    """One entry a sample, in the host's order. A rollout with several samples (compaction, sub-agents) has one key for them all."""

    masks: list[Tensor]  # S tensors [response_length]
    prompts: list[int | str] | None  # None where some are missing, which a batch of needs_prompts=True has not
    rollouts: list[Hashable]
    is_multimodal: bool = False


@dataclass(frozen=True, slots=True)
class HostCounts:
    """A step as the hosts count it, and divide by it: a rollout is one sample, which holds the tokens of all its samples."""

    totals: StepTotals  # num_samples counts rollouts
    tokens: Tensor  # [S] unmasked tokens of each sample
    rollout_tokens: Tensor  # [S] tokens of its whole rollout
    rollout_rows: Tensor  # [S] samples of its rollout with an unmasked token
    prompt_tokens: Tensor | None  # [S] tokens of its prompt's samples

    @property
    def num_samples(self) -> int:
        return len(self.tokens)

    @property
    def totals_of_samples(self) -> StepTotals:
        """As count_step gives them: num_samples counts samples, num_rollouts rollouts."""
        return replace(self.totals, num_samples=self.num_samples, num_rollouts=self.totals.num_samples)

    @property
    def has_fan_out(self) -> bool:
        return self.num_samples != self.totals.num_samples

    @property
    def num_masked(self) -> int:
        return int((self.tokens == 0).sum())

    def token_weights(self, config: PolicyLossConfig) -> Tensor:  # [S] float64, of each unmasked token of the sample
        name = config.loss_aggregation
        needs_rows = get_loss_aggregation(name).needs_rows
        weights = sample_token_weights(
            name,
            self.tokens if needs_rows else self.rollout_tokens,
            self.totals_of_samples if needs_rows else self.totals,
            prompt_token_counts=self.prompt_tokens,
            divisor=config.loss_aggregation_divisor,
            rollout_token_counts=self.rollout_tokens if needs_rows else None,
            rows_of_rollout=self.rollout_rows if needs_rows else None,
            are_of_step=False,
        )
        return torch.where(self.tokens > 0, weights.to(torch.float64), 0.0)


def count_rollouts(
    masks: Sequence[Tensor],  # S tensors [response_length]
    prompts: Sequence[int | str] | None,
    rollouts: Sequence[Hashable],
    config: PolicyLossConfig,
    samples_per_prompt: int | None,
) -> HostCounts:
    """Raises DataError as count_step does. A prompt group is complete when its rollouts are there."""
    positions = positions_of(rollouts)
    totals, rollout_tokens, prompt_tokens, _ = count_step(
        [torch.cat([masks[position] for position in members]) for members in positions.values()],
        None if prompts is None else [prompts[members[0]] for members in positions.values()],
        SINGLE,
        samples_per_prompt=samples_per_prompt,
        allow_partial_prompt_groups=config.allow_partial_prompt_groups,
    )
    tokens = count_step(masks, None, SINGLE).token_counts
    row_of = {rollout: row for row, rollout in enumerate(positions)}
    rows = torch.tensor([row_of[rollout] for rollout in rollouts])
    num_rows = torch.zeros_like(rollout_tokens).index_add_(0, rows, (tokens > 0).long())
    prompt_tokens = None if prompt_tokens is None else prompt_tokens[rows]
    return HostCounts(totals, tokens, rollout_tokens[rows], num_rows[rows], prompt_tokens)


def read_batch(samples: Sequence, host: Host, *, needs_prompts: bool) -> HostRollouts:
    """Raises DataError for a mask of another length than its response, prompts that are missing for all samples or for some, a
    sample without identity, and a rollout of two prompts."""
    is_multimodal = any(getattr(sample, "multimodal_train_inputs", None) is not None for sample in samples)
    prompts = [sample.group_index for sample in samples]
    missing = [position for position, prompt in enumerate(prompts) if prompt is None]
    if missing and (needs_prompts or len(missing) < len(prompts)):
        raise DataError(
            f"{len(missing)} of {len(prompts)} samples have no group_index (the first is sample {missing[0]}): which prompt they "
            "belong to is unknown; set Sample.group_index where the rollout function makes its samples"
        )
    rollouts = [sample.rollout_id for sample in samples]
    for position, sample in enumerate(samples):
        if rollouts[position] is None:
            rollouts[position] = host.rollout_key(position, sample.index)
    batch = HostRollouts(final_masks(samples), None if missing else prompts, rollouts, is_multimodal)
    if batch.prompts is not None:
        for rollout, positions in positions_of(batch.rollouts).items():
            groups = {batch.prompts[position] for position in positions}
            if len(groups) > 1:
                what = f"rollout {rollout} has samples of the prompt groups {sorted(map(str, groups))}"
                raise DataError(f"{what}: only the segments of one rollout share a rollout_id")
    return batch


def final_masks(samples: Sequence) -> list[Tensor]:
    """The masks that training will use. The hook runs before the host clears the mask of a sample with remove_sample."""
    masks = []
    for position, sample in enumerate(samples):
        length = sample.response_length
        if sample.loss_mask is not None and len(sample.loss_mask) != length:
            raise DataError(f"sample {position} has a loss_mask of {len(sample.loss_mask)} for a response_length of {length}")
        if sample.remove_sample:
            masks.append(torch.zeros(length, dtype=torch.int64))
        elif sample.loss_mask is None:
            masks.append(torch.ones(length, dtype=torch.int64))
        else:
            masks.append(torch.as_tensor(sample.loss_mask))
    return masks


def steps_of(batch: HostRollouts, launch: HostLaunch) -> list[list[int]]:
    """The samples of each optimiser step that the host will make of this rollout batch, by position.

    Both hosts cut the rollouts, in order of first appearance, into steps of --global-batch-size rollouts and drop the rest;
    miles may keep the rest as a smaller step. Raises ConfigError or DataError where a step's number of rollouts, which is what
    the host divides by, cannot be known.
    """
    rollouts, num_samples = list(positions_of(batch.rollouts).values()), len(batch.rollouts)
    if launch["use_dynamic_global_batch_size"]:
        # The host has already cut the batch to that size, which counts samples, and makes one step of it.
        if len(rollouts) != num_samples:
            given = f"--use-dynamic-global-batch-size with {num_samples} samples of {len(rollouts)} rollouts"
            raise ConfigError(f"{given}: the host would divide by samples where it counts rollouts elsewhere; remove it")
        return [list(range(num_samples))]
    size = launch["global_batch_size"]
    if not size:
        raise ConfigError("neither --global-batch-size nor --num-steps-per-rollout is set: what a step divides by is unknown")
    if len(rollouts) < size:
        why = "what the host would divide by is unknown; lower it"
        raise DataError(f"{len(rollouts)} rollouts do not fill one step of --global-batch-size {size}: {why}")
    reason = launch.host.reason_for_split_by_samples(launch, batch.is_multimodal)
    if reason is not None and not len(rollouts) == num_samples == size:
        raise ConfigError(
            f"{reason}: {launch.host} then splits samples without looking at rollouts, and which of these {num_samples} samples "
            f"({len(rollouts)} rollouts) share a step of --global-batch-size {size} is unknown; set --num-steps-per-rollout 1"
        )
    keeps_rest = launch["allow_partial_train_step"] and launch["use_dynamic_batch_size"]
    end = len(rollouts) if keeps_rest else len(rollouts) - len(rollouts) % size
    chunks = [rollouts[start : min(start + size, end)] for start in range(0, end, size)]
    return [sorted(position for rollout in chunk for position in rollout) for chunk in chunks]


def positions_of(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """The positions of each key, keys in order of first appearance."""
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return positions


def _checked_launch(args: Namespace) -> HostLaunch:
    """Runs every check of a launch again: a rollout process runs no init hook. A wrapper may call the hook, and no check of a
    launch can know that."""
    path = read_launch(args)["custom_reward_post_process_path"]
    found = []
    if not names_ours(path, "reward_post_process"):
        why = f"the loss would not know that samples are weighted; write {REWARD_LINE}"
        found = [f"--custom-reward-post-process-path {path}: {why}"]
    return check_launch(args, found=found)


def _check_groups_are_whole(batch: HostRollouts, steps: list[list[int]]) -> None:
    step_of_prompt, prompts = dict[Hashable, int](), batch.prompts or []
    for number, positions in enumerate(steps):
        for prompt in {prompts[position] for position in positions}:
            if step_of_prompt.setdefault(prompt, number) != number:
                raise DataError(
                    f"prompt group {prompt} has samples in step {step_of_prompt[prompt]} and step {number} of the rollout batch: "
                    "prompt_mean needs each group within one step; keep a group's samples together"
                )


def _check_steps_are_equal(totals: list[StepTotals]) -> None:
    """N / P must be one number: then the weights do not depend on the order in which the host deals groups to steps."""
    for number, step in enumerate(totals):
        first = totals[0]
        if first.num_prompts is None or step.num_prompts is None:
            continue
        if step.num_samples * first.num_prompts != first.num_samples * step.num_prompts:
            raise DataError(
                f"step 0 has {first.num_samples} rollouts of {first.num_prompts} prompts, step {number} has {step.num_samples} of "
                f"{step.num_prompts}: with unequal groups prompt_mean needs one step; set --num-steps-per-rollout 1"
            )


def _finite_reward(position: int, reward: Any) -> float:
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError) as error:
        raise DataError(f"sample {position} has the reward {reward!r}, which is no number: give --reward-key") from error
    if not math.isfinite(value):
        raise DataError(f"sample {position} has the reward {reward!r}: it must be a finite number, or it spoils its whole group")
    return value


def _shared_reward(rollout: object, positions: list[int], rewards: Sequence[float]) -> float:
    values = [rewards[position] for position in positions]
    if any(value != values[0] for value in values):
        raise DataError(f"rollout {rollout} has samples with the rewards {values}: segments of one rollout share one reward")
    return values[0]
