"""What a row of the selftest adds to a loss: KL, entropy, temperature, corrections, the dual clip. Truth is float64, by hand."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import (
    NO_SELECTION,
    Backend,
    CorrectionLevel,
    EntropyBonusTokens,
    GradientDivisor,
    PolicyLossConfig,
    RatioUnit,
    RejectedTokens,
)
from megatron_rl.kept_counts import counts_kept_before
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss, loss_aggregation_names
from megatron_rl.ops.ratios import kl_estimate
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.registries.corrections import CorrectionValue, correction_names, get_correction
from megatron_rl.registries.kl_estimators import kl_estimator_names
from megatron_rl.registries.selection_settings import TokenSelectionSettings
from megatron_rl.registries.token_selections import Effect, get_token_selection, token_selection_names
from megatron_rl.testing.comparison import Truth
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import (
    CLIPS,
    DIVISOR,
    PARAMETERS,
    LossTruth,
    in_rollouts,
    losses_by_hand,
    mean_of,
    old_log_probs_of,
    old_log_probs_off_the_edges,
    rollout_key,
    rollout_log_probs_of,
    scale_of_terms,
    weights_by_hand,
    with_anchors,
    with_one_advantage,
)
from megatron_rl.testing.selection_by_hand import selected_by_hand, trained_by_hand

# Where a sampler's log-probabilities differ from the old ones, and the bounds of the corrections' ratios: both sides are met.
LARGEST_GAP = 0.5
BOUNDS: Mapping[str, tuple[float, float]] = {
    CorrectionLevel.TOKEN: (0.75, 1.35),
    CorrectionLevel.SEQUENCE_MEAN: (0.9, 1.1),
    CorrectionLevel.SEQUENCE_SUM: (0.6, 1.7),
}
# Nats per token, amid the samples' divergences.
SEQUENCE_DELTA = 0.2
# A ratio's logarithm, or a divergence, is this far from each bound, so that float32 rounding decides nothing.
MARGIN = 1e-3
# Of a token selection: no token of the step is beyond it.
LARGEST_SCORE = 1e6


def _has_formula(aggregation: str) -> bool:
    record = get_loss_aggregation(aggregation)
    return record.name == aggregation and record.formula is not None


def _correction(kind: str, level: str = CorrectionLevel.TOKEN, **others: object) -> dict[str, object]:
    low, high = BOUNDS[level]
    of_kind = {"importance_correction": kind, "importance_correction_level": level}
    return {**of_kind, "importance_correction_low": low, "importance_correction_high": high, **others}


def _selection(kind: str) -> dict[str, object]:
    """A third of the tokens, of any score; the entropy term of those that are trained, where some are not."""
    is_penalty = get_token_selection(kind).effect == Effect.PENALIZED
    bonus = {} if is_penalty else {"entropy_coefficient": 0.1, "entropy_bonus_tokens": str(EntropyBonusTokens.TRAINED)}
    settings = {"token_selection": kind, "token_selection_share": 1 / 3, **bonus}
    return {**settings, "token_selection_low": -LARGEST_SCORE, "token_selection_high": LARGEST_SCORE}


Truths = dict[tuple[str, str], LossTruth]  # by loss and term
# The registered ones whose weights follow from a formula, each by one name.
AGGREGATIONS = tuple(name for name in loss_aggregation_names() if _has_formula(name))
LOGITS, FUSED = "logits", "fused head"
ALL_TERMS, DROPPED, DROPPED_LATE = "KL + entropy + temperature", "icepop, dropped", "OPSM, dropped"
DUAL_CLIP, DIVIDED, ROLLOUTS = "dual clip", "gradient / samples", "rollouts of several samples"
RATIO_OF_ROLLOUTS, RATIO_OF_TURNS = "a ratio a rollout", "a ratio a turn"
SELECTIONS = tuple(name for name in token_selection_names() if name != NO_SELECTION)
# Of Megatron's step, so the losses alone have no row of them.
OF_STEPS = (DROPPED, DROPPED_LATE, DIVIDED, ROLLOUTS, RATIO_OF_ROLLOUTS, RATIO_OF_TURNS, *SELECTIONS)
# A term -> its fields of PolicyLossConfig.
TERMS: Mapping[str, Mapping[str, object]] = {
    "": {},
    **{f"KL {estimator}": {"kl_coefficient": 0.1, "kl_estimator": estimator} for estimator in kl_estimator_names()},
    "entropy": {"entropy_coefficient": 0.1},
    "temperature": {"policy_temperature": 0.7},
    **{name: _correction(name, levels[0]) for name in correction_names() if (levels := get_correction(name).levels)},
    DROPPED: _correction("icepop", rejected_tokens=str(RejectedTokens.DROPPED)),
    "tis of sequences": _correction("tis", CorrectionLevel.SEQUENCE_MEAN),
    "tis of sequence sums": _correction("tis", CorrectionLevel.SEQUENCE_SUM),
    "OPSM": {"off_policy_sequence_delta": SEQUENCE_DELTA},
    **{name: _selection(name) for name in SELECTIONS},
    DROPPED_LATE: {"off_policy_sequence_delta": SEQUENCE_DELTA, "rejected_tokens": str(RejectedTokens.DROPPED)},
    DUAL_CLIP: {},  # its bound follows from the loss's clip
    DIVIDED: {"gradient_divisor": str(GradientDivisor.NUM_SAMPLES)},
    ROLLOUTS: {},  # of the samples
    RATIO_OF_ROLLOUTS: {"importance_ratio_unit": str(RatioUnit.ROLLOUT)},
    RATIO_OF_TURNS: {"importance_ratio_unit": str(RatioUnit.TURN)},
    ALL_TERMS: {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "policy_temperature": 0.7},
}
# A ratio of a token and one of a sample meet each term alone. Every loss meets three at once.
OF_TOKENS, OF_SAMPLES = "grpo", "gspo"


def config_of(policy_loss: str, aggregation: str, term: str, **others: object) -> PolicyLossConfig:
    low, high = CLIPS[policy_loss] or (None, None)
    parameters = dict(PARAMETERS.get(policy_loss, {}))
    if term == DUAL_CLIP:
        assert high is not None, "the dual clip is one of losses with a clip"
        parameters["clip_ratio_c"] = 1.0 + 0.5 * high  # where A < 0, ratios lie on both sides of it
    return PolicyLossConfig(
        policy_loss=policy_loss,
        loss_aggregation=aggregation,
        loss_aggregation_divisor=DIVISOR if get_loss_aggregation(aggregation).takes_divisor else None,
        clip_ratio_low=low,
        clip_ratio_high=high,
        loss_parameters=parameters,
        **TERMS[term],  # type: ignore[arg-type]
        **others,  # type: ignore[arg-type]
    )


def term_pairs() -> Iterator[tuple[str, str, str]]:
    """(loss, aggregation, term) of each row. The aggregations take turns."""
    of_sequences = (RATIO_OF_ROLLOUTS, RATIO_OF_TURNS)
    terms = [term for term in TERMS if term not in ("", ALL_TERMS, *of_sequences)]
    # A selection is of single tokens.
    alone = [(loss, term) for term in terms for loss in (OF_TOKENS, OF_SAMPLES) if loss == OF_TOKENS or term not in SELECTIONS]
    for place, (loss, term) in enumerate([*alone, *((loss, ALL_TERMS) for loss in CLIPS)]):
        # What the policy in training drops is not known before its forward pass.
        is_late, turn = term == DROPPED_LATE, place + place // len(AGGREGATIONS)
        names = [name for name in AGGREGATIONS if not (is_late and counts_kept_before(config_of(loss, name, term)))]
        yield loss, names[turn % len(names)], term
    yield from ((OF_SAMPLES, "sample_mean", term) for term in of_sequences)


@dataclass(frozen=True, slots=True)
class Case:
    """A step of one loss. is_per_token: under Megatron's calculate_per_token_loss, for token_mean alone. term: of TERMS.
    has_own_groups: each micro-batch is cut over context-parallel groups of another size."""

    policy_loss: str
    aggregation: str
    head: str = LOGITS
    backend: str = Backend.TORCH
    is_per_token: bool = False
    term: str = ""
    has_own_groups: bool = False

    @property
    def of_truth(self) -> tuple[str, str, str]:
        """What decides the right gradient."""
        return self.policy_loss, self.aggregation, self.term

    def __str__(self) -> str:
        contract = ", per-token" if self.is_per_token else ""
        term = f", {self.term}" if self.term else ""
        own_groups = ", own cp groups" if self.has_own_groups else ""
        return f"{self.policy_loss} {self.aggregation}, {self.head}, {self.backend}{contract}{term}{own_groups}"

    @property
    def config(self) -> PolicyLossConfig:
        return config_of(
            self.policy_loss,
            self.aggregation,
            self.term,
            policy_loss_backend=self.backend,
            fused_lm_head_loss=self.head == FUSED,
            policy_metrics="none",
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the policy says of a sample's response, float64 with graph, at the temperature of the term."""

    log_probs: Tensor  # [response_length]
    entropy: Tensor  # [response_length]

    @classmethod
    def of(cls, logits: Tensor, sample: StepSample, temperature: float) -> Tokens:  # logits: [response_length, V]
        labels = torch.tensor(sample.tokens[-len(sample.loss_mask) :], device=logits.device)
        return cls.of_labels(logits, labels, temperature)

    @classmethod
    def of_labels(cls, logits: Tensor, labels: Tensor, temperature: float) -> Tokens:  # [R, V], [R]
        log_softmax = torch.log_softmax(logits / temperature, -1)
        return cls(log_softmax.gather(1, labels[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1))


def truth_of_terms(
    samples: Sequence[StepSample],
    logits: Sequence[Tensor],  # of each sample, [response_length, V] float64 with graph
    leaves: Mapping[str, Tensor],  # what the gradient is taken by
    rows: Iterable[tuple[str, str, str]],  # (loss, aggregation, term)
    beside: Tensor | None = None,  # 0-d, a loss whose gradient is in each row's too
) -> Truths:
    """The step and its truth of each (loss, term)."""
    truths: Truths = {}
    grad = functools.partial(torch.autograd.grad, inputs=[*leaves.values()], retain_graph=True, materialize_grads=True)
    others: Sequence[Any] = [0.0] * len(leaves) if beside is None else grad(beside)
    for policy_loss, aggregation, term in dict.fromkeys(rows):
        config = config_of(policy_loss, aggregation, term)
        tokens = [Tokens.of(rows, sample, config.policy_temperature) for rows, sample in zip(logits, samples, strict=True)]
        given = in_rollouts(samples) if term in (ROLLOUTS, RATIO_OF_ROLLOUTS) else samples
        given = with_one_advantage(given) if term == RATIO_OF_ROLLOUTS else given
        step = step_of_term(given, tokens, policy_loss, config)
        loss = loss_by_hand(step, tokens, config)
        parts = grad(loss)
        divisor = len(step) if config.gradient_divisor == GradientDivisor.NUM_SAMPLES else 1  # of the gradient alone
        gradient = {name: (part / divisor + other).cpu() for name, part, other in zip(leaves, parts, others, strict=True)}
        truth = Truth(float(loss.detach()), scale_of_terms(step, aggregation), gradient)
        known = truths.get((policy_loss, term))
        truths[policy_loss, term] = LossTruth(step, {**(known.by_aggregation if known else {}), aggregation: truth})
    return truths


def step_of_term(
    samples: Sequence[StepSample], tokens: Sequence[Tokens], policy_loss: str, config: PolicyLossConfig
) -> list[StepSample]:
    """The samples with old log-probabilities, and with the reference's and the sampler's where the term needs them."""
    new = [of_sample.log_probs.tolist() for of_sample in tokens]
    bounds = [bound for name, bound in config.loss_parameters.items() if name == "clip_ratio_c"]
    step = with_anchors(samples, old_log_probs_off_the_edges(samples, new, policy_loss, bounds=bounds), policy_loss)
    numbers = random.Random(2)
    if config.kl_coefficient:
        step = [
            replace(sample, ref_log_probs=[value - numbers.gauss(0.0, 0.3) for value in values])
            for sample, values in zip(step, new, strict=True)
        ]
    if config.token_selection != NO_SELECTION:
        scores = [list(zip(row.log_probs.tolist(), row.entropy.tolist(), strict=True)) for row in tokens]
        step = [replace(sample, scores=of_sample) for sample, of_sample in zip(step, scores, strict=True)]
    if CorrectionSettings.of(config).has_factor:
        level = config.importance_correction_level
        step = [replace(sample, rollout_log_probs=_sampled(sample, numbers, level)) for sample in step]
    if config.off_policy_sequence_delta is not None:
        step = [
            replace(sample, rollout_log_probs=_diverged(values, place % 2 == 0))
            for place, (sample, values) in enumerate(zip(step, new, strict=True))
        ]
    return step


def _sampled(sample: StepSample, numbers: random.Random, level: str) -> list[float]:
    """The sampler's log-probabilities: ratios on both sides of the bounds, none near one."""
    bounds = [math.log(bound) for bound in BOUNDS[level]]

    def is_clear(log_ratio: float) -> bool:
        return all(abs(log_ratio - bound) > MARGIN for bound in bounds)

    old, kept = old_log_probs_of(sample), [t for t, bit in enumerate(sample.loss_mask) if bit]
    while True:
        gaps = [numbers.uniform(-LARGEST_GAP, LARGEST_GAP) for _ in old]
        total = sum(gaps[t] for t in kept)
        ratios = {
            CorrectionLevel.TOKEN: [gaps[t] for t in kept],
            CorrectionLevel.SEQUENCE_MEAN: [total / max(len(kept), 1)],
            CorrectionLevel.SEQUENCE_SUM: [total],
        }
        if all(is_clear(log_ratio) for log_ratio in ratios[CorrectionLevel(level)]):
            return [value - gap for value, gap in zip(old, gaps, strict=True)]


def _diverged(new: Sequence[float], is_far: bool) -> list[float]:
    """The sampler's log-probabilities: they differ from the policy's by half or twice the bound in the mean."""
    divergence = SEQUENCE_DELTA * (2.0 if is_far else 0.5)
    return [value + divergence + 0.04 * math.sin(place) for place, value in enumerate(new)]


def loss_by_hand(
    step: Sequence[StepSample], tokens: Sequence[Tokens], config: PolicyLossConfig
) -> Tensor:  # 0-d float64 with graph
    """The loss of the whole step. Raises DataError for a sample without log-probabilities that the settings need."""
    policy_loss, divisor = config.policy_loss, config.loss_aggregation_divisor or DIVISOR
    scores = [row.log_probs.tolist() for row in tokens], [row.entropy.tolist() for row in tokens]
    selected = selected_by_hand(step, *scores, config)
    is_trained = trained_by_hand(selected, config)
    units = units_by_hand(step, tokens, config.importance_ratio_unit)
    factors = [factors_by_hand(unit.sample, unit.tokens.log_probs.tolist(), config) for unit in units]
    factors = [
        [factor * is_trained[place][t] for factor, (place, t) in zip(of_unit, unit.places, strict=True)]
        for of_unit, unit in zip(factors, units, strict=True)
    ]
    is_corrected = CorrectionSettings.of(config).is_on or config.token_selection != NO_SELECTION
    clip = get_policy_loss(policy_loss).clip_bounds(config.clip_ratio_low, config.clip_ratio_high)
    sums = losses_by_hand(
        [unit.sample for unit in units],
        [unit.tokens.log_probs for unit in units],
        policy_loss,
        config.loss_parameters,
        factors if is_corrected else None,
        clip,
        [unit.tokens.entropy for unit in units],
    )
    counted = list(step)
    if config.rejected_tokens == RejectedTokens.DROPPED:
        masks = [[0] * len(sample.loss_mask) for sample in step]
        for unit, of_unit in zip(units, factors, strict=True):
            for (number, t), bit, factor in zip(unit.places, unit.sample.loss_mask, of_unit, strict=True):
                masks[number][t] |= bit * (factor != 0)
        counted = [replace(sample, loss_mask=mask) for sample, mask in zip(step, masks, strict=True)]
    weights = weights_by_hand(counted, config.loss_aggregation, divisor)
    weights_of_samples = weights_by_hand(step, "sample_mean")
    of_units = [max(weights[place] for place, _ in unit.places) for unit in units]
    loss = sum((weight * part for weight, part in zip(of_units, sums, strict=True)), start=torch.zeros((), dtype=torch.float64))
    penalty = TokenSelectionSettings.of(config).penalty
    for place, (sample, of_sample, weight) in enumerate(zip(step, tokens, weights_of_samples, strict=True)):
        for t in (t for t, bit in enumerate(sample.loss_mask) if bit):
            if config.kl_coefficient:
                loss = loss + config.kl_coefficient * weight * kl_by_hand(sample, t, of_sample.log_probs[t], config.kl_estimator)
            has_bonus = config.entropy_bonus_tokens == EntropyBonusTokens.ALL or is_trained[place][t]
            loss = loss - config.entropy_coefficient * weight * of_sample.entropy[t] * has_bonus
            if penalty is not None and selected[place][t]:
                log_ratio = of_sample.log_probs[t] - old_log_probs_of(sample)[t]
                loss = loss + penalty * weights[place] * factors[place][t] * (log_ratio.exp() - 1 - log_ratio)
    return loss


@dataclass(frozen=True, slots=True)
class Unit:
    """What has one ratio, as a sample. places: the sample of the step and the place in its response, of each token."""

    sample: StepSample
    tokens: Tokens
    places: list[tuple[int, int]]


def units_by_hand(step: Sequence[StepSample], tokens: Sequence[Tokens], unit: str) -> list[Unit]:
    """The samples; or the rollouts, their samples' responses in a row; or the turns, each a sample with one run of its mask."""
    together: dict[object, list[int]] = {}
    for place, sample in enumerate(step):
        together.setdefault(rollout_key(sample, place) if unit == RatioUnit.ROLLOUT else place, []).append(place)
    units = []
    for members in together.values():
        places = [(place, t) for place in members for t in range(len(step[place].loss_mask))]

        def joined_lists(values: Sequence[list[Any] | None]) -> list[Any] | None:
            given = [of_one for of_one in values if of_one is not None]
            return [value for of_one in given for value in of_one] if given else None

        parts = [step[place] for place in members]
        sample = replace(
            parts[0],
            tokens=[0, *(token for part in parts for token in part.tokens[-len(part.loss_mask) :])],
            loss_mask=[bit for part in parts for bit in part.loss_mask],
            old_log_probs=joined_lists([part.old_log_probs for part in parts]),
            ref_log_probs=joined_lists([part.ref_log_probs for part in parts]),
            rollout_log_probs=joined_lists([part.rollout_log_probs for part in parts]),
        )
        joined = Tokens(*(torch.cat([getattr(tokens[place], name) for place in members]) for name in ("log_probs", "entropy")))
        masks = [sample.loss_mask]
        if unit == RatioUnit.TURN:
            masks = runs_of(sample.loss_mask)
        units += [Unit(replace(sample, loss_mask=mask), joined, places) for mask in masks]
    return units


def runs_of(mask: Sequence[int]) -> list[list[int]]:
    """The mask once for each of its runs of ones, with that run alone."""
    found: list[list[int]] = []
    for place, bit in enumerate(mask):
        if bit and (place == 0 or not mask[place - 1]):
            found.append([0] * len(mask))
        if bit:
            found[-1][place] = 1
    return found


def kl_by_hand(sample: StepSample, t: int, new: Tensor, estimator: str) -> Tensor:  # 0-d each
    """Schulman, "Approximating KL Divergence", 2020; unbiased: DeepSeek-V3.2, arXiv:2512.02556, equation 7."""
    assert sample.ref_log_probs is not None, "a KL term needs a reference"
    difference = new - sample.ref_log_probs[t]
    log_ratio = new - old_log_probs_of(sample)[t]
    if estimator not in KL_BY_HAND:  # one of a user: at least the layouts are compared
        values = new.detach()
        value, derivative = kl_estimate(estimator, values, new.new_tensor(sample.ref_log_probs[t]), log_ratio.detach())
        return value + derivative * (new - values)
    k2, k3 = difference.square() / 2, (-difference).exp() + difference - 1
    return KL_BY_HAND[estimator](difference, k2, k3, log_ratio)


KL_BY_HAND: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "k1": lambda difference, k2, k3, log_ratio: difference,
    "k2": lambda difference, k2, k3, log_ratio: k2,
    "k3": lambda difference, k2, k3, log_ratio: k3,
    "k3+": lambda difference, k2, k3, log_ratio: k3.detach() + k2 - k2.detach(),
    "unbiased": lambda difference, k2, k3, log_ratio: log_ratio.exp() * k3,
}
# (ratio that is compared, ratio of the token, low, high) -> factor.
FACTORS_BY_HAND: Mapping[str, Callable[[float, float, float, float], float]] = {
    "tis": lambda ratio, own, low, high: min(max(ratio, low), high),
    "icepop": lambda ratio, own, low, high: ratio if low <= ratio <= high else 0.0,
    "mask": lambda ratio, own, low, high: float(low <= ratio <= high),
    "seq_mask_tis": lambda ratio, own, low, high: own if low <= ratio <= high else 0.0,
}


