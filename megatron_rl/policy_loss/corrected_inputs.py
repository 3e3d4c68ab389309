"""Applies a correction to the inputs of a loss: it is a factor of their importance weights, and the losses know nothing else of it.

`importance_correction` is the same for a loop of one's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE, Group, document_ids, spread
from megatron_rl.losses.corrections import Correction, CorrectionSettings, correct, sums_of_samples
from megatron_rl.metrics.further import CorrectionValues, token_statistics
from megatron_rl.policy_loss.inputs import LossBatch, check_cu_seqlens, check_loss_mask, not_none


def importance_correction(
    settings: CorrectionSettings,
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1]
    *,
    log_probs: Tensor | None = None,  # [T]
    advantages: Tensor | None = None,  # [T]
    cp_group: Group = SINGLE,
) -> tuple[Correction, Tensor]:
    """The correction of samples whose log-probabilities are all known: for a loop of one's own.

    policy_loss and linear_policy_loss compute the same inside, with `correction=settings`; then do not pass these weights too.

    Args:
        old_log_probs: of the trainer's policy when it took the rollout, in nats.
        rollout_log_probs: of the engine that sampled, in nats.
        cu_seqlens: bounds of this rank's slices of the samples.
        log_probs, advantages: of the policy in training, and the advantage of each token; only sequence_delta needs them.
    Returns: the correction, and this rank's share of metrics.CORRECTION_STATISTICS, [K] float64: metrics.CORRECTION_METRICS are
        made from its sum over micro-batches and ranks.
    Communication: one all-reduce of [N, k <= 3] over cp; none at size 1.
    Raises: ConfigError for settings that do not fit; DataError for wrong shapes and dtypes and, on the CPU, for bounds that are
        none and for unmasked values that are not finite.
    """
    problems = list(settings.problems())
    if problems:
        raise ConfigError(problems)
    if settings.sequence_delta is not None and (log_probs is None or advantages is None):
        raise ConfigError("off_policy_sequence_delta needs log_probs [T] and advantages [T]: pass them")
    vectors = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs, "loss_mask": loss_mask}
    vectors |= {name: v for name, v in (("log_probs", log_probs), ("advantages", advantages)) if v is not None}
    check_loss_mask(loss_mask, loss_mask.numel())
    check_cu_seqlens(cu_seqlens, loss_mask.numel())
    documents = document_ids(cu_seqlens, loss_mask.numel())
    is_live = loss_mask.bool() & (documents < cu_seqlens.numel() - 1)
    for name, vector in vectors.items():
        if vector.shape != loss_mask.shape:
            raise DataError(f"{name} must be [T={loss_mask.numel()}], got {tuple(vector.shape)}")
        if name != "loss_mask" and vector.dtype not in (torch.float32, torch.float64):
            raise DataError(f"{name} is {vector.dtype}: a ratio of probabilities needs float32 or float64; convert it")
        if not vector.is_cuda and bool((is_live & ~torch.isfinite(vector)).any()):
            raise DataError(f"{name} has unmasked values that are not finite: mask those tokens or drop the samples")
    advantages = torch.zeros_like(old_log_probs) if advantages is None else advantages
    shared = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs, "loss_mask": is_live}
    trained = old_log_probs if log_probs is None else log_probs
    sums = sums_of_samples(settings, log_probs=trained, cu_seqlens=cu_seqlens, cp_group=cp_group, **shared)
    correction = correct(settings, advantages=advantages, sums=sums, documents=documents, **shared)
    values = CorrectionValues(correction, advantages)
    return correction, token_statistics(values, loss_mask=is_live, counts=spread(sums["counts"], documents))


@torch.no_grad()
def corrected(settings: CorrectionSettings, batch: LossBatch, log_probs: Tensor, cp_group: Group) -> LossBatch:  # log_probs [T]
    """The batch with the correction in its importance weights, 0 where it drops.

    Communication: for criteria of a sample one all-reduce of [N, k <= 3] over cp.
    """
    dtype = log_probs.dtype
    old_log_probs, rollout_log_probs = batch.anchor(log_probs), not_none(batch.rollout_log_probs).to(dtype)
    # The loss tells of a token that is not finite; the weights of the others in its sample are not to be blamed.
    is_finite = torch.isfinite(old_log_probs - rollout_log_probs) & torch.isfinite(log_probs)
    shared = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs, "loss_mask": batch.loss_mask & is_finite}
    sums = {}
    if settings.needs_sums:
        sums = sums_of_samples(settings, log_probs=log_probs, cu_seqlens=batch.cu_seqlens, cp_group=cp_group, **shared)
    correction = correct(settings, advantages=batch.advantages.to(dtype), sums=sums, documents=not_none(batch.documents), **shared)
    weights = correction.weights if batch.importance_weights is None else batch.importance_weights * correction.weights
    return replace(batch, importance_weights=weights, correction=correction)
