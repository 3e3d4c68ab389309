"""The declaration of a loss aggregation: its weight as a formula, its source, the counts it needs. No weight is computed here.

The start line, `megatron-rl explain`, the rules of validation and hosts, the pages and the tests read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import ConfigError

# Letter of a declared formula -> field of StepTotals, or argument of the function.
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

    def of_mean_tokens(self) -> Formula:
        """With N m in the place of T: m, the mean tokens of a sample."""
        power = self.powers.get("T", 0)
        return self * Formula(T=-power, N=power, m=power)

    def of_one_sample(self) -> Formula:
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

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """The value for numbers or tensors [S] in place of the letters; the number 1 for an empty product."""
        return math.prod(values[name] ** power for name, power in self.powers.items())


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


TOKEN_MEAN = Formula(T=-1)
# Counts of tokens, of which a correction may drop some.
TOKEN_COUNTS = ("m_i", "M_g", "T")
# The powers of these in a weight: none, 1/m_i, 1/T.
WITHOUT_TOKENS, OF_SAMPLE_TOKENS, OF_STEP_TOKENS = Formula(), Formula(m_i=-1), Formula(T=-1)
# Strength against sample_mean -> samples. The weights of sample i are multiplied by m_i / (mean tokens of these): 1 on average.
MEANS = {
    Formula(P=-1, M_g=-1, N=1, m_i=1): "its prompt's samples",
    Formula(T=-1, N=1, m_i=1): "the step's samples",
}


@dataclass(frozen=True, slots=True)
class AggregationRecord:
    """One registered aggregation.

    rollout_formula: the weight of a token, checked against what the function returns; None: not declared.
    source: the algorithms that use it, or "".
    needs: the counts of the step that it reads (STEP_COUNTS) where each sample is a rollout; None: not known.
    takes_divisor: whether it uses --loss-aggregation-divisor; None: not known.
    """

    name: str
    function: Callable[..., Any]
    rollout_formula: Formula | None = None
    source: str = ""
    needs: tuple[str, ...] | None = None
    takes_divisor: bool | None = None

    @property
    def formula(self) -> Formula | None:
        """The weight of a token where each sample is a rollout."""
        return None if self.rollout_formula is None else self.rollout_formula.of_one_sample()

    @property
    def counts_rollouts(self) -> bool:
        """Whether a weight depends on how a rollout is cut into samples, or on the number of rollouts."""
        return self.rollout_formula is not None and not OF_ONE_SAMPLE.keys().isdisjoint(self.rollout_formula.powers)

    @property
    def needs_prompts(self) -> bool:
        return self.needs is not None and not {"num_prompts", "prompt_token_counts"}.isdisjoint(self.needs)

    @property
    def needs_rows(self) -> bool:
        """Whether it counts the rows of a rollout. Where each sample is a rollout, it is another aggregation's second name."""
        return self.rollout_formula is not None and "k_j" in self.rollout_formula.powers

    @property
    def counts_other_samples(self) -> bool:
        """Whether a sample's weight depends on the tokens of other samples. True where `needs` is not known."""
        return self.needs is None or self.needs_prompts or "num_tokens" in self.needs

    @property
    def token_counts(self) -> Formula | None:
        """The powers of TOKEN_COUNTS in the weight; None: not known."""
        if self.formula is None:
            return None
        return Formula({name: power for name, power in self.formula.powers.items() if name in TOKEN_COUNTS})

    def missing_where_a_host_divides_by(self, count: str) -> tuple[str, ...] | None:
        """The counts of the step that are still needed in a host that divides by N (or by T); None: not known."""
        if self.formula is None:
            return None
        left = self.formula * Formula({count: 1})
        rows = ("rows_of_rollout",) if self.needs_rows else ()
        return (*(COUNTS[name] for name in left.powers if COUNTS[name] in STEP_COUNTS), *rows)

    @property
    def is_of_one_step(self) -> bool:
        """Whether N times the weight depends on counts of the step. N / P does not count: groups of one size make it a constant."""
        if self.formula is None:
            return True
        left = self.formula * Formula(N=1)
        return "T" in left.powers or left.powers.get("N", 0) != -left.powers.get("P", 0)

    def weight_in_words(self, known: Mapping[str, float | None], *, of_rollouts: bool = False) -> str:
        """The formula, with the divisor, with all known counts, its value: 1/(L N) = 1/(8 N) = 1/(8 x 4) = 0.03125.

        of_rollouts: where a rollout may be several samples."""
        formula = self.rollout_formula if of_rollouts else self.formula
        if formula is None:
            return f"not stated: {self.name} declares no formula"
        numbers = {name: number for name, number in known.items() if number is not None and name in formula.powers}
        names = {name: f"{number:g}" for name, number in numbers.items()}
        steps = [{}, {"L": names["L"]} if "L" in names else {}, names]
        texts = list(dict.fromkeys(formula.with_names(step) for step in steps))
        if numbers.keys() == formula.powers.keys():
            texts.append(f"{formula.evaluate(numbers):.4g}")
        return " = ".join(texts)

    @property
    def strength(self) -> Formula | None:
        """The weight of a token of sample i divided by its weight under sample_mean; None: not known."""
        return None if self.formula is None else self.formula * Formula(N=1, m_i=1)

    @property
    def mean_strength(self) -> Formula | None:
        """The mean strength over samples, such as m/L, with m the mean tokens of a sample. None where it depends on the step."""
        strength = self.strength
        if strength is None or strength.powers.get("m_i") != 1 or strength.powers.keys() - {"m_i", "L"}:
            return None
        return strength.renamed({"m_i": "m"})

    @property
    def mean_of(self) -> str | None:
        return None if self.strength is None else MEANS.get(self.strength)

    def shift_against_token_mean(self, divisor: float | None) -> str:
        """As shift_of_weights, for a user who comes from the mean over the step's tokens."""
        if self.formula is None or self.formula == TOKEN_MEAN:
            return self.shift_of_weights(divisor) if self.formula is None else "x 1"
        factor = (self.formula / TOKEN_MEAN).of_mean_tokens()
        is_mean, is_of_step = self.mean_of is not None or self.strength == Formula(), factor.powers.keys() <= {"m", "L"}
        shown = factor.with_names({} if divisor is None else {"L": f"{divisor:g}"})
        return f"x {'1 on average, x ' * is_mean}{shown}{'' if is_of_step else ' for sample i'} (m: mean tokens of a sample)"

    def shift_in_words(self, divisor: float | None, of_token_mean: str = "") -> str:
        """Against sample_mean and, for a user of a trainer whose default is token_mean, against that. of_token_mean: its title."""
        shift, of_default = self.shift_of_weights(divisor), self.shift_against_token_mean(divisor)
        default = f"token_mean, {of_token_mean}'s default,"
        if not of_token_mean:
            return f"against sample_mean {shift}"
        if shift == of_default:
            return f"against sample_mean, and against {default} {shift}"
        return f"against sample_mean {shift}; against {default} {of_default}"

    def shift_of_weights(self, divisor: float | None) -> str:
        """The factor of the weights against sample_mean, as text. m and m_i are not known before the data."""
        if self.strength is None:
            return f"not stated: {self.name} declares no formula"
        names = {} if divisor is None else {"L": f"{divisor:g}"}
        if self.mean_strength is not None:
            return f"x {self.mean_strength.with_names(names)} (m: mean tokens of a sample)"
        if self.mean_of is not None:
            return f"x 1 on average, x m_i/(mean tokens of {self.mean_of}) for sample i"
        return f"x {self.strength.with_names(names)}{' for sample i' if self.strength.powers else ''}"


