"""none: the policy term as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.registries.corrections import register_correction


@register_correction("none", levels=(), required_bounds=())
def none(ratios: Tensor, low: float, high: float) -> Tensor:
    """1. Use it when trainer and sampler are one engine."""
    return torch.ones_like(ratios)
