"""A setting as a host gives it: whether somebody chose it, whether it is a number, and which clip acts.

One rule for the clip in every host. What is typed wins, even where it equals the host's default. Where only merged settings are
known, both sides at the host's default are nobody's choice, and the loss has its own clip; one side at the default beside a chosen
one may be either, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_rl.loss_hub import PolicyLoss


class Given(NamedTuple):
    """A setting of the trainer that our loss reads."""

    name: str  # as it is typed
    value: Any
    default: Any = None
    is_typed: bool | None = None  # on the launch line; None: not known here

    @property
    def is_chosen(self) -> bool:
        return self.value is not None and (self.is_typed is True or self.value != self.default)


def not_numbers(settings: Iterable[Given]) -> Iterator[str]:
    """A problem for each number that is true or false: Python counts them as 1 and 0."""
    for one in settings:
        if isinstance(one.value, bool):
            yield f"{one.name}={str(one.value).lower()} is a switch, and must be a number: type the number, or remove it"


def acting_clip(
    loss: PolicyLoss,
    low: Given,
    high: Given,
    keep: str,  # how to type a value that is the host's default; {side}, {name} and {value} are filled in
) -> tuple[tuple[Any, Any], list[str]]:
    """((low, high), problems); None: the loss's own. A loss without a clip has (None, None)."""
    if loss.clip_ratios is None or not (low.is_chosen or high.is_chosen):
        return (None, None), []
    problems = []
    for side, one, other, own in (("low", low, high, loss.clip_ratios[0]), ("high", high, low, loss.clip_ratios[1])):
        if one.is_chosen or one.value is None or one.value == own or one.is_typed is not None:
            continue
        problems.append(
            f"{one.name}={one.value} beside {other.name}={other.value}: {one.value} is the host's default, so it is not known "
            f"whether you chose it, and {loss.name} has {own:g} of its own; type {one.name}={own:g} for that, or "
            f"{keep.format(side=side, name=one.name, value=one.value)} for {one.value}"
        )
    return (low.value if low.is_chosen else None, high.value if high.is_chosen else None), problems


def clip_to_type(
    loss: PolicyLoss, low: float | None, high: float | None, defaults: Mapping[str, float]
) -> dict[str, float]:  # by the host's names
    """What to type for this clip: nothing for the loss's own; else each side that the host's default would leave open."""
    if (low is None and high is None) or loss.clip_ratios is None:
        return {name: value for name, value in zip(defaults, (low, high), strict=True) if value is not None}
    sides = zip(defaults.items(), (low, high), loss.clip_ratios, strict=True)
    pairs = [(name, own if value is None else value, value is not None or own != default) for (name, default), value, own in sides]
    return {name: value for name, value, is_needed in pairs if is_needed}
