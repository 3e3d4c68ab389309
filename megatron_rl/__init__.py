"""The policy-gradient loss layer for Megatron-Core. Importing it needs torch alone: no CUDA, Triton, Megatron or apex."""

from __future__ import annotations

from megatron_rl.aggregation import StepTotals, count_step, regularizer_weights, sample_token_weights
from megatron_rl.config import LossAggregation, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.loss_hub import register_loss_aggregation, register_policy_loss
from megatron_rl.losses import PolicyLossOutput, grpo_loss, gspo_loss, policy_loss
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
    "policy_loss",
    "register_loss_aggregation",
    "register_policy_loss",
    "regularizer_weights",
    "sample_token_weights",
    "vocab_parallel_log_probs",
]
