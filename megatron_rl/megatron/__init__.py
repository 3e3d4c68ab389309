"""Connects the package to Megatron-Core: models, attention, schedule, CPU support. It computes no loss and reads no flag."""

from __future__ import annotations

from megatron_rl.megatron.schedule import scale_for_schedule

__all__ = ["scale_for_schedule"]
