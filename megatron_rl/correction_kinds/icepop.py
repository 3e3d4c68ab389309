"""icepop: what has a ratio outside the bounds is dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config import CorrectionLevel
from megatron_rl.registries.corrections import CorrectionValue, register_correction


@register_correction(
    "icepop",
    published_bounds={CorrectionLevel.TOKEN: (0.5, 5.0)},  # Ring-1T
)
def icepop(ratios: Tensor, low: float, high: float) -> CorrectionValue:
    """w inside the bounds, 0 outside.

    Ring-1T, arXiv:2510.18855.

    Use it when a few tokens of a mixture of experts differ very much.
    """
    is_kept = (ratios >= low) & (ratios <= high)
    return CorrectionValue(torch.where(is_kept, ratios, 0.0), is_kept)
