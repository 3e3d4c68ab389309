"""Launches that each rule refuses or allows, and the page of them, which tests/pages.py writes."""

from __future__ import annotations

from dataclasses import fields

import torch
from helpers import names_forgotten

from megatron_rl.config import LossAggregation, PolicyLossConfig, Route
from megatron_rl.validation import CHECKS_OF_SETTINGS, Settings, config_warnings
from megatron_rl.validation.auxiliary_losses import MODEL_SETTINGS
from megatron_rl.validation.experts import EXPERT_SETTINGS
from megatron_rl.validation.model_settings import FURTHER_SETTINGS

PAGE_HEAD = """# What is refused before the first step

Every rule of `megatron_rl.validation`, with a launch that it refuses and what it says. One error lists all problems of a launch,
and nothing is corrected silently. [Flags](arguments.md) says which flag works on which route.

| a launch | message |
|---|---|
"""
WARNINGS_HEAD = """## Warnings

These launches run; a warning says so once, at start.

| launch | warning |
|---|---|
"""
CONSTANT = {"loss_aggregation": "constant"}
PROMPT_MEAN = {"loss_aggregation": "prompt_mean"}
TOKEN_MEAN = {"loss_aggregation": "token_mean"}
GROUPS_OF_4 = {**PROMPT_MEAN, "samples_per_prompt": 4}
PER_TOKEN = {"calculate_per_token_loss": True}
GSPO = {"policy_loss": "gspo"}
PLAIN = {"policy_loss": "own_losses.reinforce"}  # it has a parameter and no clip
ANCHORED = "own_losses.anchored"  # its ratio compares with the sampler
SCALED_EXP = {"fused_lm_head_loss": True, "scaled_exp_head": True}
TIS = {"importance_correction": "tis"}
# Of a Settings.model; the other two are read from elsewhere.
MODEL = {*MODEL_SETTINGS, *EXPERT_SETTINGS, *FURTHER_SETTINGS} - {"calculate_per_token_loss", "router_aux_loss"}
EXPERTS = {**TOKEN_MEAN, **PER_TOKEN, "num_experts": 8}
SEVERAL = {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}
MTP = {**TOKEN_MEAN, **PER_TOKEN, "mtp_num_layers": 1}
LATENT = {"multi_latent_attention": True}
ON_A_HOST = {"enable_mtp_training": True, "route": Route.REDUCER}
OWN = {"loss_aggregation": f"{__name__}.by_hand"}

