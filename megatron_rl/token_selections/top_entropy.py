"""top_entropy: only tokens at which the policy is uncertain are trained."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.registries.token_selections import Effect, register_token_selection


@register_token_selection("top_entropy", effect=Effect.TRAINED_ALONE)
def top_entropy(entropy: Tensor) -> Tensor:
    """The entropy of the policy at the token; the largest ones are trained alone.

    Wang et al., "Beyond the 80/20 Rule", arXiv:2506.01939: the share is 0.2.

    Use it when long reasoning is trained, where most tokens only complete what others have begun.
    """
    return entropy
