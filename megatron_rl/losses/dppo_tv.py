"""Defines DPPO with the total variation of a token's probability: a trust region of probabilities, not of ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.declare import LossValue, register_policy_loss
from megatron_rl.losses.divergence import divergence_parameters, masked_reinforce, probabilities


@register_policy_loss(
    "dppo_tv",
    level="token",
    triton="megatron_rl.losses.divergence_triton.dppo_tv",
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
    bounds are from appendix C.1. The ratio is bounded to e^+-20 before it is truncated.
    Use it when sampler and trainer differ: the paper shows that the ratio of a small probability is mostly noise.
    """
    pi, mu = probabilities(log_ratio, log_probs)
    is_inside = torch.where(advantages > 0, pi - mu <= divergence_high, pi - mu >= -divergence_low)
    return masked_reinforce(log_ratio, advantages, log_probs, is_inside, ratio_truncation)
