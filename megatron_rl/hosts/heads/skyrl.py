"""Our log-probabilities in SkyRL: `megatron_rl.log_probs=megatron_rl` behind our entrypoint, beside our loss or SkyRL's own.

SkyRL sends the entries of its table of policy losses to each worker that trains a policy, before its first forward pass. One more
entry of ours calls `install` where it arrives. `log_probs` says what is the same and what is not.

    name in skyrl...distributed.megatron.model_utils    what reads it
    DistributedLogprob                                  log-probabilities from logits, whole rows and packed
    ChunkedDistributedLogprob                           the same with trainer.logprobs_chunk_size
    _VocabParallelEntropy                               entropies from logits, whole rows, packed and in chunks
    _fused_lm_head_logprob_apply                        trainer.fused_lm_head_logprob, either backend: no logits
    _fused_vocab_parallel_entropy_from_hidden           the same switch, the entropy that is a metric

Shifts, packing and the gather over context-parallel ranks are SkyRL's own. Its fused switch divides the weight by the temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.hosts.heads.log_probs import (
    CHUNKED_ARGUMENTS,
    WHOLE_ARGUMENTS,
    Applied,
    Installer,
    Replacement,
    check_shard,
    entropy_of_logits,
    log_probs_of_hidden,
    rows_in_chunks,
    whole_rows,
)
from megatron_rl.layout.groups import Group, resolve_group

MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
FROM_LOGITS, FROM_HIDDEN = (
    tuple(f"{MODULE}:from_parallel_{source}_to_logprobs{packed}" for packed in ("", "_packed_sequences"))
    for source in ("logits", "hidden")
)


def entropy(theirs: Any) -> Applied:
    # SkyRL takes the log-probabilities of the same logits: nothing is written over them.
    return Applied(lambda vocab_parallel_logits: entropy_of_logits(vocab_parallel_logits, resolve_group(None, "tp")))


def hidden_log_probs(theirs: Any) -> Callable[..., Tensor]:
    def _fused_lm_head_logprob_apply(
        backend: str,
        hidden: Tensor,  # [B, S, H]
        weight: Tensor,  # [V_tp, H]
        target: Tensor,  # [B, S], shifted
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Group,
        inference_only: bool,
    ) -> Tensor:  # [B, S] float32
        """The gradient of hidden is this tp rank's part: the gather of sequence-parallel hidden states adds the parts."""
        check_shard(vocab_start_index, vocab_end_index, weight.shape[0], tp_group)
        with torch.set_grad_enabled(not inference_only and torch.is_grad_enabled()):
            log_probs, _ = log_probs_of_hidden(hidden, weight, target, tp_group, with_entropy=False, reduces_hidden=False)
        return log_probs.view(target.shape)

    return _fused_lm_head_logprob_apply


def entropy_of_hidden(theirs: Any) -> Callable[..., Tensor]:
    def _fused_vocab_parallel_entropy_from_hidden(
        hidden: Tensor,  # [B, S, H]
        lm_head_weight: Tensor,  # [V_tp, H]
        tp_group: Group,
        chunk_size: int | None = None,
        temperature: float = 1.0,
    ) -> Tensor:  # [B, S] float32, without a gradient
        rows = hidden.shape[:-1]
        any_label = torch.zeros(rows, dtype=torch.int64, device=hidden.device)
        with torch.no_grad():
            given = (hidden, lm_head_weight, any_label, tp_group)
            return log_probs_of_hidden(*given, temperature=temperature, reduces_hidden=False)[1].view(rows)

    return _fused_vocab_parallel_entropy_from_hidden


REPLACEMENTS = (
    Replacement(path=f"{MODULE}:DistributedLogprob", arguments=WHOLE_ARGUMENTS, ours=whole_rows, callers=FROM_LOGITS),
    Replacement(path=f"{MODULE}:ChunkedDistributedLogprob", arguments=CHUNKED_ARGUMENTS, ours=rows_in_chunks, callers=FROM_LOGITS),
    Replacement(
        path=f"{MODULE}:_VocabParallelEntropy",
        arguments=("ctx", "vocab_parallel_logits"),
        ours=entropy,
        callers=(f"{MODULE}:vocab_parallel_entropy", f"{MODULE}:vocab_parallel_entropy_weighted_sum"),
    ),
    Replacement(
        path=f"{MODULE}:_fused_lm_head_logprob_apply",
        arguments=(
            *("backend", "hidden", "weight", "target", "vocab_start_index", "vocab_end_index", "chunk_size", "tp_group"),
            "inference_only",
        ),
        ours=hidden_log_probs,
        callers=FROM_HIDDEN,
    ),
    Replacement(
        path=f"{MODULE}:_fused_vocab_parallel_entropy_from_hidden",
        arguments=("hidden", "lm_head_weight", "tp_group", "chunk_size", "temperature"),
        ours=entropy_of_hidden,
        callers=(f"{MODULE}:from_parallel_hidden_to_entropy_packed_sequences",),
    ),
)


def install(title: str, probed: str) -> None:
    Installer(title, probed, ("skyrl",)).install(REPLACEMENTS)


class InWorkers:
    """An entry of SkyRL's table that is no loss: where it is unpickled, our log-probabilities take the place of SkyRL's."""

    def __init__(self, title: str, probed: str):
        self.title, self.probed = title, probed

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (self.title, self.probed)

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise TypeError("this entry of SkyRL's table puts megatron_rl's log-probabilities into workers; it is no policy loss")


def arrive(title: str, probed: str) -> InWorkers:
    install(title, probed)
    return InWorkers(title, probed)
