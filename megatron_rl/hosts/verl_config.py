"""What verl makes by `actor_rollout_ref.actor.policy_loss._target_=megatron_rl.hosts.verl_config.PolicyLoss`."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig


@dataclass
class PolicyLoss(PolicyLossConfig):
    """verl's own, with fields for the settings of our losses that verl has no name for. None: the default of ours."""

    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    importance_correction: str | None = None
    importance_correction_level: str | None = None
    importance_correction_low: float | None = None
    importance_correction_high: float | None = None
    off_policy_sequence_delta: float | None = None
    divergence_low: float | None = None
    divergence_high: float | None = None
    ratio_truncation: float | None = None
