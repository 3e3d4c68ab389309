"""Measures the log-probabilities of whole responses with the training model, on any TP, SP, CP, PP and DP layout.

Each forward runs the training schedule. The log-probabilities are computed as in the loss, so that step 0 has ratio 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron_rl.layout.groups import Group, ParallelGroups, all_reduce_sum, broadcast_from_last
from megatron_rl.megatron.batch import ForwardInput, PolicyBatch
from megatron_rl.megatron.head import HeadInputs, HeadSettings, rows_of, run_model
from megatron_rl.megatron.routing import RouteRecorder
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.log_probs import vocab_parallel_log_probs

# The model's output layer, unchanged.
LOGITS = HeadSettings()
Batch = TypeVar("Batch", bound=ForwardInput)
Result = TypeVar("Result")


def response_log_probs(
    model: nn.Module,
    batches: Sequence[PolicyBatch],
    lengths: Sequence[Sequence[tuple[int, int]]],  # for each batch, (total, response) of each sample
    *,
    temperature: float,
    vocab_size: int,
    backend: str,  # as in the loss, so that both sides of the ratio come from one kernel
    groups: ParallelGroups,
    head: HeadSettings = LOGITS,
    recorder: RouteRecorder | None = None,
) -> list[list[Tensor]]:  # for each batch and each of its samples: [response_length] float32 on the CPU; 0 where masked
    """Log-probabilities of whole responses by the current model, on all ranks of the tp and pp groups and of the batch's cp_group.
    Where the batches have the sampler's sets they are over these.

    The batches are cut as in training, so that rounding is the same. With a fused `head` they cost one product, and no more
    logits than max_logits_bytes. The host waits once a batch, for its rows.
    Communication: the forwards', and for each batch cp one all-reduce and pp one broadcast of all rows; a recorder's too,
    which gets the routes of each sample by its number in the order of the batches.
    """

    def measure(batch: PolicyBatch, logits: Tensor, inputs: HeadInputs | None) -> Tensor:  # [T]
        if inputs is None:
            rows = logits.flatten(0, 1)
            return vocab_parallel_log_probs(
                rows,
                batch.labels,
                loss_mask=batch.loss.loss_mask,
                temperature=temperature,
                vocab_size=vocab_size,
                tp_group=groups.tp,
                backend=backend,
                sampling_support=batch.loss.sampling_support,
            )
        hidden, is_sequence_parallel = rows_of(inputs, groups.tp)
        return linear_log_probs(
            hidden,
            inputs.weight,
            batch.labels,
            loss_mask=batch.host.loss_mask,
            temperature=temperature,
            vocab_size=vocab_size,
            tp_group=groups.tp,
            backend=backend,
            max_logits_bytes=head.max_logits_bytes,
            sequence_parallel=is_sequence_parallel,
            fp32_logits=head.is_fp32,
            sampling_support=batch.host.sampling_support,
        )

    results = []
    for batch, sizes in zip(batches, lengths, strict=True):
        cp_group = batch.cp_group
        with recording(recorder, batch.row_positions, batch.tokens, cp_group):
            local = forward_only(model, batch, measure, groups, head)
        whole = torch.zeros(batch.labels.shape[0] * cp_group.size(), device=batch.labels.device)
        if local is not None:
            whole[batch.row_positions] = local
            whole = all_reduce_sum(whole, cp_group)
        whole = broadcast_from_last(whole, groups.pp).cpu()
        starts = (batch.host.cu_seqlens[:-1] * cp_group.size()).tolist()
        if recorder is not None:
            for start, (total, _) in zip(starts, sizes, strict=True):
                recorder.keep(len(recorder.samples), start, total)
        results.append(
            [
                whole[start + total - response - 1 : start + total - 1].clone()
                for start, (total, response) in zip(starts, sizes, strict=True)
            ]
        )
    return results


def recording(
    recorder: RouteRecorder | None, row_positions: Tensor, tokens: Tensor, cp_group: Group
) -> AbstractContextManager[None]:
    return nullcontext() if recorder is None else recorder.forward(row_positions, (tokens.shape[0], tokens.shape[1]), cp_group)


@torch.no_grad()  # the schedule does not switch gradients off
def forward_only(
    model: nn.Module,
    batch: Batch,
    measure: Callable[[Batch, Tensor, HeadInputs | None], Result],
    groups: ParallelGroups,
    head: HeadSettings,
    positions: Tensor | None = None,
) -> Result | None:
    """One forward through Megatron's schedule. Returns measure(batch, logits of run_model, None), with a fused head measure(batch,
    a number, its inputs), on the last pipeline stage; None on the others."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data_iterator: object, model: nn.Module) -> tuple[Tensor, Callable[[Tensor, bool], Result]]:
        logits, inputs, _ = run_model(model, batch, head, groups.tp, positions)
        return logits, lambda output, non_loss_data: measure(batch, output, inputs)

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=model,
        num_microbatches=1,
        seq_length=batch.tokens.shape[1] * groups.cp.size(),
        micro_batch_size=batch.tokens.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    return results[0] if results else None
