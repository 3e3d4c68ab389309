"""Computes any policy loss from logits, hidden states or log-probabilities: this rank's weighted part of the step's loss."""

from __future__ import annotations

from megatron_rl.policy_loss.api import grpo_loss, gspo_loss, loss_of_log_probs, policy_loss
from megatron_rl.policy_loss.corrected_inputs import importance_correction
from megatron_rl.policy_loss.inputs import LossBatch, LossOptions, PolicyLossOutput
from megatron_rl.policy_loss.linear import linear_grpo_loss, linear_gspo_loss, linear_policy_loss
from megatron_rl.policy_loss.value import ValueLossOutput, value_loss

__all__ = [
    "LossBatch",
    "LossOptions",
    "PolicyLossOutput",
    "ValueLossOutput",
    "grpo_loss",
    "gspo_loss",
    "importance_correction",
    "linear_grpo_loss",
    "linear_gspo_loss",
    "linear_policy_loss",
    "loss_of_log_probs",
    "policy_loss",
    "value_loss",
]
