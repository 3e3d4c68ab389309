"""What dppo_tv.py and dppo_kl.py share: probabilities, parameters, and REINFORCE on the tokens inside a divergence bound."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.declare import LossValue, Parameter
from megatron_rl.ops.ratios import bounded_exp


def divergence_parameters(bound: float, divergence: str) -> tuple[Parameter, Parameter, Parameter]:
    """divergence_low, divergence_high and ratio_truncation; bound: the default of the first two."""
    return (
        Parameter(
            "divergence_low",
            default=bound,
            minimum=0.0,
            help=f"a token with A < 0 whose probability fell by more than this {divergence} has no gradient",
        ),
        Parameter(
            "divergence_high",
            default=bound,
            minimum=0.0,
            help=f"a token with A > 0 whose probability rose by more than this {divergence} has no gradient",
        ),
        Parameter(
            "ratio_truncation", default=20.0, minimum=0.0, is_above_minimum=True, help="the largest importance ratio of a token"
        ),
    )


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
    """value_t = -min(rho_t, ratio_truncation) A_t log_probs_t with a constant ratio where is_inside, else 0."""
    weight = bounded_exp(log_ratio).clamp(max=ratio_truncation).detach() * is_inside
    return LossValue(-weight * advantages * log_probs, derivative=-weight * advantages, is_clipped=~is_inside & (advantages != 0))
