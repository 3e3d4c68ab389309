"""The dense float64 reference of check_step: the loss of a whole step, from the log-probabilities of all ranks' tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import ParallelGroups, all_gather_stack
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.oracle import DenseSettings, Scores, scores_of
from megatron_rl.testing.reference import DIVISOR, loss_by_hand, scale_of_terms

# A log-probability near -10 in float32 is rounded by 1e-6. A ratio that moves so little moves a derivative as little, unless a clip
# lies between.
ROUNDING, JUMP = 2e-6, 1e-2
# Of each sample of the step, by place in its response: log-probability and entropy.
KnownTokens = list[dict[int, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Target:
    """Of one micro-batch: the gradient of the step's loss by this rank's logits, and the rank's unmasked tokens."""

    gradient: Tensor  # [rows, columns]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The rows of this rank that predict a token of a response: R of them, of `num_rows`."""

    rows: Tensor  # [R] int64, of the logits
    places: list[tuple[int, int]]  # R numbers of samples, and places in their responses
    logits: Tensor  # [R, V] float64, a leaf
    tokens: Scores  # [R] each, with graph
    num_rows: int
    columns: slice  # of the whole vocabulary, those that this rank's logits hold
    width: int  # columns of this rank's logits, with padding

    @classmethod
    def of(
        cls,
        logits: Tensor,  # [rows, V_tp], or [rows, V] where the output layer gathers
        places: Tensor,  # [rows, 2] int64
        samples: Sequence[StepSample],
        temperature: float,
        groups: ParallelGroups,
        vocab_size: int,
    ) -> Microbatch:
        """Communication: an all-gather of the logits over tp, unless they are whole."""
        if places.shape != (len(logits), 2):
            raise ConfigError(
                f"check_step: places_of returned shape {tuple(places.shape)} for {len(logits)} rows of logits: it must be "
                f"[{len(logits)}, 2], the number of the sample and the place in its response for each row"
            )
        is_whole, width = logits.shape[1] >= vocab_size, logits.shape[1]
        whole = whole_columns(logits, vocab_size, groups)
        start = 0 if is_whole else groups.tp.rank() * width
        rows = (places[:, 0] >= 0).nonzero()[:, 0].to(logits.device)
        named = [(int(sample), int(place)) for sample, place in places[places[:, 0] >= 0].tolist()]
        leaf = whole[rows, :vocab_size].double().requires_grad_()
        for sample, place in named:
            if sample >= len(samples) or not 0 <= place < len(samples[sample].loss_mask):
                raise ConfigError(f"check_step: places_of names token {place} of sample {sample}, which `samples` does not have")
        labels = [samples[sample].tokens[place - len(samples[sample].loss_mask)] for sample, place in named]
        tokens = scores_of(leaf, labels, DenseSettings(temperature=temperature))
        return cls(rows, named, leaf, tokens, len(logits), slice(start, min(start + width, vocab_size)), width)

    def target(self, step: DenseStep, samples: Sequence[StepSample]) -> Target:
        log_probs, entropy = (
            torch.tensor([of_samples[sample][place] for sample, place in self.places], dtype=torch.float64)
            for of_samples in (step.by_log_prob, step.by_entropy)
        )
        loss = (self.tokens.log_probs * log_probs.to(self.logits)).sum() + (self.tokens.entropy * entropy.to(self.logits)).sum()
        (gradient,) = torch.autograd.grad(loss, self.logits)
        own = gradient[:, self.columns].float()
        target = torch.zeros(self.num_rows, self.width, device=own.device)
        target[self.rows, : own.shape[1]] = own
        return Target(target, sum(samples[sample].loss_mask[place] for sample, place in self.places))


def whole_columns(shard: Tensor, vocab_size: int, groups: ParallelGroups) -> Tensor:  # [rows, V_tp or V] -> [rows, V], with padding
    """Communication: an all-gather over tp, unless the columns are whole."""
    return shard if shard.shape[1] >= vocab_size else torch.cat(list(all_gather_stack(shard.contiguous(), groups.tp)), 1)


def gathered_problem(gradients: Sequence[Tensor], vocab_size: int, groups: ParallelGroups, fit: float) -> str:
    """A loss of whole logits has the same gradient by them on each rank of tp. fit: what rounding may change, relative to it.

    gradients: of each micro-batch, [rows, V_tp or V]. Communication: an all-gather of whole ones over tp, one of objects over all.
    """

    def differs() -> bool:
        by_rank = [all_gather_stack(one.contiguous(), groups.tp) for one in gradients if one.shape[1] >= vocab_size]
        return any(bool((other - ranks[0]).norm() > fit * ranks[0].norm()) for ranks in by_rank for other in ranks)

    if not any(on_all_ranks(differs)):
        return ""
    return (
        "each tensor-parallel rank has the logits of the whole vocabulary, and the loss takes them for the rank's part of it: "
        "build the model with parallel_output=True"
    )


