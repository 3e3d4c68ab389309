"""The ledger of field bugs: page, table and tests agree. It looks at sources alone and never runs a test of another file."""

from __future__ import annotations

import ast
import re

import field_bugs
import pytest

# Numbers are written in two parts, so that the search does not take them for claims of this file.
FB = "FB-"


def row(number: str, here: str = "refused", tests: str = "-", anchor: str | None = None) -> str:
    return f'| <a id="fb-{number if anchor is None else anchor}"></a>{FB}{number} | verl#1 | a \\| b | cause | {here} | {tests} |\n'


PAGE = "# Field bugs\n\n| id | seen in | symptom | cause | here | tests |\n|---|---|---|---|---|---|\n" + "".join(
    [row("01", tests="`test_x.py`"), row("02"), row("03", here="n/a: not shipped")]
)
TABLE = "| id | where | test |\n|---|---|---|\n" + "".join(
    f"| {FB}{number} | a \\| b | {test} |\n" for number, test in [("01", "values"), ("02", "values"), ("03", "n/a: why")]
)


def test_docstrings_and_ids_carry_a_number_and_comments_do_not(tmp_path):
    """A number in a comment shows in no report of a test; an unknown one is a slip wherever it stands."""
    (tmp_path / "test_x.py").write_text(f'"""{FB}01: a."""\nIDS = ["{FB}02 b"]  # {FB}03\n', encoding="utf-8")
    (tmp_path / "cases.py").write_text(f'"""{FB}77."""', encoding="utf-8")
    assert field_bugs.tested_ids(tmp_path) == {f"{FB}01": {"test_x.py"}, f"{FB}02": {"test_x.py"}}
    assert field_bugs.named_ids(tmp_path) == {
        **{f"{FB}{number}": {"test_x.py"} for number in ("01", "02", "03")},
        f"{FB}77": {"cases.py"},
    }


def test_rows_without_a_test_and_unknown_numbers_are_told_apart():
    rows = field_bugs.rows_of_page(PAGE)
    found = field_bugs.report(rows, {f"{FB}01": {"test_x.py"}}, {f"{FB}01": {"test_x.py"}, f"{FB}77": {"cases.py"}})
    assert found.lines == [
        f"unknown number {FB}77 in cases.py",
        f"no test for {FB}02",
        "3 rows, 1 without a test, 1 unknown numbers",
    ]
    assert found.has_unknown and not found.is_complete


def test_a_page_that_lists_other_tests_is_stale_until_it_is_written_anew():
    """A test that moves leaves its old file's name behind; all else on the page stays as it is."""
    tested = {f"{FB}01": {"test_z.py", "test_y.py"}, f"{FB}02": {"test_x.py"}}
    before = field_bugs.report(field_bugs.rows_of_page(PAGE), tested, tested)
    assert not before.is_complete and f"for {FB}01, {FB}02: python tests/field_bugs.py --write" in before.lines[0]
    page = field_bugs.filled(PAGE, tested)
    assert field_bugs.report(field_bugs.rows_of_page(page), tested, tested).is_complete
    expected = PAGE.replace("| `test_x.py` |", "| `test_y.py`, `test_z.py` |").replace("refused | - |", "refused | `test_x.py` |")
    assert page == expected and field_bugs.filled(page, tested) == page


@pytest.mark.parametrize(
    "line", [row("01"), row("04", anchor="40"), row("04", here="a | b")], ids=["a number twice", "another's anchor", "a bare pipe"]
)
def test_a_row_that_nobody_could_link_to_or_read_is_refused(line):
    with pytest.raises(ValueError, match="one row of six cells, with the anchor"):
        field_bugs.rows_of_page(PAGE + line)


def test_every_row_has_a_test_and_no_test_carries_an_unknown_number():
    """Catches a slip in a number, a row whose test went, and a page that lists other tests than there are."""
    rows = field_bugs.rows_of_page(field_bugs.PAGE.read_text(encoding="utf-8"))
    found = field_bugs.report(rows, field_bugs.tested_ids(field_bugs.TESTS), field_bugs.named_ids(field_bugs.TESTS))
    assert found.is_complete and not found.has_unknown, "\n".join(found.lines)


def test_the_rows_of_the_page_are_in_order_and_none_is_left_out():
    """Numbers are never reused: a bug that is no longer one keeps its row. From 97 on a report has its number before its row."""
    numbers = [int(number[3:]) for number in field_bugs.rows_of_page(field_bugs.PAGE.read_text(encoding="utf-8"))]
    assert numbers[:96] == list(range(1, 97)) and numbers == sorted(numbers)


def test_the_table_and_the_page_say_alike_which_rows_need_a_test():
    needs = {number: of_row.needs_test for number, of_row in field_bugs.rows_of_page(PAGE).items()}
    assert field_bugs.ids_of_table(TABLE) == needs


@pytest.mark.skipif(not field_bugs.TABLE.exists(), reason="the table of reports does not lie beside this checkout")
def test_the_page_has_the_rows_of_the_table():
    """Catches a report of the table that the page lacks. The page may know newer ones."""
    rows = field_bugs.rows_of_page(field_bugs.PAGE.read_text(encoding="utf-8"))
    reported = field_bugs.ids_of_table(field_bugs.TABLE.read_text(encoding="utf-8"))
    assert reported.items() <= {number: of_row.needs_test for number, of_row in rows.items()}.items()


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
