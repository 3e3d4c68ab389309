"""Says in words what an aggregation weighs, and how it changes a run: for messages, start lines and `megatron-rl explain`."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.formula import Formula
from megatron_rl.weights import TOKEN_MEAN, AggregationRecord, formula_value

# Strength against sample_mean -> samples. The weights of sample i are multiplied by m_i / (mean tokens of these): 1 on average.
MEANS = {
    Formula(P=-1, M_g=-1, N=1, m_i=1): "its prompt's samples",
    Formula(T=-1, N=1, m_i=1): "the step's samples",
}


def weight_in_words(record: AggregationRecord, known: Mapping[str, float | None], *, with_rollouts: bool = False) -> str:
    """The formula, with the divisor, with all known counts, its value: 1/(L N) = 1/(8 N) = 1/(8 x 4) = 0.03125.

    with_rollouts: where a rollout may be several samples."""
    formula = record.rollout_formula if with_rollouts else record.formula
    if formula is None:
        return _not_stated(record)
    numbers = {name: number for name, number in known.items() if number is not None and name in formula.powers}
    names = {name: f"{number:g}" for name, number in numbers.items()}
    steps = [{}, {"L": names["L"]} if "L" in names else {}, names]
    texts = list(dict.fromkeys(formula.with_names(step) for step in steps))
    if numbers.keys() == formula.powers.keys():
        texts.append(f"{formula_value(formula, numbers):.4g}")
    return " = ".join(texts)


def strength_of(record: AggregationRecord) -> Formula | None:
    """The weight of a token of sample i divided by its weight under sample_mean; None: not known."""
    return None if record.formula is None else record.formula * Formula(N=1, m_i=1)


def mean_strength_of(record: AggregationRecord) -> Formula | None:
    """The mean strength over samples, such as m/L, with m the mean tokens of a sample. None where it depends on the step."""
    strength = strength_of(record)
    if strength is None or strength.powers.get("m_i") != 1 or strength.powers.keys() - {"m_i", "L"}:
        return None
    return strength.renamed({"m_i": "m"})


def samples_of_mean_1(record: AggregationRecord) -> str | None:
    """Over which samples the strength has the mean 1."""
    strength = strength_of(record)
    return None if strength is None else MEANS.get(strength)


def shift_in_words(record: AggregationRecord, divisor: float | None, token_mean_host: str = "") -> str:
    """Against sample_mean and, for a user of a trainer whose default is token_mean, against that. token_mean_host: its title."""
    shift, default_shift = shift_of_weights(record, divisor), _shift_against_token_mean(record, divisor)
    default = f"token_mean, {token_mean_host}'s default,"
    if not token_mean_host:
        return f"against sample_mean {shift}"
    if shift == default_shift:
        return f"against sample_mean, and against {default} {shift}"
    return f"against sample_mean {shift}; against {default} {default_shift}"


def shift_of_weights(record: AggregationRecord, divisor: float | None) -> str:
    """The factor of the weights against sample_mean, as text. m and m_i are not known before the data."""
    strength, mean, samples = strength_of(record), mean_strength_of(record), samples_of_mean_1(record)
    if strength is None:
        return _not_stated(record)
    names = {} if divisor is None else {"L": f"{divisor:g}"}
    if mean is not None:
        return f"x {mean.with_names(names)} (m: mean tokens of a sample)"
    if samples is not None:
        return f"x 1 on average, x m_i/(mean tokens of {samples}) for sample i"
    return f"x {strength.with_names(names)}{' for sample i' if strength.powers else ''}"


def _shift_against_token_mean(record: AggregationRecord, divisor: float | None) -> str:
    if record.formula is None or record.formula == TOKEN_MEAN:
        return _not_stated(record) if record.formula is None else "x 1"
    shift = record.formula / TOKEN_MEAN
    power = shift.powers.get("T", 0)
    factor = shift * Formula(T=-power, N=power, m=power)  # T = N m
    is_mean = samples_of_mean_1(record) is not None or strength_of(record) == Formula()
    shown = factor.with_names({} if divisor is None else {"L": f"{divisor:g}"})
    sample_words = "" if factor.powers.keys() <= {"m", "L"} else " for sample i"
    return f"x {'1 on average, x ' * is_mean}{shown}{sample_words} (m: mean tokens of a sample)"


def _not_stated(record: AggregationRecord) -> str:
    return f"not stated: {record.name} declares no formula"
