"""Settings in a trainer that its adapter refuses, for the table of refused.py, and what is allowed beside them.

A name that begins with launch_in_ is that of the host, where the whole config of the host is judged.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from adapter_cases import put
from host_steps import CUSTOM_LOSS, ICEPOP_OF, REDUCER, REWARD
from nemo_rl_cases import AFTER_THE_ESTIMATOR, master_config
from roll_cases import pipeline_config, worker_config
from skyrl_cases import algorithm_config
from torch import Tensor
from verl_cases import EACH, ActorConfig, filled_tables, one_call, plain_rows, whole_config

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import checks, nemo_rl, roll, skyrl, verl, verl_step
from megatron_rl.hosts.args import read_launch, rollout_hosts
from megatron_rl.hosts.checks import MIS_FUNCTION, REPLAYS
from megatron_rl.hosts.choice import Launch
from megatron_rl.hosts.sampler_rule import Sampler, sampler_problems
from megatron_rl.layout.groups import SINGLE


def launch_in_verl(**settings: Any) -> Launch:
    config = whole_config(settings)
    (said,) = verl.check(config)
    assert said.startswith("loss_mode=megatron_rl.") and " in verl | " in said
    return verl.read(config["actor_rollout_ref"]["actor"], config)


def mini_batch_of_verl(mode: str = "grpo.sample_mean", *, samples_per_prompt: int = 2, **settings: Any) -> None:
    """Three rows of two samples a prompt; a column that is None is not there."""
    policy_loss = {"loss_mode": f"megatron_rl.{mode}", "one_sample_per_rollout": settings.pop("one_sample_per_rollout", False)}
    data = {"response_mask": torch.ones(3, 2), "uid": ["a", "a", "b"], "session_id": [0, 0, 0]} | settings
    data = {name: column for name, column in data.items() if column is not None}
    verl_step.count_mini_batch(verl.read(ActorConfig(policy_loss)), data, SINGLE, samples_per_prompt)


def call_in_verl(*, counted: Any = EACH, **changes: Any) -> None:
    """counted: the mask when the step was counted."""
    one_call(rows=plain_rows(counted) if isinstance(counted, Tensor) else counted, **changes)


def kl_in_verl(*, kl_loss_type: str = "unbiased", reference: float = -1.5) -> None:
    """verl's KL term behind our loss of the same micro-batch. kl_loss_type: of the actor."""
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    one_call(config=ActorConfig(kl_loss_type=kl_loss_type), log_prob=log_prob)
    filled_tables().kl_penalty(log_prob, torch.full((2, 3), reference), "unbiased")


def launch_in_nemo_rl(**settings: Any) -> Launch:
    return nemo_rl.read(put(master_config({"megatron_rl": "grpo.token_mean"}), settings))


def launch_in_roll(**settings: Any) -> Launch:
    of_worker = {name.removeprefix(roll.TRAIN): value for name, value in settings.items() if name.startswith(roll.TRAIN)}
    of_pipeline = {name: value for name, value in settings.items() if not name.startswith(roll.TRAIN)}
    return roll.read(put(worker_config("cispo.token_mean"), of_worker), put(pipeline_config(), of_pipeline))


def launch_in_skyrl(**settings: Any) -> Launch:
    ours = {name.removeprefix(skyrl.PREFIX): value for name, value in settings.items() if name.startswith(skyrl.PREFIX)}
    theirs = {name: value for name, value in settings.items() if not name.startswith(skyrl.PREFIX)}
    trainer = SimpleNamespace(algorithm=algorithm_config("megatron_rl.grpo"))
    config, words = put(SimpleNamespace(trainer=trainer), theirs), skyrl.Words(ours)
    skyrl.check((config, words, skyrl.THEIRS))
    return skyrl.read(config.trainer.algorithm, words, config)


def log_probs_of_nemo_rl(megatron_rl_log_probs="megatron_rl", policy=None, **settings):
    """Beside NeMo-RL's own loss."""
    config = master_config({"megatron_rl_log_probs": megatron_rl_log_probs} | settings)
    config.policy |= policy or {}
    return nemo_rl.check(config)


def log_probs_of_skyrl(log_probs="megatron_rl", strategy="megatron", importance_correction=None, loss_reduction=None):
    """Beside SkyRL's own loss."""
    trainer = SimpleNamespace(algorithm=algorithm_config("regular"), strategy=strategy)
    own = {} if importance_correction is None else {"importance_correction": importance_correction}
    return skyrl.check((SimpleNamespace(trainer=trainer), skyrl.Words(own, loss_reduction), log_probs))


