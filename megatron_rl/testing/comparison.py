"""Compares all ranks' shards of a gradient with the whole true gradient, and says what a difference means. Neither is scaled."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.layout.groups import Group, ParallelGroups, all_gather_stack, all_reduce_sum, resolve_group
from megatron_rl.megatron.model import is_of_expert
from megatron_rl.megatron.probe import factor_names
from megatron_rl.testing.layout_step import Layout, RankStep, Shards, StepSample

# The relative residual beside a gradient that is a multiple of the true one is at most this.
MULTIPLE_TOLERANCE = 1e-4
# Name of a size -> (what a factor of it means, what its inverse means).
CAUSES: dict[str, tuple[str, str]] = {
    "cp": (
        "each context-parallel rank counts the tokens of all of them",
        "the mean that DDP takes over context-parallel ranks is left in, or a rank divides by its own tokens",
    ),
    "dp": (
        "nothing divides by the data-parallel ranks, as DDP does under the other contract",
        "the mean that DDP takes over data-parallel ranks is left in",
    ),
    "dp x cp": (
        "the mean over data- and context-parallel ranks is undone, but it was not taken",
        "the mean that DDP takes over data- and context-parallel ranks is left in",
    ),
    "micro-batches": (
        "the schedule's mean over micro-batches is undone, but it was not taken",
        "the schedule's mean over micro-batches is left in",
    ),
    "tp": ("equal parts of tensor-parallel ranks are added", "equal parts of tensor-parallel ranks are averaged"),
    "pp": ("each pipeline stage adds the loss of the last", "the loss of the last pipeline stage is averaged over all of them"),
    "ep": (
        "gradients of experts are added over ranks that have averaged them",
        "gradients of experts are averaged over the expert-parallel ranks too, which hold other experts",
    ),
    "samples": ("nothing divides by the step's samples", "the step's samples divide twice, as with --gradient-divisor num_samples"),
    "prompts": ("nothing divides by the step's prompts", "the step's prompts divide twice"),
    "tokens": ("nothing divides by the step's tokens", "the step's tokens divide twice"),
    "rows": (
        "the rows of a micro-batch multiply the loss",
        "the loss is a mean over the rows of a micro-batch: return the sum, the token weights divide already",
    ),
}


@dataclass(frozen=True, slots=True)
class Truth:
    """The truth of one loss and aggregation. loss_scale: the sum of the absolute terms of the loss; rounding grows with it."""

    loss: float
    loss_scale: float
    gradient: dict[str, Tensor]  # by global parameter name, float64, on the CPU

    @property
    def norm(self) -> float:
        return sum(float(value.square().sum()) for value in self.gradient.values()) ** 0.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """All values are relative. ratio: found along expected. gradient_error: norm of the difference. residual: norm of the part that
    no factor explains. loss_error: over the truth's loss_scale; None where no loss was reported. loss_ratio: found over expected,
    NaN where 0 is expected. norm_error: error of the optimiser's norm; None without one.
    """

    ratio: float
    gradient_error: float
    residual: float
    loss_error: float | None = None
    loss_ratio: float = math.nan
    norm_error: float | None = None

    def with_loss(self, found: float, expected: float, scale: float) -> Comparison:
        return replace(self, loss_error=abs(found - expected) / scale, loss_ratio=found / expected if expected else math.nan)

    def cause(self, tolerance: float, sizes: Mapping[str, int]) -> str:
        """What is wrong, in words; empty where each error is below the tolerance, as NaN is not. sizes: named factors."""
        parts = []
        if not self.gradient_error < tolerance:
            parts.append(cause_of_gradient(self.ratio, self.residual, sizes))
        elif not (self.norm_error or 0.0) < tolerance:
            parts.append(f"the optimiser's gradient norm is off by {self.norm_error:.2g}, the gradient itself is right")
        if not self.gradient_error < tolerance and abs(self.loss_ratio - self.ratio) < MULTIPLE_TOLERANCE * abs(self.ratio):
            parts.append("the reported loss is off by the same factor")
        elif not (self.loss_error or 0.0) < tolerance:
            parts.append(f"the reported loss is {self.loss_ratio:.6g} of expected {cause_of(self.loss_ratio, sizes)}".rstrip())
        return "; ".join(parts)


def cause_of_gradient(ratio: float, residual: float, sizes: Mapping[str, int], expected: str = "expected") -> str:
    """Describes a wrong gradient: its part along the expected one, and the part that no factor explains."""
    if not (math.isfinite(ratio) and math.isfinite(residual)):
        return "gradient is not finite: a division by 0, as by the tokens of a part that has none, or an overflow"
    if ratio == 0 and residual == 0:
        return "no gradient arrives"
    if residual < MULTIPLE_TOLERANCE * -ratio:
        return f"gradient is {ratio:.6g} of {expected}, with the other sign: return the loss, which is minimised, not the objective"
    if residual < MULTIPLE_TOLERANCE * ratio:
        return f"gradient is {ratio:.6g} of {expected} {cause_of(ratio, sizes)}".rstrip()
    return (
        f"gradient is no multiple of {expected} (nearest {ratio:.4g}, {residual:.2g} beside it): samples weigh otherwise, as with "
        "counts taken after slicing, or tokens are paired wrongly, or a part of the step is lost"
    )


def cause_of(ratio: float, sizes: Mapping[str, int]) -> str:
    """The cause as text: `= 1/cp: the mean that DDP takes ...`, with `or` between equal sizes; empty for a ratio without a name."""
    names = factor_names(ratio, sizes)
    causes = [CAUSES[name.removeprefix("1/(").removesuffix(")")][name.startswith("1/(")] for name in names]
    shown = [name.replace("(", "").replace(")", "") if " " not in name else name for name in names]
    return f"= {' or '.join(shown)}: {'; or '.join(causes)}" if names else ""


def named_sizes(layout: Layout, samples: Sequence[StepSample], *, rows: int = 1) -> dict[str, int]:
    """The factors of a step that a wrong gradient may be off by. rows: of the logits of each micro-batch."""
    return {
        "cp": layout.context,
        "dp": layout.data,
        "dp x cp": layout.data * layout.context if layout.data > 1 < layout.context else 1,
        "micro-batches": layout.num_microbatches,
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "ep": layout.expert,
        "samples": len(samples),
        "prompts": len({sample.prompt_id for sample in samples}),
        "tokens": sum(sum(sample.loss_mask) for sample in samples),
        "rows": rows,
    }


def compare(found: RankStep, truth: Truth, groups: ParallelGroups) -> Comparison:
    """The comparison with the whole gradient: this rank's shards are cut out of it. As compare_shards."""
    compared = compare_part(found, truth, groups, truth.gradient).with_loss(found.loss, truth.loss, truth.loss_scale)
    return replace(compared, norm_error=None if found.optimizer_norm is None else abs(found.optimizer_norm / truth.norm - 1.0))


