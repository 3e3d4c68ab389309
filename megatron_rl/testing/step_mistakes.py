"""Names the mistake of a loop whose gradient is wrong: from the gradient of its loss by each row of the logits.

A loss of log-probabilities and entropies has this gradient by a row z of logits, with p = softmax(z / temperature):

    c (onehot(label) - p) / temperature - e p (log p + entropy) / temperature

So a row shows which token it trains, at which temperature, and with which coefficients c and e. They are looked at in this order:
which rows train, which token, which temperature, what the loss was given (step_given.py), which coefficient. The coefficients are
compared with those of the same step under each usual mistake. A mistake has the name of the first that explains all tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import NO_CORRECTION, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss, is_built_in
from megatron_rl.megatron.samples import rollout_ids_of
from megatron_rl.registries.kl_estimators import kl_estimator_names
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import CLIPS, DIVISOR
from megatron_rl.testing.selftest import AGGREGATIONS
from megatron_rl.testing.step_given import Given, advantages_in_words, compared_tokens, given_problem
from megatron_rl.testing.step_reference import (
    DenseStep,
    KnownTokens,
    Microbatch,
    dense_step,
    edge_tokens,
    on_the_other_side,
    whole_columns,
)


@dataclass(frozen=True, slots=True)
class Precision:
    """How well a row's gradient must fit, relative to it, and coefficients a mistake's, relative to all of them. The gradient of a
    logit is rounded to float32 (1e-7) or to 16 bits (2^-9); a wrong token or temperature changes a row by more than 0.1."""

    fit: float
    match: float


OF_FLOAT32, OF_16_BITS = Precision(fit=1e-3, match=1e-4), Precision(fit=5e-2, match=2e-2)
# A row with less than this share of the largest gradient says nothing of its token: 1 - p is rounding there.
SMALLEST_ROW = 1e-3
# A wrong temperature is looked for within a factor of ten, in steps of 3 %, then between two steps; of this many rows.
TEMPERATURES, ROWS_OF_TEMPERATURE, HALVINGS = 160, 8, 50
COUNT = "count the whole step with count_step, before it is divided"


@dataclass(frozen=True, slots=True)
class Row:
    """What the loop's gradient says of one row of the logits. sample, place: -1 for a row that predicts no token of a response."""

    rank: int  # of dp and cp
    microbatch: int
    sample: int
    place: int
    size: float  # of the gradient
    label: int = -1  # the token with the largest gradient
    residual: float = 0.0  # beside c at the right token and temperature, and beside e where the settings have entropy; over size
    beside_both: float = 0.0  # beside c and e
    log_prob: float = 0.0  # c, times the length of its direction
    entropy: float = 0.0  # e, the same
    length: float = 0.0  # of the direction of c: errors of a gradient weigh alike in all rows
    length_of_entropy: float = 0.0
    temperature: float = math.nan  # at which the row fits, where that is not the right one
    trains_padding: bool = False  # columns beyond the vocabulary


def rows_of(
    gradients: Sequence[Tensor],  # of each micro-batch, [rows, V_tp]: of the loop's loss by this rank's logits
    microbatches: Sequence[Microbatch],
    samples: Sequence[StepSample],
    config: PolicyLossConfig,
    vocab_size: int,
    groups: ParallelGroups,
    precision: Precision,
) -> list[Row]:
    """The rows of the whole step, equal on every rank.

    Communication: an all-gather of the gradients over tp, and one of objects over all ranks.
    """

    def own() -> list[Row]:
        rows: list[Row] = []
        for number, (gradient, microbatch) in enumerate(zip(gradients, microbatches, strict=True)):
            whole = whole_columns(gradient, vocab_size, groups).double()
            of_one = [] if groups.tp.rank() else _rows(whole, microbatch, samples, config, vocab_size, precision)
            rows += [replace(row, rank=groups.dp_cp.rank(), microbatch=number) for row in of_one]
        return rows

    return [row for of_rank in on_all_ranks(own) for row in of_rank]


