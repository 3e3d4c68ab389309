"""Computes a head from hidden states [T, H] chunk by chunk, without logits [T, V_tp]: log-probabilities and three matmuls.

    logits = X W^T      dX = c (G W)      dW = G^T (c X), or dW += G^T (c X)

G = d log_prob / d logits of a row depends on no loss, and the coefficient c = d loss / d log_prob commutes with both matmuls.

16-bit products are exact in float32 and are summed there. Only a 16-bit result is rounded, once: logits, unless fp32_logits is set,
dX, and dW where one product makes it. What is added to something is a float32 buffer, and not rounded.

A chunk: logits into one buffer -> row statistics -> one all-gather over tp -> log-probabilities and entropy. Its gradient: over the
logits -> dX -> start of its reduction over tp -> dW during that reduction. Derivation: docs/kernels.md.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import (
    SINGLE,
    Group,
    Pending,
    all_gather_stack,
    start_all_reduce_sum,
    start_reduce_scatter_sum,
)
from megatron_rl.ops.backends import (
    LOGIT_DTYPES,
    RowKernels,
    RowResult,
    VocabShard,
    check_labels,
    check_temperature,
    compare_log_prob_inputs,
    resolve_backend,
    vocab_shard,
    why_triton_is_missing,
)
from megatron_rl.ops.distribution import DistributionTerm
from megatron_rl.ops.log_probs import row_kernels

# With fewer rows the weight gradient is read and written too often: 8 bytes an element and chunk, 18 % of its matmul at 4096 rows.
CUDA_ROWS_WARNING = 4096
# Size limit for a temporary product when the matmul cannot write into its output: 8192 columns at H = 4096, which fill any device.
TEMPORARY_BYTES = 128 * 1024**2
# On a CPU: a block and its float32 operands stay in a cache.
CPU_TEMPORARY_BYTES = 4 * 1024**2


def accumulator_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of the weight gradient's buffer: float32, or float64 for float64 weights."""
    return torch.promote_types(weight.dtype, torch.float32)


def logits_dtype(weight: Tensor, fp32_logits: bool) -> torch.dtype:
    return accumulator_dtype(weight) if fp32_logits else weight.dtype


def gradient_dtype(weight: Tensor, fp32_logits: bool) -> torch.dtype:
    """The dtype of the logits' gradient: the weight's on CUDA, which multiplies 16-bit operands; elsewhere the logits'."""
    return weight.dtype if weight.is_cuda else logits_dtype(weight, fp32_logits)


def bytes_per_logit(weight: Tensor, fp32_logits: bool) -> int:
    """Bytes in all chunk buffers together: the logits, a gradient of another dtype, and its float32 copy on the CPU."""
    logits, gradient = logits_dtype(weight, fp32_logits), gradient_dtype(weight, fp32_logits)
    beside = gradient.itemsize if gradient != logits else 0
    copy = accumulator_dtype(weight).itemsize if gradient.itemsize < 4 and not weight.is_cuda else 0
    return logits.itemsize + beside + copy


def product_operand(tensor: Tensor, fp32_logits: bool) -> Tensor:
    """X or W as an operand. On the CPU no matmul gives float32 from 16-bit operands, so float32 logits need an upcast."""
    return tensor if tensor.is_cuda else tensor.to(logits_dtype(tensor, fp32_logits))


def head_logits(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V_tp, H]
    *,
    out: Tensor,  # [n, V_tp] in the operands' dtype or float32
) -> Tensor:
    """X W^T into `out`."""
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    return _float32_product(hidden, weight.t(), out)


def hidden_gradient(
    gradient: Tensor,  # [n, V_tp]
    weight: Tensor,  # [V_tp, H]
    *,
    out: Tensor | None = None,  # [n, H]; None: a new tensor
) -> Tensor:  # [n, H] in the operands' dtype
    """G W: this shard's part of the sum over the vocabulary."""
    # With `out`, because autocast would cast float32 operands to 16 bits.
    return torch.mm(gradient, weight, out=gradient.new_empty(gradient.shape[0], weight.shape[1]) if out is None else out)


