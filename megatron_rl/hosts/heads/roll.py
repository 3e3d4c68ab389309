"""Our log-probabilities in ROLL: `actor_train.system_envs.MEGATRON_RL_LOG_PROBS: megatron_rl` with our worker class.

    vocab_parallel_logprobs    of mcore_adapter.parallel_functions: op_compute_log_probs, old log-probabilities and ROLL's loss
    vocab_parallel_entropy     of roll.third_party.megatron.tensor_parallel: op_compute_entropy

Our own loss computes from logits already; with it the old log-probabilities are ours too. Without a loss of ours in
`actor_train.pg_variant` the worker trains ROLL's. `log_probs` says what is the same and what is not.

Backward writes the gradient of the log-probabilities over the logits: ROLL's own function overwrites float32 logits already in
forward. ROLL's losses compute the entropy of the same logits, if at all, after the log-probabilities. Autograd runs the younger of
two backwards first, so the entropy's has read the logits by then; in another order it raises, and no number is wrong.

Our fused head in the models of ROLL's strategy: `actor_train.system_envs.MEGATRON_RL_FUSED_LM_HEAD_LOSS: 'true'`.

The output layer gives RowProxy (`place_rows`) to our loss and, with our log-probabilities, to ROLL's op_compute_log_probs and
op_compute_entropy. mcore_adapter's models have a hook on that layer: an identity whose backward makes the gradient of logits
contiguous, for the layer's own product. On RowProxy it raises, since autograd would make a plain tensor of them. So it is given
the layer's own logits alone; the gradient of RowProxy is ours, and contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from megatron_rl.errors import ConfigError, name_of, place_of
from megatron_rl.hosts.heads.log_probs import Installer, Replacement, entropy_of_logits, log_probs_of_logits
from megatron_rl.hosts.heads.placed_rows import place_rows
from megatron_rl.hosts.heads.row_proxy import RowProxy
from megatron_rl.hosts.roll import HEAD, PROBED
from megatron_rl.hosts.roll_loss import is_alone
from megatron_rl.layout.groups import resolve_group
from megatron_rl.megatron.model import find_output_layer, model_config_of

# mcore_adapter.models.model_utils, registered by McaGPTModel.
HOOK = "mca_lora_logits_postprocess_hook"
STRATEGY = "roll.distributed.strategy.megatron_strategy:MegatronInferStrategy"


def shard_log_probs(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)
    def vocab_parallel_logprobs(vocab_parallel_logits: Tensor, target: Tensor, use_fused_kernel: bool = True) -> Tensor:
        is_last = not isinstance(vocab_parallel_logits, RowProxy) and is_alone(vocab_parallel_logits)
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
        ours=shard_log_probs,
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


def models_of(strategy: Any) -> Sequence[nn.Module]:
    """One a virtual pipeline stage. Raises ConfigError for another contract."""
    models: Sequence[nn.Module] | None = getattr(strategy, "models_unwrapped", None)
    if models is None:
        raise ConfigError(f"ROLL's {type(strategy).__name__} has no models_unwrapped, and {PROBED} was probed")
    return models


def place(strategy: Any) -> None:
    """From now on the output layer of this strategy's models returns RowProxy.

    Communication: as place_rows. Raises ConfigError where the head does not fit the model or its fp16, and for another hook
    on the layer, which would take RowProxy for logits; what models_of raises.
    """
    models = models_of(strategy)
    if any(model_config_of(model).fp16 for model in models):
        raise ConfigError(
            f"{HEAD}=true with fp16: the gradient of hidden states is made before the loss scale is known, and float16 would round "
            f"most of it to 0; train in bf16, or remove {HEAD}"
        )
    place_rows(models, f"{HEAD}=true")
    for layer in map(find_output_layer, models):
        if layer is not None:
            _keep_hooks_for_logits(layer)


def _keep_hooks_for_logits(layer: nn.Module) -> None:
    for number, hook in [*layer._forward_hooks.items()]:
        if getattr(hook, "__name__", None) != HOOK:
            raise ConfigError(
                f"{HEAD}=true: the output layer has a hook, {name_of(hook)} ({place_of(hook)}), which would be given no logits; "
                f"remove the hook, or {HEAD}"
            )
        layer._forward_hooks[number] = _of_logits(hook)


def _of_logits(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def keep_logits(module: nn.Module, given: Any, output: Any) -> Any:
        return output if isinstance(output[0], RowProxy) else hook(module, given, output)

    return keep_logits
