"""Decides how an operation runs: its backend, its programs, and what torch.compile and autograd may do with it.

A named backend is never replaced by another one. Triton is imported only when it is needed, so that the package works without it.

Rows in memory: element j of row r is `shift + r * stride + j` elements after an aligned address. So its alignment is known for any
V_tp: the first aligned column of the row is `-(shift + r * stride) % 8`. A kernel's output beside the logits has their shift and
stride modulo 8, and so the same aligned columns. No element of a tensor is read for a decision: all of them use numbers that the
host knows and that are equal on all tp ranks. So no launch synchronises, and all ranks split their rows in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from packaging.version import Version
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.config import TRITON_OF_TORCH, Backend
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import Group

# The dtypes that the kernels load; they compute in float32. float64 logits are computed in float64, in torch.
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def resolve_backend(
    backend: str,
    logits: Tensor,  # any shape: only device and dtype are used
) -> Backend:
    """TORCH or TRITON. `auto` is Triton for CUDA logits of at most 32 bits and torch for all others, ROCm's too.

    Raises: ConfigError for an unknown name, and for Triton where it cannot run.
    """
    if backend not in set(Backend):
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(Backend)}")
    has_kernels = logits.is_cuda and logits.dtype in TRITON_DTYPES and torch.version.hip is None
    if backend == Backend.TORCH or (backend == Backend.AUTO and not has_kernels):
        return Backend.TORCH
    if logits.dtype not in TRITON_DTYPES:
        raise ConfigError(
            f"backend='triton' takes float32, bfloat16 and float16 logits, got {logits.dtype}: pass backend='torch' or cast them"
        )
    if torch.version.hip is not None:
        raise ConfigError(
            f"backend='triton' needs CUDA and this torch is built for ROCm {torch.version.hip}: the kernels ask for options that "
            "Triton has only for CUDA; pass backend='torch' (--policy-loss-backend torch), which auto takes there"
        )
    reason = why_triton_is_missing()
    if reason is not None:
        raise ConfigError(
            f"backend={str(backend)!r} on {logits.device} needs Triton, and there is none that the kernels can use ({reason}): "
            "install the Triton of this torch, of 2.8 or later, or pass backend='torch'"
        )
    if not logits.is_cuda and not is_interpreted():
        raise ConfigError(
            f"backend='triton' needs CUDA and the logits are on {logits.device}: pass backend='auto' or 'torch'; to interpret the "
            "kernels in a test, set TRITON_INTERPRET=1 before the first import of triton"
        )
    return Backend.TRITON


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter. Triton decides it when a kernel is defined, for the whole process."""
    if why_triton_is_missing() is not None:
        return False
    import triton

    from megatron_rl.ops.loss_triton import bounded_exp

    return not isinstance(bounded_exp, triton.JITFunction)


@functools.cache
def why_triton_is_missing() -> str | None:
    """The error of `import triton`, or that it is too old, as text; None where the kernels can use it."""
    try:
        import triton
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    oldest = min(TRITON_OF_TORCH.values(), key=Version)
    return (
        f"Triton {triton.__version__} is older than {oldest}" if Version(triton.__version__) < Version(f"{oldest}.dev0") else None
    )


P = ParamSpec("P")
R = TypeVar("R")
Context = TypeVar("Context")


def runs_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: torch.compile calls `function` without tracing it (a graph break; with fullgraph=True an error).

    Tracing would lose a gradient that forward computes, because the compiler would keep the loss as a constant. Without
    torch.compile there is no cost: torch._dynamo is not imported.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            eager: Callable[P, R] = torch.compiler.disable(function)
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def first_order_only(backward: Callable[Concatenate[Context, P], R]) -> Callable[Concatenate[Context, P], R]:
    """Decorator for the backward of an autograd.Function: create_graph=True raises ConfigError.

    once_differentiable alone would return a gradient without grad, so that a gradient penalty would have no effect.
    """
    plain: Callable[Concatenate[Context, P], R] = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True through a function of megatron_rl: its gradient is written by hand and cannot be "
                "differentiated; leave create_graph out, or compute a gradient penalty on torch.log_softmax"
            )
        return plain(ctx, *args, **kwargs)

    return call


# 1 / temperature must fit in float32.
SMALLEST_TEMPERATURE = 1e-30
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class VocabShard:
    """What a kernel needs besides the logits. `num_columns` counts this shard's real columns; the others are padding."""

    first_column: int
    num_columns: int
    inverse_temperature: float
    vocab_size: int  # real columns of all shards


