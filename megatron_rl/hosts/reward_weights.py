"""reward_post_process: gives each sample its weight through its reward, for a host that knows no weights. It must never count for
itself what aggregation counts, nor change a sample.

Each supported surrogate is positively homogeneous in the advantage: PPO clip, dual clip, GSPO, CISPO, times a truncated
importance weight. So advantage x w gives loss x w and the same clip decision. What the host does with a sample's sum S_i is known,

    L_host = (1/N) sum_i w_i S_i / d_i        N rollouts of the step, d_i the host's denominator

and with the weight omega_i that aggregation gives each token of the sample, L = sum_i omega_i S_i:

    w_i = N d_i omega_i        prompt_mean: (N/P) d_i / M_g      token_mean: N d_i / T      constant: d_i / L

d_i is what divides the sample later: the unmasked tokens of its whole rollout with the host's own reducer and with
hooks.custom_loss, its own unmasked tokens with reducers.get_pg_loss_reducer, which sees no rollouts.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals, count_step, weigh_tokens
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.companion_rules import is_of_one_step
from megatron_rl.hosts.facts import HostArgs, companion_of, names_ours
from megatron_rl.hosts.launch_facts import CUSTOM_LOSS_LINE, REWARD_LINE
from megatron_rl.hosts.rollout_batch import RolloutBatch, positions_of, print_once, read_batch, steps_of
from megatron_rl.hosts.rules import check_launch
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import get_loss_aggregation

# The hosts add it to the standard deviation of a prompt's rewards before they divide.
DEVIATION_FLOOR = 1e-6


def reward_post_process(
    args: Namespace,  # the host's, in its rollout process
    samples: Sequence,  # the host's Samples of one rollout batch, flat
) -> tuple[list, list[float]]:  # raw rewards as they are, rewards normalised and weighted
    """`--custom-reward-post-process-path megatron_rl.hooks.reward_post_process`, miles and slime.

    It stands in for the host's reward normalisation, so it does that first: per prompt group (group_index), minus the mean over
    the group's rollouts, over the standard deviation. A group of one rollout is not divided, and a batch of unequal groups is
    not one large group. A fully masked sample, one with remove_sample included, gets 0; the host drops a trailing part of a
    step, and its samples get 0 too. Logged rewards, advantages and returns carry the weight; raw rewards do not. With sample_mean,
    where --one-sample-per-rollout asks for a look at the samples, each weight is 1.

    Raises ConfigError, with every problem, for a launch where the weights would not stay exact until the loss; DataError for
    samples whose prompt, rollout, reward or step cannot be known.
    """
    view = HostArgs(args)
    config = _checked_config(args, view)
    is_normalized = view["rewards_normalization"]
    needs_prompts = is_normalized or get_loss_aggregation(config.loss_aggregation).needs_prompts
    batch = read_batch(samples, view.host, needs_prompts=needs_prompts)
    if config.one_sample_per_rollout:
        _check_one_sample_each(batch)
    raw_rewards = [sample.get_reward_value(args) for sample in samples]
    rewards = [_finite_reward(position, reward) for position, reward in enumerate(raw_rewards)]
    if is_normalized:
        rewards = normalize_rewards(rewards, batch, by_deviation=view["grpo_std_normalization"])
    weights = sample_weights(batch, config, view).tolist()
    if get_loss_aggregation(config.loss_aggregation) is not get_loss_aggregation("sample_mean"):
        print_once(
            f"megatron_rl: {config.loss_aggregation} through sample weights on the rewards; logged rewards, advantages and returns "
            "are scaled by them, raw rewards are not"
        )
    return raw_rewards, [reward * weight for reward, weight in zip(rewards, weights, strict=True)]


def normalize_rewards(rewards: Sequence[float], batch: RolloutBatch, *, by_deviation: bool) -> list[float]:
    """The hosts' group normalisation in float32: one reward a rollout, which all its samples share."""
    normalized = [0.0] * len(rewards)
    for in_group in positions_of(batch.prompts).values():
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


def sample_weights(batch: RolloutBatch, config: PolicyLossConfig, view: HostArgs) -> Tensor:  # [S] float64
    """w_i of the module's docstring; 0 where a sample is fully masked or the host drops it."""
    record = get_loss_aggregation(config.loss_aggregation)
    by_rollout = not names_ours(view["custom_pg_loss_reducer_function_path"], "get_pg_loss_reducer")
    # These weights hold no count of the step: any way of cutting the batch gives the same.
    is_any_step = record.missing_where_a_host_divides_by("N") == ()
    steps = [list(range(len(batch.masks)))] if is_any_step else steps_of(batch, view)
    if len(steps) > 1 and is_of_one_step(record):
        raise ConfigError(
            f"the rollout batch makes {len(steps)} steps of --global-batch-size {view['global_batch_size']}: {record.name} through "
            "reward weights needs one step per rollout batch; set --num-steps-per-rollout 1"
        )
    if record.needs_prompts:
        _check_groups_are_whole(batch, steps)
    weights, totals = torch.zeros(len(batch.masks), dtype=torch.float64), []
    for positions in steps:
        weights[positions], step_totals = _weigh_step(_part(batch, positions), config, _declared_size(config, view), by_rollout)
        totals.append(step_totals)
    _check_steps_are_alike(totals)
    return weights


