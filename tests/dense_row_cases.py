"""One step of responses for the trainers that hand over dense rows, such as verl: samples, layouts, and the float64 truth.

A response's log-probabilities are the parameters, so no model runs. Ranks are a loop where a loss communicates nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.declare import get_policy_loss
from megatron_rl.layout.context_parallel import chunk_spans
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.oracle import Scores, StepTerms
from megatron_rl.testing.reference import (
    CLIPS,
    DIVISOR,
    dense_samples,
    ragged_samples,
    settings_of,
    with_anchors,
)
from megatron_rl.weights import get_loss_aggregation, loss_aggregation_names

VOCABULARY = 50
AGGREGATIONS = tuple(name for name in loss_aggregation_names() if not get_loss_aggregation(name).needs_rows)
# Of these losses every layout is run, of the others one.
LOSSES = ("grpo", "gspo", "cispo")
TOLERANCE = 1e-5
# How a host calls a loss: with padded rows, once a sequence, or with all sequences behind one another.
ROWS, EACH_SEQUENCE, ONE_CALL = PACKINGS = ("rows", "a call a sequence", "one call")


@dataclass(frozen=True, kw_only=True)
class RowCase:
    loss: str
    aggregation: str
    dp: int = 1
    cp: int = 1
    tp: int = 1
    sizes: tuple[int, ...] = (16,)  # samples of the micro-batches of each data-parallel rank, in turn
    num_samples: int = 16
    has_rollouts: bool = False  # of one row to three, which are dealt to any ranks and micro-batches
    packing: str = ROWS
    has_second_mask: bool = False  # a mask of the host's beside that of responses

    def micro_batches(self) -> Iterator[list[list[int]]]:
        """Of each data-parallel rank the numbers of its samples. They are shuffled, so that prompt groups are cut."""
        order = list(range(self.num_samples))
        random.Random(7).shuffle(order)
        share = self.num_samples // self.dp
        assert share * self.dp == self.num_samples
        for rank in range(self.dp):
            yield deal(order[rank * share : (rank + 1) * share], self.sizes)

    def __str__(self) -> str:
        rest = f" {self.packing}{' rollouts' * self.has_rollouts}{' second mask' * self.has_second_mask}"
        ranks = f"dp{self.dp} cp{self.cp} tp{self.tp}"
        return f"{self.loss} {self.aggregation} {ranks} {'+'.join(map(str, self.sizes))}{rest}"


# Micro-batches of one size and of many, as dynamic batch sizes make; 14 samples: the last prompt group is smaller.
LAYOUTS = (
    {},
    {"sizes": (1, 5, 3, 7)},
    {"cp": 2, "sizes": (4, 12)},
    {"dp": 2, "sizes": (2, 5), "num_samples": 14},
    {"dp": 2, "cp": 2, "sizes": (1, 1, 2, 3), "num_samples": 14},
    {"dp": 4, "cp": 4, "sizes": (3, 1)},
)


def rollout_cases(losses: Sequence[str]) -> list[RowCase]:
    """Of rollouts of several rows: grpo with each aggregation and layout, and one of each of these losses."""
    layouts = [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4], {"dp": 4, "sizes": (1,)}]
    aggregations = ("sample_mean", "row_mean", "prompt_mean", "token_mean", "constant")
    rows = [("grpo", one, layout) for one in aggregations for layout in layouts]
    rows += [(loss, "sample_mean", layouts[2]) for loss in losses]
    return [RowCase(loss=loss, aggregation=one, has_rollouts=True, **layout) for loss, one, layout in rows]


def samples_of(case: RowCase, seed: int = 3) -> tuple[list[StepSample], list[Tensor]]:
    """The samples with old log-probabilities on both sides of the clip, and the log-probabilities of their responses."""
    samples = [whole_shares(sample) for sample in ragged_samples(seed, vocab_size=VOCABULARY, num_samples=case.num_samples)]
    numbers = random.Random(seed)
    log_probs = [[math.log(numbers.uniform(0.05, 0.9)) for _ in sample.loss_mask] for sample in samples]
    step = with_anchors(samples, log_probs, case.loss)
    return step, [torch.tensor(values, dtype=torch.float64) for values in log_probs]


def whole_shares(sample: StepSample) -> StepSample:
    """With a prompt so long that four context-parallel ranks have equal parts: per token, verl rounds a rank's count down."""
    return replace(sample, tokens=[0] * (-len(sample.tokens) % 4) + sample.tokens)


