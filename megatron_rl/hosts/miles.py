"""The host miles: what is different from other hosts."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.config import TermScore
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.base import (
    CHOICES,
    CONVERT_LINE,
    ESTIMATORS,
    REWARD_LINE,
    Converter,
    Host,
    HostLaunch,
    HostLoss,
    HostOptions,
    import_of_host,
    reward_function,
)
from megatron_rl.hosts.checkpoint_config import checkpoint_config
from megatron_rl.hosts.kept_ids import KeptIds
from megatron_rl.hosts.step_sizes import whole_number
from megatron_rl.validation import flag_of
from megatron_rl.validation.auxiliary_losses import num_experts_of, number
from megatron_rl.validation.checks import check

CONVERSION = "miles.ray.rollout.train_data_conversion"
CORRECTIONS = "miles.backends.training_utils.loss_hub.corrections"
OWN_OPTIONS = ("observe_training_entropy", "allow_partial_train_step", "true_on_policy_mode")


class Miles(Host):
    name = "miles"
    package = "miles"
    training_package = "miles.backends.megatron_utils"
    parser_module = "miles.utils.arguments"
    own_options = marks = OWN_OPTIONS
    parser_defaults = {**Host.parser_defaults, **dict.fromkeys(OWN_OPTIONS, False)}
    choices = {**CHOICES, "--advantage-estimator": ESTIMATORS}
    rollout_functions = (
        "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",
        "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn",
        "miles.rollout.multi_lora.async_rollout.generate_rollout_multi_lora",
        "miles.rollout.sglang_rollout.generate_rollout",
    )
    loss = HostLoss(
        has_ess_ratio=True,
        has_rollout_kl=True,
        compares_trained_with_rollout=False,
        needs_log_probs=True,
        correction_functions={f"{CORRECTIONS}.vanilla_tis_function": "tis", f"{CORRECTIONS}.icepop_function": "icepop"},
        kept=KeptIds(
            ids="rollout_sampling_mask_ids",
            offsets="rollout_sampling_mask_offsets",
            filters=("rollout_top_p", "rollout_top_k"),
            adds_token=False,
            reference=TermScore.FULL,
        ),
    )

    def filled_in(self, values: Mapping[str, object]) -> dict[str, object]:
        """With what adapters of several tasks set: a train batch has as many samples as have come."""
        if not whole_number(values.get("multi_lora_n_adapters")):
            return super().filled_in(values)
        of_adapters = {"multi_lora": True, "use_dynamic_global_batch_size": True, "megatron_to_hf_mode": "bridge"}
        return {**super().filled_in(values), **of_adapters}

    def takes_checkpoint_coefficient(self, options: HostOptions) -> bool:
        """Under --megatron-to-hf-mode bridge, unless the arguments have one: miles then writes it over the bridge's value."""
        return options["megatron_to_hf_mode"] == "bridge" and options["moe_aux_loss_coeff"] is None

    def reason_for_split_by_samples(self, options: HostOptions, is_multimodal: bool) -> str | None:
        """miles schedules steps by rollout only where its training side has said how it is laid out and samples are plain text."""
        if options["train_backend"] != "megatron":
            return f"--train-backend {options['train_backend']}"
        for name in ("delay_split_train_data_by_dp", "indep_dp"):
            if options[name]:
                return flag_of(name)
        return "samples with multimodal_train_inputs" if is_multimodal else None

    def converter(self) -> Converter:
        """A function."""
        function = import_of_host(CONVERSION, "convert_samples_to_train_data", self).convert_samples_to_train_data

        def convert(args: Namespace, samples: Sequence) -> dict:
            keywords: dict[str, Any] = {
                # The metadata belongs to multi-LoRA and to dynamic batch sizes, both refused.
                "metadata": {},
                "custom_convert_samples_to_train_data_func": None,
                "custom_reward_post_process_func": reward_function(HostOptions(args)),
            }
            try:
                inspect.signature(function).bind(args, samples, **keywords)
            except TypeError as error:
                raise ConfigError(
                    f"the converter of this {self} takes other arguments ({error}): use {REWARD_LINE} instead"
                ) from error
            return function(args, samples, **keywords)

        return convert


@check(when=HostLaunch.has_converter)
def batches_are_split_by_rollout(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    names = ("delay_split_train_data_by_dp", "indep_dp", "multimodal_keys")
    found = [flag_of(name) for name in names if options[name]]
    if options["train_backend"] != "megatron":
        found.append(f"--train-backend {options['train_backend']}")
    for option in found:
        yield (
            f"{option} with {CONVERT_LINE}: miles then splits samples without looking at rollout ids, so "
            f"a step would cut prompt groups; use {REWARD_LINE}"
        )


@check(is_warning=True)
def whitening_sees_whole_samples(launch: HostLaunch) -> Iterator[str]:
    cp_size = launch.options["context_parallel_size"]
    if launch.options["normalize_advantages"] and cp_size > 1:
        yield (
            f"--normalize-advantages with --context-parallel-size {cp_size} in miles: whitening takes mean and deviation over the "
            "ranks without context parallelism, so the halves of one sample are whitened differently (radixark/miles#3229)"
        )


@check(is_warning=True)
def bridge_leaves_the_router_alone(launch: HostLaunch) -> Iterator[str]:
    """Megatron's own parser has 0 where the flag is not typed; the parser of a fork may have None."""
    config = checkpoint_config(launch.options)
    if config is not None and config.coefficients and launch.options.host.takes_checkpoint_coefficient(launch.options):
        yield (
            f"--megatron-to-hf-mode bridge takes {config} for the auxiliary loss of routers, where nothing on the launch line says "
            "otherwise: it changes with the layout, and --calculate-per-token-loss multiplies it; add --moe-aux-loss-coeff 0"
        )


@check(is_warning=True)
def adapters_of_experts_are_whole(launch: HostLaunch) -> Iterator[str]:
    """One factor of an adapter is whole on each rank that shares an expert; a bridge must add its gradients, and some do not."""
    experts, rank = launch.options.of_model, launch.options["lora_rank"]
    given = experts.get("expert_tensor_parallel_size")
    size = number(launch.options["tensor_model_parallel_size"] if given is None else given)
    if rank and num_experts_of(experts)[1] != 0 and size > 1:
        yield (
            f"--lora-rank {rank} with experts on {size:g} expert-tensor-parallel ranks: releases of Megatron-Bridge do not add the "
            "gradients of an adapter's whole factor over them, and its replicas drift apart (NVIDIA-NeMo/Megatron-Bridge#5634); "
            "set --expert-tensor-parallel-size 1"
        )
    tp = number(launch.options["tensor_model_parallel_size"])
    if rank and experts.get("moe_shared_expert_overlap") and tp > 1:
        yield (
            f"--lora-rank {rank} with --moe-shared-expert-overlap and --tensor-model-parallel-size {tp:g}: releases of "
            "Megatron-Bridge add the shared expert's adapter once on each tensor-parallel rank, so it counts that often "
            "(radixark/miles#3232); remove --moe-shared-expert-overlap"
        )


HOST = Miles()
