"""The settings of a correction for the gap between sampler and trainer, and what can be wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from megatron_rl.config import LARGEST_RATIO, NO_CORRECTION, CorrectionLevel, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.registries.corrections import get_correction

_EXAMPLES: dict[str, str] = {
    CorrectionLevel.TOKEN: "a first try is [0.5, 2]",
    CorrectionLevel.SEQUENCE_MEAN: "a first try is [0.99, 1.01], because the mean over a sample moves little",
    CorrectionLevel.SEQUENCE_SUM: "a first try is [0.1, 10]; the sum over thousands of tokens leaves most bounds",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSettings:
    """How a loss corrects for the gap between the policy that sampled and the one that the trainer calls old.

    w is the ratio of old to rollout probability: of the token, or by level of the sample. kind: a registered correction, or
    module.function; it makes the factor of a token's part of the loss from w and the bounds [low, high].
    sequence_delta: besides, samples of negative advantage whose mean log(rollout / trained probability) exceeds it are dropped
    (OPSM, DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Bounds are inclusive. Weights are constants for the gradient.

    >>> CorrectionSettings(kind="tis").bounds
    (0.0, 2.0)
    >>> CorrectionSettings(kind="mask", level="sequence_mean", low=0.99, high=1.01).bounds
    (0.99, 1.01)
    """

    kind: str = NO_CORRECTION
    level: str = CorrectionLevel.TOKEN
    low: float | None = None
    high: float | None = None
    sequence_delta: float | None = None

    @classmethod
    def of(cls, config: PolicyLossConfig) -> CorrectionSettings:
        return cls(
            kind=config.importance_correction,
            level=config.importance_correction_level,
            low=config.importance_correction_low,
            high=config.importance_correction_high,
            sequence_delta=config.off_policy_sequence_delta,
        )

    @property
    def has_factor(self) -> bool:
        """Whether a correction makes a factor from w."""
        return self.kind != NO_CORRECTION

    @property
    def is_on(self) -> bool:
        return self.has_factor or self.sequence_delta is not None

    @property
    def is_of_current_policy(self) -> bool:
        """Whether the criterion reads the policy in training, so that nobody knows before the forward pass what it drops."""
        return self.sequence_delta is not None

    @property
    def needs_sums(self) -> bool:
        """Whether a criterion or a weight is made from a sum over the sample, which context-parallel ranks add up."""
        return self.sequence_delta is not None or self.is_of_sequence

    @property
    def is_of_sequence(self) -> bool:
        return self.has_factor and self.level != CorrectionLevel.TOKEN

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) of w. Call it where `problems` finds none."""
        low, high = get_correction(self.kind).published_bounds.get(self.level, (0.0, math.inf))
        return (low if self.low is None else self.low, high if self.high is None else self.high)

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings, each with its remedy. A field may hold a value of any type."""
        try:
            declared = get_correction(self.kind)
        except ConfigError as error:
            yield f"importance_correction={self.kind!r}: {error}"
            return
        if self.level not in tuple(CorrectionLevel):
            yield f"importance_correction_level={self.level!r} is not one of {', '.join(CorrectionLevel)}"
            return
        given = {"importance_correction_low": self.low, "importance_correction_high": self.high}
        wrong = [name for name, value in given.items() if value is not None and not _is_ratio(value)]
        for name in wrong:
            yield (
                f"{name}={given[name]!r} must be a finite number at or above 0: it bounds a ratio of probabilities, which is 1 "
                "where sampler and trainer agree"
            )
        if self.sequence_delta is not None and not _is_ratio(self.sequence_delta):
            yield (
                f"off_policy_sequence_delta={self.sequence_delta!r} must be a finite number at or above 0, in nats per token; "
                "leave it out to drop no sample"
            )
        if not self.has_factor:
            settings = {**given, "importance_correction_level": None if self.level == CorrectionLevel.TOKEN else self.level}
            for name, value in settings.items():
                if value is not None:
                    yield f"{name}={value} has no effect without a correction: remove it, or choose --importance-correction"
            return
        if self.level not in declared.levels:
            levels = " or ".join(f"--importance-correction-level {level}" for level in declared.levels)
            yield f"importance_correction={self.kind} does not act at level {self.level}: choose {levels}"
            return
        if wrong:
            return
        required = [f"importance_correction_{bound}" for bound in declared.required_bounds]
        needed = [name for name, value in given.items() if value is None and name in required]
        if needed and self.level not in declared.published_bounds:
            flags = " and ".join("--" + name.replace("_", "-") for name in needed)
            yield (
                f"importance_correction={self.kind} at level {self.level} needs {flags}: recipes do not agree on a value; "
                + _EXAMPLES[self.level]
            )
            return
        low, high = self.bounds
        if low > high:
            yield f"importance_correction_low={low:g} is above importance_correction_high={high:g}: no ratio lies between them"
        elif high == 0:
            yield "importance_correction_high=0 leaves no token a weight: give a bound above 0"
        elif high > LARGEST_RATIO or 0 < low < 1 / LARGEST_RATIO:
            yield (
                f"importance_correction bounds [{low:g}, {high:g}] lie outside of e^-20 to e^20, at which ratios are bounded "
                "before they are compared: take narrower ones, or 0 for no lower bound"
            )
        elif not low <= 1 <= high:
            yield (
                f"importance_correction bounds [{low:g}, {high:g}] do not hold 1, the ratio where sampler and trainer agree: they "
                "are ratios and not distances from 1"
            )


def counted_twice(kind: str, policy_loss: str, setting: str | None = None) -> str:
    """The refusal of a correction for a loss whose ratio compares with the sampler already. setting: the host's, if it is one."""
    given, remedy = setting or f"importance_correction={kind}", "turn it off" if setting else "remove --importance-correction"
    return (
        f"{given} with policy loss {policy_loss!r}: the ratio of this loss is to the rollout probability already, and the "
        f"correction would be counted twice; {remedy}, or choose a loss whose ratio is to old_log_probs"
    )


def _is_ratio(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