def factors_by_hand(sample: StepSample, new: Sequence[float], config: PolicyLossConfig) -> list[float]:
    """The factor of each token of the response."""
    factors, kept = [1.0] * len(new), [t for t, bit in enumerate(sample.loss_mask) if bit]
    if config.off_policy_sequence_delta is not None and kept:
        rollout = rollout_log_probs_of(sample)
        divergence = sum(rollout[t] - new[t] for t in kept) / len(kept)
        if sample.advantage < 0 and divergence > config.off_policy_sequence_delta:
            factors = [0.0] * len(new)
    if not CorrectionSettings.of(config).has_factor or not kept:
        return factors
    low, high = config.importance_correction_low, config.importance_correction_high
    assert low is not None and high is not None, "the terms give both bounds"
    logs = {t: torch.tensor(old_log_probs_of(sample)[t] - rollout_log_probs_of(sample)[t], dtype=torch.float64) for t in kept}
    own = {t: math.exp(float(log_ratio)) for t, log_ratio in logs.items()}
    if config.importance_correction_level != CorrectionLevel.TOKEN:
        is_mean = config.importance_correction_level == CorrectionLevel.SEQUENCE_MEAN
        logs = dict.fromkeys(kept, mean_of([*logs.values()]) * (1 if is_mean else len(kept)))
    for t in kept:
        factors[t] *= factor_of(config.importance_correction, math.exp(float(logs[t])), own[t], low, high)
    return factors


def factor_of(kind: str, ratio: float, own: float, low: float, high: float) -> float:
    """The factor of a token whose correction compares `ratio` and whose own ratio is `own`."""
    if kind in FACTORS_BY_HAND:
        return FACTORS_BY_HAND[kind](ratio, own, low, high)
    declared = get_correction(kind)  # one of a user: at least the layouts are compared
    returned = declared.function(torch.tensor([ratio], dtype=torch.float64), low, high)
    factor = float(returned.weights if isinstance(returned, CorrectionValue) else returned)
    if declared.weigh_tokens is not None:
        factor *= float(declared.weigh_tokens(torch.tensor([own], dtype=torch.float64)))
    return factor
