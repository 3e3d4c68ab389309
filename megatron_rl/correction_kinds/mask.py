"""mask: what has a ratio outside the bounds is dropped, and the rest has no factor."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.registries.corrections import CorrectionValue, register_correction


@register_correction("mask")
def mask(ratios: Tensor, low: float, high: float) -> CorrectionValue:
    """1 inside the bounds, 0 outside.

    SkyRL's measurement, https://github.com/NovaSky-AI/SkyRL/pull/1665.

    Use it when rollouts are a step or more old, at level sequence_mean.
    """
    is_kept = (ratios >= low) & (ratios <= high)
    return CorrectionValue(is_kept.to(ratios.dtype), is_kept)