RULES = [one for one in CHECKS_OF_SETTINGS if not one.is_warning]
# rule: [(fields of PolicyLossConfig and Settings, a regular expression for the reason and the remedy)]
REFUSED: dict[str, list[tuple[dict, str]]] = {
    "host_switches_are_true_or_false": [
        (
            {"host_switches": {"calculate_per_token_loss": "false"}},
            "calculate_per_token_loss='false' must be .* reads it as True; write calculate_per_token_loss: true or",
        ),
        ({"host_switches": {"use_tis": 1}}, "use_tis=1 must be true or false.*without quotes"),
        ({"host_switches": {"rewards_normalization": None}}, "rewards_normalization=None must .* reads it as False"),
    ],
    "loss_aggregation_is_known": [
        ({"loss_aggregation": "geometric"}, "known: sample_mean, prompt_mean, .* imported as module.function"),
        ({"loss_aggregation": "sample-mean"}, "is spelled sample_mean here"),
        ({"loss_aggregation": "seq-mean-token-mean"}, "is sample_mean here"),
        ({"loss_aggregation": "dapo"}, "token_mean here as most .* prompt_mean as published"),
        ({"loss_aggregation": "dr_grpo"}, "is constant here.*--loss-aggregation-divisor"),
        ({"loss_aggregation": "bnpo"}, "no equal here.*depends on the layout; token_mean"),
        ({"loss_aggregation": "no_such_module.weights"}, "cannot be imported"),
        ({"loss_aggregation": 3}, "must be a name: give --loss-aggregation"),
    ],
    "policy_loss_is_known": [
        ({"policy_loss": "trpo"}, "known: .*gspo"),
        ({"policy_loss": "GSPO"}, "is spelled gspo here"),
        ({"policy_loss": "dr_grpo"}, "names an aggregation.*constant.*--policy-loss grpo"),
        ({"policy_loss": ""}, "must be a name: give --policy-loss"),
    ],
    "own_loss_is_what_it_declares": [
        ({"policy_loss": "own_losses.detached"}, "policy_loss=own_detached has derivative 0 .* nothing would train"),
        ({"policy_loss": "own_losses.squared"}, "has a gradient at advantage 0.*remove the declaration"),
        ({"policy_loss": "own_losses.centred"}, 'value at one token depends on the others.*level="batch"'),
    ],
    "divisor_goes_with_constant": [
        (CONSTANT, "no default; pass the longest response"),
        ({**TOKEN_MEAN, "loss_aggregation_divisor": 8192.0}, "has no effect with .*it, or choose --loss-aggregation constant"),
        *(
            ({**CONSTANT, "loss_aggregation_divisor": value}, "finite number above 0.*--loss-aggregation-divisor 8192")
            for value in (0.0, -1.0, float("nan"), float("inf"), True, "8k")
        ),
    ],
    "clip_ratio_low_is_a_distance": [
        ({"clip_ratio_low": 1.3}, "in \\[0, 1\\): it is a distance below 1; did you mean 0.3\\?"),
        ({"clip_ratio_low": 1.0}, "in \\[0, 1\\).*leave it unset"),
        ({"clip_ratio_low": -0.2}, "did you mean 0.2\\?"),
        ({"clip_ratio_low": float("nan")}, "leave it unset for the default of grpo"),
        ({"policy_loss": "cispo", "clip_ratio_low": 1.5}, "clip_ratio_low=1.5 must be in"),
    ],
    "clip_ratio_high_is_a_distance": [
        ({"clip_ratio_high": -0.28}, "a distance above 1; did you mean 0.28\\?"),
        ({"clip_ratio_high": float("inf")}, "leave it unset for the default of grpo"),
        ({"clip_ratio_high": "20%"}, "leave it unset"),
    ],
    "clip_goes_with_a_loss_that_clips": [
        ({**PLAIN, "clip_ratio_low": 0.1}, "--clip-ratio-low 0.1 has no effect.* has no clip; remove it"),
        ({**PLAIN, "clip_ratio_high": 0.1}, "--clip-ratio-high 0.1 has no effect.* has no clip; remove it"),
    ],
    "loss_parameters_are_declared": [
        ({"loss_parameters": {"scale": 1.0}}, "--scale 1.0 has no effect .*--policy-loss grpo: .* of own_reinforce, .*; remove it"),
        ({**PLAIN, "loss_parameters": {"scale": 3.0}}, "--scale: scale=3.0 must be a finite number in \\[0, 2\\]"),
        ({**PLAIN, "loss_parameters": {"scale": "big"}}, "--scale: scale='big' must be a finite number"),
        ({**PLAIN, "loss_parameters": {"cap": 1.0}}, "--cap 1.0 has no effect .*: it is a parameter of no loss"),
    ],
    "corrections_fit": [
        ({"importance_correction": "mask"}, "needs --importance-correction-low and --importance-correction-high"),
        ({**TIS, "importance_correction_high": 0.5}, "do not hold 1"),
        ({"importance_correction_low": 0.5}, "no effect without a correction: remove it, or choose --importance-correction"),
        ({"off_policy_sequence_delta": -1.0}, "at or above 0, in nats per token"),
        ({**TIS, "policy_loss": ANCHORED}, "counted twice; remove --importance-correction, or choose a loss"),
    ],
    "dropped_tokens_are_known": [
        ({"rejected_tokens": "dropped"}, "no effect with importance_correction=none, which drops no token: .*icepop or mask"),
        ({**TIS, "rejected_tokens": "dropped"}, "no effect with importance_correction=tis"),
        (
            {"importance_correction": "icepop", "off_policy_sequence_delta": 0.1, "rejected_tokens": "dropped"},
            "depends on the policy in training.*choose --rejected-tokens counted",
        ),
    ],
    "kl_estimator_has_a_term": [({"kl_estimator": "k2"}, "no effect without a KL term: set --kl-coefficient")],
    "temperature_is_positive": [
        ({"policy_temperature": 0.0}, "finite number above 0.* rollouts were sampled at"),
        ({"policy_temperature": float("inf")}, "finite number above 0"),
    ],
    "coefficients_are_not_negative": [
        ({"kl_coefficient": -0.1}, "at or above 0.*--kl-coefficient 0 turns"),
        ({"entropy_coefficient": False}, "at or above 0.*--entropy-coefficient 0 turns"),
    ],
    "counts_are_positive": [
        ({"samples_per_prompt": 0}, "whole number of at least 1.*leave --samples-per-prompt unset"),
        ({"samples_per_prompt": True}, "whole number of at least 1"),
        ({"max_logits_bytes": "2G"}, "size in bytes; write it out in digits"),
        ({"docs_per_step": 1.5}, "number of documents of a step"),
    ],
    "choices_are_listed": [
        ({"policy_metrics": "all"}, "one of none, basic, with_entropy.*--policy-metrics"),
        ({"policy_loss_backend": "cuda"}, "one of auto, torch, triton"),
        ({"gradient_divisor": 8}, "one of none, num_samples"),
        ({"router_aux_loss": "off"}, "one of refuse, host, exact"),
        ({"importance_correction": "ppo"}, "one of none, tis, icepop, mask"),
        ({"importance_correction_level": ["token"]}, "one of token, sequence_mean, sequence_sum"),
        ({"rejected_tokens": "ignored"}, "one of counted, dropped"),
        ({"kl_estimator": "k4", "kl_coefficient": 0.1}, "one of k1, k2, k3, k3\\+, unbiased"),
        ({"watchdog": False}, 'in YAML write it in quotes, as in watchdog: "off"'),
    ],
    "switches_are_true_or_false": [
        ({"allow_partial_prompt_groups": "maybe"}, "true or false.*or allow_partial_prompt_groups: true in YAML"),
        ({"fused_lm_head_loss": 1}, "--fused-lm-head-loss without a value"),
        ({"fp32_lm_head": None}, "--fp32-lm-head without a value"),
    ],
    "partial_groups_need_a_declared_size": [
        ({"allow_partial_prompt_groups": True}, "no effect without samples_per_prompt.*pass --samples-per-prompt")
    ],
    "per_token_loss_is_token_mean": [
        ({"loss_aggregation": "sample_mean", **PER_TOKEN}, "the weight 1/T of .*this one's is 1/\\(N m_i\\); remove .*token_mean$"),
        ({**CONSTANT, "loss_aggregation_divisor": 64.0, **PER_TOKEN}, "and this one's is 1/\\(L N\\); remove --calculate-per-tok"),
        ({**PROMPT_MEAN, **PER_TOKEN}, "and this one's is 1/\\(P M_g\\); remove"),
    ],
    "auxiliary_losses_keep_their_scale": [
        (
            {**EXPERTS, "moe_aux_loss_coeff": 0.001},
            "0.001 of aux_loss .*is x routed tokens .*to 0, or add --router-aux-loss exact, or remove .*",
        ),
        (
            {"num_experts": 8, "moe_z_loss_coeff": 1e-3, "router_aux_loss": "refuse"},
            "with --router-aux-loss refuse: set .* or choose exact",
        ),
        ({**EXPERTS, "moe_aux_loss_coeff": 0.001, "route": Route.REDUCER}, "or remove --calculate-per-token-loss and add --custom"),
        ({**EXPERTS, **SEVERAL, "moe_aux_loss_coeff": [0.0, 0.01]}, "moe_aux_loss_coeff=\\[0.0, 0.01\\] of global_aux_loss does"),
        ({**EXPERTS, "moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff=0.001 does not go with .*set moe_z_loss_coeff to 0"),
        (
            {**EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": "1e-3"},
            "moe_aux_loss_coeff='1e-3' of seq_aux_loss",
        ),
        (
            {**TOKEN_MEAN, **PER_TOKEN, "dsa_indexer_loss_coeff": 0.01},
            "dsa_indexer_loss_coeff=0.01 does not go with .* indexer by response tokens, .* to 0, or remove --calc",
        ),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1: the forward step of .*without labels and loss_mask.*; remove --mtp-num-layers"),
        ({**MTP, "mtp_loss_scaling_factor": 0.3}, "mtp_num_layers=1: .*0.19 trains it on prompts and padding too"),
        ({**MTP, **ON_A_HOST, "context_parallel_size": 2}, "the host multiplies its own loss by .* x 1 / cp; set mtp_loss_"),
    ],
    "experts_do_not_depend_on_the_layout": [
        ({"num_experts": 6, "expert_model_parallel_size": 4}, "=4 does not divide num_experts=6: .* choose a divisor"),
        ({"num_experts": 8, "tensor_model_parallel_size": 2}, "=2 with experts needs sequence_parallel: .* --sequence-parallel"),
        ({"num_experts": 8, "moe_expert_capacity_factor": 1.5}, "=1.5: which tokens an expert drops depends on the micro-batch"),
        ({"num_experts": 8, "moe_expert_rank_capacity_factor": 1.5}, "=1.5: which tokens a rank's experts drop depends on the"),
        ({"num_experts": 8, "moe_input_jitter_eps": "0.01"}, "='0.01': random noise .* the first ratio is not 1; remove it"),
        ({"num_experts": 8, "moe_router_force_load_balancing": True}, "=True: the router's choice is random, for benchmarks"),
        ({"num_experts": 8, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "='sinkhorn': it balances the tokens"),
    ],
    "models_are_right_on_their_layout": [
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel=True: each sample .* remove --hybrid-context-parallel"),
        ({**LATENT, "tensor_model_parallel_size": 2}, "size=2 needs sequence_parallel: .* rotary key, .* --sequence-parallel"),
        (
            {**LATENT, "tensor_model_parallel_size": 2, "sequence_parallel": True, "transformer_impl": "local"},
            "and transformer_impl='local': .* use --transformer-impl transformer_engine, or --tensor-model-parallel-size 1",
        ),
    ],
    "steps_hold_whole_prompt_groups": [
        ({**GROUPS_OF_4, "global_batch_size": 30}, "a multiple of 4, or accept .*--allow-partial-prompt-groups")
    ],
    "scaled_exp_goes_with_the_fused_head": [
        ({"scaled_exp_head": True}, "no effect without fused_lm_head_loss.*add --fused-lm-head-loss"),
        (SCALED_EXP | {"entropy_coefficient": 0.01}, "does not commute with the product; remove --scaled-exp-head"),
        (SCALED_EXP | {"policy_loss_backend": "torch"}, "its kernel is a Triton kernel"),
    ],
    "logits_budget_goes_with_the_fused_head": [
        ({"max_logits_bytes": 2**30}, "no effect without fused_lm_head_loss.*remove it, or add --fused-lm-head-loss"),
        ({"max_logits_bytes": 2 * 1024**3, "set_flags": frozenset({"--max-logits-bytes"})}, "no effect without fused_lm_head_loss"),
    ],
    "fp32_head_has_16_bit_parameters": [
        ({"fp32_lm_head": True, "has_16_bit_parameters": False}, "float32 already; remove it, or train 16-bit .* --bf16")
    ],
    "watchdog_has_metrics": [
        ({"watchdog": "raise", "policy_metrics": "none"}, "checks the metrics of each step; choose --policy-metrics basic"),
        (
            {"watchdog": "warn", "policy_metrics": "none", "set_flags": frozenset({"--watchdog"})},
            "watchdog=warn has no effect with policy_metrics=none.*or remove --watchdog",
        ),
    ],
    "flags_have_an_effect": [
        (
            {"docs_per_step": 64, "route": Route.MEGATRON_LM},
            "--docs-per-step works on train \\(elsewhere .*StepAccumulator\\); remove",
        ),
        ({"docs_per_step": 64, "route": Route.CUSTOM_LOSS}, "on the route custom_loss: --docs-per-step works on train"),
        ({"docs_per_step": 64, "route": Route.REDUCER}, "on the route reducer: --docs-per-step works on train"),
        ({"fused_lm_head_loss": True, "route": Route.CUSTOM_LOSS}, "works on megatron_lm, train \\(elsewhere .*change the route"),
        ({"fp32_lm_head": True, "route": Route.REDUCER}, "elsewhere the host's model computes the logits, in its own precision"),
        ({"gradient_divisor": "num_samples", "route": Route.CUSTOM_LOSS}, "on the route .*train; remove it, or change the route"),
        (
            {"policy_loss": "grpo", "set_flags": frozenset({"--policy-loss"}), "route": Route.REDUCER},
            "on the route reducer: --policy-loss works on custom_loss, megatron_lm, train",
        ),
    ],
}
ALLOWED: dict[str, list[dict]] = {
    "host_switches_are_true_or_false": [
        {"host_switches": {"use_tis": True, "rewards_normalization": False, "calculate_per_token_loss": None}}
    ],
    "loss_aggregation_is_known": [*({"loss_aggregation": name} for name in LossAggregation), OWN],
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
    "corrections_fit": [
        TIS,
        {"importance_correction": "icepop", "importance_correction_low": 0.9},
        {"importance_correction": "mask", "importance_correction_low": 0.9, "importance_correction_high": 1.1},
        {"off_policy_sequence_delta": 0.1, "policy_loss": ANCHORED},
    ],
    "dropped_tokens_are_known": [{"importance_correction": "icepop", "rejected_tokens": "dropped"}],
    "kl_estimator_has_a_term": [{"kl_estimator": "k3+", "kl_coefficient": 0.1}],
    "temperature_is_positive": [{"policy_temperature": 1e-3}],
    "coefficients_are_not_negative": [{"kl_coefficient": 0.0, "entropy_coefficient": 0.01}],
    "counts_are_positive": [{"samples_per_prompt": 1, "max_logits_bytes": 1, "docs_per_step": None}],
    "choices_are_listed": [{"policy_metrics": "with_entropy", "watchdog": "raise", "gradient_divisor": "num_samples"}],
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
        {"dsa_indexer_loss_coeff": 0.01},  # the installed Megatron-Core decides
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
        {"watchdog": "raise", "gradient_divisor": "num_samples", "docs_per_step": 64, "route": Route.TRAIN},
    ],
}
WARNED = [
    ({**GSPO, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, "hardly ever clip.*0.0003/0.0004, and unset flags give them"),
    ({**GSPO, "clip_ratio_high": 0.2}, "clip_ratio_low=0.0003, clip_ratio_high=0.2"),
    (
        {"kl_coefficient": 0.1, **CONSTANT, "loss_aggregation_divisor": 8192.0},
        "kl_coefficient=0.1 .*about 8192 / \\(mean tokens of a sample\\) times as strong",
    ),
    (
        {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, **TOKEN_MEAN},
        "kl_coefficient=0.1, entropy_coefficient=0.01 .*\\(mean tokens of the step's samples\\) / ",
    ),
    ({"entropy_coefficient": 0.01, **PROMPT_MEAN}, "\\(mean tokens of its prompt's samples\\) / "),
    ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1 in the loss: the expectation of its gradient is 0"),
    (
        {**TIS, "importance_correction_level": "sequence_sum", "importance_correction_high": 2.0},
        "sequence_sum multiplies the ratios of all tokens of a sample.*or choose sequence_mean",
    ),
    ({"kl_coefficient": 0.1, **OWN}, "1 / \\(the sum of its weights over the step\\) times"),
]


def by_hand(token_counts, totals, *, prompt_token_counts, divisor):
    return torch.ones_like(token_counts)


def launch(settings: dict) -> Settings:
    of_config = {field.name for field in fields(PolicyLossConfig)}
    config = PolicyLossConfig(**{name: value for name, value in settings.items() if name in of_config})
    model = {name: value for name, value in settings.items() if name in MODEL}
    others = {name: value for name, value in settings.items() if name not in {*of_config, *model}}
    return Settings(config=config, **others, model=model)


def judge(rule_name: str, settings: dict) -> list[str]:
    """The messages of one rule."""
    (rule,) = [rule for rule in RULES if rule.name == rule_name]
    with names_forgotten():  # no message of another rule lists them
        if str(settings.get("policy_loss")).startswith("own_losses.") or "loss_parameters" in settings:
            import own_losses

            own_losses.declare()
        return [row.text for row in rule(launch(settings))]


def validation_page() -> str:
    lines = []
    for name in (rule.name for rule in RULES):
        settings, _ = REFUSED[name][0]
        lines.append(f"| {as_settings(settings)} | {judge(name, settings)[0]} |\n")
    warned: dict[str, str] = {}  # the setting that a warning begins with -> the first such row
    for case, _ in WARNED:
        warning = config_warnings(launch(case).config)[0]
        warned.setdefault(warning.partition("=")[0], f"| {as_settings(case)} | {warning} |\n")
    return "".join([PAGE_HEAD, *lines, "\n", WARNINGS_HEAD, *warned.values()])


def as_settings(settings: dict) -> str:
    """What a user would recognise; set_flags only says that a default was written out."""
    flat = {**settings, **settings.get("host_switches", {})}
    shown = {name: str(value) if isinstance(value, Route) else value for name, value in flat.items() if name != "host_switches"}
    return ", ".join(f"`{name}={value!r}`" for name, value in shown.items() if name != "set_flags")
