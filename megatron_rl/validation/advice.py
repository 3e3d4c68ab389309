"""Warns of valid settings that rarely do what they seem to do. A warning does not stop a launch; a rule does."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_rl.config import SEQUENCE_CLIP_RATIO_WARNING, CorrectionLevel, Distillation, PolicyLossConfig
from megatron_rl.declare import clip_of, get_policy_loss
from megatron_rl.validation.weight_words import mean_strength_of, samples_of_mean_1, strength_of
from megatron_rl.weights import get_loss_aggregation


def clip_of_a_mean_clips(config: PolicyLossConfig) -> Iterator[str]:
    loss, clip = get_policy_loss(config.policy_loss), clip_of(config)
    if loss.clips_means and clip is not None and max(clip) > SEQUENCE_CLIP_RATIO_WARNING:
        yield (
            f"clip_ratio_low={clip[0]:g}, clip_ratio_high={clip[1]:g} with policy_loss={config.policy_loss} will hardly ever clip "
            "on long responses: the ratio is a geometric mean over the sample, which does not move by "
            f"{SEQUENCE_CLIP_RATIO_WARNING:g} there; unset flags give the loss's own values"
        )


def product_of_ratios_stays_in_bounds(config: PolicyLossConfig) -> Iterator[str]:
    if config.importance_correction_level == CorrectionLevel.SEQUENCE_SUM:
        yield (
            "importance_correction_level=sequence_sum multiplies the ratios of all tokens of a sample: over thousands of tokens "
            "the product leaves most bounds; choose sequence_mean"
        )


def coefficients_keep_their_strength(config: PolicyLossConfig) -> Iterator[str]:
    """One warning for both terms. Against the policy term they are 1 / (N W_i) times as strong, W_i the sum of i's weights."""
    given = [name for name in ("kl_coefficient", "entropy_coefficient") if getattr(config, name) != 0]
    record = get_loss_aggregation(config.loss_aggregation)
    strength, samples = strength_of(record), samples_of_mean_1(record)
    if not given or (strength is not None and not strength.powers):
        return
    if mean_strength_of(record) is not None:
        divisor = f"{config.loss_aggregation_divisor:g}" if record.takes_divisor else "1"
        change = f"about {divisor} / (mean tokens of a sample) times as strong as under sample_mean; for the strength that a "
        change += f"coefficient b has there, type b x (mean tokens of a sample) / {divisor}"
    elif samples is not None:
        change = (
            f"stronger in a short sample and weaker in a long one, by (mean tokens of {samples}) / (tokens of the sample): "
            "no coefficient undoes it; sample_mean does. Over the step they are as strong as there"
        )
    else:
        change = "1 / (the sum of its weights over the step) times as strong as under sample_mean; for the strength that a "
        change += "coefficient b has there, type b x that sum"
    settings = ", ".join(f"{name}={getattr(config, name):g}" for name in given)
    yield (
        f"{settings} with loss_aggregation={config.loss_aggregation}: KL and entropy stay averaged over samples. So beside the "
        f"policy term they are {change}"
    )


WARNINGS = (clip_of_a_mean_clips, product_of_ratios_stays_in_bounds, coefficients_keep_their_strength)


def numbers_in_words(config: PolicyLossConfig) -> str:
    """The clip, the parameters of the loss that are not off and a teacher, for start lines, as in `clip 0.2/0.2, ratio_cap 3`."""
    clip, loss = clip_of(config), get_policy_loss(config.policy_loss)
    values = loss.resolve_parameters(config.loss_parameters)
    # A loss of a user's own may clip by bounds of its own.
    clip_words = "no clip bounds" if clip is None else f"clip {clip[0]:g}/{clip[1]:g}"
    words = [clip_words, *(f"{name} {value:g}" for name, value in values.items() if math.isfinite(value))]
    if config.distillation != Distillation.NONE:
        beta = f" with beta {config.distillation_beta:g}" if config.distillation_divergence == "jsd" else ""
        term = f"{config.distillation_coefficient:g} x {config.distillation_divergence}{beta}"
        words.append(f"distillation {term}, {config.distillation}")
    return ", ".join(words)
