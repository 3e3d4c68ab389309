"""A rank's shards of a gradient against the whole true one, over all ranks, and what a difference means. It never scales either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.layout.collectives import all_gather_stack, all_reduce_sum
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.factors import cause_of
from megatron_rl.testing.layout_step import RankStep, Shards

# A gradient that is a multiple of the true one leaves no more than this beside it.
MULTIPLE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Truth:
    """Of one loss and aggregation. loss_scale: the sum of the absolute values of the loss's terms, which its rounding goes with."""

    loss: float
    loss_scale: float
    gradient: dict[str, Tensor]  # by global parameter name, float64, on the CPU

    @property
    def norm(self) -> float:
        return sum(float(value.square().sum()) for value in self.gradient.values()) ** 0.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """All relative. ratio: found along expected. gradient_error: norm of the difference. residual: of what no factor explains.

    loss_error goes by the truth's loss_scale. loss_ratio: found over expected.
    """

    ratio: float
    gradient_error: float
    residual: float
    loss_error: float
    loss_ratio: float
    norm_error: float

    def is_within(self, tolerance: float) -> bool:
        return max(self.gradient_error, self.loss_error, self.norm_error) < tolerance  # False for NaN

    def cause(self, tolerance: float, sizes: Mapping[str, int]) -> str:
        """What is wrong, in words; empty where nothing is. sizes: the factors that have a name."""
        parts = []
        if not self.gradient_error < tolerance:
            parts.append(cause_of_gradient(self.ratio, self.residual, sizes))
        elif not self.norm_error < tolerance:
            parts.append(f"the optimiser's gradient norm is off by {self.norm_error:.2g}, the gradient itself is right")
        if not self.gradient_error < tolerance and abs(self.loss_ratio - self.ratio) < MULTIPLE_TOLERANCE * abs(self.ratio):
            parts.append("the reported loss is off by the same factor")
        elif not self.loss_error < tolerance:
            parts.append(f"the reported loss is {self.loss_ratio:.6g} of expected {cause_of(self.loss_ratio, sizes)}".rstrip())
        return "; ".join(parts)


def cause_of_gradient(ratio: float, residual: float, sizes: Mapping[str, int], expected: str = "expected") -> str:
    """A wrong gradient in words: its part along the expected one, and the part that no factor explains."""
    if ratio == 0 and residual == 0:
        return "no gradient arrives"
    if residual < MULTIPLE_TOLERANCE * abs(ratio):
        return f"gradient is {ratio:.6g} of {expected} {cause_of(ratio, sizes)}".rstrip()
    return (
        f"gradient is no multiple of {expected} (nearest {ratio:.4g}, {residual:.2g} beside it): some samples weigh more than they "
        "should, as with counts taken after slicing, or a part of the step is lost"
    )


def compare(found: RankStep, truth: Truth, groups: ParallelGroups) -> Comparison:
    """The same on every rank: the replica that is farthest off.

    Communication: an all-reduce of four numbers over tp and pp each, an all-gather of them over dp-cp.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for gradients in found.gradients:
        sums += _sums(gradients, truth.gradient, groups.tp.size())
    sums = sums.to(torch.device(torch.cuda.current_device()))
    replicas = all_gather_stack(all_reduce_sum(all_reduce_sum(sums, groups.tp), groups.pp), groups.dp_cp).cpu()
    products, differences, squares, of_truth = replicas[replicas[:, 1].argmax()].tolist()  # NaN counts as the largest
    ratio = products / of_truth
    # Along and beside: |found|^2 = ratio^2 |truth|^2 + residual^2 |truth|^2; rounding may take the difference below 0.
    residual = max(squares / of_truth - ratio**2, 0.0) ** 0.5
    return Comparison(
        ratio=ratio,
        gradient_error=(differences / of_truth) ** 0.5,
        residual=residual,
        loss_error=abs(found.loss - truth.loss) / truth.loss_scale,
        loss_ratio=found.loss / truth.loss,
        norm_error=abs(found.optimizer_norm / truth.norm - 1.0),
    )


def _sums(gradients: Shards, truth: Mapping[str, Tensor], tp_size: int) -> Tensor:  # [4] float64
    """found x truth, |found - truth|^2, |found|^2, |truth|^2 of this rank's shards. What all tp ranks hold counts 1/tp on each."""
    total = torch.zeros(4, dtype=torch.float64)
    for name, (dim, tp_rank, found) in gradients.items():
        expected = truth[name] if dim is None else truth[name].chunk(tp_size, dim)[tp_rank]
        share = 1.0 / tp_size if dim is None else 1.0
        pairs = [(found, expected), (found - expected, found - expected), (found, found), (expected, expected)]
        total += share * torch.stack([(first * second).sum() for first, second in pairs])
    return total
