"""Makes one micro-batch of this context-parallel rank from whole samples, packed or padded. It computes no weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.config import FIELDS_OF_TEACHER, Distillation
from megatron_rl.count import StepTotals
from megatron_rl.errors import DataError
from megatron_rl.layout.context_parallel import local_positions, padded_length
from megatron_rl.layout.groups import Group
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.megatron.attention import remember_document_bounds
from megatron_rl.megatron.samples import PolicySample, weigh_samples
from megatron_rl.policy_loss.inputs import LossBatch

__all__ = ["PolicyBatch", "PolicySample", "StepContext", "make_packed_batch", "make_padded_batch", "weigh_samples"]
# In the place of a token's experts: it has no route.
NO_ROUTE = -1
VECTORS_OF_THE_LOSS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "importance_weights")  # [R] each
FURTHER_VECTORS = ("kept_mass", "teacher_log_probs")
TOP_K = FIELDS_OF_TEACHER[Distillation.TOPK]  # [R, K] each


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """The step of a micro-batch: global counts, and the number of micro-batches that this rank gives to the schedule."""

    totals: StepTotals
    num_microbatches: int
    policy_version: int | None = None  # of the policy that the step trains
    counts_phantoms: bool = False  # count unmasked tokens whose old log-probability was never measured
    num_routed_tokens: int | None = None  # of all samples of the step, prompts too; only --router-aux-loss exact needs it
    num_further_tokens: tuple[int, ...] | None = None  # count_further_tokens; only a model with trained layers of MTP needs it


@dataclass(frozen=True, kw_only=True, slots=True)
class FurtherTokens:
    """What K layers of multi-token prediction predict at this rank's T positions: layer k at position p token p + 1 + k."""

    labels: Tensor  # [K, T] int64
    loss_mask: Tensor  # [K, T] bool: whether it is an unmasked response token of the same sample
    host_loss_mask: Tensor  # the same on the CPU


