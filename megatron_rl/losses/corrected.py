"""Puts a correction into the inputs of a loss: the token's part before the one reduction over cp, the sample's part after it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.corrections import (
    Correction,
    correct,
    correct_known,
    correction_columns,
    sample_weights_of,
    token_weights_of,
)
from megatron_rl.layout.groups import Group
from megatron_rl.layout.packing import spread
from megatron_rl.loss_hub import PolicyLoss
from megatron_rl.losses.options import DocumentStats, LossInputs, given
from megatron_rl.metrics import correction_statistics


def with_token_weights(inputs: LossInputs, log_probs: Tensor) -> LossInputs:
    """The inputs with the weights of level token, so that the reduction sums what it has to sum. [T] log_probs."""
    assert inputs.correction is not None
    old_log_probs, rollout_log_probs = _compared(inputs, log_probs)
    return _multiplied(inputs, token_weights_of(inputs.correction, old_log_probs, rollout_log_probs))


def columns_of(inputs: LossInputs, log_probs: Tensor) -> dict[str, Tensor]:  # [T] each
    """The vectors that a criterion of the sample sums over its tokens."""
    assert inputs.correction is not None
    return correction_columns(inputs.correction, log_probs, *_compared(inputs, log_probs))


def with_sample_weights(
    loss: PolicyLoss,
    inputs: LossInputs,  # from with_token_weights
    stats: DocumentStats,
    log_probs: Tensor,  # [T]
) -> tuple[LossInputs, DocumentStats, Correction]:
    """The inputs and sums with the whole correction. No communication: the sums are those of all cp ranks."""
    assert inputs.correction is not None
    old_log_probs, rollout_log_probs = _compared(inputs, log_probs)
    sums = {"counts": stats.counts, **stats.correction_sums}
    advantages = inputs.advantages.to(log_probs.dtype)
    if inputs.advantages_per == "sample":
        advantages = spread(advantages, inputs.token_documents)
    correction = correct(
        inputs.correction,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=advantages,
        sums=sums,
        loss_mask=inputs.loss_mask,
        documents=inputs.token_documents,
    )
    if stats.importance is not None:  # a sequence-level loss: its tokens share the advantage
        of_samples = inputs.advantages if stats.advantages is None else stats.advantages
        stats = replace(stats, importance=stats.importance * sample_weights_of(inputs.correction, sums, of_samples))
    if inputs.correction.needs_sums:
        # The weights of level token are in the inputs; a dropped token has 0, one of a sample the sample's factor.
        factor = correction.weights if inputs.correction.is_of_sequence else correction.is_kept.to(log_probs.dtype)
        inputs = _multiplied(inputs, factor)
    return inputs, stats, correction


def is_known_before(inputs: LossInputs) -> bool:
    """Whether the correction needs sums over samples, and none of the policy in training."""
    correction = inputs.correction
    if correction is None or not correction.needs_sums:
        return False
    return inputs.old_log_probs is not None and not correction.is_of_current_policy


def with_known_correction(inputs: LossInputs, log_probs_dtype: torch.dtype, cp_group: Group) -> LossInputs:
    """The inputs with a correction that no log-probability of the policy in training enters, before any is computed.

    Communication: one all-reduce of [N, k] over cp for criteria of a sample.
    """
    assert inputs.correction is not None and not inputs.correction.is_of_current_policy
    old_log_probs = given(inputs.old_log_probs).to(log_probs_dtype)
    correction = correct_known(
        inputs.correction,
        old_log_probs,
        given(inputs.rollout_log_probs).to(log_probs_dtype),
        inputs.loss_mask,
        inputs.cu_seqlens,
        cp_group=cp_group,
    )
    return replace(_multiplied(inputs, correction.weights), correction=None, known_correction=correction)


def statistics_of(
    correction: Correction,
    advantages: Tensor,  # [T]
    inputs: LossInputs,
    counts: Tensor,  # [N] unmasked tokens of each sample over all cp ranks
) -> Tensor:  # [len(CORRECTION_STATISTICS)] float64
    of_tokens = spread(counts, inputs.token_documents)
    return correction_statistics(correction.values(advantages), loss_mask=inputs.loss_mask, counts=of_tokens)


def _compared(inputs: LossInputs, log_probs: Tensor) -> tuple[Tensor, Tensor]:  # [T] old, [T] rollout
    old_log_probs = log_probs if inputs.old_log_probs is None else inputs.old_log_probs.to(log_probs.dtype)
    return old_log_probs, given(inputs.rollout_log_probs).to(log_probs.dtype)


def _multiplied(inputs: LossInputs, factor: Tensor) -> LossInputs:
    weights = inputs.importance_weights
    return replace(inputs, importance_weights=factor if weights is None else weights * factor)