def head_of_roll(**settings):
    own = {"MEGATRON_RL_FUSED_LM_HEAD_LOSS": "true", "MEGATRON_RL_LOG_PROBS": "megatron_rl"}
    return roll.read(worker_config("gspo.prompt_mean", **own | settings), pipeline_config())


def sampler(compared=None, **fields):
    """Of any host. compared: what reads its scores."""
    lists = {name: (fields.pop(name),) for name in ("kept", "changed", "drafted", "mixers") if name in fields}
    readers = () if compared is None else (compared,)
    if found := [*sampler_problems(Sampler(**{"engine": "vllm"} | fields | lists), readers)]:
        raise ConfigError(found)


def each(name: str, *values: object) -> Iterator[dict]:
    yield from ({name: value} for value in values)


# verl

MODE, OURS, ROLLOUT = verl.LOSS_MODE, f"{verl.ACTOR}policy_loss.", verl.ROLLOUT
CUT = {f"{verl.ACTOR}{verl.MINI_BATCH}": 64, MODE: "megatron_rl.grpo.prompt_mean"}
OF_ICEPOP = {
    MODE: "megatron_rl.gspo.sample_mean",
    f"{OURS}importance_correction": "icepop",
    f"{OURS}importance_correction_low": 0.5,
    **verl.UNCUT_WEIGHTS,
}
BLIND = {verl.NORMALIZES: True, verl.BYPASS: True, verl.SCORES: False}
OF_VERL = {f"{ROLLOUT}top_p": 0.7}
CUT_WEIGHTS = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
DPPO = {"mode": "megatron_rl.dppo_tv.sample_mean"}
# NeMo-RL, ROLL and SkyRL
NEMO, NEMO_OURS = nemo_rl.NAME, nemo_rl.PREFIX
OF_NEMO, NEMO_MODE = {f"{nemo_rl.SAMPLING}top_p": 0.8}, f"{nemo_rl.SAMPLING}vllm_cfg.logprobs_mode"
VARIANT, VARIABLE = f"{roll.TRAIN}pg_variant", f"{roll.TRAIN}system_envs.MEGATRON_RL_"
NO_OLD = {roll.RECOMPUTE: False}
IS_WEIGHED = {"train_infer_correction.is_weight": SimpleNamespace(enabled=True)}
IS_FILTERED = {"train_infer_correction.filters": [SimpleNamespace(enabled=True)]}
ROLL_SAMPLER = {f"{VARIABLE}IMPORTANCE_CORRECTION": "tis", "actor_infer.strategy_args.strategy_name": "vllm"}
ROLL_KEPT = ROLL_SAMPLER | {"actor_infer.strategy_args.strategy_config.logprobs_mode": "processed_logprobs"}
EIGHT_A_DEVICE = {f"{roll.TRAIN}training_args.gradient_accumulation_steps": 8}
ROLL_ARGS = "actor_infer.generating_args."
OF_SKYRL = {f"{skyrl.ALGORITHM}off_policy_correction": SimpleNamespace(tis_ratio_type="token")}
SKYRL_TOP_P = {"megatron_rl.importance_correction": "tis", f"{skyrl.SAMPLING}top_p": 0.8}
SKYRL_MODE = "generator.inference_engine.engine_init_kwargs.logprobs_mode"
SKYRLS_SAPO = {"sapo_temperature_positive": 1.0, "sapo_temperature_negative": 1.05}
TOP_P, PENALTY, COMPARED = {"kept": "top_p=0.8"}, {"changed": "repetition_penalty=1.1"}, {"compared": "importance_correction=tis"}
OF_KEPT, OF_WHOLE = TOP_P | {"mode": "processed_logprobs"}, TOP_P | {"mode": "raw_logprobs"}
SETS, MIXED, FILTERED = {"replayed": "replay=true"}, {"mixers": "kl_estimator=unbiased"}, {"recomputes": True}
# Entry -> what is wrong in the launch.
REFUSED: dict[Callable, list[dict[str, Any]]] = {
    launch_in_verl: [
        {MODE: "megatron_rl.grpo.token_maen"},
        {f"{verl.ACTOR}use_kl_loss": "false"},
        {f"{verl.ACTOR}loss_agg_mode": "token-sum"},
        {MODE: "megatron_rl.grpo.constant", f"{verl.ACTOR}loss_scale_factor": None},
        {MODE: DPPO["mode"], verl.WEIGHING: "token"},
        OF_ICEPOP | BLIND,
        {verl.BYPASS: True, verl.IS_V1: False},
        CUT,
        {MODE: "megatron_rl.grpo.sample_mean", verl.MANAGER: "mine.Manager"},
        # FB-114
        OF_ICEPOP | OF_VERL,
        {f"{verl.CORRECTION}rollout_rs": "token_k1", f"{ROLLOUT}top_k": 20},
    ],
    mini_batch_of_verl: [
        {"mode": "grpo.prompt_mean", "uid": None},
        {"mode": "grpo.prompt_mean", "samples_per_prompt": 2},
        {"one_sample_per_rollout": True},
    ],
    call_in_verl: [
        *each("counted", None),
        {"counted": torch.ones(2, 3), "response_mask": torch.tensor([[True, True, False], [True, True, True]])},
        *(DPPO | {"rollout_is_weights": weights} for weights in (None, CUT_WEIGHTS)),
    ],
    kl_in_verl: [{"kl_loss_type": "k3"}, {"reference": math.nan}],
    launch_in_nemo_rl: [
        {NEMO: "gspo.sample_mean", f"{nemo_rl.LOSS_FN}sequence_level_importance_ratios": True},
        {f"{nemo_rl.LOSS_FN}use_cispo": True},
        {f"{nemo_rl.LOSS_FN}positive_example_nll_weight": 0.1},
        {NEMO: "dro.prompt_mean"},
        {NEMO: "grpo.constant"},
        {f"{NEMO_OURS}kl_coefficient": 0.1},
        {f"{NEMO_OURS}kl_estimator": "k3", nemo_rl.PENALTY: 0},
        {f"{NEMO_OURS}kl_estimator": "k3", nemo_rl.IN_REWARD: True},
        {nemo_rl.WEIGHTS: True, nemo_rl.TRUNCATION: "seq-mask"},
        {nemo_rl.WEIGHTS: True, f"{NEMO_OURS}importance_correction": "tis"},
        *({NEMO: "grpo.prompt_mean", f"grpo.{name}": -5.0} for name in AFTER_THE_ESTIMATOR),
        {NEMO: "grpo.prompt_mean", "grpo.num_prompts_per_step": 8, nemo_rl.WORKER: False},
        # FB-161: what reads or mixes scores, where the trainer leaves tokens out
        *(OF_NEMO | beside for beside in ({NEMO: "gspo.token_mean"}, {f"{NEMO_OURS}kl_estimator": "unbiased"})),
        *(OF_NEMO | beside for beside in ({NEMO_MODE: "raw_logprobs"}, {f"{nemo_rl.SAMPLING}backend": "sglang"})),
    ],
    launch_in_roll: [
        {f"{VARIABLE}KL_ESTIMATOR": "k1"},
        {"importance_sampling": "seq"},
        {"difficulty_loss_weight": True},
        {"rl_loss_coef": 0.5},
        {"loss_agg_mode": "token-mean"},
        {f"{roll.TRAIN}apply_loss_scale": False},
        {f"{roll.TRAIN}strategy_args.strategy_name": "fsdp2_train"},
        {f"{roll.TRAIN}{roll.PER_TOKEN}": True},
        {VARIANT: "cispo.prompt_mean", "rollout_batch_size": 16},
        {VARIANT: "cispo.prompt_mean", f"{roll.TRAIN}use_dynamic_batching_in_train": True},
        *(NO_OLD | beside for beside in ({"ppo_epochs": 2}, {"rollout_batch_size": 16}, IS_FILTERED)),
        *(IS_WEIGHED | beside for beside in ({f"{VARIABLE}IMPORTANCE_CORRECTION": "tis"}, {VARIANT: "dppo_tv.token_mean"})),
        ROLL_KEPT,  # by ROLL's default top_p and top_k
    ],
    launch_in_skyrl: [
        {skyrl.LOSS: "ppo"},
        {skyrl.LOSS: "megatron_rl.dro"},
        {skyrl.REDUCTION: "token_mean_legacy"},
        *(OF_SKYRL | beside for beside in ({skyrl.LOSS: "megatron_rl.dppo_tv"}, {"megatron_rl.importance_correction": "tis"})),
        {"megatron_rl.importance_corection": "tis"},
        SKYRL_TOP_P | {SKYRL_MODE: "processed_logprobs"},  # FB-114
    ],
    log_probs_of_nemo_rl: [
        *each("megatron_rl_log_probs", "ours"),
        *each("policy", {"megatron_cfg": {"enabled": False}}, {"quant_cfg": "fp8"}),
        *each("megatron_rl_kl_estimator", "k3"),
    ],
    log_probs_of_skyrl: [
        *each("log_probs", "ours", "skyrl"),
        *each("strategy", "fsdp"),
        {"importance_correction": "tis", "loss_reduction": "row_mean"},
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
        *each("MEGATRON_RL_FUSED_LM_HEAD_LOSS", "yes"),
    ],
}
# Beside a row of these.
TAKEN: dict[Callable, list[dict[str, Any]]] = {
    launch_in_verl: [
        {MODE: DPPO["mode"], **verl.UNCUT_WEIGHTS},
        CUT | {f"{OURS}allow_partial_prompt_groups": True},
        {MODE: "megatron_rl.grpo.row_mean", verl.MANAGER: "mine.Manager", f"{OURS}one_sample_per_rollout": True},
        OF_ICEPOP | OF_VERL | {f"{ROLLOUT}engine_kwargs.vllm.logprobs_mode": "raw_logprobs"},
    ],
    call_in_verl: [DPPO | {"rollout_is_weights": CUT_WEIGHTS, "response_mask": CUT_WEIGHTS.bool()}],
    launch_in_nemo_rl: [OF_NEMO, {NEMO: "gspo.token_mean"}, {NEMO: "grpo.sample_mean", "grpo.advantage_clip_low": -5.0}],
    launch_in_roll: [
        IS_FILTERED | {f"{VARIABLE}IMPORTANCE_CORRECTION": "tis"},
        IS_FILTERED | IS_WEIGHED,
        ROLL_SAMPLER,
        *(ROLL_KEPT | {f"{ROLL_ARGS}top_p": 1.0, f"{ROLL_ARGS}top_k": off} for off in (-1, 0)),
        {VARIANT: "cispo.prompt_mean", f"{roll.TRAIN}device_mapping": [0, 1], **EIGHT_A_DEVICE},
    ],
    launch_in_skyrl: [SKYRL_TOP_P],
}