def _rows(
    gradient: Tensor,  # [rows, V] float64, with padding
    microbatch: Microbatch,
    samples: Sequence[StepSample],
    config: PolicyLossConfig,
    vocab_size: int,
    precision: Precision,
) -> list[Row]:
    sizes = gradient.norm(dim=1)
    is_placed = torch.zeros(len(gradient), dtype=torch.bool, device=gradient.device)
    is_placed[microbatch.rows] = True
    rows = [Row(0, 0, -1, -1, size) for size in sizes[~is_placed].tolist() if size != 0]
    if not microbatch.places:
        return rows
    found, logits = gradient[microbatch.rows], microbatch.logits.detach()
    labels = torch.tensor([_label(samples[sample], place) for sample, place in microbatch.places], device=gradient.device)
    right, has_entropy = config.policy_temperature, config.entropy_coefficient != 0
    fit = _fit(logits, found[:, :vocab_size], labels, torch.full_like(logits[:, 0], right), precision)
    residual = fit.beside_both if has_entropy else fit.beside_one
    trained = found[:, :vocab_size].abs().argmax(1)
    is_other = (residual > precision.fit) & (trained == labels)
    chosen = (found.norm(dim=1) * is_other).topk(min(ROWS_OF_TEMPERATURE, len(labels))).indices
    temperatures = torch.full_like(logits[:, 0], math.nan)
    temperatures[chosen] = _temperatures(logits[chosen], found[chosen, :vocab_size], labels[chosen], right, has_entropy, precision)
    temperatures[~is_other] = math.nan
    has_padding = (found[:, vocab_size:] != 0).any(1)
    columns = {
        "size": sizes[microbatch.rows],
        "label": trained,
        "residual": residual,
        "temperature": temperatures,
        "trains_padding": has_padding,
        **{name: getattr(fit, name) for name in ("beside_both", "log_prob", "entropy", "length", "length_of_entropy")},
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    rows += [
        Row(0, 0, sample, place, **dict(zip(columns, of_row, strict=True)))
        for (sample, place), of_row in zip(microbatch.places, values, strict=True)
    ]
    return rows


def _label(sample: StepSample, place: int) -> int:
    return sample.tokens[place - len(sample.loss_mask)]


@dataclass(frozen=True, slots=True)
class _Fit:
    log_prob: Tensor  # [R] each
    entropy: Tensor
    length: Tensor
    length_of_entropy: Tensor
    beside_one: Tensor  # of the gradient, beside c alone, and beside c and e; over the gradient's length
    beside_both: Tensor


def _fit(logits: Tensor, gradient: Tensor, labels: Tensor, temperature: Tensor, precision: Precision) -> _Fit:
    """Least squares by c, and by c and e in a row that c alone does not explain. [R, V], [R, V], [R], [R]"""
    log_p = torch.log_softmax(logits / temperature[:, None], 1)
    p = log_p.exp()
    of_label = torch.nn.functional.one_hot(labels, logits.shape[1]).to(p) - p
    of_entropy = -p * (log_p - (p * log_p).sum(1, keepdim=True))
    lengths = [direction.norm(dim=1).clamp(min=1e-300) for direction in (of_label, of_entropy)]
    first, second = of_label / lengths[0][:, None], of_entropy / lengths[1][:, None]
    size = gradient.norm(dim=1).clamp(min=1e-300)
    along, beside, common = ((gradient * first).sum(1), (gradient * second).sum(1), (first * second).sum(1))
    alone = (gradient - along[:, None] * first).norm(dim=1) / size
    apart = 1 - common.square()
    needs_both = (alone > precision.fit) & (apart > 1e-9)  # with two columns both have one direction
    apart = torch.where(needs_both, apart, 1.0)
    c = torch.where(needs_both, (along - common * beside) / apart, along)
    e = torch.where(needs_both, (beside - common * along) / apart, 0.0)
    both = (gradient - c[:, None] * first - e[:, None] * second).norm(dim=1) / size
    return _Fit(c, e, lengths[0] / temperature, lengths[1] / temperature, alone, both)


def _temperatures(
    logits: Tensor, gradient: Tensor, labels: Tensor, right: float, has_entropy: bool, precision: Precision
) -> Tensor:  # [R]
    """At which each row fits; NaN where at none."""

    def residual(logarithms: Tensor) -> Tensor:
        fit = _fit(logits, gradient, labels, right * logarithms.exp(), precision)
        return fit.beside_both if has_entropy else fit.beside_one

    steps = torch.linspace(-math.log(10), math.log(10), TEMPERATURES, dtype=torch.float64, device=logits.device)
    nearest = steps[torch.stack([residual(step.expand(len(labels))) for step in steps]).argmin(0)]
    width = steps[1] - steps[0]
    low, high = nearest - width, nearest + width
    for _ in range(HALVINGS):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        is_lower = residual(first) < residual(second)
        low, high = torch.where(is_lower, low, first), torch.where(is_lower, second, high)
    return torch.where(residual(low) < precision.fit, right * low.exp(), math.nan)


@dataclass(frozen=True, slots=True)
class Step:
    """The whole step, as the samples and the loop's gradient have it; equal on every rank."""

    rows: Sequence[Row]
    samples: Sequence[StepSample]
    known: KnownTokens
    config: PolicyLossConfig
    right: DenseStep
    delivered: float  # the factor that the schedule leaves in the gradient by the logits
    precision: Precision
    given: Given | None = None  # what the loop's loss was given; None: it is no loss of this package

    @property
    def tokens(self) -> list[Row]:
        """The rows of unmasked tokens."""
        return [row for row in self.rows if row.place >= 0 and self.samples[row.sample].loss_mask[row.place]]

    def is_expected(self, row: Row) -> bool:
        return any(of_step[row.sample][row.place] != 0 for of_step in (self.right.by_log_prob, self.right.by_entropy))


def mistake_of(step: Step) -> str:
    """What is wrong and what to do, in words; empty where the rows do not show it."""
    if not any(row.size for row in step.rows):
        return given_problem(step.given, step.samples, step.known, step.config) or (
            "no gradient reaches the logits that forward_step returned: compute the loss from what loss_func is given; or every "
            "token is clipped or saturated: compare old_log_probs with those of `samples`"
        )
    return _wrong_rows(step) or _wrong_tokens(step) or _wrong_softmax(step) or _wrong_coefficients(step)


def _wrong_rows(step: Step) -> str:
    expected, extras, trained = _trained_rows(step)
    missing = expected - trained
    places = [[place for place, bit in enumerate(sample.loss_mask) if bit] for sample in step.samples]
    ends = {
        name: {(number, of_sample[end]) for number, of_sample in enumerate(places) if of_sample} & expected
        for name, end in (("first", 0), ("last", -1))
    }
    for name, where in (("first", "late"), ("last", "early")):
        if missing and missing == ends[name] and missing != expected:
            also = f", and {extras} rows that predict none have one" if extras else ""
            what = f"the mask is one row {where}" if extras else "the mask is one token short"
            return (
                f"{what}: the {name} token of each response has no gradient{also}. A token is predicted by the row before it: "
                "set the mask there"
            )
    if extras:
        return (
            f"the mask has {extras} rows too many, of prompts, padding or masked tokens: they have a gradient, and predict no "
            "unmasked token of `samples`. Set it where places_of names an unmasked token alone"
        )
    return ""


def _trained_rows(step: Step) -> tuple[set[tuple[int, int]], int, set[tuple[int, int]]]:
    """The unmasked tokens that must be trained, the number of rows beside them that are, and the tokens that are: by the mask of
    the loop's loss, else by their gradient."""
    unmasked = {(row.sample, row.place) for row in step.tokens}
    placed = {(row.sample, row.place) for row in step.rows if row.place >= 0 and row.size}
    others = sum(bool(row.size) for row in step.rows if row.place < 0)
    extras = others + len(placed - unmasked)
    if step.given is not None:
        masked = {(token.sample, token.place) for token in step.given.tokens if token.is_trained}
        if placed <= masked and others <= step.given.others:
            return unmasked, extras, masked & unmasked
    # A sample that is clipped whole has no gradient, and says nothing of its mask.
    shown = {number for number, _ in placed}
    expected = {(row.sample, row.place) for row in step.tokens if step.is_expected(row) and row.sample in shown}
    return expected, extras, placed & unmasked


def _wrong_tokens(step: Step) -> str:
    largest = max(row.size for row in step.tokens)
    wrong = [
        row
        for row in step.tokens
        if row.beside_both > step.precision.fit  # a clipped token may have the gradient of its entropy alone
        and row.size > SMALLEST_ROW * largest
        and row.label != _label(step.samples[row.sample], row.place)
    ]
    if not wrong:
        return ""
    for moved, words in ((-1, "are not moved by one: each row trains the token that it reads"), (1, "are moved by two")):
        if all(row.label == _neighbour(step.samples[row.sample], row.place + moved, row.label) for row in wrong):
            return f"the labels {words}. A row predicts the next token: take tokens.roll(-1) along the sequence"
    row = wrong[0]
    return (
        f"the labels of {len(wrong)} rows are of other rows: token {row.place} of sample {row.sample} is "
        f"{_label(step.samples[row.sample], row.place)}, and its row trains {row.label}. Take labels and logits in one order"
    )


def _neighbour(sample: StepSample, place: int, otherwise: int) -> int:
    number = len(sample.tokens) - len(sample.loss_mask) + place
    return sample.tokens[number] if number < len(sample.tokens) else otherwise  # behind the sample is padding


def _wrong_softmax(step: Step) -> str:
    largest = max(row.size for row in step.tokens)
    wrong = [row for row in step.tokens if row.residual > step.precision.fit and row.size > SMALLEST_ROW * largest]
    if not wrong:
        return ""
    if any(row.trains_padding for row in wrong):
        return "padded columns of the vocabulary take part in the softmax: pass vocab_size to the loss"
    fitting = sorted(row.temperature for row in wrong if math.isfinite(row.temperature))
    common, right = fitting[len(fitting) // 2] if fitting else math.nan, step.config.policy_temperature
    # With an entropy term a row of small logits nearly fits at a second temperature.
    if sum(abs(temperature - common) < step.precision.fit * common for temperature in fitting) > len(fitting) / 2:
        return (
            f"the log-probabilities are at temperature {common:.3g}, and config says {right:g}: pass "
            f"policy_temperature={right:g} to the loss, or {common:.3g} to config"
        )
    if all(row.beside_both <= step.precision.fit for row in wrong):
        return "the loss has an entropy term, and config has none: set entropy_coefficient in config, or remove the term"
    return (
        "the log-probabilities are no log_softmax of these logits, as where a tensor-parallel rank takes its shard for the whole "
        "vocabulary: use the losses of megatron_rl, or vocab_parallel_log_probs"
    )


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """Of each unmasked token, c and e: [2 tokens], each times the length of its direction."""

    values: Tensor

    @classmethod
    def found(cls, step: Step) -> _Coefficients:
        return cls(torch.tensor([[row.log_prob, row.entropy] for row in step.tokens], dtype=torch.float64).T / step.delivered)

    @classmethod
    def of(cls, step: Step, by_log_prob: Sequence[Sequence[float]], by_entropy: Sequence[Sequence[float]]) -> _Coefficients:
        rows = [
            [row.length * by_log_prob[row.sample][row.place], row.length_of_entropy * by_entropy[row.sample][row.place]]
            for row in step.tokens
        ]
        return cls(torch.tensor(rows, dtype=torch.float64).T)

    def is_multiple_of(self, other: _Coefficients, tolerance: float) -> bool:
        return bool((self.values - self.factor_of(other) * other.values).norm() <= tolerance * self.values.norm())

    def factor_of(self, other: _Coefficients) -> float:
        return float((self.values * other.values).sum() / other.values.square().sum().clamp(min=1e-300))


def _wrong_coefficients(step: Step) -> str:
    found = _Coefficients.found(step)
    right = _Coefficients.of(step, step.right.by_log_prob, step.right.by_entropy)
    match = step.precision.match
    if found.is_multiple_of(right, match):
        return (
            "the gradient by the logits is right, and that of the parameters is not: look at what the loop does between the "
            "model's forward and the optimiser"
        )
    if edge := _on_an_edge(step, found, right):
        return edge
    if other := given_problem(step.given, step.samples, step.known, step.config):
        return other
    if lost := _lost_samples(step, found, right):
        return lost
    explains = [*itertools.islice((mistake for mistake in _mistakes(step) if mistake.explains(step, found)), 2)]
    if explains:
        cures = dict.fromkeys(mistake.cure for mistake in explains)
        return f"{', or '.join(mistake.words for mistake in explains)}: {'; '.join(cures)}"
    return _wrong_clip(step, found, right) or _of_one_factor(step, found, right) or _another_derivative(step, found, right)


def _on_an_edge(step: Step, found: _Coefficients, right: _Coefficients) -> str:
    """Where the gradient is right but for tokens that rounding puts on one side of a clip or on the other."""
    on_edge = edge_tokens(step.samples, step.known, step.config)
    kept = torch.tensor([(row.sample, row.place) not in on_edge for row in step.tokens])
    if not on_edge or (found.values - right.values)[:, kept].norm() > step.precision.match * right.values[:, kept].norm():
        return ""
    numbers = sorted({number for number, _ in on_edge})
    return (
        f"the gradient is right but for {len(on_edge)} tokens of {len(numbers)} samples, as sample {numbers[0]}, whose ratio lies "
        "within rounding of the clip: float32 may clip them or not. Give the loop and `samples` old log-probabilities that are "
        "farther from it"
    )


Derivatives = tuple[list[list[float]], list[list[float]]]  # by log-probability and by entropy; of each sample, by place
Settings = Mapping[str, Any]  # fields of PolicyLossConfig


@dataclass(frozen=True, slots=True)
class _Mistake:
    """The step with other settings or samples. key: of the part of a row, where each part is as a step by itself."""

    words: str
    cure: str
    settings: Settings = field(default_factory=dict)
    samples: Sequence[StepSample] | None = None
    key: Callable[[Row], object] | None = None
    end: int | None = None  # 0 or -1: the first or last token of each response is not compared

    def explains(self, step: Step, found: _Coefficients) -> bool:
        try:
            config = replace(step.config, **self.settings)
            if self.key is not None:
                derivatives = _of_parts(step, self.key, config)
            else:
                dense = dense_step(self.samples or step.samples, step.known, config)
                derivatives = dense.by_log_prob, dense.by_entropy
        except (ConfigError, DataError):  # the step cannot have it, as a loss that needs what the samples do not have
            return False
        ends = (
            {}
            if self.end is None
            else {row.sample: row.place for row in sorted(step.tokens, key=lambda row: row.place, reverse=self.end == 0)}
        )
        kept = torch.tensor([ends.get(row.sample) != row.place for row in step.tokens])
        expected = _Coefficients.of(step, *derivatives)
        return _Coefficients(found.values * kept).is_multiple_of(_Coefficients(expected.values * kept), step.precision.match)


def _lost_samples(step: Step, found: _Coefficients, right: _Coefficients) -> str:
    is_lost = {row.sample for row in step.tokens if step.is_expected(row)} - {row.sample for row in step.tokens if row.size}
    kept = torch.tensor([row.sample not in is_lost for row in step.tokens])
    if not is_lost or not found.is_multiple_of(_Coefficients(right.values * kept), step.precision.match):
        return ""
    parts = {(row.rank, row.microbatch) for row in step.tokens if row.sample in is_lost}
    is_whole = not parts & {
        (row.rank, row.microbatch) for row in step.tokens if row.sample not in is_lost and step.is_expected(row)
    }
    if not is_whole and get_policy_loss(step.config.policy_loss).level != "token":
        return ""  # a ratio of the sample clips all its tokens at once
    where = ", ".join(f"{microbatch} of rank {rank}" for rank, microbatch in sorted(parts)[:2]) if is_whole else ""
    return (
        f"a part of the step is lost: {len(is_lost)} of {len(step.samples)} samples have no gradient, as sample {min(is_lost)}"
        f"{f' in micro-batch {where}' if where else ''}. Give each sample of the step to one micro-batch"
    )


def _mistakes(step: Step) -> Iterator[_Mistake]:
    """The usual ones first."""
    config, samples = step.config, step.samples
    weigh = f"weigh with sample_token_weights({config.loss_aggregation!r}, ...)"
    has_rollouts = rollout_ids_of(samples) is not None
    # row_mean is sample_mean where each sample is a rollout.
    known = [name for name in AGGREGATIONS if has_rollouts or not get_loss_aggregation(name).needs_rows]
    others = {name: _aggregated(name) for name in known if name != config.loss_aggregation}
    for name, settings in others.items():
        yield _Mistake(f"tokens weigh as under {name}", weigh, settings)
    alone = [replace(sample, prompt_id=str(number)) for number, sample in enumerate(samples)]
    prompts = "give count_step the prompt id of each sample, equal on all ranks"
    yield _Mistake("tokens weigh as if each sample were a prompt of its own", prompts, samples=alone)
    if has_rollouts:
        rows = [replace(sample, rollout_id=None) for sample in samples]
        cure = "give count_step the rollout id of each sample, equal on all ranks"
        yield _Mistake("tokens weigh as if each sample were a rollout of its own", cure, samples=rows)
    for part, key in (("micro-batch", lambda row: (row.rank, row.microbatch)), ("rank", lambda row: row.rank)):
        for name, settings in {config.loss_aggregation: {}, **others}.items():
            yield _Mistake(f"tokens weigh as under {name} of each {part} alone", COUNT, settings, key=key)
    yield from _wrong_ratios(step)
    opposite = [replace(sample, advantage=-sample.advantage) for sample in samples]
    yield _Mistake("the advantages have the other sign", "give the loss those of `samples`", samples=opposite)
    if config.kl_coefficient:
        term = f"add it with kl_coefficient={config.kl_coefficient:g}, kl_estimator={config.kl_estimator!r}"
        yield _Mistake("the KL term is missing", term, {"kl_coefficient": 0.0})
        for name in (name for name in kl_estimator_names() if name != config.kl_estimator):
            yield _Mistake(f"the KL term is that of {name}", term, {"kl_estimator": name})
    if config.entropy_coefficient:
        term = f"add it with entropy_coefficient={config.entropy_coefficient:g}"
        yield _Mistake("the entropy term is missing", term, {"entropy_coefficient": 0.0})
        yield _Mistake("the entropy term has the other sign", term, {"entropy_coefficient": -config.entropy_coefficient})
    if config.importance_correction != NO_CORRECTION or config.off_policy_sequence_delta is not None:
        none = {"importance_correction": NO_CORRECTION, "off_policy_sequence_delta": None}
        yield _Mistake("the correction is missing", "pass correction= and rollout_log_probs= to the loss", none)


def _aggregated(name: str) -> Settings:
    return {"loss_aggregation": name, "loss_aggregation_divisor": DIVISOR if name == "constant" else None}


def _wrong_ratios(step: Step) -> Iterator[_Mistake]:
    config, samples = step.config, step.samples
    if any(sample.old_log_probs is not None for sample in samples):
        on_policy = [replace(sample, old_log_probs=None) for sample in samples]
        yield _Mistake("every ratio is 1", "pass the old log-probabilities of the rollout to the loss", samples=on_policy)
        for moved, words, end in ((1, "late", 0), (-1, "early", -1)):
            shifted = [
                replace(sample, old_log_probs=None if (old := sample.old_log_probs) is None else old[-moved:] + old[:-moved])
                for sample in samples
            ]
            cure = "the log-probability of a token lies at the row that predicts it"
            yield _Mistake(f"the old log-probabilities are one token {words}", cure, samples=shifted, end=end)
        swapped = [replace(one, old_log_probs=on_the_other_side(one, new)) for one, new in zip(samples, step.known, strict=True)]
        yield _Mistake("old and new are swapped in the ratio", "it is log_probs - old_log_probs", samples=swapped)
    bounds = get_policy_loss(config.policy_loss).clip_bounds(config.clip_ratio_low, config.clip_ratio_high)
    if bounds is not None:
        cure = f"pass clip_ratio_low={bounds[0]:g}, clip_ratio_high={bounds[1]:g} to the loss"
        yield _Mistake("the ratio has no clip", cure, {"clip_ratio_low": 1 - 1e-9, "clip_ratio_high": 1e9})
        yield _Mistake("the clip is the default", cure, {"clip_ratio_low": None, "clip_ratio_high": None})
    if config.loss_parameters:
        cure = f"pass loss_parameters={dict(config.loss_parameters)} to it"
        yield _Mistake("the loss has its default parameters", cure, {"loss_parameters": {}})
    for name in (name for name in CLIPS if name != config.policy_loss):
        other: Settings = {"policy_loss": name, "clip_ratio_low": None, "clip_ratio_high": None, "loss_parameters": {}}
        yield _Mistake(f"the loss is {name}", f"compute {config.policy_loss}", other)


def _of_parts(step: Step, key: Callable[[Row], object], config: PolicyLossConfig) -> Derivatives:
    """With the counts of each part's own samples and tokens."""
    by_log_prob, by_entropy = ([[0.0] * len(sample.loss_mask) for sample in step.samples] for _ in range(2))
    parts: dict[object, dict[int, set[int]]] = {}
    for row in (row for row in step.rows if row.place >= 0):
        parts.setdefault(key(row), {}).setdefault(row.sample, set()).add(row.place)
    for places in parts.values():
        own = [
            replace(sample, loss_mask=[bit * (place in of_sample) for place, bit in enumerate(sample.loss_mask)])
            for sample, of_sample in ((step.samples[number], of_sample) for number, of_sample in places.items())
        ]
        if not any(any(sample.loss_mask) for sample in own):
            continue
        dense = dense_step(own, [step.known[number] for number in places], config)
        for whole, of_part in ((by_log_prob, dense.by_log_prob), (by_entropy, dense.by_entropy)):
            for number, values in zip(places, of_part, strict=True):
                whole[number] = [before + value for before, value in zip(whole[number], values, strict=True)]
    return by_log_prob, by_entropy


def _wrong_clip(step: Step, found: _Coefficients, right: _Coefficients) -> str:
    """Where the tokens that have a gradient in both have the right one."""
    is_both = ((found.values[0] != 0) & (right.values[0] != 0)).double()
    if not _Coefficients(found.values * is_both).is_multiple_of(_Coefficients(right.values * is_both), step.precision.match):
        return ""
    clipped, free = (int(((one.values[0] == 0) & (other.values[0] != 0)).sum()) for one, other in ((found, right), (right, found)))
    return (
        f"the clip is another: {clipped} tokens have no gradient that must have one, and {free} have one that must have none. Pass "
        "the loss the clip and `loss_parameters` of config, and `samples` the old log-probabilities of the loss"
    )


def _of_one_factor(step: Step, found: _Coefficients, right: _Coefficients) -> str:
    """Where the tokens of a rank, micro-batch, prompt or sample are off by one factor, and those of another by another."""
    is_both = (found.values[0] != 0) & (right.values[0] != 0)
    first, second = found.values[0, is_both], right.values[0, is_both]
    rows = [row for row, bit in zip(step.tokens, is_both.tolist(), strict=True) if bit]
    kinds: tuple[tuple[str, Callable[[Row], object], str], ...] = (
        ("rank", lambda row: row.rank, COUNT),
        ("micro-batch", lambda row: (row.rank, row.microbatch), COUNT),
        ("prompt", lambda row: step.samples[row.sample].prompt_id, "look at the counts and rewards of prompts"),
        ("sample", lambda row: row.sample, ""),
    )
    for name, key, cure in kinds:
        keys = list(dict.fromkeys(map(key, rows)))
        index = torch.tensor([keys.index(key(row)) for row in rows])
        sums = [torch.zeros(len(keys), dtype=torch.float64).index_add(0, index, values) for values in (first * second, second**2)]
        factors = sums[0] / sums[1]
        if len(keys) == 1 or (first - factors[index] * second).norm() > step.precision.match * first.norm():
            continue
        shown = ", ".join(f"{factor:.3g}" for factor in factors[:4].tolist())
        if name == "sample":
            return _wrong_advantages(step, {int(str(key)): factor for key, factor in zip(keys, factors.tolist(), strict=True)})
        return f"the tokens of each {name} are off by a factor of its own ({shown} ...): {cure}"
    return ""


def _wrong_advantages(step: Step, factors: dict[int, float]) -> str:
    """factors: of each sample's coefficients, found over right."""
    given = {number: step.samples[number].advantage for number in factors}
    found = {number: factor * given[number] for number, factor in factors.items()}
    parts = {row.sample: (row.rank, row.microbatch) for row in step.tokens}
    if words := advantages_in_words(step.samples, given, found, parts, step.precision.fit):
        return words
    number = max(factors, key=lambda number: abs(factors[number] - 1))
    what, compare = "its advantage or its weight", "advantages and token weights"
    if compared_tokens(step.given, step.samples, step.known):
        what, compare = "its weight", "token weights"
    elif get_policy_loss(step.config.policy_loss).level != "token":  # the gradient shows their product alone
        what, compare = "its advantage, its weight or its ratio", "advantages, token weights and old log-probabilities"
    return (
        f"each sample's tokens are off by a factor of their own, {factors[number]:.3g} in sample {number}: {what} is another. "
        f"Compare {compare} with those of `samples` and config"
    )


def _specification(config: PolicyLossConfig) -> str:
    """What the derivative of the loss is read from."""
    loss = get_policy_loss(config.policy_loss)
    if is_built_in(loss.name):
        return "ratio, clip and loss with docs/losses.md"
    numbers = ", ".join(f"{name}={value:g}" for name, value in loss.resolve_parameters(config.loss_parameters).items())
    return f"with the function {config.policy_loss}" + f" at {numbers}, the loss_parameters of config" * bool(numbers)


def _another_derivative(step: Step, found: _Coefficients, right: _Coefficients) -> str:
    worst = int((found.values - right.values).norm(dim=0).argmax())
    row = step.tokens[worst]
    now, then = (float(coefficients.values[0, worst]) / row.length for coefficients in (found, right))
    return (
        f"the loss has another derivative: by the log-probability of token {row.place} of sample {row.sample} it is {now:.4g} of "
        f"the step's loss, and must be {then:.4g}. Compare {_specification(step.config)}"
    )
