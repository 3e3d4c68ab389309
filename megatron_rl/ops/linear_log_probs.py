"""Log-probabilities of a fused head, for old and reference policies, an evaluation, and any loss behind them.

A loss of this package knows its coefficients while a chunk's logits exist, so its head makes the gradient in forward
(policy_loss/linear.py). Here the coefficients come in backward. Forward keeps four numbers a row; backward computes the logits of
the rows with a coefficient again, chunk by chunk, and multiplies: four matmuls a row in all, and no logits [T, V_tp].
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import SINGLE, Group, resolve_group, start_all_reduce_sum, start_reduce_scatter_sum
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import RowResult, check_temperature, first_order_only, resolve_backend, runs_eagerly, vocab_shard
from megatron_rl.ops.distribution import DistributionTerm
from megatron_rl.ops.linear_head import (
    Chunk,
    HeadGradient,
    HeadOptions,
    LinearHead,
    ReadyGradient,
    check_head,
    chunk_capacity,
    chunk_logits,
    chunk_operands,
    compare_heads,
    cut,
    device_rows,
    finish,
    forward_chunk,
    gradient_for,
    hidden_buffer,
    make_head,
    multiply_chunk,
)
from megatron_rl.ops.log_probs import LogProbKeywords
from megatron_rl.ops.support import (
    PairKernels,
    Pairs,
    PairScores,
    add_hidden_reference,
    add_weight_reference,
    check_support,
    compare_supports,
    make_pairs,
    multiply_reference,
    pair_gradient,
    score_pairs,
)


class LinearKeywords(LogProbKeywords, total=False):
    temperature: float | Tensor
    max_logits_bytes: int
    sequence_parallel: bool
    fp32_logits: bool
    reduces_hidden: bool


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
    reduces_hidden: bool = True,
    check_ranks: bool | None = None,
    sampling_support: SamplingSupport | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # log_probs [T], or (log_probs [T], entropy [T]); float32 (float64 for float64)
    """log softmax(hidden @ weight.T / temperature) at the labels and, with `with_entropy`, the entropy in nats.

    Both have a gradient where gradients are enabled and hidden or weight requires one; else one matmul runs and nothing is kept.
    The gradient of weight is summed in float32 and rounded once to weight's dtype, by its product where one chunk is enough. Rows
    whose coefficients are 0 take no part in backward. A second backward through a retained graph computes it again. Columns, labels
    and non-finite values are treated as in `vocab_parallel_log_probs`.

    Args:
        hidden: hidden states; rows outside loss_mask may hold anything.
        weight: this tp rank's rows of the head.
        labels: labels[t] is the token whose log-probability row t gives: the caller has shifted.
        loss_mask: only these rows are multiplied; the others give 0, with gradient 0. On CUDA it is read on the host, with one
            synchronisation.
        temperature: of all rows, or of each, a constant. Rows of one temperature share chunks. [T] is read on the host, with one
            synchronisation.
        vocab_size, tp_group, with_entropy, backend, check_ranks: as in `vocab_parallel_log_probs`.
        max_logits_bytes: the most bytes of all chunk buffers together.
        sequence_parallel: hidden, and its gradient, is this tp rank's part of the rows.
        fp32_logits: logits of 16-bit operands stay float32.
        reduces_hidden: the gradient of hidden is the sum over tp. False: it is this shard's part of it, for a caller whose own
            backward adds the parts, as Megatron's gather of sequence-parallel hidden states does.
        sampling_support: the ids that the sampler kept, a set for each row; the log-probabilities are over them: of the weight only
            kept columns are multiplied (ops/support.py), in float32, and all columns for an entropy. It is read on the host: from
            CUDA with one synchronisation. There is no gradient, and one temperature.
    Communication: one all-gather of [rows, 3] (with entropy [rows, 4]) over tp_group a chunk, with sets one of all rows and one a
        chunk for an entropy; with sequence_parallel one of hidden [T / tp, H]; with check_ranks one of 4 KiB. Backward, with
        sequence_parallel one all-gather of hidden and one reduce-scatter of its gradient; else with reduces_hidden one all-reduce
        of [rows, H] a chunk. None at size 1.
    Synchronisation on CUDA: one in backward, for the rows that have a coefficient; they must be the same on all tp ranks.
    Raises: DataError for wrong shapes, dtypes or devices, and on the CPU for sets that SamplingSupport.check refuses. ConfigError
        for a temperature that is not above 0, a backend that cannot run, a max_logits_bytes below one row, sampling_support where
        a gradient is required, and a backward with create_graph=True.

    >>> linear_log_probs(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    tp_group = resolve_group(tp_group, "tp")
    one_temperature = 1.0 if isinstance(temperature, Tensor) else temperature
    options = HeadOptions(
        temperature=one_temperature,
        vocab_size=vocab_size,
        tp_group=tp_group,
        backend=backend,
        max_logits_bytes=max_logits_bytes,
        sequence_parallel=sequence_parallel,
        fp32_logits=fp32_logits,
    )
    with RankAgreement(tp_group, SINGLE, check_ranks=check_ranks) as agreement:
        num_tokens = check_head(hidden, weight, labels, options)
        if loss_mask is not None and (
            not isinstance(loss_mask, Tensor) or loss_mask.shape != (num_tokens,) or loss_mask.dtype != torch.bool
        ):
            given = f"{tuple(loss_mask.shape)} {loss_mask.dtype}" if isinstance(loss_mask, Tensor) else type(loss_mask).__name__
            raise DataError(f"loss_mask must be [T={num_tokens}] bool, got {given}")
        needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        if sampling_support is not None and (needs_gradient or isinstance(temperature, Tensor)):
            why = "hidden states or a weight that require a gradient" if needs_gradient else "a tensor of temperatures"
            raise ConfigError(
                f"sampling_support with {why}: linear_log_probs of kept ids has no gradient and one temperature; call it under "
                "torch.no_grad() with a number, or train with linear_policy_loss"
            )
        compare_heads(agreement, hidden, weight, labels, loss_mask)
        agreement.add("with_entropy", with_entropy)
        for option in fields(options):
            if option.name != "tp_group":
                agreement.add(option.name, getattr(options, option.name))
        on_host, mask = None, None
        if sampling_support is not None:
            mask = None if loss_mask is None else loss_mask.to(hidden.device, non_blocking=True)
            if isinstance(sampling_support, SamplingSupport):
                on_host, sampling_support = sampling_support.to(torch.device("cpu")), sampling_support.to(hidden.device)
            check_support(sampling_support, labels, mask, vocab_shard(weight.shape[0], one_temperature, vocab_size, tp_group))
        compare_supports(agreement, sampling_support, mask)
        rows = torch.arange(num_tokens) if loss_mask is None else loss_mask.cpu().nonzero()[:, 0]
        parts: Parts = ((one_temperature, rows),)
        if isinstance(temperature, Tensor):
            temperatures = _of_rows(temperature, rows, num_tokens)
            agreement.add("temperatures of rows", temperatures)
            parts = tuple((one, rows[temperatures == one]) for one in temperatures.unique().tolist())
        capacity = chunk_capacity(weight, options, rows.numel())
    if on_host is not None:
        with torch.no_grad():
            head, _ = score_kept(hidden, weight, labels, options, on_host, rows, capacity, with_entropy=with_entropy)
        log_probs, entropy = head.log_probs, head.entropy
    elif needs_gradient:
        log_probs, entropy = LinearLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's
            hidden, weight, labels, options, parts, capacity, with_entropy, reduces_hidden
        )
    else:
        with torch.no_grad():
            head, _ = score_rows(hidden, weight, labels, options, parts, capacity, with_entropy=with_entropy)
        log_probs, entropy = head.log_probs, head.entropy
    return log_probs if entropy is None else (log_probs, entropy)


