"""FIPO's future-KL weights, as advantages of tokens: one grows where the policy makes the tokens after it more probable.

    l_t         = log pi_t - log pi_old_t, bounded to +-20         M_t = 1 where exp(l_t) <= ratio_limit, else 0
    f_t         = exp(sum_{k >= t} 2^(-(k - t) / half_life) M_k l_k), clipped to [1 - weight_low, 1 + weight_high]
    f_t         = min(f_t, 1)     where A_t < 0 and M_t = 0
    advantage_t = f_t A_t

Ma et al., "FIPO: Eliciting Deep Reasoning with Future-KL Influenced Policy Optimization", arXiv:2603.19835; the defaults are from
their 32B run. k - t counts unmasked tokens, so tokens of a tool in between are no distance.

f_t is a constant for the gradient, and pi the policy before the step. So the advantages are computed once a step, from a forward
without gradient over whole samples, and cut into micro-batches and context-parallel slices as any other column. At the first step
after a rollout each f_t is 1. The loss is grpo, clipped as in the paper:

    advantages = future_kl_advantages(log_probs, old_log_probs, advantages, loss_mask, cu_seqlens)
    settings = {"clip_ratio_high": 0.28, "loss_parameters": {"clip_ratio_c": 10.0}}
    policy_loss("grpo", ..., advantages=advantages, advantages_per="token", **settings)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BOUND = 20.0  # of a log-ratio, as in the losses


def future_kl_advantages(
    log_probs: Tensor,  # [T] of the policy before the step
    old_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] bounds of whole samples
    *,
    half_life: float = 32.0,  # tokens after which a later token counts half
    weight_low: float = 0.0,
    weight_high: float = 0.2,
    ratio_limit: float = 10.0,
) -> Tensor:  # [T]
    """Each token's advantage times its weight; a masked token keeps its own. Communication: none."""
    shift = (log_probs - old_log_probs).detach()[loss_mask].clamp(-BOUND, BOUND)
    is_far = shift.exp() > ratio_limit
    samples = torch.searchsorted(cu_seqlens[1:].contiguous(), loss_mask.nonzero()[:, 0].to(cu_seqlens.dtype), right=True)
    later = suffix_sums(torch.where(is_far, 0.0, shift), samples, decay=2 ** (-1 / half_life))
    weights = later.clamp(-BOUND, BOUND).exp().clamp(1 - weight_low, 1 + weight_high)
    weights = torch.where(is_far & (advantages[loss_mask] < 0), weights.clamp(max=1.0), weights)
    weighted = advantages.clone()
    weighted[loss_mask] *= weights.to(advantages.dtype)
    return weighted


def suffix_sums(values: Tensor, samples: Tensor, *, decay: float) -> Tensor:  # [T], [T] int64 -> [T] float64
    """Of each token the sum of decay^(k - t) values_k over the tokens k of its sample from this one on; log2(T) rounds."""
    sums, distance = values.double(), 1
    while distance < len(sums):  # sums holds `distance` tokens; those of the next ones are as many places behind it
        same_sample = pad(samples[distance:], (0, distance), value=-1) == samples
        sums = sums + torch.where(same_sample, decay**distance * pad(sums[distance:], (0, distance)), 0.0)
        distance *= 2
    return sums
