"""The ledger of field bugs: page, table and tests agree. It looks at sources alone and never runs a test of another file."""

from __future__ import annotations

import re

import field_bugs


def test_every_row_has_a_test_and_no_test_carries_an_unknown_number():
    """Catches a slip in a number, a row whose test went, and a page that lists other tests than there are."""
    rows = field_bugs.rows_of_page(field_bugs.PAGE.read_text(encoding="utf-8"))
    found = field_bugs.report(rows, field_bugs.tested_ids(field_bugs.TESTS), field_bugs.named_ids(field_bugs.TESTS))
    assert found.is_complete and not found.has_unknown, "\n".join(found.lines)


def test_every_link_of_the_page_leads_to_the_number_that_it_shows():
    """Catches `verl#906` that leads to 960, and one repository's name over another's address."""
    text = field_bugs.PAGE.read_text(encoding="utf-8")
    links = re.findall(r"\[([^]\[]+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)\)", text)
    assert len(links) > 150
    repositories: dict[str, str] = {}
    for shown, repository, number in links:
        name, _, shown_number = shown.rpartition("#")
        assert shown_number == number, shown
        if name:  # `[#623]` continues the name before it
            assert repositories.setdefault(name, repository) == repository, shown
    assert len(set(repositories.values())) == len(repositories)
