"""Launches that each rule refuses or allows, and the page of them, which tests/pages.py writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from helpers import names_forgotten

from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.loss_hub import loss_aggregation_names
from megatron_rl.validation import CHECKS_OF_SETTINGS, Settings, config_warnings
from megatron_rl.validation.auxiliary_losses import MODEL_SETTINGS
from megatron_rl.validation.experts import EXPERT_SETTINGS
from megatron_rl.validation.model_settings import FURTHER_SETTINGS

PAGE_HEAD = """# What is refused before the first step

Every rule of `megatron_rl.validation`, with a launch that it refuses and how its message begins. After `...` the message says why,
and what to type. One error lists all problems of a launch, and nothing is corrected silently. [Flags](arguments.md) says which flag
works on which route.

| a launch | the message begins |
|---|---|
"""
WARNINGS_HEAD = """## Warnings

These launches run; a warning says so once, at start.

| launch | the warning begins |
|---|---|
"""
CONSTANT = {"loss_aggregation": "constant"}
PROMPT_MEAN = {"loss_aggregation": "prompt_mean"}
TOKEN_MEAN = {"loss_aggregation": "token_mean"}
GROUPS_OF_4 = {**PROMPT_MEAN, "samples_per_prompt": 4}
PER_TOKEN = {"calculate_per_token_loss": True}
GSPO = {"policy_loss": "gspo"}
RATIO_BOUNDS = {"importance_correction_low": 0.5, "importance_correction_high": 2.0}
PLAIN = {"policy_loss": "own_losses.reinforce"}  # it has a parameter and no clip
ANCHORED = "own_losses.anchored"  # its ratio compares with the sampler
SCALED_EXP = {"fused_lm_head_loss": True, "scaled_exp_head": True}
TIS = {"importance_correction": "tis"}
OPSM_TOKEN_MEAN = {"off_policy_sequence_delta": 0.1, "rejected_tokens": "dropped", "loss_aggregation": "token_mean"}
TOP_ENTROPY = {"token_selection": "top_entropy", "token_selection_share": 0.2}
KL_COV = {"token_selection": "kl_cov", "token_selection_share": 2e-3}
WITHOUT_TWIN = {"kl_coefficient": 0.1, "kl_estimator": "own_losses.jeffreys"}
# Of a Settings.model; the other two are read from elsewhere.
MODEL = {*MODEL_SETTINGS, *EXPERT_SETTINGS, *FURTHER_SETTINGS} - {"calculate_per_token_loss", "router_aux_loss"}
BIASED = {"num_experts": 8, "add_bias_linear": True}
EXPERTS = {**TOKEN_MEAN, **PER_TOKEN, "num_experts": 8}
SEVERAL = {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}
MTP = {**TOKEN_MEAN, **PER_TOKEN, "mtp_num_layers": 1}
LATENT = {"multi_latent_attention": True}
ON_A_HOST = {"enable_mtp_training": True, "route": Route.REDUCER}
OWN = {"loss_aggregation": f"{__name__}.by_hand"}

RULES = [one for one in CHECKS_OF_SETTINGS if not one.is_warning]
# rule: fields of PolicyLossConfig and Settings. tests/messages.txt has what is said.
REFUSED: dict[str, list[dict]] = {
    "host_switches_are_true_or_false": [
        {"host_switches": {"calculate_per_token_loss": "false"}},
        {"host_switches": {"use_tis": 1}},
        {"host_switches": {"rewards_normalization": None}},
    ],
    "loss_aggregation_is_known": [
        {"loss_aggregation": "geometric"},
        {"loss_aggregation": "sample-mean"},
        {"loss_aggregation": "seq-mean-token-mean"},
        {"loss_aggregation": "dapo"},
        {"loss_aggregation": "dr_grpo"},
        {"loss_aggregation": "bnpo"},
        {"loss_aggregation": "no_such_module.weights"},
        {"loss_aggregation": 3},
    ],
    "policy_loss_is_known": [
        {"policy_loss": "trpo"},
        {"policy_loss": "GSPO"},
        {"policy_loss": "dr_grpo"},
        {"policy_loss": ""},
    ],
    "own_loss_is_what_it_declares": [
        {"policy_loss": "own_losses.detached"},
        {"policy_loss": "own_losses.squared"},
        {"policy_loss": "own_losses.centred"},
    ],
    "divisor_goes_with_constant": [
        CONSTANT,
        {**TOKEN_MEAN, "loss_aggregation_divisor": 8192.0},
        *({**CONSTANT, "loss_aggregation_divisor": value} for value in (0.0, -1.0, float("nan"), float("inf"), True, "8k")),
    ],
    "clip_ratio_low_is_a_distance": [
        {"clip_ratio_low": 1.3},
        {"clip_ratio_low": 1.0},
        {"clip_ratio_low": -0.2},
        {"clip_ratio_low": float("nan")},
        {"policy_loss": "cispo", "clip_ratio_low": 1.5},
    ],
    "clip_ratio_high_is_a_distance": [
        {"clip_ratio_high": -0.28},
        {"clip_ratio_high": float("inf")},
        {"clip_ratio_high": "20%"},
    ],
    "clip_goes_with_a_loss_that_clips": [
        {**PLAIN, "clip_ratio_low": 0.1},
        {**PLAIN, "clip_ratio_high": 0.1},
    ],
    "loss_parameters_are_declared": [
        {"loss_parameters": {"scale": 1.0}},
        {**PLAIN, "loss_parameters": {"scale": 3.0}},
        {**PLAIN, "loss_parameters": {"scale": "big"}},
        {**PLAIN, "loss_parameters": {"cap": 1.0}},
    ],
    "entropy_of_a_loss_is_known": [{"policy_loss": "own_losses.heeding", "route": Route.CUSTOM_LOSS}],
    "corrections_fit": [
        {"importance_correction": "mask"},
        {**TIS, "importance_correction_high": 0.5},
        {"importance_correction_low": 0.5},
        {"off_policy_sequence_delta": -1.0},
        {**TIS, "policy_loss": ANCHORED},
    ],
    "ratios_have_a_unit": [
        {"importance_ratio_unit": "turn"},
        {"importance_ratio_unit": "rollout", "policy_loss": "gspo_token"},
        {"importance_ratio_unit": "rollout", "policy_loss": "gspo", "loss_aggregation": "row_mean"},
    ],
    "dropped_tokens_are_known": [
        {"rejected_tokens": "dropped"},
        {**TIS, "rejected_tokens": "dropped"},
        {"off_policy_sequence_delta": 0.1, "rejected_tokens": "dropped", "loss_aggregation": "prompt_mean"},
        {**OPSM_TOKEN_MEAN, "kl_coefficient": 0.1},
    ],
    "selections_fit": [
        {"token_selection": "kl_cov"},
        *({"token_selection": "top_entropy", "token_selection_share": value} for value in (20, float("nan"), True, "20%", 0.0)),
        {"token_selection_share": 0.2},
        {"token_selection_kl_coefficient": 1.0},
        {"entropy_bonus_tokens": "trained"},
        {**TOP_ENTROPY, "token_selection_kl_coefficient": 1.0},
        {**TOP_ENTROPY, "token_selection_low": "a"},
        {**TOP_ENTROPY, "token_selection_low": 2.0, "token_selection_high": 1.0},
        *({**KL_COV, "token_selection_kl_coefficient": value} for value in (0.0, float("inf"))),
        {**KL_COV, "entropy_bonus_tokens": "trained", "entropy_coefficient": 0.1},
        {**TOP_ENTROPY, "entropy_bonus_tokens": "trained"},
        {**TOP_ENTROPY, **GSPO},
    ],
    "kl_estimator_has_a_term": [{"kl_estimator": "k2"}],
    "kl_score_has_a_term": [{"kl_score": "support", "route": Route.TRAIN}],
    "entropy_score_has_a_reader": [{"entropy_score": "support", "route": Route.TRAIN}],
    "temperature_is_positive": [
        {"policy_temperature": 0.0},
        {"policy_temperature": float("inf")},
    ],
    "coefficients_are_not_negative": [
        {"kl_coefficient": -0.1},
        {"entropy_coefficient": False},
    ],
    "counts_are_positive": [
        {"samples_per_prompt": 0},
        {"samples_per_prompt": True},
        {"max_logits_bytes": "2G"},
        {"docs_per_step": 1.5},
    ],
    "choices_are_listed": [
        {"policy_metrics": "all"},
        {"policy_loss_backend": "cuda"},
        {"gradient_divisor": 8},
        {"router_aux_loss": "off"},
        {"importance_correction_level": ["token"]},
        {"importance_ratio_unit": "sample"},
        {"rejected_tokens": "ignored"},
        {"watchdog": False},
    ],
    "registered_names_are_known": [
        {"importance_correction": "ppo"},
        {"kl_estimator": "k4", "kl_coefficient": 0.1},
        {"kl_estimator": "no_module.f", "kl_coefficient": 0.1},
        {"token_selection": "top_k", "token_selection_share": 0.2},
    ],
    "own_terms_are_what_they_declare": [
        {"kl_estimator": "own_losses.negated", "kl_coefficient": 0.1},
        {"importance_correction": "own_losses.normalised", **RATIO_BOUNDS},
        {"token_selection": "own_losses.ranked", "token_selection_share": 0.2},
    ],
    "custom_metrics_are_computed": [
        {"custom_policy_metrics": "own_metrics.centred"},
        {"custom_policy_metrics": "own_metrics.far_tokens", "policy_metrics": "none"},
        {"custom_policy_metrics": "own_metrics.taken"},
    ],
    "switches_are_true_or_false": [
        {"allow_partial_prompt_groups": "maybe"},
        {"fused_lm_head_loss": 1},
        {"fp32_lm_head": None},
    ],
    "partial_groups_need_a_declared_size": [{"allow_partial_prompt_groups": True}],
    "per_token_loss_is_token_mean": [
        {"loss_aggregation": "sample_mean", **PER_TOKEN},
        {**CONSTANT, "loss_aggregation_divisor": 64.0, **PER_TOKEN},
        {**PROMPT_MEAN, **PER_TOKEN},
    ],
    "auxiliary_losses_keep_their_scale": [
        {**EXPERTS, "moe_aux_loss_coeff": 0.001},
        {"num_experts": 8, "moe_z_loss_coeff": 1e-3, "router_aux_loss": "refuse"},
        {**EXPERTS, "moe_aux_loss_coeff": 0.001, "route": Route.REDUCER},
        {**EXPERTS, **SEVERAL, "moe_aux_loss_coeff": [0.0, 0.01]},
        {**EXPERTS, "moe_z_loss_coeff": 1e-3},
        {**EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": "1e-3"},
        {"dsa_indexer_loss_coeff": 0.01},
        {**TOKEN_MEAN, **PER_TOKEN, "dsa_indexer_loss_coeff": 0.01, "route": Route.REDUCER},
        {**MTP, **ON_A_HOST, "context_parallel_size": 2},
    ],
    "experts_do_not_depend_on_the_layout": [
        {"num_experts": 6, "expert_model_parallel_size": 4},
        {"num_experts": 8, "tensor_model_parallel_size": 2},
        {"num_experts": 8, "moe_expert_capacity_factor": 1.5},
        {"num_experts": 8, "moe_expert_rank_capacity_factor": 1.5},
        {"num_experts": 8, "moe_input_jitter_eps": "0.01"},
        {"num_experts": 8, "moe_router_force_load_balancing": True},
        {"num_experts": 8, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
        {**BIASED, "tensor_model_parallel_size": 2, "sequence_parallel": True, "transformer_impl": "local"},
    ],
    "models_are_right_on_their_layout": [
        {"hybrid_context_parallel": True},
        {"dynamic_context_parallel": True},
        {**LATENT, "tensor_model_parallel_size": 2},
        {**LATENT, "tensor_model_parallel_size": 2, "sequence_parallel": True, "transformer_impl": "local"},
    ],
    "steps_hold_whole_prompt_groups": [{**GROUPS_OF_4, "global_batch_size": 30}],
    "scaled_exp_goes_with_the_fused_head": [
        {"scaled_exp_head": True},
        SCALED_EXP | {"entropy_coefficient": 0.01},
        SCALED_EXP | {"policy_loss_backend": "torch"},
    ],
    "logits_budget_goes_with_the_fused_head": [
        {"max_logits_bytes": 2**30},
        {"max_logits_bytes": 2 * 1024**3, "set_flags": frozenset({"--max-logits-bytes"})},
    ],
    "fp32_head_has_16_bit_parameters": [{"fp32_lm_head": True, "has_16_bit_parameters": False}],
    "watchdog_has_metrics": [
        {"watchdog": "raise", "policy_metrics": "none"},
        {"watchdog": "warn", "policy_metrics": "none", "set_flags": frozenset({"--watchdog"})},
    ],
    "flags_have_an_effect": [
        {"docs_per_step": 64, "route": Route.MEGATRON_LM},
        {"docs_per_step": 64, "route": Route.CUSTOM_LOSS},
        {"docs_per_step": 64, "route": Route.REDUCER},
        {"fused_lm_head_loss": True, "route": Route.REDUCER},
        {"gradient_divisor": "num_samples", "route": Route.CUSTOM_LOSS},
        {"policy_loss": "grpo", "set_flags": frozenset({"--policy-loss"}), "route": Route.REDUCER},
    ],
}
ALLOWED: dict[str, list[dict]] = {
    "host_switches_are_true_or_false": [
        {"host_switches": {"use_tis": True, "rewards_normalization": False, "calculate_per_token_loss": None}}
    ],
    "loss_aggregation_is_known": [*({"loss_aggregation": name} for name in loss_aggregation_names()), OWN],
    "policy_loss_is_known": [{"policy_loss": "grpo"}, GSPO],
    "own_loss_is_what_it_declares": [GSPO, PLAIN, {"policy_loss": "own_losses.gmpo", "clip_ratio_low": 0.3}],
    "divisor_goes_with_constant": [
        {**CONSTANT, "loss_aggregation_divisor": 8192.0},
        {**OWN, "loss_aggregation_divisor": 2.0},
        TOKEN_MEAN,
    ],
    "clip_ratio_low_is_a_distance": [
        {"clip_ratio_low": 0.0},
        {"clip_ratio_low": 0.999},
        {"policy_loss": "cispo", "clip_ratio_low": 1.0},
    ],
    "clip_ratio_high_is_a_distance": [{"clip_ratio_high": 0}, {"clip_ratio_high": 4.0}],
    "clip_goes_with_a_loss_that_clips": [PLAIN, {"policy_loss": "cispo", "clip_ratio_high": 0.3}],
    "loss_parameters_are_declared": [PLAIN, {**PLAIN, "loss_parameters": {"scale": 0.5}}],
    "entropy_of_a_loss_is_known": [
        {"policy_loss": "own_losses.heeding"},
        {"policy_loss": "own_losses.heeding", "route": Route.CUSTOM_LOSS, "policy_metrics": "none"},
    ],
    "corrections_fit": [
        TIS,
        {"importance_correction": "icepop", "importance_correction_low": 0.9},
        {"importance_correction": "mask", "importance_correction_low": 0.9, "importance_correction_high": 1.1},
        {"off_policy_sequence_delta": 0.1, "policy_loss": ANCHORED},
    ],
    "ratios_have_a_unit": [
        {"importance_ratio_unit": "turn", "policy_loss": "gspo", "loss_aggregation": "row_mean"},
        {"importance_ratio_unit": "rollout", "policy_loss": "vespo"},
        {**TIS, "importance_ratio_unit": "turn", "importance_correction_level": "sequence_mean"},
        {"importance_ratio_unit": "turn", "off_policy_sequence_delta": 0.1},
    ],
    "dropped_tokens_are_known": [
        {"importance_correction": "icepop", "rejected_tokens": "dropped"},
        {**TIS, "off_policy_sequence_delta": 0.1, "rejected_tokens": "dropped"},
        OPSM_TOKEN_MEAN,
    ],
    "selections_fit": [
        {**TOP_ENTROPY, "entropy_bonus_tokens": "trained", "entropy_coefficient": 0.1},
        {**KL_COV, "token_selection_kl_coefficient": 0.5, "token_selection_low": 0.0},
        {"token_selection": "clip_cov", "token_selection_share": 2e-4, "route": Route.TRAIN},
    ],
    "kl_estimator_has_a_term": [{"kl_estimator": "k3+", "kl_coefficient": 0.1}],
    "kl_score_has_a_term": [{"kl_score": "support", "kl_coefficient": 0.1, "route": Route.TRAIN}, {"kl_score": "full"}],
    "entropy_score_has_a_reader": [
        {"entropy_score": "support", "policy_metrics": "with_entropy", "route": Route.TRAIN},
        {"entropy_score": "support", "entropy_coefficient": 0.1, "route": Route.TRAIN},
        {"entropy_score": "support", "token_selection": "top_entropy", "token_selection_share": 0.2, "route": Route.TRAIN},
    ],
    "temperature_is_positive": [{"policy_temperature": 1e-3}],
    "coefficients_are_not_negative": [{"kl_coefficient": 0.0, "entropy_coefficient": 0.01}],
    "counts_are_positive": [{"samples_per_prompt": 1, "max_logits_bytes": 1, "docs_per_step": None}],
    "choices_are_listed": [{"policy_metrics": "with_entropy", "watchdog": "raise", "gradient_divisor": "num_samples"}],
    "registered_names_are_known": [{"importance_correction": "tis"}, {"kl_estimator": "k3+", "kl_coefficient": 0.1}],
    "own_terms_are_what_they_declare": [
        {"kl_estimator": "own_losses.jeffreys", "kl_coefficient": 0.1},
        {"token_selection": "own_losses.widest", "token_selection_share": 0.2},
    ],
    "custom_metrics_are_computed": [{"custom_policy_metrics": "own_metrics.far_tokens,own_metrics.raised_tokens"}],
    "switches_are_true_or_false": [{"fp32_lm_head": True}],
    "partial_groups_need_a_declared_size": [
        {"allow_partial_prompt_groups": True, "samples_per_prompt": 4},
        {"samples_per_prompt": 4},
    ],
    "per_token_loss_is_token_mean": [
        {**TOKEN_MEAN, **PER_TOKEN},
        {"calculate_per_token_loss": False},
        {"calculate_per_token_loss": None},
    ],
    "auxiliary_losses_keep_their_scale": [
        {**EXPERTS, "moe_z_loss_coeff": 1e-3, "router_aux_loss": "exact"},
        {**EXPERTS, "moe_aux_loss_coeff": 1e-3, "router_aux_loss": "host"},
        {"dsa_indexer_loss_coeff": 0.01, "route": Route.REDUCER},  # the installed Megatron-Core decides
        {**TOKEN_MEAN, **PER_TOKEN, "dsa_indexer_loss_coeff": 0},
        {**EXPERTS, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None},
        {**EXPERTS, "moe_aux_loss_coeff": 0.001, "calculate_per_token_loss": False},
        {**EXPERTS, "moe_aux_loss_coeff": 0.001, "moe_router_load_balancing_type": "none"},
        {**EXPERTS, **SEVERAL, "moe_aux_loss_coeff": [0.0, 0]},
        {**EXPERTS, "moe_router_load_balancing_type": "[none, aux_loss]", "moe_aux_loss_coeff": "[0.01, 0.0]"},
        {**EXPERTS, "num_experts": 0, "moe_aux_loss_coeff": 0.001},
        {**MTP, "mtp_loss_scaling_factor": 0.0},
        {**MTP, **ON_A_HOST},
        {"mtp_num_layers": 1, **ON_A_HOST, "context_parallel_size": 2},
        {**MTP, **ON_A_HOST, "context_parallel_size": 2, "enable_mtp_training": False},
    ],
    "experts_do_not_depend_on_the_layout": [
        {"num_experts": 8, "expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"num_experts": 8, "moe_expert_capacity_factor": -1, "moe_input_jitter_eps": 0},
        {"num_experts": 8, "moe_expert_rank_capacity_factor": 2.0, "moe_flex_dispatcher_backend": "ncclep"},
        {"num_experts": None, "moe_expert_capacity_factor": 1.5, "tensor_model_parallel_size": 2},
        {**BIASED, "tensor_model_parallel_size": 2, "sequence_parallel": True, "transformer_impl": "transformer_engine"},
        {**BIASED, "transformer_impl": "local"},
    ],
    "models_are_right_on_their_layout": [
        {"multi_latent_attention": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"multi_latent_attention": True, "transformer_impl": "local"},
        {"hybrid_context_parallel": False, "tensor_model_parallel_size": 2, "transformer_impl": "local"},
    ],
    "steps_hold_whole_prompt_groups": [
        {**GROUPS_OF_4, "global_batch_size": 32},
        {**GROUPS_OF_4, "global_batch_size": 30, "allow_partial_prompt_groups": True},
        GROUPS_OF_4,
    ],
    "scaled_exp_goes_with_the_fused_head": [SCALED_EXP, SCALED_EXP | {"policy_loss_backend": "triton", "kl_coefficient": 0.1}],
    "logits_budget_goes_with_the_fused_head": [
        {"max_logits_bytes": 2**20, "fused_lm_head_loss": True},
        {"fused_lm_head_loss": True},
    ],
    "fp32_head_has_16_bit_parameters": [
        {"fp32_lm_head": True, "has_16_bit_parameters": True},
        {"fp32_lm_head": True, "has_16_bit_parameters": None},
    ],
    "watchdog_has_metrics": [
        {"policy_metrics": "none", "watchdog": "off", "set_flags": frozenset({"--watchdog"})},
        {"watchdog": "raise"},
    ],
    "flags_have_an_effect": [
        {**GSPO, "route": Route.CUSTOM_LOSS},
        {"fused_lm_head_loss": True, "fp32_lm_head": True, "max_logits_bytes": 2**20, "route": Route.TRAIN},
        {"fused_lm_head_loss": True, "fp32_lm_head": True, "max_logits_bytes": 2**20, "route": Route.CUSTOM_LOSS},
        {"fp32_lm_head": True, "route": Route.REDUCER},
        {"watchdog": "raise", "gradient_divisor": "num_samples", "docs_per_step": 64, "route": Route.TRAIN},
    ],
}
WARNED = [
    {**GSPO, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    {**GSPO, "clip_ratio_high": 0.2},
    {"kl_coefficient": 0.1, **CONSTANT, "loss_aggregation_divisor": 8192.0},
    {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, **TOKEN_MEAN},
    {"entropy_coefficient": 0.01, **PROMPT_MEAN},
    {"kl_coefficient": 0.1, "kl_estimator": "k1"},
    {**TIS, "importance_correction_level": "sequence_sum", "importance_correction_high": 2.0},
    {"kl_coefficient": 0.1, **OWN},
    WITHOUT_TWIN,
    {**WITHOUT_TWIN, **GSPO, "policy_loss_backend": "triton"},
    {"policy_loss": "gmpo", "policy_loss_backend": "triton"},
    {**PLAIN, "policy_loss_backend": "triton"},
    {**WITHOUT_TWIN, **PLAIN, "policy_loss_backend": "triton"},
    {"policy_loss": "own_losses.attached"},
]
# Beside WARNED: nothing is said of these.
NOT_WARNED = {
    "defaults": {},
    "the paper's clip": GSPO,
    "at the limit": {**GSPO, "clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
    "grpo clips at 0.2": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
    "coefficients under sample_mean": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "no coefficient": {"loss_aggregation": "token_mean"},
    "nothing runs in Triton": {**WITHOUT_TWIN, "policy_loss_backend": "torch"},
    "a loss in torch, by no choice of a backend": {"policy_loss": "gmpo"},
    "neither has a twin": {**WITHOUT_TWIN, **PLAIN},
    "a weight that is detached": {"policy_loss": "own_losses.truncated"},
    "both have a twin": {"kl_coefficient": 0.1, "kl_estimator": "k3+", "policy_loss_backend": "triton"},
    "no term": {"policy_loss_backend": "triton"},
}


def by_hand(token_counts, totals, *, prompt_token_counts, divisor):
    return torch.ones_like(token_counts)


def launch(settings: dict) -> Settings:
    of_config = {field.name for field in fields(PolicyLossConfig)}
    config = PolicyLossConfig(**{name: value for name, value in settings.items() if name in of_config})
    model = {name: value for name, value in settings.items() if name in MODEL}
    others = {name: value for name, value in settings.items() if name not in {*of_config, *model}}
    return Settings(config=config, **others, model=model)


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
    (rule,) = [rule for rule in RULES if rule.name == rule_name]
    with own_names_of(settings):
        return [*rule(launch(settings))]


def warnings_at(settings: dict) -> list[str]:
    with own_names_of(settings):
        return config_warnings(launch(settings).config)


def validation_page() -> str:
    lines = []
    for name in (rule.name for rule in RULES):
        settings = REFUSED[name][0]
        lines.append(f"| {as_settings(settings)} | {beginning(judge(name, settings)[0])} |\n")
    warned: dict[str, str] = {}  # the setting that a warning begins with -> the first such row
    for case in WARNED:
        warning = warnings_at(case)[0]
        warned.setdefault(warning.partition("=")[0], f"| {as_settings(case)} | {beginning(warning)} |\n")
    return "".join([PAGE_HEAD, *lines, "\n", WARNINGS_HEAD, *warned.values()])


def beginning(message: str) -> str:
    """What is wrong, without the reason and the remedy, which the message itself says."""
    what, _, rest = message.partition("; ")
    for end in re.finditer(": ", what):
        if len(what[: end.start()].split()) > 4:
            return f"{what[: end.start()]} ..."
    return f"{what} ..." if rest else what


def as_settings(settings: dict) -> str:
    """What a user would recognise; set_flags only says that a default was written out."""
    flat = {**settings, **settings.get("host_switches", {})}
    shown = {name: str(value) if isinstance(value, Route) else value for name, value in flat.items() if name != "host_switches"}
    return ", ".join(f"`{name}={value!r}`" for name, value in shown.items() if name != "set_flags")
