"""none: every token is trained alike."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.registries.token_selections import Effect, register_token_selection


@register_token_selection("none", effect=Effect.NOTHING)
def none(advantages: Tensor) -> Tensor:
    """No token is selected."""
    return advantages