# Temperatures, and the row numbers of each [k], ascending, on the CPU.
Parts = tuple[tuple[float, Tensor], ...]


def _of_rows(temperature: Tensor, rows: Tensor, num_tokens: int) -> Tensor:  # as many as rows, on the CPU
    if temperature.dim() == 0:
        temperature = temperature.expand(num_tokens)
    if temperature.shape != (num_tokens,):
        raise DataError(f"temperature has {temperature.numel()} numbers for {num_tokens} rows: pass one a row, [T], or one for all")
    temperatures = temperature.detach().cpu()[rows]
    for one in temperatures.unique().tolist():
        check_temperature(one)
    return temperatures


def _in_chunks(parts: Parts, capacity: int) -> list[tuple[float, Tensor]]:
    return [(temperature, chunk) for temperature, rows in parts for chunk in cut(rows, capacity)]


def score_rows(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: HeadOptions,
    parts: Parts,
    capacity: int,
    *,
    with_entropy: bool,
    term: DistributionTerm | None = None,
) -> tuple[LinearHead, RowResult]:  # with the numbers of all rows [T]
    chunks = _in_chunks(parts, capacity)
    longest = max((chunk.numel() for _, chunk in chunks), default=0)
    head = replace(make_head(hidden, weight, labels, options, longest, with_entropy=with_entropy), term=term)
    maximum, total = torch.zeros_like(head.log_probs), torch.ones_like(head.log_probs)
    for temperature, numbers in chunks:
        chunk = forward_chunk(at_temperature(head, temperature), numbers)
        maximum[chunk.rows], total[chunk.rows] = chunk.result.maximum, chunk.result.total
    return head, RowResult(maximum, total, head.log_probs, torch.zeros_like(total) if head.entropy is None else head.entropy)


