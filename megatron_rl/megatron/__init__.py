"""The seam to Megatron-Core: models, attention, schedule, CPU support. Never computes a loss, never reads a flag."""

from __future__ import annotations

from megatron_rl.megatron.schedule import scale_for_schedule

__all__ = ["scale_for_schedule"]
