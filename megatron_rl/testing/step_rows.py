"""The rows of the logits of a step: their tokens, and what the gradient of a loop's loss by each says of token and temperature.

A loss of log-probabilities has this gradient by a row z of logits, with p = softmax(z / temperature):

    c (onehot(label) - p) / temperature

So the label's column alone has the sign of c, and the logarithms of the others are a line over z, of slope 1 / temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
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
# By the log-probability and by the entropy of each token: of each sample, [response_length] float64.
Derivatives = tuple[Sequence[Tensor], Sequence[Tensor]]


class Row(NamedTuple):
    """What the loop's gradient says of one row of the logits. sample, place: -1 for a row that predicts no token of a response."""

    part: tuple[int, int]  # rank of dp and cp, and micro-batch
    sample: int
    place: int
    size: float  # of the gradient
    right_size: float = 0.0  # of the right one
    product: float = 0.0  # of both
    trained: float = -1  # the token whose column alone has its sign; -1 where none does
    temperature: float = 1.0
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
            raise ConfigError(f"check_step: places_of returned shape {tuple(places.shape)}: it must be [{len(logits)}, 2]")
        width = logits.shape[1]
        start = 0 if width >= vocab_size else groups.tp.rank() * width
        rows = (places[:, 0] >= 0).nonzero()[:, 0].to(logits.device)
        named = [(sample, place) for sample, place in places.tolist() if sample >= 0]
        for sample, place in named:
            if sample >= len(samples) or not 0 <= place < len(samples[sample].loss_mask):
                raise ConfigError(f"check_step: places_of names token {place} of sample {sample}, which `samples` does not have")
        labels = [label_of(samples, *place) for place in named]
        leaf = whole_columns(logits, vocab_size, groups)[rows, :vocab_size].double().requires_grad_()
        tokens = oracle.scores_of(leaf, labels, oracle.DenseSettings(temperature=config.policy_temperature))
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


def gather_tokens(microbatches: Sequence[Microbatch], samples: Sequence[StepSample], groups: ParallelGroups) -> list[Tensor]:
    """Log-probability and entropy of each token, of each sample [response_length, 2] float64, equal on every rank. A masked token
    that no row predicts has 0, which nothing reads.

    Communication: one all-gather of objects over all ranks.
    Raises: ConfigError, on every rank, for an unmasked token in no row of the step, and for a token in several.
    """

    def own() -> list[tuple[tuple[int, int], float, float]]:
        if groups.tp.rank():  # all ranks of tp hold the same rows
            return []
        columns = ((one.places, one.tokens.log_probs.tolist(), one.tokens.entropy.tolist()) for one in microbatches)
        return [token for of_one in columns for token in zip(*of_one, strict=True)]

    found = [token for of_rank in on_all_ranks(own) for token in of_rank]
    num_rows = [[0] * len(sample.loss_mask) for sample in samples]
    known = [torch.zeros(len(sample.loss_mask), 2, dtype=torch.float64) for sample in samples]
    for (number, place), log_prob, entropy in found:
        num_rows[number][place] += 1
        known[number][place] = torch.tensor([log_prob, entropy])
    for number, (sample, of_sample) in enumerate(zip(samples, num_rows, strict=True)):
        for place, (bit, count) in enumerate(zip(sample.loss_mask, of_sample, strict=True)):
            if count > 1 or count < bit:
                raise ConfigError(
                    f"check_step: by places_of, token {place} of sample {number} is in {count} rows of the step: it must be in one"
                )
    return known


def whole_columns(shard: Tensor, vocab_size: int, groups: ParallelGroups) -> Tensor:  # [rows, V_tp or V] -> [rows, V], with padding
    """Communication: an all-gather over tp, unless the columns are whole."""
    return shard if shard.shape[1] >= vocab_size else torch.cat(list(all_gather_stack(shard.contiguous(), groups.tp)), 1)


def label_of(samples: Sequence[StepSample], number: int, place: int) -> int:
    return samples[number].tokens[place - len(samples[number].loss_mask)]


def rows_of(
    microbatches: Sequence[Microbatch],
    gradients: Sequence[Tensor],  # of the loop's loss by the logits, as Microbatch.target
    derivatives: Derivatives,  # the right ones
    vocab_size: int,
    groups: ParallelGroups,
) -> list[Row]:
    """The rows of the whole step, equal on every rank.

    Communication: an all-gather of the gradients over tp, and one of objects over all ranks.
    """

    def own() -> list[Row]:
        found: list[Row] = []
        for number, (one, gradient) in enumerate(zip(microbatches, gradients, strict=True)):
            whole, right = (whole_columns(each, vocab_size, groups).double() for each in (gradient, one.target(derivatives)))
            part, is_placed = (groups.dp_cp.rank(), number), torch.zeros(len(whole), dtype=torch.bool, device=whole.device)
            is_placed[one.rows] = True
            found += [Row(part, -1, -1, size) for size in whole[~is_placed].norm(dim=1).tolist() if size]
            columns = _read(one.logits.detach(), whole[one.rows], right[one.rows])
            found += [Row(part, *place, *of_row) for place, of_row in zip(one.places, columns.tolist(), strict=True)]
        return [] if groups.tp.rank() else found  # all ranks of tp have the same rows

    return [row for of_rank in on_all_ranks(own) for row in of_rank]


def _read(logits: Tensor, whole: Tensor, right: Tensor) -> Tensor:  # [R, fields of Row from `size` on]
    gradient, padding = whole.tensor_split([logits.shape[1]], 1)
    largest = gradient.abs().argmax(1, keepdim=True)
    is_alone = (gradient * gradient.gather(1, largest) > 0).sum(1) == 1
    # A line through the other columns, by least squares.
    is_other = torch.ones_like(logits).scatter_(1, largest, 0.0)
    x, y = (is_other * values for values in (logits, gradient.abs().clamp(min=TINY).log()))
    x, y = (is_other * (values - values.sum(1, keepdim=True) / is_other.sum(1, keepdim=True)) for values in (x, y))
    columns = [
        whole.norm(dim=1),
        right.norm(dim=1),
        (whole * right).sum(1),
        torch.where(is_alone, largest[:, 0], -1),
        x.square().sum(1) / (x * y).sum(1),
        padding.norm(dim=1),
    ]
    return torch.stack([column.double() for column in columns], 1)


def row_problem(tokens: Sequence[Row], samples: Sequence[StepSample], config: PolicyLossConfig, fit: float) -> str:
    """Which token the rows train, and at which temperature, where that is wrong. tokens: the rows of unmasked tokens. fit: how well
    a row must fit, relative to it."""
    largest = max(row.size for row in tokens)
    tokens = [row for row in tokens if row.size > SMALLEST_ROW * largest]
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
    if any(row.padding > fit * row.size for row in tokens):
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