def weight_gradient(
    gradient: Tensor,  # [n, V_tp]
    hidden: Tensor,  # [n, H]
    dtype: torch.dtype,  # 16 bits, float32 or float64
) -> Tensor:  # [V_tp, H] in `dtype`
    """G^T X in a new tensor: no zeros are written, nothing is read. It is summed in float32 or better; a 16-bit result is rounded
    once, by the matmul.

    On CUDA torch's `allow_bf16_reduced_precision_reduction` (and float16's) holds here as for dX: where the library splits the sum
    over rows, which pays for small results only, the parts are rounded too.
    """
    out = hidden.new_empty(gradient.shape[1], hidden.shape[1], dtype=dtype)
    is_16_bit = dtype.itemsize < 4
    if gradient.dtype == hidden.dtype == dtype and (gradient.is_cuda or not is_16_bit):
        return torch.mm(gradient.t(), hidden, out=out)
    if not gradient.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        right = hidden.to(wide)
        for columns in blocks(out.shape[0], max(out.shape[1], gradient.shape[0]) * wide.itemsize, CPU_TEMPORARY_BYTES):
            target = out[columns]
            product = torch.empty_like(target, dtype=wide) if is_16_bit else target
            torch.mm(gradient[:, columns].t().to(wide), right, out=product)
            if is_16_bit:
                target.copy_(product)
        return out
    return _float32_product(gradient.t(), hidden, out)


def add_weight_gradient(
    gradient: Tensor,  # [n, V_tp]
    hidden: Tensor,  # [n, H]
    *,
    out: Tensor,  # [V_tp, H] float32, or float64
) -> Tensor:
    """out += G^T X, summed in the dtype of `out`, without rounding to 16 bits."""
    if gradient.dtype == hidden.dtype == out.dtype:
        return out.addmm_(gradient.t(), hidden)
    if not gradient.is_cuda:
        return out.addmm_(gradient.t().to(out.dtype), hidden.to(out.dtype))
    if _adds_to_float32(gradient.dtype, gradient.device):
        return torch.addmm(out, gradient.t(), hidden, out_dtype=torch.float32, out=out)
    for columns in blocks(out.shape[0], out.shape[1] * out.itemsize):
        out[columns].add_(torch.mm(gradient[:, columns].t(), hidden, out_dtype=torch.float32))
    return out


def _float32_product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    if not left.is_cuda:
        return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)
    return torch.mm(left, right, out_dtype=torch.float32, out=out)


def multiply_into(
    tensor: Tensor,  # [n, H]
    factor: Tensor,  # 0-d on the device of `tensor`, float32 or float64
    out: Tensor,  # [n, H] of any dtype; may be `tensor`
) -> Tensor:
    """tensor x factor into `out`, rounded once, to the dtype of `out`. On CUDA `tensor` then holds the product too."""
    if tensor.is_cuda and tensor.dtype != torch.float64 and tensor.numel() > 0:
        if why_triton_is_missing() is None:
            from megatron_rl.ops.rescale_triton import multiply

            return multiply(tensor, factor, out)
        # With a dimension. Of a 0-d tensor on CUDA, torch rounds the factor to the dtype of `tensor` first.
        return torch.mul(tensor, factor.reshape(1), out=out)
    if out.dtype == tensor.dtype:
        return torch.mul(tensor, factor, out=out)
    for rows in blocks(tensor.shape[0], tensor.shape[1] * tensor.itemsize, CPU_TEMPORARY_BYTES):  # torch makes a temporary there
        torch.mul(tensor[rows], factor, out=out[rows])
    return out