def declared_fields(
    formula: str | None, source: str, needs: tuple[str, ...] | None, takes_divisor: bool | None
) -> tuple[Formula | None, str, tuple[str, ...] | None, bool | None]:
    """The fields of AggregationRecord; needs and takes_divisor follow from a formula. Raises ConfigError for wrong ones."""
    if not isinstance(source, str):
        raise ConfigError(f"source={source!r} must be text: the algorithms that use this aggregation")
    if needs is not None and not (isinstance(needs, tuple) and all(isinstance(name, str) for name in needs)):
        raise ConfigError(f"needs={needs!r} must be a tuple of names, of {', '.join(STEP_COUNTS)}")
    for name in needs or ():
        if name not in STEP_COUNTS:
            raise ConfigError(f"needs {name!r}, which is not a count of a step: known are {', '.join(STEP_COUNTS)}")
    if takes_divisor not in (None, True, False) or isinstance(takes_divisor, int) and not isinstance(takes_divisor, bool):
        raise ConfigError(f"takes_divisor={takes_divisor!r} must be True or False")
    if formula is None:
        return None, source, needs, takes_divisor
    parsed = Formula.parse(formula)
    of_one_sample = parsed.of_one_sample().powers
    found = tuple(name for letter, name in COUNTS.items() if letter in of_one_sample and name in STEP_COUNTS)
    if needs is not None and set(needs) != set(found):
        raise ConfigError(f"needs={needs!r} and formula={formula!r}, which needs {found!r}: correct one, or leave needs out")
    if takes_divisor is not None and takes_divisor != ("L" in parsed.powers):
        raise ConfigError(
            f"takes_divisor={takes_divisor} and formula={formula!r}, where L is the divisor: correct one, or remove takes_divisor"
        )
    return parsed, source, found, "L" in parsed.powers
