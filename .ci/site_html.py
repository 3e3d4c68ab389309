"""A hook of mkdocs: what a browser gets in the place of formulas and code.

A block of ```math becomes MathML, which browsers draw without a script and without a network; GitHub draws the same block from its
source. In code a flag stays in one piece, and the rows of a printed table stay rows.
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(?P<formula>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$`(?P<formula>[^`]+)`\$")
# The converter sets a function and its argument without a space.
FUNCTION = re.compile(r"(<mi>(?:log|ln|exp)</mi>)(?!<mo|<mrow><mo)")
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
# Not inside of a tag.
FLAG = re.compile(r"--[a-z][a-z0-9-]*(?![^<>]*>)")
BLOCK_OF_CODE = re.compile(r'<div class="[^"]*highlight">.*?</div>', re.DOTALL)
TAG, GAP = re.compile(r"<[^>]*>"), re.compile(r"\S {2,}\S")
# A small screen shows the picture by itself.
PICTURE, LINK_TO_IT = re.compile(r'<img [^>]*?src="([^"]+)"[^>]*>'), r'<a class="picture" href="\1">\g<0></a>'
TABLE, ROW = re.compile(r"<table>.*?</table>", re.DOTALL), re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(?P<kind>t[hd])(?P<style>[^>]*)>(?P<text>.*?)</t[hd]>", re.DOTALL)
NAME, JOINT, LONGEST_NAME = re.compile(r"[\w./-]+(?![^<>]*>)"), re.compile(r"[._/](?=\w)"), 24
# Columns of a table of sentences, and characters that a phone shows side by side.
MOST_COLUMNS, ON_A_PHONE = 5, 36
# Characters of a line that a block of code has room for, and rows and width of a printed table that is better scrolled than torn.
# A wider block has sentences too: these break, and its rows have room in small letters.
ROOM, FEWEST_ROWS, WIDEST_TABLE = 99, 3, 130


def on_page_markdown(markdown: str, **_: Any) -> str:
    def block(found: re.Match[str]) -> str:
        # What stands side by side may stand one below the other where a line is short.
        formulas = [found["formula"]] if "\\begin{" in found["formula"] else found["formula"].split("\\qquad")
        drawn = "".join(mathml(formula, display="block") for formula in formulas)
        return f'<div class="math" data-search-exclude>{drawn}</div>'

    def inline(found: re.Match[str]) -> str:
        # Markdown takes a line that begins with <math> for a block of HTML, and one with <span> for text.
        return f"<span>{mathml(found['formula'], display='inline')}</span>"

    return INLINE.sub(inline, BLOCK.sub(block, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """A line breaks behind any hyphen, so `--` would end a line and the name of the flag begin the next."""
    html = BLOCK_OF_CODE.sub(lambda block: block[0].replace('"', f'"{layout_of(block[0])}', 1), html)
    html = CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
    html = PICTURE.sub(LINK_TO_IT, html)
    return TABLE.sub(lambda table: as_cards(CODE.sub(lambda code: with_breaks(code[0]), table[0])), html)


def with_breaks(code: str) -> str:
    """A long name of a column may go on in a second line, behind a dot or an underscore."""
    return NAME.sub(lambda name: JOINT.sub(r"\g<0><wbr>", name[0]) if len(name[0]) > LONGEST_NAME else name[0], code)


def as_cards(table: str) -> str:
    """A table of sentences that a phone has no room for: there each row becomes a card, and each cell has its column's name."""
    head, *rows = [list(CELL.finditer(row)) for row in ROW.findall(table)]
    names = [" ".join(unescape(TAG.sub("", cell["text"])).split()) for cell in head]
    columns = zip(*[[unescape(TAG.sub("", cell["text"])).split() for cell in row] for row in rows], strict=True)
    widths = [
        max((min(len(" ".join(words)), max(map(len, words), default=0) + 8) for words in column), default=0) for column in columns
    ]
    if len(names) > MOST_COLUMNS or sum(widths) <= ON_A_PHONE:
        return table
    waiting = iter(names * len(rows))

    def named(cell: re.Match[str]) -> str:
        if cell["kind"] == "th":
            return cell[0]
        return f'<td data-column="{escape(next(waiting))}"{cell["style"]}>{cell["text"]}</td>'

    return CELL.sub(named, table.replace("<table>", "<table data-cards>", 1))


def layout_of(block: str) -> str:
    """The class of a block that holds a printed table, or nothing."""
    lines = unescape(TAG.sub("", block)).split("\n")
    widest = max(map(len, lines))
    widths = [len(line) for line in lines if len(GAP.findall(line)) > 1]
    if sum(width > ROOM for width in widths) >= FEWEST_ROWS:
        return "columns " if widest < WIDEST_TABLE else "rows "
    return "scrolled " if len(widths) >= FEWEST_ROWS and widest <= ROOM else ""


def mathml(formula: str, *, display: str) -> str:
    """On one line: Markdown takes an empty or an indented line of HTML for something else."""
    drawn = " ".join(convert(formula.strip(), display=display).split())
    # The converter keeps the backslash of an underscore in a text.
    return FUNCTION.sub(r'\1<mspace width="0.17em"></mspace>', drawn.replace(r"\_", "_"))
