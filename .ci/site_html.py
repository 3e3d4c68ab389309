"""A hook of mkdocs: what a browser gets in the place of formulas and code.

A block of ```math becomes MathML, which browsers draw without a script and without a network; GitHub draws the same block from its
source. In code a flag stays in one piece, and the rows of a printed table stay rows.
"""

from __future__ import annotations

import re
from html import unescape
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
# Characters of a line that a block of code has room for, and rows and width of a table that is better scrolled than torn.
ROOM, FEWEST_ROWS, WIDEST_TABLE = 99, 5, 130


def on_page_markdown(markdown: str, **_: Any) -> str:
    def block(found: re.Match[str]) -> str:
        return f'<div class="math" data-search-exclude>{mathml(found["formula"], display="block")}</div>'

    def inline(found: re.Match[str]) -> str:
        # Markdown takes a line that begins with <math> for a block of HTML, and one with <span> for text.
        return f"<span>{mathml(found['formula'], display='inline')}</span>"

    return INLINE.sub(inline, BLOCK.sub(block, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """A line breaks behind any hyphen, so `--` would end a line and the name of the flag begin the next."""
    html = BLOCK_OF_CODE.sub(lambda block: block[0].replace('"', '"columns ', 1) if is_table(block[0]) else block[0], html)
    return CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)


def is_table(block: str) -> bool:
    lines = unescape(TAG.sub("", block)).split("\n")
    rows = sum(len(line) > ROOM and len(GAP.findall(line)) > 1 for line in lines)
    return rows >= FEWEST_ROWS and max(map(len, lines)) < WIDEST_TABLE


def mathml(formula: str, *, display: str) -> str:
    """On one line: Markdown takes an empty or an indented line of HTML for something else."""
    drawn = " ".join(convert(formula.strip(), display=display).split())
    # The converter keeps the backslash of an underscore in a text.
    return FUNCTION.sub(r'\1<mspace width="0.17em"></mspace>', drawn.replace(r"\_", "_"))