def log_probs_dtype(operand: Tensor) -> torch.dtype:
    """Log-probabilities are float64 for float64 operands, else float32."""
    return torch.float64 if operand.dtype == torch.float64 else torch.float32


def vocab_shard(num_stored_columns: int, temperature: float, vocab_size: int | None, tp_group: Group) -> VocabShard:
    """This rank's columns. Shards are equal and contiguous, so the padding is at the end.

    Raises DataError, the same on every tp rank, for a vocab_size that is not a whole number in [1, columns of all tp ranks], or
    leaves the last rank no column.
    """
    first_column, num_stored = tp_group.rank() * num_stored_columns, num_stored_columns * tp_group.size()
    if vocab_size is None:
        vocab_size = num_stored
    elif isinstance(vocab_size, bool) or not isinstance(vocab_size, Integral):
        raise DataError(f"vocab_size={vocab_size!r} must be a whole number, or None where all columns are real")
    if not 1 <= vocab_size <= num_stored:
        raise DataError(f"vocab_size={vocab_size} must be in [1, {num_stored}], the columns of all tp ranks together")
    if vocab_size <= (last := num_stored - num_stored_columns):
        raise DataError(
            f"vocab_size={vocab_size} with {num_stored_columns} columns on each of {tp_group.size()} tensor-parallel ranks: the "
            f"columns of the last rank begin at {last}, and none is real. If each rank has the logits of the whole vocabulary, "
            "build the model with parallel_output=True; if the vocabulary is so small, take fewer tensor-parallel ranks"
        )
    num_columns = min(int(vocab_size) - first_column, num_stored_columns)
    # float(): a Triton kernel does not know numpy numbers, and takes a tensor as an address.
    return VocabShard(first_column, num_columns, 1.0 / float(temperature), int(vocab_size))


def check_logits(logits: Tensor) -> Tensor:
    """Returns the logits. Raises DataError unless they are [T, V_tp] floating point."""
    if not isinstance(logits, Tensor) or logits.layout != torch.strided:
        given = type(logits).__name__ if not isinstance(logits, Tensor) else f"a tensor of layout {logits.layout}"
        raise DataError(f"logits are {given}: pass a dense torch tensor [T, V_tp]")
    if logits.dim() != 2 or logits.dtype not in LOGIT_DTYPES:
        raise DataError(
            f"logits must be [T, V_tp] in float32, bfloat16, float16 or float64, got {tuple(logits.shape)} {logits.dtype}: flatten "
            "batch and sequence first"
        )
    return logits


def check_log_prob_inputs(
    logits: Tensor,  # [T, V_tp], checked
    labels: Tensor,
    loss_mask: Tensor | None,
    temperature: float,
    vocab_size: int | None,
    tp_group: Group,
    *,
    inplace: bool,
) -> VocabShard:
    """This rank's shard of the vocabulary. Raises what vocab_parallel_log_probs raises."""
    check_labels(labels, logits.shape[0])
    if loss_mask is not None and not isinstance(loss_mask, Tensor):
        raise DataError(f"loss_mask is {type(loss_mask).__name__}: pass a torch tensor [T] bool, or None")
    if loss_mask is not None and (loss_mask.shape != labels.shape or loss_mask.dtype != torch.bool):
        raise DataError(f"loss_mask must be [T={logits.shape[0]}] bool, got {tuple(loss_mask.shape)} {loss_mask.dtype}")
    for name, tensor in (("labels", labels), ("loss_mask", loss_mask)):
        if tensor is not None and tensor.device != logits.device:
            raise DataError(f"{name} is on {tensor.device} and the logits on {logits.device}: move it with .to(logits.device)")
    if not isinstance(inplace, bool):
        raise ConfigError(f"inplace={inplace!r} must be True or False")
    if inplace and rows_overlap(logits):
        raise DataError(
            f"inplace=True needs logits whose elements do not share memory, got strides {logits.stride()} for shape "
            f"{tuple(logits.shape)}: pass inplace=False, or logits.contiguous()"
        )
    check_temperature(temperature)
    return vocab_shard(logits.shape[1], temperature, vocab_size, tp_group)


def compare_log_prob_inputs(
    agreement: RankAgreement | None,
    operand: Tensor,  # logits [T, V_tp]; hidden states of the fused head
    labels: Tensor,  # [T]
    loss_mask: Tensor | None,  # [T]
) -> None:
    """Adds the values that must be equal on ranks that share a softmax. Masked labels may hold anything."""
    if agreement is None or not agreement.is_active:
        return
    agreement.add("dtype of logits", str(operand.dtype))
    agreement.add("number of tokens", operand.shape[0], is_sliced=True)
    agreement.add("number of columns", operand.shape[1])
    agreement.add("loss_mask", loss_mask, is_sliced=True)
    agreement.add("labels", labels if loss_mask is None else torch.where(loss_mask, labels, 0), is_sliced=True)