def blocks(num_columns: int, bytes_per_column: int, block_bytes: int | None = None) -> Iterator[slice]:
    """Consecutive columns, as many as take block_bytes (None: TEMPORARY_BYTES), at least one. A temporary for all columns would be
    as large as the logits, or as the weight gradient."""
    step = max(1, (TEMPORARY_BYTES if block_bytes is None else block_bytes) // max(bytes_per_column, 1))
    for start in range(0, num_columns, step):
        yield slice(start, min(start + step, num_columns))


@functools.cache
def _adds_to_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether addmm of this torch adds a product of 16-bit operands to a float32 tensor in place, with the right numbers. Before
    2.10 it did not (pytorch#154086)."""
    left = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64).to(dtype)
    exact = 1.0 + left.double() @ left.double()
    start = torch.ones_like(exact, dtype=torch.float32)
    try:
        found = torch.addmm(start, left, left, out_dtype=torch.float32, out=start)
    except (RuntimeError, TypeError):
        return False
    # 1e-4: sums of 64 products of at most 1 differ by their order; a 16-bit result would have an error of 1e-2.
    return torch.allclose(found.double(), exact, rtol=0, atol=1e-4)


# Enough rows for the matmuls and for whole documents: at [4096, 32000, 512] in float32 the time falls from 16 to 96 MiB and is flat
# from 96 to 192.
CPU_CHUNK_BYTES = 128 * 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """The options of a head besides its operands.

    temperature: the logits are divided by it: the sampling temperature of the rollouts.
    vocab_size: real columns over all tp ranks; the columns after them are padding. None: all columns are real.
    backend: "auto", "torch" or "triton".
    max_logits_bytes: the most bytes of all chunk buffers together. Smaller chunks cost time, not precision.
    sequence_parallel: hidden, and its gradient, is this tp rank's part of the rows.
    fp32_logits: logits of 16-bit operands stay float32; their gradient is 16-bit on CUDA.
    """

    temperature: float = 1.0
    vocab_size: int | None = None
    tp_group: Group = SINGLE
    backend: str = Backend.AUTO
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES
    sequence_parallel: bool = False
    fp32_logits: bool = False


@dataclass(slots=True)
class LinearHead:
    """The operands of one call, its buffers, and the results of the chunks so far."""

    hidden: Tensor  # [T, H] of all tp ranks, detached
    weight: Tensor  # [V_tp, H] as product_operand gives it, detached
    labels: Tensor  # [T]
    options: HeadOptions
    shard: VocabShard
    kernels: RowKernels
    logits: Tensor  # [C, V_tp] of one chunk of up to C rows
    gradient: Tensor  # [C, V_tp] the same storage, unless the gradient has another dtype
    log_probs: Tensor  # [T], 0 for rows of no chunk
    entropy: Tensor | None  # [T]
    term: DistributionTerm | None = None  # of a teacher


@dataclass(slots=True)
class Chunk:
    """The rows of one chunk, with the numbers that its gradient needs; `logits` is a view of a buffer of the head.

    The forward pass may leave G = (delta - p) / temperature there.
    """

    rows: slice | Tensor  # [n] row numbers in [0, T)
    hidden: Tensor  # [n, H]
    labels: Tensor  # [n]
    logits: Tensor  # [n, V_tp]
    result: RowResult  # [n] each
    is_unit_gradient: bool = False


def check_head(hidden: Tensor, weight: Tensor, labels: Tensor, options: HeadOptions) -> int:
    """Returns T. Raises DataError for operands that do not fit each other, ConfigError for the temperature or the backend."""
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
    agreement: RankAgreement | None,
    hidden: Tensor,  # [T, H] or [T / tp, H]
    weight: Tensor,  # [V_tp, H]
    labels: Tensor,  # [T]
    loss_mask: Tensor | None,  # [T]
) -> None:
    """Adds the operands that must be equal on ranks that share chunks and a softmax."""
    if agreement is None or not agreement.is_active:
        return
    loss_mask = None if loss_mask is None else loss_mask.to(labels.device)
    compare_log_prob_inputs(agreement, hidden, labels, loss_mask)
    agreement.add("shape of weight", str(list(weight.shape)))


