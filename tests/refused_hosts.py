"""Settings in a trainer that its adapter refuses, for the table of refused.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import nemo_rl_cases
import roll_cases
import skyrl_cases

from megatron_rl.hosts import nemo_rl, roll, skyrl


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
    head_of_roll: [
        *each("use_sequence_packing", True),
        *each("MEGATRON_RL_LOG_PROBS", "roll"),
        *each("MEGATRON_RL_FUSED_LM_HEAD_LOSS", "yes", "1"),
    ],
}
