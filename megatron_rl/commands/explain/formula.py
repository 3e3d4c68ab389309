"""Products of powers of named counts, to be read and to be evaluated: 1/(N m_i). It must never know what a name means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Symbols = dict[str, Tensor]  # 0-d or [S], float64


class Formula:
    """Formula(N=-1, m_i=-1) is 1/(N m_i). Powers are whole numbers."""

    def __init__(self, powers: Mapping[str, int] | None = None, /, **named: int):
        self.powers = {name: power for name, power in {**(powers or {}), **named}.items() if power}

    def __mul__(self, other: Formula) -> Formula:
        names = [*self.powers, *(name for name in other.powers if name not in self.powers)]
        return Formula({name: self.powers.get(name, 0) + other.powers.get(name, 0) for name in names})

    def __truediv__(self, other: Formula) -> Formula:
        return self * Formula({name: -power for name, power in other.powers.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.powers == other.powers

    def __hash__(self) -> int:
        return hash(frozenset(self.powers.items()))

    def __str__(self) -> str:
        return self.with_numbers({})

    def with_numbers(self, known: Mapping[str, float]) -> str:
        """The names that have a number multiplied out: M dp cp/N with M, dp and cp known is 256/N."""
        number = math.prod(known[name] ** power for name, power in self.powers.items() if name in known)
        # Counts of the step, which have capital letters, before those of a sample and sizes of groups.
        powers = sorted(self.powers.items(), key=lambda item: "_" in item[0] or item[0].islower())
        above = [_power(name, power) for name, power in powers if power > 0 and name not in known]
        below = [_power(name, -power) for name, power in powers if power < 0 and name not in known]
        if number != 1 or not above:
            above.insert(0, f"{number:.4g}")
        if not below:
            return " ".join(above)
        divisor = below[0] if len(below) == 1 else f"({' '.join(below)})"
        return f"{' '.join(above)}/{divisor}"

    def evaluate(self, symbols: Symbols) -> Tensor:  # 0-d or [S]
        value = torch.ones((), dtype=torch.float64)
        for name, power in self.powers.items():
            value = value * symbols[name] ** power
        return value

    def shares_a_power_with(self, other: Formula) -> bool:
        """Whether a name stands above the line in both, or below it in both."""
        return any(power * other.powers.get(name, 0) > 0 for name, power in self.powers.items())


def product(formulas: Iterable[Formula]) -> Formula:
    result = Formula()
    for formula in formulas:
        result = result * formula
    return result


def _power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}^{power}"
