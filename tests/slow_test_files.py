"""A pytest plugin: at the end of a run it names the test files that took more than twice their seconds in tests/seconds.toml."""

from __future__ import annotations

from collections import Counter

from weight import SECONDS, read_table

FIGURES = read_table(SECONDS)
# A file that took less is not named.
SHORTEST = 5.0


def pytest_terminal_summary(terminalreporter) -> None:
    found: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "nodeid") and hasattr(report, "duration"):
                found[report.nodeid.partition("::")[0]] += report.duration
    for name, seconds in sorted(found.items()):
        if name in FIGURES and seconds > max(2 * FIGURES[name], SHORTEST):
            terminalreporter.write_line(f"{name} took {seconds:.1f} s, more than twice its {FIGURES[name]} s", yellow=True)
