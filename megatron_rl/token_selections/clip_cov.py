"""clip_cov: some tokens that lower the entropy are not trained."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.registries.token_selections import Effect, Taken, register_token_selection


@register_token_selection("clip_cov", effect=Effect.LEFT_OUT, taken=Taken.RANDOM, bounds=(1.0, 5.0))
def clip_cov(centred_log_probs: Tensor, centred_advantages: Tensor) -> Tensor:
    """Cov_t = (log_prob_t - its mean) (A_t - its mean); random ones of 1 to 5 are left out.

    Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617, Clip-Cov: the
    share is 2e-4.

    Use it when the entropy falls early, and no term is to be added to the loss.
    """
    return centred_log_probs * centred_advantages
