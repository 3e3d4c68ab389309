"""Log-probabilities of a fused head with a gradient for any loss behind them: what a trainer's own loss needs.

A loss of this package knows its coefficients while a chunk's logits exist, so its head makes the gradient in forward
(ops/linear_gradient.py). Here the coefficients come in backward. Forward keeps four numbers a row; backward computes the logits of
the rows with a coefficient again, chunk by chunk, and multiplies: four matmuls a row in all, and no logits [T, V_tp].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import SINGLE, Group, resolve_group
from megatron_rl.ops.backends import first_order_only, runs_eagerly
from megatron_rl.ops.linear_gradient import make_gradient, run_gradient
from megatron_rl.ops.linear_head import (
    HeadOptions,
    LinearHead,
    check_head,
    check_mask,
    chunk_capacity,
    compare_heads,
    device_rows,
    forward_chunk,
    make_head,
)
from megatron_rl.ops.linear_schedule import cut
from megatron_rl.ops.log_probs import check_temperature, vocab_shard
from megatron_rl.ops.log_probs_torch import RowResult


@runs_eagerly
def differentiable_linear_log_probs(
    hidden: Tensor,  # [T, H], or this rank's [T / tp, H] with sequence_parallel; float32, bfloat16, float16 or float64
    weight: Tensor,  # [V_tp, H] of the same dtype: this tp rank's rows of the head
    labels: Tensor,  # [T] int64 ids in the full vocabulary
    *,
    loss_mask: Tensor | None = None,  # [T] bool, on any device; None: every row counts
    temperature: float | Tensor = 1.0,  # a number, or one a row [T]
    vocab_size: int | None = None,
    tp_group: Group | None = None,
    with_entropy: bool = True,
    backend: str = Backend.AUTO,
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES,
    sequence_parallel: bool = False,
    fp32_logits: bool = False,
    reduces_hidden: bool = True,
    check_ranks: bool | None = None,
) -> tuple[Tensor, Tensor]:  # log_probs [T], entropy [T]; float32 (float64 for float64)
    """log softmax(hidden @ weight.T / temperature) at the labels, and the entropy in nats, both with a gradient.

    The numbers of linear_log_probs. Rows whose two coefficients are 0 take no part in backward. The gradient of weight is summed in
    float32 and rounded once to weight's dtype, by its product where one chunk is enough. A second backward through a retained
    graph computes it again.

    Args:
        temperature: of all rows, or of each. Rows of one temperature share chunks, and those of all share the two gradients.
        hidden, weight, labels, loss_mask, vocab_size, tp_group, backend, max_logits_bytes, sequence_parallel, fp32_logits,
            check_ranks: as in `linear_log_probs`. A masked row gives 0 and has no gradient.
        with_entropy: False: the entropy is 0 and costs nothing.
        reduces_hidden: the gradient of hidden is the sum over tp. False: it is this shard's part of it, for a caller whose own
            backward adds the parts, as Megatron's gather of sequence-parallel hidden states does.
    Communication: forward as `linear_log_probs`. Backward, with sequence_parallel one all-gather of hidden and one reduce-scatter
        of its gradient; else with reduces_hidden one all-reduce of [rows, H] a chunk. None at tp size 1.
    Synchronisation on CUDA: one in backward, for the rows that have a coefficient; they must be the same on all tp ranks. One in
        forward for temperatures of rows, and one for a mask.
    Raises: what linear_log_probs raises. DataError for another number of temperatures than rows. ConfigError for several with
        sequence_parallel, and for a backward with create_graph=True.
    """
    tp_group = resolve_group(tp_group, "tp")
    one_for_all = 1.0 if isinstance(temperature, Tensor) else temperature
    options = HeadOptions(one_for_all, vocab_size, tp_group, with_entropy, backend, sequence_parallel, fp32_logits)
    with RankAgreement(tp_group, SINGLE, check_ranks=check_ranks) as agreement:
        num_tokens = check_head(hidden, weight, labels, options)
        check_mask(loss_mask, num_tokens)
        parts = _parts(temperature, num_tokens, loss_mask)
        for known, _ in parts:
            check_temperature(known)
        if len(parts) > 1 and sequence_parallel:
            raise ConfigError(
                f"sequence_parallel=True with {len(parts)} temperatures: the gradient of hidden states is reduced once, after the "
                "rows of one temperature; gather hidden, and pass sequence_parallel=False"
            )
        if isinstance(temperature, Tensor):
            agreement.add("temperatures of rows", temperature.detach(), is_sliced=True)
        compare_heads(agreement, hidden, weight, labels, loss_mask, options, max_logits_bytes)
        capacity = chunk_capacity(weight, max_logits_bytes, fp32_logits, sum(rows.numel() for _, rows in parts))
    log_probs, entropy = LinearLogProbs.apply(hidden, weight, labels, options, parts, capacity, reduces_hidden)  # type: ignore[no-untyped-call]  # torch's
    return log_probs, entropy


def _parts(
    temperature: float | Tensor, num_rows: int, loss_mask: Tensor | None
) -> tuple[tuple[float, Tensor], ...]:  # (temperature, its rows [k] on the CPU)
    rows = torch.arange(num_rows) if loss_mask is None else loss_mask.cpu().nonzero()[:, 0]
    if not isinstance(temperature, Tensor):
        return ((temperature, rows),)
    if temperature.numel() != num_rows:
        raise DataError(f"temperature has {temperature.numel()} numbers for {num_rows} rows: pass one a row, or a float for all")
    of_rows = temperature.detach().reshape(-1).cpu()[rows]
    known = of_rows.unique().tolist() or [1.0]
    return tuple((one, rows[of_rows == one]) for one in known)


def _at(head: LinearHead, temperature: float) -> LinearHead:
    """The head of another temperature, with the same buffers and results."""
    options = replace(head.options, temperature=temperature)
    shard = vocab_shard(head.weight.shape[0], temperature, options.vocab_size, options.tp_group)
    return replace(head, options=options, shard=shard)


class LinearLogProbs(torch.autograd.Function):
    """Saves the operands and four numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: HeadOptions,
        parts: tuple[tuple[float, Tensor], ...],
        capacity: int,
        reduces_hidden: bool,
    ) -> tuple[Tensor, Tensor]:
        chunks = [(temperature, chunk) for temperature, rows in parts for chunk in cut(rows, capacity)]
        head = make_head(hidden, weight, labels, options, max((chunk.numel() for _, chunk in chunks), default=0))
        maximum, total = torch.zeros_like(head.log_probs), torch.ones_like(head.log_probs)
        for temperature, numbers in chunks:
            rows = device_rows(numbers, head.hidden.device)
            result = forward_chunk(_at(head, temperature), rows).result
            maximum[rows], total[rows] = result.maximum, result.total
        entropy = torch.zeros_like(head.log_probs) if head.entropy is None else head.entropy
        if head.entropy is None:
            ctx.mark_non_differentiable(entropy)
        ctx.options, ctx.parts, ctx.capacity, ctx.reduces_hidden = options, parts, capacity, reduces_hidden
        # An unused output gets a None gradient, not zeros, so that an unused entropy costs nothing.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, labels, maximum, total, head.log_probs, entropy)
        return head.log_probs, entropy

    @staticmethod
    @first_order_only
    def backward(ctx: Any, log_probs_gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, maximum, total, log_probs, entropy = ctx.saved_tensors
        c = torch.zeros_like(log_probs) if log_probs_gradient is None else log_probs_gradient
        is_live = c != 0 if entropy_gradient is None else (c != 0) | (entropy_gradient != 0)
        is_live = is_live.cpu()
        parts = [(temperature, cut(rows[is_live[rows]], ctx.capacity)) for temperature, rows in ctx.parts]
        parts = [part for part in parts if part[1]] or parts[:1]
        head = make_head(
            hidden, weight, labels, ctx.options, max((chunk.numel() for _, chunks in parts for chunk in chunks), default=0)
        )
        gradient = make_gradient(
            head,
            needs_hidden=ctx.needs_input_grad[0],
            needs_weight=ctx.needs_input_grad[1],
            main_grad=None,
            rounds_weight=len(parts) == 1,  # else the first product is not the last one
            scale=None,
            has_entropy_term=entropy_gradient is not None,
            is_reduced=ctx.reduces_hidden,
        )
        result = RowResult(maximum, total, log_probs, entropy)
        for temperature, chunks in parts:
            of_hidden = run_gradient(_at(head, temperature), chunks, result, c, entropy_gradient, gradient)
        of_weight = None if gradient.weight is None else gradient.weight.to(weight.dtype)
        return of_hidden, of_weight, *[None] * 5