def truth(
    case: RowCase,
    samples: Sequence[StepSample],
    log_probs: Sequence[Tensor],
    factors: Sequence[Sequence[float]] | None = None,  # of each token: a correction
) -> tuple[float, list[Tensor]]:
    leaves, (low, high) = [values.clone().requires_grad_() for values in log_probs], CLIPS[case.loss] or (None, None)
    config = PolicyLossConfig(
        policy_loss=case.loss,
        loss_aggregation=case.aggregation,
        loss_aggregation_divisor=DIVISOR if case.aggregation == "constant" else None,
        clip_ratio_low=low,
        clip_ratio_high=high,
        loss_parameters=parameters_of(case),
    )
    step = dense_samples(samples)
    if case.has_rollouts:
        step = [replace(one, rollout_id=rollout) for one, rollout in zip(step, rollouts_of(samples), strict=True)]
    if factors is not None:
        step = [replace(one, importance=[*of_one]) for one, of_one in zip(step, factors, strict=True)]
    live = torch.cat([leaf[torch.tensor(sample.loss_mask, dtype=torch.bool)] for leaf, sample in zip(leaves, samples, strict=True)])
    loss = StepTerms(step, Scores(live, torch.zeros_like(live), live), settings_of(config)).loss()
    loss.backward()
    return float(loss.detach()), gradients_of(leaves)


def rollouts_of(samples: Sequence[StepSample]) -> list[str]:
    """The rollout of each sample: of a prompt's samples one, two, three and so on. Two of a prompt have one advantage here or not:
    a weight does not depend on it."""
    sizes, found = (1, 2, 3), []
    for index, sample in enumerate(samples):
        before = [other.prompt_id for other in samples[:index]].count(sample.prompt_id)
        number = sum(before >= end for end in accumulate(sizes * len(samples)))
        found.append(f"{sample.prompt_id}: {number}")
    return found


def parameters_of(case: RowCase) -> dict[str, float]:
    has_dual_clip = any(parameter.name == "clip_ratio_c" for parameter in get_policy_loss(case.loss).parameters)
    return {"clip_ratio_c": 3.0} if has_dual_clip else {}


def padded(rows: Sequence[Sequence[float]], width: int) -> Tensor:  # [S, width] float32
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float32)


def in_place(samples: Sequence[StepSample], rows: Sequence[Sequence[float]], width: int) -> Tensor:  # [S, width] float32
    """The responses' values at the places of their tokens, behind the prompts."""
    prompts = [len(sample.tokens) - len(sample.loss_mask) for sample in samples]
    return padded([[*[0.0] * prompt, *row] for prompt, row in zip(prompts, rows, strict=True)], width)


def padded_ids(samples: Sequence[StepSample], width: int) -> Tensor:  # [S, width]
    return padded([sample.tokens for sample in samples], width).long()


def logits_of(log_probs: Tensor, ids: Tensor) -> Tensor:  # [length - 1], [>= length] -> [length, V]
    """Logits whose log-softmax at each next token is its log-probability, with derivative 1."""
    others = torch.log(-torch.expm1(log_probs)) - math.log(VOCABULARY - 1)
    rows = others[:, None].expand(-1, VOCABULARY)
    rows = rows.scatter(1, ids[1 : len(log_probs) + 1, None], log_probs[:, None])
    return torch.cat([rows, torch.zeros(1, VOCABULARY)])


@dataclass
class Result:
    loss: float
    gradients: list[Tensor]
    metrics: list[dict]


def deal(order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        size = sizes[len(batches) % len(sizes)]
        batches.append(list(order[start : start + size]))
        start += size
    return batches


def own_part(values: Tensor, cp_rank: int, cp_size: int) -> Tensor:  # [length]
    """The values of a sample, with gradient where this context-parallel rank has the logits."""
    owned = torch.zeros(len(values), dtype=torch.bool)
    for start, end in chunk_spans(-(-len(values) // (2 * cp_size)) * 2 * cp_size, cp_rank, cp_size):
        owned[start : min(end, len(values))] = True
    return torch.where(owned, values, values.detach())


def too_large(found: Mapping[str, float]) -> dict[str, float]:
    """The cases whose error is too large."""
    return {name: error for name, error in found.items() if not error <= TOLERANCE}


def gradients_of(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.double() for leaf in leaves]


def largest_error(found: Result, loss: float, gradients: Sequence[Tensor]) -> float:
    """Relative to the largest number of the truth."""
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    errors = [float((a - b).abs().max()) for a, b in zip(found.gradients, gradients, strict=True)]
    return max(max(errors) / scale, abs(found.loss - loss) / max(abs(loss), scale))
