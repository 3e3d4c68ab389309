"""Policy losses: one value per token, its derivative, and the weighted sum that a rank contributes to the step. Reads no flag."""

from __future__ import annotations

from megatron_rl.losses.grpo import grpo_values
from megatron_rl.losses.gspo import gspo_values
from megatron_rl.losses.linear_policy_loss import linear_grpo_loss, linear_gspo_loss, linear_policy_loss
from megatron_rl.losses.policy_loss import PolicyLossOutput, grpo_loss, gspo_loss, policy_loss

__all__ = [
    "PolicyLossOutput",
    "grpo_loss",
    "grpo_values",
    "gspo_loss",
    "gspo_values",
    "linear_grpo_loss",
    "linear_gspo_loss",
    "linear_policy_loss",
    "policy_loss",
]
