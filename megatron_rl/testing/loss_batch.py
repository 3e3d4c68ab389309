"""The step that any loss is tested with: its logits, and what each rank gets of it. It does not know the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl.layout.context_parallel import local_positions
from megatron_rl.layout.groups import ParallelGroups, process_group
from megatron_rl.testing.layout_step import Layout, StepSample


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


class WholeStep:
    """The whole step: logits of each token of each sample, equal on all ranks, and the global counts."""

    def __init__(self, samples: list[StepSample], vocab_size: int, dtype: torch.dtype):
        self.samples, self.vocab_size = samples, vocab_size
        lengths = [len(sample.tokens) for sample in samples]
        self.starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        generator = torch.Generator().manual_seed(7)
        self.logits = torch.randn(sum(lengths), vocab_size, generator=generator, dtype=torch.float64).to(dtype)
        # Row q holds the token at q + 1; the last row predicts nothing.
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

    def batch(
        self, mine: list[int], layout: Layout, groups: ParallelGroups, *, vocab_start: int
    ) -> tuple[LossBatch, Tensor, Tensor]:
        """(the micro-batch of these samples, the row in the step of each local token, whether each is a token and not padding)."""
        places, ids, sizes, is_token = [], [], [0], []
        for document, index in enumerate(mine):
            length = len(self.samples[index].tokens)
            order = local_positions(length, groups.cp.rank(), layout.context)
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
            tp_group=process_group(groups.tp),
            cp_group=process_group(groups.cp),
            dp_group=process_group(groups.dp),
        )
        return batch, rows, real
