"""Generated pages and blocks show what their commands print. Nothing is written into docs/."""

from __future__ import annotations

import ast
import re

import pages
import pytest
from markdown_pages import text_of
from pages import BLOCKS, ROOT, WHOLE_PAGES, renewed
from test_refused import only_built_in_names  # noqa: F401  (what other tests register would be in messages)

WRITE = "write it anew: python tests/pages.py"


@pytest.mark.parametrize("page", WHOLE_PAGES)
def test_a_generated_page_is_up_to_date(page):
    """Catches a flag, a default, a route, a message or a test that was changed without its page."""
    assert text_of(page) == renewed(page, text_of(page)), f"{WRITE} {page}"


def case(page: str, begins: str, producer: pages.Producer):
    marks = [pytest.mark.slow] * producer.is_slow + [pytest.mark.megatron] * ("megatron" in producer.needs)
    return pytest.param(page, begins, marks=marks, id=f"{page} {begins}")


@pytest.mark.parametrize(("page", "begins"), [case(page, *row) for page, rows in BLOCKS.items() for row in rows.items()])
def test_a_block_shows_what_its_command_prints(page, begins, tmp_path, monkeypatch):
    """Catches an output that changed without its page."""
    for package in BLOCKS[page][begins].needs:
        if package != "megatron":
            pytest.importorskip(package, reason=f"a command of the page needs {package}")
    monkeypatch.chdir(tmp_path)
    assert text_of(page) == renewed(page, text_of(page), only=begins), f"{WRITE} {page}"


def test_every_block_has_one_producer_and_every_producer_a_block():
    """Catches an output that nothing would renew, and an entry that outlived its block."""
    found = {page: [command for command, _ in pages.blocks(text_of(page))] for page in BLOCKS}
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        page = path.relative_to(ROOT).as_posix()
        for command, _ in pages.blocks(text_of(page)):
            assert len(pages.beginnings(page, command)) == 1, f"{page}: {command}"
    idle = [(page, begins) for page, of in BLOCKS.items() for begins in of if not any(c.startswith(begins) for c in found[page])]
    assert idle == []


# The ledger of field bugs: a row for each bug, `n/a` before what stands for it here where it needs no test. A test carries a number
# in a docstring or an id; a comment carries none.

LEDGER = "docs/field_bugs.md"
NUMBER, LEDGER_ROW = re.compile(r"\bFB-\d+\b"), re.compile(r'^\| <a id="(fb-\d+)"></a>(FB-\d+) \|')


def rows_of_ledger() -> dict[str, bool]:
    """number -> whether it needs a test; four cells a row, and the anchor of its number."""
    rows: dict[str, bool] = {}
    for line in text_of(LEDGER).splitlines():
        if found := LEDGER_ROW.match(line):
            anchor, number = found.groups()
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert number not in rows and anchor == number.lower() and len(cells) == 4, line[:80]
            rows[number] = not cells[3].startswith("n/a")
    return rows


def test_every_row_has_a_test_and_no_test_carries_an_unknown_number():
    """Catches a slip in a number, and a row whose test went."""
    rows, named, tested = rows_of_ledger(), set(), set()
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        named |= set(NUMBER.findall(source))
        if path.name.startswith("test_"):
            nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str))
            tested |= {number for node in nodes for number in NUMBER.findall(node.value)}
    assert sorted(named - set(rows)) == [], "unknown numbers"
    assert [number for number, needs_test in rows.items() if needs_test and number not in tested] == [], "no test"


def test_every_link_of_the_page_leads_to_the_number_that_it_shows():
    """Catches `verl#906` that leads to 960, and one repository's name over another's address."""
    text = text_of(LEDGER)
    links = re.findall(r"\[([^]\[]+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)\)", text)
    assert len(links) > 100
    repositories: dict[str, str] = {}
    for shown, repository, number in links:
        name, _, shown_number = shown.rpartition("#")
        assert shown_number == number, shown
        if name:  # `[#623]` continues the name before it
            assert repositories.setdefault(name, repository) == repository, shown
    assert len(set(repositories.values())) == len(repositories)