def rows_per_chunk(max_logits_bytes: int, bytes_per_row: int, *, preferred_bytes: int | None = None) -> int:
    """Rows of a chunk whose buffers fit into max_logits_bytes: as many as can be, so that a micro-batch that fits is one chunk.

    bytes_per_row: in all buffers together. preferred_bytes: a smaller target, such as a cache; one row is always allowed.
    Raises: ConfigError for a max_logits_bytes below one row; the message names the smallest that works.

    >>> rows_per_chunk(2 * 1024**3, 2 * 128_256)
    8371
    """
    if not isinstance(max_logits_bytes, int) or isinstance(max_logits_bytes, bool):
        raise ConfigError(f"max_logits_bytes={max_logits_bytes!r} must be a whole number of bytes")
    if max_logits_bytes < bytes_per_row:
        raise ConfigError(
            f"max_logits_bytes={max_logits_bytes} holds no row of logits: a row takes {bytes_per_row} bytes on this tp rank, so "
            f"{bytes_per_row} is the smallest budget that works and {CUDA_ROWS_WARNING * bytes_per_row} the smallest that is fast"
        )
    if preferred_bytes is not None:
        max_logits_bytes = min(max_logits_bytes, max(preferred_bytes, bytes_per_row))
    return max_logits_bytes // max(bytes_per_row, 1)


@functools.cache
def warn_of_small_chunks(rows: int, bytes_per_row: int) -> None:
    """Warns once for each size. For CUDA, where the fixed cost of a chunk does not shrink with its rows."""
    warnings.warn(
        f"max_logits_bytes gives chunks of {rows} rows; below {CUDA_ROWS_WARNING} rows the reads and writes of the weight gradient "
        f"slow the step down: {CUDA_ROWS_WARNING * bytes_per_row} bytes would hold {CUDA_ROWS_WARNING} rows",
        stacklevel=4,
    )


def chunk_capacity(weight: Tensor, options: HeadOptions, num_rows: int) -> int:
    """Rows of a chunk within max_logits_bytes, on the CPU within CPU_CHUNK_BYTES too; equal on all tp and cp ranks."""
    bytes_per_row = weight.shape[0] * bytes_per_logit(weight, options.fp32_logits)
    if not weight.is_cuda:
        return max(1, rows_per_chunk(options.max_logits_bytes, bytes_per_row, preferred_bytes=CPU_CHUNK_BYTES))
    capacity = rows_per_chunk(options.max_logits_bytes, bytes_per_row)
    if capacity < min(CUDA_ROWS_WARNING, num_rows):
        warn_of_small_chunks(capacity, bytes_per_row)
    return capacity


def make_head(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: HeadOptions, num_rows: int, *, with_entropy: bool
) -> LinearHead:
    """Makes the buffers, for chunks of up to num_rows rows. Call it under no_grad.

    Communication: with sequence_parallel one all-gather of hidden over tp, else none.
    """
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
        entropy=hidden.new_zeros(hidden.shape[0], dtype=numbers) if with_entropy else None,
    )


def device_rows(rows: Tensor, device: torch.device) -> slice | Tensor:
    """A slice where the rows are consecutive, which gives views without a copy. `rows` [n] ascending, on the CPU."""
    first, last = (int(rows[0]), int(rows[-1])) if rows.numel() else (0, -1)
    return slice(first, last + 1) if last - first + 1 == rows.numel() else rows.to(device, non_blocking=True)


def chunk_operands(head: LinearHead, rows: slice | Tensor) -> tuple[Tensor, Tensor]:  # hidden [n, H], labels [n]
    return product_operand(head.hidden[rows], head.options.fp32_logits), head.labels[rows]


def chunk_logits(head: LinearHead, hidden: Tensor) -> Tensor:  # hidden [n, H] -> [n, V_tp]
    """One matmul into the head's buffer. It overwrites the logits of the previous chunk."""
    return head_logits(hidden, head.weight, out=head.logits[: hidden.shape[0]])


