"""The rows of the logits of a step: their tokens, and what the gradient of a loop's loss by each says of token and temperature.

A loss of log-probabilities has this gradient by a row z of logits, with p = softmax(z / temperature):

    c (onehot(label) - p) / temperature

So the label's column alone has the sign of c, and the logarithms of the others are a line over z, of slope 1 / temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import ParallelGroups, all_gather_stack
from megatron_rl.testing import oracle
from megatron_rl.testing.layout_step import StepSample

# A row with less than this share of the largest gradient says nothing of its token: 1 - p is rounding there.
SMALLEST_ROW = 1e-3
TINY = 1e-300
# By the log-probability and by the entropy of each token: of each sample, [response_length] float64.
Derivatives = tuple[Sequence[Tensor], Sequence[Tensor]]


class Row(NamedTuple):
    """A row of the logits, and the loop's gradient g by it. sample, place: -1 for a row that predicts no token of a response. d and
    h are the gradients of the token's log-probability and entropy by the row."""

    part: tuple[int, int]  # rank of dp and cp, and micro-batch
    sample: int
    place: int
    gg: float  # products
    gd: float = 0.0
    gh: float = 0.0
    dd: float = 0.0
    dh: float = 0.0
    hh: float = 0.0
    log_prob: float = 0.0
    entropy: float = 0.0
    trained: float = -1  # the token whose column alone has its sign; -1 where none does
    temperature: float = 1.0
    padding: float = 0.0  # size of the gradient of columns beyond the vocabulary

    @property
    def token(self) -> tuple[int, int]:
        return self.sample, self.place

    def products_with(self, derivatives: Derivatives) -> tuple[float, float, float]:
        """|g|^2, |other|^2 and g x other for the other gradient c d + e h; 0 where it is not known."""
        c, e = (float(sample_values[self.sample][self.place]) for sample_values in derivatives)
        if math.isnan(c) or math.isnan(e):
            return 0.0, 0.0, 0.0
        return self.gg, c * c * self.dd + 2 * c * e * self.dh + e * e * self.hh, c * self.gd + e * self.gh


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The R rows of this rank that predict a token of a response."""

    rows: Tensor  # [R] int64, of the logits
    places: list[tuple[int, int]]  # R numbers of samples, and places in their responses
    log_prob_gradients: Tensor  # [R, V] float64, by the logits
    entropy_gradients: Tensor  # [R, V] float64
    own_logits: Tensor  # [rows, V_tp]
    columns: slice  # of the whole vocabulary, those that this rank's logits hold
    num_tokens: int  # unmasked

    def target(self, derivatives: Derivatives) -> Tensor:  # [rows, V_tp] float32: of the step's loss by this rank's logits
        log_probs, entropy = (
            self.log_prob_gradients.new_tensor([sample_values[sample][place] for sample, place in self.places])[:, None]
            for sample_values in derivatives
        )
        own = (log_probs * self.log_prob_gradients + entropy * self.entropy_gradients)[:, self.columns].float()
        target = torch.zeros_like(self.own_logits, dtype=torch.float32)
        target[self.rows, : own.shape[1]] = own
        return target


def read_microbatch(
    part: tuple[int, int],
    logits: Tensor,  # [rows, V_tp], or [rows, V] where the output layer gathers
    gradient: Tensor,  # of the loop's loss by the logits
    places: Tensor,  # [rows, 2] int64
    samples: Sequence[StepSample],
    config: PolicyLossConfig,
    groups: ParallelGroups,
    vocab_size: int,
) -> tuple[Microbatch, list[Row]]:
    """Communication: an all-gather of logits and gradient over tp, unless they are whole."""
    if places.shape != (len(logits), 2):
        raise ConfigError(f"check_step: places_of returned shape {tuple(places.shape)}: it must be [{len(logits)}, 2]")
    named = [(sample, place) for sample, place in places.tolist() if sample >= 0]
    for sample, place in named:
        if sample >= len(samples) or not 0 <= place < len(samples[sample].loss_mask):
            raise ConfigError(f"check_step: places_of names token {place} of sample {sample}, which `samples` does not have")
    is_placed = (places[:, 0] >= 0).to(logits.device)
    shards, is_whole = [logits, gradient], logits.shape[1] >= vocab_size
    if not is_whole:
        shards = [torch.cat(list(all_gather_stack(shard.contiguous(), groups.tp)), 1) for shard in shards]
    whole, found = (columns.double() for columns in shards)
    leaf, padding = whole[is_placed, :vocab_size].requires_grad_(), found[is_placed, vocab_size:].norm(dim=1)
    settings = oracle.DenseSettings(temperature=config.policy_temperature)
    tokens = oracle.scores_of(leaf, [label_of(samples, *place) for place in named], settings)
    by_log_prob, by_entropy = (
        torch.autograd.grad(values.sum(), leaf, retain_graph=True)[0] for values in (tokens.log_probs, tokens.entropy)
    )
    own = found[is_placed, :vocab_size]
    products = [(one * other).sum(1) for one, other in combinations_with_replacement((own, by_log_prob, by_entropy), 2)]
    columns = [*products, tokens.log_probs, tokens.entropy, *_token_and_temperature(leaf.detach(), own), padding]
    values = torch.stack([column.detach().double() for column in columns], 1).tolist()
    rows = [Row(part, *place, *row_values) for place, row_values in zip(named, values, strict=True)]
    rows += [Row(part, -1, -1, square) for square in found[~is_placed].square().sum(1).tolist() if square]
    start = 0 if is_whole else groups.tp.rank() * logits.shape[1]
    microbatch = Microbatch(
        rows=is_placed.nonzero()[:, 0],
        places=named,
        log_prob_gradients=by_log_prob,
        entropy_gradients=by_entropy,
        own_logits=logits,
        columns=slice(start, min(start + logits.shape[1], vocab_size)),
        num_tokens=sum(samples[sample].loss_mask[place] for sample, place in named),
    )
    return microbatch, rows


def label_of(samples: Sequence[StepSample], number: int, place: int) -> int:
    return samples[number].tokens[place - len(samples[number].loss_mask)]


def _token_and_temperature(logits: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:  # [R, V] -> [R], as in Row
    largest = gradient.abs().argmax(1, keepdim=True)
    is_alone = (gradient * gradient.gather(1, largest) > 0).sum(1) == 1
    # A line through the other columns, by least squares.
    is_other = torch.ones_like(logits).scatter_(1, largest, 0.0)
    x, y = (is_other * values for values in (logits, gradient.abs().clamp(min=TINY).log()))
    x, y = (is_other * (values - values.sum(1, keepdim=True) / is_other.sum(1, keepdim=True)) for values in (x, y))
    return torch.where(is_alone, largest[:, 0], -1), x.square().sum(1) / (x * y).sum(1)


def known_tokens(rows: Sequence[Row], samples: Sequence[StepSample]) -> list[Tensor]:  # of each sample [response_length, 2] float64
    """Log-probability and entropy of each token. A masked token that no row predicts has 0, which nothing reads.

    Raises: ConfigError for an unmasked token in no row of the step, and for a token in several.
    """
    known = [torch.zeros(len(sample.loss_mask), 2, dtype=torch.float64) for sample in samples]
    num_rows = [[0] * len(sample.loss_mask) for sample in samples]
    for row in (row for row in rows if row.place >= 0):
        known[row.sample][row.place] = torch.tensor([row.log_prob, row.entropy])
        num_rows[row.sample][row.place] += 1
    for number, (sample, counts) in enumerate(zip(samples, num_rows, strict=True)):
        for place, (bit, count) in enumerate(zip(sample.loss_mask, counts, strict=True)):
            if count > 1 or count < bit:
                raise ConfigError(
                    f"check_step: by places_of, token {place} of sample {number} is in {count} rows of the step: it must be in one"
                )
    return known


def row_problem(tokens: Sequence[Row], samples: Sequence[StepSample], config: PolicyLossConfig, fit: float) -> str:
    """Which token the rows train, and at which temperature, where that is wrong. tokens: the rows of unmasked tokens. fit: how well
    a row must fit, relative to it."""
    largest = max(row.gg for row in tokens)
    tokens = [row for row in tokens if row.gg > SMALLEST_ROW**2 * largest]
    others = [row for row in tokens if row.trained not in (-1, label_of(samples, *row.token))]
    if others and all(row.trained == label_of(samples, row.sample, row.place - 1) for row in others):
        return (
            "the labels are not moved by one: each row trains the token that it reads. A row predicts the next token: take "
            "tokens.roll(-1) along the sequence"
        )
    if others:
        row = others[0]
        return (
            f"the labels of {len(others)} rows are of other rows: token {row.place} of sample {row.sample} is "
            f"{label_of(samples, *row.token)}, and its row trains {row.trained:g}. Take labels and logits in one order"
        )
    if any(row.padding > fit * row.gg**0.5 for row in tokens):
        return "padded columns of the vocabulary take part in the softmax: pass vocab_size to the loss"
    right, common = config.policy_temperature, median(row.temperature for row in tokens)
    if config.entropy_coefficient or abs(common - right) < fit * right:  # beside an entropy term there is no line
        return ""
    if sum(abs(row.temperature - common) < fit * common for row in tokens) > len(tokens) / 2:
        return (
            f"the log-probabilities are at temperature {common:.3g}, and config says {right:g}: pass "
            f"policy_temperature={right:g} to the loss, or {common:.3g} to config"
        )
    return ""