@dataclass(frozen=True, slots=True)
class DenseStep:
    """The loss of the whole step, and its derivative by each token's log-probability and entropy: of each sample, by place."""

    loss: float
    loss_scale: float
    by_log_prob: list[list[float]]
    by_entropy: list[list[float]]

    def is_near(self, other: DenseStep, tolerance: float) -> bool:
        one, two = (
            torch.tensor([value for of_samples in (step.by_log_prob, step.by_entropy) for of_one in of_samples for value in of_one])
            for step in (self, other)
        )
        return bool((one - two).norm() <= tolerance * two.norm())


def gather_tokens(microbatches: Sequence[Microbatch], samples: Sequence[StepSample], groups: ParallelGroups) -> KnownTokens:
    """Equal on every rank. Communication: one all-gather of objects over all ranks.

    Raises ConfigError, on every rank, for an unmasked token in no row of the step and for one in several.
    """

    def own() -> list[tuple[int, int, float, float]]:
        if groups.tp.rank():  # all ranks of tp hold the same rows
            return []
        return [
            (sample, place, log_prob, entropy)
            for of_one in microbatches
            for (sample, place), log_prob, entropy in zip(
                of_one.places, of_one.tokens.log_probs.tolist(), of_one.tokens.entropy.tolist(), strict=True
            )
        ]

    known: KnownTokens = [{} for _ in samples]
    problems = []
    for number, place, log_prob, entropy in (token for of_rank in on_all_ranks(own) for token in of_rank):
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
        raise ConfigError(
            [f"check_step: by places_of, {problem}" for problem in problems[:5]]
            + ([f"and {len(problems) - 5} more of the kind"] if len(problems) > 5 else [])
        )
    return known


def dense_step(samples: Sequence[StepSample], known: KnownTokens, config: PolicyLossConfig) -> DenseStep:
    """Communication: none. old_log_probs None: the policy's own."""
    pairs = [[_leaf(sample, tokens, column) for column in (0, 1)] for sample, tokens in zip(samples, known, strict=True)]
    leaves = [Scores(log_probs, entropy, log_probs) for log_probs, entropy in pairs]
    step = [
        replace(sample, old_log_probs=tokens.log_probs.tolist()) if sample.old_log_probs is None else sample
        for sample, tokens in zip(samples, leaves, strict=True)
    ]
    loss = loss_by_hand(step, leaves, config)
    gradients = torch.autograd.grad(
        loss, [values for tokens in leaves for values in (tokens.log_probs, tokens.entropy)], materialize_grads=True
    )
    by_token = [gradient.tolist() for gradient in gradients]
    scale = scale_of_terms(step, config.loss_aggregation, config.loss_aggregation_divisor or DIVISOR)
    return DenseStep(float(loss.detach()), scale, by_token[::2], by_token[1::2])


def on_the_other_side(sample: StepSample, new: Mapping[int, tuple[float, float]]) -> list[float] | None:
    """Old log-probabilities as far from the policy's."""
    old = sample.old_log_probs
    return None if old is None else [2 * new[place][0] - one if place in new else one for place, one in enumerate(old)]


def edge_tokens(samples: Sequence[StepSample], known: KnownTokens, config: PolicyLossConfig) -> set[tuple[int, int]]:
    """(sample, place) of the tokens whose derivative jumps where the old log-probabilities move by the rounding of float32."""

    def moved(shift: float) -> DenseStep:
        step = [replace(one, old_log_probs=[old + shift for old in one.old_log_probs or []] or None) for one in samples]
        return dense_step(step, known, config)

    if all(sample.old_log_probs is None for sample in samples):
        return set()
    both = zip(moved(-ROUNDING).by_log_prob, moved(ROUNDING).by_log_prob, strict=True)
    return {
        (number, place)
        for number, (before, after) in enumerate(both)
        for place, (one, other) in enumerate(zip(before, after, strict=True))
        if abs(one - other) > JUMP * max(abs(one), abs(other))
    }


def _leaf(sample: StepSample, tokens: dict[int, tuple[float, float]], column: int) -> Tensor:  # [response_length] float64
    """A masked token that no row predicts has the value 0, which nothing reads."""
    values = [tokens.get(place, (0.0, 0.0))[column] for place in range(len(sample.loss_mask))]
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)