def _weigh_step(
    step: RolloutBatch, config: PolicyLossConfig, samples_per_prompt: int | None, by_rollout: bool
) -> tuple[Tensor, StepTotals]:  # [S] float64, totals that count rollouts
    """A rollout is counted as one sample that holds the tokens of all its segments: that is what the hosts divide by."""
    rollouts = positions_of(step.rollouts)
    prompts = None if step.prompts is None else [step.prompts[positions[0]] for positions in rollouts.values()]
    totals, rollout_counts, prompt_counts = count_step(
        [torch.cat([step.masks[position] for position in positions]) for positions in rollouts.values()],
        prompts,
        SINGLE,
        samples_per_prompt=samples_per_prompt,
        allow_partial_prompt_groups=config.allow_partial_prompt_groups,
    )
    rows = {key: row for row, key in enumerate(rollouts)}
    row_of_sample = torch.tensor([rows[key] for key in step.rollouts])
    _, sample_counts, _ = count_step(step.masks, None, SINGLE)
    token_weights = weigh_tokens(
        config.loss_aggregation,
        rollout_counts[row_of_sample],
        totals,
        prompt_token_counts=None if prompt_counts is None else prompt_counts[row_of_sample],
        divisor=config.loss_aggregation_divisor,
    )
    denominators = rollout_counts[row_of_sample] if by_rollout else sample_counts
    return totals.num_samples * denominators * torch.where(sample_counts > 0, token_weights.to(torch.float64), 0.0), totals


def _checked_config(args: Namespace, view: HostArgs) -> PolicyLossConfig:
    """Every rule of a launch with this companion, once more here: a rollout process runs no init hook."""
    problems = []
    if companion_of(view) != "reward":  # called by a wrapper, which no rule of a launch can know
        problems.append(
            f"--custom-reward-post-process-path {view['custom_reward_post_process_path']} and --custom-convert-samples-to-train-"
            f"data-path {view['custom_convert_samples_to_train_data_path']}: the loss would not know that samples are weighted; "
            f"put {REWARD_LINE} itself on the launch line, and no converter of ours"
        )
    return check_launch(args, found=problems)[0]


def _declared_size(config: PolicyLossConfig, view: HostArgs) -> int | None:
    """Weights of prompts need whole groups, so the host's own number is taken; the others care only when ours was given."""
    if config.samples_per_prompt is None and get_loss_aggregation(config.loss_aggregation).needs_prompts:
        return view["n_samples_per_prompt"]
    return config.samples_per_prompt


def _check_one_sample_each(batch: RolloutBatch) -> None:
    for rollout, positions in positions_of(batch.rollouts).items():
        if len(positions) > 1:
            places = ", ".join(map(str, positions))
            raise DataError(
                f"rollout {rollout} has {len(positions)} samples (positions {places} of the rollout batch), and "
                "--one-sample-per-rollout says that each has one: with sample_mean in our reducer each sample would weigh as much "
                f"as a whole rollout; remove flag and hook and use {CUSTOM_LOSS_LINE}, or take --loss-aggregation constant"
            )


def _check_groups_are_whole(batch: RolloutBatch, steps: list[list[int]]) -> None:
    step_of_prompt: dict = {}
    for number, positions in enumerate(steps):
        for prompt in {batch.prompts[position] for position in positions}:
            if step_of_prompt.setdefault(prompt, number) != number:
                raise DataError(
                    f"prompt group {prompt} has samples in step {step_of_prompt[prompt]} and step {number} of the rollout batch: "
                    "prompt_mean needs each group within one step; choose --global-batch-size as a multiple of the rollouts of a "
                    "prompt, and keep a group's samples together"
                )


def _check_steps_are_alike(totals: list[StepTotals]) -> None:
    """Were the host to deal groups to steps in another order, the weights would be the same: N / P is one number."""
    for number, step in enumerate(totals):
        first = totals[0]
        if len(totals) > 1 and step.num_samples * first.num_prompts != first.num_samples * step.num_prompts:
            raise DataError(
                f"step 0 has {first.num_samples} rollouts of {first.num_prompts} prompts, step {number} has {step.num_samples} of "
                f"{step.num_prompts}: with unequal groups prompt_mean needs one step per rollout batch; set "
                "--num-steps-per-rollout 1, or return groups of one size"
            )


def _part(batch: RolloutBatch, positions: list[int]) -> RolloutBatch:
    prompts = None if batch.prompts is None else [batch.prompts[position] for position in positions]
    return RolloutBatch([batch.masks[p] for p in positions], prompts, [batch.rollouts[p] for p in positions])


def _finite_reward(position: int, reward: object) -> float:
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"sample {position} has the reward {reward!r}: a number is needed; for a dictionary give --reward-key"
        ) from error
    if not math.isfinite(value):
        raise DataError(f"sample {position} has the reward {reward!r}: it must be a finite number, or it spoils its whole group")
    return value


def _shared_reward(rollout: object, positions: list[int], rewards: Sequence[float]) -> float:
    values = [rewards[position] for position in positions]
    if any(value != values[0] for value in values):
        raise DataError(f"rollout {rollout} has samples with the rewards {values}: segments of one rollout share one reward")
    return values[0]
