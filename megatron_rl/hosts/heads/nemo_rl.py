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
of logits here, and the output layer gives RowProxy, which these two functions take.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.contract import place_of
from megatron_rl.hosts.heads.log_probs import CHUNKED_ARGUMENTS, WHOLE_ARGUMENTS, Installer, Replacement, rows_in_chunks, whole_rows

MODULE = "nemo_rl.distributed.model_utils"
FUSED_HEAD = "policy.megatron_cfg.use_fused_linear_logprobs"
# NeMo-RL's table of the Python of each class of its workers, its Megatron worker, and the same with our log-probabilities.
ENVIRONMENTS = "nemo_rl.distributed.ray_actor_environment_registry"
OWN_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
OUR_WORKER = "megatron_rl.hosts.nemo_rl_worker.MegatronPolicyWorker"
WORKER_WITH_HEAD = "megatron_rl.hosts.nemo_rl_worker.MegatronPolicyWorkerWithHead"
FROM_LOGITS = tuple(f"{MODULE}:from_parallel_logits_to_logprobs{packed}" for packed in ("", "_packed_sequences"))


REPLACEMENTS = (
    Replacement(path=f"{MODULE}:DistributedLogprob", arguments=WHOLE_ARGUMENTS, ours=whole_rows, callers=FROM_LOGITS),
    Replacement(path=f"{MODULE}:ChunkedDistributedLogprob", arguments=CHUNKED_ARGUMENTS, ours=rows_in_chunks, callers=FROM_LOGITS),
)


def install(title: str, probed: str) -> None:
    Installer(title, probed, ("nemo_rl",)).install(REPLACEMENTS)


def with_our_worker(
    trainer: Any, setup: Callable[..., Any], positional: tuple[Any, ...], named: Mapping[str, Any], *, has_head: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of NeMo-RL's `setup`, with which it makes its Megatron workers of our class. Raises ConfigError for a NeMo-RL
    that has no such way.

    has_head: NeMo-RL's fused head is asked for. NeMo-RL gets a copy of its config without it, and runs its path of logits, which
    has context parallelism, packed rows and the temperature; our class places our head in that path."""
    parameters = inspect.signature(setup).parameters
    if "policy_factory" not in parameters:
        raise ConfigError(f"NeMo-RL's setup takes no policy_factory ({place_of(setup)}): remove log_probs")
    bound = inspect.signature(setup).bind(*positional, **named)
    factory = bound.arguments.get("policy_factory") or trainer.Policy
    makes = inspect.signature(factory).parameters
    if not ({"worker_extension_cls_fqn"} & makes.keys() or any(one.kind is one.VAR_KEYWORD for one in makes.values())):
        raise ConfigError(f"NeMo-RL's {factory.__name__} takes no worker_extension_cls_fqn ({place_of(factory)}): remove log_probs")
    worker = WORKER_WITH_HEAD if has_head else OUR_WORKER
    environments = import_module(ENVIRONMENTS).ACTOR_ENVIRONMENT_REGISTRY
    environments[worker] = environments[OWN_WORKER]  # of its Python
    bound.arguments["policy_factory"] = functools.partial(factory, worker_extension_cls_fqn=worker)
    if has_head:
        config = copy.deepcopy(bound.arguments["master_config"])
        config.policy["megatron_cfg"][FUSED_HEAD.rpartition(".")[2]] = False
        bound.arguments["master_config"] = config
    return bound.args, bound.kwargs
