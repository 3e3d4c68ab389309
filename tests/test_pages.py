"""Generated pages and blocks show what their commands print. Nothing is written into docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pages
import pytest
from pages import BLOCKS, ROOT, WHOLE_PAGES, renewed
from test_validation import only_built_in_names  # noqa: F401  (what other tests register would be in messages)

WRITE = "write it anew: python tests/pages.py"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


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


def markdown_files() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_every_block_has_one_producer_and_every_producer_a_block():
    """Catches an output that nothing would renew, and an entry that outlived its block."""
    found = {page: [command for command, _ in pages.blocks(text_of(page))] for page in BLOCKS}
    for path in markdown_files():
        page = path.relative_to(ROOT).as_posix()
        for command, _ in pages.blocks(text_of(page)):
            assert len(pages.beginnings(page, command)) == 1, f"{page}: {command}"
    idle = [(page, begins) for page, of in BLOCKS.items() for begins in of if not any(c.startswith(begins) for c in found[page])]
    assert idle == []


def test_no_output_is_typed():
    """A block without a language is an output, so a comment says of what; $ stands in console blocks, which are outputs too."""
    for path in markdown_files():
        text = path.read_text(encoding="utf-8")
        known = {found.end() for _, found in pages.blocks(text)}
        for fence in re.finditer(r"^```(\w*)\n((?:(?!```).*\n)*)```$", text, re.MULTILINE):
            is_output = fence[1] in ("", "console") or re.search(r"^\$ ", fence[2], re.MULTILINE)
            assert not is_output or fence.end() in known, f"{path.name}: {fence[2].splitlines()[0]}"
        assert text.count("output of:") == sum("output of:" in found[0] for _, found in pages.blocks(text)), path.name


PAGE = """# a page

<!-- output of: a machine's line -->
```
torch 2.13.0+cpu, 7.2 s, 3e-07
```

```console
$ megatron-rl two \\
    lines
old
```
"""


@pytest.fixture
def fake(monkeypatch):
    def set_outputs(of_the_machine: str, of_the_command: str) -> str:
        made = {
            "a machine": pages.Producer(lambda command: of_the_machine, is_of_a_machine=True),
            "megatron-rl two": pages.Producer(lambda command: f"{command}: {of_the_command}"),
        }
        monkeypatch.setitem(BLOCKS, "page.md", made)
        return renewed("page.md", PAGE)

    return set_outputs


def test_what_a_machine_decides_is_left_alone_and_all_else_is_written(fake):
    """Catches a rerun that changes versions, seconds and roundings of every page, and one that changes nothing."""
    assert fake("torch 2.14.1, 11.9 s, 5e-08\n", "new\n") == PAGE.replace("old", "megatron-rl two lines: new")
    assert "torch 2.13.0+cpu, 8 rows" in fake("torch 2.13.0+cpu, 8 rows\n", "new\n")


def test_a_page_without_generated_parts_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pages.py", "docs/arguments.md", "docs/losses.md"])
    with pytest.raises(SystemExit, match="2"):
        pages.main()
    assert "nothing is generated in docs/losses.md" in capsys.readouterr().err
