"""Computes log-probabilities and entropy of logits [T, V_tp] over a sharded vocabulary, without a gather of the logits.

Data flow: row statistics of this shard [T, 4] -> one all-gather over tp -> the same merge, in the same order, on every rank ->
(forward) log-probabilities and entropy, (backward) this shard's columns of the gradient, without a collective.
Derivation: docs/losses.md, "Log-probabilities over a sharded vocabulary".
"""

from __future__ import annotations

import functools
from typing import Literal, TypedDict, Unpack, overload

from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import SINGLE, Group, resolve_group
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import (
    RowKernels,
    VocabParallelLogProbs,
    check_log_prob_inputs,
    check_logits,
    compare_log_prob_inputs,
    resolve_backend,
    runs_eagerly,
)
from megatron_rl.ops.log_probs_torch import logits_gradient_torch, row_results_torch
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

    >>> import torch
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
        log_probs, entropy, _ = VocabParallelLogProbs.apply(*scored, None)  # type: ignore[no-untyped-call]  # torch's
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
