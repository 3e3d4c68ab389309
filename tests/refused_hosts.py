"""Settings in a trainer that its adapter refuses, for the table of refused.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import nemo_rl_cases
import roll_cases
import skyrl_cases
from host_steps import ICEPOP_OF
from launch_settings import CUSTOM_LOSS, REDUCER, REWARD

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import checks, nemo_rl, roll, skyrl
from megatron_rl.hosts.args import read_launch, rollout_hosts
from megatron_rl.hosts.checks import MIS_FUNCTION, NOISE, READERS, REPLAYS
from megatron_rl.hosts.sampler_rule import Sampler, sampler_problems


def log_probs_of_nemo_rl(megatron_rl_log_probs="megatron_rl", policy=None, **settings):
    """Beside NeMo-RL's own loss."""
    config = nemo_rl_cases.master_config({"megatron_rl_log_probs": megatron_rl_log_probs} | settings)
    config.policy |= policy or {}
    return nemo_rl.check(config)


def log_probs_of_skyrl(log_probs="megatron_rl", strategy="megatron", importance_correction=None, loss_reduction=None):
    """Beside SkyRL's own loss."""
    trainer = SimpleNamespace(algorithm=skyrl_cases.algorithm_config("regular"), strategy=strategy)
    own = {} if importance_correction is None else {"importance_correction": importance_correction}
    return skyrl.check((SimpleNamespace(trainer=trainer), skyrl.Words(own, loss_reduction), log_probs))


def log_probs_of_roll(strategy_name="megatron_train", **variables):
    """Beside ROLL's own loss."""
    worker = roll_cases.worker_config("ppo", **{"MEGATRON_RL_LOG_PROBS": "megatron_rl"} | variables)
    worker.strategy_args.strategy_name = strategy_name
    return roll.has_log_probs(worker)


def head_of_roll(**settings):
    own = {"MEGATRON_RL_FUSED_LM_HEAD_LOSS": "true", "MEGATRON_RL_LOG_PROBS": "megatron_rl"}
    return roll.read(roll_cases.worker_config("gspo.prompt_mean", **own | settings), roll_cases.pipeline_config())


def sampler(compared=None, **fields):
    """Of any host. compared: what reads its scores."""
    lists = {name: (fields.pop(name),) for name in ("kept", "changed", "drafted", "mixers") if name in fields}
    readers = () if compared is None else (compared,)
    if found := [*sampler_problems(Sampler(**{"engine": "vllm"} | fields | lists), readers)]:
        raise ConfigError(found)


TOP_P, PENALTY, COMPARED = {"kept": "top_p=0.8"}, {"changed": "repetition_penalty=1.1"}, {"compared": "importance_correction=tis"}
OF_KEPT, OF_WHOLE = TOP_P | {"mode": "processed_logprobs"}, TOP_P | {"mode": "raw_logprobs"}
SETS, MIXED, FILTERED = {"replayed": "replay=true"}, {"mixers": "kl_estimator=unbiased"}, {"recomputes": True}
ALLOWED_SAMPLERS = {
    "nothing is left out": COMPARED | {"mode": "processed_logprobs"},
    "a kept set that nobody compares with": OF_KEPT,
    "scores over the whole vocabulary": OF_WHOLE | COMPARED,
    "an engine of the whole vocabulary": TOP_P | COMPARED | {"engine": "sglang"},
    "a penalty, and scores before it": PENALTY | COMPARED | {"mode": "raw_logprobs"},
    "a penalty that nobody compares with": PENALTY,
    "replayed sets": OF_KEPT | SETS | MIXED | COMPARED,
    "a trainer that filters too": OF_KEPT | FILTERED,
}


def each(name: str, *values: object) -> Iterator[dict]:
    yield from ({name: value} for value in values)


# Door -> what is wrong in the launch.
REFUSED: dict[Callable, list[dict]] = {
    log_probs_of_nemo_rl: [
        *each("megatron_rl_log_probs", "ours", True),
        *each("policy", {"megatron_cfg": {"enabled": False}}, {"quant_cfg": "fp8"}),
        *each("megatron_rl_kl_estimator", "k3"),
    ],
    log_probs_of_skyrl: [
        *each("log_probs", "ours", "skyrl"),
        *each("strategy", "fsdp"),
        {"importance_correction": "tis", "loss_reduction": "row_mean"},
    ],
    log_probs_of_roll: [
        *each("MEGATRON_RL_LOG_PROBS", "ours"),
        *each("MEGATRON_RL_KL_ESTIMATOR", "k3"),
        *each("strategy_name", "fsdp2_train"),
    ],
    sampler: [  # FB-114, FB-161
        *(row | COMPARED for row in (OF_KEPT, TOP_P, PENALTY)),
        *(OF_KEPT | SETS | more for more in (PENALTY, {"drafted": "speculative_config"})),
        OF_WHOLE | SETS | COMPARED,
        *(OF_KEPT | FILTERED | more for more in (COMPARED, MIXED)),
        OF_WHOLE | FILTERED,
    ],
    head_of_roll: [
        *each("use_sequence_packing", True),
        *each("MEGATRON_RL_LOG_PROBS", "roll"),
        *each("MEGATRON_RL_FUSED_LM_HEAD_LOSS", "yes", "1"),
    ],
}