class ForwardInput(Protocol):
    """The part of a batch that a forward reads."""

    @property
    def tokens(self) -> Tensor: ...  # [B, S] int64

    @property
    def position_ids(self) -> Tensor: ...  # [B, S] int64

    @property
    def is_padding(self) -> Tensor | None: ...  # [B, S] bool, for the routers of experts; None: sampling, which trains none

    @property
    def packed_seq_params(self) -> object | None: ...  # Megatron's PackedSeqParams for a packed row

    @property
    def cp_group(self) -> Group | None: ...  # over which its rows are cut; None: the model's own

    @property
    def routes(self) -> Tensor | None: ...  # [T, num_moe_layers, topk], as PolicyBatch has them; None: routers choose


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch:
    """One micro-batch of one cp rank: T = B * S local tokens, row after row, and N samples. Rows after them are padding."""

    tokens: Tensor  # [B, S] int64
    position_ids: Tensor  # [B, S] int64
    is_padding: Tensor  # [B, S] bool: no token of a sample
    packed_seq_params: object | None  # Megatron's PackedSeqParams for a packed row, else None
    cp_group: Group  # of this micro-batch; another one may have another size
    row_positions: Tensor  # [T] int64, the position of each local token in the flattened whole rows
    labels: Tensor  # [T] int64, the next token
    loss: LossBatch  # what the loss reads, advantages [N]; sets of kept ids are empty where nothing was sampled
    host: LossBatch  # the same, with mask, advantages, bounds and sets on the CPU, for a fused head: it reads nothing of the device
    kept_mass: Tensor | None  # [T] float32
    teacher_log_probs: Tensor | None  # [T] float32
    teacher_topk_ids: Tensor | None  # [T, K] int64
    teacher_topk_log_probs: Tensor | None  # [T, K] float32
    staleness: Tensor | None  # [N] int64, policy versions since a sample was sampled
    routes: Tensor | None  # [T, num_moe_layers, topk] int16, -1 where a token has none; see megatron/routing.py
    further: FurtherTokens | None  # None where the context has no num_further_tokens
    context: StepContext


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

    cp_group: of this micro-batch. It need not be the model's: context_groups.make_context_groups makes some of other sizes.

    Raises DataError for more samples than rows, for a row that is no multiple of 2 cp_size, for a sample longer than the row and
    for tensors of different lengths.
    """
    if len(samples) > num_rows:
        raise DataError(f"{len(samples)} samples do not fit num_rows={num_rows}")
    num_rows = max(1, num_rows)
    _check_row_length(row_length, cp_group.size())
    order = local_positions(row_length, cp_group.rank(), cp_group.size())
    places = torch.arange(num_rows)[:, None] * row_length + order
    local_bounds = torch.arange(len(samples) + 1) * order.numel()
    return _assemble(samples, context, [row_length] * num_rows, local_bounds, places, None, cp_group, device)


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

    cp_group: of this micro-batch, as in make_padded_batch.
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
    sizes = [*lengths, tail] if tail else lengths
    bounds = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    starts = bounds.tolist()
    places = torch.cat(
        [start + local_positions(size, cp_group.rank(), cp_size) for start, size in zip(starts[:-1], sizes, strict=True)]
    )
    longest = max(sizes)
    cu_seqlens = bounds if bounds_on_host else bounds.to(device, non_blocking=True)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    remember_document_bounds(packed, starts)
    return _assemble(samples, context, sizes, bounds[: len(samples) + 1] // cp_size, places[None], packed, cp_group, device)


def _check_row_length(row_length: int, cp_size: int) -> None:
    if padded_length(row_length, cp_size) != row_length:
        raise DataError(f"row_length={row_length} must be a multiple of {2 * cp_size}, twice the context-parallel size")


def _assemble(
    samples: Sequence[PolicySample],
    context: StepContext,
    sizes: Sequence[int],
    local_bounds: Tensor,
    places: Tensor,
    packed_seq_params: object | None,
    cp_group: Group,
    device: torch.device,
) -> PolicyBatch:
    """sizes: of the whole documents with their padding; the samples are the first of them. local_bounds [N + 1]: of the samples'
    slices on this rank. places [B, S]: the row positions of this rank's tokens."""
    rows = _whole_rows(samples, sizes)
    if context.num_further_tokens is not None:
        rows |= _further_rows(rows["labels"], rows["loss_mask"], sizes, len(context.num_further_tokens))
    is_whole = places.numel() == sum(sizes)  # in order, because cp_size is 1
    local = rows if is_whole else {name: values[places.flatten()] for name, values in rows.items()}

    def sample_values(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(sample, name) for sample in samples], dtype=dtype)

    def there(values: Tensor) -> Tensor:
        """Copies without a wait of the host: the copy is queued before the kernels that read it, and `values` does not change."""
        return values.to(device, non_blocking=True)

    def copies_of(*names: str) -> dict[str, Any]:
        return {name: there(local[name]) if name in local else None for name in names}

    vectors = copies_of(*VECTORS_OF_THE_LOSS)
    if not samples:
        # A KL term needs ref_log_probs, and a rank without samples has none: padding, whose values are not used.
        vectors["ref_log_probs"] = there(torch.zeros(places.numel()))
    support = None if "set" not in local else _kept_sets(samples).take(local["set"])
    host = LossBatch(
        loss_mask=local["loss_mask"],
        advantages=sample_values("advantage", torch.float32),
        cu_seqlens=local_bounds.to(torch.int32),
        token_weights=there(sample_values("token_weight", torch.float32)),
        regularizer_weights=there(sample_values("regularizer_weight", torch.float32)),
        token_counts=there(sample_values("token_count", torch.int64)),
        sampling_support=support,
        **vectors,
    )
    loss = replace(
        host,
        loss_mask=there(host.loss_mask),
        advantages=there(host.advantages),
        cu_seqlens=there(host.cu_seqlens),
        sampling_support=None if support is None else support.to(device),
    )
    further = None
    if context.num_further_tokens is not None:
        labels, masks = (local[name].t().contiguous() for name in ("further_labels", "further_mask"))
        further = FurtherTokens(labels=there(labels), loss_mask=there(masks), host_loss_mask=masks)
    staleness = _staleness(samples, context)
    return PolicyBatch(
        tokens=there(local["tokens"].view(places.shape)),
        position_ids=there(local["positions"].view(places.shape)),
        is_padding=there(local["is_padding"].view(places.shape)),
        packed_seq_params=packed_seq_params,
        cp_group=cp_group,
        row_positions=there(places.flatten()),
        labels=there(local["labels"]),
        loss=loss,
        host=host,
        staleness=None if staleness is None else there(staleness),
        further=further,
        context=context,
        **copies_of(*FURTHER_VECTORS, *TOP_K, "routes"),
    )


