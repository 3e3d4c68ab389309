"""Which field bugs have a test, and which numbers in the tests nobody knows; it must never run a test.

docs/field_bugs.md is the ledger: a row for each bug, `n/a` before what stands for it here where it needs no test. A test carries
a number in a docstring or an id; a comment carries none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "field_bugs.md"
NUMBER = re.compile(r"\bFB-\d+\b")
PAGE_ROW = re.compile(r'^\| <a id="(fb-\d+)"></a>(FB-\d+) \|')
BETWEEN_CELLS = re.compile(r"(?<!\\)\|")
NOT_APPLICABLE = "n/a"


@dataclass(frozen=True)
class Row:
    needs_test: bool


def rows_of_page(text: str) -> dict[str, Row]:
    """{number: row}; refuses a number that stands twice and an anchor that is not its number's."""
    rows: dict[str, Row] = {}
    for line in text.splitlines():
        found = PAGE_ROW.match(line)
        if not found:
            continue
        anchor, number = found.groups()
        cells = [cell.strip() for cell in BETWEEN_CELLS.split(line)[1:-1]]
        if number in rows or anchor != number.lower() or len(cells) != 4:
            raise ValueError(f"{number}: one row of four cells, with the anchor {number.lower()}; found {line[:80]!r}")
        rows[number] = Row(not cells[3].startswith(NOT_APPLICABLE))
    return rows


def numbers_in_strings(source: str) -> set[str]:
    """Of docstrings and ids: what pytest shows of a test."""
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {number for text in strings for number in NUMBER.findall(text)}


def _files_by_number(paths: Iterable[Path], numbers_of: Callable[[str], Iterable[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in paths:
        for number in numbers_of(path.read_text(encoding="utf-8")):
            found.setdefault(number, set()).add(path.name)
    return found


@cache
def tested_ids(folder: Path) -> dict[str, set[str]]:
    """{number: names of the test files that carry it}."""
    return _files_by_number(folder.rglob("test_*.py"), numbers_in_strings)


def named_ids(folder: Path) -> dict[str, set[str]]:
    """{number: names of the files that name it anywhere}, comments and what tests share included; this file is left out."""
    return _files_by_number(set(folder.rglob("*.py")) - {Path(__file__).resolve()}, NUMBER.findall)


def faults(rows: dict[str, Row], tested: dict[str, set[str]], named: dict[str, set[str]]) -> list[str]:
    unknown = [f"unknown number {number} in {', '.join(sorted(named[number]))}" for number in sorted(set(named) - set(rows))]
    return unknown + [f"no test for {number}" for number, row in rows.items() if row.needs_test and number not in tested]
