"""The rules of a launch in a host: each refused and allowed once, with its message; warnings; companions."""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from importlib import import_module

import pytest
from forked import forget, forked
from host_cases import ICEPOP
from launch_settings import CONVERT, CUSTOM_LOSS, REDUCER, REWARD

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import HOST_NAMES, ROLLOUT_HOST_NAMES, names
from megatron_rl.hosts.base import HostOptions, known_hosts, read_launch
from megatron_rl.hosts.checks import check_launch, checks_of, host_warnings
from megatron_rl.hosts.flags import MIS_FUNCTION
from megatron_rl.hosts.names import dropped_flags
from megatron_rl.validation.checks import EVERYONE, checks_in

ONE_STEP = {"global_batch_size": 32, "rollout_batch_size": 8, "n_samples_per_prompt": 4}
TWO_STEPS = {**ONE_STEP, "global_batch_size": 16}
SAMPLE_MEAN = {"loss_aggregation": "sample_mean"}
PROMPT_MEAN = {"loss_aggregation": "prompt_mean"}
TOKEN_MEAN = {"loss_aggregation": "token_mean"}
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": 8192.0}
PER_TOKEN = {"calculate_per_token_loss": True}
DECLARED = {"one_sample_per_rollout": True}
CUSTOM_TIS = {"use_tis": True, "custom_tis_function_path": "user.rejection"}
MIS_MEAN = {"use_tis": True, "custom_tis_function_path": f"examples.{MIS_FUNCTION}", "tis_batch_normalize": True}
FROM_ROLLOUT = {"use_rollout_logprobs": True}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
MILES, SLIME = {"true_on_policy_mode": False}, {"rollout_batch_size": 8}
FSDP, BSHD, CP2, OF_4 = {"train_backend": "fsdp"}, {"qkv_format": "bshd"}, {"context_parallel_size": 2}, {"n_samples_per_prompt": 4}
THEIR_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "user.loss"}
LOW_VAR, UNBIASED = {**KL, "kl_loss_type": "low_var_kl"}, {"use_unbiased_kl": True}
WIDE, WIDE_GSPO = "--eps-clip 0.2, --eps-clip-high 0.2", {"advantage_estimator": "gspo", "eps_clip": 0.2}
CISPO = {"policy_loss": "cispo", "eps_clip": 0.2}
CORRECTED = {"importance_correction": "mask", "importance_correction_low": 0.5, "importance_correction_high": 2.0}
CORRECTED_BY_SAMPLES = {**CORRECTED, "importance_correction_level": "sequence_mean"}
REDUCED, OUR_LOSS = {**SAMPLE_MEAN, **REDUCER}, {**SAMPLE_MEAN, **CUSTOM_LOSS}
IN_ACTORS = {"custom_megatron_init_path": "megatron_rl.hooks.custom_megatron_init"}
FUSED = {**OUR_LOSS, **SLIME, **IN_ACTORS, "fused_lm_head_loss": True}
FP32 = {**REDUCED, **MILES, **IN_ACTORS, "fp32_lm_head": True}
SKIPPED = {**OUR_LOSS, **MILES, **IN_ACTORS, "skip_old_log_probs": True}
REPLAY = {"sampling_support": "replay"}
REPLAYED = {**OUR_LOSS, **MILES, **REPLAY, "rollout_top_p": 0.9, "rollout_top_k": 20}
REPLAYED_BY_SLIME = {**OUR_LOSS, **SLIME, **REPLAY, "rollout_top_p": 0.9}
BY_TOKENS = {**TOKEN_MEAN, **REDUCER, **PER_TOKEN}
# A launch of each kind that nothing is said against.
BY_REWARD = {**PROMPT_MEAN, **REWARD, **TWO_STEPS}
BY_CONVERT = {**PROMPT_MEAN, **CONVERT, "global_batch_size": 4, "rollout_batch_size": 8, "n_samples_per_prompt": 4}