# Launches in miles and slime

ONE_STEP = {"global_batch_size": 32, "rollout_batch_size": 8, "n_samples_per_prompt": 4}
TWO_STEPS = {**ONE_STEP, "global_batch_size": 16}
SAMPLE_MEAN, PROMPT_MEAN, TOKEN_MEAN = ({"loss_aggregation": name} for name in ("sample_mean", "prompt_mean", "token_mean"))
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": 8192.0}
PER_TOKEN = {"calculate_per_token_loss": True}
CUSTOM_TIS = {"use_tis": True, "custom_tis_function_path": "user.rejection"}
MIS_MEAN = {"use_tis": True, "custom_tis_function_path": f"examples.{MIS_FUNCTION}", "tis_batch_normalize": True}
FROM_ROLLOUT = {"use_rollout_logprobs": True}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
MILES = {"allow_partial_train_step": False}
CORRECTED = {"importance_correction": "mask", "importance_correction_low": 0.5, "importance_correction_high": 2.0}
REDUCED, OUR_LOSS = {**SAMPLE_MEAN, **REDUCER}, {**SAMPLE_MEAN, **CUSTOM_LOSS}
IN_ACTORS = {"custom_megatron_init_path": "megatron_rl.hooks.custom_megatron_init"}
FUSED = {**OUR_LOSS, **IN_ACTORS, "fused_lm_head_loss": True}
FP32 = {**REDUCED, **MILES, **IN_ACTORS, "fp32_lm_head": True}
SKIPPED = {**OUR_LOSS, **MILES, **IN_ACTORS, "skip_old_log_probs": True}
REPLAY = {"sampling_support": "replay"}
REPLAYED = {**OUR_LOSS, **MILES, **REPLAY, "rollout_top_p": 0.9, "rollout_top_k": 20}
REPLAYED_BY_SLIME = {**OUR_LOSS, **REPLAY, "rollout_top_p": 0.9}
BY_TOKENS = {**TOKEN_MEAN, **REDUCER, **PER_TOKEN}
BY_REWARD = {**PROMPT_MEAN, **REWARD, **TWO_STEPS}