def _whole_rows(samples: Sequence[PolicySample], sizes: Sequence[int]) -> dict[str, Tensor]:  # each [sum of sizes, ...]
    """The flattened whole rows, without a loop over tokens: position q of a document holds token q, and the values of token q + 1.

    "set" is the number of a position's set among those of all response tokens; where it has none, of one more. What the samples do
    not have is left out. Raises DataError where a sample's parts do not fit.
    """
    lengths, responses = [sample.tokens.shape[0] for sample in samples], [sample.response_length for sample in samples]
    for index, (total, response, size) in enumerate(zip(lengths, responses, sizes[: len(samples)], strict=True)):
        if not 1 <= response < total <= size:
            raise DataError(
                f"sample {index} has {total} tokens, {response} of them response, in a row of {size}: a prompt and a response of "
                "at least one token each must fit"
            )
    num_positions, document_sizes = sum(sizes), torch.tensor(sizes)
    starts = document_sizes.cumsum(0) - document_sizes
    at_tokens = _runs(starts[: len(samples)], torch.tensor(lengths, dtype=torch.int64))
    # The logits of the position before a response token give it.
    before_responses = (
        starts[: len(samples)] + torch.tensor(lengths, dtype=torch.int64) - torch.tensor(responses, dtype=torch.int64)
    )
    predicting = _runs(before_responses - 1, torch.tensor(responses, dtype=torch.int64))
    tokens = _joined([sample.tokens for sample in samples], torch.int64)
    is_last = torch.zeros(len(tokens), dtype=torch.bool)
    is_last[torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1] = True

    def placed(padding: float, at: Tensor, values: Tensor) -> Tensor:
        return torch.full((num_positions, *values.shape[1:]), padding, dtype=values.dtype).index_copy_(0, at, values)

    rows = {
        "tokens": placed(0, at_tokens, tokens),
        "positions": torch.arange(num_positions) - starts.repeat_interleave(document_sizes),
        "is_padding": placed(True, at_tokens, torch.zeros_like(is_last)),
        "labels": placed(0, at_tokens[~is_last], tokens[1:][~is_last[:-1]]),
        "loss_mask": placed(False, predicting, _joined([sample.loss_mask for sample in samples], torch.bool)),
    }
    for name in (*VECTORS_OF_THE_LOSS, *FURTHER_VECTORS):
        if _is_given(samples, name):
            values = [_response_values(getattr(sample, name), sample.response_length, i, name) for i, sample in enumerate(samples)]
            rows[name] = placed(0.0, predicting, _joined(values, torch.float32))
    rows |= {name: placed(0, predicting, _top_k_rows(samples, name)) for name in TOP_K if _is_given(samples, name)}
    if "rollout_log_probs" in rows:
        # The loss checks the other vectors. It does not read these, and a metric must not be NaN.
        wrong = (rows["loss_mask"] & ~rows["rollout_log_probs"].isfinite()).nonzero()
        if len(wrong):
            index = int(torch.searchsorted(starts, wrong[0], right=True)) - 1
            raise DataError(f"sample {index}: rollout_log_probs is not finite at an unmasked token: mask the token")
    if _is_given(samples, "kept_ids"):
        rows["set"] = placed(len(predicting), predicting, torch.arange(len(predicting)))
    routes = _routes_of_tokens(samples)
    if routes is not None:
        rows["routes"] = placed(NO_ROUTE, at_tokens[~is_last], routes)
    return rows


