"""Compares what a loop gives to a loss of this package, token by token, with the samples and the configuration of check_step.

Where a sample has one ratio, its tokens have one coefficient, or none where it is clipped: a moved old log-probability, an
advantage and a weight look alike in the gradient. So the numbers that the loss was given are compared first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.loss_hub import PolicyLoss, get_policy_loss
from megatron_rl.losses.inputs import LossInputs
from megatron_rl.losses.reduce_torch import LossResult
from megatron_rl.losses.settings import LossSettings
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import DIVISOR, weights_by_hand
from megatron_rl.testing.step_reference import KnownTokens, Microbatch

# Numbers that both sides have are rounded to float32, 6e-8 of each. A log-probability of the logits is computed by both.
SAME, SAME_LOG_PROB = 1e-5, 1e-3
ORDER = "Take the advantages by the numbers of the samples in the step"
Settings = tuple[str, tuple[float, float] | None, dict[str, float]]  # name of the loss, clip, parameters


@dataclass(frozen=True, slots=True)
class _Call:
    settings: Settings
    table: Tensor  # [5, T] float64: log-probability, old one (NaN: on-policy), advantage, weight, mask


@dataclass
class LossWatch:
    """Keeps what each loss of one micro-batch is given."""

    calls: list[_Call] = field(default_factory=list)

    def __call__(
        self,
        reducer: Callable[..., LossResult],
        loss: PolicyLoss,
        log_probs: Tensor,  # [T]
        entropy: Tensor | None,
        inputs: LossInputs,
        settings: LossSettings,
    ) -> LossResult:
        if torch.is_grad_enabled():
            self.calls.append(_Call((loss.name, settings.clip, settings.parameters), _table_of(log_probs, inputs)))
        return reducer(loss, log_probs, entropy, inputs, settings)


def _table_of(log_probs: Tensor, inputs: LossInputs) -> Tensor:
    documents = inputs.token_documents

    def spread(of_samples: Tensor) -> Tensor:  # [N] -> [T], 0 on padding
        return torch.cat([of_samples.double(), of_samples.new_zeros(1).double()])[documents]

    old = torch.full_like(log_probs, torch.nan) if inputs.old_log_probs is None else inputs.old_log_probs
    advantages = inputs.advantages if inputs.advantages_per == "token" else spread(inputs.advantages.to(documents.device))
    columns = (log_probs, old, advantages, spread(inputs.token_weights), inputs.loss_mask)
    return torch.stack([column.detach().double().cpu() for column in columns])


@dataclass(frozen=True, slots=True)
class GivenToken:
    part: tuple[int, int]  # rank of dp and cp, and micro-batch
    sample: int
    place: int
    log_prob: float
    old_log_prob: float  # NaN: on-policy
    advantage: float
    weight: float
    is_trained: bool  # by the mask


@dataclass(frozen=True, slots=True)
class Given:
    """Of the whole step, equal on every rank. others: rows that predict no token of a response, and are in the mask."""

    settings: Settings
    tokens: Sequence[GivenToken]
    others: int


def gather_given(watches: Sequence[LossWatch], microbatches: Sequence[Microbatch], groups: ParallelGroups) -> Given | None:
    """None where the loop's loss is another, or is given other rows than those of the logits.

    Communication: one all-gather of objects over all ranks.
    """

    def own() -> list[tuple[Settings, list[GivenToken], int] | None]:
        if groups.tp.rank():  # all ranks of tp have the same rows
            return []
        return [
            _of_microbatch(watch, microbatch, (groups.dp_cp.rank(), number))
            for number, (watch, microbatch) in enumerate(zip(watches, microbatches, strict=True))
        ]

    found = [of_one for of_rank in on_all_ranks(own) for of_one in of_rank]
    known = [of_one for of_one in found if of_one is not None]
    if not known or len(known) < len(found) or any(settings != known[0][0] for settings, _, _ in known):
        return None
    return Given(known[0][0], [token for _, tokens, _ in known for token in tokens], sum(others for _, _, others in known))


def _of_microbatch(
    watch: LossWatch, microbatch: Microbatch, part: tuple[int, int]
) -> tuple[Settings, list[GivenToken], int] | None:
    if len(watch.calls) != 1 or watch.calls[0].table.shape[1] != microbatch.num_rows:
        return None
    [call] = watch.calls
    placed = call.table[:, microbatch.rows.cpu()].T.tolist()
    tokens = [
        GivenToken(part, sample, place, log_prob, old_log_prob, advantage, weight, bool(bit))
        for (sample, place), (log_prob, old_log_prob, advantage, weight, bit) in zip(microbatch.places, placed, strict=True)
    ]
    return call.settings, tokens, int(call.table[-1].sum()) - sum(token.is_trained for token in tokens)


def settings_problem(given: Given | None, config: PolicyLossConfig) -> str:
    """Which loss, clip or parameter the loop's loss has in place of that of `config`, in words; empty where none."""
    if given is None:
        return ""
    loss, (name, clip, parameters) = get_policy_loss(config.policy_loss), given.settings
    if name != loss.name:
        return f"the loss is {name}: compute {config.policy_loss}"
    right = loss.clip_bounds(config.clip_ratio_low, config.clip_ratio_high)
    if clip != right and clip is not None and right is not None:
        low, high = right
        return (
            f"the clip is another: the loss has clip_ratio_low={clip[0]:g}, clip_ratio_high={clip[1]:g}, and config {low:g}, "
            f"{high:g}: pass clip_ratio_low={low:g}, clip_ratio_high={high:g} to the loss"
        )
    own = loss.resolve_parameters(config.loss_parameters)
    if others := [parameter for parameter in own if parameters.get(parameter) != own[parameter]]:
        shown = ", ".join(f"{parameter}={parameters[parameter]:g}" for parameter in others)
        return f"the loss has {shown}, and config has not: pass loss_parameters={ {one: own[one] for one in others} } to it"
    return ""