def forward_chunk(head: LinearHead, numbers: Tensor, *, leaves_gradient: bool = False) -> Chunk:
    """One matmul and one all-gather over tp; writes the chunk's log_probs and entropy into the head's. numbers: of the rows.

    leaves_gradient: the gradient follows before the buffer's next chunk, without a term of the entropy. Then without shards the
    logits' memory may get the gradient at coefficient 1, which saves a pass.
    """
    rows = device_rows(numbers, head.hidden.device)
    hidden, labels = chunk_operands(head, rows)
    kernels, with_entropy = head.kernels, head.entropy is not None
    result, is_unit_gradient = None, False
    logits = chunk_logits(head, hidden)
    if leaves_gradient and kernels.unit_gradient is not None and head.options.tp_group.size() == 1:
        out = head.gradient[: labels.numel()]
        result = kernels.unit_gradient(logits, labels, head.shard, with_entropy=with_entropy, out=out)
        if result is not None:
            logits, is_unit_gradient = out, True
    if head.term is not None:
        result = head.term.forward(kernels, logits, labels, None, rows, with_entropy=with_entropy)
    elif result is None:
        result = kernels.forward(logits, labels, None, head.shard, head.options.tp_group, with_entropy=with_entropy)
    head.log_probs[rows] = result.log_probs
    if head.entropy is not None:
        head.entropy[rows] = result.entropy
    return Chunk(rows, hidden, labels, logits, result, is_unit_gradient)


@dataclass(slots=True)
class HeadGradient:
    """The buffers that collect the gradient of one call. None: it is not needed."""

    hidden: Tensor | None  # [T, H], this tp rank's part where a reduce-scatter follows, else complete
    weight: Tensor | None  # [V_tp, H]: the parameter's main_grad, else what the products so far gave; None before the first
    needs_weight: bool
    rounds_weight: bool  # a product that is the first and the last one writes the weight's dtype
    has_row_term: bool = True  # the entropy's or a teacher's gradient comes, which does not commute
    is_reduced: bool = True  # `hidden` is summed over tp; False: it stays this shard's part of the sum
    reduction: Pending | None = None  # the reduce-scatter of `hidden`, under sequence parallelism


@dataclass(slots=True)
class ReadyGradient:
    """The gradient that backward returns, once."""

    parameter: Tensor  # the weight as the caller gave it, with main_grad and its flags
    needs_hidden: bool
    is_in_main_grad: bool
    loss_scale: Tensor | float | None
    hidden: Tensor | None = None  # [T, H] or [T / tp, H]
    weight: Tensor | None = None  # [V_tp, H] float32, or already the weight's dtype; None where it is in main_grad or not needed


def hidden_buffer(head: LinearHead) -> Tensor:  # [T, H] zeros
    """Contiguous whatever the strides of head.hidden, because a product and the sum over tp write its slices in place."""
    return torch.zeros_like(head.hidden, memory_format=torch.contiguous_format)


def gradient_for(ready: ReadyGradient, head: LinearHead, *, has_row_term: bool = True, for_pairs: bool = False) -> HeadGradient:
    """Buffers for what `ready` needs. for_pairs: pairs come too, so that their caller rounds, scales and reduces."""
    main_grad = main_grad_of(ready.parameter)
    return HeadGradient(
        hidden=hidden_buffer(head) if ready.needs_hidden else None,
        weight=main_grad if ready.is_in_main_grad else None,
        needs_weight=ready.parameter.requires_grad,
        rounds_weight=main_grad is None and not for_pairs,  # it stays float32 for a main_grad that backward adds it to
        has_row_term=has_row_term,
        is_reduced=not for_pairs,
    )


