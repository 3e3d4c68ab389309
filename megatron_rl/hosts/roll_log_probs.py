"""Our log-probabilities in ROLL: `actor_train.system_envs.MEGATRON_RL_LOG_PROBS: megatron_rl` with our worker class.

    vocab_parallel_logprobs    of mcore_adapter.parallel_functions: op_compute_log_probs, old log-probabilities and ROLL's loss
    vocab_parallel_entropy     of roll.third_party.megatron.tensor_parallel: op_compute_entropy

Our own loss computes from logits already; with it the old log-probabilities are ours too. Without a loss of ours in
`actor_train.pg_variant` the worker trains ROLL's. `log_probs` says what is the same and what is not.

Backward writes the gradient of the log-probabilities over the logits: ROLL's own function overwrites float32 logits already in
forward. ROLL's losses compute the entropy of the same logits, if at all, after the log-probabilities. Autograd runs the younger of
two backwards first, so the entropy's has read the logits by then; in another order it raises, and no number is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from megatron_rl.hosts.carried_rows import CarriedRows
from megatron_rl.hosts.log_probs import Installer, Replacement, entropy_of_logits, log_probs_of_logits
from megatron_rl.hosts.roll_loss import is_alone
from megatron_rl.layout.groups import resolve_group

STRATEGY = "roll.distributed.strategy.megatron_strategy:MegatronInferStrategy"


def of_shards(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)
    def vocab_parallel_logprobs(vocab_parallel_logits: Tensor, target: Tensor, use_fused_kernel: bool = True) -> Tensor:
        is_last = not isinstance(vocab_parallel_logits, CarriedRows) and is_alone(vocab_parallel_logits)
        return log_probs_of_logits(vocab_parallel_logits, target, resolve_group(None, "tp"), inplace=is_last)

    return vocab_parallel_logprobs


def entropy(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)
    def vocab_parallel_entropy(vocab_parallel_logits: Tensor, used_fp32: bool = True, use_fused_kernel: bool = True) -> Tensor:
        return entropy_of_logits(vocab_parallel_logits, resolve_group(None, "tp"))

    return vocab_parallel_entropy


REPLACEMENTS = (
    Replacement(
        path="mcore_adapter.parallel_functions.vocab_parallel:vocab_parallel_logprobs",
        arguments=("vocab_parallel_logits", "target", "use_fused_kernel"),
        ours=of_shards,
        callers=(f"{STRATEGY}.op_compute_log_probs",),
    ),
    Replacement(
        path="roll.third_party.megatron.tensor_parallel:vocab_parallel_entropy",
        arguments=("vocab_parallel_logits", "used_fp32", "use_fused_kernel"),
        ours=entropy,
        callers=(f"{STRATEGY}.op_compute_entropy",),
    ),
)


def install(title: str, probed: str) -> None:
    Installer(title, probed, ("roll", "mcore_adapter")).install(REPLACEMENTS)