# rule: [(settings, regular expression for flag, reason and remedy)]
REFUSED = {
    "rollouts_are_one_sample": [
        (
            {**REDUCED, "custom_generate_function_path": "user.agent"},
            "--custom-generate-function-path user.agent may return several .*--one-sample-per-rollout and --custom-rew.*; or use",
        ),
        (
            {**REDUCED, "rollout_function_path": "user.multi_agent"},
            "--rollout-function-path user.multi_agent may return several samples .*use --loss-type custom_loss .*, or .*constant",
        ),
        (
            {**REDUCED, "rollout_function_path": "user.multi_agent", **DECLARED},
            "--one-sample-per-rollout: nothing on the launch line looks at the samples; add --custom-reward-post-process-path",
        ),
        ({**CONSTANT, **REDUCER, "rollout_function_path": "user.f", **DECLARED}, "--one-sample-per-rollout .*effect here: .*const"),
        ({**REDUCED, **DECLARED}, "--one-sample-per-rollout has no effect here: .*remove it"),
    ],
    "names_are_spelled_right": [
        ({**REDUCED, "loss_agregation": "constant"}, "loss_agregation='constant' .* did you mean loss_aggregation?"),
        ({**REDUCED, "sample_per_prompt": 4}, "sample_per_prompt=4 has no effect: .* Write samples_per_prompt"),
    ],
    "aggregation_is_given_its_counts": [
        ({**PROMPT_MEAN, **REDUCER}, "add --custom-reward-post-process-path megatron_rl.hooks.reward_post_process$"),
        ({**PROMPT_MEAN, **CUSTOM_LOSS}, "which samples share a prompt; add --custom-reward-post-process-path"),
        ({**TOKEN_MEAN, **REDUCER}, "nothing divides by the step's tokens; add --calculate-per-token-loss .*, or --custom-reward"),
        ({**TOKEN_MEAN, **CUSTOM_LOSS}, "nothing divides by the step's tokens"),
    ],
    "something_of_ours_is_at_work": [
        (SAMPLE_MEAN, "has no effect.*add --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"),
        ({**CONSTANT, "custom_pg_loss_reducer_function_path": "user.reducer"}, "--loss-aggregation constant has no effect"),
    ],
    "companions_are_at_their_own_flags": [
        (
            {**BY_CONVERT, "custom_reward_post_process_path": "megatron_rl.hooks:convert_samples_to_train_data"},
            "--custom-reward-post-process-path .* write megatron_rl.hooks.reward_post_process",
        ),
        (
            {**SAMPLE_MEAN, "custom_convert_samples_to_train_data_path": "megatron_rl.hooks.reward_post_process"},
            "is not a hook for this place: write megatron_rl.hooks.convert_samples_to_train_data, or remove the flag",
        ),
    ],
    "one_of_ours_reduces": [
        ({**REDUCED, **CUSTOM_LOSS}, "the reducer is never called; remove one of them"),
        ({**REDUCED, "loss_type": "sft_loss"}, "--loss-type sft_loss never calls .*: remove it, or train with"),
    ],
    "our_loss_is_called": [
        ({**OUR_LOSS, "loss_type": "policy_loss"}, "has no effect with --loss-type policy_loss: pass --loss-type custom_loss")
    ],
    "reducer_sees_the_denominators": [
        ({**BY_CONVERT, **REDUCER}, "a custom reducer never sees them; remove --custom-pg-loss-reducer-function-path, or replace")
    ],
    "weights_stay_as_they_are_cut": [
        (
            {**REDUCED, **MIS_MEAN},
            "mis.compute_mis_weights_with_cp: tis_batch_normalize: true divides .* write tis_batch_normalize: f",
        ),
        ({**BY_REWARD, **MIS_MEAN}, "tis_batch_normalize: true divides the weights by their mean over a micro-batch"),
    ],
    "tokens_stay_as_counted": [
        ({**BY_TOKENS, **CUSTOM_TIS}, "user.rejection with .*token_mean: it may reject.*sample_mean and const"),
        ({**PROMPT_MEAN, **REDUCER, **CUSTOM_TIS}, "--loss-aggregation prompt_mean: it may reject tokens that the denominator"),
        ({**BY_TOKENS, **CUSTOM_TIS, "use_tis": False, "get_mismatch_metrics": True}, "it may reject .*denominator has counted"),
        ({**BY_REWARD, **CUSTOM_TIS}, "user.rejection with .*reward_post_process: .*remove it"),
        ({**BY_CONVERT, **CUSTOM_TIS}, "user.rejection with .*convert_samples_to_train_data: .*remove it"),
    ],
    "fsdp_is_given_what_it_hands_over": [
        ({**TOKEN_MEAN, **CUSTOM_LOSS, **PER_TOKEN, **FSDP}, "nothing divides by it; remove --calculate-per-token-loss"),
        ({**REDUCED, **FSDP}, "calls no init hook, .*use --loss-type custom_loss .*, or --train-backend megatron"),
    ],
    "rows_are_packed_under_context_parallelism": [
        (
            {**REDUCED, **BSHD, **CP2},
            "--qkv-format bshd with --context-parallel-size 2.*use --qkv-format thd, or --loss-type custom_l",
        )
    ],
    "adapters_have_one_n": [
        ({**BY_TOKENS, "multi_lora": True}, "no hook gets its counts; choose sample_mean or constant"),
        ({**BY_REWARD, "multi_lora": True}, "multi-LoRA with .*has its own N; remove it"),
    ],
    "replicas_share_one_t": [({**BY_TOKENS, "indep_dp": True}, "indep_dp=True .*by its own tokens; choose another")],
    "group_sizes_agree": [
        (
            {**REDUCED, "samples_per_prompt": 8, **OF_4},
            "--samples-per-prompt 8 and --n-samples-per-prompt 4 are the same .* remove --sampl",
        )
    ],
    "loss_options_of_the_host_are_honoured": [
        ({**OUR_LOSS, "get_mismatch_metrics": True}, "--get-mismatch-metrics is not implemented .*policy_loss and megatron_rl.r"),
    ],
    "head_is_placed": [
        ({**FUSED, "custom_megatron_init_path": None}, "--fused-lm-head-loss has no effect without our init hook"),
        ({**FP32, "custom_megatron_init_path": None}, "--fp32-lm-head has no effect without our init hook"),
        ({**FUSED, **MILES, **FSDP}, "--train-backend fsdp with --fused-lm-head-loss: .*use --train-backend megatron, or remove"),
    ],
    "head_computes_no_other_losses": [
        ({**FUSED, "mtp_num_layers": 1}, "--fused-lm-head-loss with --mtp-num-layers 1: .*would get no logits; remove"),
        ({**FP32, "enable_mtp_training": True}, "--fp32-lm-head with --enable-mtp-training: multi-token prediction"),
    ],
    "head_keeps_small_gradients": [({**FUSED, "fp16": True}, "--fused-lm-head-loss with --fp16: .*train in bfloat16, or remove")],
    "sampler_computes_the_same_logits": [
        ({**FP32, "true_on_policy_mode": True}, "--fp32-lm-head with --true-on-policy-mode: .*remove one of them")
    ],
    "forward_can_be_left_out": [
        (
            {**SKIPPED, "custom_megatron_init_path": None},
            "--skip-old-log-probs has no effect without our init hook, .*: add --custom",
        ),
        (
            {**SKIPPED, **FSDP},
            "--train-backend fsdp with --skip-old-log-probs: .*use --train-backend megatron, or remove --sk",
        ),
        (
            {**SKIPPED, **FROM_ROLLOUT},
            "--use-rollout-logprobs with --skip-old-log-probs: .*to the sampler then.*remove one of",
        ),
    ],
    "rollout_is_one_step": [
        ({**SKIPPED, "num_steps_per_rollout": 2}, "--num-steps-per-rollout 2 with --skip-old-log-probs: from the second step on"),
        (
            {**SKIPPED, **TWO_STEPS},
            "--global-batch-size 16 of a rollout batch of 32 samples with --skip-old-log-probs: .*or rem",
        ),
    ],
    "nothing_reads_old_log_probs": [
        (
            {**SKIPPED, "keep_old_actor": True},
            "--keep-old-actor with --skip-old-log-probs: .*another policy than the one in training",
        ),
        ({**SKIPPED, "kl_coef": 0.1}, "--kl-coef 0.1 with --skip-old-log-probs: .*use --use-kl-loss with --kl-loss-coef; remove"),
        ({**SKIPPED, "use_opd": True}, "--use-opd with --skip-old-log-probs: distillation adds"),
        (
            {**SKIPPED, "custom_advantage_function_path": "user.f"},
            "--custom-advantage-function-path user.f with .*may read the old",
        ),
        ({**SKIPPED, "rollout_data_postprocess_path": "user.f"}, "--rollout-data-postprocess-path user.f with .*may read the"),
        (
            {**SKIPPED, "custom_megatron_before_log_prob_hook_path": "user.f"},
            "before-log-prob-hook-path user.f with .*is called before",
        ),
        ({**SKIPPED, "log_correct_samples": True}, "--log-correct-samples with .*entropy of right answers"),
        ({**SKIPPED, "use_rollout_entropy": True}, "--use-rollout-entropy with .*measured by the forward that is left out"),
        ({**SKIPPED, "use_routing_replay": True}, "--use-routing-replay with .*use --use-rollout-routing-replay, or remove"),
        ({**SKIPPED, "use_indexer_replay": True}, "--use-indexer-replay with .*use --use-rollout-indexer-replay, or remove"),
    ],
    "both_forwards_are_the_same": [
        (
            {**SKIPPED, "attention_dropout": 0.1},
            "--attention-dropout 0.1 with --skip-old-log-probs: .*set --attention-dropout 0, or",
        ),
        ({**SKIPPED, "hidden_dropout": 0.1}, "--hidden-dropout 0.1 with"),
        ({**SKIPPED, "lora_dropout": 0.1}, "--lora-dropout 0.1 with"),
        ({**SKIPPED, "moe_input_jitter_eps": 0.1}, "--moe-input-jitter-eps 0.1 with"),
    ],
    "support_has_a_use": [
        (
            {**OUR_LOSS, **KL, "kl_score": "support"},
            "--kl-score support without --sampling-support replay: .*add --sampling-support replay",
        ),
        (
            {**OUR_LOSS, "entropy_score": "support"},
            "--entropy-score support without --sampling-support replay: .*remove --entropy-s",
        ),
    ],
    "entropy_is_scored_so": [
        ({**REPLAYED, "entropy_score": "support"}, "--entropy-score support has no effect: .*set --entropy-coef, or remove it"),
        (
            {**REPLAYED, "entropy_score": "support", "entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.0},
            "--entropy-score support with --use-kl-loss and --kl-loss-coef 0: .*remove --use-kl-loss or",
        ),
    ],
    "sets_are_handed_over": [
        (
            {**OUR_LOSS, **MILES, **REPLAY},
            "--sampling-support replay has no effect: .*set --rollout-top-p or --rollout-top-k, or remove",
        ),
        (
            {**OUR_LOSS, **SLIME, **REPLAY, "rollout_top_k": 20},
            "--sampling-support replay with --rollout-top-k 20: slime returns .*only where --rollout-top-p is set; set --ro",
        ),
    ],
    "tokens_are_drawn_from_their_sets": [
        (
            {**REPLAYED, "sglang_speculative_algorithm": "EAGLE"},
            "--sglang-speculative-algorithm EAGLE with --sampling-support replay: .* of a draft, .*; remove it, or sample",
        ),
        (
            {**REPLAYED_BY_SLIME, "sglang_enable_custom_logit_processor": True},
            "--sglang-enable-custom-logit-processor True with .*logits processor changes the logits; remove it",
        ),
    ],
    "reference_is_scored_so": [
        (
            {**REPLAYED, **KL, "kl_score": "support"},
            "--kl-score support with .*: miles measures ref_log_probs over the whole vocabulary, .*set --kl-score full",
        ),
        (
            {**REPLAYED_BY_SLIME, **KL},
            "--kl-score full with .*: slime measures ref_log_probs among the kept ids, .*set --kl-score support",
        ),
        ({**REPLAYED, **KL, "use_unbiased_kl": True}, "--use-unbiased-kl with .*importance ratio, .*remove --use-unbiased-kl"),
        ({**REPLAYED, "kl_coef": 0.1}, "--kl-coef 0.1 with .*use --use-kl-loss with --kl-loss-coef, and remove --kl-coef"),
    ],
    "head_leaves_other_logits_out": [
        (
            {**REPLAYED, **IN_ACTORS, "fused_lm_head_loss": True, "scaled_exp_head": True},
            "--scaled-exp-head with .*: .*remove --scaled",
        ),
    ],
    "sampler_and_trainer_score_alike": [
        (
            {**OUR_LOSS, **MILES, **CORRECTED, "rollout_top_p": 0.9},
            "--rollout-top-p 0.9 beside --importance-correction mask: .*SGLang .*; add --sampling-support replay, or set --ro",
        ),
        ({**OUR_LOSS, **MILES, "use_opsm": True, "rollout_top_k": 20}, "--rollout-top-k 20 beside --use-opsm: .*or remove --use-o"),
        ({**OUR_LOSS, **MILES, **FROM_ROLLOUT, "rollout_top_k": 20}, "--rollout-top-k 20 beside --use-rollout-logprobs: "),
        ({**OUR_LOSS, **MILES, "policy_loss": "dppo_tv", "rollout_top_k": 20}, "--rollout-top-k 20 beside --policy-loss dppo_tv"),
        ({**REDUCED, **MILES, "use_tis": True, "rollout_top_p": 0.9}, "--rollout-top-p 0.9 beside --use-tis: .*remove --use-tis"),
        (
            {**OUR_LOSS, **SLIME, "rollout_top_p": 0.9},
            "--rollout-top-p 0.9: the trainer computes old .*off by the kept mass; add --sampling-support replay, or set",
        ),
        (
            {**OUR_LOSS, **SLIME, "use_tis": True, "rollout_top_k": 20},
            "--rollout-top-k 20 beside --use-tis: .*set --rollout-top-k -1",
        ),
    ],
    "custom_correction_is_known": [
        (
            {**OUR_LOSS, **CUSTOM_TIS, **MILES},
            "path user.rejection .*known are mil.*icepop_function, .*mis_weights_with_cp; .*type --importance-correction {tis,ice",
        ),
        ({**OUR_LOSS, "use_tis": True, "custom_tis_function_path": ICEPOP["miles"], "rollout_batch_size": 8}, "known are slime"),
    ],
    "correction_is_counted_once": [
        ({**OUR_LOSS, "use_tis": True, **FROM_ROLLOUT}, "--use-tis with --use-rollout-logprobs: .*counted twice; remove --use-tis"),
        ({**OUR_LOSS, **CORRECTED, **FROM_ROLLOUT}, "--importance-correction mask with --use-rollout-logprobs: .*counted twice"),
    ],
    "loss_has_a_dual_clip": [
        (
            {**OUR_LOSS, "advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_c": 3.0},
            "--eps-clip-c 3.0 .dual clip. with policy loss cispo: it does not declare clip_ratio_c, .*; remove it, or train with",
        )
    ],
    "metrics_of_ones_own_are_the_hosts_means": [
        (
            {**OUR_LOSS, "custom_policy_metrics": "own_metrics.smallest_ratio"},
            "'smallest_ratio' is no mean over the step's rollouts, .* declare it with sample_mean",
        ),
    ],
    "kl_estimator_is_known": [
        ({**OUR_LOSS, "use_kl_loss": True, "kl_loss_type": "k4"}, "--kl-loss-type k4 with --use-kl-loss; .* has k1, k2, k3, low_"),
        (
            {**OUR_LOSS, "use_kl_loss": True, "kl_loss_type": "k2", "use_unbiased_kl": True},
            "--kl-loss-type k2 --use-unbiased-kl .*not the gradient of a KL; .* has k1, k3, low_var_kl: set one",
        ),
    ],
    "converted_rollouts_are_divided_by_prompts": [
        ({**BY_CONVERT, **CUSTOM_LOSS, **PER_TOKEN}, "what the converter has made a mean over prompts; remove one of them")
    ],
}
ALLOWED = {
    "rollouts_are_one_sample": [
        {**BY_REWARD, **REDUCER, "custom_generate_function_path": "user.agent"},
        {**OUR_LOSS, "rollout_function_path": "user.multi_agent"},
        {**REDUCED, **REWARD, **TWO_STEPS, **DECLARED, "custom_generate_function_path": "user.agent"},
        {**REDUCED, "one_sample_per_rollout": "false"},
        *({**REDUCED, "rollout_function_path": path} for host in known_hosts() for path in host.rollout_functions),
    ],
    "names_are_spelled_right": [
        {
            **CONSTANT,
            **REDUCER,
            "n_samples_per_prompt": 4,
            "loss_scale": 1.0,
            "kl_coef": 0.1,
            "entropy_coef": 0.1,
            "clip_grad": 1.0,
        },
        {**REDUCED, "loss_agregation": None, "n_samples_per_eval_prompt": 4, "global_batch_size": 4},
    ],
    "aggregation_is_given_its_counts": [
        *({**REDUCER, **mode} for mode in (SAMPLE_MEAN, CONSTANT)),
        *({**BY_REWARD, **REDUCER}, {**BY_CONVERT, **CUSTOM_LOSS}, BY_CONVERT),
        *(BY_TOKENS, {**TOKEN_MEAN, **REWARD, **ONE_STEP, **REDUCER}),
    ],
    "something_of_ours_is_at_work": [REDUCED, OUR_LOSS, BY_REWARD, BY_CONVERT],
    "companions_are_at_their_own_flags": [
        BY_REWARD,
        {**REDUCED, "custom_convert_samples_to_train_data_path": "user.megatron_rl.convert"},
    ],
    "one_of_ours_reduces": [
        REDUCED,
        OUR_LOSS,
        {**REDUCED, "loss_type": "custom_loss", "custom_loss_function_path": "user.delegates"},
    ],
    "our_loss_is_called": [OUR_LOSS, {**SAMPLE_MEAN, "custom_loss_function_path": "user.loss"}],
    "reducer_sees_the_denominators": [BY_CONVERT, {**BY_CONVERT, **CUSTOM_LOSS}, {**BY_REWARD, **REDUCER}],
    "weights_stay_as_they_are_cut": [
        {**REDUCED, **MIS_MEAN, "tis_batch_normalize": False},
        {**REDUCED, **MIS_MEAN, "use_tis": False},
        MIS_MEAN,
    ],
    "tokens_stay_as_counted": [
        {**PROMPT_MEAN, **REWARD, **TWO_STEPS, **MILES, "use_tis": True, "custom_tis_function_path": ICEPOP["miles"]},
        {**REDUCED, **CUSTOM_TIS},
        {**CONSTANT, **REDUCER, **CUSTOM_TIS},
        {**BY_TOKENS, **CUSTOM_TIS, "use_tis": False},
    ],
    "fsdp_is_given_what_it_hands_over": [{**launch, "train_backend": "fsdp"} for launch in (OUR_LOSS, BY_REWARD)] + [BY_TOKENS],
    "rows_are_packed_under_context_parallelism": [
        {**REDUCED, "qkv_format": "bshd", "context_parallel_size": 1},
        {**OUR_LOSS, "qkv_format": "bshd", "context_parallel_size": 2},
    ],
    "adapters_have_one_n": [{**REDUCED, "multi_lora": True}, {**CONSTANT, **REDUCER, "multi_lora": True}],
    "replicas_share_one_t": [{**CONSTANT, **REDUCER, "indep_dp": True}],
    "group_sizes_agree": [{**REDUCED, "samples_per_prompt": "4", "n_samples_per_prompt": 4}],
    "loss_options_of_the_host_are_honoured": [
        {**REDUCED, "eps_clip_c": 3.0},
        OUR_LOSS,
    ],
    "head_is_placed": [FUSED, FP32, {**FUSED, "custom_megatron_init_path": "user.init"}, {**OUR_LOSS, "fused_lm_head_loss": False}],
    "head_computes_no_other_losses": [{**FUSED, "mtp_num_layers": 0}, {**OUR_LOSS, **SLIME, "mtp_num_layers": 1}],
    "head_keeps_small_gradients": [{**FUSED, "bf16": True}, {**FP32, "fp16": True}],
    "sampler_computes_the_same_logits": [FP32, {**REDUCED, "true_on_policy_mode": True}],
    "forward_can_be_left_out": [
        SKIPPED,
        {**SKIPPED, "custom_megatron_init_path": "user.init"},
        {**OUR_LOSS, **FROM_ROLLOUT, "skip_old_log_probs": False},
    ],
    "rollout_is_one_step": [
        {**SKIPPED, **ONE_STEP},
        {**SKIPPED, **TWO_STEPS, "num_steps_per_rollout": 1},
        {**SKIPPED, **TWO_STEPS, "use_dynamic_global_batch_size": True},  # the rollout says it
        {**BY_CONVERT, **CUSTOM_LOSS, **IN_ACTORS, "global_batch_size": 8, "skip_old_log_probs": True},  # counted in prompts
        {**OUR_LOSS, "num_steps_per_rollout": 2},
    ],
    "nothing_reads_old_log_probs": [
        {**SKIPPED, "use_kl_loss": True, "use_tis": True, "normalize_advantages": True, "use_critic": True},
        {**SKIPPED, "use_routing_replay": True, "use_rollout_routing_replay": True},
        {**OUR_LOSS, **MILES, "use_opd": True, "kl_coef": 0.1},
    ],
    "both_forwards_are_the_same": [{**SKIPPED, "hidden_dropout": 0.0}, {**OUR_LOSS, "hidden_dropout": 0.1}],
    "support_has_a_use": [{**OUR_LOSS, **KL, "kl_score": "full"}, {**REPLAYED_BY_SLIME, **KL, "kl_score": "support"}, REDUCED],
    "entropy_is_scored_so": [
        {**REPLAYED, "entropy_score": "support", "observe_training_entropy": True},
        {**REPLAYED, **KL, "entropy_score": "support", "entropy_coef": 0.1},
        {**REPLAYED_BY_SLIME, "entropy_score": "support", "use_kl_loss": True},
        REPLAYED,
    ],
    "sets_are_handed_over": [REPLAYED, REPLAYED_BY_SLIME, {**OUR_LOSS, **MILES, "sampling_support": "refuse"}],
    "tokens_are_drawn_from_their_sets": [REPLAYED, {**OUR_LOSS, **MILES, "sglang_speculative_algorithm": "EAGLE"}],
    "reference_is_scored_so": [
        {**REPLAYED, **KL},
        {**REPLAYED_BY_SLIME, **KL, "kl_score": "support", "use_unbiased_kl": True, "kl_coef": 0.1},
        {**REPLAYED_BY_SLIME},
        {**OUR_LOSS, **MILES, **KL, "use_unbiased_kl": True},
    ],
    "head_leaves_other_logits_out": [{**REPLAYED, **IN_ACTORS, "fused_lm_head_loss": True}],
    "sampler_and_trainer_score_alike": [
        {**REPLAYED, **CORRECTED, **FROM_ROLLOUT, "importance_correction": "none"},
        {**REPLAYED_BY_SLIME, "use_tis": True, "use_opsm": True, "rollout_top_k": 20},
        {**REDUCED, **MILES, "rollout_top_p": 0.9, "rollout_top_k": 20},
        {**OUR_LOSS, **MILES, "rollout_top_p": 0.9, "rollout_top_k": 20, "importance_correction": "none"},
        {**OUR_LOSS, **MILES, **CORRECTED, "rollout_top_p": 1.0, "rollout_top_k": -1},
        {**REDUCED, **SLIME, "use_tis": True, "rollout_top_p": 0.9},  # its own loss knows the kept tokens
        {**OUR_LOSS, **SLIME, "rollout_top_k": 20},
    ],
    "custom_correction_is_known": [
        *(
            {**OUR_LOSS, **marks, "use_tis": True, "custom_tis_function_path": path}
            for marks, path in ((MILES, ICEPOP["miles"]), ({"rollout_batch_size": 8}, ICEPOP["slime"]))
        ),
        {**OUR_LOSS, **CUSTOM_TIS, "use_tis": False},
        {**REDUCED, **CUSTOM_TIS},
    ],
    "correction_is_counted_once": [
        {**OUR_LOSS, "use_opsm": True, **FROM_ROLLOUT},
        {**OUR_LOSS, "importance_correction": "none", **FROM_ROLLOUT},
        {**REDUCED, "use_tis": True, **FROM_ROLLOUT},
    ],
    "loss_has_a_dual_clip": [{**REDUCED, "advantage_estimator": "cispo", "eps_clip_c": 3.0}, OUR_LOSS],
    "metrics_of_ones_own_are_the_hosts_means": [{**OUR_LOSS, "custom_policy_metrics": "own_metrics.far_tokens"}],
    "kl_estimator_is_known": [
        *({**OUR_LOSS, "use_kl_loss": True, "kl_loss_type": name} for name in ("k1", "k2", "k3", "low_var_kl", None)),
        {**OUR_LOSS, "use_kl_loss": True, "use_unbiased_kl": True},
        {**OUR_LOSS, "kl_loss_type": "k4"},
        {**REDUCED, "use_kl_loss": True, "kl_loss_type": "k2", "use_unbiased_kl": True},
    ],
    "converted_rollouts_are_divided_by_prompts": [{**BY_CONVERT, **CUSTOM_LOSS}],
}
COMPANION_REFUSED = {
    "companion_has_a_use": [
        ({**BY_REWARD, **SAMPLE_MEAN}, "reward_post_process has nothing to do with --loss-aggregation sample_mean.*remove it"),
        ({**BY_CONVERT, **SAMPLE_MEAN}, "convert_samples_to_train_data has nothing to do with"),
        ({**REWARD, **TWO_STEPS, **REDUCER}, "weights that no --loss-aggregation asks for.*add --loss-aggregation prompt_mean"),
    ],
    "converter_gives_prompt_means": [
        ({**BY_CONVERT, **CONSTANT}, "--loss-aggregation constant .*gives prompt_mean alone.*choose prompt_mean, or remove it$"),
        ({**BY_CONVERT, **TOKEN_MEAN}, "or remove it and add --custom-reward-post-process-path"),
    ],
    "host_has_a_converter": [
        ({**PROMPT_MEAN, **CONVERT}, f"is a hook of {' and '.join(ROLLOUT_HOST_NAMES)}, and these are not their arguments: remove")
    ],
    "prompt_counts_divide": [
        ({**BY_CONVERT, "custom_pg_loss_reducer_function_path": "user.reducer"}, "user.reducer .*sees .*rollout_mask_sums.*remove"),
        ({**BY_CONVERT, "loss_type": "sft_loss"}, "--loss-type sft_loss .*is unknown; use policy_loss, or custom_loss with"),
        ({**BY_CONVERT, **THEIR_LOSS}, "--loss-type custom_loss .user.loss. .*is unknown"),
    ],
    "loss_takes_advantages": [
        ({**BY_REWARD, "loss_type": "sft_loss"}, "--loss-type sft_loss takes no advantages: .*use policy_loss or custom_loss")
    ],
    "advantage_is_the_weighted_reward": [
        ({**BY_REWARD, "advantage_estimator": "ppo"}, "--advantage-estimator ppo .*grpo, gspo, cispo"),
        ({**BY_REWARD, "kl_coef": 0.1}, "--kl-coef 0.1 .*unweighted; set --kl-coef 0, or use --use-kl-loss"),
        ({**BY_REWARD, "use_opd": True}, "--use-opd .*unweighted; remove one of them"),
        ({**BY_REWARD, "custom_advantage_function_path": "user.f"}, "user.f .*cannot be known; remove one of them"),
        ({**BY_REWARD, "normalize_advantages": True}, "undoes the weights; remove --normalize-adv"),
        ({**BY_REWARD, **PER_TOKEN}, "divide by tokens; remove --calculate-per-token-loss"),
        (
            {**BY_REWARD, **CUSTOM_LOSS, "policy_loss": "dro"},
            "--policy-loss dro .*not proportional to the advantage.*choose another",
        ),
    ],
    "no_foreign_reduction": [
        ({**BY_REWARD, "custom_pg_loss_reducer_function_path": "user.reducer"}, "user.reducer with .*are unknown; remove it"),
        ({**BY_REWARD, **THEIR_LOSS}, "--custom-loss-function-path user.loss with .*are unknown; remove it"),
    ],
    "steps_hold_whole_groups": [
        ({**BY_REWARD, "global_batch_size": 14}, "14 is no multiple of --n-samples-per-prompt 4: .*choose a multiple of 4"),
        ({**BY_REWARD, "allow_partial_prompt_groups": True}, "one step \\(--num-steps-per-rollout 1\\)"),
    ],
    "weights_are_equal_in_every_step": [
        ({**BY_REWARD, **TOKEN_MEAN}, "--global-batch-size 16 .*samples .*--num-steps-per-rollout 1.*or use --calculate-per-token")
    ],
    "only_one_companion": [({**BY_CONVERT, **REWARD}, "reward_post_process is never called beside .*; remove one of them")],
    "step_is_counted_in_prompts": [
        ({**BY_CONVERT, "global_batch_size": 32}, "--global-batch-size 32 .* counts prompts, .* holds 8 .* a divisor of 8"),
        ({**BY_CONVERT, "use_dynamic_global_batch_size": True}, "--use-dynamic-global-batch-size .*counts samples"),
    ],
    "steps_are_not_given_in_samples": [
        (
            {**BY_CONVERT, "num_steps_per_rollout": 8},  # 32 samples in 8 steps of 4, which would be 4 prompts
            "--num-steps-per-rollout 8 with .*--global-batch-size 4 from it, in samples, .*in prompts instead",
        )
    ],
    "batches_are_split_by_rollout": [
        ({**BY_CONVERT, **MILES, "delay_split_train_data_by_dp": True}, "--delay-split-train-data-by-dp .*use --custom-reward"),
        ({**BY_CONVERT, **MILES, "multimodal_keys": {"image": "x"}}, "--multimodal-keys .*without looking at rollout ids"),
        ({**BY_CONVERT, **MILES, "indep_dp": True}, "--indep-dp with"),
        ({**BY_CONVERT, **MILES, "train_backend": "fsdp"}, "--train-backend fsdp with .*use --custom-reward"),
    ],
}
COMPANION_ALLOWED = [
    BY_REWARD,
    BY_CONVERT,
    {**BY_CONVERT, **MILES},
    {**BY_CONVERT, **CUSTOM_LOSS},
    {**BY_CONVERT, "num_steps_per_rollout": 2},  # 16 would be the samples of a step: these 4 are prompts
    {**BY_REWARD, **REDUCER},
    {**BY_REWARD, "advantage_estimator": "cispo", "use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
    {**BY_REWARD, **ONE_STEP, "samples_per_prompt": 4, "allow_partial_prompt_groups": True},
    {**BY_REWARD, **ONE_STEP, **TOKEN_MEAN},
    {**BY_REWARD, **CUSTOM_LOSS, "policy_loss": "sapo"},
    {**BY_CONVERT, "multimodal_keys": {"image": "x"}},  # slime splits by rollout ids there too
    {**SAMPLE_MEAN, "normalize_advantages": True, "advantage_estimator": "ppo", "kl_coef": 0.1},  # no companion
]


def rows(cases):
    return [pytest.param(name, *row, id=f"{name} {index}") for name, list_ in cases.items() for index, row in enumerate(list_)]


def judge(name: str, settings: dict) -> list[str]:
    launch = read_launch(Namespace(**settings))
    return [row.text for check in checks_of(launch) if check.name == name for row in check(launch)]


@pytest.mark.parametrize(("name", "settings", "says"), rows(REFUSED | COMPANION_REFUSED))
def test_the_rule_refuses_and_says_why_and_what_to_do(name, settings, says):
    """FB-08, FB-11, FB-26, FB-39, FB-69, FB-114: a launch of a wrong scale, or with a dead half, never starts."""
    (message,) = judge(name, settings)
    with pytest.raises(ConfigError, match=says) as caught:
        check_launch(Namespace(**settings))
    assert message in caught.value.problems


@pytest.mark.parametrize(("name", "settings"), rows({name: [(case,) for case in cases] for name, cases in ALLOWED.items()}))
def test_the_rule_allows_what_is_right(name, settings):
    assert judge(name, settings) == []


@pytest.mark.parametrize("settings", COMPANION_ALLOWED, ids=range(len(COMPANION_ALLOWED)))
def test_a_sound_companion_is_allowed(settings):
    launch = read_launch(Namespace(**settings))
    assert [check.name for check in checks_of(launch) if check.name in COMPANION_REFUSED and list(check(launch))] == []


def test_a_launch_of_a_thousand_names_may_be_judged_often(monkeypatch):
    """Launcher, init hook, loss and the hooks of a rollout judge it: a name is compared with ours once in a process."""
    compared = []
    monkeypatch.setattr(names, "get_close_matches", lambda name, *others, **options: compared.append(name) or [])
    args = Namespace(**REDUCED, **{f"an_option_of_somebody_{number}": number for number in range(1000)})
    for _ in range(3):
        check_launch(args)
    assert len(compared) == len(set(compared)) >= 1000


def test_the_checks_do_not_depend_on_what_was_imported_before():
    """FB-69: a launch that is judged by hosts.checks alone is judged by every check, those of its host included."""
    settings = {**BY_CONVERT, **MILES}

    def names_alone() -> None:
        forget()
        launch = import_module("megatron_rl.hosts.base").read_launch(Namespace(**settings))
        print(*(check.name for check in import_module("megatron_rl.hosts.checks").checks_of(launch)))

    code, names, error = forked(names_alone)
    assert code == 0, error
    assert names.split() == [check.name for check in checks_of(read_launch(Namespace(**settings)))]
    assert "batches_are_split_by_rollout" in names and "loss_options_of_the_host_are_honoured" in names


def test_each_check_has_a_row_that_it_refuses_and_one_that_it_allows():
    """tests/validation_cases.py has those of settings, tests/test_init_hook.py those that a launcher and the init hook ask."""
    files = [
        f"megatron_rl.hosts.{name}"
        for name in (
            *("names", "checks", "clip_checks", "correction_checks", "loss_checks", "head_checks", "skip_checks", "support_checks"),
            *HOST_NAMES,
        )
    ]
    every = [check for check in checks_in(*files) if check.asked_by == EVERYONE and check.name != "settings_are_valid"]
    refusing = sorted(check.name for check in every if not check.is_warning)
    assert refusing == sorted([*REFUSED, *COMPANION_REFUSED]) and sorted(REFUSED) == sorted(ALLOWED)


def test_six_faults_give_one_error_with_six_remedies_and_change_nothing():
    """FB-74: one error a launch, not one a restart."""
    args = Namespace(
        **{**PROMPT_MEAN, **REDUCER, **PER_TOKEN, **CUSTOM_TIS, "train_backend": "fsdp", "samples_per_prompt": 8},
        n_samples_per_prompt=4,
    )
    before = copy.deepcopy(vars(args))
    problems = pytest.raises(ConfigError, check_launch, args).value.problems
    assert len(problems) == 6 and len(set(problems)) == 6
    assert vars(args) == before


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train.py", "--loss-aggregation", "constant"], ["--loss-aggregation"]),
        (["--loss-aggregation=constant", "--loss-aggregation-divisor=1"], ["--loss-aggregation", "--loss-aggregation-divisor"]),
        (["train.py", "--lr", "1"], []),
    ],
)
def test_flags_that_the_launcher_dropped_are_found_on_the_command_line(words, found):
    """slime drops unknown flags and trains its default."""
    problems = list(dropped_flags(HostOptions(Namespace(lr=1)), words))
    assert [problem.split()[0] for problem in problems] == found
    assert all("put loss_aggregation" in problem and "--custom-config-path" in problem for problem in problems)
    kept = Namespace(loss_aggregation="constant", loss_aggregation_divisor=1.0)
    assert list(dropped_flags(HostOptions(kept), words)) == []


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("--loss_aggregation", "did you mean --loss-aggregation? Flags have dashes"),
        ("--loss-aggregation-div=8192", "did you mean --loss-aggregation-divisor? These parsers take no abbreviations"),
        ("--loss-agregation", "did you mean --loss-aggregation?"),
        ("--entropy-coef", None),
        ("--kl-loss-coef", None),
        ("loss_aggregation", None),
    ],
)
def test_a_slip_that_the_launcher_dropped_is_found_on_the_command_line(word, why):
    """slime drops --loss_aggregation constant, under our launcher too, and trains sample_mean; its own are no slips."""
    problems = list(dropped_flags(HostOptions(Namespace(lr=1)), ["train.py", word, "constant"]))
    assert problems == ([f"{word.partition('=')[0]} has no effect: {why}"] if why else [])


