"""Which field bugs have a test, and which numbers in the tests nobody knows; it must never run a test.

    python tests/field_bugs.py [--complete]

The table of field bugs stands beside the checkout (../shared/field_bugs.md); its ids are kept in field_bug_ids.txt for
checkouts without it, `n/a` after those that say they need no test. A test carries a number in its docstring or its id.
Ends with 1 when a test names an unknown number, with --complete also when a row has no test.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TABLE = TESTS.parent.parent / "shared" / "field_bugs.md"
IDS = TESTS / "field_bug_ids.txt"

NUMBER = re.compile(r"\bFB-\d+\b")
ROW = re.compile(r"^\| (FB-\d+) \|.*\| ([^|]*) \|$", re.MULTILINE)
NOT_APPLICABLE = "n/a"


def ids_of_table(text: str) -> dict[str, bool]:
    """{id: needs a test} of the rows; a row that needs none begins its last column with n/a."""
    return {number: not last.startswith(NOT_APPLICABLE) for number, last in ROW.findall(text)}


def ids_of_list(text: str) -> dict[str, bool]:
    """{id: needs a test} of the lines `FB-01` or `FB-96 n/a`."""
    words = [line.split() for line in text.splitlines() if line.strip()]
    return {number: NOT_APPLICABLE not in rest for number, *rest in words}


def known_ids() -> dict[str, bool]:
    if TABLE.exists():
        return ids_of_table(TABLE.read_text(encoding="utf-8"))
    return ids_of_list(IDS.read_text(encoding="utf-8"))


def tested_ids(folder: Path) -> dict[str, set[str]]:
    """{id: names of the files that carry it} over the sources below the folder, without this one."""
    found: dict[str, set[str]] = {}
    for path in sorted(set(folder.rglob("*.py")) - {Path(__file__).resolve()}):
        for number in NUMBER.findall(path.read_text(encoding="utf-8")):
            found.setdefault(number, set()).add(path.name)
    return found


def report(known: dict[str, bool], tested: dict[str, set[str]], *, complete: bool) -> tuple[list[str], bool]:
    """(lines to print, whether all is well)."""
    unknown = sorted(set(tested) - set(known))
    missing = [number for number, needs_test in known.items() if needs_test and number not in tested]
    lines = [f"unknown number {number} in {', '.join(sorted(tested[number]))}" for number in unknown]
    lines += [f"no test for {number}" for number in missing]
    lines.append(f"{len(known)} rows, {len(missing)} without a test, {len(unknown)} unknown numbers")
    return lines, not unknown and not (complete and missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--complete", action="store_true", help="a row without a test is a failure too")
    lines, is_well = report(known_ids(), tested_ids(TESTS), complete=parser.parse_args().complete)
    print("\n".join(lines))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
