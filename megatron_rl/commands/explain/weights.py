"""What each aggregation makes of a step: weights, shares, sums, and what a change does. weights.py gives them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron_rl.arguments import given_settings, validate_megatron_rl_args
from megatron_rl.commands.explain.step import StepInput
from megatron_rl.config import LaunchMethod, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import SETTINGS_NAMES
from megatron_rl.hosts.rewards import HostCounts, count_rollouts
from megatron_rl.validation.weight_words import mean_strength_of, samples_of_mean_1
from megatron_rl.weights import AGGREGATIONS, AggregationRecord, get_loss_aggregation, sample_token_weights

REFERENCE = "sample_mean"
# Scales that differ by rounding alone are one scale.
SAME_SCALE = 1e-6


@dataclass(frozen=True)
class Weighing:
    """One aggregation on one step."""

    config: PolicyLossConfig
    counts: HostCounts

    @cached_property
    def token_weights(self) -> Tensor:  # [S] float64: the weight of each unmasked token of the sample
        return self.counts.token_weights(self.config)

    @cached_property
    def reference(self) -> float:
        """The sum of sample_mean's weights, which KL and entropy terms keep: the part of the rollouts with an unmasked token."""
        weights = sample_token_weights(REFERENCE, self.counts.rollout_tokens, self.counts.totals, are_of_step=False)
        return float((weights.double() * self.counts.tokens).sum())

    @property
    def name(self) -> str:
        return self.config.loss_aggregation

    @property
    def divisor(self) -> float | None:
        return self.config.loss_aggregation_divisor

    @property
    def record(self) -> AggregationRecord:
        return get_loss_aggregation(self.name)

    @property
    def title(self) -> str:
        return self.name if self.divisor is None else f"{self.name} {self.divisor:g}"

    @property
    def mean_tokens(self) -> float:
        """m: mean unmasked tokens of a sample that has any, or of a rollout where one has several samples."""
        totals = self.counts.totals
        return totals.num_tokens / max(1, round(totals.num_samples * self.reference))

    @property
    def total(self) -> float:
        return float((self.token_weights * self.counts.tokens).sum())

    @property
    def shares(self) -> Tensor:  # [S]
        return self.token_weights * self.counts.tokens / self.total

    @property
    def gradient_scale(self) -> float:
        """The sum of weights against sample_mean's: m / divisor for constant. The norm of a gradient changes by another factor."""
        return self.total / self.reference

    def shares_of(self, groups: Sequence[Hashable]) -> dict[Hashable, float]:  # [S] the prompt, or the rollout, of each sample
        shares: dict[Hashable, float] = dict.fromkeys(groups, 0.0)
        for group, share in zip(groups, self.shares.tolist(), strict=True):
            shares[group] += share
        return shares


def shown_configs(args: Namespace, method: LaunchMethod, step: StepInput) -> tuple[list[PolicyLossConfig], list[str]]:
    """(configurations to show, what is left out). With --host, or a built-in --loss-aggregation: that one. Else all of them, one of
    a user's own first; where no divisor is given, at the longest response."""
    given = given_settings(args)
    if args.host not in SETTINGS_NAMES:  # which undo that contract for every aggregation
        given["calculate_per_token_loss"] = args.calculate_per_token_loss

    def judged(**changes: object) -> PolicyLossConfig:
        return validate_megatron_rl_args(Namespace(**given | changes), method)

    chosen = args.loss_aggregation
    is_own = chosen is not None and "." in chosen
    if args.host is not None or (chosen is not None and not is_own):
        return [judged()], []
    names = [name for name in AGGREGATIONS.names() if get_loss_aggregation(name).name == name]  # else a second name
    if is_own:
        names = [chosen, *filter(AGGREGATIONS.is_built_in, names)]
    divisor, configs, left_out = args.loss_aggregation_divisor, [], []
    if divisor is None:
        divisor = float(max(mask.numel() for mask in step.masks))
    for name in names:
        record = get_loss_aggregation(name)
        if record.needs_rows and len({*step.rollout_keys}) == len(step.masks):  # sample_mean's weights
            continue
        if record.needs_prompts and step.prompts is None and name != chosen:
            left_out.append(f"{name}: which samples share a prompt is not known; give --prompt-ids")
            continue
        configs.append(judged(loss_aggregation=name, loss_aggregation_divisor=divisor if record.takes_divisor else None))
    return configs, left_out


def count_input(step: StepInput, config: PolicyLossConfig) -> HostCounts:
    name = config.loss_aggregation
    if get_loss_aggregation(name).needs_prompts and step.prompts is None:
        raise ConfigError(f"--loss-aggregation {name}: {step.source} does not say which samples share a prompt; give --prompt-ids")
    return count_rollouts(step.masks, step.prompts, step.rollout_keys, config, config.samples_per_prompt)


def shift_lines(weighings: Sequence[Weighing]) -> list[str]:
    """What each does to a step against sample_mean, as the init hook's line of a host says it."""
    lines = []
    for weighing in weighings:
        record, factor = weighing.record, weighing.gradient_scale
        if record is get_loss_aggregation(REFERENCE):
            continue
        what = "against sample_mean" if len(weighings) == 1 else f"{weighing.title} against sample_mean"
        if abs(factor - 1) <= SAME_SCALE:
            samples_text = "; its long samples weigh more" if samples_of_mean_1(record) is not None else ""
            lines.append(f"{what}: the same sum of weights; look at grad_norm before you keep --clip-grad{samples_text}")
            continue
        why, unit = "", "rollout" if weighing.counts.has_fan_out else "sample"
        strength = mean_strength_of(record)
        if strength is not None:
            why = f" = {strength}, m = {short(weighing.mean_tokens)} mean tokens of a {unit}"
        lines.append(
            f"{what}: sum of weights x {short(factor)}{why}; Adam hides it; a like step of SGD is near learning rate x "
            f"{short(1 / factor)}, a like clipping near --clip-grad x {short(factor)}, as grad_norm says, and KL and entropy terms "
            f"are {short(1 / factor)} x as strong"
        )
    return lines


def short(value: float) -> str:
    """Four digits, of six: weights are float32, and two that differ by its rounding alone read the same."""
    return f"{float(f'{value:.6g}'):.4g}"
