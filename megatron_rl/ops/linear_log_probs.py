"""Log-probabilities of hidden states [T, H] through a sharded head, chunk by chunk; it must never hold logits [T, V_tp].

Data flow of a chunk: logits = X W^T into one buffer -> row statistics -> one all-gather over tp -> log-probabilities and entropy.
The gradient of a chunk, while its logits are there, is in ops/linear_gradient.py. Derivation: docs/kernels.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend
from megatron_rl.errors import DataError
from megatron_rl.layout.collectives import all_gather_stack
from megatron_rl.layout.groups import SINGLE, Group, resolve_group
from megatron_rl.layout.rank_agreement import RankAgreement
from megatron_rl.ops.autograd import runs_eagerly
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.linear_head import bytes_per_logit, gradient_dtype, head_logits, logits_dtype, product_operand
from megatron_rl.ops.linear_schedule import (
    CUDA_ROWS_WARNING,
    MOVE_DIVISOR,
    rows_per_chunk,
    schedule_rows,
    warn_of_small_chunks,
)
from megatron_rl.ops.log_probs import LOGIT_DTYPES, check_labels, check_temperature, compare_log_prob_inputs, vocab_shard
from megatron_rl.ops.log_probs_reference import RowResult, VocabShard
from megatron_rl.ops.row_kernels import RowKernels, row_kernels

# Rows enough for the matmuls, and for whole documents: at [4096, 32000, 512] in float32 time falls from 16 to 96 MiB and is flat
# from there to 192.
CPU_CHUNK_BYTES = 128 * 1024**2


@runs_eagerly
def linear_log_probs(
    hidden: Tensor,  # [T, H], or this rank's [T / tp, H] with sequence_parallel; float32, bfloat16, float16 or float64
    weight: Tensor,  # [V_tp, H] of the same dtype: this tp rank's rows of the head
    labels: Tensor,  # [T] int64 ids in the full vocabulary
    *,
    loss_mask: Tensor | None = None,  # [T] bool, on any device; None: every row counts
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: Group | None = None,
    with_entropy: bool = False,
    backend: str = Backend.AUTO,
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES,
    sequence_parallel: bool = False,
    fp32_logits: bool = False,
    check_ranks: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # log_probs [T], or (log_probs [T], entropy [T]); float32 (float64 for float64)
    """log softmax(hidden @ weight.T / temperature) at the labels, forward only: old and reference policies, evaluation.

    One matmul over the rows of `loss_mask`; the others are not multiplied, may hold anything, and give 0. Never differentiable:
    linear_policy_loss has the gradient. `max_logits_bytes` bounds all chunk buffers together. fp32_logits: logits of 16-bit
    operands stay float32. Columns, labels and non-finite values are treated as in `vocab_parallel_log_probs`.

    Communication: one all-gather of [rows, 3] (with entropy [rows, 4]) over tp_group a chunk, and with sequence_parallel one of
    hidden [T / tp, H]; none at tp size 1. check_ranks as in `vocab_parallel_log_probs`.
    A loss_mask on CUDA is read on the host: one synchronisation; one on the CPU costs none.
    Raises: DataError for wrong shapes or dtypes; ConfigError for a temperature that is not above 0, a backend that cannot run and
    a budget that holds no row.

    >>> linear_log_probs(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    tp_group = resolve_group(tp_group, "tp")
    options = HeadOptions(temperature, vocab_size, tp_group, with_entropy, backend, sequence_parallel, fp32_logits)
    with RankAgreement(tp_group, SINGLE, check_ranks=check_ranks) as agreement:
        num_tokens = check_head(hidden, weight, labels, options)
        if loss_mask is not None and (
            not isinstance(loss_mask, Tensor) or loss_mask.shape != (num_tokens,) or loss_mask.dtype != torch.bool
        ):
            given = f"{tuple(loss_mask.shape)} {loss_mask.dtype}" if isinstance(loss_mask, Tensor) else type(loss_mask).__name__
            raise DataError(f"loss_mask must be [T={num_tokens}] bool, got {given}")
        compare_heads(agreement, hidden, weight, labels, loss_mask, options, max_logits_bytes)
        rows = torch.arange(num_tokens) if loss_mask is None else loss_mask.cpu().nonzero()[:, 0]
        capacity = chunk_capacity(weight, max_logits_bytes, fp32_logits, rows.numel())
    with torch.no_grad():
        items = schedule_rows(rows, capacity)
        chunks = [chunk for item in items for chunk in item.chunks]
        head = make_head(hidden, weight, labels, options, max((chunk.numel() for chunk in chunks), default=0))
        for chunk in chunks:
            forward_chunk(head, device_rows(chunk, head.hidden.device))
    return head.log_probs if head.entropy is None else (head.log_probs, head.entropy)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What is said about a head beside its operands."""

    temperature: float
    vocab_size: int | None
    tp_group: Group
    with_entropy: bool
    backend: str
    sequence_parallel: bool
    fp32_logits: bool


@dataclass(slots=True)
class LinearHead:
    """The operands of one call, its buffers, and what the chunks have found so far."""

    hidden: Tensor  # [T, H] of all tp ranks, detached
    weight: Tensor  # [V_tp, H] as the matmuls take it, detached
    labels: Tensor  # [T]
    options: HeadOptions
    shard: VocabShard
    kernels: RowKernels
    logits: Tensor  # [C, V_tp] of one chunk; its gradient is written over it
    gradient: Tensor  # [C, V_tp] the same storage, unless the gradient has another dtype
    log_probs: Tensor  # [T], 0 where no chunk has been
    entropy: Tensor | None  # [T]


@dataclass(slots=True)
class Chunk:
    """One chunk's rows with the numbers that its gradient needs; `logits` is a view of the head's buffer."""

    rows: slice | Tensor  # [n] of T
    hidden: Tensor  # [n, H]
    labels: Tensor  # [n]
    logits: Tensor  # [n, V_tp]
    result: RowResult  # [n] each


def check_head(hidden: Tensor, weight: Tensor, labels: Tensor, options: HeadOptions) -> int:
    """T. Raises DataError for operands that do not fit each other, ConfigError for the temperature."""
    for name, letters, tensor in (("hidden", "[T, H]", hidden), ("weight", "[V_tp, H]", weight)):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            given = type(tensor).__name__ if not isinstance(tensor, Tensor) else f"a tensor of layout {tensor.layout}"
            raise DataError(f"{name} is {given}: pass a dense torch tensor {letters}")
        if tensor.dim() != 2 or tensor.dtype not in LOGIT_DTYPES:
            raise DataError(
                f"{name} must be {letters} in float32, bfloat16, float16 or float64, got {tuple(tensor.shape)} {tensor.dtype}: "
                "flatten batch and sequence first"
            )
    if hidden.shape[1] != weight.shape[1]:
        raise DataError(f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}: both end with the hidden size H")
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        raise DataError(
            f"hidden is {hidden.dtype} on {hidden.device} and weight {weight.dtype} on {weight.device}: cast or move one of them; "
            "fp32_logits=True gives float32 logits of 16-bit operands"
        )
    num_tokens = hidden.shape[0] * (options.tp_group.size() if options.sequence_parallel else 1)
    if options.sequence_parallel and isinstance(labels, Tensor) and labels.shape != (num_tokens,):
        raise DataError(
            f"labels must be [T={num_tokens}], tp size {options.tp_group.size()} times hidden's {hidden.shape[0]} rows, got "
            f"{tuple(labels.shape)}"
        )
    check_labels(labels, num_tokens)
    if labels.device != hidden.device:
        raise DataError(f"labels are on {labels.device} and hidden on {hidden.device}: move them with .to(hidden.device)")
    check_temperature(options.temperature)
    vocab_shard(weight.shape[0], options.temperature, options.vocab_size, options.tp_group)
    resolve_backend(options.backend, weight)
    return num_tokens


def compare_heads(
    agreement: RankAgreement,
    hidden: Tensor,  # [T, H] or [T / tp, H]
    weight: Tensor,  # [V_tp, H]
    labels: Tensor,  # [T]
    loss_mask: Tensor | None,  # [T]
    options: HeadOptions,
    max_logits_bytes: int,
) -> None:
    """What must be equal for ranks that share chunks and a softmax."""
    if not agreement.is_active:
        return
    loss_mask = None if loss_mask is None else loss_mask.to(labels.device)
    compare_log_prob_inputs(agreement, hidden, labels, loss_mask, options.temperature, options.vocab_size)
    agreement.add("shape of weight", str(list(weight.shape)))
    for name in ("with_entropy", "backend", "sequence_parallel", "fp32_logits"):
        agreement.add(name, getattr(options, name))
    agreement.add("max_logits_bytes", max_logits_bytes)


def chunk_capacity(weight: Tensor, max_logits_bytes: int, fp32_logits: bool, num_rows: int) -> int:
    """Rows of a chunk within the budget, on the CPU within a cache-sized target too; equal on all tp and cp ranks."""
    bytes_per_row = weight.shape[0] * bytes_per_logit(weight, fp32_logits)
    if not weight.is_cuda:
        return max(1, rows_per_chunk(max_logits_bytes, bytes_per_row, preferred_bytes=CPU_CHUNK_BYTES))
    capacity = rows_per_chunk(max_logits_bytes, bytes_per_row)
    if capacity < min(CUDA_ROWS_WARNING, num_rows):
        warn_of_small_chunks(capacity, bytes_per_row)
    return capacity


def make_head(hidden: Tensor, weight: Tensor, labels: Tensor, options: HeadOptions, num_rows: int) -> LinearHead:
    """Buffers for chunks of up to num_rows rows. With sequence_parallel one all-gather over tp; call it under no_grad."""
    hidden, weight = hidden.detach(), weight.detach()
    if options.sequence_parallel:
        hidden = all_gather_stack(hidden, options.tp_group).flatten(0, 1)
    stored, wanted = logits_dtype(weight, options.fp32_logits), gradient_dtype(weight, options.fp32_logits)
    logits = weight.new_empty(num_rows, weight.shape[0], dtype=stored)
    numbers = torch.promote_types(stored, torch.float32)
    return LinearHead(
        hidden=hidden,
        weight=product_operand(weight, options.fp32_logits),
        labels=labels,
        options=options,
        shard=vocab_shard(weight.shape[0], options.temperature, options.vocab_size, options.tp_group),
        kernels=row_kernels(resolve_backend(options.backend, logits)),
        logits=logits,
        gradient=logits if wanted == stored else torch.empty_like(logits, dtype=wanted),
        log_probs=hidden.new_zeros(hidden.shape[0], dtype=numbers),
        entropy=hidden.new_zeros(hidden.shape[0], dtype=numbers) if options.with_entropy else None,
    )


def device_rows(rows: Tensor, device: torch.device) -> slice | Tensor:
    """A slice where the rows follow each other: a view instead of a copy. `rows` [n >= 1] ascending, on the CPU."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == rows.numel() else rows.to(device, non_blocking=True)


def chunk_logits(head: LinearHead, rows: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:  # hidden [n, H], labels [n], logits
    """One matmul into the head's buffer: it ends what the chunk before had there."""
    hidden, labels = product_operand(head.hidden[rows], head.options.fp32_logits), head.labels[rows]
    return hidden, labels, head_logits(hidden, head.weight, out=head.logits[: hidden.shape[0]])


def forward_chunk(head: LinearHead, rows: slice | Tensor) -> Chunk:
    """One matmul and one all-gather over tp; writes the chunk's log_probs and entropy into the head's."""
    hidden, labels, logits = chunk_logits(head, rows)
    options = head.options
    result = head.kernels.forward(logits, labels, None, head.shard, options.tp_group, with_entropy=options.with_entropy)
    head.log_probs[rows] = result.log_probs
    if head.entropy is not None:
        head.entropy[rows] = result.entropy
    return Chunk(rows, hidden, labels, logits, result)


def take_rows(result: RowResult, rows: Tensor) -> RowResult:  # rows [k] of n, on the device
    return RowResult(**{field.name: getattr(result, field.name)[rows] for field in dataclasses.fields(RowResult)})


def keep_rows(chunk: Chunk, kept: Tensor) -> tuple[Chunk, Tensor]:  # kept [k < n] ascending, on the CPU
    """The chunk of its `kept` rows alone, and their order [k] on the device: number i of the new chunk was order[i].

    Holes are filled with rows from the end, in place and in blocks: no more rows move than were dropped. It ends the old chunk.
    """
    num_rows, num_kept, device = chunk.logits.shape[0], kept.numel(), chunk.logits.device
    is_kept = torch.zeros(num_rows, dtype=torch.bool)
    is_kept[kept] = True
    holes = is_kept[:num_kept].logical_not().nonzero()[:, 0]
    sources = kept[num_kept - holes.numel() :]
    order = torch.arange(num_kept)
    order[holes] = sources
    order, holes, sources = (index.to(device, non_blocking=True) for index in (order, holes, sources))
    block = max(1, num_rows // MOVE_DIVISOR)
    for start in range(0, holes.numel(), block):
        chunk.logits[holes[start : start + block]] = chunk.logits[sources[start : start + block]]
    rows, hidden = chunk.rows, chunk.hidden
    if isinstance(rows, slice):  # then hidden is the caller's
        rows, hidden = order + rows.start, hidden[order]
    else:
        hidden[holes] = hidden[sources]
        rows, hidden = rows[order], hidden[:num_kept]
    return Chunk(rows, hidden, chunk.labels[order], chunk.logits[:num_kept], take_rows(chunk.result, order)), order
