"""seq_mask_tis: mask by sample, weigh by token."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.config import CorrectionLevel
from megatron_rl.registries.corrections import LEVELS_OF_SAMPLES, CorrectionValue, register_correction


def own_ratio(ratios: Tensor) -> Tensor:  # [T]
    """w of the token, without bounds."""
    return ratios


@register_correction(
    "seq_mask_tis",
    levels=LEVELS_OF_SAMPLES,
    published_bounds={CorrectionLevel.SEQUENCE_MEAN: (0.999, 1.002)},  # NeMo-RL's recipe of ProRL v2.1
    weigh_tokens=own_ratio,
)
def seq_mask_tis(ratios: Tensor, low: float, high: float) -> CorrectionValue:
    """w of the token where the sample's w is inside the bounds, 0 in other samples.

    NeMo-RL's guide to ProRL v2, https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/prorlv2.md: seq-mask-tis.

        u_t = w_t 1[low <= w_i <= high]     w_t = old_prob_t / rollout_prob_t, w_i the geometric mean of the sample's w_t

    Use it when another engine samples long responses of a mixture of experts.
    """
    is_kept = (ratios >= low) & (ratios <= high)
    return CorrectionValue(is_kept.to(ratios.dtype), is_kept)
