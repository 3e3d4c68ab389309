"""GSPO: one importance ratio per sample, clipped per sample. Not weighted and not reduced: aggregation and the driver do that."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.layout.collectives import all_reduce_sum
from megatron_rl.layout.groups import Group
from megatron_rl.layout.packing import document_ids, document_sums, spread
from megatron_rl.loss_hub import register_policy_loss
from megatron_rl.losses.surrogate import clipped_surrogate


@register_policy_loss("gspo", level="sequence", surrogate=clipped_surrogate)
def gspo_values(
    log_probs: Tensor,  # [T] float32, detached
    old_log_probs: Tensor,  # [T] float32
    advantages: Tensor,  # [N] float32
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32, this cp rank's slices
    token_counts: Tensor,  # [N] unmasked tokens per document, over all cp ranks
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    cp_group: Group,
) -> tuple[Tensor, Tensor]:  # values [T], 0 where masked; d(sum over the document of value) / d log_probs [T]
    """Every token of a sample has the sample's value.

        s_i     = exp( sum_{t in i} m_t (log_probs_t - old_log_probs_t) / m_i )
        value_t = -min(s_i A_i, clip(s_i, 1 - clip_ratio_low, 1 + clip_ratio_high) A_i)

    Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071, equations 5 and 7.

    m_i counts all cp ranks, so a split document gives the unsplit values. The document's m_i values depend on log_probs_t through
    the mean alone: the m_i of the sum and the 1/m_i of the mean cancel, and the derivative is value'(s_i) s_i for each token.
    Communication: one all-reduce of [N] over cp_group here, none in any backward. Raises: nothing.
    """
    log_ratio = torch.where(loss_mask, log_probs - old_log_probs, 0.0)
    sums = all_reduce_sum(document_sums(log_ratio, cu_seqlens), cp_group)
    values, derivative = clipped_surrogate(
        mean_log_ratio(sums, token_counts, log_probs.dtype),
        advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
    )
    token_documents = document_ids(cu_seqlens, log_probs.shape[0])
    return (
        torch.where(loss_mask, spread(values, token_documents), 0.0),
        torch.where(loss_mask, spread(derivative, token_documents), 0.0),
    )


def mean_log_ratio(sums: Tensor, token_counts: Tensor, dtype: torch.dtype) -> Tensor:  # [N]
    """The exponent of s_i; 0 for a fully masked document, which has no token to carry it."""
    return torch.where(token_counts > 0, sums / token_counts.clamp(min=1), 0.0).to(dtype)
