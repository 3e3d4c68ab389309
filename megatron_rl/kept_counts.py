"""Says who counts the tokens that a correction keeps, where --rejected-tokens dropped leaves the others out of the denominators.

1/(L N), no count of tokens    nobody
1/(N m_i)                      the loss, from the sums of its one reduction: correction_of
1/T                            the forward step, which multiplies the gradient by T / K after the last backward: divides_by_kept
others, and 1/T beside another term in the gradient
                               the step before its forward passes, where old log-probabilities say what is dropped:
                               counts_kept_before
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.aggregation_record import OF_SAMPLE_TOKENS, OF_STEP_TOKENS, WITHOUT_TOKENS
from megatron_rl.config import EmptySteps, PolicyLossConfig, RatioUnit, RejectedTokens, RouterAuxLoss
from megatron_rl.loss_hub import get_loss_aggregation
from megatron_rl.registries.correction_settings import CorrectionSettings

if TYPE_CHECKING:  # the rules of flags are read without torch
    from megatron_rl.step_counts import StepTotals


def correction_of(config: PolicyLossConfig, totals: StepTotals | None = None) -> CorrectionSettings:
    """The correction of the configured loss. Under rejected_tokens=dropped the loss itself gives the kept tokens of a sample its
    whole weight, where the weight falls as 1 / m_i. totals: of the step; None: each sample is a rollout."""
    keeps = config.rejected_tokens == RejectedTokens.DROPPED and _is_of_one_document(config, totals)
    return replace(CorrectionSettings.of(config), keeps_sample_weight=keeps)


def divides_by_kept(config: PolicyLossConfig) -> bool:
    """Whether the gradient of the step is multiplied by T / K under rejected_tokens=dropped, with T its unmasked tokens and K those
    that the correction keeps: a weight of 1 / T, and no other term in the gradient."""
    is_dropped = config.rejected_tokens == RejectedTokens.DROPPED
    is_of_step = get_loss_aggregation(config.loss_aggregation).token_counts == OF_STEP_TOKENS
    return is_dropped and is_of_step and not other_terms(config)


def counts_kept_before(config: PolicyLossConfig, totals: StepTotals | None = None) -> bool:
    """Whether rejected_tokens=dropped needs the kept tokens of the step before its forward pass. totals: as in correction_of."""
    if config.rejected_tokens != RejectedTokens.DROPPED or divides_by_kept(config) or _is_of_one_document(config, totals):
        return False
    return get_loss_aggregation(config.loss_aggregation).token_counts != WITHOUT_TOKENS


def why_before(config: PolicyLossConfig) -> str:
    """Why counts_kept_before, as an end of a sentence."""
    if get_loss_aggregation(config.loss_aggregation).token_counts == OF_STEP_TOKENS:
        return f"because one factor on the whole gradient would multiply {' and '.join(other_terms(config))} too"
    others = "turns" if config.importance_ratio_unit == RatioUnit.TURN else "samples"
    return f"because its weights depend on what other {others} keep, which a second forward pass alone would know"


def other_choices(config: PolicyLossConfig, totals: StepTotals | None = None) -> str:
    """What to choose so that nothing is counted before the step, as an end of a sentence."""
    others = (replace(config, loss_aggregation=name) for name in ("sample_mean", "token_mean"))
    fitting = next((other.loss_aggregation for other in others if not counts_kept_before(other, totals)), None)
    return "--rejected-tokens counted" + ("" if fitting is None else f", or --loss-aggregation {fitting}")


def _is_of_one_document(config: PolicyLossConfig, totals: StepTotals | None) -> bool:
    """Whether the weight falls as 1 / m_i, and these tokens are one document of the loss: not a turn of them, and not one row of a
    rollout whose tokens share the weight, unless its rows are put together."""
    has_siblings = totals is not None and totals.num_rollouts not in (None, totals.num_samples)
    unit, counts = config.importance_ratio_unit, get_loss_aggregation(config.loss_aggregation).token_counts
    return counts == OF_SAMPLE_TOKENS and unit != RatioUnit.TURN and (unit == RatioUnit.ROLLOUT or not has_siblings)


def watches_kept(config: PolicyLossConfig) -> bool:
    """Whether somebody must know after the forward passes of a step how many tokens the correction keeps."""
    is_dropped = config.rejected_tokens == RejectedTokens.DROPPED and not counts_kept_before(config)
    return CorrectionSettings.of(config).is_on and (is_dropped or config.empty_step == EmptySteps.SKIP)


def other_terms(config: PolicyLossConfig) -> list[str]:
    """The settings that add a term to the gradient whose denominators count all unmasked tokens."""
    coefficients = {name: getattr(config, name) for name in ("kl_coefficient", "entropy_coefficient")}
    terms = [f"{name}={value:g}" for name, value in coefficients.items() if value]
    has_router_losses = config.router_aux_loss in (RouterAuxLoss.HOST, RouterAuxLoss.EXACT)
    return [*terms, *([f"router_aux_loss={config.router_aux_loss}"] if has_router_losses else [])]
