"""Tests any loss of (logits, batch): a step split over gloo ranks has the gradient of one process.

It needs torch alone. It does not know what the loss computes, and undoes only the factor that the caller declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.testing.comparison import cause_of_gradient
from megatron_rl.testing.layout_step import Layout, StepSample, samples_of
from megatron_rl.testing.loss_batch import LossBatch, WholeStep
from megatron_rl.testing.ranks import RankError, RankPool
from megatron_rl.testing.reference import ragged_samples

# bfloat16 rounds by 4e-3; the smallest wrong factor, one token too many of a hundred, gives 9e-3.
ROUNDING = 4e-3
OWN_FOLDER = str(Path(__file__).parent)
# The sizes of a layout that a loss of logits depends on.
SUPPORTED = ("tensor", "context", "data", "num_microbatches", "context_sizes")
# With Megatron: a loss may find groups of experts in parallel_state, and must not use them for its own.
SUPPORTED_WITH_MEGATRON = ("expert", "expert_tensor")
LAYOUTS = (
    Layout(num_microbatches=3),
    Layout(data=2),
    Layout(data=4, num_microbatches=3),
    Layout(context=2),
    Layout(context=2, data=2, num_microbatches=3),
    Layout(data=4, num_microbatches=3, context_sizes=(4, (2, 1, 1), 1)),
    Layout(tensor=2),
    Layout(tensor=2, context=2),
)


Loss = Callable[[Tensor, LossBatch], Tensor]  # logits [T, V / tp] -> 0-d


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's result. gradient: [tokens of all samples, V], zero outside this rank's part."""

    gradient: Tensor
    has_graph: bool
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
    if reduction not in ("sum", "mean"):
        raise ConfigError(f"reduction={reduction!r} is not one of sum, mean")
    _check_layouts(layouts, vocab_size, pool.use_megatron)
    samples = ragged_samples(vocab_size=vocab_size) if samples is None else list(samples)
    shared = (loss, samples, reduction, vocab_size, dtype)
    truth = _truth(pool, *shared)
    faults, tracebacks, ratios = [], [], []
    for layout in layouts:
        try:
            parts = _run(pool, layout, 1, *shared)
        except RankError as error:
            raised = RaisedByLoss(error)
            faults.append(f"  {layout}: {raised.what}{_hint(layout, vocab_size)}")
            tracebacks.append(raised.traceback)
            if raised.hangs:
                faults.append("  and no other layout was tried after that")
                break
            continue
        found = torch.stack([part.gradient for (part,) in parts]).sum(0)
        if not (found - truth).norm() <= tolerance * truth.norm():
            ratios.append(_along(found, truth) / (layout.data * layout.context * layout.num_microbatches))
            faults.append(f"  {layout}: {_cause(found, truth, layout, samples)}")
        elif any(part.reaches_padding for (part,) in parts):
            faults.append(
                f"  {layout}: padding has a gradient, and how much there is depends on the layout: mask it by batch.loss_mask"
            )
    if reduction == "sum" and sum(0.7 < ratio < 1.4 for ratio in ratios) > len(ratios) / 2:
        faults.append("  each part seems to return its own mean: reduction='mean' averages them, as DDP does")
    if faults:
        raise AssertionError("\n".join(["the gradient depends on the layout:", *faults, *filter(None, tracebacks[:1])]))


def _truth(pool: RankPool, *shared) -> Tensor:  # [tokens of all samples, V]
    """One process's gradient with one micro-batch. Computed twice: a loss that draws or remembers something cannot be compared."""
    __tracebackhide__ = True
    try:
        ((first, second),) = _run(pool, Layout(), 2, *shared)
    except RankError as error:
        raised = RaisedByLoss(error)
        raise AssertionError(f"on one process with one micro-batch: {raised.what}\n{raised.traceback}".rstrip()) from None
    if not first.has_graph:
        raise AssertionError(
            "the loss does not depend on the logits: it was detached, or made of numbers; there is nothing to compare"
        )
    num_bad = int((~first.gradient.isfinite()).sum())
    if num_bad:
        raise AssertionError(f"on one process {num_bad} values of the gradient by the logits are not finite: nothing to compare")
    if not first.gradient.norm() > 0:
        raise AssertionError("on one process the gradient by the logits is 0: there is nothing to compare")
    if not torch.equal(first.gradient, second.gradient):
        raise AssertionError(
            "two calls with the same batch give two gradients: the loss draws random numbers or keeps something between calls; "
            "turn that off for this test"
        )
    return first.gradient


def _run(pool: RankPool, layout: Layout, num_calls: int, *shared) -> list[list[_Part]]:
    sizes = layout.model_parallel if pool.use_megatron else {}
    return pool.run(_parts_on_rank, layout, num_calls, *shared, world_size=layout.world_size, **sizes)


def _check_layouts(layouts: Sequence[Layout], vocab_size: int, use_megatron: bool) -> None:
    supported = (*SUPPORTED, *(SUPPORTED_WITH_MEGATRON if use_megatron else ()))
    problems = [] if layouts else ["layouts is empty: a loss is compared with itself on at least one of them"]
    for layout in layouts:
        rest = [name for name in Layout.__slots__ if name not in supported and getattr(layout, name) != getattr(Layout(), name)]
        if rest:
            known = "" if use_megatron else f"; with use_megatron=True also {', '.join(SUPPORTED_WITH_MEGATRON)}"
            problems.append(f"{layout}: {', '.join(rest)} has no effect on a loss of logits; use {', '.join(supported)}{known}")
        expert_tensor = layout.tensor if layout.expert_tensor is None else layout.expert_tensor
        if layout.world_size % (layout.expert * expert_tensor):
            problems.append(
                f"{layout}: expert={layout.expert} x expert_tensor={expert_tensor} must divide its {layout.world_size} ranks"
            )
        if vocab_size % layout.tensor:
            problems.append(f"{layout}: vocab_size={vocab_size} must be a multiple of tensor={layout.tensor}")
    if problems:
        raise ConfigError(problems)


