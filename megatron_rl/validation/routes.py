"""Lists which flag has an effect on which route, and what of a launch a rule can read. It contains no rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.config import (
    Backend,
    CorrectionLevel,
    EmptySteps,
    EntropyBonusTokens,
    GradientDivisor,
    PolicyLossConfig,
    PolicyMetrics,
    RatioUnit,
    RejectedTokens,
    Route,
    RouterAuxLoss,
    SupportUse,
    TermScore,
    Watchdog,
)
from megatron_rl.errors import ConfigError
from megatron_rl.loss_hub import PolicyLoss, declared_parameters, get_loss_aggregation, get_policy_loss
from megatron_rl.registries.corrections import CORRECTIONS, CorrectionKind
from megatron_rl.registries.kl_estimators import KL_ESTIMATORS, KLEstimator
from megatron_rl.registries.registry import Registry
from megatron_rl.registries.token_selections import TOKEN_SELECTIONS, TokenSelectionKind

_EVERYWHERE = frozenset(Route)
_WITH_LOGITS = _EVERYWHERE - {Route.REDUCER}
_WITH_MODEL = frozenset({Route.MEGATRON_LM, Route.TRAIN})

# A reducer gets only per-token losses. In a host the loss does not know the step's number of samples. A flag that is
# set on a route outside its row is an error, so that no flag is without effect.
ROUTES_OF_FLAG: dict[str, frozenset[Route]] = {
    "--policy-loss": _WITH_LOGITS,
    "--loss-aggregation": _EVERYWHERE,
    "--loss-aggregation-divisor": _EVERYWHERE,
    "--samples-per-prompt": _EVERYWHERE,
    "--allow-partial-prompt-groups": _EVERYWHERE,
    "--one-sample-per-rollout": frozenset({Route.MEGATRON_LM}),
    "--clip-ratio-low": _WITH_LOGITS,
    "--clip-ratio-high": _WITH_LOGITS,
    "--importance-ratio-unit": _WITH_MODEL,
    "--policy-temperature": _WITH_LOGITS,
    "--importance-correction": _WITH_LOGITS,
    "--importance-correction-level": _WITH_LOGITS,
    "--importance-correction-low": _WITH_LOGITS,
    "--importance-correction-high": _WITH_LOGITS,
    "--off-policy-sequence-delta": _WITH_LOGITS,
    "--rejected-tokens": _WITH_MODEL,
    "--token-selection": _WITH_MODEL,
    "--token-selection-share": _WITH_MODEL,
    "--token-selection-low": _WITH_MODEL,
    "--token-selection-high": _WITH_MODEL,
    "--token-selection-kl-coefficient": _WITH_MODEL,
    "--entropy-bonus-tokens": _WITH_MODEL,
    "--empty-step": frozenset({Route.TRAIN}),
    "--kl-coefficient": _WITH_LOGITS,
    "--kl-estimator": _WITH_LOGITS,
    "--sampling-support": frozenset({Route.CUSTOM_LOSS, Route.TRAIN}),
    "--kl-score": frozenset({Route.TRAIN}),
    "--entropy-score": frozenset({Route.TRAIN}),
    "--entropy-coefficient": _WITH_LOGITS,
    "--policy-metrics": _WITH_LOGITS,
    "--custom-policy-metrics": _WITH_MODEL,
    "--policy-loss-backend": _WITH_LOGITS,
    "--fused-lm-head-loss": _WITH_LOGITS,
    "--scaled-exp-head": _WITH_LOGITS,
    "--max-logits-bytes": _WITH_LOGITS,
    "--fp32-lm-head": _EVERYWHERE,
    "--skip-old-log-probs": frozenset({Route.CUSTOM_LOSS}),
    "--docs-per-step": frozenset({Route.TRAIN}),
    "--router-aux-loss": _WITH_MODEL,
    "--gradient-divisor": _WITH_MODEL,
    "--watchdog": frozenset({Route.TRAIN}),
}


def routes_of_flags() -> dict[str, frozenset[Route]]:
    """ROUTES_OF_FLAG, with a row for each parameter that a registered loss declares."""
    return ROUTES_OF_FLAG | dict.fromkeys(map(flag_of, declared_parameters()), _WITH_LOGITS)


# Why a flag has no effect on the other routes, where the table does not explain it.
REASONS: dict[str, str] = {
    "--one-sample-per-rollout": "elsewhere the loss knows which samples make a rollout, or each sample is one",
    "--scaled-exp-head": "a reducer comes after the host's own loss, which needs the logits",
    "--fused-lm-head-loss": "a reducer comes after the host's own loss, which needs the logits",
    "--max-logits-bytes": "a reducer comes after the host's own loss, which needs the logits",
    "--skip-old-log-probs": "train leaves it out by itself, and beside a reducer the host's own loss decides",
    "--importance-ratio-unit": "elsewhere the host says what a sample of the loss is",
    "--rejected-tokens": "elsewhere the host has counted the step's tokens before the loss knows which are dropped",
    **dict.fromkeys(
        (
            *("--token-selection", "--token-selection-share", "--token-selection-low", "--token-selection-high"),
            *("--token-selection-kl-coefficient", "--entropy-bonus-tokens"),
        ),
        "elsewhere the loss sees one micro-batch at a time, and tokens are selected in the whole step",
    ),
    "--empty-step": "elsewhere the host's loop calls the optimiser; your own loop can catch megatron_rl.errors.EmptyStep",
    "--docs-per-step": "elsewhere the host's batching decides which samples make a step; your own loop can iterate over "
    "megatron_rl.accumulation.StepAccumulator",
    "--sampling-support": "elsewhere nothing hands the loss what a sampler kept; sample from the whole vocabulary",
    "--kl-score": "elsewhere the KL term is over what the host measures its reference over",
    "--entropy-score": "elsewhere the entropy is over the whole vocabulary",
    "--custom-policy-metrics": "a host reports its own metrics",
    "--router-aux-loss": "elsewhere the host calls the model and sets the coefficients of its routers",
}

# Fields with a fixed set of values.
CHOICES: dict[str, type[StrEnum]] = {
    "importance_correction_level": CorrectionLevel,
    "importance_ratio_unit": RatioUnit,
    "rejected_tokens": RejectedTokens,
    "empty_step": EmptySteps,
    "sampling_support": SupportUse,
    "kl_score": TermScore,
    "entropy_bonus_tokens": EntropyBonusTokens,
    "entropy_score": TermScore,
    "policy_metrics": PolicyMetrics,
    "policy_loss_backend": Backend,
    "router_aux_loss": RouterAuxLoss,
    "gradient_divisor": GradientDivisor,
    "watchdog": Watchdog,
}
# Fields whose values are the names of a registry, or module.function.
REGISTRIES: dict[str, Registry[Any]] = {
    "importance_correction": CORRECTIONS,
    "kl_estimator": KL_ESTIMATORS,
    "token_selection": TOKEN_SELECTIONS,
}


# Switches of hosts and of Megatron that a rule or a hook reads -> the value that an absent one has.
HOST_SWITCHES: dict[str, bool] = {
    "allgather_cp": False,
    "allow_partial_train_step": False,
    "bf16": False,
    "calculate_per_token_loss": False,
    "delay_split_train_data_by_dp": False,
    "disable_rollout_trim_samples": False,
    "enable_mtp_training": False,
    "fp16": False,
    "get_mismatch_metrics": False,
    "grpo_std_normalization": True,
    "indep_dp": False,
    "keep_old_actor": False,
    "log_correct_samples": False,
    "multi_lora": False,
    "normalize_advantages": False,
    "observe_training_entropy": False,
    "perform_rl_step": False,
    "recompute_loss_function": False,
    "rewards_normalization": True,
    "rl_inference_logprobs_is_correction": False,
    "rl_use_sequence_packing": False,
    "sglang_enable_custom_logit_processor": False,
    "skip_actor_forward_only": False,
    "tis_batch_normalize": False,
    "true_on_policy_mode": False,
    "use_dynamic_batch_size": False,
    "use_dynamic_global_batch_size": False,
    "use_indexer_replay": False,
    "use_kl_loss": False,
    "use_opd": False,
    "use_opsm": False,
    "use_rollout_entropy": False,
    "use_rollout_indexer_replay": False,
    "use_rollout_logprobs": False,
    "use_rollout_routing_replay": False,
    "use_routing_replay": False,
    "use_rs": False,
    "use_tis": False,
    "use_unbiased_kl": False,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What rules judge: our settings, and the options of a launch that they read besides; None: the launch does not say."""

    config: PolicyLossConfig = PolicyLossConfig()
    route: Route = Route.MEGATRON_LM
    """How this launch reaches the loss."""
    takes_our_loss_by: str = "--loss-type custom_loss"
    """What whoever types the settings adds for our loss in place of the reducer."""
    set_flags: frozenset[str] = frozenset()
    """Flags that were given. A flag with another value than its default counts as given in any case."""
    calculate_per_token_loss: bool | None = None
    """Megatron's flag: the host divides the summed gradient by the step's tokens."""
    host_switches: Mapping[str, object] = field(default_factory=dict)
    """The HOST_SWITCHES that the launch sets, with their values as given."""
    model: Mapping[str, object] = field(default_factory=dict)
    """The auxiliary_losses.MODEL_SETTINGS, experts.EXPERT_SETTINGS and model_settings.FURTHER_SETTINGS that the launch sets."""
    global_batch_size: object = None
    """Samples of a step, as the host counts them. The value is as given, not checked."""
    has_16_bit_parameters: bool | None = None
    """Whether the launch trains bfloat16 or float16 parameters."""

    @cached_property
    def loss(self) -> PolicyLoss | None:
        """The declaration of the configured loss; None for an unknown name, which policy_loss_is_known reports."""
        try:
            return get_policy_loss(self.config.policy_loss)
        except ConfigError:
            return None

    @cached_property
    def correction(self) -> CorrectionKind | None:
        """The declaration of the configured correction; None for an unknown name, which registered_names_are_known reports."""
        return CORRECTIONS.find_or_none(self.config.importance_correction)

    @cached_property
    def kl_estimator(self) -> KLEstimator | None:
        """The declaration of the configured KL estimator; None for an unknown name, which registered_names_are_known reports."""
        return KL_ESTIMATORS.find_or_none(self.config.kl_estimator)

    @cached_property
    def token_selection(self) -> TokenSelectionKind | None:
        """The declaration of the configured selection; None for an unknown name, which registered_names_are_known reports."""
        return TOKEN_SELECTIONS.find_or_none(self.config.token_selection)

    @cached_property
    def record(self) -> AggregationRecord | None:
        """The record of the configured aggregation; None for a wrong name, which loss_aggregation_is_known reports."""
        try:
            return get_loss_aggregation(self.config.loss_aggregation)
        except ConfigError:
            return None


def flag_of(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
