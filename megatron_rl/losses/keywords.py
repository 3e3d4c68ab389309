"""The keyword arguments of the losses as dicts, for type checkers: `**keywords: Unpack[LogitsLossKeywords]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from torch import Tensor

from megatron_rl.config import CorrectionSettings
from megatron_rl.layout.groups import Group


class LossKeywords(TypedDict, total=False):
    """LossOptions as keywords."""

    clip_ratio_low: float | None
    clip_ratio_high: float | None
    loss_parameters: Mapping[str, float]
    temperature: float
    vocab_size: int | None
    token_counts: Tensor | None
    tp_group: Group | None
    cp_group: Group | None
    metrics: str
    backend: str
    advantages_per: str | None
    importance_weights: Tensor | None
    ref_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    correction: CorrectionSettings | None
    kl_coefficient: float
    kl_estimator: str
    entropy_coefficient: float
    regularizer_weights: Tensor | None
    check_ranks: bool | None


class LogitsLossKeywords(LossKeywords, total=False):
    inplace: bool
    loss_scale: Tensor | float | None


class LinearLossKeywords(LossKeywords, total=False):
    max_logits_bytes: int
    sequence_parallel: bool
    fp32_logits: bool
    scaled_exp: bool
    document_lengths: Sequence[int] | None
    loss_scale: Tensor | float | None
    return_log_probs: bool
