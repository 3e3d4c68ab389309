"""The Triton versions of dppo.py."""

from __future__ import annotations

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from megatron_rl.losses import dppo
from megatron_rl.ops.loss_triton import bounded, bounded_exp

SMALLEST_REST = tl.constexpr(dppo.SMALLEST_REST)


@triton.jit
def dppo_tv(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters):
    divergence_low, divergence_high, ratio_truncation = parameters
    difference = tl.exp(log_probs) - _sampler_probability(log_ratio, log_probs)
    is_inside = ((advantages > 0) & (difference <= divergence_high)) | ((advantages <= 0) & (difference >= -divergence_low))
    return _masked_reinforce(log_ratio, advantages, log_probs, is_inside, ratio_truncation)


@triton.jit
def dppo_kl(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio, vectors, parameters):
    divergence_low, divergence_high, ratio_truncation = parameters
    mu = _sampler_probability(log_ratio, log_probs)
    rest_of_pi, rest_of_mu = _rest(tl.exp(log_probs)), _rest(mu)
    divergence = rest_of_mu * tl.log(rest_of_mu / rest_of_pi) - mu * log_ratio
    is_inside = ((advantages > 0) & ((log_ratio <= 0) | (divergence <= divergence_high))) | (
        (advantages <= 0) & ((log_ratio >= 0) | (divergence <= divergence_low))
    )
    return _masked_reinforce(log_ratio, advantages, log_probs, is_inside, ratio_truncation)


@triton.jit
def _sampler_probability(log_ratio, log_probs):
    log_mu = log_probs - log_ratio
    return tl.exp(tl.where(log_mu > 0, 0.0, log_mu))


@triton.jit
def _rest(probability):
    rest = 1 - probability
    return tl.where(rest < SMALLEST_REST, SMALLEST_REST, rest)


@triton.jit
def _masked_reinforce(log_ratio, advantages, log_probs, is_inside, ratio_truncation):
    weight = tl.where(is_inside, bounded(bounded_exp(log_ratio), 0.0, ratio_truncation), 0.0)
    return -weight * advantages * log_probs, -weight * advantages, (is_inside == 0) & (advantages != 0)
