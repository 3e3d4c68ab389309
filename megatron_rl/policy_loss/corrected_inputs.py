"""Applies a correction to the inputs of a loss: it is a factor of their importance weights, and the losses know nothing else of it.

`importance_correction` is the same for a loop of one's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE, Group
from megatron_rl.losses.corrections import Correction, CorrectionSettings, correct, sums_of_samples
from megatron_rl.metrics.further import token_statistics
from megatron_rl.ops.backends import log_probs_dtype
from megatron_rl.policy_loss.inputs import LossBatch, not_none, prepared


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
    Returns: the correction, and this rank's share of the statistics of metrics.further.CORRECTION_METRICS, [K] float64, which
        are made from its sum over micro-batches and ranks.
    Communication: one all-reduce of [N, k <= 3] over cp; none at size 1.
    Raises: ConfigError for settings that do not fit; DataError for wrong shapes and dtypes and, on the CPU, for bounds that are
        none and for unmasked values that are not finite.
    """
    problems = list(settings.problems())
    if problems:
        raise ConfigError(problems)
    if settings.sequence_delta is not None and (log_probs is None or advantages is None):
        raise ConfigError("off_policy_sequence_delta needs log_probs [T] and advantages [T]: pass them")
    advantages = torch.zeros_like(old_log_probs) if advantages is None else advantages
    token_weights = old_log_probs.new_ones(cu_seqlens.numel() - 1)  # no correction reads them
    batch = LossBatch(old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, rollout_log_probs=rollout_log_probs)
    dtype, device = log_probs_dtype(old_log_probs), old_log_probs.device
    batch = prepared(None, batch, num_tokens=loss_mask.numel(), device=device, dtype=dtype, advantages_per="token")
    log_probs = old_log_probs if log_probs is None else log_probs
    if log_probs.shape != old_log_probs.shape:
        raise DataError(f"log_probs must be [T={len(old_log_probs)}], got {tuple(log_probs.shape)}")
    given = torch.stack([x.to(dtype) for x in (old_log_probs, rollout_log_probs, log_probs, advantages)])
    is_finite = given.isfinite().all(dim=0)
    if device.type == "cpu" and bool((batch.loss_mask & ~is_finite).any()):
        raise DataError("log-probabilities or advantages have unmasked values that are not finite: mask those tokens")
    correction, sums = _correction(settings, batch, batch.loss_mask, log_probs.to(dtype), cp_group, needs_sums=True)
    return correction, token_statistics("correction", correction, loss_mask=batch.loss_mask, counts=batch.spread(sums["counts"]))


@torch.no_grad()
def corrected(settings: CorrectionSettings, batch: LossBatch, log_probs: Tensor, cp_group: Group) -> LossBatch:  # log_probs [T]
    """The batch with the correction in its importance weights, 0 where it drops.

    Communication: for criteria of a sample one all-reduce of [N, k <= 3] over cp.
    """
    # The loss tells of a token that is not finite; the weights of the others in its sample are not to be blamed.
    gap = batch.anchor(log_probs) - not_none(batch.rollout_log_probs).to(log_probs.dtype)
    loss_mask = batch.loss_mask & torch.isfinite(gap) & torch.isfinite(log_probs)
    correction, _ = _correction(settings, batch, loss_mask, log_probs, cp_group, needs_sums=settings.needs_sums)
    weights = correction.weights if batch.importance_weights is None else batch.importance_weights * correction.weights
    return replace(batch, importance_weights=weights, correction=correction)


def _correction(
    settings: CorrectionSettings, batch: LossBatch, loss_mask: Tensor, log_probs: Tensor, cp_group: Group, *, needs_sums: bool
) -> tuple[Correction, dict[str, Tensor]]:  # [T] bool, [T] -> the sums, [N] each
    old_log_probs, rollout_log_probs = batch.anchor(log_probs), not_none(batch.rollout_log_probs).to(log_probs.dtype)
    shared = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs, "loss_mask": loss_mask}
    sums = {}
    if needs_sums:
        sums = sums_of_samples(settings, log_probs=log_probs, cu_seqlens=batch.cu_seqlens, cp_group=cp_group, **shared)
    advantages, documents = batch.advantages.to(log_probs.dtype), not_none(batch.documents)
    return correct(settings, advantages=advantages, sums=sums, documents=documents, **shared), sums
