"""A policy loss that weighs a token's advantage by its entropy, after GTPO (Tan et al., arXiv:2508.04349).

    g_t     = H_t / mean_i(H)            where A_t > 0: a token that the policy was unsure of gets more of a reward
            = (1 / H_t) / mean_i(1 / H)  where A_t < 0: one that it was sure of gets more of the blame
    value_t = -min(rho_t w_t A_t, clip(rho_t) w_t A_t),     w_t = 1 + gtpo_share (g_t - 1), a constant for the gradient

The paper takes the share of a token over all responses of the prompt, before rewards become advantages. A loss sees the samples of
one micro-batch, so this one takes it inside of one sample: mean_i is over the sample's unmasked tokens on all cp ranks.

    python -m megatron_rl train --preset demo --policy-loss examples.gtpo.gtpo --gtpo-share 0.1 --output-dir runs/gtpo
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl import LossValue, Parameter, register_policy_loss
from megatron_rl.losses.token_batch import TokenBatch
from megatron_rl.ops.ratios import clipped_objective

SMALLEST_ENTROPY = 1e-3  # nats: below it a token counts as sure, so that no inverse is huge
SHARE = Parameter("gtpo_share", default=0.1, minimum=0.0, maximum=1.0, help="the part of an advantage that follows the entropy")


@register_policy_loss("gtpo", level="batch", clip_ratios=(0.2, 0.28), needs=("entropy",), parameters=(SHARE,))
def gtpo(
    batch: TokenBatch,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    entropy: Tensor,  # [T] nats, a constant for the gradient
    gtpo_share: float,
) -> LossValue:  # [T]
    """Communication: one all-reduce of [N, 2] over cp; none in backward."""
    sure = entropy.clamp(min=SMALLEST_ENTROPY)
    both = torch.stack([sure, 1 / sure], dim=-1)
    shares = both / batch.of_tokens(batch.sample_mean(both)).clamp(min=torch.finfo(both.dtype).tiny)
    weight = 1 + gtpo_share * (torch.where(batch.advantages > 0, shares[:, 0], shares[:, 1]) - 1)
    advantages = torch.where(batch.loss_mask, weight, 0.0) * batch.advantages
    return clipped_objective(batch.log_ratio, advantages, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
