"""Our log-probabilities in verl: `actor_rollout_ref.model.external_lib=megatron_rl.hosts.heads.verl`.

verl imports the module that external_lib names in each process that makes a model, before its engine; or by
VERL_USE_EXTERNAL_MODULES in the environment. This import replaces the functions of REPLACEMENTS, for the actor, the reference
policy and each loss, verl's own too. `log_probs` says what is the same and what is not.

    engine     verl's function                            where the gradient is written
    Megatron   vocab_parallel_log_probs_from_logits       over float32 logits, as Megatron's own cross entropy does
    Megatron   vocab_parallel_entropy(_with_chunking)     over float32 logits: verl has copied them for the log-probabilities
    FSDP       logprobs_from_logits                       over the logits where verl says inplace_backward
    FSDP       entropy_from_logits(_with_chunking)        new memory
    FSDP       linear_cross_entropy                       no logits: verl's own switch, use_fused_kernels, now also on a CPU
    FSDP       FusedLinearForPPOFunction                  no logits: the same switch with impl_backend torch

Under use_fused_kernels verl has other forwards, which refuse several temperatures in a batch and, in the Megatron engine, turn
themselves off for MTP and for padded rows. So the Megatron engine runs its forward of logits here, and the output layer gives
RowProxy in their place (`place_rows`): shifts, packing, MTP's loss and the temperature of each row are that forward's. The FSDP
engine prepares its inputs as for logits, and its model's fused forward gets the temperatures of the rows. Σπ² stays verl's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.after_import import after_import
from megatron_rl.hosts.heads.log_probs import (
    Applied,
    Installer,
    Replacement,
    entropy_of_logits,
    log_probs_of_hidden,
    log_probs_of_logits,
    log_probs_of_proxy,
)
from megatron_rl.hosts.heads.placed_rows import place_rows, with_logits
from megatron_rl.hosts.heads.row_proxy import RowProxy
from megatron_rl.hosts.verl import PROBED, TITLE
from megatron_rl.layout.groups import SINGLE, Group, resolve_group

FSDP, MEGATRON = "verl.utils.torch_functional", "verl.utils.megatron.tensor_parallel"
FUSED, FUSED_IN_TORCH = "verl.utils.kernel.linear_cross_entropy", "verl.utils.experimental.torch_functional"
FSDP_ENGINE, MEGATRON_ENGINE = "verl.workers.engine.fsdp.transformer_impl", "verl.workers.engine.megatron.transformer_impl"
FUSED_FORWARD = "verl.models.mcore.model_forward_fused"
# The node of Megatron's gather in a graph. verl calls its fused function with what the gather returns.
GATHER = "_GatherFromSequenceParallelRegionBackward"
OF_THE_ENGINE = f"{MEGATRON_ENGINE}:MegatronEngineWithLMHead._lm_head_logits_processor"
MTP, SWITCH = "verl.models.mcore.mtp_patch", "actor_rollout_ref.model.use_fused_kernels"
# What verl makes of a temperature that is not positive, such as that of padding.
SMALLEST_TEMPERATURE = 1e-8


def overwrites(logits: Tensor) -> bool:
    """Whether Megatron's own cross entropy would write over these logits: it casts others to float32 first."""
    return logits.dtype == torch.float32


def row_log_probs(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)
    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        return log_probs_of_logits(logits, labels, SINGLE, inplace=bool(inplace_backward))

    return logprobs_from_logits


def shard_log_probs(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)
    def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
        return log_probs_of_logits(logits, labels, resolve_group(None, "tp"), inplace=overwrites(logits))

    return vocab_parallel_log_probs_from_logits


def entropy_of_rows(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)
    def entropy_from_logits(logits: Tensor, chunk_size: int = 2048) -> Tensor:
        return entropy_of_logits(logits, SINGLE)

    return entropy_from_logits


