"""Defines DPPO with the KL divergence of a token's probability: a trust region of probabilities, not of ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.declare import LossValue, register_policy_loss
from megatron_rl.losses.divergence import divergence_parameters, masked_reinforce, probabilities

# 1 - pi and 1 - mu are at least this: in float32 the difference from 1 has no more digits, and its logarithm must be finite.
SMALLEST_REST = 1e-8


@register_policy_loss(
    "dppo_kl",
    level="token",
    triton="megatron_rl.losses.divergence_triton.dppo_kl",
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

        pi_t = exp(log_probs_t)     mu_t = exp(log_probs_t - log_ratio_t)     w_t = min(pi_t / mu_t, ratio_truncation), a constant
        kl_t = mu_t log(mu_t / pi_t) + (1 - mu_t) log((1 - mu_t) / (1 - pi_t))
        value_t = -w_t A_t log_probs_t     where pi_t <= mu_t or kl_t <= divergence_high   (A_t > 0)
                                              or pi_t >= mu_t or kl_t <= divergence_low    (A_t < 0),     else 0

    Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879, the binary approximation (sampled
    token against all others) of KL(mu, pi), with a truncated ratio. The objective (equation 12) has no truncation, and its
    value is -w_t A_t without log_probs_t; below the truncation the gradient is the same. 20 is the fallback of verl's function; the
    bounds are from appendix C.1. The ratio is bounded to e^+-20 before it is truncated.
    Use it when sampler and trainer differ: the paper shows that the ratio of a small probability is mostly noise.
    """
    pi, mu = probabilities(log_ratio, log_probs)
    rests = [(1 - probability).clamp(min=SMALLEST_REST) for probability in (pi, mu)]
    divergence = rests[1] * (rests[1] / rests[0]).log() - mu * log_ratio.detach()
    is_inside = torch.where(
        advantages > 0,
        (log_ratio <= 0) | (divergence <= divergence_high),
        (log_ratio >= 0) | (divergence <= divergence_low),
    )
    return masked_reinforce(log_ratio, advantages, log_probs, is_inside, ratio_truncation)
