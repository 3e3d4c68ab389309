"""Turns whole samples into one micro-batch of this context-parallel rank, packed or padded; its weights are aggregation's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals, count_step, regularizer_weights, sample_token_weights
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.layout.context_parallel import local_positions, padded_length
from megatron_rl.layout.groups import Group, ParallelGroups
from megatron_rl.megatron.attention import remember_document_bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySample:
    """One whole sample, CPU tensors, with the weights that the step's counts gave it."""

    tokens: Tensor  # [L] int64, prompt and response
    loss_mask: Tensor  # [R] bool or 0/1, one a response token
    advantage: float
    token_weight: float  # from sample_token_weights
    token_count: int  # unmasked tokens, from count_step
    regularizer_weight: float = 0.0  # from regularizer_weights; used by the KL and entropy terms
    old_log_probs: Tensor | None = None  # [R]; None: on-policy
    ref_log_probs: Tensor | None = None  # [R]; needed with a KL coefficient

    @property
    def response_length(self) -> int:
        return self.loss_mask.shape[0]


class UnweightedSample(Protocol):
    """What a rollout knows of a sample: plain lists, from any trainer."""

    tokens: Sequence[int]  # prompt and response
    loss_mask: Sequence[int]  # one a response token
    prompt_id: int | str
    advantage: float
    old_log_probs: Sequence[float] | None  # one a response token
    ref_log_probs: Sequence[float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """The step that a micro-batch belongs to: global counts, and how many micro-batches this rank hands to the schedule."""

    totals: StepTotals
    num_microbatches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch:
    """One micro-batch of one cp rank. T = B * S local tokens, row after row; N documents; rows past N are padding."""

    tokens: Tensor  # [B, S] int64
    position_ids: Tensor  # [B, S] int64
    packed_seq_params: object | None  # Megatron's PackedSeqParams for a packed row, else None
    row_positions: Tensor  # [T] int64, where each local token stands in the flattened whole rows
    labels: Tensor  # [T] int64, the next token
    loss_mask: Tensor  # [T] bool
    old_log_probs: Tensor | None  # [T] float32
    ref_log_probs: Tensor | None  # [T] float32
    advantages: Tensor  # [N] float32
    cu_seqlens: Tensor  # [N + 1] int32, this rank's slices
    token_weights: Tensor  # [N] float32
    regularizer_weights: Tensor  # [N] float32
    token_counts: Tensor  # [N] int64
    context: StepContext


def weigh_samples(
    config: PolicyLossConfig, samples: Sequence[UnweightedSample], groups: ParallelGroups
) -> tuple[list[PolicySample], StepTotals]:
    """This data-parallel rank's samples of a whole step, each with the weight that the whole step's counts give it.

    Communication: count_step's two exchanges over dp; every dp rank calls it, also one without samples.
    """
    masks = [torch.tensor(sample.loss_mask) for sample in samples]  # as it is: count_step refuses what is not 0 or 1
    totals, counts, prompt_counts = count_step(
        masks,
        [sample.prompt_id for sample in samples],
        groups.dp,
        samples_per_prompt=config.samples_per_prompt,
        allow_partial_prompt_groups=config.allow_partial_prompt_groups,
    )
    weights = sample_token_weights(
        config.loss_aggregation,
        counts,
        totals,
        prompt_token_counts=prompt_counts,
        divisor=config.loss_aggregation_divisor,
    )
    rows = zip(samples, masks, weights.tolist(), counts.tolist(), regularizer_weights(counts, totals).tolist(), strict=True)
    return [
        PolicySample(
            tokens=torch.tensor(sample.tokens),
            loss_mask=mask,
            advantage=sample.advantage,
            token_weight=weight,
            token_count=count,
            regularizer_weight=regularizer,
            old_log_probs=None if sample.old_log_probs is None else torch.tensor(sample.old_log_probs),
            ref_log_probs=None if sample.ref_log_probs is None else torch.tensor(sample.ref_log_probs),
        )
        for sample, mask, weight, count, regularizer in rows
    ], totals


def make_padded_batch(
    samples: Sequence[PolicySample],
    context: StepContext,
    *,
    num_rows: int,
    row_length: int,  # whole rows, before context-parallel slicing
    cp_group: Group,
    device: torch.device,
) -> PolicyBatch:
    """One sample a row (bshd), padded to `row_length`; rows beyond the samples are padding, so that shapes agree over a pipeline.

    Raises DataError for more samples than rows, for a row that does not cut into 2 cp_size chunks, for a sample longer than the row
    and for tensors of unlike length.
    """
    if len(samples) > num_rows:
        raise DataError(f"{len(samples)} samples do not fit num_rows={num_rows}")
    _check_row_length(row_length, cp_group.size())
    order = local_positions(row_length, cp_group.rank(), cp_group.size())
    rows = [_SampleRow.of(sample, row_length, index)[order] for index, sample in enumerate(samples)]
    rows += [_SampleRow.padding(row_length)[order]] * (num_rows - len(samples))
    local = order.numel()
    bounds = torch.arange(len(samples) + 1, dtype=torch.int32) * local
    places = torch.cat([order + row * row_length for row in range(num_rows)])
    return _assemble(rows, samples, context, bounds, places.view(num_rows, local), None, device)


def make_packed_batch(
    samples: Sequence[PolicySample],
    context: StepContext,
    *,
    row_length: int,  # the whole row, before context-parallel slicing
    cp_group: Group,
    device: torch.device,
) -> PolicyBatch:
    """All samples in one row (thd), each padded to a multiple of 2 cp_size, the row padded to `row_length` by one more document.

    Raises DataError when the row is too short or has no multiple of 2 cp_size, and for tensors of unlike length.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    cp_size = cp_group.size()
    lengths = [padded_length(sample.tokens.shape[0], cp_size) for sample in samples]
    tail = row_length - sum(lengths)
    if tail < 0:
        raise DataError(f"{len(samples)} samples of {sum(lengths)} padded tokens do not fit row_length={row_length}")
    _check_row_length(row_length, cp_size)
    documents = [_SampleRow.of(sample, size, i) for i, (sample, size) in enumerate(zip(samples, lengths, strict=True))]
    if tail:
        documents.append(_SampleRow.padding(tail))
    sizes = [*lengths, tail] if tail else lengths
    orders = [local_positions(size, cp_group.rank(), cp_size) for size in sizes]
    rows = [document[order] for document, order in zip(documents, orders, strict=True)]
    whole = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bounds = whole[: len(samples) + 1]
    places = torch.cat([order + start for order, start in zip(orders, whole[:-1].tolist(), strict=True)])
    longest = max(sizes)
    cu_seqlens = whole.to(device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    remember_document_bounds(packed, whole.tolist())
    return _assemble(rows, samples, context, bounds // cp_size, places[None], packed, device)


def _check_row_length(row_length: int, cp_size: int) -> None:
    if padded_length(row_length, cp_size) != row_length:
        raise DataError(f"row_length={row_length} must be a multiple of {2 * cp_size}, twice the context-parallel size")


@dataclass(frozen=True, slots=True)
class _SampleRow:
    """A row of one document: position q holds token q and what is known of the token at q + 1."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    loss_mask: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor

    @classmethod
    def padding(cls, length: int) -> _SampleRow:
        tokens, labels = torch.zeros(2, length, dtype=torch.int64)
        old_log_probs, ref_log_probs = torch.zeros(2, length)
        loss_mask = torch.zeros(length, dtype=torch.bool)
        return cls(tokens, torch.arange(length), labels, loss_mask, old_log_probs, ref_log_probs)

    @classmethod
    def of(cls, sample: PolicySample, length: int, index: int) -> _SampleRow:
        total, response = sample.tokens.shape[0], sample.response_length
        if not 1 <= response < total <= length:
            raise DataError(
                f"sample {index} has {total} tokens, {response} of them response, in a row of {length}: a prompt and a response of "
                "at least one token each must fit"
            )
        row = cls.padding(length)
        row.tokens[:total] = sample.tokens
        row.labels[: total - 1] = sample.tokens[1:]
        predicting = slice(total - response - 1, total - 1)  # the logits of these positions give the response tokens
        row.loss_mask[predicting] = sample.loss_mask.bool()
        row.old_log_probs[predicting] = _response_values(sample.old_log_probs, response, index, "old_log_probs")
        row.ref_log_probs[predicting] = _response_values(sample.ref_log_probs, response, index, "ref_log_probs")
        return row

    def __getitem__(self, order: Tensor) -> _SampleRow:
        return _SampleRow(*(getattr(self, name)[order] for name in self.__slots__))


def _response_values(values: Tensor | None, response: int, index: int, name: str) -> Tensor:
    if values is None:
        return torch.zeros(response)
    if values.shape != (response,):
        raise DataError(f"sample {index}: {name} has {tuple(values.shape)} values for a response of {response} tokens")
    return values.float()


def _assemble(rows, samples, context, bounds: Tensor, places: Tensor, packed_seq_params, device) -> PolicyBatch:
    """`bounds` are those of the local slices; `places` [B, S] are the row positions, whose shape the batch takes."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(row, name) for row in rows]).to(device)

    def of_samples(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(sample, name) for sample in samples], dtype=dtype, device=device)

    given = {}
    for name in ("old_log_probs", "ref_log_probs"):
        present = [getattr(sample, name) is not None for sample in samples]
        if any(present) and not all(present):
            raise DataError(f"{name} is given for {sum(present)} of {len(samples)} samples of a micro-batch: all or none")
        given[name] = joined(name) if any(present) else None
    return PolicyBatch(
        tokens=joined("tokens").view(places.shape),
        position_ids=joined("positions").view(places.shape),
        packed_seq_params=packed_seq_params,
        row_positions=places.flatten().to(device),
        labels=joined("labels"),
        loss_mask=joined("loss_mask"),
        advantages=of_samples("advantage", torch.float32),
        cu_seqlens=bounds.to(device=device, dtype=torch.int32),
        token_weights=of_samples("token_weight", torch.float32),
        regularizer_weights=of_samples("regularizer_weight", torch.float32),
        token_counts=of_samples("token_count", torch.int64),
        context=context,
        **given,
    )
