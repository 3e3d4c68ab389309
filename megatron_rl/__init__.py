"""The policy-gradient loss layer for Megatron-Core. Importing it needs torch alone: no CUDA, Triton, Megatron or apex."""

from __future__ import annotations

from importlib import import_module

from megatron_rl.aggregation import StepTotals, count_step, regularizer_weights, sample_token_weights
from megatron_rl.config import LossAggregation, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.loss_hub import register_loss_aggregation, register_policy_loss
from megatron_rl.losses import (
    PolicyLossOutput,
    grpo_loss,
    gspo_loss,
    linear_grpo_loss,
    linear_gspo_loss,
    linear_policy_loss,
    policy_loss,
)
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.log_probs import vocab_parallel_log_probs

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DataError",
    "LossAggregation",
    "PolicyLossConfig",
    "PolicyLossOutput",
    "StepTotals",
    "count_step",
    "grpo_loss",
    "gspo_loss",
    "linear_grpo_loss",
    "linear_gspo_loss",
    "linear_log_probs",
    "linear_policy_loss",
    "policy_loss",
    "register_loss_aggregation",
    "register_policy_loss",
    "regularizer_weights",
    "sample_token_weights",
    "vocab_parallel_log_probs",
]


def __getattr__(name: str):
    """`megatron_rl.reducers:function` for loaders that split on the last dot, as those of miles and slime do: module megatron_rl,
    attribute `reducers:function`. Their own documentation shows the colon form, so users will type it."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