def compare_part(found: RankStep, truth: Truth, groups: ParallelGroups, names: Collection[str]) -> Comparison:
    """As compare_shards, of the parameters with these global names."""
    shards = [{name: shard for name, shard in chunk.items() if name in names} for chunk in found.gradients]
    expected = {name: shard.cut_from(truth.gradient[name]) for chunk in shards for name, shard in chunk.items()}
    has_experts = any(map(is_of_expert, names))
    return compare_shards(shards, expected, groups, has_experts=has_experts)


def compare_shards(
    found: Sequence[Shards], expected: Mapping[str, Tensor], groups: ParallelGroups, *, has_experts: bool
) -> Comparison:
    """The comparison of the replica that is farthest off, of gradients alone; equal on every rank.

    found: of each stage of this rank. expected: by global name, cut as found's. Experts are spread over other ranks than the rest
    of the model, so their replica is found by itself, and both are added.
    Communication: an all-reduce of four numbers over tp and pp each, an all-gather of them over dp-cp; for a mixture of experts the
    same over its groups.
    """
    worst = _farthest(found, expected, False, (groups.tp, groups.pp), groups.dp_cp)
    if has_experts:
        shards, replicas = (resolve_group(None, "expert_mp"), groups.pp), resolve_group(None, "expert_dp")
        worst = worst + _farthest(found, expected, True, shards, replicas)
    products, differences, squares, truth_square = worst.tolist()
    ratio = products / truth_square
    # Along and beside: |found|^2 = ratio^2 |truth|^2 + residual^2 |truth|^2; rounding may take the difference below 0.
    residual = max(squares / truth_square - ratio**2, 0.0) ** 0.5
    return Comparison(ratio=ratio, gradient_error=(differences / truth_square) ** 0.5, residual=residual)


def _farthest(
    found: Sequence[Shards], expected: Mapping[str, Tensor], are_experts: bool, shards: Sequence[Group], replicas: Group
) -> Tensor:  # [4] float64
    """found x truth, |found - truth|^2, |found|^2, |truth|^2 of the replica that is farthest off. What all ranks of the group of
    the shards hold counts 1 / size on each."""
    sums = torch.zeros(4, dtype=torch.float64)
    for name, shard in (item for gradients in found for item in gradients.items() if is_of_expert(item[0]) == are_experts):
        one, truth, share = shard.gradient, expected[name], 1.0 / shard.size if shard.dim is None else 1.0
        pairs = [(one, truth), (one - truth, one - truth), (one, one), (truth, truth)]
        sums += share * torch.stack([(first * second).sum() for first, second in pairs])
    sums = sums.cuda() if torch.cuda.is_available() else sums
    for group in shards:
        sums = all_reduce_sum(sums, group)
    replica_sums = all_gather_stack(sums, replicas).cpu()
    return replica_sums[replica_sums[:, 1].argmax()]  # NaN counts as the largest
