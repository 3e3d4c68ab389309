"""Losses of a user's own, one of each kind; named as `own_losses.reinforce` on a launch line. They do not know each other."""

from __future__ import annotations

import math

import torch

from megatron_rl import (
    KLValue,
    LossValue,
    Parameter,
    bounded_exp,
    register_correction,
    register_kl_estimator,
    register_loss_aggregation,
    register_policy_loss,
)

SCALE = Parameter("scale", default=1.0, minimum=0.0, maximum=2.0, help="multiplies the weight, 1 is 100 %")


def reinforce(log_ratio, advantages, log_probs, *, scale):
    """Of a token's log-probability, or of a sample's mean: the derivative is left to autograd."""
    return -scale * advantages * log_probs * (1 + log_ratio.square())


def bounded_log_ratio(log_ratio, advantages, *, clip_ratio_low, clip_ratio_high):
    return log_ratio.clamp(-clip_ratio_low, clip_ratio_high)


def gmpo(log_ratio, advantages, *, clip_ratio_low, clip_ratio_high):
    """The geometric mean of a sample's bounded ratios. Without a clip by the advantage's sign, for short."""
    return -log_ratio.exp() * advantages


def centred_on_the_sample(log_ratio, advantages, log_probs, *, mean_log_ratio):
    """At level "token" with what the package knows of the whole sample: a token apart from the others weighs more."""
    return -(1 + (log_ratio - mean_log_ratio).square()).detach() * advantages * log_probs


def truncated(log_ratio, advantages, log_probs, *, rollout_log_probs, ratio_cap, scale):
    """REINFORCE with a truncated importance weight against the engine that sampled."""
    weight = scale * bounded_exp(log_probs - rollout_log_probs).clamp(max=ratio_cap).detach()
    return LossValue(-weight * advantages * log_probs, derivative=-weight * advantages, is_clipped=weight == scale * ratio_cap)


def heeding(log_ratio, advantages, log_probs, *, token_counts, entropy):
    """The weight reads what the package computes: a sample's tokens and a token's entropy."""
    weight = (1 + 0.1 * token_counts) * entropy
    return -weight * advantages * log_probs  # autograd's derivative is by log_probs, and not by the entropy


def anchored(log_ratio, advantages):
    """The ratio to the engine that sampled, without a clip."""
    return -bounded_exp(log_ratio) * advantages


def detached(log_ratio, advantages):
    """Wrong: nothing trains."""
    return -bounded_exp(log_ratio.detach()) * advantages


def centred(log_ratio, advantages):
    """Wrong at level "token": a mean over what is together."""
    return -(bounded_exp(log_ratio) - log_ratio.mean().square()) * advantages


def unbounded(log_ratio, advantages):
    """Its derivative grows with the square of the ratio, and knows no bound."""
    ratio = bounded_exp(log_ratio)
    value = -advantages * ratio + advantages.abs() * (ratio - 1) ** 2
    return LossValue(value, (-advantages + 2 * advantages.abs() * (ratio - 1)) * ratio)


def overflowing(log_ratio, advantages):
    return LossValue(torch.where(log_ratio > 100, math.inf, -advantages * log_ratio), derivative=-advantages)


def jeffreys(log_probs, ref_log_probs):
    """A KL estimator: half the symmetric divergence."""
    difference = log_probs - ref_log_probs
    return difference * (1 - bounded_exp(-difference)) / 2


def negated(log_probs, ref_log_probs):
    """A KL estimator whose derivative has another sign."""
    difference = log_probs - ref_log_probs
    return KLValue(difference.square() / 2, -difference)


def centred_kl(log_probs, ref_log_probs, log_ratio):
    """A KL estimator that is wrong: a mean over what is together."""
    return log_probs - log_probs.mean()


def root(ratios, low, high):
    """A correction: the root of a bounded ratio."""
    return ratios.clamp(low, high).sqrt()


def normalised(ratios, low, high):
    """A correction that is wrong on every layout: a mean over what is together."""
    return ratios.clamp(low, high) / ratios.clamp(low, high).mean()


def odd(token_counts, totals, *, prompt_token_counts, divisor):
    """An aggregation without a formula."""
    return 1 / (totals.num_samples * (token_counts + 10))


def of_the_call(token_counts, totals, *, prompt_token_counts, divisor):
    """An aggregation that is wrong: it counts a micro-batch."""
    return torch.full_like(token_counts, 1 / len(token_counts))


def declare() -> None:
    """Registers all of them. What a test registers is gone after it, and a module is imported once: to be called by the test,
    which imports this module itself, so that no table of what is registered meets these losses."""
    register_policy_loss("own_reinforce", parameters=(SCALE,))(reinforce)
    register_policy_loss("own_reinforce_of_samples", "sequence", parameters=(SCALE,))(reinforce)
    computed = {"needs": ("token_counts", "entropy")}
    register_policy_loss("own_heeding", triton="triton_code.heeding", **computed)(heeding)
    register_policy_loss("own_heeding_of_samples", "sequence", triton="triton_code.heeding", **computed)(heeding)
    register_policy_loss("own_anchored", anchor="rollout")(anchored)
    for level in ("token", "sequence"):
        register_policy_loss(f"own_unbounded_{level}", level, triton="triton_code.unbounded")(unbounded)
    register_policy_loss("own_overflowing", triton="triton_code.overflowing")(overflowing)
    register_policy_loss("own_detached")(detached)
    register_policy_loss("own_centred")(centred)
    register_policy_loss("own_gmpo", "sequence", clip_ratios=(0.4, 0.4), token_clip=bounded_log_ratio)(gmpo)
    register_policy_loss("own_centred_on_the_sample", needs=("mean_log_ratio",))(centred_on_the_sample)
    register_policy_loss(
        "own_truncated",
        triton="triton_code.truncated",
        needs=("rollout_log_probs",),
        parameters=(
            Parameter("ratio_cap", default=1.1, minimum=1.0, help="The largest weight of a token."),
            SCALE,
        ),
    )(truncated)
    register_kl_estimator("own_jeffreys")(jeffreys)
    register_kl_estimator("own_negated")(negated)
    register_kl_estimator("own_centred_kl")(centred_kl)
    register_correction("own_normalised")(normalised)
    register_correction("own_root")(root)
    register_loss_aggregation("own_odd")(odd)
    register_loss_aggregation("own_of_the_call", needs=("num_samples",))(of_the_call)
    # Formulas: one that needs no more than the hosts give, one of prompts, one of m_i.
    global sums, of_groups, square_root
    sums = register_loss_aggregation("own_sums", formula="1 / N", source="token sums, averaged over samples")
    of_groups = register_loss_aggregation("own_of_groups", formula="m_i / (N M_g)")
    square_root = register_loss_aggregation("own_square_root", formula="1 / (N m_i^0.5)")


declare()
