"""The ledger of field bugs: page, table and tests agree. It looks at sources alone and never runs a test of another file."""

from __future__ import annotations

import ast
import re

import field_bugs


def test_every_row_has_a_test_and_no_test_carries_an_unknown_number():
    """Catches a slip in a number, a row whose test went, and a page that lists other tests than there are."""
    rows = field_bugs.rows_of_page(field_bugs.PAGE.read_text(encoding="utf-8"))
    found = field_bugs.report(rows, field_bugs.tested_ids(field_bugs.TESTS), field_bugs.named_ids(field_bugs.TESTS))
    assert found.is_complete and not found.has_unknown, "\n".join(found.lines)


def test_the_rows_of_the_page_are_in_order_and_none_is_left_out():
    """Numbers are never reused: a bug that is no longer one keeps its row. From 97 on a report has its number before its row."""
    numbers = [int(number[3:]) for number in field_bugs.rows_of_page(field_bugs.PAGE.read_text(encoding="utf-8"))]
    assert numbers[:96] == list(range(1, 97)) and numbers == sorted(numbers)


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


def messages_of(trees) -> str:
    """Every string of the package, one a line; what is put in at run time is a NUL."""
    found = []
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


# A name in quotes, what stands in brackets, a word with a number or a value in it, and flags, which are looked for by themselves.
PUT_IN = re.compile(r"'[^']*'|\[[^\]]*\]|\([^)]*\)|\S*[\d=]\S*|--[\w-]+")


def unknown_words(quoted: str, messages: str) -> list[str]:
    """What of a flag or message that the page quotes nobody says."""
    flags = [
        flag for flag in re.findall(r"--[a-z][\w-]+", quoted) if flag not in messages and flag[2:].replace("-", "_") not in messages
    ]
    runs = [run.strip(" :;,.") for run in PUT_IN.split(quoted)] if quoted not in messages else []
    return flags + [run for run in runs if " " in run and run not in messages]


def test_flags_and_messages_that_the_page_quotes_exist(package_trees):
    """Catches a message that was worded anew and a flag that was renamed: whoever searches for them would find nothing."""
    messages = messages_of(package_trees.values())
    assert unknown_words("--loss-agregation stands on the command line and in no args", messages) == [
        "--loss-agregation",
        "stands on the command line and in no args",
    ]
    unknown = {}
    for line in field_bugs.PAGE.read_text(encoding="utf-8").splitlines():
        if field_bugs.PAGE_ROW.match(line):
            here = field_bugs.BETWEEN_CELLS.split(line)[5]
            unknown |= {quoted: words for quoted in re.findall("`([^`]+)`", here) if (words := unknown_words(quoted, messages))}
    assert unknown == {}
