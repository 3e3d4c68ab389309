"""Our log-probabilities in NeMo-RL: `++loss_fn.megatron_rl_log_probs=megatron_rl`, beside our loss or NeMo-RL's own.

The launcher has NeMo-RL make its Megatron workers of the class in nemo_rl_worker.py, by its own `worker_extension_cls_fqn`. That
class is NeMo-RL's, and its file calls `install` in the worker's process. `log_probs` says what is the same and what is not.

    name in nemo_rl.distributed.model_utils     what reads it
    DistributedLogprob                          log-probabilities from logits, whole rows and packed
    ChunkedDistributedLogprob                   the same with policy.logprob_chunk_size
    ChunkedDistributedHiddenStatesToLogprobs    policy.megatron_cfg.use_fused_linear_logprobs: no logits

Shifts, packing and the gather over context-parallel ranks are NeMo-RL's own. So are log-probabilities after a filter (top_p, top_k)
and the entropies of distillation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.hosts.log_probs import (
    CHUNKED_ARGUMENTS,
    WHOLE_ARGUMENTS,
    Applied,
    Installer,
    Replacement,
    check_shard,
    log_probs_of_hidden,
    rows_in_chunks,
    whole_rows,
)
from megatron_rl.hosts.nemo_rl import DOOR
from megatron_rl.layout.groups import Group

MODULE = "nemo_rl.distributed.model_utils"
FROM_LOGITS = tuple(f"{MODULE}:from_parallel_logits_to_logprobs{packed}" for packed in ("", "_packed_sequences"))


def of_hidden(theirs: Any) -> Applied:
    def apply(
        hidden: Tensor,  # [S / tp, B, H] under sequence parallelism, else [S, B, H]
        target: Tensor,  # [B, S], shifted
        weight: Tensor,  # [V_tp, H]
        first: int,
        end: int,
        chunk_size: int,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:  # [B, S] float32
        check_shard(first, end, weight.shape[0], tp_group)
        in_order = target.transpose(0, 1)  # [S, B]
        with torch.set_grad_enabled(not inference_only and torch.is_grad_enabled()):
            log_probs, _ = log_probs_of_hidden(
                hidden,
                weight,
                in_order,
                tp_group,
                with_entropy=False,
                reduces_hidden=True,
                sequence_parallel=hidden.shape[0] < in_order.shape[0],
            )
        return log_probs.view(in_order.shape).transpose(0, 1)

    return Applied(apply)


REPLACEMENTS = (
    Replacement(path=f"{MODULE}:DistributedLogprob", arguments=WHOLE_ARGUMENTS, ours=whole_rows, callers=FROM_LOGITS),
    Replacement(path=f"{MODULE}:ChunkedDistributedLogprob", arguments=CHUNKED_ARGUMENTS, ours=rows_in_chunks, callers=FROM_LOGITS),
    Replacement(
        path=f"{MODULE}:ChunkedDistributedHiddenStatesToLogprobs",
        arguments=(
            *("ctx", "tensor_parallel_hidden_states", "target", "output_weight_layer", "vocab_start_index", "vocab_end_index"),
            *("chunk_size", "tp_group", "inference_only"),
        ),
        ours=of_hidden,
        callers=(f"{MODULE}:from_parallel_hidden_states_to_logprobs",),
    ),
)


def install() -> None:
    Installer(DOOR.title, DOOR.probed, ("nemo_rl",)).install(REPLACEMENTS)