def at_temperature(head: LinearHead, temperature: float) -> LinearHead:
    """The head of another temperature, with the same buffers and results."""
    options = replace(head.options, temperature=temperature)
    shard = vocab_shard(head.weight.shape[0], temperature, options.vocab_size, options.tp_group)
    return replace(head, options=options, shard=shard)


def run_gradient(
    head: LinearHead,
    chunks: list[tuple[float, Tensor]],  # temperature, row numbers, ascending, on the CPU; rows in no chunk get gradient 0
    result: RowResult,  # [T] of the forward pass
    c: Tensor,  # [T]
    e: Tensor | None,  # [T]
    gradient: HeadGradient,
) -> Tensor | None:
    """The gradient alone, where a forward pass has kept the numbers of its rows: one matmul a row for its logits, two for the
    gradient, and no statistics. Returns the gradient of hidden. Communication over tp, where gradient.is_reduced: one all-reduce a
    chunk, or one reduce-scatter."""
    for number, (temperature, numbers) in enumerate(chunks):
        rows = device_rows(numbers, head.hidden.device)
        hidden, labels = chunk_operands(head, rows)
        chunk = Chunk(rows, hidden, labels, chunk_logits(head, hidden), result.take(rows))
        is_last = number == len(chunks) - 1
        multiply_chunk(at_temperature(head, temperature), chunk, c[rows], None if e is None else e[rows], gradient, is_last=is_last)
    return finish(head, gradient)


def pair_kernels(backend: Backend) -> PairKernels:
    """The functions of a resolved backend (resolve_backend). Triton is imported here, on first use."""
    if backend == Backend.TORCH:
        return PairKernels(multiply_reference, add_hidden_reference, add_weight_reference)
    from megatron_rl.ops.support_triton import add_hidden_triton, add_weight_triton, multiply_triton

    return PairKernels(multiply_triton, add_hidden_triton, add_weight_triton)


def score_kept(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: HeadOptions,
    support: SamplingSupport,  # T rows, on the CPU
    rows: Tensor,  # ascending row numbers, on the CPU
    capacity: int,
    *,
    with_entropy: bool,
) -> tuple[LinearHead, tuple[RowResult, Pairs, PairKernels, PairScores]]:
    """The head's log_probs are over the kept ids, and its entropy over the vocabulary, whose numbers the RowResult has. Without an
    entropy no row is multiplied by all columns."""
    parts: Parts = ((options.temperature, rows if with_entropy else rows[:0]),)
    head, result = score_rows(hidden, weight, labels, options, parts, capacity, with_entropy=with_entropy)
    pairs, kernels = make_pairs(support, rows, labels, head.shard), pair_kernels(resolve_backend(options.backend, head.logits))
    scores = score_pairs(head.hidden, head.weight, pairs, head.shard, options.tp_group, kernels, max_bytes=options.max_logits_bytes)
    head.log_probs[pairs.rows] = scores.log_probs
    return head, (result, pairs, kernels, scores)