def cut(rows: Tensor, capacity: int) -> tuple[Tensor, ...]:
    """The fewest chunks of at most `capacity` rows, of sizes that differ by one row at most; no chunk for no rows."""
    num_chunks = -(-rows.numel() // capacity)
    return tuple(torch.tensor_split(rows, num_chunks)) if num_chunks else ()


def multiply_chunk(
    head: LinearHead, chunk: Chunk, c: Tensor | None, e: Tensor | None, gradient: HeadGradient, *, is_last: bool
) -> None:
    """Writes the gradient over the logits, then dX, then dW while dX is reduced. c None: 1."""
    out, row_scale = _logits_gradient(head, chunk, c, e)
    pending, own, hidden, operand = None, None, gradient.hidden, chunk.hidden
    if hidden is not None:
        # A slice of rows is written to the place where it stays.
        own = hidden[chunk.rows] if isinstance(chunk.rows, slice) and hidden.dtype == out.dtype else None
        part = hidden_gradient(out, head.weight, out=own)
        if row_scale is not None:
            part.mul_(row_scale)
        if head.options.sequence_parallel or not gradient.is_reduced:
            if own is None:
                hidden[chunk.rows] = part.to(hidden.dtype)
            if is_last and gradient.is_reduced:
                gradient.reduction = start_reduce_scatter_sum(hidden, head.options.tp_group)
        else:
            pending = start_all_reduce_sum(part, head.options.tp_group)
        del part
    if gradient.needs_weight:
        if row_scale is not None:  # rows that were gathered are this chunk's own; a slice shows the caller's tensor
            scaled = operand if isinstance(chunk.rows, Tensor) else torch.empty_like(operand)
            operand = torch.mul(operand, row_scale, out=scaled)
        if gradient.weight is not None:
            add_weight_gradient(out, operand, out=gradient.weight)
        else:
            dtype = head.hidden.dtype if is_last and gradient.rounds_weight else accumulator_dtype(head.hidden)
            gradient.weight = weight_gradient(out, operand, dtype)
    if hidden is not None and pending is not None:
        reduced = pending.wait()
        if own is None:
            hidden[chunk.rows] = reduced.to(hidden.dtype)


def _logits_gradient(
    head: LinearHead, chunk: Chunk, c: Tensor | None, e: Tensor | None
) -> tuple[Tensor, Tensor | None]:  # [n, V_tp], and [n, 1] that rows of both products get, or None
    """Each row is rounded once more where c comes after the product: c (G W) and c X in 16 bits, in the place of c G."""
    if chunk.is_unit_gradient:
        return chunk.logits, None if c is None else c[:, None]
    result, kernels = chunk.result, head.kernels
    c = torch.ones_like(result.total) if c is None else c
    out = head.gradient[: chunk.logits.shape[0]]
    if head.term is None:
        kernels.gradient(chunk.logits, chunk.labels, None, result.maximum, result.total, result.entropy, c, e, head.shard, out=out)
    else:
        d = head.term.weights[chunk.rows]
        head.term.write_gradient(kernels, chunk.logits, chunk.labels, None, chunk.rows, result, c, e, d, out=out)
    return out, None


def finish(head: LinearHead, gradient: HeadGradient) -> Tensor | None:
    """After the last chunk: the complete gradient of hidden, and a weight gradient of zeros where no row had a coefficient."""
    if gradient.needs_weight and gradient.weight is None:
        gradient.weight = torch.zeros_like(head.weight, dtype=head.hidden.dtype)
    if gradient.hidden is None:
        return None
    if head.options.sequence_parallel and gradient.is_reduced and gradient.reduction is None:
        gradient.reduction = start_reduce_scatter_sum(gradient.hidden, head.options.tp_group)
    return gradient.hidden if gradient.reduction is None else gradient.reduction.wait()


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's float32 gradient buffer of the weight; None without one, with Megatron-FSDP, which makes its own later, and where
    a hook on the weight must see its gradient: autograd then gets it."""
    main_grad = getattr(weight, "main_grad", None)
    # torch can register hooks on a tensor, and has no public name for those that are there.
    if main_grad is None or hasattr(weight, "__fsdp_param__") or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    return main_grad if main_grad.dtype == accumulator_dtype(weight) and main_grad.shape == weight.shape else None


def gradient_in_main_grad(parameter: Tensor) -> Tensor | None:
    """The placeholder for a gradient that is in main_grad already. Megatron's DDP hook needs a gradient, and adds it to main_grad
    unless `grad_added_to_main_grad` is True. With zero_out_wgrad (tied embeddings) the hook always adds it, so it is zeros."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter) if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)
