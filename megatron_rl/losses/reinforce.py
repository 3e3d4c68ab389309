"""Defines REINFORCE: the log-probability times the advantage, without a ratio."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.declare import LossValue, register_policy_loss


@register_policy_loss(
    "reinforce",
    triton="megatron_rl.losses.reinforce_triton.reinforce",
)
def reinforce(
    log_ratio: Tensor,  # [T] not used
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
) -> LossValue:  # [T]
    """Trains each token by its advantage, however far the policy is from the one that sampled it.

        value_t = -A_t log_probs_t          derivative -A_t

    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992.
    Use it when a rollout is trained on for one step: there each loss whose ratio is to the old policy is this one, with one
    advantage a sample. The old log-probabilities reach the metrics alone.
    """
    return LossValue(-advantages * log_probs, derivative=-advantages)
