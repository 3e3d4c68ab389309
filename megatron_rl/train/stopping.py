"""Decides when a run ends: a signal, the target. Ranks decide together, between rollouts; no rank stops alone."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from megatron_rl.layout.groups import all_reduce_max, group_device, world_group

# A shell's convention: 128 + the signal's number.
SIGNAL_EXIT_CODE = 128
# Rollouts that --target-reward averages over.
TARGET_REWARD_WINDOW = 5


class StopSignals:
    """Turns Ctrl-C and a scheduler's SIGTERM into a request: the run finishes its rollout, saves a checkpoint, and ends.

    A second Ctrl-C interrupts at once, as without this class.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


class StopRule:
    """Asks all ranks once a rollout. `reason` says why in words; `exit_code` is 0 unless a signal ended the run."""

    def __init__(self, signals: StopSignals, target_reward: float | None, recent_rewards: Iterable[float]):
        self.reason: str | None = None
        self.exit_code = 0
        self.recent_rewards: deque[float] = deque(recent_rewards, maxlen=TARGET_REWARD_WINDOW)
        self._signals, self._target_reward = signals, target_reward

    def should_stop(self, reward: float) -> bool:
        """After a rollout of mean reward `reward`. Communication: one all-reduce of a number over all ranks."""
        self.recent_rewards.append(reward)
        mean = sum(self.recent_rewards) / len(self.recent_rewards)
        is_mean_of_all = len(self.recent_rewards) == TARGET_REWARD_WINDOW
        world = world_group()
        received = int(all_reduce_max(torch.tensor(self._signals.received, device=group_device(world)), world))
        if received:
            self.reason = f"stopped by {signal.Signals(received).name}"
            self.exit_code = SIGNAL_EXIT_CODE + received
        elif self._target_reward is not None and is_mean_of_all and mean >= self._target_reward:
            self.reason = f"mean reward {mean:.3f} of the last {TARGET_REWARD_WINDOW} rollouts reached the target"
        return self.reason is not None
