"""The rows of the logits of a step: their tokens, and what the gradient of a loop's loss by each says of token and temperature.

A loss of log-probabilities and entropies has this gradient by a row z of logits, with p = softmax(z / temperature):

    c (onehot(label) - p) / temperature - e p (log p + entropy) / temperature

Without e the columns beside the label are proportional to p, so their logarithms are a line over z, of slope 1 / temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import ParallelGroups, all_gather_stack
from megatron_rl.testing import oracle
from megatron_rl.testing.layout_step import StepSample

# A row with less than this share of the largest gradient says nothing of its token: 1 - p is rounding there.
SMALLEST_ROW = 1e-3
TINY = 1e-300
# Of each sample of the step, by place in its response: log-probability and entropy.
KnownTokens = list[dict[int, tuple[float, float]]]
# By the log-probability and by the entropy of each token: of each sample, by place.
Derivatives = tuple[list[list[float]], list[list[float]]]


class Row(NamedTuple):
    """What the loop's gradient says of one row of the logits. sample, place: -1 for a row that predicts no token of a response."""

    part: tuple[int, int]  # rank of dp and cp, and micro-batch
    sample: int
    place: int
    size: float  # of the gradient
    right_size: float = 0.0  # of the right one
    product: float = 0.0  # of both
    trained: float = -1  # the token with the largest gradient
    beside_one: float = 0.0  # what c at the right token and temperature does not explain, over size
    beside_both: float = 0.0  # and what c and e do not
    temperature: float = math.nan  # at which c alone fits
    padding: float = 0.0  # size of the gradient of columns beyond the vocabulary

    @property
    def token(self) -> tuple[int, int]:
        return self.sample, self.place


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The R rows of this rank that predict a token of a response."""

    rows: Tensor  # [R] int64, of the logits
    places: list[tuple[int, int]]  # R numbers of samples, and places in their responses
    logits: Tensor  # [R, V] float64, a leaf
    tokens: oracle.Scores  # [R] each, with graph
    own_logits: Tensor  # [rows, V_tp], without graph
    columns: slice  # of the whole vocabulary, those that this rank's logits hold
    num_tokens: int  # unmasked

    @classmethod
    def of(
        cls,
        logits: Tensor,  # [rows, V_tp], or [rows, V] where the output layer gathers
        places: Tensor,  # [rows, 2] int64
        samples: Sequence[StepSample],
        config: PolicyLossConfig,
        groups: ParallelGroups,
        vocab_size: int,
    ) -> Microbatch:
        """Communication: an all-gather of the logits over tp, unless they are whole."""
        if places.shape != (len(logits), 2):
            raise ConfigError(
                f"check_step: places_of returned shape {tuple(places.shape)} for {len(logits)} rows of logits: it must be "
                f"[{len(logits)}, 2], the number of the sample and the place in its response for each row"
            )
        width = logits.shape[1]
        start = 0 if width >= vocab_size else groups.tp.rank() * width
        whole = whole_columns(logits, vocab_size, groups)
        rows = (places[:, 0] >= 0).nonzero()[:, 0].to(logits.device)
        named = [(int(sample), int(place)) for sample, place in places[places[:, 0] >= 0].tolist()]
        for sample, place in named:
            if sample >= len(samples) or not 0 <= place < len(samples[sample].loss_mask):
                raise ConfigError(f"check_step: places_of names token {place} of sample {sample}, which `samples` does not have")
        leaf = whole[rows, :vocab_size].double().requires_grad_()
        settings = oracle.DenseSettings(temperature=config.policy_temperature)
        tokens = oracle.scores_of(leaf, [label_of(samples, *place) for place in named], settings)
        num_tokens = sum(samples[sample].loss_mask[place] for sample, place in named)
        return cls(rows, named, leaf, tokens, logits, slice(start, min(start + width, vocab_size)), num_tokens)

    def target(self, derivatives: Derivatives) -> Tensor:  # [rows, V_tp] float32: of the step's loss by this rank's logits
        log_probs, entropy = (
            self.logits.new_tensor([of_samples[sample][place] for sample, place in self.places]) for of_samples in derivatives
        )
        loss = (self.tokens.log_probs * log_probs).sum() + (self.tokens.entropy * entropy).sum()
        (gradient,) = torch.autograd.grad(loss, self.logits, retain_graph=True)
        own = gradient[:, self.columns].float()
        target = torch.zeros_like(self.own_logits, dtype=torch.float32)
        target[self.rows, : own.shape[1]] = own
        return target


def gather_tokens(microbatches: Sequence[Microbatch], samples: Sequence[StepSample], groups: ParallelGroups) -> KnownTokens:
    """Equal on every rank. Communication: one all-gather of objects over all ranks.

    Raises ConfigError, on every rank, for an unmasked token in no row of the step and for one in several.
    """

    def own() -> list[tuple[tuple[int, int], float, float]]:
        if groups.tp.rank():  # all ranks of tp hold the same rows
            return []
        columns = ((one.places, one.tokens.log_probs.tolist(), one.tokens.entropy.tolist()) for one in microbatches)
        return [token for of_one in columns for token in zip(*of_one, strict=True)]

    known: KnownTokens = [{} for _ in samples]
    problems = []
    for (number, place), log_prob, entropy in (token for of_rank in on_all_ranks(own) for token in of_rank):
        if place in known[number]:
            problems.append(f"token {place} of sample {number} is in more than one row of the step")
        known[number][place] = (log_prob, entropy)
    for number, (sample, tokens) in enumerate(zip(samples, known, strict=True)):
        missing = [place for place, bit in enumerate(sample.loss_mask) if bit and place not in tokens]
        if missing:
            problems.append(
                f"token {missing[0]} of sample {number} is in no row of the step: {len(missing)} of its tokens are missing"
            )
    if problems:
        raise ConfigError([f"check_step: by places_of, {problem}" for problem in problems[:5]])
    return known


def whole_columns(shard: Tensor, vocab_size: int, groups: ParallelGroups) -> Tensor:  # [rows, V_tp or V] -> [rows, V], with padding
    """Communication: an all-gather over tp, unless the columns are whole."""
    return shard if shard.shape[1] >= vocab_size else torch.cat(list(all_gather_stack(shard.contiguous(), groups.tp)), 1)


def rows_of(
    microbatches: Sequence[Microbatch],
    gradients: Sequence[Tensor],  # of the loop's loss by the logits, as Microbatch.target
    rights: Sequence[Tensor],  # the same, as they must be but for one factor
    samples: Sequence[StepSample],
    config: PolicyLossConfig,
    vocab_size: int,
    groups: ParallelGroups,
    fit: float,
) -> list[Row]:
    """The rows of the whole step, equal on every rank. fit: how well a row must fit, relative to it.

    Communication: an all-gather of the gradients over tp, and one of objects over all ranks.
    """

    def own() -> list[Row]:
        found: list[Row] = []
        for number, (one, *pair) in enumerate(zip(microbatches, gradients, rights, strict=True)):
            whole, right = (whole_columns(gradient, vocab_size, groups).double() for gradient in pair)
            part, is_placed = (groups.dp_cp.rank(), number), torch.zeros(len(whole), dtype=torch.bool, device=whole.device)
            is_placed[one.rows] = True
            found += [Row(part, -1, -1, size) for size in whole[~is_placed].norm(dim=1).tolist() if size]
            labels = torch.tensor([label_of(samples, *place) for place in one.places], device=whole.device).long()
            columns = _read(
                one.logits.detach(), whole[one.rows], right[one.rows], labels, config.policy_temperature, vocab_size, fit
            )
            found += [Row(part, *place, *of_row) for place, of_row in zip(one.places, columns.tolist(), strict=True)]
        return [] if groups.tp.rank() else found  # all ranks of tp have the same rows

    return [row for of_rank in on_all_ranks(own) for row in of_rank]


def label_of(samples: Sequence[StepSample], number: int, place: int) -> int:
    """-1 behind the sample."""
    position = len(samples[number].tokens) - len(samples[number].loss_mask) + place
    return samples[number].tokens[position] if position < len(samples[number].tokens) else -1


def _read(
    logits: Tensor, whole: Tensor, right: Tensor, labels: Tensor, temperature: float, vocab_size: int, fit: float
) -> Tensor:  # [R, fields of Row from `size` on]
    gradient, sizes = whole[:, :vocab_size], [whole.norm(dim=1), right.norm(dim=1), (whole * right).sum(1)]
    beside = _beside(logits / temperature, gradient, labels)
    # A line through the other columns, by least squares.
    is_other = torch.ones_like(logits).scatter_(1, labels[:, None], 0.0)
    x, y = (values * is_other for values in (logits, gradient.abs().clamp(min=TINY).log()))
    x, y = (is_other * (values - values.sum(1, keepdim=True) / (vocab_size - 1)) for values in (x, y))
    own = x.square().sum(1) / (x * y).sum(1)
    fits = (own > 0) & (_beside(logits / own.clamp(min=1e-3, max=1e3)[:, None], gradient, labels)[0] < fit)
    own = torch.where(fits, own, math.nan)
    padding = whole[:, vocab_size:].norm(dim=1)
    return torch.stack([*sizes, gradient.abs().argmax(1).double(), *beside, own, padding], 1)


def _beside(logits: Tensor, gradient: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """beside_one and beside_both of Row, by least squares. logits: over the temperature."""
    log_p = torch.log_softmax(logits, 1)
    p = log_p.exp()
    of_label = torch.nn.functional.one_hot(labels, logits.shape[1]).to(p) - p
    of_entropy = -p * (log_p - (p * log_p).sum(1, keepdim=True))
    size = gradient.norm(dim=1).clamp(min=TINY)
    rests = []
    for direction in (of_label, of_entropy - _along(of_entropy, of_label)):
        gradient = gradient - _along(gradient, direction)
        rests.append(gradient.norm(dim=1) / size)
    return rests[0], rests[1]


def _along(values: Tensor, direction: Tensor) -> Tensor:
    """The part of each row that lies in the direction of the other's."""
    return direction * ((values * direction).sum(1) / direction.square().sum(1).clamp(min=TINY))[:, None]


