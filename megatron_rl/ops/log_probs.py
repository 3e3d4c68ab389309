"""Computes log-probabilities and entropy of logits [T, V_tp] over a sharded vocabulary, without a gather of the logits.

Data flow: row statistics of this shard [T, 4] -> one all-gather over tp -> the same merge, in the same order, on every rank ->
(forward) log-probabilities and entropy, (backward) this shard's columns of the gradient, without a collective.
Derivation: docs/losses.md, "Log-probabilities over a sharded vocabulary".
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import SINGLE, Group, resolve_group
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import (
    LOGIT_DTYPES,
    VocabShard,
    check_labels,
    check_temperature,
    first_order_only,
    gradient_like,
    resolve_backend,
    rows_overlap,
    runs_eagerly,
    vocab_shard,
)
from megatron_rl.ops.log_probs_torch import RowKernels, logits_gradient_torch, row_results_torch
from megatron_rl.ops.support import SupportLogProbs, check_support, compare_supports


class LogProbKeywords(TypedDict, total=False):
    """Keywords of vocab_parallel_log_probs and linear_log_probs."""

    loss_mask: Tensor | None
    vocab_size: int | None
    tp_group: Group | None
    backend: str
    check_ranks: bool | None
    sampling_support: SamplingSupport | None


class LogitsKeywords(LogProbKeywords, total=False):
    temperature: float
    inplace: bool


@overload
def vocab_parallel_log_probs(
    logits: Tensor, labels: Tensor, *, with_entropy: Literal[False] = False, **options: Unpack[LogitsKeywords]
) -> Tensor: ...


@overload
def vocab_parallel_log_probs(
    logits: Tensor, labels: Tensor, *, with_entropy: Literal[True], **options: Unpack[LogitsKeywords]
) -> tuple[Tensor, Tensor]: ...


@runs_eagerly
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
    check_ranks: bool | None = None,
    sampling_support: SamplingSupport | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # log_probs [T], or (log_probs [T], entropy [T])
    """log softmax(logits / temperature) at the labels and, with `with_entropy`, the entropy of the full distribution.

        lse = ln sum_j e^(z_j), z = logits / temperature     log_prob = z_label - lse     entropy = lse - sum_j p_j z_j

    With `sampling_support` the log-probabilities are over what the sampler kept: the sum of lse is over the row's set. A set of one
    id gives exactly 0. The entropy is of the whole vocabulary.

    All are float32 (float64 for float64 logits) and differentiable; the gradient has the logits' dtype. A label that no rank owns
    gives -inf, a NaN logit gives NaN: the losses count such tokens and refuse the step. Each row is computed alone, so the result
    does not depend on packing.
    torch.compile does not trace this function (a graph break).

    Args:
        logits: this tp rank's columns. -inf columns have probability 0.
        labels: labels[t] is the token whose log-probability logits[t] gives: the caller has shifted.
        loss_mask: rows outside it may hold anything; their value and gradient are 0.
        temperature: the logits are divided by it.
        vocab_size: columns from it on are padding and may hold anything; None: all columns of all tp ranks are real.
        tp_group: None: Megatron's tensor-parallel group, else one rank.
        with_entropy: return the entropy too, in nats.
        inplace: backward writes the gradient over the logits. Another backward that needs the logits then raises; a later read of
            them finds the gradient.
        backend: "torch", "triton", or "auto": Triton for CUDA logits of at most 32 bits, else torch.
        check_ranks: whether tp ranks first compare their arguments, so that a difference or an error on one rank raises on all;
            None: where tp_group communicates through the CPU.
        sampling_support: the ids that top-k, top-p and min-p kept, a set for each row, the same on all tp ranks. None: all.
    Communication: one all-gather of [T, 3] (with entropy [T, 4]) over tp_group in forward, none in backward; with sets of [T, 3],
        and another one for an entropy. check_ranks: 4 KiB. None at size 1.
    Raises: DataError for wrong shapes, dtypes or devices and, on the CPU, for sets that SamplingSupport.check refuses; on CUDA
        their scores are not finite. ConfigError for a temperature that is not above 0, a backend that cannot run, and a backward
        with create_graph=True.

    >>> vocab_parallel_log_probs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    tp_group = resolve_group(tp_group, "tp")
    with RankAgreement(tp_group, SINGLE, check_ranks=check_ranks) as agreement:
        resolved = resolve_backend(backend, check_logits(logits))
        shard = check_log_prob_inputs(logits, labels, loss_mask, temperature, vocab_size, tp_group, inplace=inplace)
        compare_log_prob_inputs(agreement, logits, labels, loss_mask)
        agreement.add("temperature", float(temperature))
        agreement.add("vocab_size", vocab_size)
        agreement.add("with_entropy", with_entropy)
        if sampling_support is not None:
            check_support(sampling_support, labels, loss_mask, shard)
        compare_supports(agreement, sampling_support, loss_mask)
    scored = (logits, labels, loss_mask, shard, tp_group, with_entropy, inplace, row_kernels(resolved))
    if sampling_support is None:
        log_probs, entropy = VocabParallelLogProbs.apply(*scored)  # type: ignore[no-untyped-call]  # torch's
    else:
        log_probs, entropy = SupportLogProbs.apply(*scored, sampling_support)  # type: ignore[no-untyped-call]  # torch's
    return (log_probs, entropy) if with_entropy else log_probs


@functools.cache
def row_kernels(backend: Backend) -> RowKernels:
    """The functions of a resolved backend (resolve_backend). Triton is imported here, on first use."""
    if backend == Backend.TORCH:
        return RowKernels(row_results_torch, logits_gradient_torch)
    from megatron_rl.ops.log_probs_triton import logits_gradient_triton, row_results_triton
    from megatron_rl.ops.rows_triton import unit_gradient

    return RowKernels(row_results_triton, logits_gradient_triton, unit_gradient=unit_gradient)


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
    ) -> tuple[Tensor, Tensor]:
        rows = kernels.forward(logits, labels, loss_mask, shard, tp_group, with_entropy=with_entropy)
        ctx.shard, ctx.inplace, ctx.kernels = shard, inplace, kernels
        # An unused output gets a None gradient, not zeros, so that an unused entropy costs no second pass.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, labels, loss_mask, rows.maximum, rows.total, rows.entropy)
        return rows.log_probs, rows.entropy

    @staticmethod
    @first_order_only
    def backward(ctx: Any, log_probs_gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        # Unpacking raises if the logits were written to since forward: autograd compares version counters. A second backward after
        # an in-place one raises too, because both backends count the write of the gradient below.
        logits, labels, loss_mask, maximum, total, entropy = ctx.saved_tensors
        gradient = logits.detach() if ctx.inplace else gradient_like(logits)
        ctx.kernels.gradient(
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