def check_labels(labels: Tensor, num_tokens: int) -> None:
    if not isinstance(labels, Tensor):
        raise DataError(f"labels are {type(labels).__name__}: pass a torch tensor [T={num_tokens}] int64")
    if labels.shape != (num_tokens,) or labels.dtype != torch.int64:
        raise DataError(f"labels must be [T={num_tokens}] int64, got {tuple(labels.shape)} {labels.dtype}")


def check_temperature(temperature: float) -> None:
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        raise ConfigError(
            f"temperature is a tensor of shape {tuple(temperature.shape)}: it must be one number; linear_log_probs takes one a row"
        )
    is_number = isinstance(temperature, Real | Tensor) and not isinstance(temperature, bool)
    if not (is_number and math.isfinite(temperature) and temperature > SMALLEST_TEMPERATURE):
        raise ConfigError(
            f"temperature={temperature!r} must be a finite number above 0 ({SMALLEST_TEMPERATURE:g}, whose inverse float32 holds): "
            "it divides the logits"
        )


@dataclass(frozen=True, slots=True)
class RowResult:
    """Numbers of whole rows, equal bit for bit on all tp ranks."""

    maximum: Tensor  # [T] of the raw logits; undefined where masked
    total: Tensor  # [T] sum of e^((x - maximum) / temperature); undefined where masked
    log_probs: Tensor  # [T], 0 where masked
    entropy: Tensor  # [T], 0 where masked, and everywhere without with_entropy

    def take(self, rows: slice | Tensor) -> RowResult:  # rows [k] of T, on the device
        return RowResult(self.maximum[rows], self.total[rows], self.log_probs[rows], self.entropy[rows])


@dataclass(frozen=True, slots=True)
class RowKernels:
    """forward(logits [T, V_tp], labels [T], loss_mask [T] bool | None, shard, tp_group, *, with_entropy, gather) -> RowResult

    One all-gather of [T, 3] (with entropy [T, 4]) over tp_group, by `gather`; none at size 1.

    gradient(logits, labels, loss_mask | None, maximum [T], total [T], entropy [T], coefficients [T] | None,
             entropy_coefficients [T] | None, shard, *, out [T, V_tp]) -> out

    Writes all of `out`, which may be the logits' own storage or have another floating dtype. No communication.

    unit_gradient(logits [T, V], labels [T], shard, *, with_entropy, out [T, V]) -> RowResult | None

    Writes (delta - p) / temperature to `out`, which may be the logits; with None it did nothing. For one shard. None: never.
    """

    forward: Callable[..., RowResult]
    gradient: Callable[..., Tensor]
    unit_gradient: Callable[..., RowResult | None] | None = None


# Elements between aligned columns: 16 bytes of 16-bit logits, 32 of float32.
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Only the address of `pointer` is used: it is `shift` elements before the first row."""

    pointer: Tensor
    shift: int
    stride: int

    def is_aligned_with(self, other: FlatRows) -> bool:
        return (self.shift - other.shift) % ALIGNMENT == 0 == (self.stride - other.stride) % ALIGNMENT


def flat_rows(
    rows: Tensor,  # [T, V_tp] with adjacent columns
) -> FlatRows:
    """The address is moved down to a multiple of 8 elements where the storage begins early enough.

    Only a tensor over foreign misaligned memory begins too late. Its address is used as it is: slower, not wrong.
    """
    rows = rows.detach()
    stride = rows.stride(0) if rows.shape[0] > 1 else 0
    shift = rows.data_ptr() // rows.itemsize % ALIGNMENT
    if shift == 0 or rows.storage_offset() < shift:
        return FlatRows(rows, 0, stride)
    return FlatRows(rows.as_strided((1,), (1,), rows.storage_offset() - shift), shift, stride)


def has_flat_rows(rows: Tensor) -> bool:
    """Whether columns are adjacent in memory."""
    return rows.stride(1) == 1 or rows.shape[1] <= 1


def rows_overlap(rows: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor. Such rows can be read, not written."""
    (small, count), (large, others) = sorted(zip(rows.stride(), rows.shape, strict=True))
    return rows.numel() > 1 and ((count > 1 and small == 0) or (others > 1 and large <= (count - 1) * small))


