"""What an importance correction does to the tokens of a step, from recorded log-probabilities. corrections.py gives the factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.commands.explain.step import StepInput
from megatron_rl.commands.explain.weights import Weighing, count, short
from megatron_rl.config import CorrectionSettings, ImportanceCorrection, PolicyLossConfig, RejectedTokens
from megatron_rl.losses import importance_correction

NO_LOG_PROBS = "the factors: give --rollouts FILE whose samples have old_log_probs and rollout_log_probs"
FACTORS = {"tis": "w clamped to", "icepop": "w, and 0 outside of", "mask": "1, and 0 outside of"}


@dataclass(frozen=True, slots=True)
class Corrected:
    tokens: list[list[int]]  # [sample, position] of each unmasked token, n of them
    ratios: Tensor  # [n] w before the bounds
    factors: Tensor  # [n] 0 where the token is dropped
    weights: dict[str, Tensor]  # title of an aggregation -> [n] weight of the token, by --rejected-tokens
    dropped_against_counted: dict[str, float]  # title -> the step's sum of weight x factor, dropped / counted


def settings_line(config: PolicyLossConfig) -> str:
    """What the flags of the correction mean."""
    (low, high), parts = CorrectionSettings.of(config).bounds, []
    if config.importance_correction != ImportanceCorrection.NONE:
        factor = f"{FACTORS[config.importance_correction]} [{low:g}, {high:g}]"
        parts.append(f"{factor}, w of level {config.importance_correction_level}")
    if config.off_policy_sequence_delta is not None:  # no file holds the log-probabilities of the policy in training
        delta = f"is above {config.off_policy_sequence_delta:g}, which only training knows"
        parts.append(f"0 where A < 0 and the sample's mean log(rollout / trained) {delta}")
    return f"correction, factor of a token: {'; '.join(parts)}; rejected tokens are {config.rejected_tokens}"


def correct_step(step: StepInput, weighings: Sequence[Weighing]) -> Corrected | None:
    """None where the step lacks log-probabilities, or the only criterion is that of the policy in training."""
    settings = replace(CorrectionSettings.of(weighings[0].config), sequence_delta=None)
    if not settings.is_on or step.old_log_probs is None or step.rollout_log_probs is None:
        return None
    lengths = [mask.numel() for mask in step.masks]
    old, rollout, live = torch.cat(step.old_log_probs), torch.cat(step.rollout_log_probs), torch.cat(step.masks).bool()
    found, _ = importance_correction(settings, old, rollout, live, torch.tensor([0, *lengths]).cumsum(0).int())
    kept = replace(step, masks=[row.long() for row in found.is_kept.split(lengths)])
    tokens = [[sample, t] for sample, mask in enumerate(step.masks) for t in mask.nonzero()[:, 0].tolist()]
    samples, factors, weights, changes = [sample for sample, _ in tokens], found.weights[live], {}, {}
    for weighing in weighings:
        config, chosen = weighing.config, weighing.token_weights[samples]
        total, among_kept = float((chosen * factors).sum()), torch.zeros_like(chosen)
        if total:
            among_kept = Weighing(config, count(kept, config)).token_weights[samples]
            changes[weighing.title] = float((among_kept * factors).sum()) / total
        weights[weighing.title] = among_kept if config.rejected_tokens == RejectedTokens.DROPPED else chosen
    return Corrected(tokens, found.ratios[live], factors, weights, changes)


def token_table(corrected: Corrected, max_rows: int) -> list[list[str]]:
    """The tokens whose w is furthest from 1, in their order."""
    rows = [["", "w", *(f"{title}: weight x factor" for title in corrected.weights)]]
    for index in sorted(corrected.ratios.log().abs().argsort(descending=True, stable=True)[:max_rows].tolist()):
        (sample, position), factor = corrected.tokens[index], float(corrected.factors[index])
        cells = [
            f"{short(w)} x {short(factor)} = {short(w * factor)}" for w in (float(x[index]) for x in corrected.weights.values())
        ]
        rows.append([f"sample {sample}, token {position}", short(float(corrected.ratios[index])), *cells])
    return rows


def kept_line(corrected: Corrected) -> str:
    kept = [sample for (sample, _), factor in zip(corrected.tokens, corrected.factors.tolist(), strict=True) if factor]
    line = f"kept: {len(kept)} of {len(corrected.tokens)} tokens, in {len(set(kept))} of {len({s for s, _ in corrected.tokens})}"
    changes = ", ".join(f"{title} x {short(change)}" for title, change in corrected.dropped_against_counted.items())
    return f"{line} samples; the policy term under --rejected-tokens dropped against counted: {changes or 'none is left'}"
