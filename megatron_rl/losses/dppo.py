"""Defines DPPO: a trust region of probabilities, not of ratios, by total variation or KL divergence of a token's probability."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.declare import LossValue, Parameter, bounded_exp, register_policy_loss

# 1 - pi and 1 - mu are at least this: in float32 the difference from 1 has no more digits, and its logarithm must be finite.
SMALLEST_REST = 1e-8


def divergence_parameters(bound: float, divergence: str) -> tuple[Parameter, Parameter, Parameter]:
    """divergence_low, divergence_high and ratio_truncation; bound: the default of the first two."""
    moved = f"by more than this {divergence} has no gradient"
    return (
        Parameter("divergence_low", default=bound, minimum=0.0, help=f"a token with A < 0 whose probability fell {moved}"),
        Parameter("divergence_high", default=bound, minimum=0.0, help=f"a token with A > 0 whose probability rose {moved}"),
        Parameter(
            "ratio_truncation", default=20.0, minimum=0.0, is_above_minimum=True, help="the largest importance ratio of a token"
        ),
    )


@register_policy_loss(
    "dppo_tv",
    triton="megatron_rl.losses.dppo_triton.dppo_tv",
    parameters=divergence_parameters(0.15, "total variation"),
    anchor="rollout",
)
def dppo_tv(
    log_ratio: Tensor,  # [T] log_probs_t - rollout_log_probs_t
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
    *,
    divergence_low: float,
    divergence_high: float,
    ratio_truncation: float,
) -> LossValue:  # [T]
    """Trains a token until its probability has moved by the bound from the sampler's.

        pi_t = exp(log_probs_t)     mu_t = exp(log_probs_t - log_ratio_t)     w_t = min(pi_t / mu_t, ratio_truncation), a constant
        value_t = -w_t A_t log_probs_t     where pi_t - mu_t <= divergence_high   (A_t > 0)
                                              or pi_t - mu_t >= -divergence_low   (A_t < 0),     else 0

    Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879, the binary approximation (sampled
    token against all others) of total variation, with a truncated ratio. The objective (equation 12) has no truncation, and its
    value is -w_t A_t without log_probs_t; below the truncation the gradient is the same. 20 is the fallback of verl's function; the
    bounds are from appendix C.1. The paper sums over the tokens of a response: that is the aggregation `constant`. The ratio is
    bounded to e^+-20 before it is truncated.
    Use it when sampler and trainer differ: the paper shows that the ratio of a small probability is mostly noise.
    """
    pi, mu = probabilities(log_ratio, log_probs)
    is_inside = torch.where(advantages > 0, pi - mu <= divergence_high, pi - mu >= -divergence_low)
    return masked_reinforce(log_ratio, advantages, log_probs, is_inside, ratio_truncation)


@register_policy_loss(
    "dppo_kl",
    triton="megatron_rl.losses.dppo_triton.dppo_kl",
    parameters=divergence_parameters(0.05, "KL divergence"),
    anchor="rollout",
)
def dppo_kl(
    log_ratio: Tensor,  # [T] log_probs_t - rollout_log_probs_t
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
    *,
    divergence_low: float,
    divergence_high: float,
    ratio_truncation: float,
) -> LossValue:  # [T]
    """Trains a token until the KL divergence of its probability from the sampler's has reached the bound.

        kl_t = mu_t log(mu_t / pi_t) + (1 - mu_t) log((1 - mu_t) / (1 - pi_t))
        value_t = -w_t A_t log_probs_t     where pi_t <= mu_t or kl_t <= divergence_high   (A_t > 0)
                                              or pi_t >= mu_t or kl_t <= divergence_low    (A_t < 0),     else 0

    Qi et al., arXiv:2602.04879, as dppo_tv, of KL(mu, pi).
    Use it when sampler and trainer differ: the paper shows that the ratio of a small probability is mostly noise.
    """
    pi, mu = probabilities(log_ratio, log_probs)
    rest_of_pi, rest_of_mu = ((1 - probability).clamp(min=SMALLEST_REST) for probability in (pi, mu))
    divergence = rest_of_mu * (rest_of_mu / rest_of_pi).log() - mu * log_ratio.detach()
    is_inside = torch.where(
        advantages > 0,
        (log_ratio <= 0) | (divergence <= divergence_high),
        (log_ratio >= 0) | (divergence <= divergence_low),
    )
    return masked_reinforce(log_ratio, advantages, log_probs, is_inside, ratio_truncation)


def probabilities(log_ratio: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:  # [T] each
    """(pi, mu): of the policy and of the sampler, whose log-probability is log_probs - log_ratio; at most 1."""
    return log_probs.detach().exp(), (log_probs - log_ratio).detach().clamp(max=0.0).exp()


def masked_reinforce(
    log_ratio: Tensor,  # [T] log pi - log mu
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
    is_inside: Tensor,  # [T] bool
    ratio_truncation: float,
) -> LossValue:  # [T]
    """REINFORCE with a constant ratio where is_inside, else 0."""
    weight = bounded_exp(log_ratio).clamp(max=ratio_truncation).detach() * is_inside
    return LossValue(-weight * advantages * log_probs, derivative=-weight * advantages, is_clipped=~is_inside & (advantages != 0))
