"""GTPO's entropy weights, as advantages of tokens: one that the policy was unsure of gets more of a reward, after Tan et al.

    g_t         = H_t / mean_i(H)            where A_t > 0
                = (1 / H_t) / mean_i(1 / H)  where A_t < 0: a token that the policy was sure of gets more of the blame
    advantage_t = A_t (1 + share (g_t - 1))

arXiv:2508.04349. The paper takes the share of a token over all responses of the prompt, before rewards become advantages. Here it
is inside of one sample: mean_i is over its unmasked tokens.

The weights are constants for the gradient, so the advantages are computed once a step, from a forward without gradient over whole
samples, and cut into micro-batches and context-parallel slices as any other column:

    advantages = entropy_weighted_advantages(entropy, advantages, loss_mask, cu_seqlens)
    policy_loss("grpo", ..., advantages=advantages, advantages_per="token", clip_ratio_high=0.28)
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_ENTROPY = 1e-3  # nats: below it a token counts as sure, so that no inverse is huge


def entropy_weighted_advantages(
    entropy: Tensor,  # [T] nats, of the policy before the step
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] bounds of whole samples
    *,
    share: float = 0.1,  # the part of an advantage that follows the entropy, 0 to 1
) -> Tensor:  # [T]
    """Each token's advantage times its weight; a masked token keeps its own. Communication: none."""
    sure = entropy.detach().double().clamp(min=SMALLEST_ENTROPY)
    shares = torch.where(advantages > 0, sure, 1 / sure)
    samples = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(len(shares)).to(cu_seqlens), right=True)
    sums, counts = torch.zeros(2, len(cu_seqlens), dtype=torch.float64, device=shares.device)
    sums.index_add_(0, samples, torch.where(loss_mask, shares, 0.0))
    counts.index_add_(0, samples, loss_mask.double())
    relative = shares * counts[samples] / sums[samples].clamp(min=torch.finfo(torch.float64).tiny)
    weight = torch.where(loss_mask, 1 + share * (relative - 1), 1.0)
    return advantages * weight.to(advantages.dtype)