# Rule -> what is wrong in the launch, as a parser of miles or slime stores it.
REFUSED_LAUNCHES: dict[str, list[dict]] = {
    "names_are_spelled_right": [
        {**REDUCED, "loss_agregation": "constant"},
    ],
    "settings_are_valid": [
        {"loss_aggregation": "constant", **REDUCER},
        {**OUR_LOSS, "advantage_estimator": "cispo", "eps_clip_c": 3.0},
        {**OUR_LOSS, **KL, "kl_loss_type": "k4"},
        {**OUR_LOSS, **KL, "kl_loss_type": "k2", "use_unbiased_kl": True},
    ],
    "backend_is_megatron": [
        {**OUR_LOSS, "train_backend": "fsdp"},
    ],
    "something_of_ours_is_at_work": [
        SAMPLE_MEAN,
    ],
    "hook_is_at_its_own_flag": [
        {**REDUCED, "custom_reward_post_process_path": "megatron_rl.hooks:custom_loss"},
    ],
    "our_functions_are_called": [
        {**REDUCED, **CUSTOM_LOSS},
        {**REDUCED, "loss_type": "sft_loss"},
        {**OUR_LOSS, "loss_type": "policy_loss"},
        {**OUR_LOSS, "custom_loss_function_path": None},
    ],
    "aggregation_is_given_its_counts": [
        {**PROMPT_MEAN, **REDUCER},
        {**TOKEN_MEAN, **CUSTOM_LOSS},
    ],
    "rollouts_are_one_sample": [
        {**REDUCED, "custom_generate_function_path": "user.agent", "rollout_function_path": "user.f"},
    ],
    "dynamic_batches_are_counted_in_rollouts": [
        {**CONSTANT, **REDUCER, **MILES, "custom_generate_function_path": "user.agent", "use_dynamic_global_batch_size": True},
    ],
    "rows_are_packed_under_context_parallelism": [
        {**REDUCED, "qkv_format": "bshd", "context_parallel_size": 2},
    ],
    "counts_are_of_the_whole_step": [
        {**BY_TOKENS, "multi_lora": True},
        {**BY_REWARD, "multi_lora": True},
        {**BY_TOKENS, "indep_dp": True},
    ],
    "group_sizes_agree": [
        {**REDUCED, "samples_per_prompt": 8, "n_samples_per_prompt": 4},
    ],
    "tokens_stay_as_counted": [
        {**BY_TOKENS, **CUSTOM_TIS},
        {**BY_REWARD, **CUSTOM_TIS, "use_tis": False, "get_mismatch_metrics": True},
    ],
    "weights_stay_as_they_are_cut": [
        {**REDUCED, **MIS_MEAN},
    ],
    "reward_hook_has_a_use": [
        {**BY_REWARD, **SAMPLE_MEAN},
        {**REWARD, **TWO_STEPS, **REDUCER},
    ],
    "advantage_is_the_weighted_reward": [
        *(
            {**BY_REWARD, **settings}
            for settings in (
                {"advantage_estimator": "ppo"},
                {"kl_coef": 0.1},
                {"use_opd": True},
                {"custom_advantage_function_path": "user.f"},
                {"normalize_advantages": True},
                PER_TOKEN,
                {**CUSTOM_LOSS, "policy_loss": "dro"},
                {"loss_type": "sft_loss"},
                {"custom_pg_loss_reducer_function_path": "user.reducer"},
                {"loss_type": "custom_loss", "custom_loss_function_path": "user.loss"},
            )
        ),
    ],
    "steps_hold_whole_groups": [
        {**BY_REWARD, "global_batch_size": 14},
        {**BY_REWARD, "allow_partial_prompt_groups": True},
    ],
    "weights_are_equal_in_every_step": [
        {**BY_REWARD, **TOKEN_MEAN},
    ],
    "loss_options_of_the_host_are_honoured": [
        {**OUR_LOSS, "get_mismatch_metrics": True},
        {**OUR_LOSS, "true_on_policy_mode": True},
    ],
    "custom_correction_is_known": [
        {**OUR_LOSS, **CUSTOM_TIS, **MILES},
        {**OUR_LOSS, "use_tis": True, "custom_tis_function_path": ICEPOP_OF["miles"]},
    ],
    "correction_is_counted_once": [
        {**OUR_LOSS, "use_tis": True, **FROM_ROLLOUT},
        {**OUR_LOSS, **CORRECTED, **FROM_ROLLOUT},
    ],
    "sampler_and_trainer_score_alike": [
        {**OUR_LOSS, **MILES, **CORRECTED, "rollout_top_p": 0.9},
        {**OUR_LOSS, **MILES, "use_opsm": True, "rollout_top_k": 20},
        {**REDUCED, **MILES, **FROM_ROLLOUT, "rollout_top_p": 0.9},
        {**OUR_LOSS, "rollout_top_p": 0.9},
        {**OUR_LOSS, "use_tis": True, "rollout_top_k": 20},
    ],
    "sets_are_handed_over": [
        {**OUR_LOSS, **MILES, **REPLAY},
        {**OUR_LOSS, **REPLAY, "rollout_top_k": 20},
    ],
    "tokens_are_drawn_from_their_sets": [
        {**REPLAYED, "sglang_speculative_algorithm": "EAGLE"},
    ],
    "reference_is_scored_so": [
        {**REPLAYED, **KL},
        {**REPLAYED, "kl_coefficient": 0.1},
        {**REPLAYED, "kl_coef": 0.1},
    ],
    "head_is_placed": [
        {**FP32, "custom_megatron_init_path": None},
    ],
    "head_computes_what_the_loss_reads": [
        {**FUSED, "mtp_num_layers": 1},
        {**FP32, "enable_mtp_training": True},
        {**FUSED, "fp16": True},
        {**FP32, "true_on_policy_mode": True},
    ],
    "forward_can_be_left_out": [
        {**SKIPPED, "custom_megatron_init_path": None},
        *({**SKIPPED, **settings} for settings in (FROM_ROLLOUT, {"num_steps_per_rollout": 2}, TWO_STEPS)),
        *({**SKIPPED, name: True} for name in (*READERS, *REPLAYS)),
        *({**SKIPPED, name: 0.1} for name in ("hidden_dropout", *NOISE)),
    ],
}
# Launches that no rule says anything against.
ALLOWED_LAUNCHES = [
    *({**REDUCED, "rollout_function_path": path} for host in rollout_hosts() for path in host.rollout_functions),
    *({**REDUCER, **mode} for mode in (SAMPLE_MEAN, CONSTANT)),
    {**CONSTANT, **REDUCER, "n_samples_per_prompt": 4, "loss_scale": 1.0, "kl_coef": 0.1, "entropy_coef": 0.1, "clip_grad": 1.0},
    {**REDUCED, "loss_agregation": None},
    {**REDUCED, **REWARD, **TWO_STEPS, "custom_generate_function_path": "user.agent"},
    {**CONSTANT, **REDUCER, "custom_generate_function_path": "user.agent"},
    {**OUR_LOSS, "rollout_function_path": "user.multi_agent"},
    {**REDUCED, "loss_type": "custom_loss", "custom_loss_function_path": "user.delegates"},
    {**REDUCED, "samples_per_prompt": "4", "n_samples_per_prompt": 4},
    *({**OUR_LOSS, "qkv_format": "bshd", "context_parallel_size": 2}, {**REDUCED, "multi_lora": True}),
    *({**CONSTANT, **REDUCER, **others} for others in ({"multi_lora": True}, {"indep_dp": True}, CUSTOM_TIS)),
    *(
        *({**REDUCED, **MIS_MEAN, **off} for off in ({"tis_batch_normalize": False}, {"use_tis": False})),
        {**BY_TOKENS, **CUSTOM_TIS, "use_tis": False},
    ),
    *(BY_TOKENS, BY_REWARD, {**BY_REWARD, **REDUCER}, {**TOKEN_MEAN, **REWARD, **ONE_STEP, **REDUCER}),
    {**PROMPT_MEAN, **REWARD, **TWO_STEPS, **MILES, "use_tis": True, "custom_tis_function_path": ICEPOP_OF["miles"]},
    {**BY_REWARD, "advantage_estimator": "cispo", "use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
    {**BY_REWARD, **ONE_STEP, "samples_per_prompt": 4, "allow_partial_prompt_groups": True},
    {**BY_REWARD, **CUSTOM_LOSS, "policy_loss": "sapo"},
    {**BY_REWARD, **REDUCER, "custom_generate_function_path": "user.agent"},
    *({**OUR_LOSS, **MILES, "use_tis": True, "custom_tis_function_path": ICEPOP_OF["miles"]}, {**OUR_LOSS, "use_opsm": True}),
    *({**OUR_LOSS, "use_opsm": True, **FROM_ROLLOUT}, {**REDUCED, "use_tis": True, **FROM_ROLLOUT}),
    *({**OUR_LOSS, "use_kl_loss": True, "kl_loss_type": name} for name in ("k1", "k2", "k3", "low_var_kl", None)),
    *({**OUR_LOSS, "use_kl_loss": True, "use_unbiased_kl": True}, {**REDUCED, "eps_clip_c": 3.0}),
    *(FUSED, FP32, {**FUSED, "custom_megatron_init_path": "user.init"}, {**FP32, "fp16": True}, {**FUSED, "mtp_num_layers": 0}),
    *(SKIPPED, {**SKIPPED, **ONE_STEP}, {**SKIPPED, **TWO_STEPS, "num_steps_per_rollout": 1}),
    {**SKIPPED, **TWO_STEPS, "use_dynamic_global_batch_size": True},  # the rollout says it
    {**SKIPPED, "use_kl_loss": True, "use_tis": True, "normalize_advantages": True, "use_critic": True},
    {**SKIPPED, "use_routing_replay": True, "use_rollout_routing_replay": True, "hidden_dropout": 0.0},
    *(REPLAYED, {**REPLAYED, **CORRECTED}, {**REPLAYED_BY_SLIME, **KL, "use_unbiased_kl": True, "kl_coef": 0.1}),
    {**REPLAYED_BY_SLIME, "use_tis": True, "use_opsm": True, "rollout_top_k": 20},
    {**REDUCED, **MILES, "rollout_top_p": 0.9, "rollout_top_k": 20},
    {**OUR_LOSS, **MILES, "rollout_top_p": 0.9, "rollout_top_k": 20, "importance_correction": "none"},
    {**OUR_LOSS, **MILES, **CORRECTED, "rollout_top_p": 1.0, "rollout_top_k": -1},
    {**REDUCED, "use_tis": True, "rollout_top_p": 0.9},  # slime's own loss knows the kept tokens
    {**OUR_LOSS, "rollout_top_k": 20},
]


def judge_launch(rule_name: str, settings: dict) -> list[str]:
    """The messages of one rule."""
    return [*vars(checks)[rule_name](read_launch(Namespace(**settings)))]
