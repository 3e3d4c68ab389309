"""Defines DRO: REINFORCE with a quadratic penalty on the log-ratio, as Kimi k1.5 trains."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.declare import LossValue, Parameter, register_policy_loss


@register_policy_loss(
    "dro",
    triton="megatron_rl.losses.dro_triton.dro",
    parameters=(
        Parameter(
            "log_ratio_penalty",
            default=0.05,
            minimum=0.0,
            is_above_minimum=True,
            help="tau, the factor of half the squared log-ratio",
        ),
    ),
)
def dro(
    log_ratio: Tensor,  # [T] log_probs_t - old_log_probs_t
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
    *,
    log_ratio_penalty: float,
) -> LossValue:  # [T]
    """Raises the log-probability by its advantage and pulls it back to the old policy's.

        value_t = -A_t log_probs_t + (log_ratio_penalty / 2) log_ratio_t^2          derivative -A_t + log_ratio_penalty log_ratio_t

    Kimi team, "Kimi k1.5", arXiv:2501.12599, section 2.3, up to a factor of the whole loss.
    Use it when data is off-policy and a penalty suits you better than a clip. Richemond et al., arXiv:2405.19107,
    call the method DRO. Differences: the paper squares the log-ratio of the response, which is the sum over its tokens; here each
    token's is squared. The paper does not publish tau; at 0.05 the pull of a log-ratio of 20 is as large as an advantage of 1. No
    exp is taken, so the log-ratio is not bounded, and the penalty pulls back from any distance. It acts at A_t = 0 too.
    """
    distance = log_ratio.detach() + (log_probs - log_probs.detach())  # through log_probs, which has no bound
    value = -advantages * log_probs + log_ratio_penalty / 2 * distance.square()
    return LossValue(value, derivative=-advantages + log_ratio_penalty * log_ratio)
