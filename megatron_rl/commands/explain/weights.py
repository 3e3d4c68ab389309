"""What each aggregation makes of a step: weights, shares, sums, scales. No count becomes a weight here: aggregation gives them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals, count_step, weigh_tokens
from megatron_rl.arguments import validate_megatron_rl_args
from megatron_rl.commands.explain.step import StepInput
from megatron_rl.config import LossAggregation, PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.companions import positions_of
from megatron_rl.layout.groups import SINGLE

KNOWN_AS = {
    LossAggregation.SAMPLE_MEAN: "GRPO, GSPO",
    LossAggregation.PROMPT_MEAN: "DAPO as published",
    LossAggregation.TOKEN_MEAN: "frameworks' DAPO",
    LossAggregation.CONSTANT: "Dr. GRPO",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """The step's numbers, from count_step. totals.num_samples is N, which counts rollouts: miles and slime divide by them, and a
    rollout of several samples holds the tokens of them all."""

    totals: StepTotals
    tokens: Tensor  # [S] unmasked tokens of each sample
    rollout_tokens: Tensor  # [S] those of its whole rollout
    prompt_tokens: Tensor | None  # [S] those of its prompt's samples

    @property
    def num_samples(self) -> int:
        return len(self.tokens)

    @property
    def has_fan_out(self) -> bool:
        return self.num_samples != self.totals.num_samples

    @property
    def num_masked(self) -> int:
        return int((self.tokens == 0).sum())


@dataclass(frozen=True, slots=True)
class Weighing:
    """One aggregation on one step."""

    name: str
    divisor: float | None
    is_assumed: bool
    """Nobody gave the divisor: it is the longest response."""
    token_weights: Tensor  # [S] float64: the weight of each unmasked token of the sample
    tokens: Tensor  # [S]
    reference: float
    """The sum of sample_mean's weights, which KL and entropy terms keep: the part of the step's rollouts with an unmasked token."""
    mean_tokens: float
    """m: mean unmasked tokens of a sample that has any, or of a rollout where one has several samples."""
    unit: str
    """What N counts: sample or rollout."""

    @property
    def sample_weights(self) -> Tensor:  # [S]: W_i = w_i m_i, the weight of GSPO's one ratio
        return self.token_weights * self.tokens

    @property
    def total(self) -> float:
        return float(self.sample_weights.sum())

    @property
    def shares(self) -> Tensor:  # [S]
        return self.sample_weights / self.total

    @property
    def gradient_scale(self) -> float:
        """Against sample_mean, for token losses alike in all samples: m / divisor for constant."""
        return self.total / self.reference

    def prompt_shares(self, prompts: Sequence[int | str]) -> dict[int | str, float]:
        shares: dict[int | str, float] = dict.fromkeys(prompts, 0.0)
        for prompt, share in zip(prompts, self.shares.tolist(), strict=True):
            shares[prompt] += share
        return shares

    def loss(self, sample_losses: Tensor) -> float:  # [S]: the loss of each token of the sample
        return float((self.sample_weights * sample_losses).sum())


def aggregation_config(args: Namespace, route: Route, name: str | None = None, divisor: float | None = None) -> PolicyLossConfig:
    """Our settings as typed, judged by the route's rules; a name replaces --loss-aggregation and its divisor."""
    ours = {field.name: vars(args)[field.name] for field in fields(PolicyLossConfig)}
    if name is not None:
        ours.update(loss_aggregation=name, loss_aggregation_divisor=divisor)
    return validate_megatron_rl_args(Namespace(**ours), route)


def shown_configs(args: Namespace, route: Route, step: StepInput) -> tuple[list[PolicyLossConfig], list[str], bool]:
    """(configurations to show, what is left out, whether the divisor is assumed). Without --loss-aggregation all four stand side by
    side; with --host it is the one that the launch would train."""
    if args.loss_aggregation is not None or args.host is not None:
        config = aggregation_config(args, route)
        if config.loss_aggregation == LossAggregation.PROMPT_MEAN and step.prompts is None:
            raise ConfigError(
                f"--loss-aggregation prompt_mean needs to know which samples share a prompt, and {step.source} does not say: give "
                "--prompt-ids a,a,b with --response-lengths, a prompt_id in each line, or a dump whose samples have a group_index"
            )
        return [config], [], False
    is_assumed = args.loss_aggregation_divisor is None
    divisor = float(step.longest) if is_assumed else args.loss_aggregation_divisor
    configs, left_out = [], []
    for name in LossAggregation:
        if name == LossAggregation.PROMPT_MEAN and step.prompts is None:
            left_out.append("prompt_mean: which samples share a prompt is not known; give --prompt-ids")
            continue
        of_name = divisor if name == LossAggregation.CONSTANT else None
        configs.append(aggregation_config(args, route, name, of_name))
    return configs, left_out, is_assumed


def count(step: StepInput, config: PolicyLossConfig) -> Counts:
    """As the companion hooks of the hosts count: a rollout is one sample that holds the tokens of all its samples."""
    is_known, rollouts = step.prompts is not None, positions_of(step.rollout_keys)
    if config.samples_per_prompt is not None and not is_known:
        raise ConfigError(
            f"--samples-per-prompt {config.samples_per_prompt}: {step.source} does not say which samples share a prompt, so no "
            "group can be checked; give --prompt-ids, or remove it"
        )
    totals, rollout_tokens, prompt_tokens = count_step(
        [torch.cat([step.masks[position] for position in positions]) for positions in rollouts.values()],
        [step.prompts[positions[0]] for positions in rollouts.values()] if is_known else None,
        SINGLE,
        samples_per_prompt=config.samples_per_prompt,
        allow_partial_prompt_groups=config.allow_partial_prompt_groups,
    )
    _, tokens, _ = count_step(step.masks, None, SINGLE)
    row_of = {key: row for row, key in enumerate(rollouts)}
    rows = torch.tensor([row_of[key] for key in step.rollout_keys])
    return Counts(totals, tokens, rollout_tokens[rows], None if prompt_tokens is None else prompt_tokens[rows])


def weigh(config: PolicyLossConfig, counts: Counts, *, is_assumed: bool = False) -> Weighing:
    divisor = config.loss_aggregation_divisor
    weights = weigh_tokens(
        config.loss_aggregation, counts.rollout_tokens, counts.totals, prompt_token_counts=counts.prompt_tokens, divisor=divisor
    )
    reference = weigh_tokens(LossAggregation.SAMPLE_MEAN, counts.rollout_tokens, counts.totals)
    reference = float((reference.double() * counts.tokens).sum())
    return Weighing(
        name=config.loss_aggregation,
        divisor=divisor,
        is_assumed=is_assumed and config.loss_aggregation == LossAggregation.CONSTANT,
        token_weights=torch.where(counts.tokens > 0, weights.to(torch.float64), 0.0),
        tokens=counts.tokens,
        reference=reference,
        mean_tokens=counts.totals.num_tokens / max(1, round(counts.totals.num_samples * reference)),
        unit="rollout" if counts.has_fan_out else "sample",
    )


def read_sample_losses(text: str | None, num_samples: int) -> Tensor | None:  # [S] float64
    if text is None:
        return None
    try:
        losses = torch.tensor([float(word) for word in text.split(",")], dtype=torch.float64)
    except ValueError as error:
        raise ConfigError(f"--sample-losses {text}: {error}; give numbers, as in 1,2,0.5") from error
    if losses.numel() != num_samples or not bool(torch.isfinite(losses).all()):
        raise ConfigError(
            f"--sample-losses {text}: {losses.numel()} numbers for {num_samples} samples: one finite number for each is needed"
        )
    return losses
