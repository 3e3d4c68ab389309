"""Several providers of one result, side by side: gate, memory, interleaved times, drift. It must never time a wrong result.

Generic: a problem holds input sets and knows what is right; a provider turns a problem into a step; what a step computes (a loss
from logits, from hidden states, one kernel) is theirs alone. Whatever a provider raises becomes its row and never ends the run.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from megatron_rl.commands.bench.device import Device

OK, FAIL, ERROR, NOT_INSTALLED, NOT_SUPPORTED = "ok", "FAIL", "error", "not installed", "not supported"
# A slow provider takes part in fewer rounds; with fewer than this many a median says nothing.
FEWEST_ROUNDS = 5
DETAIL_LENGTH = 300


class NotInstalled(Exception):
    """A peer that is not here; the message says how to add it."""


class NotSupported(Exception):
    """What a provider cannot do by design; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One number of the correctness gate. NaN is above every limit."""

    name: str
    error: float
    limit: float

    @property
    def is_passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Step:
    """load(index) restores input set `index`, never timed; run() is timed; check(result) judges a run on the loaded set."""

    load: Callable[[int], None]
    run: Callable[[], Any]
    check: Callable[[Any], list[Check]]


class Problem(Protocol):
    """Input sets on a device. Bytes per step: `nominal` counts each logit alike, `floor` the fewest that can be moved."""

    num_sets: int
    nominal_bytes: float
    floor_bytes: float
    logits_bytes: float


@dataclass(frozen=True, slots=True)
class Provider:
    """prepare(problem) -> Step; it raises NotInstalled or NotSupported. `leaves_out`: what its user would still have to add."""

    name: str
    prepare: Callable[[Any], Step]
    leaves_out: str = ""
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 30
    seconds_per_provider: float = 4.0  # of one case; bounds the rounds of slow providers
    max_drift: float = 0.03


@dataclass(slots=True)
class Row:
    """One provider on one case. Times are None unless status is ok; ratios are filled in by add_ratios."""

    provider: str
    is_ours: bool
    leaves_out: str
    status: str = OK
    detail: str = ""
    checks: list[Check] = field(default_factory=list)
    peak_extra_bytes: float | None = None
    rounds: int = 0
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    host_ms: float | None = None
    gigabytes_per_second: float | None = None
    copy_fraction: float | None = None
    floor_ratio: float | None = None
    over_first: float | None = None

    def as_dict(self) -> dict:
        """An error that is not finite becomes None: JSON has no NaN."""
        checks = [asdict(check) | {"error": check.error if math.isfinite(check.error) else None} for check in self.checks]
        return asdict(self) | {"checks": checks}


@dataclass(slots=True)
class _Ready:
    row: Row
    step: Step
    rounds: int
    flushes: int
    milliseconds: list[float] = field(default_factory=list)
    host_milliseconds: list[float] = field(default_factory=list)


def measure(
    problem: Problem, providers: Sequence[Provider], device: Device, settings: Settings
) -> tuple[list[Row], float | None]:  # one row a provider in their order; drift of the first that ran, None if none did
    """Gate and memory of each, then A B C A B C over rotating input sets, then the first one again."""
    rows = [Row(provider.name, provider.is_ours, provider.leaves_out) for provider in providers]
    ready = []
    for provider, row in zip(providers, rows, strict=True):
        guarded = _guard(row, device, lambda p=provider, r=row: _qualify(p, r, problem, device, settings))
        if guarded is not None:
            ready.append(guarded)
    _interleave(ready, problem, device, settings)
    ready = [entry for entry in ready if entry.row.status == OK]
    for entry in ready:
        _fill_times(entry)
    return rows, _drift(ready, problem, device, settings)


def _guard(row: Row, device: Device, action: Callable[[], Any]) -> Any:
    """What the action returns; None, and the reason in the row, where it raises. DeviceLost where no other would run after it."""
    try:
        return action()
    except (NotInstalled, NotSupported) as error:
        row.status, row.detail = NOT_INSTALLED if isinstance(error, NotInstalled) else NOT_SUPPORTED, str(error)
        return None
    except Exception as error:  # an adapter or a peer: anything may come
        row.status = ERROR
        row.detail = " ".join(f"{type(error).__name__}: {error}".split())[:DETAIL_LENGTH]
        error.__traceback__ = None  # it holds the step's tensors
    gc.collect()
    device.release_memory()
    device.check_alive(row.provider)
    return None


def _qualify(provider: Provider, row: Row, problem: Problem, device: Device, settings: Settings) -> _Ready | None:
    """The gate on freshly poisoned memory, the peak above inputs, and how many rounds the time allows; None on FAIL."""
    step = provider.prepare(problem)
    device.poison(problem.logits_bytes)
    step.load(0)
    result = step.run()
    device.synchronize()
    row.checks = step.check(result)
    del result
    if not row.checks or not all(check.is_passed for check in row.checks):
        row.status, row.detail = FAIL, "; ".join(f"{c.name} {c.error:.1e} > {c.limit:.0e}" for c in row.checks if not c.is_passed)
        return None
    step.load(1 % problem.num_sets)
    row.peak_extra_bytes = device.peak_extra_bytes(step.run)
    milliseconds, host_milliseconds = 0.0, 0.0
    for index in range(2):  # what is compiled or allocated at the second call, then a look at the time
        step.load(index % problem.num_sets)
        milliseconds, host_milliseconds = device.timed(step.run, 1)
    affordable = int(1e3 * settings.seconds_per_provider / max(milliseconds, 1e-6))
    rounds = min(settings.rounds, max(affordable, FEWEST_ROUNDS))
    return _Ready(row, step, rounds, device.flushes_to_hide(host_milliseconds))


def _interleave(ready: list[_Ready], problem: Problem, device: Device, settings: Settings) -> None:
    for number in range(settings.rounds):
        for entry in ready:
            if entry.row.status == OK and takes_part(number, entry.rounds, settings.rounds):
                _guard(entry.row, device, lambda e=entry, n=number: _time_once(e, n, problem, device))


def takes_part(number: int, rounds: int, all_rounds: int) -> bool:
    """Spreads `rounds` of a provider evenly over `all_rounds`."""
    return (number + 1) * rounds // all_rounds > number * rounds // all_rounds


def _time_once(entry: _Ready, number: int, problem: Problem, device: Device) -> None:
    entry.step.load(number % problem.num_sets)
    milliseconds, host_milliseconds = device.timed(entry.step.run, entry.flushes)
    entry.milliseconds.append(milliseconds)
    entry.host_milliseconds.append(host_milliseconds)


def _fill_times(entry: _Ready) -> None:
    row = entry.row
    row.rounds = len(entry.milliseconds)
    row.median_ms = statistics.median(entry.milliseconds)
    row.p20_ms, row.p80_ms = percentile(entry.milliseconds, 0.2), percentile(entry.milliseconds, 0.8)
    row.host_ms = statistics.median(entry.host_milliseconds)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours: the 20 % point of 0, 1, 2, 3, 4, 5 is 1."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _drift(ready: list[_Ready], problem: Problem, device: Device, settings: Settings) -> float | None:
    """Relative change of the first provider's median, measured again at the end."""
    if not ready:
        return None
    again = _Ready(ready[0].row, ready[0].step, ready[0].rounds, ready[0].flushes)
    for number in range(again.rounds):
        if _guard(again.row, device, lambda n=number: _time_once(again, n, problem, device) or True) is None:
            return None
    before, after = again.row.median_ms, statistics.median(again.milliseconds)
    return 0.0 if abs(after - before) <= device.resolution_ms else after / before - 1.0


def is_void(drift: float | None, settings: Settings) -> bool:
    """A machine that changed while it was measured: times of this case say nothing."""
    return drift is not None and not abs(drift) <= settings.max_drift


def add_ratios(rows: Sequence[Row], problem: Problem, copy_bytes_per_second: float) -> None:
    """GB/s at nominal bytes, its share of the copy ceiling, time over the floor's, time over the first row's."""
    first = rows[0].median_ms if rows else None
    for row in rows:
        if row.median_ms is None:
            continue
        seconds = row.median_ms / 1e3
        row.gigabytes_per_second = problem.nominal_bytes / seconds / 1e9
        row.copy_fraction = problem.nominal_bytes / seconds / copy_bytes_per_second
        row.floor_ratio = seconds / (problem.floor_bytes / copy_bytes_per_second)
        row.over_first = None if first is None else row.median_ms / first
