"""Lists which flag has an effect on which launch method, and what of a launch a rule can read. It contains no rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_rl.config import (
    Backend,
    CorrectionLevel,
    Distillation,
    EmptySteps,
    GradientDivisor,
    LaunchMethod,
    PolicyLossConfig,
    PolicyMetrics,
    RouterAuxLoss,
    SupportUse,
    Watchdog,
    flag_fields,
)
from megatron_rl.declare import POLICY_LOSSES, PolicyLoss, declared_parameters
from megatron_rl.losses.corrections import CORRECTIONS, CorrectionKind
from megatron_rl.losses.distillation import DIVERGENCES
from megatron_rl.losses.kl import KL_ESTIMATORS, KLEstimator
from megatron_rl.registry import Registry
from megatron_rl.weights import AGGREGATIONS, AggregationRecord

# The fields that act elsewhere than in our loss, by where. One that is set on another launch method is an error.
_OUR_LOSS = frozenset(LaunchMethod) - {LaunchMethod.REDUCER}  # a reducer gets the per-token losses of another loss
_FIELDS_OF_METHODS: dict[frozenset[LaunchMethod], tuple[str, ...]] = {
    frozenset(LaunchMethod): (
        *("loss_aggregation", "loss_aggregation_divisor", "samples_per_prompt", "allow_partial_prompt_groups"),
        "fp32_lm_head",
    ),
    frozenset({LaunchMethod.MEGATRON_LM}): ("one_sample_per_rollout",),
    frozenset({LaunchMethod.CUSTOM_LOSS}): ("skip_old_log_probs",),
    # Where the loss is handed what a sampler kept.
    frozenset({LaunchMethod.CUSTOM_LOSS, LaunchMethod.TRAIN}): ("sampling_support",),
    # Elsewhere the host makes the step, and the loss sees micro-batches.
    frozenset({LaunchMethod.MEGATRON_LM, LaunchMethod.TRAIN}): (
        *("router_aux_loss", "gradient_divisor"),
        *("distillation", "distillation_divergence", "distillation_beta", "distillation_coefficient"),
    ),
    frozenset({LaunchMethod.TRAIN}): ("empty_step", "docs_per_step", "watchdog"),
}


def methods_of_flags() -> dict[str, frozenset[LaunchMethod]]:
    """Each flag of ours, of the parameters of registered losses too -> the methods on which it acts."""
    elsewhere = {name: methods for methods, names in _FIELDS_OF_METHODS.items() for name in names}
    names = (*(field.name for field in flag_fields()), *declared_parameters())
    return {flag_of(name): elsewhere.get(name, _OUR_LOSS) for name in names}


# Fields with a fixed set of values.
CHOICES: dict[str, Iterable[str]] = {
    "importance_correction_level": CorrectionLevel,
    "empty_step": EmptySteps,
    "sampling_support": SupportUse,
    "distillation": Distillation,
    "distillation_divergence": DIVERGENCES,
    "policy_metrics": PolicyMetrics,
    "policy_loss_backend": Backend,
    "router_aux_loss": RouterAuxLoss,
    "gradient_divisor": GradientDivisor,
    "watchdog": Watchdog,
}
# Fields whose values are the names of a registry, or module.function.
REGISTRIES: dict[str, Registry[Any]] = {
    "loss_aggregation": AGGREGATIONS,
    "policy_loss": POLICY_LOSSES,
    "importance_correction": CORRECTIONS,
    "kl_estimator": KL_ESTIMATORS,
}


# Switches of hosts and of Megatron that a rule or a hook reads -> the value that an absent one has.
HOST_SWITCHES: dict[str, bool] = {
    **dict.fromkeys(("grpo_std_normalization", "rewards_normalization"), True),
    **dict.fromkeys(
        (
            *("allgather_cp", "allow_partial_train_step", "calculate_per_token_loss", "delay_split_train_data_by_dp"),
            *("enable_mtp_training", "fp16", "get_mismatch_metrics", "indep_dp", "keep_old_actor", "log_correct_samples"),
            *("multi_lora", "normalize_advantages", "observe_training_entropy", "perform_rl_step", "recompute_loss_function"),
            *("rl_inference_logprobs_is_correction", "rl_use_sequence_packing", "sglang_enable_custom_logit_processor"),
            *("skip_actor_forward_only", "tis_batch_normalize", "true_on_policy_mode", "use_dynamic_batch_size"),
            *("use_dynamic_global_batch_size", "use_indexer_replay", "use_kl_loss", "use_opd", "use_opsm", "use_rollout_entropy"),
            *("use_rollout_indexer_replay", "use_rollout_logprobs", "use_rollout_routing_replay", "use_routing_replay"),
            *("use_tis", "use_unbiased_kl"),
        ),
        False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What rules judge: our settings, and the options of a launch that they read besides; None: the launch does not say."""

    config: PolicyLossConfig = PolicyLossConfig()
    method: LaunchMethod = LaunchMethod.MEGATRON_LM
    """How this launch reaches the loss."""
    set_flags: frozenset[str] = frozenset()
    """Flags that were given. A flag with another value than its default counts as given in any case."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Of the launch, by name, as given: switches of the host, and what they say of the model and the step."""

    @property
    def calculates_per_token_loss(self) -> bool:
        """Megatron's flag: the host divides the summed gradient by the step's tokens."""
        return self.arguments.get("calculate_per_token_loss") is True

    # The declarations of the configured functions; None for an unknown name, which names_are_registered reports.

    @cached_property
    def loss(self) -> PolicyLoss | None:
        return POLICY_LOSSES.find(self.config.policy_loss)

    @cached_property
    def record(self) -> AggregationRecord | None:
        return AGGREGATIONS.find(self.config.loss_aggregation)

    @cached_property
    def correction(self) -> CorrectionKind | None:
        return CORRECTIONS.find(self.config.importance_correction)

    @cached_property
    def kl_estimator(self) -> KLEstimator | None:
        return KL_ESTIMATORS.find(self.config.kl_estimator)


def flag_of(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