def fill_with_pairs(
    ready: ReadyGradient,
    head: LinearHead,
    scored: tuple[RowResult, Pairs, PairKernels, PairScores],  # of score_kept
    rows: Tensor,  # ascending row numbers, on the CPU
    capacity: int,
    c: Tensor,  # [T] dL / dlog_prob
    e: Tensor | None,  # [T] dL / dentropy
) -> None:
    """The gradient where each row has a set of kept ids.

    A term of the entropy, which is over the vocabulary, has chunks of all columns beside the pairs, and their logits a second time.
    Communication: tp one all-reduce of the gradient of hidden, or one reduce-scatter, during the weight gradient of the pairs.
    """
    full_results, pairs, kernels, scores = scored
    scale = 1.0 if ready.loss_scale is None else ready.loss_scale
    c = c * scale
    gradient = gradient_for(ready, head, for_pairs=True)
    if e is not None and rows.numel():
        chunks = [(head.options.temperature, chunk) for chunk in cut(rows, capacity)]
        run_gradient(head, chunks, full_results, torch.zeros_like(c), e * scale, gradient)
    g, pending, memory = pair_gradient(scores, pairs, c[pairs.rows], head.shard), None, {"max_bytes": head.options.max_logits_bytes}
    if gradient.hidden is not None:
        pairs_gradient = gradient.hidden if e is None else torch.zeros_like(gradient.hidden)
        kernels.add_hidden(g, pairs, head.weight, out=pairs_gradient, **memory)
        start = start_reduce_scatter_sum if head.options.sequence_parallel else start_all_reduce_sum
        pending = start(pairs_gradient if e is None else gradient.hidden.add_(pairs_gradient), head.options.tp_group)
    if gradient.needs_weight:
        if gradient.weight is None:
            gradient.weight = torch.zeros_like(head.weight, dtype=head.log_probs.dtype)
        kernels.add_weight(g, pairs, head.hidden, out=gradient.weight, **memory)
    ready.hidden = None if pending is None else pending.wait()
    ready.weight = None if ready.is_in_main_grad else gradient.weight


class LinearLogProbs(torch.autograd.Function):
    """Saves the operands and four numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: HeadOptions,
        parts: Parts,
        capacity: int,
        with_entropy: bool,
        reduces_hidden: bool,
    ) -> tuple[Tensor, Tensor | None]:
        head, result = score_rows(hidden, weight, labels, options, parts, capacity, with_entropy=with_entropy)
        ctx.options, ctx.parts, ctx.capacity, ctx.reduces_hidden = options, parts, capacity, reduces_hidden
        # An unused output gets a None gradient, not zeros, so that an unused entropy costs nothing.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, labels, result.maximum, result.total, head.log_probs, head.entropy)
        return head.log_probs, head.entropy

    @staticmethod
    @first_order_only
    def backward(ctx: Any, log_probs_gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, maximum, total, log_probs, entropy = ctx.saved_tensors
        c = torch.zeros_like(log_probs) if log_probs_gradient is None else log_probs_gradient
        is_live = c != 0 if entropy_gradient is None else (c != 0) | (entropy_gradient != 0)
        is_live = is_live.cpu()
        chunks = _in_chunks(tuple((one, rows[is_live[rows]]) for one, rows in ctx.parts), ctx.capacity)
        longest = max((chunk.numel() for _, chunk in chunks), default=0)
        head = make_head(hidden, weight, labels, ctx.options, longest, with_entropy=entropy is not None)
        gradient = HeadGradient(
            hidden=hidden_buffer(head) if ctx.needs_input_grad[0] else None,
            weight=None,
            needs_weight=ctx.needs_input_grad[1],
            rounds_weight=True,
            is_reduced=ctx.reduces_hidden,
        )
        result = RowResult(maximum, total, log_probs, torch.zeros_like(log_probs) if entropy is None else entropy)
        hidden_gradient = run_gradient(head, chunks, result, c, entropy_gradient, gradient)
        weight_gradient = None if gradient.weight is None else gradient.weight.to(weight.dtype)
        return hidden_gradient, weight_gradient, *[None] * 6
