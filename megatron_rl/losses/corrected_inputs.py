"""Applies a correction to the inputs of a loss: the one place where the losses call corrections.py.

    level token                     correct_tokens, before the one reduction over cp: a token's factor needs its own numbers
    criteria and levels of samples  columns_of_correction are in that reduction, and correct_samples reads their sums after it
    known before the rows           correct_before_rows: one reduction of its own, before any log-probability is computed

importance_correction is the same for a loop of one's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.corrections import (
    Correction,
    correct,
    correction_columns,
    factors_after_sums,
    sample_weights_of,
    token_weights_of,
)
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE, Group, all_reduce_sum
from megatron_rl.layout.packing import document_ids, document_sums, spread
from megatron_rl.losses.inputs import DocumentSums, LossInputs, check_cu_seqlens, check_loss_mask, given
from megatron_rl.metrics.further import CorrectionValues, token_statistics
from megatron_rl.registries.correction_settings import CorrectionSettings


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
    correction, sums = _correct_alone(
        settings,
        log_probs=old_log_probs if log_probs is None else log_probs,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=advantages,
        loss_mask=is_live,
        cu_seqlens=cu_seqlens,
        documents=documents,
        cp_group=cp_group,
    )
    values = CorrectionValues(correction, advantages)
    return correction, token_statistics(values, loss_mask=is_live, counts=spread(sums["counts"], documents))


def correct_tokens(inputs: LossInputs, log_probs: Tensor) -> LossInputs:  # log_probs [T]
    """The inputs with the weights of level token, so that the reduction sums what it has to sum."""
    assert inputs.correction is not None
    old_log_probs, rollout_log_probs = _compared(inputs, log_probs)
    return _multiplied(inputs, token_weights_of(inputs.correction, old_log_probs, rollout_log_probs))


def columns_of_correction(inputs: LossInputs, log_probs: Tensor) -> dict[str, Tensor]:  # [T] each
    """The vectors that a correction sums over the tokens of a sample."""
    assert inputs.correction is not None
    return correction_columns(inputs.correction, log_probs, *_compared(inputs, log_probs))


def correct_samples(
    inputs: LossInputs,  # from correct_tokens
    sums: DocumentSums,
    log_probs: Tensor,  # [T]
) -> tuple[LossInputs, DocumentSums, Correction]:
    """The inputs and sums with the whole correction. No communication: the sums are over all cp ranks already."""
    assert inputs.correction is not None
    old_log_probs, rollout_log_probs = _compared(inputs, log_probs)
    of_samples = {"counts": sums.counts, **sums.correction_sums}
    correction = correct(
        inputs.correction,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=_advantages(inputs, log_probs.dtype),
        sums=of_samples,
        loss_mask=inputs.loss_mask,
        documents=inputs.token_documents,
    )
    if sums.importance is not None:  # a sequence-level loss: its tokens share the advantage
        shared_advantages = inputs.advantages if sums.advantages is None else sums.advantages
        factor = sample_weights_of(inputs.correction, of_samples, shared_advantages)
        sums = replace(sums, importance=sums.importance * factor)
    if inputs.correction.needs_sums:
        # What needs no sum is in the inputs.
        inputs = _multiplied(inputs, factors_after_sums(inputs.correction, correction, of_samples, inputs.token_documents))
    return inputs, sums, correction


def can_correct_before_rows(inputs: LossInputs) -> bool:
    """Whether the correction needs sums over samples, and none of the policy in training."""
    correction = inputs.correction
    if correction is None or not correction.needs_sums:
        return False
    return inputs.old_log_probs is not None and not correction.is_of_current_policy


def correct_before_rows(inputs: LossInputs, log_probs_dtype: torch.dtype, cp_group: Group) -> LossInputs:
    """Applies a correction that does not depend on the policy in training, so it can be computed before the forward pass.

    Communication: one all-reduce of [N, k] over cp for criteria of a sample.
    """
    assert inputs.correction is not None and not inputs.correction.is_of_current_policy
    old_log_probs = given(inputs.old_log_probs).to(log_probs_dtype)
    correction, _ = _correct_alone(
        inputs.correction,
        log_probs=old_log_probs,
        old_log_probs=old_log_probs,
        rollout_log_probs=given(inputs.rollout_log_probs).to(log_probs_dtype),
        advantages=torch.zeros_like(old_log_probs),  # the criterion that reads them is of the current policy
        loss_mask=inputs.loss_mask,
        cu_seqlens=inputs.cu_seqlens,
        documents=inputs.token_documents,
        cp_group=cp_group,
    )
    return replace(_multiplied(inputs, correction.weights), correction=None, applied_correction=correction)


def correction_metric_sums(
    correction: Correction,
    advantages: Tensor,  # [T]
    inputs: LossInputs,
    counts: Tensor,  # [N] unmasked tokens of each sample over all cp ranks
) -> Tensor:  # [len(CORRECTION_STATISTICS)] float64
    of_tokens = spread(counts, inputs.token_documents)
    return token_statistics(CorrectionValues(correction, advantages), loss_mask=inputs.loss_mask, counts=of_tokens)


def _correct_alone(
    settings: CorrectionSettings,
    *,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool, False on padding
    cu_seqlens: Tensor,  # [N + 1]
    documents: Tensor,  # [T] int64, N on padding
    cp_group: Group,
) -> tuple[Correction, dict[str, Tensor]]:  # and the sums [N] over all cp ranks
    """The correction with sums of its own. Communication: one all-reduce of [N, k <= 3] over cp; none at size 1."""
    columns = {"counts": loss_mask, **correction_columns(settings, log_probs, old_log_probs, rollout_log_probs)}
    stacked = torch.stack([torch.where(loss_mask, column, 0).double() for column in columns.values()], dim=-1)
    reduced = all_reduce_sum(document_sums(stacked, cu_seqlens), cp_group)
    sums = dict(zip(columns, reduced.unbind(-1), strict=True))
    correction = correct(
        settings,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=advantages,
        sums=sums,
        loss_mask=loss_mask,
        documents=documents,
    )
    return correction, sums


def _advantages(inputs: LossInputs, dtype: torch.dtype) -> Tensor:  # [T]
    advantages = inputs.advantages.to(dtype)
    return spread(advantages, inputs.token_documents) if inputs.advantages_per == "sample" else advantages


def _compared(inputs: LossInputs, log_probs: Tensor) -> tuple[Tensor, Tensor]:  # [T] old, [T] rollout
    old_log_probs = log_probs if inputs.old_log_probs is None else inputs.old_log_probs.to(log_probs.dtype)
    return old_log_probs, given(inputs.rollout_log_probs).to(log_probs.dtype)


def _multiplied(inputs: LossInputs, factor: Tensor) -> LossInputs:
    weights = inputs.importance_weights
    return replace(inputs, importance_weights=factor if weights is None else weights * factor)
