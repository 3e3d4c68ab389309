"""Generated pages and blocks show what their commands print. Nothing is written into docs/."""

from __future__ import annotations

import re

import field_bugs
import pages
import pytest
from markdown_pages import text_of
from pages import BLOCKS, ROOT, WHOLE_PAGES, renewed
from test_refused import only_built_in_names  # noqa: F401  (what other tests register would be in messages)

WRITE = "write it anew: python tests/pages.py"
# test_door_table.py compares it: its cells are computed once for all that is asked about them.
OF_DOORS = "docs/hosts/index.md"


@pytest.mark.parametrize("page", [page for page in WHOLE_PAGES if page != OF_DOORS])
def test_a_generated_page_is_up_to_date(page):
    """Catches a flag, a default, a route, a message or a test that was changed without its page."""
    assert text_of(page) == renewed(page, text_of(page)), f"{WRITE} {page}"


def case(page: str, begins: str, producer: pages.Producer):
    marks = [pytest.mark.slow] * producer.is_slow + [pytest.mark.megatron] * ("megatron" in producer.needs)
    return pytest.param(page, begins, marks=marks, id=f"{page} {begins}")


@pytest.mark.parametrize(
    ("page", "begins"), [case(page, *row) for page, rows in BLOCKS.items() for row in rows.items() if row[1].is_tested]
)
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


# The ledger of field bugs


def test_every_row_has_a_test_and_no_test_carries_an_unknown_number():
    """Catches a slip in a number, and a row whose test went."""
    rows = field_bugs.rows_of_page(field_bugs.PAGE.read_text(encoding="utf-8"))
    assert field_bugs.faults(rows, field_bugs.tested_ids(field_bugs.TESTS), field_bugs.named_ids(field_bugs.TESTS)) == []


def test_every_link_of_the_page_leads_to_the_number_that_it_shows():
    """Catches `verl#906` that leads to 960, and one repository's name over another's address."""
    text = field_bugs.PAGE.read_text(encoding="utf-8")
    links = re.findall(r"\[([^]\[]+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)\)", text)
    assert len(links) > 100
    repositories: dict[str, str] = {}
    for shown, repository, number in links:
        name, _, shown_number = shown.rpartition("#")
        assert shown_number == number, shown
        if name:  # `[#623]` continues the name before it
            assert repositories.setdefault(name, repository) == repository, shown
    assert len(set(repositories.values())) == len(repositories)