WARNED = [
    pytest.param({**OUR_LOSS, **KL}, "kl_estimator=k1 in the loss: the expectation of its gradient is 0", id="k1 in the loss"),
    ({**OUR_LOSS, **LOW_VAR, "rollout_batch_size": 8}, "low_var_kl in our loss is k3, without slime's clamp at 10: .*ratio of 20"),
    (
        {**OUR_LOSS, **MILES, **LOW_VAR, **UNBIASED},
        "low_var_kl --use-unbiased-kl in our loss .* ratio, without miles's clamp at 10",
    ),
    ({**OUR_LOSS, **KL, "use_unbiased_kl": True}, "k1 --use-unbiased-kl in our loss is the ratio times k3: the expected gradient"),
    ({**OUR_LOSS, **FROM_ROLLOUT, "use_opsm": True}, "^opsm_clipfrac is the share of what --use-opsm drops, .* adds up the shares"),
    (
        {**OUR_LOSS, **CORRECTED_BY_SAMPLES},
        "tis, tis_clipfrac and tis_abs are those .* .--importance-correction-level sequence_mean",
    ),
    ({**CONSTANT, **REDUCER, "entropy_coef": 0.01}, "entropy_coefficient=0.01 .*about 8192 / .*--entropy-coef"),
    pytest.param(
        {**BY_TOKENS, "use_kl_loss": True, "kl_loss_coef": 0.1}, "kl_coefficient=0.1 .*stronger in a short sample", id="KL"
    ),
    ({**CONSTANT, **CUSTOM_LOSS, "entropy_coef": 0.01, "eps_clip": 0.2}, "entropy_coefficient=0.01"),
    ({**REDUCED, **WIDE_GSPO}, f"{WIDE} with --advantage-estimator gspo .*--eps-clip 3e-4 --eps-clip-high 4e-4"),
    pytest.param(
        {**REDUCED, **MILES, "normalize_advantages": True, "context_parallel_size": 2},
        "--normalize-advantages with --context-parallel-size 2 in miles.*miles#3229",
        id="FB-29 whitening",
    ),
    ({**FUSED, "recompute_loss_function": True}, "--recompute-loss-function with --fused-lm-head-loss saves no memory, .*remove"),
    ({**REDUCED, **THEIR_LOSS}, "user.loss: our reducer is called only if"),
    # On our own flags the remedy is to leave them unset; a host's clip is never unset.
    ({**OUR_LOSS, **WIDE_GSPO}, f"^{WIDE} with --advantage-estimator gspo .*--eps-clip 3e-4 --eps-clip-high 4e-4$"),
    ({**OUR_LOSS, "policy_loss": "gspo", "eps_clip": 0.2}, f"^{WIDE} with --policy-loss gspo will hardly ever clip"),
    (
        {**OUR_LOSS, "policy_loss": "grpo", "advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
        "^--eps-clip 0.0003, --eps-clip-high 0.0004 with --policy-loss grpo will clip nearly every token",
    ),
    ({**REDUCED, "advantage_estimator": "grpo", "eps_clip": 3e-4}, "with --advantage-estimator grpo will clip nearly every token"),
    ({**OUR_LOSS, **MILES, **CISPO}, f"^{WIDE} act on --policy-loss cispo, .*--eps-clip 1 --eps-clip-high 0.28$"),
    (
        {**REDUCED, "advantage_estimator": "gspo", "allgather_cp": True, "context_parallel_size": 2},
        "gspo with --allgather-cp and --context-parallel-size 2: .*skips a collective .*megatron_rl.hooks.custom_loss",
    ),
    (
        {**CONSTANT, **REDUCER, **MILES, "custom_generate_function_path": "user.agent", "use_dynamic_global_batch_size": True},
        "^--use-dynamic-global-batch-size with --custom-generate-function-path user.agent: miles then divides by the samples",
    ),
]
SILENT = [
    FUSED,
    FP32,
    {**OUR_LOSS, **KL, "kl_loss_type": "k3", "use_tis": True},
    {**OUR_LOSS, **KL, "kl_estimator": "k3+"},  # beside the parser's own k1
    {**REDUCED, "use_opsm": True, **KL, "kl_loss_type": "low_var_kl"},
    {**CONSTANT, **REDUCER, **MILES, "custom_generate_function_path": "user.agent"},
    {**REDUCED, "advantage_estimator": "gspo", "allgather_cp": True, "context_parallel_size": 1},
    {**OUR_LOSS, "advantage_estimator": "gspo", "allgather_cp": True, "context_parallel_size": 2},
    {**REDUCED, "entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1},
    {**CONSTANT, **REDUCER, "use_kl_loss": False, "kl_loss_coef": 0.1},
    {**REDUCED, "advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    {**REDUCED, **MILES, "normalize_advantages": True, "context_parallel_size": 1},
    {**REDUCED, "rollout_batch_size": 8, "normalize_advantages": True, "context_parallel_size": 2},  # slime
    {**OUR_LOSS, **MILES, "policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.28},
    {**OUR_LOSS, **MILES, "policy_loss": "cispo", "eps_clip": 0.4},  # chosen by the user
    {**OUR_LOSS, **LOW_VAR, "kl_loss_coef": 0.0, "rollout_batch_size": 8},  # as published scripts have it: no KL is trained
]


@pytest.mark.parametrize(("settings", "says"), WARNED)
def test_a_launch_that_rarely_means_what_it_says_is_told_once(settings, says):
    """FB-72: a clip that never clips, a coefficient that gains when only the policy loss is rescaled."""
    (message,) = host_warnings(check_launch(Namespace(grpo_std_normalization=False, **settings))[1])
    assert re.search(says, message)


@pytest.mark.parametrize(
    ("steps", "says"), [(ONE_STEP, "nothing is ever dropped: the gap"), (TWO_STEPS, "trainer's log_probs: the")]
)
def test_sequence_masking_that_reads_the_sampler_is_told(steps, says):
    """OPSM whose anchor is recomputed drops nothing in the one step of a rollout, and says nothing of it."""
    anchor, report = host_warnings(check_launch(Namespace(**OUR_LOSS, **MILES, **steps, use_opsm=True, opsm_delta=0.01))[1])
    assert anchor.startswith(
        "--use-opsm --opsm-delta 0.01 in our loss compares the policy with rollout_log_probs, as DeepSeek-V3.2"
    )
    assert says in anchor and report.startswith("opsm_clipfrac is the share")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_tis": True}, {"importance_correction": "tis", "importance_correction_low": 0.0, "importance_correction_high": 2.0}),
        ({"use_tis": True, "importance_correction_high": "3"}, {"importance_correction_high": 3.0}),
        (
            {**MILES, "use_tis": True, "custom_tis_function_path": ICEPOP["miles"].replace(".icepop", ":icepop"), "tis_clip": 5.0},
            {"importance_correction": "icepop", "importance_correction_low": 0.0, "importance_correction_high": 5.0},
        ),
        ({"tis_clip": 5.0, "custom_tis_function_path": "user.f"}, {"importance_correction": "none"}),
        ({"use_opsm": True}, {"off_policy_sequence_delta": 1e-4}),
        ({"use_opsm": True, "off_policy_sequence_delta": 0.1}, {"off_policy_sequence_delta": 0.1}),
        ({"opsm_delta": 0.1}, {"off_policy_sequence_delta": None}),
        (KL, {"kl_estimator": "k1"}),
        ({**KL, "kl_loss_type": "low_var_kl"}, {"kl_estimator": "k3"}),
        ({**KL, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True}, {"kl_estimator": "unbiased"}),
        ({**KL, "kl_estimator": "k3+"}, {"kl_estimator": "k3+"}),
        ({**KL, "kl_loss_coef": 0.0, "kl_loss_type": "k2"}, {"kl_estimator": "k3"}),
        ({"advantage_estimator": "cispo", "eps_clip": 10.0}, {"policy_loss": "cispo", "clip_ratio_low": 1.0}),
    ],
    ids=str,
)
def test_a_flag_of_the_host_gives_the_setting_that_is_unset(settings, expected):
    defaults = {"eps_clip": 0.2, "tis_clip": 2.0, "tis_clip_low": 0, "opsm_delta": 1e-4, "kl_loss_type": "k1"}
    config, _ = check_launch(Namespace(**{**OUR_LOSS, **defaults, **settings}))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("settings", SILENT, ids=range(len(SILENT)))
def test_a_plain_launch_is_not_warned_about(settings):
    assert host_warnings(check_launch(Namespace(**settings))[1]) == []


@pytest.mark.parametrize("name", ["own_reinforce", "own_losses.reinforce"])
def test_the_clip_of_a_host_does_not_reach_a_loss_without_one(name, own_losses):
    config, launch = check_launch(Namespace(**OUR_LOSS, policy_loss=name, eps_clip=0.2))
    assert (config.policy_loss, config.clip_ratio_low, config.clip_ratio_high) == (name, None, None)
    assert host_warnings(launch) == []