def entropy_of_shards(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)
    def vocab_parallel_entropy(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
        return entropy_of_logits(vocab_parallel_logits, resolve_group(None, "tp"), inplace=overwrites(vocab_parallel_logits))

    return vocab_parallel_entropy


def hidden_log_probs(theirs: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def linear_cross_entropy(
        hidden: Tensor,  # [..., H]
        weight: Tensor,  # [V_tp, H]
        labels: Tensor,  # as many as hidden has rows
        temperature: float | Tensor = 1.0,  # a number, or one a row
        reduction: str = "none",
        dist_process_group: Group | None = None,
    ) -> tuple[Tensor, Tensor]:  # log_probs [T], entropy [T] float32
        """The gradient of hidden is this tp rank's part, as verl's: the gather of sequence-parallel hidden states adds them up.
        Raises ConfigError for a reduction, and on several tp ranks for hidden states that do not come from that gather."""
        if reduction.lower() != "none":
            raise ConfigError(
                f"linear_cross_entropy with reduction={reduction!r}: megatron_rl's head gives each token its log-probability; ask "
                "for 'none', or take external_lib=megatron_rl.hosts.heads.verl out of the launch"
            )
        group = SINGLE if dist_process_group is None else dist_process_group
        if group.size() > 1 and torch.is_grad_enabled() and hidden.requires_grad and type(hidden.grad_fn).__name__ != GATHER:
            raise ConfigError(
                "use_fused_kernels on several tp ranks without sequence parallelism: each rank would have its own part of the "
                "gradient of the hidden states, and nobody would add them up; set actor_rollout_ref.actor.megatron."
                "sequence_parallel=True, or use_fused_kernels=False"
            )
        return log_probs_of_hidden(hidden, weight, labels, group, temperature=temperature, reduces_hidden=False)

    return linear_cross_entropy


def hidden_log_probs_in_torch(theirs: Any) -> Applied:
    def apply(
        hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0, chunk_size: int = 512
    ) -> tuple[Tensor, Tensor]:  # [...] each, as input_ids
        found = log_probs_of_hidden(hidden_states, vocab_weights, input_ids, SINGLE, temperature=temperature, reduces_hidden=False)
        log_probs, entropy = (values.view(input_ids.shape) for values in found)
        return log_probs, entropy

    return Applied(apply)


def with_placed_head(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def _maybe_enable_fused_kernels(self: Any) -> Any:
        if not self.engine_config.use_fused_kernels or self.is_value_model:
            return theirs(self)
        place_rows(self.module, f"{SWITCH}=True", knows_mtp=True)
        self.engine_config.use_fused_kernels = False  # its forward of logits
        return None

    return _maybe_enable_fused_kernels


def logits_processor(theirs: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    @functools.wraps(theirs)
    def _lm_head_logits_processor(
        self: Any, logits: Tensor, label: Tensor, temperature: Tensor, **options: Any
    ) -> dict[str, Tensor]:  # [B, S] each, as label
        if not isinstance(logits, RowProxy):
            return theirs(self, logits, label, temperature, **options)
        if needs := [name for name in ("calculate_sum_pi_squared", "distillation_use_topk") if options[name]]:
            raise ConfigError(f"{SWITCH}=True: {needs[0]} reads logits, and none are made; set {SWITCH}=False")
        given = torch.as_tensor(options["batch"]["temperature"], dtype=temperature.dtype).flatten()
        # Rows of padding have 0. At a temperature of the batch they cost no products of their own.
        others = float(given[0]) if bool((given > 0).all()) else SMALLEST_TEMPERATURE
        log_probs, entropy = log_probs_of_proxy(
            logits,
            label,
            resolve_group(None, "tp"),
            temperature=torch.where(temperature > 0, temperature, others),
            with_entropy=options["calculate_entropy"],
        )
        found = {"entropy": entropy} if options["calculate_entropy"] else {}
        return found if options["distillation_only"] else found | {"log_probs": log_probs}

    return _lm_head_logits_processor


def model_inputs(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        """verl prepares the temperature of each row for a forward of logits alone; what it adds for a fused one is three names."""
        values = import_module("verl.utils.tensordict_utils")
        is_fused = values.get_non_tensor_data(data=micro_batch, key="use_fused_kernels", default=False)
        # An engine of another module has fused forwards that are not replaced.
        is_ours = type(self).__module__ == FSDP_ENGINE
        if not (is_fused and is_ours) or not isinstance(micro_batch["temperature"], Tensor):
            return theirs(self, micro_batch)
        unfused = micro_batch.copy()
        values.assign_non_tensor(unfused, use_fused_kernels=False)
        inputs, kept = theirs(self, unfused)
        inputs["return_dict"] = True
        if "temperature_rmpad" in kept:
            inputs["temperature"] = kept["temperature_rmpad"].clamp(min=SMALLEST_TEMPERATURE)
            inputs["shift_labels"] = kept["input_ids_rmpad_rolled"].unsqueeze(0)
        else:
            rows = kept["temperature"].clamp(min=SMALLEST_TEMPERATURE)
            inputs["temperature"] = rows[:, None].expand(inputs["input_ids"].shape)
        return inputs, kept

    return prepare_model_inputs


REPLACEMENTS = (
    Replacement(
        path=f"{FSDP}:logprobs_from_logits",
        arguments=("logits", "labels", "inplace_backward"),
        ours=row_log_probs,
        callers=(f"{FSDP_ENGINE}:FSDPEngineWithLMHead.prepare_model_outputs",),
    ),
    Replacement(path=f"{FSDP}:entropy_from_logits", arguments=("logits",), ours=entropy_of_rows),
    Replacement(path=f"{FSDP}:entropy_from_logits_with_chunking", arguments=("logits", "chunk_size"), ours=entropy_of_rows),
    Replacement(
        path=f"{MEGATRON}:vocab_parallel_log_probs_from_logits",
        arguments=("logits", "labels"),
        ours=shard_log_probs,
        callers=(OF_THE_ENGINE,),
    ),
    Replacement(
        path=f"{MEGATRON}:vocab_parallel_entropy",
        arguments=("vocab_parallel_logits",),
        ours=entropy_of_shards,
        callers=(OF_THE_ENGINE,),
    ),
    Replacement(
        path=f"{MEGATRON}:vocab_parallel_entropy_with_chunking",
        arguments=("vocab_parallel_logits", "chunk_size"),
        ours=entropy_of_shards,
        callers=(OF_THE_ENGINE,),
    ),
    Replacement(
        path=f"{FUSED}:linear_cross_entropy",
        arguments=("ctx", "hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"),
        ours=hidden_log_probs,
        callers=(f"{FUSED_FORWARD}:fused_output_processor",),
    ),
    Replacement(
        path=f"{FUSED_IN_TORCH}:FusedLinearForPPOFunction",
        arguments=("ctx", "hidden_states", "vocab_weights", "input_ids", "temperature", "chunk_size"),
        ours=hidden_log_probs_in_torch,
        callers=(f"{FUSED_IN_TORCH}:FusedLinearForPPO.forward",),
    ),
    Replacement(
        path=f"{MEGATRON_ENGINE}:MegatronEngine._maybe_enable_fused_kernels",
        arguments=("self",),
        ours=with_placed_head,
        callers=(f"{MEGATRON_ENGINE}:MegatronEngine.initialize",),
        is_told=False,
    ),
    Replacement(
        path=OF_THE_ENGINE,
        arguments=(
            *("self", "logits", "label", "temperature", "calculate_sum_pi_squared", "calculate_entropy", "distillation_use_topk"),
            *("distillation_only", "logits_processor_func", "batch", "data_format"),
        ),
        ours=logits_processor,
        callers=(f"{MEGATRON_ENGINE}:MegatronEngineWithLMHead.forward_step",),
        is_told=False,
    ),
    Replacement(
        path=f"{FSDP_ENGINE}:FSDPEngineWithLMHead.prepare_model_inputs",
        arguments=("self", "micro_batch"),
        ours=model_inputs,
        callers=(f"{FSDP_ENGINE}:FSDPEngineWithLMHead.forward_step",),
        is_told=False,
    ),
)


def install() -> None:
    Installer(TITLE, PROBED, ("verl",)).install(REPLACEMENTS)
    after_import(MTP, with_logits)


install()