def row_problem(tokens: Sequence[Row], samples: Sequence[StepSample], config: PolicyLossConfig, fit: float) -> str:
    """Which token the rows train, and at which temperature, where that is wrong. tokens: the rows of unmasked tokens."""
    largest = max((row.size for row in tokens), default=0.0)
    tokens = [row for row in tokens if row.size > SMALLEST_ROW * largest]
    # A clipped token may have the gradient of its entropy alone.
    others = [row for row in tokens if row.beside_both > fit and row.trained != label_of(samples, row.sample, row.place)]
    for moved, words in ((-1, "are not moved by one: each row trains the token that it reads"), (1, "are moved by two")):
        if others and all(label_of(samples, row.sample, row.place + moved) in (row.trained, -1) for row in others):
            return f"the labels {words}. A row predicts the next token: take tokens.roll(-1) along the sequence"
    if others:
        row = others[0]
        return (
            f"the labels of {len(others)} rows are of other rows: token {row.place} of sample {row.sample} is "
            f"{label_of(samples, row.sample, row.place)}, and its row trains {row.trained:g}. Take labels and logits in one order"
        )
    wrong = [row for row in tokens if (row.beside_both if config.entropy_coefficient else row.beside_one) > fit]
    if not wrong:
        return ""
    if any(row.padding for row in wrong):
        return "padded columns of the vocabulary take part in the softmax: pass vocab_size to the loss"
    fitting = sorted(row.temperature for row in wrong if math.isfinite(row.temperature))
    right, common = config.policy_temperature, fitting[len(fitting) // 2] if fitting else math.nan
    if sum(abs(temperature - common) < fit * common for temperature in fitting) > len(wrong) / 2:
        return (
            f"the log-probabilities are at temperature {common:.3g}, and config says {right:g}: pass "
            f"policy_temperature={right:g} to the loss, or {common:.3g} to config"
        )
    if all(row.beside_both <= fit for row in wrong):
        return "the loss has an entropy term, and config has none: set entropy_coefficient in config, or remove the term"
    return (
        "the log-probabilities are no log_softmax of these logits at the temperature of config: use the losses of megatron_rl, or "
        "vocab_parallel_log_probs"
    )
