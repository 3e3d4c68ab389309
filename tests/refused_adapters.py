"""Launches and calls that the adapters of verl, NeMo-RL, ROLL and SkyRL refuse, for the table of refused.py, and what they take.

A name is that of the host, where the whole config of the host is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from adapter_cases import put
from nemo_rl_cases import AFTER_THE_ESTIMATOR, master_config
from roll_cases import pipeline_config, worker_config
from skyrl_cases import algorithm_config
from torch import Tensor
from verl_cases import EACH, ActorConfig, filled_tables, one_call, plain_rows, whole_config

from megatron_rl.hosts import nemo_rl, roll, skyrl, verl, verl_step
from megatron_rl.hosts.choice import Launch
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
TOP_P, RAW = {f"{ROLLOUT}top_p": 0.7}, {f"{ROLLOUT}engine_kwargs.vllm.logprobs_mode": "raw_logprobs"}
CUT_WEIGHTS = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
DPPO = {"mode": "megatron_rl.dppo_tv.sample_mean"}
# NeMo-RL, ROLL and SkyRL
NEMO, NEMO_OURS = nemo_rl.NAME, nemo_rl.PREFIX
NEMO_TOP_P, NEMO_MODE = {f"{nemo_rl.SAMPLING}top_p": 0.8}, f"{nemo_rl.SAMPLING}vllm_cfg.logprobs_mode"
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

# Door -> what is wrong in the launch.
REFUSED: dict[Callable, list[dict[str, Any]]] = {
    launch_in_verl: [
        {MODE: "megatron_rl.grpo.token_maen"},
        {f"{verl.ACTOR}use_kl_loss": "false"},
        {f"{verl.ACTOR}clip_ratio_low": True},
        {f"{verl.ACTOR}loss_agg_mode": "token-sum"},
        {f"{OURS}ratio_truncation": 5.0},
        {MODE: "megatron_rl.grpo.constant", f"{verl.ACTOR}loss_scale_factor": None},
        {MODE: DPPO["mode"], f"{OURS}importance_correction": "tis", **verl.UNCUT_WEIGHTS},
        {MODE: DPPO["mode"], verl.WEIGHING: "token"},
        OF_ICEPOP | BLIND,
        {verl.BYPASS: True, verl.IS_V1: False},
        CUT,
        {MODE: "megatron_rl.grpo.sample_mean", verl.MANAGER: "mine.Manager"},
        # FB-114
        OF_ICEPOP | TOP_P,
        verl.UNCUT_WEIGHTS | TOP_P,
        {f"{verl.CORRECTION}rollout_rs": "token_k1", f"{ROLLOUT}top_k": 20},
        OF_ICEPOP | TOP_P | {f"{ROLLOUT}name": "trtllm"},
        OF_ICEPOP | {f"{ROLLOUT}repetition_penalty": 1.1},
    ],
    mini_batch_of_verl: [
        {"mode": "grpo.prompt_mean", "uid": None},
        {"mode": "grpo.prompt_mean", "samples_per_prompt": 2},
        {"one_sample_per_rollout": True},
    ],
    call_in_verl: [
        {"dp_size": None},
        {"counted": None},
        {"counted": torch.ones(2, 3), "response_mask": torch.tensor([[True, True, False], [True, True, True]])},
        *(DPPO | {"rollout_is_weights": weights} for weights in (None, CUT_WEIGHTS)),
    ],
    kl_in_verl: [{"kl_loss_type": "k3"}, {"reference": math.nan}],
    launch_in_nemo_rl: [
        {NEMO: None},
        {NEMO: "gspo.sample_mean", f"{nemo_rl.LOSS_FN}sequence_level_importance_ratios": True},
        {f"{nemo_rl.LOSS_FN}use_cispo": True},
        {f"{nemo_rl.LOSS_FN}disable_ppo_ratio": True},
        {f"{nemo_rl.LOSS_FN}positive_example_nll_weight": 0.1},
        {NEMO: "grpo.row_mean"},
        {NEMO: "dro.prompt_mean"},
        {NEMO: "grpo.constant"},
        {f"{NEMO_OURS}log_prob": "megatron_rl"},
        {f"{NEMO_OURS}clip_ratio_c": 3},
        {f"{NEMO_OURS}kl_coefficient": 0.1},
        {f"{NEMO_OURS}kl_estimator": "k4"},
        {f"{NEMO_OURS}kl_estimator": "k3", nemo_rl.PENALTY: 0},
        {f"{NEMO_OURS}kl_estimator": "k3", nemo_rl.PENALTY: -1},
        {f"{NEMO_OURS}kl_estimator": "k3", nemo_rl.IN_REWARD: True},
        {nemo_rl.WEIGHTS: True, nemo_rl.TRUNCATION: "seq-mask"},
        {nemo_rl.WEIGHTS: True, NEMO: "dppo_tv.token_mean"},
        {nemo_rl.WEIGHTS: True, f"{NEMO_OURS}importance_correction": "tis"},
        *({NEMO: "grpo.prompt_mean", f"grpo.{name}": -5.0} for name in AFTER_THE_ESTIMATOR),
        {NEMO: "grpo.prompt_mean", "grpo.num_prompts_per_step": 8, nemo_rl.WORKER: False},
        # FB-161: what reads or mixes scores, where the trainer leaves tokens out
        {NEMO: "gspo.token_mean", **NEMO_TOP_P},
        {NEMO: "gspo_token.token_mean", **NEMO_TOP_P},
        {f"{NEMO_OURS}importance_correction": "tis", **NEMO_TOP_P},
        {f"{NEMO_OURS}kl_estimator": "unbiased", **NEMO_TOP_P},
        {NEMO_MODE: "raw_logprobs", **NEMO_TOP_P},
        {f"{nemo_rl.SAMPLING}backend": "sglang", **NEMO_TOP_P},
    ],
    launch_in_roll: [
        {VARIANT: None},
        {f"{VARIABLE}DIVISOR": "8"},
        {f"{VARIABLE}KL_ESTIMATOR": "k1"},
        {f"{VARIABLE}KL_ESTIMATOR": "k9", "use_kl_loss": True},
        {f"{VARIABLE}CLIP_RATIO_C": "5"},
        {"importance_sampling": "seq"},
        {"difficulty_loss_weight": True},
        {"length_loss_weight": True},
        {"rl_loss_coef": 0.5},
        {"loss_agg_mode": "token-mean"},
        {f"{roll.TRAIN}apply_loss_scale": False},
        {f"{roll.TRAIN}strategy_args.strategy_name": "fsdp2_train"},
        {f"{roll.TRAIN}{roll.PER_TOKEN}": True},
        {VARIANT: "cispo.prompt_mean", "rollout_batch_size": 16},
        {VARIANT: "cispo.prompt_mean", f"{roll.TRAIN}use_dynamic_batching_in_train": True},
        NO_OLD | {"ppo_epochs": 2},
        NO_OLD | {"rollout_batch_size": 16},
        NO_OLD | IS_FILTERED,
        IS_WEIGHED | {f"{VARIABLE}IMPORTANCE_CORRECTION": "tis"},
        IS_WEIGHED | {VARIANT: "dppo_tv.token_mean"},
        ROLL_KEPT,  # by ROLL's default top_p and top_k
    ],
    launch_in_skyrl: [
        {skyrl.LOSS: "ppo"},
        {skyrl.LOSS: "megatron_rl.dro"},
        {skyrl.REDUCTION: "token_mean_legacy"},
        {skyrl.LOSS: "megatron_rl.dppo_tv", **OF_SKYRL},
        {"megatron_rl.importance_correction": "tis", **OF_SKYRL},
        {"megatron_rl.importance_correction": ""},
        {"megatron_rl.importance_corection": "tis"},
        {"megatron_rl.sapo_temperature_positive": 1.0},
        SKYRL_TOP_P | {SKYRL_MODE: "processed_logprobs"},  # FB-114
    ],
}
# Beside a row of these.
TAKEN: dict[Callable, list[dict[str, Any]]] = {
    launch_in_verl: [
        {MODE: DPPO["mode"], **verl.UNCUT_WEIGHTS},
        CUT | {f"{OURS}allow_partial_prompt_groups": True},
        {MODE: "megatron_rl.grpo.row_mean", verl.MANAGER: "mine.Manager", f"{OURS}one_sample_per_rollout": True},
        OF_ICEPOP | TOP_P | RAW,
    ],
    call_in_verl: [DPPO | {"rollout_is_weights": CUT_WEIGHTS, "response_mask": CUT_WEIGHTS.bool()}],
    launch_in_nemo_rl: [
        NEMO_TOP_P,
        {NEMO: "gspo.token_mean"},
        NEMO_TOP_P | {f"{nemo_rl.SAMPLING}backend": "megatron"},
        {NEMO: "grpo.sample_mean", "grpo.advantage_clip_low": -5.0},
    ],
    launch_in_roll: [
        IS_FILTERED | {f"{VARIABLE}IMPORTANCE_CORRECTION": "tis"},
        IS_FILTERED | IS_WEIGHED,
        ROLL_SAMPLER,
        *(ROLL_KEPT | {f"{ROLL_ARGS}top_p": 1.0, f"{ROLL_ARGS}top_k": off} for off in (-1, 0)),
        {VARIANT: "cispo.prompt_mean", f"{roll.TRAIN}training_args.per_device_train_batch_size": None},
        {VARIANT: "cispo.prompt_mean", f"{roll.TRAIN}device_mapping": [0, 1], **EIGHT_A_DEVICE},
    ],
    launch_in_skyrl: [SKYRL_TOP_P],
}

# Launch, and fields of the config that our loss gets.
TRUNCATED = {nemo_rl.WEIGHTS: True, nemo_rl.TRUNCATION: "seq-mask-tis", nemo_rl.LOWER_BOUND: 0.9, nemo_rl.BOUND: 1.2}
READ: list[tuple[Callable[..., Launch], dict[str, Any], dict[str, Any]]] = [
    # A host's default of a clip is that of its own loss: ours has its own, as 0.2 would never clip the geometric mean of gspo.
    (launch_in_verl, {MODE: "megatron_rl.gspo.sample_mean"}, {"clip_ratio_low": None, "clip_ratio_high": None}),
    (launch_in_verl, {f"{verl.ACTOR}clip_ratio_high": 2e-3}, {"clip_ratio_low": None, "clip_ratio_high": 2e-3}),
    (launch_in_nemo_rl, {f"{nemo_rl.LOSS_FN}ratio_clip_min": 0.2}, {"clip_ratio_low": None, "clip_ratio_high": None}),
    (launch_in_nemo_rl, {f"{nemo_rl.LOSS_FN}ratio_clip_max": 0.28}, {"clip_ratio_low": None, "clip_ratio_high": 0.28}),
    (launch_in_roll, {"pg_clip": 0.2}, {"clip_ratio_low": None, "clip_ratio_high": None}),
    (launch_in_roll, {"pg_clip": 0.3}, {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3}),
    (launch_in_roll, {"use_pg_clip_range": True}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
    (launch_in_skyrl, {f"{skyrl.ALGORITHM}eps_clip_low": 0.1}, {"clip_ratio_low": 0.1, "clip_ratio_high": None}),
    # A parameter has the host's name where it has one, and the host's default acts.
    (launch_in_verl, {MODE: "megatron_rl.cispo.token_mean"}, {"loss_parameters": {}}),
    (
        launch_in_verl,
        {MODE: "megatron_rl.sapo.token_mean", f"{verl.ACTOR}tau_neg": 1.5},
        {"loss_parameters": {"sapo_temperature_negative": 1.5}},
    ),
    (
        launch_in_verl,
        {MODE: "megatron_rl.dro.token_mean", f"{OURS}dro_beta": 0.3},
        {"loss_parameters": {"log_ratio_penalty": 0.3}},
    ),
    (launch_in_nemo_rl, {f"{nemo_rl.LOSS_FN}ratio_clip_c": 4.0}, {"loss_parameters": {"clip_ratio_c": 4.0}}),
    (
        launch_in_roll,
        {VARIANT: "grpo.token_mean", "dual_clip_loss": True, "pg_clip": 0.3},
        {"loss_parameters": {"clip_ratio_c": 1.6}},
    ),
    (
        launch_in_skyrl,
        {skyrl.LOSS: "megatron_rl.sapo"},
        {"loss_parameters": {"sapo_temperature_positive": 1.0, "sapo_temperature_negative": 1.05}},
    ),
    # A setting of ours that is null is none.
    (launch_in_nemo_rl, {f"{NEMO_OURS}kl_estimator": None, nemo_rl.PENALTY: 0.1}, {"kl_coefficient": 0.0}),
    (
        launch_in_nemo_rl,
        TRUNCATED,
        {
            "importance_correction": "seq_mask_tis",
            "importance_correction_level": "sequence_mean",
            "importance_correction_low": 0.9,
            "importance_correction_high": 1.2,
        },
    ),
]
