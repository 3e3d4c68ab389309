"""The targets of `bench losses` and by how much a run meets or misses them. It must never leave out the case that is worst.

A target is met where it is met on every case that it speaks of. A case whose times are void, or a peer that is not there, says
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from megatron_rl.commands.bench.harness import OK
from megatron_rl.commands.bench.kernels import GRADIENT, SHIPPED, STATISTICS
from megatron_rl.commands.bench.peers import FAST_LLM, LIGER, LIGER_VOCAB_PARALLEL, MEGATRON
from megatron_rl.commands.bench.providers import OURS, OURS_ENTROPY

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
AT_LEAST, AT_MOST = ">=", "<="
# Shapes that fill a GPU; below them launches count, and the targets on bandwidth say nothing.
FEWEST_TOKENS, FEWEST_COLUMNS, LATENCY_TOKENS = 4096, 32768, 128

Value = tuple[str, float]  # title of a case, value there


@dataclass(frozen=True, slots=True)
class Target:
    """`values(cases)` gives a number for each case that the target speaks of."""

    name: str
    direction: str
    limit: float
    values: Callable[[list[dict]], Iterator[Value]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """worst and best of the cases; margin: the worst against the limit, above 0 where it is met, as a share of the limit."""

    name: str
    direction: str
    limit: float
    verdict: str
    worst: float | None = None
    worst_case: str | None = None
    best: float | None = None
    margin: float | None = None
    num_cases: int = 0

    def as_dict(self) -> dict:
        return asdict(self)


def judge(target: Target, cases: list[dict]) -> Verdict:
    values = list(target.values([case for case in cases if not case["is_void"]]))
    if not values:
        return Verdict(target.name, target.direction, target.limit, NOT_MEASURED)
    ordered = sorted(values, key=lambda pair: pair[1], reverse=target.direction == AT_MOST)
    (worst_case, worst), (_, best) = ordered[0], ordered[-1]
    margin = (worst - target.limit) / target.limit * (1 if target.direction == AT_LEAST else -1)
    verdict = MET if margin >= 0 else MISSED
    return Verdict(target.name, target.direction, target.limit, verdict, worst, worst_case, best, margin, len(values))


def judge_all(cases: list[dict], targets: Iterable[Target] | None = None) -> list[Verdict]:
    """None: those of `bench losses`."""
    return [judge(target, cases) for target in (TARGETS if targets is None else targets)]


def row_of(case: dict, provider: str) -> dict | None:
    """The measured row of a provider; None where it did not run."""
    return next((row for row in case["rows"] if row["provider"] == provider and row["status"] == OK), None)


def is_large(case: dict) -> bool:
    """Whether the case fills a GPU. Below that launches decide, and a microsecond more is a few percent."""
    shape = case["shape"]
    return shape["num_tokens"] >= FEWEST_TOKENS and shape["num_columns"] >= FEWEST_COLUMNS


def _is_dense(case: dict) -> bool:
    return case["shape"]["masked"] == 0


def _losses(cases: Iterable[dict]) -> Iterator[dict]:
    return (case for case in cases if case["kind"] == "loss")


def _kernels(cases: Iterable[dict], kernel: str, with_entropy: bool | None = None) -> Iterator[tuple[dict, dict]]:
    for case in cases:
        if case["kind"] == "kernel" and case["shape"]["kernel"] == kernel and is_large(case):
            row = next((row for row in case["rows"] if row["provider"].endswith(SHIPPED) and row["status"] == OK), None)
            if row is not None and with_entropy in (None, case["shape"]["with_entropy"]):
                yield case, row


def _copy_fraction(kernel: str) -> Callable[[list[dict]], Iterator[Value]]:
    return lambda cases: ((case["title"], row["copy_fraction"]) for case, row in _kernels(cases, kernel, with_entropy=False))


def _entropy_of_statistics(cases: list[dict]) -> Iterator[Value]:
    shape_of = lambda case: (case["shape"]["num_tokens"], case["shape"]["num_columns"])  # noqa: E731
    without = {shape_of(case): row["median_ms"] for case, row in _kernels(cases, STATISTICS, with_entropy=False)}
    for case, row in _kernels(cases, STATISTICS, with_entropy=True):
        if shape_of(case) in without:
            yield case["title"], row["median_ms"] / without[shape_of(case)]


def _floor_ratio(cases: list[dict]) -> Iterator[Value]:
    for case in _losses(cases):
        row = row_of(case, OURS)
        if row is not None and is_large(case) and _is_dense(case):
            yield case["title"], row["floor_ratio"]


def _ratio(
    provider: str, to: str, of: Callable[[dict, dict], float], choose: Callable[[dict], bool]
) -> Callable[[list[dict]], Iterator[Value]]:
    """of(case, row of `provider`) / of(case, row of `to`) on the chosen cases."""

    def values(cases: list[dict]) -> Iterator[Value]:
        for case in _losses(cases):
            row, base = row_of(case, provider), row_of(case, to)
            if row is not None and base is not None and choose(case) and row["peak_extra_bytes"] is not None:
                yield case["title"], of(case, row) / of(case, base)

    return values


def _time(case: dict, row: dict) -> float:
    return row["median_ms"]


def _peak(case: dict, row: dict) -> float:
    """With the logits, which exist anyway: two copies against one is 2."""
    return case["logits_bytes"] + row["peak_extra_bytes"]


def _extra_memory(cases: list[dict]) -> Iterator[Value]:
    for case in _losses(cases):
        row = row_of(case, OURS)
        if row is not None and row["peak_extra_bytes"] is not None and is_large(case):
            yield case["title"], row["peak_extra_bytes"] / case["logits_bytes"]


def _half_masked(case: dict) -> bool:
    return case["shape"]["num_tokens"] >= FEWEST_TOKENS and case["shape"]["masked"] == 0.5


def _large_and_dense(case: dict) -> bool:
    return is_large(case) and _is_dense(case)


def _few_rows(case: dict) -> bool:
    return case["shape"]["num_tokens"] <= LATENCY_TOKENS


# Half the memory: the limit leaves one part in a hundred for the [T] vectors beside the logits.
TARGETS = (
    Target("statistics kernel, share of the measured copy bandwidth", AT_LEAST, 0.90, _copy_fraction(STATISTICS)),
    Target("statistics kernel with entropy, time over without", AT_MOST, 1.05, _entropy_of_statistics),
    Target("gradient kernel in place, share of the measured copy bandwidth", AT_LEAST, 0.92, _copy_fraction(GRADIENT)),
    Target("loss forward and backward, time over 6 bytes a logit at copy bandwidth", AT_MOST, 1.12, _floor_ratio),
    Target("loss with entropy, time over without", AT_MOST, 1.05, _ratio(OURS_ENTROPY, OURS, _time, _large_and_dense)),
    Target("extra memory over the logits' size", AT_MOST, 0.05, _extra_memory),
    Target("Liger's time over ours", AT_LEAST, 1.35, _ratio(LIGER, OURS, _time, _large_and_dense)),
    Target("Fast-LLM's time over ours", AT_LEAST, 1.0, _ratio(FAST_LLM, OURS, _time, _large_and_dense)),
    Target("Fast-LLM's time over ours, half of the rows masked", AT_LEAST, 1.3, _ratio(FAST_LLM, OURS, _time, _half_masked)),
    Target("Fast-LLM's time over ours, at most 128 rows", AT_LEAST, 2.0, _ratio(FAST_LLM, OURS, _time, _few_rows)),
    Target("our peak memory with the logits over Fast-LLM's", AT_MOST, 0.505, _ratio(OURS, FAST_LLM, _peak, is_large)),
    Target("Liger vocab-parallel CE and torch, time over ours", AT_LEAST, 2.5, _ratio(LIGER_VOCAB_PARALLEL, OURS, _time, is_large)),
    Target("Megatron fused CE and torch, time over ours", AT_LEAST, 5.0, _ratio(MEGATRON, OURS, _time, is_large)),
)
