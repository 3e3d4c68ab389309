"""What a loss does besides where a sampler's kept ids are given: a KL term over the whole vocabulary, and metrics of the sets.

log_probs are over the kept ids, so each ratio and correction is as it is. Nothing here runs without sets.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig, TermScore
from megatron_rl.layout.packing import spread
from megatron_rl.losses.kl import kl_estimate
from megatron_rl.metrics.further import SupportValues, token_statistics
from megatron_rl.metrics.policy import PolicyStatistics
from megatron_rl.policy_loss.inputs import LossInputs, given
from megatron_rl.policy_loss.settings import LossSettings


def kl_reference(inputs: LossInputs) -> Tensor:  # [T]
    """What a KL term over the vocabulary compares log_probs with, which are over kept ids: the difference of the full scores is
    log_probs - (ref_log_probs - ln M), with M the kept mass."""
    log_kept_mass = given(inputs.log_kept_mass)
    return given(inputs.ref_log_probs).to(log_kept_mass.dtype) - log_kept_mass


@torch.no_grad()
def kl_apart(
    coefficients: Tensor,  # [T] of the loss
    log_probs: Tensor,  # [T] over kept ids
    inputs: LossInputs,
    settings: LossSettings,  # is_kl_of_all
    vocab_size: int,
) -> tuple[Tensor, Tensor]:  # [T] d loss / d score over kept ids, [T] d loss / d full score
    """The coefficients without those of the KL term over the vocabulary, and these. They are 0 in a row that keeps the whole
    vocabulary: it has one score, and its coefficients stay together."""
    assert settings.kl_estimator is not None and inputs.sampling_support is not None
    nothing = torch.zeros_like(log_probs)  # the ratio, which such an estimator does not take
    _, derivative = kl_estimate(settings.kl_estimator, log_probs, kl_reference(inputs), nothing)
    weights = spread(given(inputs.regularizer_weights).to(log_probs.dtype), inputs.token_documents)
    has_two = inputs.loss_mask & (inputs.sampling_support.sizes != vocab_size)
    of_kl = torch.where(has_two, settings.kl_coefficient * weights * derivative, 0.0)
    return coefficients - of_kl, of_kl


def with_support_sums(
    statistics: PolicyStatistics,
    log_probs: Tensor,  # [T]
    inputs: LossInputs,  # with sampling_support
    counts: Tensor,  # [N] unmasked tokens of each sample over all cp ranks
) -> PolicyStatistics:
    """The statistics with those of the sets."""
    assert inputs.sampling_support is not None
    values = SupportValues(log_probs, inputs.sampling_support.sizes, inputs.log_kept_mass)
    of_tokens = spread(counts, inputs.token_documents)
    support = token_statistics(values, loss_mask=inputs.loss_mask, counts=of_tokens)
    return replace(statistics, support=support, has_mass=inputs.log_kept_mass is not None)


def terms_over_kept_ids(config: PolicyLossConfig) -> str:
    """Over what the terms of a loss over kept ids are, for start lines."""
    over = {TermScore.SUPPORT: "the same", TermScore.FULL: "the whole vocabulary"}
    terms = {"KL": (config.kl_coefficient, config.kl_score), "entropy": (config.entropy_coefficient, config.entropy_score)}
    return "".join(f", {term} over {over[TermScore(score)]}" for term, (coefficient, score) in terms.items() if coefficient)
