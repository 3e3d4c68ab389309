"""Launches that each rule refuses or allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from helpers import names_forgotten

from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.validation import Settings, config_warnings
from megatron_rl.validation.rules import RULES
from megatron_rl.weights import loss_aggregation_names

CONSTANT = {"loss_aggregation": "constant"}
PROMPT_MEAN = {"loss_aggregation": "prompt_mean"}
TOKEN_MEAN = {"loss_aggregation": "token_mean"}
GROUPS_OF_4 = {**PROMPT_MEAN, "samples_per_prompt": 4}
PER_TOKEN = {**TOKEN_MEAN, "calculate_per_token_loss": True}
GSPO = {"policy_loss": "gspo"}
RATIO_BOUNDS = {"importance_correction_low": 0.5, "importance_correction_high": 2.0}
PLAIN = {"policy_loss": "own_losses.reinforce"}  # it has a parameter and no clip
ANCHORED = "own_losses.anchored"  # its ratio compares with the sampler
TIS = {"importance_correction": "tis"}
EXPERTS = {"num_experts": 8}
TP_2 = {"tensor_model_parallel_size": 2}
PARALLEL = {**TP_2, "sequence_parallel": True}
LOCAL = {"transformer_impl": "local"}
SEVERAL = {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}
LATENT = {"multi_latent_attention": True}
IN_HOST = {"route": Route.REDUCER}
IN_TRAIN = {"route": Route.TRAIN}
MTP = {**PER_TOKEN, **IN_HOST, "mtp_num_layers": 1, "enable_mtp_training": True, "context_parallel_size": 2}
OWN = {"loss_aggregation": "own_losses.by_hand"}

# rule: fields of PolicyLossConfig, the route, and arguments of the launch. tests/messages.txt has what is said.
REFUSED: dict[str, list[dict]] = {
    "host_switches_are_true_or_false": [
        {"calculate_per_token_loss": "false"},
        {"use_tis": 1},
        {"rewards_normalization": None},
    ],
    "names_are_registered": [
        {"loss_aggregation": "geometric"},
        {"loss_aggregation": "seq-mean-token-mean"},
        {"loss_aggregation": "token_mean_legacy"},
        {"loss_aggregation": "no_such_module.weights"},
        {"loss_aggregation": 3},
        {"policy_loss": "dr_grpo"},
        {"importance_correction": "ppo"},
        {"kl_estimator": "k4", "kl_coefficient": 0.1},
    ],
    "own_function_problems": [
        {"policy_loss": "own_losses.detached"},
        {"policy_loss": "own_losses.centred"},
        {"kl_estimator": "own_losses.negated", "kl_coefficient": 0.1},
        {"importance_correction": "own_losses.normalised", **RATIO_BOUNDS},
    ],
    "divisor_goes_with_constant": [
        CONSTANT,
        {**TOKEN_MEAN, "loss_aggregation_divisor": 8192.0},
        *({**CONSTANT, "loss_aggregation_divisor": value} for value in (0.0, float("nan"), True, "8k")),
    ],
    "numbers_fit_the_loss": [
        {"clip_ratio_low": 1.3},
        {"clip_ratio_low": 1.0},
        {"clip_ratio_low": -0.2},
        {"policy_loss": "cispo", "clip_ratio_low": 1.5},
        {"clip_ratio_high": -0.28},
        {"clip_ratio_high": float("inf")},
        {**PLAIN, "clip_ratio_low": 0.1},
        {"loss_parameters": {"scale": 1.0}},
        {**PLAIN, "loss_parameters": {"scale": 3.0}},
        {**PLAIN, "loss_parameters": {"cap": 1.0}},
    ],
    "entropy_of_a_loss_is_known": [{"policy_loss": "own_losses.heeding", "route": Route.CUSTOM_LOSS}],
    "corrections_fit": [{"importance_correction": "mask"}, {**TIS, "policy_loss": ANCHORED}],
    "settings_are_read": [
        {"kl_estimator": "k2"},
        {"allow_partial_prompt_groups": True},
        {"max_logits_bytes": 2**30},
        {"max_logits_bytes": 2 * 1024**3, "set_flags": frozenset({"--max-logits-bytes"})},
        {"watchdog": "raise", "policy_metrics": "none"},
        {"watchdog": "warn", "policy_metrics": "none", "set_flags": frozenset({"--watchdog"})},
    ],
    "numbers_are_in_range": [
        {"policy_temperature": 0.0},
        {"policy_temperature": float("inf")},
        {"kl_coefficient": -0.1},
        {"entropy_coefficient": False},
        {"samples_per_prompt": 0},
        {"max_logits_bytes": "2G"},
        {"docs_per_step": 1.5},
    ],
    "choices_are_listed": [
        {"policy_metrics": "all"},
        {"gradient_divisor": 8},
        {"router_aux_loss": "off"},
        {"importance_correction_level": ["token"]},
        {"watchdog": False},
    ],
    "switches_are_true_or_false": [{"allow_partial_prompt_groups": "maybe"}, {"fp32_lm_head": None}],
    "per_token_loss_is_token_mean": [{**PER_TOKEN, **PROMPT_MEAN}],
    "the_model_keeps_the_step": [
        {**PER_TOKEN, **EXPERTS, "moe_aux_loss_coeff": 0.001},
        {**EXPERTS, "moe_z_loss_coeff": 1e-3, "router_aux_loss": "refuse"},
        {**PER_TOKEN, **EXPERTS, **SEVERAL, **IN_HOST, "moe_aux_loss_coeff": [0.0, 0.01]},
        {**PER_TOKEN, **EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": "1e-3"},
        {"dsa_indexer_loss_coeff": 0.01},
        {**PER_TOKEN, **IN_HOST, "dsa_indexer_loss_coeff": 0.01},
        MTP,
        {"num_experts": 6, "expert_model_parallel_size": 4},
        {**EXPERTS, **TP_2},
        {**EXPERTS, "moe_expert_capacity_factor": 1.5},
        {**EXPERTS, "moe_expert_rank_capacity_factor": 1.5},
        {**EXPERTS, "moe_input_jitter_eps": "0.01"},
        {**EXPERTS, "moe_router_force_load_balancing": True},
        {**EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
        {**EXPERTS, **PARALLEL, **LOCAL, "add_bias_linear": True},
        {"hybrid_context_parallel": True},
        {"dynamic_context_parallel": True},
        {**LATENT, **TP_2},
        {**LATENT, **PARALLEL, **LOCAL},
    ],
    "steps_hold_whole_prompt_groups": [{**GROUPS_OF_4, "global_batch_size": 30}],
    "flags_have_an_effect": [
        {"docs_per_step": 64, "route": Route.MEGATRON_LM},
        {"fused_lm_head_loss": True, **IN_HOST},
        {"gradient_divisor": "num_samples", "route": Route.CUSTOM_LOSS},
        {"policy_loss": "grpo", "set_flags": frozenset({"--policy-loss"}), **IN_HOST},
    ],
}
ALLOWED: dict[str, list[dict]] = {
    "host_switches_are_true_or_false": [{"use_tis": True, "rewards_normalization": False, "calculate_per_token_loss": None}],
    "names_are_registered": [*({"loss_aggregation": name} for name in loss_aggregation_names()), OWN, GSPO],
    "own_function_problems": [
        PLAIN,
        {"policy_loss": "own_losses.gmpo", "clip_ratio_low": 0.3},
        {"policy_loss": "own_losses.detached", "clip_ratio_low": 0.3},  # another rule says what is wrong
        {"kl_estimator": "own_losses.jeffreys", "kl_coefficient": 0.1},
    ],
    "divisor_goes_with_constant": [
        {**CONSTANT, "loss_aggregation_divisor": 8192.0},
        {**OWN, "loss_aggregation_divisor": 2.0},
        TOKEN_MEAN,
    ],
    "numbers_fit_the_loss": [
        {"clip_ratio_low": 0.0, "clip_ratio_high": 0},
        {"clip_ratio_low": 0.999, "clip_ratio_high": 4.0},
        {"policy_loss": "cispo", "clip_ratio_low": 1.0},
        {**PLAIN, "loss_parameters": {"scale": 0.5}},
    ],
    "entropy_of_a_loss_is_known": [
        {"policy_loss": "own_losses.heeding"},
        {"policy_loss": "own_losses.heeding", "route": Route.CUSTOM_LOSS, "policy_metrics": "none"},
    ],
    "corrections_fit": [TIS, {"off_policy_sequence_delta": 0.1, "policy_loss": ANCHORED}],
    "settings_are_read": [
        {"kl_estimator": "k3+", "kl_coefficient": 0.1, **IN_TRAIN},
        {"allow_partial_prompt_groups": True, "samples_per_prompt": 4},
        {"fused_lm_head_loss": True, "max_logits_bytes": 2**20},
        {"policy_metrics": "none", "watchdog": "off", "set_flags": frozenset({"--watchdog"})},
        {"policy_metrics": "none"},
        {"watchdog": "raise"},
    ],
    "numbers_are_in_range": [
        {"policy_temperature": 1e-3, "kl_coefficient": 0.0, "entropy_coefficient": 0.01},
        {"samples_per_prompt": 1, "max_logits_bytes": 1, "docs_per_step": None},
    ],
    "choices_are_listed": [{"policy_metrics": "with_entropy", "watchdog": "raise", "gradient_divisor": "num_samples"}],
    "switches_are_true_or_false": [{"fp32_lm_head": True}],
    "per_token_loss_is_token_mean": [PER_TOKEN, {"calculate_per_token_loss": False}],
    "the_model_keeps_the_step": [
        {**PER_TOKEN, **EXPERTS, "moe_z_loss_coeff": 1e-3, "router_aux_loss": "exact"},
        {**PER_TOKEN, **EXPERTS, "moe_aux_loss_coeff": 1e-3, "router_aux_loss": "host"},
        {"dsa_indexer_loss_coeff": 0.01, **IN_HOST},  # the installed Megatron-Core decides
        {**EXPERTS, "moe_aux_loss_coeff": 0.001},
        {**PER_TOKEN, **EXPERTS, "moe_aux_loss_coeff": 0.001, "moe_router_load_balancing_type": "none"},
        {**PER_TOKEN, **EXPERTS, "moe_router_load_balancing_type": "[none, aux_loss]", "moe_aux_loss_coeff": "[0.01, 0.0]"},
        {**PER_TOKEN, "num_experts": 0, "moe_aux_loss_coeff": 0.001, "moe_expert_capacity_factor": 1.5, **TP_2},
        {**MTP, "mtp_loss_scaling_factor": 0.0},
        {**MTP, "context_parallel_size": 1},
        {**MTP, "calculate_per_token_loss": False},
        {**MTP, "enable_mtp_training": False},
        {**EXPERTS, **PARALLEL, "expert_model_parallel_size": 4, "moe_expert_capacity_factor": -1, "moe_input_jitter_eps": 0},
        {**EXPERTS, "moe_expert_rank_capacity_factor": 2.0, "moe_flex_dispatcher_backend": "ncclep"},
        {**EXPERTS, **PARALLEL, "add_bias_linear": True, "transformer_impl": "transformer_engine"},
        {**EXPERTS, **LOCAL, "add_bias_linear": True},
        {**LATENT, **PARALLEL},
        {**LATENT, **LOCAL},
    ],
    "steps_hold_whole_prompt_groups": [
        {**GROUPS_OF_4, "global_batch_size": 32},
        {**GROUPS_OF_4, "global_batch_size": 30, "allow_partial_prompt_groups": True},
        {**GROUPS_OF_4, **TOKEN_MEAN, "global_batch_size": 30},
    ],
    "flags_have_an_effect": [
        {**GSPO, "route": Route.CUSTOM_LOSS},
        {"fused_lm_head_loss": True, "fp32_lm_head": True, "max_logits_bytes": 2**20, **IN_TRAIN},
        {"fp32_lm_head": True, **IN_HOST},
        {"watchdog": "raise", "gradient_divisor": "num_samples", "docs_per_step": 64, **IN_TRAIN},
    ],
}
WARNED = [
    {**GSPO, "clip_ratio_high": 0.2},
    {**TIS, "importance_correction_level": "sequence_sum", "importance_correction_high": 2.0},
    {"kl_coefficient": 0.1, **CONSTANT, "loss_aggregation_divisor": 8192.0},
    {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, **TOKEN_MEAN},
    {"kl_coefficient": 0.1, **OWN},
]
# Beside WARNED: nothing is said of these.
NOT_WARNED = {
    "defaults": {},
    "the paper's clip": GSPO,
    "at the limit": {**GSPO, "clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
    "grpo clips at 0.2": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
    "coefficients under sample_mean": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "no coefficient": TOKEN_MEAN,
}


def launch(settings: dict) -> Settings:
    of_config = {field.name for field in fields(PolicyLossConfig)}
    config = PolicyLossConfig(**{name: value for name, value in settings.items() if name in of_config})
    own = {name: settings[name] for name in ("route", "set_flags") if name in settings}
    arguments = {name: value for name, value in settings.items() if name not in {*of_config, *own}}
    return Settings(config=config, **own, arguments=arguments)


@contextmanager
def own_names_of(settings: dict) -> Iterator[None]:
    """What own_losses declares is known inside, where the launch names something of it; no message of another launch lists it."""
    with names_forgotten():
        if any(str(value).startswith("own_losses.") for value in settings.values()) or "loss_parameters" in settings:
            import own_losses

            own_losses.declare()
        yield


def judge(rule_name: str, settings: dict) -> list[str]:
    """The messages of one rule."""
    (rule,) = [rule for rule in RULES if rule.__name__ == rule_name]
    with own_names_of(settings):
        return [*rule(launch(settings))]


def warnings_at(settings: dict) -> list[str]:
    with own_names_of(settings):
        return config_warnings(launch(settings).config)


def as_settings(settings: dict) -> str:
    """What a user would recognise; set_flags only says that a default was written out."""
    shown = {name: str(value) if isinstance(value, Route) else value for name, value in settings.items() if name != "set_flags"}
    return ", ".join(f"`{name}={value!r}`" for name, value in shown.items())
