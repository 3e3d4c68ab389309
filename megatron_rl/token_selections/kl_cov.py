"""kl_cov: the tokens that lower the entropy most are held near the old policy."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.registries.token_selections import Effect, register_token_selection


@register_token_selection("kl_cov", effect=Effect.PENALIZED)
def kl_cov(centred_log_probs: Tensor, centred_advantages: Tensor) -> Tensor:
    """Cov_t = (log_prob_t - its mean) (A_t - its mean); the largest ones have a KL penalty towards the old policy.

    Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617, KL-Cov: the
    share is 2e-4 or 2e-3, the coefficient of the penalty 1.

    Use it when the entropy falls early, and several steps train on a rollout.
    """
    return centred_log_probs * centred_advantages
