"""Log-probabilities of a fused head: forward alone for old and reference policies and an evaluation, else with a gradient."""

from __future__ import annotations

from typing import Literal, Unpack, cast, overload

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend, TermScore
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import SINGLE, Group, resolve_group
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import runs_eagerly
from megatron_rl.ops.linear_autograd import differentiable_linear_log_probs
from megatron_rl.ops.linear_head import (
    HeadOptions,
    check_head,
    check_mask,
    chunk_capacity,
    compare_heads,
    device_rows,
    forward_chunk,
    make_head,
)
from megatron_rl.ops.linear_schedule import schedule_rows
from megatron_rl.ops.log_probs import LogProbKeywords, vocab_shard
from megatron_rl.ops.support_head import make_support_head, run_scores
from megatron_rl.ops.support_scores import check_score, check_support, compare_supports


class LinearKeywords(LogProbKeywords, total=False):
    max_logits_bytes: int
    sequence_parallel: bool
    fp32_logits: bool


@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, with_entropy: Literal[False] = False, **options: Unpack[LinearKeywords]
) -> Tensor: ...


@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, with_entropy: Literal[True], **options: Unpack[LinearKeywords]
) -> tuple[Tensor, Tensor]: ...


@runs_eagerly
def linear_log_probs(
    hidden: Tensor,  # [T, H], or this rank's [T / tp, H] with sequence_parallel; float32, bfloat16, float16 or float64
    weight: Tensor,  # [V_tp, H] of the same dtype: this tp rank's rows of the head
    labels: Tensor,  # [T] int64 ids in the full vocabulary
    *,
    loss_mask: Tensor | None = None,  # [T] bool, on any device; None: every row counts
    temperature: float | Tensor = 1.0,  # a number, or one a row [T]
    vocab_size: int | None = None,
    tp_group: Group | None = None,
    with_entropy: bool = False,
    backend: str = Backend.AUTO,
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES,
    sequence_parallel: bool = False,
    fp32_logits: bool = False,
    check_ranks: bool | None = None,
    sampling_support: SamplingSupport | None = None,
    entropy_score: str = TermScore.FULL,
) -> Tensor | tuple[Tensor, Tensor]:  # log_probs [T], or (log_probs [T], entropy [T]); float32 (float64 for float64)
    """log softmax(hidden @ weight.T / temperature) at the labels, without logits [T, V_tp].

    Where hidden or weight requires a gradient, the results have one: its backward computes the logits of the rows again, chunk by
    chunk (`ops/linear_autograd.py`). Else, and under torch.no_grad, it is one matmul a row. Columns, labels and non-finite values
    are treated as in `vocab_parallel_log_probs`.

    Args:
        hidden: hidden states; rows outside loss_mask may hold anything.
        weight: this tp rank's rows of the head.
        labels: labels[t] is the token whose log-probability row t gives: the caller has shifted.
        loss_mask: only these rows are multiplied; the others give 0. On CUDA it is read on the host, with one synchronisation.
        temperature: of all rows, or of each; rows of one temperature share chunks.
        vocab_size, tp_group, with_entropy, entropy_score, backend, check_ranks: as in `vocab_parallel_log_probs`.
        max_logits_bytes: the most bytes of all chunk buffers together.
        sequence_parallel: hidden is this tp rank's part of the rows.
        fp32_logits: logits of 16-bit operands stay float32.
        sampling_support: the ids that the sampler kept, a set for each row; the log-probabilities are over them. Without an
            entropy of the whole vocabulary only kept columns of the weight are multiplied (ops/support_head.py), in float32, and a
            row of one id is not. It is read on the host: from CUDA with one synchronisation.
    Communication: one all-gather of [rows, 3] (with entropy [rows, 4], with sets too [rows, 7]) over tp_group a chunk, and one of
        all rows with small sets; with sequence_parallel one of hidden [T / tp, H]; with check_ranks one of 4 KiB. None at size 1.
        Backward, with sequence_parallel one all-gather of hidden and one reduce-scatter of its gradient; else one all-reduce of
        [rows, H] a chunk.
    Raises: DataError for wrong shapes, dtypes or devices, and on the CPU for sets that SamplingSupport.check refuses. ConfigError
        for a temperature that is not above 0, a backend that cannot run, a max_logits_bytes below one row, and sampling_support
        with a gradient or with a temperature a row.

    >>> linear_log_probs(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    tp_group = resolve_group(tp_group, "tp")
    has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if has_gradient or (isinstance(temperature, Tensor) and temperature.numel() > 1):
        if sampling_support is not None:
            raise ConfigError(
                "linear_log_probs with sampling_support has no gradient, and one temperature: call it under torch.no_grad(), "
                "with a number; linear_policy_loss has the gradient"
            )
        log_probs, entropy = differentiable_linear_log_probs(
            *(hidden, weight, labels),
            loss_mask=loss_mask,
            temperature=temperature,
            vocab_size=vocab_size,
            tp_group=tp_group,
            with_entropy=with_entropy,
            backend=backend,
            max_logits_bytes=max_logits_bytes,
            sequence_parallel=sequence_parallel,
            fp32_logits=fp32_logits,
            check_ranks=check_ranks,
        )
        return (log_probs, entropy) if with_entropy else log_probs
    of_kept = entropy_score == TermScore.SUPPORT
    temperature = cast(float, temperature)
    numbers = (temperature, vocab_size, tp_group, with_entropy, backend, sequence_parallel, fp32_logits)
    options = HeadOptions(*numbers, entropy_of_kept=of_kept)
    with RankAgreement(tp_group, SINGLE, check_ranks=check_ranks) as agreement:
        check_score("entropy_score", entropy_score, sampling_support)
        agreement.add("entropy_score", entropy_score)
        num_tokens = check_head(hidden, weight, labels, options)
        check_mask(loss_mask, num_tokens)
        compare_heads(agreement, hidden, weight, labels, loss_mask, options, max_logits_bytes)
        on_host, mask = None, None
        if sampling_support is not None:
            mask = None if loss_mask is None else loss_mask.to(hidden.device, non_blocking=True)
            if isinstance(sampling_support, SamplingSupport):
                on_host, sampling_support = sampling_support.to(torch.device("cpu")), sampling_support.to(hidden.device)
            check_support(sampling_support, labels, mask, vocab_shard(weight.shape[0], temperature, vocab_size, tp_group))
        compare_supports(agreement, sampling_support, mask)
        rows = torch.arange(num_tokens) if loss_mask is None else loss_mask.cpu().nonzero()[:, 0]
        capacity = chunk_capacity(weight, max_logits_bytes, fp32_logits, rows.numel())
    with torch.no_grad():
        if on_host is not None:
            sizes = {"capacity": capacity, "max_bytes": max_logits_bytes}
            sparse = make_support_head(hidden, weight, labels, options, on_host, rows, reads_all=False, **sizes)
            run_scores(sparse)
            return sparse.head.log_probs if sparse.head.entropy is None else (sparse.head.log_probs, sparse.head.entropy)
        items = schedule_rows(rows, capacity)
        chunks = [chunk for item in items for chunk in item.chunks]
        head = make_head(hidden, weight, labels, options, max((chunk.numel() for chunk in chunks), default=0))
        for chunk in chunks:
            forward_chunk(head, device_rows(chunk, head.hidden.device))
    return head.log_probs if head.entropy is None else (head.log_probs, head.entropy)
