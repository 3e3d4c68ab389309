"""Log-probabilities and entropy of logits [T, V_tp] over a sharded vocabulary; it must never gather logits nor touch the caller's.

Data flow: row statistics of this shard [T, 4] -> one all-gather over tp -> the same merge, in the same order, on every rank ->
(forward) log-probabilities and entropy, (backward) this shard's columns of the gradient, without a collective.
Derivation: docs/losses.md, "Log-probabilities over a sharded vocabulary".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.config import Backend
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, resolve_group
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.flat_rows import gradient_like, rows_overlap
from megatron_rl.ops.log_probs_reference import VocabShard
from megatron_rl.ops.row_kernels import row_kernels

# 1 / temperature is a float32 factor of the logits.
SMALLEST_TEMPERATURE = 1e-30


def vocab_parallel_log_probs(
    logits: Tensor,  # [T, V_tp] float32, bfloat16, float16 or float64: this tp rank's columns
    labels: Tensor,  # [T] int64 ids in the full vocabulary
    *,
    loss_mask: Tensor | None = None,  # [T] bool; None: every row counts
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: Group | None = None,
    with_entropy: bool = False,
    inplace: bool = False,
    backend: str = Backend.AUTO,
) -> Tensor | tuple[Tensor, Tensor]:  # log_probs [T], or (log_probs [T], entropy [T]); float32 (float64 for float64 logits)
    """log softmax(logits / temperature) at the labels and, with `with_entropy`, the entropy of the full distribution.

        lse = ln sum_j e^(z_j), z = logits / temperature     log_prob = z_label - lse     entropy = lse - sum_j p_j z_j

    Differentiable in both; the gradient has the logits' dtype. Rows outside `loss_mask` may hold anything: value and gradient 0.
    Columns at and beyond `vocab_size` (None: all are real) take no part, whatever they hold; -inf columns have probability 0.
    `inplace=True` writes the gradient over the logits in backward: any later use of them raises.
    A label that no rank owns gives -inf, a NaN logit NaN: the losses count such tokens and refuse the step.
    backend: "torch", "triton", or "auto": Triton for CUDA logits of at most 32 bits, else torch. Nothing is replaced in silence.
    The sum runs over full rows of fp32 values; there is no reduction over tokens, so the result does not depend on packing.

    Communication: one all-gather of [T, 3] (with entropy [T, 4]) over tp_group in forward, none in backward; none at tp size 1.
    Raises: DataError for wrong shapes or dtypes; ConfigError for a temperature that is not above 0 or a backend that cannot run.

    >>> vocab_parallel_log_probs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    log_probs, entropy = log_probs_and_entropy(
        logits,
        labels,
        loss_mask,
        temperature=temperature,
        vocab_size=vocab_size,
        tp_group=resolve_group(tp_group, "tp"),
        with_entropy=with_entropy,
        inplace=inplace,
        backend=backend,
    )
    return log_probs if entropy is None else (log_probs, entropy)


def log_probs_and_entropy(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    loss_mask: Tensor | None,  # [T] bool
    *,
    temperature: float,
    vocab_size: int | None,
    tp_group: Group,
    with_entropy: bool,
    inplace: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:  # log_probs [T], entropy [T] or None
    """vocab_parallel_log_probs over a resolved group, always as a pair."""
    check_logits(logits)
    kernels = row_kernels(resolve_backend(backend, logits))
    _check_inputs(logits, labels, loss_mask, temperature, inplace)
    shard = vocab_shard(logits.shape[1], temperature, vocab_size, tp_group)
    log_probs, entropy = _VocabParallelLogProbs.apply(logits, labels, loss_mask, shard, tp_group, with_entropy, inplace, kernels)
    return log_probs, entropy if with_entropy else None


def vocab_shard(num_stored_columns: int, temperature: float, vocab_size: int | None, tp_group: Group) -> VocabShard:
    """This rank's columns: shards are equal and contiguous, so padding ends the last ones (one may be all padding)."""
    first_column = tp_group.rank() * num_stored_columns
    if vocab_size is None:
        num_columns = num_stored_columns
    elif not 1 <= vocab_size <= num_stored_columns * tp_group.size():
        raise DataError(
            f"vocab_size={vocab_size} must be in [1, {num_stored_columns * tp_group.size()}], the columns of all tp ranks together"
        )
    else:
        num_columns = min(max(vocab_size - first_column, 0), num_stored_columns)
    # A float whatever number it was: a kernel takes numpy's for an unknown type and a tensor for an address.
    return VocabShard(first_column, num_columns, 1.0 / float(temperature))


class _VocabParallelLogProbs(torch.autograd.Function):
    """Saves logits and three numbers a row; backward recomputes the probabilities chunk by chunk, never all of them at once."""

    @staticmethod
    def forward(ctx, logits, labels, loss_mask, shard, tp_group, with_entropy, inplace, kernels):
        rows = kernels.forward(logits, labels, loss_mask, shard, tp_group, with_entropy=with_entropy)
        ctx.shard, ctx.inplace, ctx.gradient = shard, inplace, kernels.gradient
        # An output that nobody differentiates gives None instead of zeros: an unused entropy then costs no second pass.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, labels, loss_mask, rows.maximum, rows.total, rows.entropy)
        return rows.log_probs, rows.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, log_probs_gradient, entropy_gradient):
        # Unpacking compares version counters: a logits tensor that was written to since forward raises here. That covers a second
        # backward after an in-place one too, because writing the gradient below counts as such a write in both backends.
        logits, labels, loss_mask, maximum, total, entropy = ctx.saved_tensors
        gradient = logits.detach() if ctx.inplace else gradient_like(logits)
        ctx.gradient(
            logits,
            labels,
            loss_mask,
            maximum,
            total,
            entropy,
            log_probs_gradient,
            entropy_gradient,
            ctx.shard,
            out=gradient,
        )
        return gradient, *[None] * 7


def check_logits(logits: Tensor) -> None:
    """Raises DataError unless logits are [T, V_tp] floating point."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise DataError(
            f"logits must be [T, V_tp] floating point, got {tuple(logits.shape)} {logits.dtype}: flatten batch and sequence first"
        )


def _check_inputs(logits: Tensor, labels: Tensor, loss_mask: Tensor | None, temperature: float, inplace: bool) -> None:
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise DataError(f"labels must be [T={logits.shape[0]}] int64, got {tuple(labels.shape)} {labels.dtype}")
    if loss_mask is not None and (loss_mask.shape != labels.shape or loss_mask.dtype != torch.bool):
        raise DataError(f"loss_mask must be [T={logits.shape[0]}] bool, got {tuple(loss_mask.shape)} {loss_mask.dtype}")
    for name, tensor in (("labels", labels), ("loss_mask", loss_mask)):
        if tensor is not None and tensor.device != logits.device:
            raise DataError(f"{name} is on {tensor.device} and the logits on {logits.device}: move it with .to(logits.device)")
    if inplace and rows_overlap(logits):
        raise DataError(
            f"inplace=True needs logits whose elements have memory of their own, got strides {logits.stride()} for shape "
            f"{tuple(logits.shape)}: pass inplace=False, or logits.contiguous()"
        )
    if not (math.isfinite(temperature) and temperature > SMALLEST_TEMPERATURE):
        raise ConfigError(
            f"temperature={temperature} must be a finite number above 0 ({SMALLEST_TEMPERATURE:g}, whose inverse float32 holds): "
            "it divides the logits"
        )
