"""Tests any loss of (logits, batch): a step split over gloo ranks has the gradient of one process.

It needs torch alone. It does not know what the loss computes, and undoes only the factor that the caller declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl.errors import ConfigError
from megatron_rl.layout.context_parallel import local_positions
from megatron_rl.layout.groups import ParallelGroups, process_group
from megatron_rl.testing.comparison import cause_of_gradient, named_sizes
from megatron_rl.testing.layout_step import Layout, StepSample, samples_of
from megatron_rl.testing.ranks import RankError, RankPool
from megatron_rl.testing.reference import ragged_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBatch:
    """One micro-batch of one rank: N packed documents, T local tokens, zigzag slices under context parallelism.

    Samples and prompts are counted over the whole step, before slicing. Padding is masked.
    """

    labels: Tensor  # [T] int64 in the full vocabulary: the token that logits[t] predicts
    loss_mask: Tensor  # [T] bool
    old_log_probs: Tensor  # [T]
    advantages: Tensor  # [N]
    cu_seqlens: Tensor  # [N + 1] int32, bounds of the local slices
    document_ids: Tensor  # [T] int64, which of the N documents
    token_counts: Tensor  # [N] int64, unmasked tokens of the whole document
    prompt_token_counts: Tensor  # [N] int64, unmasked tokens of its prompt's documents in the step
    num_samples: int
    num_prompts: int
    num_tokens: int
    num_microbatches: int
    vocab_start: int  # the first column of this tensor-parallel rank's logits
    vocab_size: int
    tp_group: ProcessGroup
    cp_group: ProcessGroup
    dp_group: ProcessGroup


class WholeStep:
    """The tokens of a whole step, one sample after another, with logits equal on all ranks. A row predicts the token that follows
    it, and the last row of a sample nothing."""

    def __init__(self, samples: list[StepSample], vocab_size: int, dtype: torch.dtype):
        self.samples, self.vocab_size = samples, vocab_size
        self.starts = torch.tensor([0, *(len(sample.tokens) for sample in samples)]).cumsum(0).tolist()
        self.labels = torch.cat([torch.tensor([*sample.tokens[1:], 0]) for sample in samples])  # [R]
        masks = [[0] * (len(one.tokens) - len(one.loss_mask) - 1) + [*one.loss_mask, 0] for one in samples]
        self.loss_mask = torch.tensor([bit for mask in masks for bit in mask]).bool()  # [R]
        num_rows, generator = len(self.labels), torch.Generator().manual_seed(7)
        self.logits = torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64).to(dtype)
        noise = 0.2 * torch.randn(num_rows, generator=generator, dtype=torch.float64)
        log_probs = torch.log_softmax(self.logits.double(), -1).gather(1, self.labels[:, None])[:, 0]
        self.old_log_probs = (log_probs + noise).to(dtype)
        self.counts = [sum(sample.loss_mask) for sample in samples]
        self.prompt_counts = {sample.prompt_id: 0 for sample in samples}
        for sample, count in zip(samples, self.counts, strict=True):
            self.prompt_counts[sample.prompt_id] += count

    def batch(
        self, mine: list[int], layout: Layout, groups: ParallelGroups, *, vocab_start: int
    ) -> tuple[LossBatch, Tensor, Tensor]:
        """(the micro-batch of these samples, the row in the step of each local token, whether each is a token and not padding).
        Padding repeats its document's last row, which is masked."""
        rows, is_token, sizes = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.bool)], [0]
        for index in mine:
            length = len(self.samples[index].tokens)
            order = local_positions(length, groups.cp.rank(), groups.cp.size())
            rows.append(self.starts[index] + order.clamp(max=length - 1))
            is_token.append(order < length)
            sizes.append(order.numel())
        chosen, here = [self.samples[index] for index in mine], torch.cat(rows)
        cu_seqlens = torch.tensor(sizes).cumsum(0).to(torch.int32)
        batch = LossBatch(
            labels=self.labels[here],
            loss_mask=self.loss_mask[here],
            old_log_probs=self.old_log_probs[here],
            advantages=torch.tensor([sample.advantage for sample in chosen], dtype=self.logits.dtype),
            cu_seqlens=cu_seqlens,
            document_ids=torch.arange(len(mine)).repeat_interleave(cu_seqlens.diff()),
            token_counts=torch.tensor([self.counts[index] for index in mine], dtype=torch.int64),
            prompt_token_counts=torch.tensor([self.prompt_counts[sample.prompt_id] for sample in chosen], dtype=torch.int64),
            num_samples=len(self.samples),
            num_prompts=len(self.prompt_counts),
            num_tokens=sum(self.counts),
            num_microbatches=layout.num_microbatches,
            vocab_start=vocab_start,
            vocab_size=self.vocab_size,
            tp_group=process_group(groups.tp),
            cp_group=process_group(groups.cp),
            dp_group=process_group(groups.dp),
        )
        return batch, here, torch.cat(is_token)


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
    """Raises AssertionError with each layout whose gradient by the logits is not the one of one process and one micro-batch, and
    RankError where the loss fails there.

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
    ((truth, _),) = _run(pool, Layout(), *shared)
    if not 0 < truth.norm() < math.inf:
        raise AssertionError("on one process the gradient by the logits is 0 or not finite: there is nothing to compare")
    faults = []
    for layout in layouts:
        try:
            parts = _run(pool, layout, *shared)
        except RankError as error:
            rank, text = next(iter(error.errors.items()))  # the first to fail: its traceback, or the stack where it hangs
            faults.append(f"  {layout}: rank {rank}: {text.rstrip()}")
            break
        found = torch.stack([gradient for gradient, _ in parts]).sum(0)
        if not (found - truth).norm() <= tolerance * truth.norm():
            ratio = float((found * truth).sum() / truth.square().sum())
            residual = float((found - ratio * truth).norm() / truth.norm())
            cause = cause_of_gradient(ratio, residual, named_sizes(layout, samples), expected="one process's")
            faults.append(f"  {layout}: {cause}")
        elif any(reaches_padding for _, reaches_padding in parts):
            faults.append(f"  {layout}: padding has a gradient: mask it by batch.loss_mask")
    if faults:
        raise AssertionError("\n".join(["the gradient depends on the layout:", *faults]))


def _run(pool: RankPool, layout: Layout, *shared) -> list[tuple[Tensor, bool]]:
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
) -> tuple[Tensor, bool]:  # [tokens of all samples, V]
    """The gradient, zero outside this rank's part, and whether padding has one."""
    by_size = {size: make_groups(layout.over(size)) for size in sorted({*layout.contexts})}
    step = WholeStep(samples, vocab_size, dtype)
    tp_rank, columns = by_size[layout.contexts[0]].tp.rank(), vocab_size // layout.tensor
    shard = slice(tp_rank * columns, (tp_rank + 1) * columns)
    gradient = torch.zeros_like(step.logits)
    reaches_padding = False
    for index, groups in enumerate(by_size[size] for size in layout.contexts):
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
    return gradient, reaches_padding