def gradient_like(
    logits: Tensor,  # [T, V_tp]
    dtype: torch.dtype | None = None,
) -> Tensor:  # [T, V_tp], uninitialised; the logits' dtype where none is given
    """Memory for a gradient with the logits' aligned columns: contiguous, or with rows up to 7 elements apart for a view."""
    num_rows, width = logits.shape
    shift, stride = 0, width
    if has_flat_rows(logits) and logits.numel() > 0:
        flat = flat_rows(logits)
        shift = flat.shift
        stride += (flat.stride - width) % ALIGNMENT if num_rows > 1 else 0
    if shift == 0 and stride == width:
        return torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)
    return logits.new_empty(shift + num_rows * stride, dtype=dtype).as_strided((num_rows, width), (stride, 1), shift)


class VocabParallelLogProbs(torch.autograd.Function):
    """Saves the logits and three numbers a row. Backward computes the probabilities again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        shard: VocabShard,
        tp_group: Group,
        with_entropy: bool,
        inplace: bool,
        kernels: RowKernels,
        term: Any,  # ops.distribution.DistributionTerm, or None
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # the third: the term's values
        values, further = None, []
        if term is None:
            rows = kernels.forward(logits, labels, loss_mask, shard, tp_group, with_entropy=with_entropy)
        else:
            rows = term.forward(kernels, logits, labels, loss_mask, slice(0, logits.shape[0]), with_entropy=with_entropy)
            # A copy: the term, which ctx holds, must not hold the graph.
            values, further = term.values.clone(), term.saved
        ctx.shard, ctx.inplace, ctx.kernels, ctx.term = shard, inplace, kernels, term
        # An unused output gets a None gradient, not zeros, so that an unused entropy costs no second pass.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, labels, loss_mask, rows.maximum, rows.total, rows.entropy, *further)
        return rows.log_probs, rows.entropy, values

    @staticmethod
    @first_order_only
    def backward(ctx: Any, c: Tensor | None, e: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, ...]:
        # Unpacking raises if the logits were written to since forward: autograd compares version counters. A second backward after
        # an in-place one raises too, because both backends count the write of the gradient below.
        logits, labels, loss_mask, maximum, total, entropy, *_ = ctx.saved_tensors
        gradient = logits.detach() if ctx.inplace else gradient_like(logits)
        if ctx.term is None:
            ctx.kernels.gradient(logits, labels, loss_mask, maximum, total, entropy, c, e, ctx.shard, out=gradient)
        else:
            result = RowResult(maximum, total, total, entropy)  # its log_probs are not read
            ctx.term.write_gradient(ctx.kernels, logits, labels, loss_mask, slice(0, len(labels)), result, c, e, d, out=gradient)
        return gradient, *[None] * 8


# Programs an SM needs to hide the latency of its loads: 8 of 4 KiB cover 700 ns at 4.3 TB/s over 132 SMs (23 KiB an SM). With fewer
# rows than this times the number of SMs, rows are split.
PROGRAMS_PER_PROCESSOR = 8
# A split with fewer full tiles spends most of its time on its first load and on the merge.
SMALLEST_SPLIT_IN_TILES = 4
# The interpreter runs one program at a time.
PROCESSORS_OF_A_CPU = 1


@dataclass(frozen=True, slots=True)
class StatisticsConfiguration:
    """The forward kernel: `lanes` with one 128-bit load each, `tiles` loads in flight; splits None: from the shape."""

    lanes: int = 128
    tiles: int = 2
    num_warps: int = 4
    splits: int | None = None


@dataclass(frozen=True, slots=True)
class GradientConfiguration:
    """The gradient kernel: `block` columns at a time; splits None: from the shape."""

    block: int = 4096
    num_warps: int = 8
    splits: int | None = None


STATISTICS_DEFAULTS = StatisticsConfiguration()
GRADIENT_DEFAULTS = GradientConfiguration()


def split_rows(
    num_rows: int, num_columns: int, tile: int, splits: int | None, device: torch.device
) -> tuple[int, int]:  # number of splits, columns of each: a multiple of the tile
    """One split where the rows fill the device; else as many as fill it, each of at least a few tiles.

    splits: this number, or fewer where there are not enough columns.
    """
    if splits is None:
        wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors(device) // max(num_rows, 1))
        splits = min(wanted, num_columns // (SMALLEST_SPLIT_IN_TILES * tile))
    per_split = -(-num_columns // (max(splits, 1) * tile)) * tile
    return max(-(-num_columns // max(per_split, 1)), 1), max(per_split, tile)


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS_OF_A_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count
