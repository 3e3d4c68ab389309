"""Tests any loss of (logits, batch): a step split over gloo ranks has the gradient of one process.

It needs torch alone. It does not know what the loss computes, and undoes only the factor that the caller declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.testing.comparison import cause_of_gradient, named_sizes
from megatron_rl.testing.layout_step import Layout, StepSample, samples_of
from megatron_rl.testing.loss_batch import LossBatch, WholeStep
from megatron_rl.testing.ranks import RankError, RankPool
from megatron_rl.testing.reference import ragged_samples

LAYOUTS = (
    Layout(num_microbatches=3),
    Layout(data=2),
    Layout(data=4, num_microbatches=3),
    Layout(context=2),
    Layout(context=2, data=2, num_microbatches=3),
    Layout(data=4, num_microbatches=3, context_sizes=(4, 2, 1)),
    Layout(tensor=2),
    Layout(tensor=2, context=2),
)

Loss = Callable[[Tensor, LossBatch], Tensor]  # logits [T, V / tp] -> 0-d


class _Part(NamedTuple):
    """One rank's result. gradient: [tokens of all samples, V], zero outside this rank's part."""

    gradient: Tensor
    reaches_padding: bool


def assert_layout_invariant(
    pool: RankPool,
    loss: Loss,
    *,
    layouts: Iterable[Layout] = LAYOUTS,
    reduction: str = "sum",
    whole_vocabulary: bool = False,
    samples: Sequence[StepSample] | None = None,
    vocab_size: int = 64,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-5,
) -> None:
    """Raises AssertionError with each layout whose gradient by the logits is not the one of one process and one micro-batch.

    reduction: what happens to the values that the ranks return. "sum": they are added over micro-batches, dp and cp, as this
    package's losses want it. "mean": averaged over all of them, as DDP and a loop that divides by its micro-batches do.
    whole_vocabulary: the loss needs all columns of the logits; layouts with tensor > 1 are left out.
    samples: default 16 ragged ones of 4 prompts, one of them fully masked. tolerance: of the norm of the difference, relative.
    """
    __tracebackhide__ = True  # for pytest: the message says where
    layouts = [layout for layout in layouts if not (whole_vocabulary and layout.tensor > 1)]
    if reduction not in ("sum", "mean") or not layouts:
        raise ConfigError(f"reduction={reduction!r} with {len(layouts)} layouts: give sum or mean, and at least one layout")
    samples = ragged_samples(vocab_size=vocab_size) if samples is None else list(samples)
    shared = (loss, samples, reduction, vocab_size, dtype)
    try:
        (alone,) = _run(pool, Layout(), *shared)
    except RankError as error:
        raise AssertionError(f"on one process with one micro-batch: {_first_of(error)}") from None
    truth = alone.gradient
    if not 0 < truth.norm() < math.inf:
        raise AssertionError("on one process the gradient by the logits is 0 or not finite: there is nothing to compare")
    faults = []
    for layout in layouts:
        try:
            parts = _run(pool, layout, *shared)
        except RankError as error:
            faults.append(f"  {layout}: {_first_of(error)}")
            break
        found = torch.stack([part.gradient for part in parts]).sum(0)
        if not (found - truth).norm() <= tolerance * truth.norm():
            ratio = float((found * truth).sum() / truth.square().sum())
            residual = float((found - ratio * truth).norm() / truth.norm())
            cause = cause_of_gradient(ratio, residual, named_sizes(layout, samples), expected="one process's")
            faults.append(f"  {layout}: {cause}")
        elif any(part.reaches_padding for part in parts):
            faults.append(f"  {layout}: padding has a gradient: mask it by batch.loss_mask")
    if faults:
        raise AssertionError("\n".join(["the gradient depends on the layout:", *faults]))


def _first_of(error: RankError) -> str:
    """Of the rank that failed first: its traceback, or the stack where it hangs."""
    rank, text = next(iter(error.errors.items()))
    return f"rank {rank}: {text.rstrip()}"


def _run(pool: RankPool, layout: Layout, *shared) -> list[_Part]:
    sizes = layout.model_parallel if pool.use_megatron else {}
    return pool.run(_part_on_rank, layout, *shared, world_size=layout.world_size, **sizes)


def make_groups(layout: Layout) -> ParallelGroups:
    """This rank's groups in Megatron's order of ranks: tp fastest, then cp, then dp. Each rank makes every group."""
    ranks = torch.arange(layout.world_size).view(layout.data, layout.context, layout.tensor)
    both = ranks.reshape(-1, layout.tensor)
    groups = {}
    for members, name in ((ranks, "tp"), (ranks.movedim(1, -1), "cp"), (ranks.movedim(0, -1), "dp"), (both.T, "dp_cp")):
        groups[name], _ = dist.new_subgroups_by_enumeration(members.reshape(-1, members.shape[-1]).tolist())
    return ParallelGroups(**groups)


def _part_on_rank(
    rank: int, layout: Layout, loss: Loss, samples: list[StepSample], reduction: str, vocab_size: int, dtype: torch.dtype
) -> _Part:
    sizes = [layout.context_of(index) for index in range(layout.num_microbatches)]
    by_size = {size: make_groups(layout.over(size)) for size in sorted({*sizes})}
    step = WholeStep(samples, vocab_size, dtype)
    tp_rank, columns = by_size[sizes[0]].tp.rank(), vocab_size // layout.tensor
    shard = slice(tp_rank * columns, (tp_rank + 1) * columns)
    gradient = torch.zeros_like(step.logits)
    reaches_padding = False
    for index, groups in enumerate(by_size[size] for size in sizes):
        mine = list(samples_of(layout, groups, index, len(samples)))
        batch, rows, is_token = step.batch(mine, layout, groups, vocab_start=shard.start)
        leaf = step.logits[rows, shard].clone().requires_grad_()
        value = loss(leaf.clone(), batch)  # a model's logits are no leaf either: they may be changed in place
        # A rank without a term of the loss has no gradient.
        (part,) = torch.autograd.grad(value, leaf, allow_unused=True) if value.requires_grad else (None,)
        if part is not None:
            gradient[rows[is_token], shard] = part[is_token]
            reaches_padding |= bool((part[~is_token] != 0).any())
    if reduction == "mean":
        gradient /= layout.data * layout.context * layout.num_microbatches
    return _Part(gradient, reaches_padding)
