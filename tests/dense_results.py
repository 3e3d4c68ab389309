"""Loss, gradient and metrics of a whole step, from the terms of megatron_rl.testing.oracle; docs/metrics.md defines the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.testing.oracle import (
    LEVELS,
    ONE_RATIO_A_SAMPLE,
    DenseSample,
    DenseSettings,
    Scores,
    StepTerms,
    bounded_exp,
    k3,
    scores_of,
)


@dataclass(frozen=True, kw_only=True)
class SetSample(DenseSample):
    """kept: the ids that the sampler drew from; None: all."""

    kept: list[list[int]] | None = None


def over_kept(row: Tensor, kept: Sequence[int], label: int) -> Tensor:  # [V], any logits or log-probabilities -> 0-d
    """log pi(label) where the sampler draws from the kept ids alone: -log sum_{k kept} exp(x_k - x_label)."""
    return -torch.logsumexp(torch.stack([row[k] - row[label] for k in kept]), 0)


def scores_over(
    logits: Tensor,  # [T, V], of the unmasked tokens
    labels: Sequence[int],
    settings: DenseSettings,
    kept: Sequence[Sequence[int]],  # empty: all ids
) -> Scores:
    scores = scores_of(logits, labels, settings)
    full, entropy = scores.log_probs, scores.entropy
    if not kept:
        return Scores(full, entropy, full)
    rows = torch.log_softmax(logits.double() / settings.temperature, -1)
    new = torch.stack([over_kept(*of_token) for of_token in zip(rows, kept, labels, strict=True)])
    return Scores(new, entropy, new)


@dataclass(frozen=True)
class DenseResult:
    loss: float
    gradient: Tensor  # [all tokens, V]
    policy_loss: float
    kl_loss: float
    entropy: float
    metrics: dict[str, float]
    log_probs: Tensor  # [all tokens], 0 where masked
    num_unmasked: int


def dense_step(samples: Sequence[SetSample], logits: Tensor, settings: DenseSettings) -> DenseResult:
    """logits: [all tokens of all samples, V], in order."""
    leaf = logits.double().detach().requires_grad_()
    is_live = torch.tensor([is_live for sample in samples for is_live in sample.mask], dtype=torch.bool)
    tokens = [(sample, t) for sample in samples for t, is_live in enumerate(sample.mask) if is_live]
    kept = [sample.kept[t] for sample, t in tokens if sample.kept is not None]
    scores = scores_over(leaf[is_live], [sample.labels[t] for sample, t in tokens], settings, kept)
    terms = StepTerms(samples, scores, settings)
    loss = terms.loss() + 0.0 * leaf.sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    log_probs = torch.zeros(len(leaf), dtype=torch.float64)
    log_probs[is_live] = terms.new.detach()
    return DenseResult(
        loss=float(loss.detach()),
        gradient=gradient,
        policy_loss=float(terms.policy.detach()),
        kl_loss=float(terms.kl.detach()),
        entropy=float(terms.entropy.detach()),
        metrics=dense_metrics(terms),
        log_probs=log_probs,
        num_unmasked=len(terms.owners),
    )


def dense_metrics(terms: StepTerms) -> dict[str, float]:
    """Means over samples of means over tokens, sums and extremes over tokens; {} for a step without a token."""
    if not terms.owners:
        return {}
    settings, advantages = terms.settings, terms.advantages
    of_samples = [tokens for tokens in terms.of_samples if tokens]

    def mean(values: Tensor) -> float:
        return sum(float(values.detach().double()[tokens].mean()) for tokens in of_samples) / len(of_samples)

    def sample_size(values: Tensor) -> float:
        return float(values.sum() ** 2 / (values**2).sum() / len(values)) if values.any() else 0.0

    log_ratio = terms.log_ratio.detach()
    of_each, shared = [log_ratio[tokens] for tokens in of_samples], ONE_RATIO_A_SAMPLE.get(settings.loss)
    if shared is not None:
        of_each = [shared(one, advantages[tokens], settings) for one, tokens in zip(of_each, of_samples, strict=True)]
        of_each = [LEVELS["sequence_mean"](one) for one in of_each]
    ratio = bounded_exp(torch.cat(of_each))
    seen = bounded_exp(torch.cat(of_each if shared is None else [one[:1] for one in of_each]))
    found = {
        "num_documents": len(terms.samples),
        "num_tokens": len(terms.owners),
        "old_logprobs": mean(terms.anchor),
        "new_logprobs": mean(terms.new),
        "ratio_new_old": mean(ratio),
        "ratio_new_old_sum": float(seen.sum()),
        "ratio_new_old_squared_sum": float((seen**2).sum()),
        "effective_sample_size": sample_size(seen),
        "kl_new_old": mean(k3(-log_ratio)),
        "clipped_ratio_fraction": mean(terms.is_clipped),
        "clipped_low": mean(terms.is_clipped & (advantages < 0)),
        "clipped_high": mean(terms.is_clipped & (advantages > 0)),
        "advantage": mean(advantages),
        "max_advantage": float(advantages.max()),
        "min_advantage": float(advantages.min()),
        "entropy": mean(terms.scores.entropy),
    }
    kept = [sample.kept for sample in terms.samples if isinstance(sample, SetSample) and sample.kept is not None]
    if kept:
        num_kept = [len(kept[i][t]) for i, t in zip(terms.owners, terms.places, strict=True)]
        found |= {"kept_ids": mean(torch.tensor(num_kept)), "outside_support": 0}
    if settings.correction == "none" and settings.sequence_delta is None:
        return found
    low, high = terms.bounds
    is_kept = (terms.factors != 0).double()
    return found | {
        "correction_kept_tokens": float(is_kept.mean()),
        "correction_off_policy": mean(terms.is_off_policy),
        "correction_weight": mean(terms.factors),
        "correction_at_low": float((terms.ratios < low).double().mean()),
        "correction_at_high": float((terms.ratios > high).double().mean()),
        "correction_largest_ratio": float(terms.ratios.max()),
        "correction_effective_sample_size": sample_size(terms.factors),
    }
