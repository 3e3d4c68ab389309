"""The settings of a run as its checkpoints keep them, and a line for each that a resumed run changes. None is refused here."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.config import PolicyLossConfig, flag_fields
from megatron_rl.train.options import TrainOptions
from megatron_rl.validation import flag_of

# Where a run begins, when it ends and what it writes: these do not change what a step trains.
NOT_RECORDED = frozenset(
    [
        *("output_dir", "save_hf", "resume", "load", "overwrite", "preset", "save_rollouts", "save_interval", "num_rollouts"),
        *("max_seconds", "target_reward", "target_reward_window"),
        *("tensorboard", "x_axis", "metrics_writer", "plot", "json"),
        *("wandb_project", "wandb_exp_name", "eval_prompts", "eval_interval"),
    ]
)


def settings_of(options: TrainOptions, config: PolicyLossConfig) -> dict[str, Any]:
    """flag -> value, as plain numbers and text."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    values |= {field.name: getattr(config, field.name) for field in flag_fields()} | dict(config.loss_parameters)
    return {flag_of(name): _plain(value) for name, value in values.items() if name not in NOT_RECORDED}


def changed_settings(saved: dict[str, Any], now: dict[str, Any], step: int) -> list[str]:
    """A line for each setting that has changed. A setting that an earlier version did not record is left out."""
    return [
        f"resumed at step {step} with {flag} {_shown(value)}: the checkpoint was saved with {_shown(saved[flag])}"
        for flag, value in now.items()
        if flag in saved and saved[flag] != value
    ]


def _plain(value: Any) -> Any:
    return value if type(value) in (int, float, bool, type(None)) else str(value)


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
