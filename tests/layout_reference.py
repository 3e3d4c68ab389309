"""The truth that layouts are held against, as the package ships it: one process, float64, Python loops, no code of the losses."""

from __future__ import annotations

from megatron_rl.testing.reference import (
    CLIPS,
    DIVISOR,
    log_probs_on_rank,
    old_log_probs_off_the_edges,
    ragged_samples,
    reference_on_rank,
    weights_by_hand,
)

__all__ = [
    "CLIPS",
    "DIVISOR",
    "log_probs_on_rank",
    "old_log_probs_off_the_edges",
    "ragged_samples",
    "reference_on_rank",
    "weights_by_hand",
]