def _further_rows(
    labels: Tensor,  # [T] int64, of whole rows
    loss_mask: Tensor,  # [T] bool
    sizes: Sequence[int],  # of the documents, with their padding
    num_layers: int,
) -> dict[str, Tensor]:  # [T, num_layers] each
    """What stands k positions later in the same document, for k = 1 ... num_layers; past its end 0 and False."""
    document_sizes = torch.tensor(sizes)
    ends = document_sizes.cumsum(0).repeat_interleave(document_sizes)
    later = torch.arange(len(labels))[:, None] + torch.arange(1, num_layers + 1)
    is_inside = later < ends[:, None]
    later = torch.where(is_inside, later, 0)
    return {"further_labels": torch.where(is_inside, labels[later], 0), "further_mask": is_inside & loss_mask[later]}


def _runs(starts: Tensor, lengths: Tensor) -> Tensor:  # [N], [N] -> [sum of lengths]
    """starts[n], starts[n] + 1, ..., lengths[n] of them, for each n."""
    return torch.arange(int(lengths.sum())) + (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)


def _joined(values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *(one.to(dtype) for one in values)])


def _routes_of_tokens(samples: Sequence[PolicySample]) -> Tensor | None:  # [tokens but each sample's last, num_moe_layers, topk]
    if not _is_given(samples, "routes"):
        return None
    routes = [sample.routes for sample in samples if sample.routes is not None]
    for index, (sample, given) in enumerate(zip(samples, routes, strict=True)):
        num_tokens, shape = sample.tokens.shape[0], tuple(given.shape)
        if given.is_floating_point() or len(shape) != 3 or shape[1] != num_tokens - 1:
            raise DataError(f"sample {index}: routes are {given.dtype} {shape}, not ids [num_moe_layers, {num_tokens - 1}, topk]")
        if bool((given < 0).any()) or bool((given.sort(-1).values.diff(dim=-1) == 0).any()):
            raise DataError(f"sample {index}: routes: the experts of a token must be different ids of at least 0")
    shapes = {(given.shape[0], given.shape[2]) for given in routes}
    if len(shapes) > 1:
        raise DataError(f"routes of {sorted(shapes)} (layers with experts, experts of a token) in one micro-batch: of one model")
    return torch.cat([given.transpose(0, 1) for given in routes]).to(torch.int16)


def _kept_sets(samples: Sequence[PolicySample]) -> SamplingSupport:
    """The sets of all response tokens, and an empty one."""
    sets = [sample.kept_ids for sample in samples if sample.kept_ids is not None]
    for index, (sample, given) in enumerate(zip(samples, sets, strict=True)):
        if given.num_rows != sample.response_length:
            raise DataError(f"sample {index}: kept_ids has {given.num_rows} sets for a response of {sample.response_length} tokens")
    return SamplingSupport.cat([*sets, SamplingSupport.from_lists([[]])])


def _top_k_rows(samples: Sequence[PolicySample], name: str) -> Tensor:  # [response tokens, K]
    parts = [getattr(sample, name) for sample in samples]
    for index, (sample, part) in enumerate(zip(samples, parts, strict=True)):
        wanted = (sample.response_length, *parts[0].shape[1:2])
        if part.dim() != 2 or part.shape != wanted:
            raise DataError(
                f"sample {index}: {name} is {tuple(part.shape)}, and must be {wanted}: a row for each response token, with as many "
                "ids as in sample 0"
            )
    rows = torch.cat(parts)
    return rows.float() if rows.is_floating_point() else rows.long()


def _response_values(values: Tensor, response: int, index: int, name: str) -> Tensor:
    if values.shape != (response,):
        raise DataError(f"sample {index}: {name} has {tuple(values.shape)} values for a response of {response} tokens")
    return values


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
