"""Makes one micro-batch of this context-parallel rank from whole samples, packed or padded. It computes no weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals
from megatron_rl.errors import DataError
from megatron_rl.layout.context_parallel import local_positions, padded_length
from megatron_rl.layout.groups import Group
from megatron_rl.megatron.attention import remember_document_bounds
from megatron_rl.megatron.routes import NO_ROUTE
from megatron_rl.megatron.samples import PolicySample, weigh_samples

__all__ = ["HostCopies", "PolicyBatch", "PolicySample", "StepContext", "make_packed_batch", "make_padded_batch", "weigh_samples"]
PER_TOKEN_LOG_PROBS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """The step of a micro-batch: global counts, and the number of micro-batches that this rank gives to the schedule."""

    totals: StepTotals
    num_microbatches: int
    policy_version: int | None = None  # of the policy that the step trains
    counts_phantoms: bool = False  # count unmasked tokens whose old log-probability was never measured
    num_routed_tokens: int | None = None  # of all samples of the step, prompts too; only --router-aux-loss exact needs it
    replays_routes: bool = True  # of samples that have some; False: they are only compared


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCopies:
    """CPU copies of the tensors that decide which rows a fused head computes, so that it reads nothing from the device."""

    loss_mask: Tensor  # [T] bool
    advantages: Tensor  # [N] float32
    cu_seqlens: Tensor  # [N + 1] int32
    document_lengths: tuple[int, ...]  # N whole documents with their padding, over all cp ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch:
    """One micro-batch of one cp rank: T = B * S local tokens, row after row, and N documents. Rows after them are padding."""

    tokens: Tensor  # [B, S] int64
    position_ids: Tensor  # [B, S] int64
    is_padding: Tensor  # [B, S] bool: no token of a sample
    packed_seq_params: object | None  # Megatron's PackedSeqParams for a packed row, else None
    row_positions: Tensor  # [T] int64, the position of each local token in the flattened whole rows
    labels: Tensor  # [T] int64, the next token
    loss_mask: Tensor  # [T] bool
    old_log_probs: Tensor | None  # [T] float32
    ref_log_probs: Tensor | None  # [T] float32
    rollout_log_probs: Tensor | None  # [T] float32
    advantages: Tensor  # [N] float32
    staleness: Tensor | None  # [N] int64, policy versions since a sample was sampled
    routes: Tensor | None  # [T, num_moe_layers, topk] int16, -1 where a token has none; see megatron/routes.py
    cu_seqlens: Tensor  # [N + 1] int32, this rank's slices
    token_weights: Tensor  # [N] float32
    regularizer_weights: Tensor  # [N] float32
    token_counts: Tensor  # [N] int64
    host: HostCopies
    context: StepContext

    @property
    def replayed_routes(self) -> Tensor | None:
        return self.routes if self.context.replays_routes else None


def make_padded_batch(
    samples: Sequence[PolicySample],
    context: StepContext,
    *,
    num_rows: int,
    row_length: int,  # whole rows, before context-parallel slicing
    cp_group: Group,
    device: torch.device,
) -> PolicyBatch:
    """One sample a row (bshd), padded to `row_length`. Further rows are padding, so that shapes are equal over a pipeline.
    A batch has at least one row, because a rank without samples still runs the collectives of the model.

    Raises DataError for more samples than rows, for a row that is no multiple of 2 cp_size, for a sample longer than the row and
    for tensors of different lengths.
    """
    if len(samples) > num_rows:
        raise DataError(f"{len(samples)} samples do not fit num_rows={num_rows}")
    num_rows = max(1, num_rows)
    _check_row_length(row_length, cp_group.size())
    order = local_positions(row_length, cp_group.rank(), cp_group.size())
    rows = [_SampleRow.of(sample, row_length, index)[order] for index, sample in enumerate(samples)]
    rows += [_SampleRow.padding(row_length, _of_all(samples))[order]] * (num_rows - len(samples))
    local = order.numel()
    bounds = torch.arange(len(samples) + 1, dtype=torch.int32) * local
    places = torch.cat([order + row * row_length for row in range(num_rows)])
    lengths = [row_length] * len(samples)
    return _assemble(rows, samples, context, bounds, lengths, places.view(num_rows, local), None, device)


def make_packed_batch(
    samples: Sequence[PolicySample],
    context: StepContext,
    *,
    row_length: int,  # the whole row, before context-parallel slicing
    cp_group: Group,
    device: torch.device,
    bounds_on_host: bool = False,
) -> PolicyBatch:
    """All samples in one row (thd), each padded to a multiple of 2 cp_size. One more document pads the row to `row_length`.

    bounds_on_host: the model's cu_seqlens stay on the CPU. Use it without Transformer Engine: the host then reads them several
    times a layer. Transformer Engine reads them on the device.

    Raises DataError for a row that is too short or no multiple of 2 cp_size, and for tensors of different lengths.
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
        documents.append(_SampleRow.padding(tail, _of_all(samples)))
    sizes = [*lengths, tail] if tail else lengths
    orders = [local_positions(size, cp_group.rank(), cp_size) for size in sizes]
    rows = [document[order] for document, order in zip(documents, orders, strict=True)]
    whole = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bounds = whole[: len(samples) + 1]
    places = torch.cat([order + start for order, start in zip(orders, whole[:-1].tolist(), strict=True)])
    longest = max(sizes)
    cu_seqlens = whole if bounds_on_host else whole.to(device, non_blocking=True)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    remember_document_bounds(packed, whole.tolist())
    return _assemble(rows, samples, context, bounds // cp_size, lengths, places[None], packed, device)


def _check_row_length(row_length: int, cp_size: int) -> None:
    if padded_length(row_length, cp_size) != row_length:
        raise DataError(f"row_length={row_length} must be a multiple of {2 * cp_size}, twice the context-parallel size")


@dataclass(frozen=True, slots=True)
class _SampleRow:
    """A row of one document: position q holds token q, and the values of the token at q + 1."""

    tokens: Tensor
    is_padding: Tensor
    positions: Tensor
    labels: Tensor
    loss_mask: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    rollout_log_probs: Tensor
    routes: Tensor  # [length, num_moe_layers, topk]; [length, 0, 0] where the samples have none

    @classmethod
    def padding(cls, length: int, of_routes: tuple[int, int] = (0, 0)) -> _SampleRow:
        tokens, labels = torch.zeros(2, length, dtype=torch.int64)
        loss_mask = torch.zeros(length, dtype=torch.bool)
        routes = torch.full((length, *of_routes), NO_ROUTE, dtype=torch.int16)
        old, ref, rollout = torch.zeros(3, length)
        return cls(tokens, ~loss_mask, torch.arange(length), labels, loss_mask, old, ref, rollout, routes)

    @classmethod
    def of(cls, sample: PolicySample, length: int, index: int) -> _SampleRow:
        total, response = sample.tokens.shape[0], sample.response_length
        if not 1 <= response < total <= length:
            raise DataError(
                f"sample {index} has {total} tokens, {response} of them response, in a row of {length}: a prompt and a response of "
                "at least one token each must fit"
            )
        row = cls.padding(length, _of_routes(sample, index))
        row.tokens[:total] = sample.tokens
        row.is_padding[:total] = False
        if sample.routes is not None:
            row.routes[: total - 1] = sample.routes.transpose(0, 1)
        row.labels[: total - 1] = sample.tokens[1:]
        predicting = slice(total - response - 1, total - 1)  # the logits of these positions give the response tokens
        row.loss_mask[predicting] = sample.loss_mask.bool()
        for name in PER_TOKEN_LOG_PROBS:
            getattr(row, name)[predicting] = _response_values(getattr(sample, name), response, index, name)
        # The loss checks the other vectors. It does not read these, and a metric must not be NaN.
        if sample.rollout_log_probs is not None and not bool(row.rollout_log_probs[row.loss_mask].isfinite().all()):
            raise DataError(f"sample {index}: rollout_log_probs is not finite at an unmasked token: mask the token")
        return row

    def __getitem__(self, order: Tensor) -> _SampleRow:
        return _SampleRow(*(getattr(self, name)[order] for name in self.__slots__))


def _of_routes(sample: PolicySample, index: int) -> tuple[int, int]:
    """(num_moe_layers, topk)"""
    if sample.routes is None:
        return 0, 0
    num_tokens, shape = sample.tokens.shape[0], tuple(sample.routes.shape)
    if len(shape) != 3 or shape[1] != num_tokens - 1:
        raise DataError(f"sample {index}: routes have the shape {shape}, not [num_moe_layers, {num_tokens - 1}, topk]")
    return shape[0], shape[2]


def _of_all(samples: Sequence[PolicySample]) -> tuple[int, int]:
    """_of_routes, one for a micro-batch: all samples have routes of one model, or none has."""
    _is_given(samples, "routes")
    shapes = {_of_routes(sample, index) for index, sample in enumerate(samples)} or {(0, 0)}
    if len(shapes) > 1:
        raise DataError(f"routes of {sorted(shapes)} (layers with experts, experts of a token) in one micro-batch: of one model")
    return shapes.pop()


def _response_values(values: Tensor | None, response: int, index: int, name: str) -> Tensor:
    if values is None:
        return torch.zeros(response)
    if values.shape != (response,):
        raise DataError(f"sample {index}: {name} has {tuple(values.shape)} values for a response of {response} tokens")
    return values.float()


def _assemble(
    rows: list[_SampleRow],
    samples: Sequence[PolicySample],
    context: StepContext,
    bounds: Tensor,
    lengths: list[int],
    places: Tensor,
    packed_seq_params: object | None,
    device: torch.device,
) -> PolicyBatch:
    """bounds: of the local slices. lengths: of the whole documents. places [B, S]: the row positions, in the shape of the batch."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(row, name) for row in rows])

    def of_samples(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(sample, name) for sample in samples], dtype=dtype)

    def there(values: Tensor) -> Tensor:
        """Copies without a wait of the host: the copy is queued before the kernels that read it, and `values` does not change."""
        return values.to(device, non_blocking=True)

    host = HostCopies(
        loss_mask=joined("loss_mask"),
        advantages=of_samples("advantage", torch.float32),
        cu_seqlens=bounds.to(torch.int32),
        document_lengths=tuple(lengths),
    )

    given = {name: there(joined(name)) if _is_given(samples, name) else None for name in (*PER_TOKEN_LOG_PROBS, "routes")}
    if not samples:
        # A KL term needs ref_log_probs, and a rank without samples has none: padding, whose values are not used.
        given["ref_log_probs"] = there(joined("ref_log_probs"))
    staleness = _staleness(samples, context)
    return PolicyBatch(
        tokens=there(joined("tokens").view(places.shape)),
        position_ids=there(joined("positions").view(places.shape)),
        is_padding=there(joined("is_padding").view(places.shape)),
        packed_seq_params=packed_seq_params,
        row_positions=there(places.flatten()),
        labels=there(joined("labels")),
        loss_mask=there(host.loss_mask),
        advantages=there(host.advantages),
        staleness=None if staleness is None else there(staleness),
        cu_seqlens=there(host.cu_seqlens),
        token_weights=there(of_samples("token_weight", torch.float32)),
        regularizer_weights=there(of_samples("regularizer_weight", torch.float32)),
        token_counts=there(of_samples("token_count", torch.int64)),
        host=host,
        context=context,
        **given,
    )


def _is_given(samples: Sequence[PolicySample], name: str) -> bool:
    present = [getattr(sample, name) is not None for sample in samples]
    if any(present) and not all(present):
        raise DataError(f"{name} is given for {sum(present)} of {len(samples)} samples of a micro-batch: all or none")
    return any(present)


def _staleness(samples: Sequence[PolicySample], context: StepContext) -> Tensor | None:  # [N] int64
    if not _is_given(samples, "policy_version"):
        return None
    if context.policy_version is None:
        raise DataError("samples have a policy_version and the step has none: pass the step's version, or samples without one")
    versions = (sample.policy_version for sample in samples)
    return torch.tensor([context.policy_version - version for version in versions if version is not None])
