"""Defines FIPO: a token's advantage grows where the policy makes the tokens after it more probable."""

from __future__ import annotations

import torch

from megatron_rl.config import LOG_RATIO_BOUND
from megatron_rl.loss_hub import LossValue, Parameter, register_policy_loss
from megatron_rl.losses.token_batch import TokenBatch
from megatron_rl.ops.ratios import clipped_objective


@register_policy_loss(
    "fipo",
    level="batch",
    clip_ratios=(0.2, 0.28),
    parameters=(
        Parameter("fipo_half_life", default=32.0, minimum=0.1, help="the number of tokens after which a later token counts half"),
        Parameter(
            "fipo_weight_low", default=0.0, minimum=0.0, maximum=1.0, help="the weight of an advantage is at least 1 minus this"
        ),
        Parameter("fipo_weight_high", default=0.2, minimum=0.0, help="the weight of an advantage is at most 1 plus this"),
        Parameter(
            "fipo_ratio_limit",
            default=10.0,
            minimum=1.0,
            is_above_minimum=True,
            help="a token whose ratio is above it changes no weight; where A < 0 its ratio is cut there, its weight at 1",
        ),
    ),
)
def fipo(
    batch: TokenBatch,  # [T] vectors
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    fipo_half_life: float,
    fipo_weight_low: float,
    fipo_weight_high: float,
    fipo_ratio_limit: float,
) -> LossValue:  # [T]
    """Multiplies a token's advantage by a bounded weight of the log-ratios from it on, and clips each token's ratio as grpo does.

        l_t     = log_ratio_t bounded to +-20     rho_t = exp(l_t)     gamma = 2^(-1 / fipo_half_life)
        F_t     = sum_{k >= t} gamma^(k - t) M_k l_k          M_k = 1 where rho_k <= fipo_ratio_limit, else 0
        f_t     = clip(exp(F_t), 1 - fipo_weight_low, 1 + fipo_weight_high), a constant for the gradient
        f_t     = min(f_t, 1)     where A_t < 0 and rho_t > fipo_ratio_limit
        value_t = -min(rho_t f_t A_t, clip(rho_t, 1 - clip_ratio_low, 1 + clip_ratio_high) f_t A_t)

    and for A_t < 0 the value is at most -fipo_ratio_limit f_t A_t.

    Ma et al., "FIPO: Eliciting Deep Reasoning with Future-KL Influenced Policy Optimization", arXiv:2603.19835: FutureKL, the
    influence weight and the loss as the authors state them with their code, github.com/qwenpilot/FIPO. The defaults are from
    their 32B run.
    Use it when one advantage for a whole long response is too coarse; the paper trains long chains of thought with it. It changes
    nothing at the first step after a rollout, when each ratio is 1.

    Differences: k - t counts unmasked tokens, so tokens of a tool in between are no distance. The authors' code drops a sample with
    two or more tokens that are cut at fipo_ratio_limit; here they have no gradient, and the sample stays. It has a threshold of
    its own above which f_t is at most 1, and at least 0.8 there; in the 32B run the threshold is fipo_ratio_limit, and f_t >= 1.

    Communication: at cp above 1 one all-reduce of [N] and one of [N, 4 cp_size] over cp in zigzag order; none in backward.
    """
    log_ratio, advantages = batch.log_ratio, batch.advantages
    shift = log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    is_far = shift.exp() > fipo_ratio_limit
    later = batch.suffix_sum(torch.where(is_far, 0.0, shift), decay=2 ** (-1 / fipo_half_life))
    weight = later.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(1 - fipo_weight_low, 1 + fipo_weight_high)
    weight = torch.where(is_far & (advantages < 0), weight.clamp(max=1.0), weight)
    return clipped_objective(
        log_ratio,
        weight * advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=fipo_ratio_limit,
    )