def given_problem(given: Given | None, samples: Sequence[StepSample], known: KnownTokens, config: PolicyLossConfig) -> str:
    """The first of settings, old log-probabilities and advantages that is another, in words; empty where none is, or where the rows
    of the loss are not those of the logits."""
    tokens = compared_tokens(given, samples, known)
    if given is None or not tokens:
        return ""
    return settings_problem(given, config) or _old_problem(tokens, samples, known, config) or _advantage_problem(tokens, samples)


def compared_tokens(given: Given | None, samples: Sequence[StepSample], known: KnownTokens) -> Sequence[GivenToken]:
    """The unmasked ones; none where a log-probability is another than the model's, so that a row may be another."""
    tokens = [] if given is None else [token for token in given.tokens if samples[token.sample].loss_mask[token.place]]
    are_right = all(_is_near(token.log_prob, known[token.sample][token.place][0], SAME_LOG_PROB) for token in tokens)
    return tokens if are_right else []


def weights_factor(tokens: Sequence[GivenToken], samples: Sequence[StepSample], config: PolicyLossConfig) -> float | None:
    """The one factor of all token weights that the loss is given, over those of `config`; None where there is none."""
    weights = weights_by_hand(samples, config.loss_aggregation, config.loss_aggregation_divisor or DIVISOR)
    factors = [token.weight / weights[token.sample] for token in tokens]
    return factors[0] if factors and all(_is_near(factor, factors[0], SAME) for factor in factors) else None


def _is_near(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(1.0, abs(other))  # NaN is not


def _old_problem(tokens: Sequence[GivenToken], samples: Sequence[StepSample], known: KnownTokens, config: PolicyLossConfig) -> str:
    if get_policy_loss(config.policy_loss).anchor != "old":
        return ""
    is_on_policy = all(sample.old_log_probs is None for sample in samples)
    if all(math.isnan(token.old_log_prob) for token in tokens):
        return "" if is_on_policy else "every ratio is 1: pass the old log-probabilities of the rollout to the loss"

    def right(token: GivenToken, moved: int = 0) -> float:  # NaN beyond the response
        old = samples[token.sample].old_log_probs
        if old is None:
            return known[token.sample][token.place][0]
        return old[token.place - moved] if 0 <= token.place - moved < len(old) else math.nan

    def is_moved_by(moved: int) -> bool:
        pairs = [(token.old_log_prob, value) for token in tokens if not math.isnan(value := right(token, moved))]
        return bool(pairs) and all(_is_near(*pair, SAME) for pair in pairs)

    # A log-probability of the loop's own forward has the rounding of another kernel.
    tolerance = SAME_LOG_PROB if is_on_policy else SAME
    wrong = [token for token in tokens if not _is_near(token.old_log_prob, right(token), tolerance)]
    if not wrong:
        return ""
    for moved, words in ((1, "late"), (-1, "early")):
        if is_moved_by(moved):
            return (
                f"the old log-probabilities are one token {words}: the log-probability of a token lies at the row that predicts it"
            )
    token = wrong[0]
    return (
        f"{len(wrong)} old log-probabilities are others, as that of token {token.place} of sample {token.sample}: "
        f"{token.old_log_prob:.6g} in the loss, and {right(token):.6g} in `samples`. Give both the same"
    )


def _advantage_problem(tokens: Sequence[GivenToken], samples: Sequence[StepSample]) -> str:
    found = {token.sample: token.advantage for token in tokens}
    given = {number: samples[number].advantage for number in found}
    bound = SAME * max(map(abs, given.values()))
    for token in tokens:
        if abs(token.advantage - found[token.sample]) > bound:
            return (
                f"the advantages differ inside sample {token.sample}: token {token.place} has {token.advantage:.6g}, and `samples` "
                f"have {given[token.sample]:.6g} for each of its tokens"
            )
    if all(abs(found[number] - given[number]) <= bound for number in given):
        return ""
    if words := advantages_in_words(samples, given, found, {token.sample: token.part for token in tokens}, SAME):
        return words
    number = max(given, key=lambda number: abs(found[number] - given[number]))
    return f"the advantages are others: that of sample {number} is {found[number]:.6g}, and {given[number]:.6g} in `samples`"


def advantages_in_words(
    samples: Sequence[StepSample],
    given: Mapping[int, float],  # by number of the sample
    found: Mapping[int, float],
    parts: Mapping[int, tuple[int, int]],  # rank and micro-batch
    tolerance: float,
) -> str:
    """What makes the advantages `found` of `given`; empty where nothing usual does."""
    largest = max(map(abs, given.values()))
    if all(abs(found[number] + given[number]) < tolerance * largest for number in given):
        return "the advantages have the other sign: a reward above the mean of its group has a positive one"

    def owner(value: float) -> int | None:
        near = [n for n, sample in enumerate(samples) if abs(sample.advantage - value) < tolerance * largest]
        return near[0] if near else None

    number = max(given, key=lambda number: abs(found[number] - given[number]))
    owners = {number: owner(value) for number, value in found.items()}
    if None not in owners.values():
        return f"the advantages are in another order: sample {number} has that of sample {owners[number]}. {ORDER}"
    kinds: tuple[tuple[str, dict[int, Any]], ...] = (
        ("the step", dict.fromkeys(given)),
        ("each rank", {number: parts[number][0] for number in given}),
        ("each micro-batch", {number: parts[number] for number in given}),
        ("each prompt", {number: samples[number].prompt_id for number in given}),
    )
    for where, keys in kinds:
        if is_linear([given[number] for number in keys], [found[number] for number in keys], [*keys.values()], tolerance):
            return (
                f"the advantages are centred or scaled once more, over {where}, or those of `samples` are not: give both the same"
            )
    return ""


def is_linear(before: Sequence[float], after: Sequence[float], keys: Sequence[Hashable], tolerance: float) -> bool:
    """Whether after = a before + b in each part of the step, with at least three numbers more than a and b."""
    values = torch.tensor([before, after], dtype=torch.float64)
    kinds = [*dict.fromkeys(keys)]
    index = torch.tensor([kinds.index(key) for key in keys])
    is_part = torch.nn.functional.one_hot(index, len(kinds)).double()  # [samples, parts]
    table = torch.cat([is_part, is_part * values[0, :, None]], 1)
    beside = table @ (torch.linalg.pinv(table) @ values[1]) - values[1]
    return len(keys) >= 2 * len(kinds) + 3 and bool(beside.norm() < tolerance * values[1].norm())
