"""Has the weight of a token as a product of counts over a product of counts: its text, and products and quotients of such."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_rl.errors import ConfigError

# Letter of a formula -> field of StepTotals, or argument of a function.
COUNTS = {
    "N": "num_samples",
    "R": "num_rollouts",
    "P": "num_prompts",
    "T": "num_tokens",
    "m_i": "token_counts",
    "M_j": "rollout_token_counts",
    "k_j": "rows_of_rollout",
    "M_g": "prompt_token_counts",
    "L": "divisor",
}
# Letter of a count of rollouts -> what it is where each sample is a rollout.
OF_ONE_SAMPLE = {"R": "N", "M_j": "m_i", "k_j": "1"}
# The names that `needs` may hold. token_counts are always given.
STEP_COUNTS = tuple(name for name in COUNTS.values() if name not in ("token_counts", "divisor"))
FACTOR = re.compile(r"\s*\*?\s*([A-Za-z]\w*|1(?![\w.]))(?:\s*\^\s*(\d+(?:\.\d+)?))?")


class Formula:
    """A product of powers of named counts: Formula(N=-1, m_i=-1) is 1/(N m_i)."""

    def __init__(self, powers: Mapping[str, float] | None = None, /, **named: float):
        self.powers = {name: power for name, power in {**(powers or {}), **named}.items() if power}

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Reads text such as `1 / (N m_i)`, `m_i^0.5 / T`, `1 / N`. Raises ConfigError for another form and unknown letters."""
        if not isinstance(text, str):
            raise ConfigError(f"formula={text!r} must be text, as in {EXAMPLE}")
        above, *below = text.split("/")
        if len(below) > 1:
            raise ConfigError(f"formula={text!r} has {len(below)} divisions: one division at most, as in {EXAMPLE}")
        powers: dict[str, float] = {}
        for part, sign in ((above, 1), *((part, -1) for part in below)):
            for name, power in _factors(part.strip(), text):
                powers[name] = powers.get(name, 0) + sign * power
        return cls(powers)

    def __mul__(self, other: Formula) -> Formula:
        names = [*self.powers, *(name for name in other.powers if name not in self.powers)]
        return Formula({name: self.powers.get(name, 0) + other.powers.get(name, 0) for name in names})

    def __truediv__(self, other: Formula) -> Formula:
        return self * other.inverse()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.powers == other.powers

    def __hash__(self) -> int:
        return hash(frozenset(self.powers.items()))

    def __repr__(self) -> str:
        return f"Formula({str(self)!r})"

    def __str__(self) -> str:
        return self.with_names({})

    def inverse(self) -> Formula:
        return Formula({name: -power for name, power in self.powers.items()})

    def without(self, *names: str) -> Formula:
        """The formula with these letters set to 1."""
        return Formula({name: power for name, power in self.powers.items() if name not in names})

    def renamed(self, names: Mapping[str, str]) -> Formula:
        return Formula({names.get(name, name): power for name, power in self.powers.items()})

    def for_single_samples(self) -> Formula:
        """The formula where each sample is a rollout: 1/(R M_j) is 1/(N m_i)."""
        others = {OF_ONE_SAMPLE[name]: power for name, power in self.powers.items() if name in OF_ONE_SAMPLE}
        kept = self.without(*OF_ONE_SAMPLE)
        return kept * Formula(others).without("1")

    def with_names(self, names: Mapping[str, str]) -> str:
        """The text, with other names for some letters: 1/(L N) with {"L": "8192"} is 1/(8192 N)."""
        # Counts of the step (capital letters) come before counts of a sample and sizes of process groups.
        powers = sorted(self.powers.items(), key=lambda item: "_" in item[0] or item[0].islower())
        shown = [(names.get(name, name), power) for name, power in powers]
        above = [_power(name, power) for name, power in shown if power > 0]
        return _quotient(above or ["1"], [_power(name, -power) for name, power in shown if power < 0])


EXAMPLE = "formula='1 / (N m_i)'; leave it out where the weight is not a product of counts over a product of counts"


def _factors(part: str, text: str) -> list[tuple[str, float]]:
    inner = part[1:-1] if part.startswith("(") and part.endswith(")") else part
    found: list[tuple[str, float]] = []
    end = 0
    while match := FACTOR.match(inner, end):
        name, power = match[1], float(match[2] or 1)
        if name != "1" and name not in COUNTS:
            raise ConfigError(f"formula={text!r}: {name!r} is no count; known: {', '.join(COUNTS)}; as in {EXAMPLE}")
        found, end = [*found, (name, int(power) if power.is_integer() else power)], match.end()
    if not found and not inner:
        raise ConfigError(f"formula={text!r} is empty on one side: write {EXAMPLE}")
    if inner[end:].strip():
        raise ConfigError(f"formula={text!r} is not a product of counts over a product of counts: write {EXAMPLE}")
    return [item for item in found if item[0] != "1"]


def _quotient(above: list[str], below: list[str]) -> str:
    if not below:
        return " ".join(above)
    joined = (" x " if all(name.isdecimal() for name in below) else " ").join(below)
    return f"{' '.join(above)}/{joined if len(below) == 1 else f'({joined})'}"


def _power(name: str, power: float) -> str:
    return name if power == 1 else f"{name}^{power:g}"
