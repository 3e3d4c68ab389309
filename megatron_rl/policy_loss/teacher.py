"""Computes what a teacher adds to a loss: to the advantages of its tokens, or a term with a gradient in each row."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.ops.backends import VocabShard
from megatron_rl.ops.distribution import DistributionTerm
from megatron_rl.policy_loss.inputs import LossBatch, LossOptions


def taught(batch: LossBatch, options: LossOptions, anchor: Tensor) -> LossBatch:  # anchor [T]
    """The batch with what a sampled teacher adds to the advantages: coefficient (log q - log p), p of the policy that the ratio
    compares with. On average over the policy's tokens it is the gradient of the reverse KL."""
    assert options.distillation is not None and batch.teacher_log_probs is not None
    gap = options.distillation.coefficient * (batch.teacher_log_probs.to(anchor.dtype) - anchor)
    return replace(batch, advantages=batch.advantages.to(anchor.dtype) + gap, teacher_log_probs=None)


def divergence_weights(batch: LossBatch, options: LossOptions, dtype: torch.dtype) -> Tensor:  # [T] d loss / d divergences
    assert options.distillation is not None, "the checks have refused a teacher without settings"
    weights = options.distillation.coefficient * batch.spread(batch.token_weights.to(dtype))
    return torch.where(batch.loss_mask, weights, 0.0)


def distribution_term(
    batch: LossBatch, options: LossOptions, shard: VocabShard, dtype: torch.dtype, loss_scale: Tensor | float | None = None
) -> DistributionTerm:
    """The term of a call whose batch has a teacher of rows. loss_scale: of a gradient that is made in forward."""
    settings = options.distillation
    assert settings is not None and batch.teacher is not None
    function, temperature = settings.function, settings.teacher_temperature
    weights = divergence_weights(batch, options, dtype)
    weights = weights if loss_scale is None else weights * loss_scale
    return DistributionTerm(function, batch.teacher, shard, options.tp_group, batch.loss_mask, weights, temperature)
