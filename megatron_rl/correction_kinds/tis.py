"""tis: truncated importance sampling."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.config import CorrectionLevel
from megatron_rl.registries.corrections import CorrectionValue, register_correction


@register_correction(
    "tis",
    published_bounds={CorrectionLevel.TOKEN: (0.0, 2.0)},  # the default of verl, miles and slime
    required_bounds=("high",),
)
def tis(ratios: Tensor, low: float, high: float) -> CorrectionValue:
    """w, clamped to the bounds.

    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.

    Use it when another engine samples, above all in a lower precision.
    """
    return CorrectionValue(ratios.clamp(low, high))
