"""The layout property for anybody's loss of (logits, batch): one step dealt out to gloo ranks has one process's gradient.

Needs torch alone. It must never know what the loss computes, nor undo a factor that the caller has not declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl.errors import ConfigError
from megatron_rl.layout.context_parallel import local_positions
from megatron_rl.testing.comparison import cause_of_gradient
from megatron_rl.testing.layout_step import Layout, StepSample
from megatron_rl.testing.ranks import RankPool
from megatron_rl.testing.reference import ragged_samples

# Sizes of a layout that a loss of logits cannot see, or that are somebody else's to honour.
SUPPORTED = ("tensor", "context", "data", "num_microbatches")
LAYOUTS = (
    Layout(num_microbatches=3),
    Layout(data=2),
    Layout(data=4, num_microbatches=3),
    Layout(context=2),
    Layout(context=2, data=2, num_microbatches=3),
    Layout(tensor=2),
    Layout(tensor=2, context=2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBatch:
    """One micro-batch of one rank: N packed documents, T local tokens, zigzag slices under context parallelism.

    Counts of samples and prompts are those of the whole step, taken before slicing. Padding is masked.
    """

    labels: Tensor  # [T] int64 in the full vocabulary: the token that logits[t] predicts
    loss_mask: Tensor  # [T] bool
    old_log_probs: Tensor  # [T]
    advantages: Tensor  # [N]
    cu_seqlens: Tensor  # [N + 1] int32, bounds of the local slices
    document_ids: Tensor  # [T] int64, which of the N documents
    token_counts: Tensor  # [N] int64, unmasked tokens of the whole document
    prompt_token_counts: Tensor  # [N] int64, unmasked tokens of its prompt's documents in the step
    prompt_ids: tuple[str, ...]  # N
    num_samples: int
    num_prompts: int
    num_tokens: int
    num_microbatches: int
    vocab_start: int  # the first column of this tensor-parallel rank's logits
    vocab_size: int
    tp_group: ProcessGroup
    cp_group: ProcessGroup
    dp_group: ProcessGroup


Loss = Callable[[Tensor, LossBatch], Tensor]  # logits [T, V / tp] -> 0-d


def assert_layout_invariant(
    pool: RankPool,
    loss: Loss,
    *,
    layouts: Iterable[Layout] = LAYOUTS,
    reduction: str = "sum",
    samples: Sequence[StepSample] | None = None,
    vocab_size: int = 64,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-5,
) -> None:
    """Raises AssertionError with every layout whose gradient by the logits differs from that of one process with one micro-batch.

    reduction: what becomes of the values that the ranks return. "sum": they are added over micro-batches, dp and cp, as this
    package's losses want it. "mean": averaged over all of them, as DDP and a loop that divides by its micro-batches do.
    samples: default 16 ragged ones of 4 prompts, one of them fully masked. tolerance: of the norm of the difference, relative.
    """
    __tracebackhide__ = True  # of pytest: the message says where
    layouts = list(layouts)
    if reduction not in ("sum", "mean"):
        raise ConfigError(f"reduction={reduction!r} is not one of sum, mean")
    _check_layouts(layouts, vocab_size)
    samples = ragged_samples(vocab_size=vocab_size) if samples is None else list(samples)
    shared = (loss, samples, reduction, vocab_size, dtype)
    truth = _whole_gradient(pool, Layout(), *shared)
    if not truth.norm() > 0:
        raise AssertionError("on one process the gradient by the logits is 0 or not finite: there is nothing to compare")
    faults = []
    for layout in layouts:
        found = _whole_gradient(pool, layout, *shared)
        if not (found - truth).norm() <= tolerance * truth.norm():
            faults.append(f"  {layout}: {_cause(found, truth, layout, samples)}")
    if faults:
        raise AssertionError("the gradient depends on the layout:\n" + "\n".join(faults))


def _check_layouts(layouts: Sequence[Layout], vocab_size: int) -> None:
    problems = [] if layouts else ["layouts is empty: a loss is compared with itself on at least one of them"]
    for layout in layouts:
        rest = [name for name in Layout.__slots__ if name not in SUPPORTED and getattr(layout, name) != getattr(Layout(), name)]
        if rest:
            problems.append(f"{layout}: {', '.join(rest)} means nothing to a loss of logits; use {', '.join(SUPPORTED)}")
        if vocab_size % layout.tensor:
            problems.append(f"{layout}: vocab_size={vocab_size} must be a multiple of tensor={layout.tensor}")
    if problems:
        raise ConfigError(problems)


def _whole_gradient(pool: RankPool, layout: Layout, *shared) -> Tensor:  # [tokens of all samples, V]
    sizes = layout.model_parallel if pool.use_megatron else {}
    return torch.stack(pool.run(_gradient_on_rank, layout, *shared, world_size=layout.world_size, **sizes)).sum(0)


def _gradient_on_rank(
    rank: int, layout: Layout, loss: Loss, samples: list[StepSample], reduction: str, vocab_size: int, dtype: torch.dtype
) -> Tensor:  # [tokens of all samples, V], zero outside this rank's part
    groups = _make_groups(rank, layout)
    step = _Step(samples, vocab_size, dtype)
    tp_rank, columns = groups["tp"].rank(), vocab_size // layout.tensor
    shard = slice(tp_rank * columns, (tp_rank + 1) * columns)
    gradient = torch.zeros_like(step.logits)
    for index in range(layout.num_microbatches):
        mine = list(range(len(samples)))[groups["dp"].rank() :: layout.data][index :: layout.num_microbatches]
        batch, rows, is_token = step.batch(mine, layout, groups, vocab_start=shard.start)
        logits = step.logits[rows, shard].clone().requires_grad_()
        value = loss(logits, batch)
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise TypeError(f"the loss returned {type(value).__name__} {value!r:.80}: a 0-d tensor is wanted")
        (part,) = torch.autograd.grad(value, logits, allow_unused=True) if value.requires_grad else (None,)
        # A rank without a term of the loss has no gradient; what reaches padding rows reaches no parameter.
        if part is not None:
            gradient[rows[is_token], shard] = part[is_token]
    return gradient / (layout.data * layout.context * layout.num_microbatches) if reduction == "mean" else gradient


class _Step:
    """The whole step: logits of every token of every sample, drawn alike on every rank, and the global counts."""

    def __init__(self, samples: list[StepSample], vocab_size: int, dtype: torch.dtype):
        self.samples, self.vocab_size = samples, vocab_size
        lengths = [len(sample.tokens) for sample in samples]
        self.starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        generator = torch.Generator().manual_seed(7)
        self.logits = torch.randn(sum(lengths), vocab_size, generator=generator, dtype=torch.float64).to(dtype)
        # The token at q + 1 stands at row q; the last row predicts nothing.
        tokens = [torch.tensor([*sample.tokens[1:], 0]) for sample in samples]
        self.labels = torch.cat(tokens)
        masks = [[0] * (len(s.tokens) - len(s.loss_mask) - 1) + list(s.loss_mask) + [0] for s in samples]
        self.loss_mask = torch.tensor([bit for mask in masks for bit in mask], dtype=torch.bool)
        noise = 0.2 * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
        log_probs = torch.log_softmax(self.logits.double(), -1).gather(1, self.labels[:, None])[:, 0]
        self.old_log_probs = (log_probs + noise).to(dtype)
        self.counts = [sum(sample.loss_mask) for sample in samples]
        self.prompt_counts: dict[str, int] = {}
        for sample, count in zip(samples, self.counts, strict=True):
            self.prompt_counts[sample.prompt_id] = self.prompt_counts.get(sample.prompt_id, 0) + count

    def batch(self, mine: list[int], layout: Layout, groups: dict, *, vocab_start: int) -> tuple[LossBatch, Tensor, Tensor]:
        """(the micro-batch of these samples, the row of the step that each local token has, which of them are no padding)."""
        places, ids, sizes, is_token = [], [], [0], []
        for document, index in enumerate(mine):
            length = len(self.samples[index].tokens)
            order = local_positions(length, groups["cp"].rank(), layout.context)
            is_token.append(order < length)
            places.append(self.starts[index] + order.clamp(max=length - 1))
            ids.append(torch.full_like(order, document))
            sizes.append(order.numel())
        empty = torch.zeros(0, dtype=torch.int64)
        rows, real = torch.cat([empty, *places]), torch.cat([empty.bool(), *is_token])
        chosen = [self.samples[index] for index in mine]
        batch = LossBatch(
            labels=self.labels[rows],
            loss_mask=self.loss_mask[rows],  # padding repeats its document's last row, which is masked
            old_log_probs=self.old_log_probs[rows],
            advantages=torch.tensor([sample.advantage for sample in chosen], dtype=self.logits.dtype),
            cu_seqlens=torch.tensor(sizes).cumsum(0).to(torch.int32),
            document_ids=torch.cat([empty, *ids]),
            token_counts=torch.tensor([self.counts[index] for index in mine], dtype=torch.int64),
            prompt_token_counts=torch.tensor([self.prompt_counts[sample.prompt_id] for sample in chosen], dtype=torch.int64),
            prompt_ids=tuple(sample.prompt_id for sample in chosen),
            num_samples=len(self.samples),
            num_prompts=len(self.prompt_counts),
            num_tokens=sum(self.counts),
            num_microbatches=layout.num_microbatches,
            vocab_start=vocab_start,
            vocab_size=self.vocab_size,
            **{f"{name}_group": group for name, group in groups.items()},
        )
        return batch, rows, real


def _make_groups(rank: int, layout: Layout) -> dict[str, ProcessGroup]:
    """This rank's groups in Megatron's order of ranks: tp fastest, then cp, then dp. Every rank makes every group."""
    ranks = torch.arange(layout.world_size).view(layout.data, layout.context, layout.tensor)
    groups = {}
    for dim, name in ((2, "tp"), (1, "cp"), (0, "dp")):
        for members in ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist():
            group = dist.new_group(members, backend="gloo")
            if rank in members:
                groups[name] = group
    return groups


def _cause(found: Tensor, truth: Tensor, layout: Layout, samples: Sequence[StepSample]) -> str:
    ratio = float((found * truth).sum() / truth.square().sum())
    residual = float((found - ratio * truth).norm() / truth.norm())
    sizes = {"cp": layout.context, "dp": layout.data}
    if min(sizes.values()) > 1:
        sizes["dp x cp"] = layout.context * layout.data
    sizes |= {"micro-batches": layout.num_microbatches, "tp": layout.tensor, "samples": len(samples)}
    return cause_of_gradient(ratio, residual, sizes, expected="one process's")
