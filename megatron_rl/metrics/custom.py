"""Finds a user's own rows of metrics by their dotted names, and says what is wrong with a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_rl.config import PolicyMetrics
from megatron_rl.errors import ConfigError
from megatron_rl.metrics.further import CORRECTION_METRICS, CORRECTION_SAMPLE_SIZE, ROLLOUT_METRICS, SUPPORT_METRICS
from megatron_rl.metrics.policy import EFFECTIVE_SAMPLE_SIZE, METRICS, Metric, Reduction, Weight
from megatron_rl.registries.dotted import import_attribute

# Names below policy/ that a step has besides those of the tables.
OF_A_STEP = ("loss", "max_vio", "mtp_loss", "route_agreement")


def named_metrics(names: str | None) -> tuple[Metric, ...]:
    """The rows that `--custom-policy-metrics module.name,module.other` names; None: none. Raises ConfigError for each that is not
    found, is no Metric, or is wrong as checked_rows says. It is computed again at each call: the modules are imported then."""
    if names is None:
        return ()
    if not isinstance(names, str):
        raise ConfigError(f"policy metric {names!r} must be text: write module.name, several with commas between")
    found: list[Metric] = []
    problems: list[str] = []
    for name in (name.strip() for name in names.split(",")):
        try:
            found.append(import_attribute(name, "policy metric", "name"))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return checked_rows(found)


def checked_rows(rows: Sequence[Metric], metrics: str = PolicyMetrics.BASIC) -> tuple[Metric, ...]:
    """The rows. Raises ConfigError for one that is no Metric, has a taken name, is divided by what is not there, or with metrics
    "none", which computes none."""
    if metrics == PolicyMetrics.NONE:
        raise ConfigError("custom_metrics has no effect with metrics='none': pass metrics='basic', or leave it out")
    problems = [problem for place, row in enumerate(rows) for problem in _problems(row, rows[:place], rows)]
    if problems:
        raise ConfigError(problems)
    return tuple(rows)


def _problems(row: object, before: Sequence[Metric], rows: Sequence[Metric]) -> Iterator[str]:
    if not isinstance(row, Metric):
        yield (
            f"policy metric {row!r} is {type(row).__name__}, not a Metric: make it with "
            "megatron_rl.metrics.policy.sample_mean(name, value, unit=..., formula=..., healthy=...)"
        )
        return
    tables = (METRICS, ROLLOUT_METRICS, CORRECTION_METRICS, SUPPORT_METRICS, (EFFECTIVE_SAMPLE_SIZE, CORRECTION_SAMPLE_SIZE))
    taken = {one.name for table in tables for one in table}.union(OF_A_STEP)
    taken.update(one.name for one in before if isinstance(one, Metric))
    if not isinstance(row.name, str) or not row.name.isidentifier():
        yield f"policy metric {row.name!r} must have letters, digits and underscores as its name: it becomes policy/<name>"
    elif row.name in taken:
        yield f"policy metric {row.name!r}: another metric has that name; choose another one"
    if row.reduction not in tuple(Reduction) or row.weight not in tuple(Weight):
        yield f"policy metric {row.name!r}: reduction and weight must be members of metrics.policy.Reduction and Weight"
    counts = [one.name for one in (*METRICS, *rows) if isinstance(one, Metric) and one.reduction == Reduction.SUM]
    divisors = {row.present_with: "present_with", row.normaliser: "normaliser"}
    unknown = {name: field for name, field in divisors.items() if name is not None and name not in counts}
    for name, field in unknown.items():
        yield f"policy metric {row.name!r}: its {field} {name!r} is no sum of the step; choose of {', '.join(counts)}"
    if row.normaliser not in (None, "num_samples", "num_tokens", "num_ratios") and row.present_with != row.normaliser:
        yield (
            f"policy metric {row.name!r}: a step may have 0 of its normaliser {row.normaliser!r}; declare "
            f"present_with={row.normaliser!r}, which leaves the metric out there"
        )
