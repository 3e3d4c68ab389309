"""Defines GRPO: one importance ratio per token, clipped per token."""

from __future__ import annotations

import math

from torch import Tensor

from megatron_rl.loss_hub import LossValue, Parameter, register_policy_loss
from megatron_rl.ops.ratios import clipped_objective

CLIP_RATIO_C = Parameter(
    "clip_ratio_c",
    default=math.inf,
    minimum=1.0,
    is_above_minimum=True,
    help="dual clip: for A < 0 the ratio is clipped at this number too, so that one token has at most this many times the "
    "gradient of REINFORCE; 3 is usual",
)


@register_policy_loss(
    "grpo",
    level="token",
    clip_ratios=(0.2, 0.2),
    triton="megatron_rl.ops.ratios_triton.clipped_objective",
    parameters=(CLIP_RATIO_C,),
)
def grpo(
    log_ratio: Tensor,  # [T] log_probs_t - old_log_probs_t
    advantages: Tensor,  # [T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float = math.inf,
) -> LossValue:  # [T]
    """Clips each token's ratio.

        rho_t   = exp(log_ratio_t)
        value_t = -min(rho_t A_t, clip(rho_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A_t)

    Shao et al., "DeepSeekMath", arXiv:2402.03300, equation 3 without its KL term.
    Use it when you want the common baseline. DAPO (arXiv:2503.14476) widens clip_ratio_high to 0.28 for more
    exploration. A finite clip_ratio_c clips the ratio of tokens with A < 0 from above too (ops/ratios.py).
    """
    return clipped_objective(
        log_ratio,
        advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )
