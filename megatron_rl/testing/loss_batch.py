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
