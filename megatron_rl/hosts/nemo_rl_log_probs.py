"""Our log-probabilities in NeMo-RL: `++loss_fn.megatron_rl_log_probs=megatron_rl`, beside our loss or NeMo-RL's own.

The launcher has NeMo-RL make its Megatron workers of the class in nemo_rl_worker.py, by its own `worker_extension_cls_fqn`. That
class is NeMo-RL's, and its file calls `install` in the worker's process. `log_probs` says what is the same and what is not.

    name in nemo_rl.distributed.model_utils     what reads it
    DistributedLogprob                          log-probabilities from logits, whole rows and packed
    ChunkedDistributedLogprob                   the same with policy.logprob_chunk_size

Shifts, packing, the temperature and the gather over context-parallel ranks are NeMo-RL's own. So are log-probabilities after a
filter (top_p, top_k) and the entropies of distillation.

policy.megatron_cfg.use_fused_linear_logprobs: NeMo-RL refuses its own fused head with context parallelism, with packed rows and
with overlap_param_gather, and divides that head's log-probabilities by the temperature, as if they were logits. So it runs its path
of logits here, and the output layer gives CarriedRows, which these two functions take.
"""

from __future__ import annotations

from megatron_rl.hosts.log_probs import CHUNKED_ARGUMENTS, WHOLE_ARGUMENTS, Installer, Replacement, rows_in_chunks, whole_rows
from megatron_rl.hosts.nemo_rl import DOOR

MODULE = "nemo_rl.distributed.model_utils"
FROM_LOGITS = tuple(f"{MODULE}:from_parallel_logits_to_logprobs{packed}" for packed in ("", "_packed_sequences"))


REPLACEMENTS = (
    Replacement(path=f"{MODULE}:DistributedLogprob", arguments=WHOLE_ARGUMENTS, ours=whole_rows, callers=FROM_LOGITS),
    Replacement(path=f"{MODULE}:ChunkedDistributedLogprob", arguments=CHUNKED_ARGUMENTS, ours=rows_in_chunks, callers=FROM_LOGITS),
)


def install() -> None:
    Installer(DOOR.title, DOOR.probed, ("nemo_rl",)).install(REPLACEMENTS)