def make_groups(rank: int, layout: Layout, backend: str = "gloo") -> ParallelGroups:
    """This rank's groups in Megatron's order of ranks: tp fastest, then cp, then dp. Each rank makes every group."""
    ranks = torch.arange(layout.world_size).view(layout.data, layout.context, layout.tensor)
    both = ranks.reshape(-1, layout.tensor)
    groups = {}
    for members_of_all, name in ((ranks, "tp"), (ranks.movedim(1, -1), "cp"), (ranks.movedim(0, -1), "dp"), (both.T, "dp_cp")):
        for members in members_of_all.reshape(-1, members_of_all.shape[-1]).tolist():
            group = dist.new_group(members, backend=backend)
            if rank in members:
                groups[name] = group
    return ParallelGroups(**groups)


def _parts_on_rank(rank: int, layout: Layout, num_calls: int, *shared) -> list[_Part]:
    by_size = {size: make_groups(rank, layout.over(size)) for size in layout.sizes_of_groups}
    groups = [by_size[layout.place_of(rank // layout.tensor, index)[2]] for index in range(layout.num_microbatches)]
    return [_part(layout, groups, *shared) for _ in range(num_calls)]


def _part(
    layout: Layout,
    groups_of: list[ParallelGroups],  # by micro-batch
    loss: Loss,
    samples: list[StepSample],
    reduction: str,
    vocab_size: int,
    dtype: torch.dtype,
) -> _Part:
    step = WholeStep(samples, vocab_size, dtype)
    tp_rank, columns = groups_of[0].tp.rank(), vocab_size // layout.tensor
    shard = slice(tp_rank * columns, (tp_rank + 1) * columns)
    gradient = torch.zeros_like(step.logits)
    has_graph = reaches_padding = False
    for index, groups in enumerate(groups_of):
        mine = list(samples_of(layout, groups, index, len(samples)))
        batch, rows, is_token = step.batch(mine, layout, groups, vocab_start=shard.start)
        leaf = step.logits[rows, shard].clone().requires_grad_()
        value = loss(leaf.clone(), batch)  # a model's logits are no leaf either: they may be changed in place
        _check_value(value)
        # A rank without a term of the loss has no gradient.
        (part,) = torch.autograd.grad(value, leaf, allow_unused=True) if value.requires_grad else (None,)
        if part is not None:
            has_graph = True
            gradient[rows[is_token], shard] = part[is_token]
            reaches_padding |= bool((part[~is_token] != 0).any())
    if reduction == "mean":
        gradient /= layout.data * layout.context * layout.num_microbatches
    return _Part(gradient, has_graph, reaches_padding)


def _check_value(value: object) -> None:
    if isinstance(value, Tensor) and value.dim() == 0:
        return
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    remedy = "; take its loss: lambda logits, batch: loss(logits, batch)[0]" if isinstance(value, tuple) else ""
    raise TypeError(f"the loss returned {what}: a 0-d tensor is wanted{remedy}")


def _along(found: Tensor, truth: Tensor) -> float:
    return float((found * truth).sum() / truth.square().sum())


def _cause(found: Tensor, truth: Tensor, layout: Layout, samples: Sequence[StepSample]) -> str:
    ratio = _along(found, truth)
    residual = float((found - ratio * truth).norm() / truth.norm())
    error = float((found - truth).norm() / truth.norm())
    if error < ROUNDING:
        return f"gradient is off by {error:.0e}, as by rounding to 16 bits: compute in float32, or pass a tolerance"
    sizes = {"cp": layout.context, "dp": layout.data}
    if min(sizes.values()) > 1:
        sizes["dp x cp"] = layout.context * layout.data
    sizes |= {"micro-batches": layout.num_microbatches, "tp": layout.tensor, "ep": layout.expert, "samples": len(samples)}
    return cause_of_gradient(ratio, residual, sizes, expected="one process's")


def _hint(layout: Layout, vocab_size: int) -> str:
    if layout.tensor == 1:
        return ""
    columns = vocab_size // layout.tensor
    return (
        f" (each rank has {columns} of {vocab_size} columns, from batch.vocab_start; a loss that needs all: whole_vocabulary=True)"
    )


class RaisedByLoss:
    """What the first failed rank has raised. what: one line. traceback: from the loss on. hangs: it gave no answer in time."""

    def __init__(self, error: RankError):
        rank, text = next(iter(error.errors.items()))
        lines = text.rstrip().splitlines()
        self.hangs = not lines[0].startswith("Traceback")
        frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
        of_loss = [index for index in frames if OWN_FOLDER not in lines[index]]
        self.what = f"rank {rank} {lines[0]}" if self.hangs else f"rank {rank} raises {lines[-1]}"
        if self.hangs:  # the innermost frame comes first
            ours = next((index for index, line in enumerate(lines) if OWN_FOLDER in line), len(lines))
            self.traceback = "\n".join(lines[1:ours])
        else:
            self.traceback = "\n".join(lines[of_loss[0] :] if of_loss else [])