ALLOWED_SAMPLERS = {
    "nothing is left out": COMPARED | {"mode": "processed_logprobs"},
    "a kept set that nobody compares with": OF_KEPT,
    "scores over the whole vocabulary": OF_WHOLE | COMPARED,
    "an engine of the whole vocabulary": TOP_P | COMPARED | {"engine": "sglang"},
    "replayed sets": OF_KEPT | SETS | MIXED | COMPARED,
    "a trainer that filters too": OF_KEPT | FILTERED,
}


# Launch, and fields of the config that our loss gets.
READ: list[tuple[Callable[..., Launch], dict[str, Any], dict[str, Any]]] = [
    # A host's default of a clip is that of its own loss: ours has its own, as 0.2 would never clip the geometric mean of gspo.
    (launch_in_verl, {MODE: "megatron_rl.gspo.sample_mean"}, {"clip_ratio_low": None, "clip_ratio_high": None}),
    (launch_in_nemo_rl, {f"{nemo_rl.LOSS_FN}ratio_clip_max": 0.28}, {"clip_ratio_low": None, "clip_ratio_high": 0.28}),
    (launch_in_roll, {"use_pg_clip_range": True}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
    (launch_in_skyrl, {f"{skyrl.ALGORITHM}eps_clip_low": 0.1}, {"clip_ratio_low": 0.1, "clip_ratio_high": None}),
    # A parameter has the host's name where it has one, and the host's default acts.
    (launch_in_verl, {MODE: "megatron_rl.dro.row_mean", f"{OURS}dro_beta": 0.3}, {"loss_parameters": {"log_ratio_penalty": 0.3}}),
    (launch_in_nemo_rl, {f"{nemo_rl.LOSS_FN}ratio_clip_c": 4.0}, {"loss_parameters": {"clip_ratio_c": 4.0}}),
    (launch_in_roll, {VARIANT: "grpo.token_mean", "dual_clip_loss": True}, {"loss_parameters": {"clip_ratio_c": 1.4}}),
    (launch_in_skyrl, {skyrl.LOSS: "megatron_rl.sapo"}, {"loss_parameters": SKYRLS_SAPO}),
    # A setting of ours that is null is none.
    (launch_in_nemo_rl, {f"{NEMO_OURS}kl_estimator": None, nemo_rl.PENALTY: 0.1}, {"kl_coefficient": 0.0}),
    (
        launch_in_nemo_rl,
        {nemo_rl.WEIGHTS: True, nemo_rl.TRUNCATION: "seq-mask-tis", nemo_rl.LOWER_BOUND: 0.9, nemo_rl.BOUND: 1.2},
        {
            "importance_correction": "seq_mask_tis",
            "importance_correction_level": "sequence_mean",
            "importance_correction_low": 0.9,
            "importance_correction_high": 1.2,
        },
    ),
]

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
AGENT = {"custom_generate_function_path": "user.agent"}
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
    "names_are_spelled_right": [{**REDUCED, "loss_agregation": "constant"}],
    "settings_are_valid": [
        {"loss_aggregation": "constant", **REDUCER},
        {**OUR_LOSS, "advantage_estimator": "cispo", "eps_clip_c": 3.0},
        {**OUR_LOSS, **KL, "kl_loss_type": "k2", "use_unbiased_kl": True},
    ],
    "backend_is_megatron": [{**OUR_LOSS, "train_backend": "fsdp"}],
    "something_of_ours_is_at_work": [SAMPLE_MEAN],
    "hook_is_at_its_own_flag": [{**REDUCED, "custom_reward_post_process_path": "megatron_rl.hooks:custom_loss"}],
    "our_functions_are_called": [
        {**REDUCED, **CUSTOM_LOSS},
        {**REDUCED, "loss_type": "sft_loss"},
        {**OUR_LOSS, "loss_type": "policy_loss"},
    ],
    "aggregation_is_given_its_counts": [{**PROMPT_MEAN, **REDUCER}, {**TOKEN_MEAN, **CUSTOM_LOSS}],
    "rollouts_are_one_sample": [{**REDUCED, **AGENT, "rollout_function_path": "user.f"}],
    "dynamic_batches_are_counted_in_rollouts": [{**CONSTANT, **REDUCER, **MILES, **AGENT, "use_dynamic_global_batch_size": True}],
    "rows_are_packed_under_context_parallelism": [{**REDUCED, "qkv_format": "bshd", "context_parallel_size": 2}],
    "counts_are_of_the_whole_step": [
        {**BY_TOKENS, "multi_lora": True},
        {**BY_REWARD, "multi_lora": True},
        {**BY_TOKENS, "indep_dp": True},
    ],
    "group_sizes_agree": [{**REDUCED, "samples_per_prompt": 8, "n_samples_per_prompt": 4}],
    "tokens_stay_as_counted": [
        {**BY_TOKENS, **CUSTOM_TIS},
        {**BY_REWARD, **CUSTOM_TIS, "use_tis": False, "get_mismatch_metrics": True},
    ],
    "weights_stay_as_they_are_cut": [{**REDUCED, **MIS_MEAN}],
    "reward_hook_has_a_use": [{**BY_REWARD, **SAMPLE_MEAN}, {**REWARD, **TWO_STEPS, **REDUCER}],
    "advantage_is_the_weighted_reward": [
        *({**BY_REWARD, flag: True} for flag in ("use_opd", "normalize_advantages", "calculate_per_token_loss")),
        {**BY_REWARD, "advantage_estimator": "ppo"},
        {**BY_REWARD, **CUSTOM_LOSS, "policy_loss": "dro"},
        {**BY_REWARD, "loss_type": "sft_loss"},
        {**BY_REWARD, "custom_pg_loss_reducer_function_path": "user.reducer"},
        {**BY_REWARD, "loss_type": "custom_loss", "custom_loss_function_path": "user.loss"},
    ],
    "steps_hold_whole_groups": [{**BY_REWARD, "global_batch_size": 14}, {**BY_REWARD, "allow_partial_prompt_groups": True}],
    "weights_are_equal_in_every_step": [{**BY_REWARD, **TOKEN_MEAN}],
    "loss_options_of_the_host_are_honoured": [{**OUR_LOSS, "get_mismatch_metrics": True}],
    "custom_correction_is_known": [
        {**OUR_LOSS, **CUSTOM_TIS, **MILES},
        {**OUR_LOSS, "use_tis": True, "custom_tis_function_path": ICEPOP_OF["miles"]},
    ],
    "correction_is_counted_once": [{**OUR_LOSS, "use_tis": True, **FROM_ROLLOUT}, {**OUR_LOSS, **CORRECTED, **FROM_ROLLOUT}],
    "sampler_and_trainer_score_alike": [
        {**OUR_LOSS, **MILES, **CORRECTED, "rollout_top_p": 0.9},
        {**OUR_LOSS, **MILES, "use_opsm": True, "rollout_top_k": 20},
        {**REDUCED, **MILES, **FROM_ROLLOUT, "rollout_top_p": 0.9},
        {**OUR_LOSS, "rollout_top_p": 0.9},
        {**OUR_LOSS, "use_tis": True, "rollout_top_k": 20},
    ],
    "sets_are_handed_over": [{**OUR_LOSS, **MILES, **REPLAY}, {**OUR_LOSS, **REPLAY, "rollout_top_k": 20}],
    "tokens_are_drawn_from_their_sets": [{**REPLAYED, "sglang_speculative_algorithm": "EAGLE"}],
    "reference_is_scored_so": [{**REPLAYED, **KL}, {**REPLAYED, "kl_coef": 0.1}],
    "head_is_placed": [{**FP32, "custom_megatron_init_path": None}],
    "head_computes_what_the_loss_reads": [
        {**FUSED, "mtp_num_layers": 1},
        {**FUSED, "fp16": True},
        {**FP32, "true_on_policy_mode": True},
    ],
    "forward_can_be_left_out": [
        {**SKIPPED, "custom_megatron_init_path": None},
        *({**SKIPPED, **settings} for settings in (FROM_ROLLOUT, TWO_STEPS)),
        *({**SKIPPED, name: True} for name in ("keep_old_actor", *REPLAYS)),
        {**SKIPPED, "hidden_dropout": 0.1},
    ],
}
# Launches that no rule says anything against.
ALLOWED_LAUNCHES = [
    *({**REDUCED, "rollout_function_path": path} for host in rollout_hosts() for path in host.rollout_functions),
    {**CONSTANT, **REDUCER, "n_samples_per_prompt": 4, "loss_scale": 1.0, "kl_coef": 0.1, "entropy_coef": 0.1, "clip_grad": 1.0},
    {**REDUCED, "loss_agregation": None},
    {**CONSTANT, **REDUCER, **AGENT},
    {**REDUCED, "loss_type": "custom_loss", "custom_loss_function_path": "user.delegates"},
    *({**OUR_LOSS, "qkv_format": "bshd", "context_parallel_size": 2}, {**REDUCED, "multi_lora": True}),
    *({**CONSTANT, **REDUCER, **others} for others in ({"multi_lora": True}, {"indep_dp": True}, CUSTOM_TIS)),
    {**REDUCED, **MIS_MEAN, "tis_batch_normalize": False},
    *(BY_TOKENS, BY_REWARD, {**BY_REWARD, **REDUCER}, {**TOKEN_MEAN, **REWARD, **ONE_STEP, **REDUCER}),
    {**BY_REWARD, **ONE_STEP, "samples_per_prompt": 4, "allow_partial_prompt_groups": True},
    {**BY_REWARD, **CUSTOM_LOSS, "policy_loss": "sapo"},
    *({**OUR_LOSS, "use_opsm": True, **FROM_ROLLOUT}, {**REDUCED, "use_tis": True, **FROM_ROLLOUT}),
    *(FUSED, FP32, {**FUSED, "custom_megatron_init_path": "user.init"}, {**FUSED, "mtp_num_layers": 0}),
    *({**SKIPPED, **ONE_STEP}, {**SKIPPED, **TWO_STEPS, "num_steps_per_rollout": 1}),
    {**SKIPPED, **TWO_STEPS, "use_dynamic_global_batch_size": True},  # the rollout says it
    *(REPLAYED, {**REPLAYED, **CORRECTED}, {**REPLAYED_BY_SLIME, **KL, "use_unbiased_kl": True, "kl_coef": 0.1}),
    {**OUR_LOSS, **MILES, **CORRECTED, "rollout_top_p": 1.0, "rollout_top_k": -1},
    {**REDUCED, "use_tis": True, "rollout_top_p": 0.9},  # slime's own loss knows the kept tokens
    {**OUR_LOSS, "rollout_top_k": 20},
]


def judge_launch(rule_name: str, settings: dict) -> list[str]:
    """The messages of one rule."""
    return [*vars(checks)[rule_name](read_launch(Namespace(**settings)))]
