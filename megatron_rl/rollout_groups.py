"""Puts the samples of each rollout together. It imports no torch, because `train --help` does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class OfRollout(Protocol):
    """A sample of any trainer."""

    @property
    def rollout_id(self) -> int | str | None: ...  # None: the sample is a rollout


Sample = TypeVar("Sample", bound=OfRollout)


def rollouts_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each rollout, in the order of their first samples."""
    found: dict[object, list[Sample]] = {}
    for place, sample in enumerate(samples):
        found.setdefault((None, place) if sample.rollout_id is None else sample.rollout_id, []).append(sample)
    return list(found.values())
