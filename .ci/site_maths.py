"""A hook of mkdocs: a block of ```math becomes MathML, which browsers draw without a script and without a network. GitHub draws the
same block from its source."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(?P<formula>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$`(?P<formula>[^`]+)`\$")
# The converter keeps the backslash of an underscore in a text, and sets a function and its argument without a space.
TEXT = re.compile(r"\\text\{[^}]*\}")
FUNCTION = re.compile(r"(<mi>(?:log|ln|exp)</mi>)(?!<mo)")
# --flag in a block or a piece of code. A browser may break a line after any hyphen, even between the two.
CODE = re.compile(r"<code[^>]*>.*?</code>", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--\w+")


def on_page_markdown(markdown: str, **_: Any) -> str:
    def block(found: re.Match[str]) -> str:
        return f'<div class="math">{mathml(found["formula"], display="block")}</div>'

    def inline(found: re.Match[str]) -> str:
        # Markdown takes a line that begins with <math> for a block of HTML, and one with <span> for text.
        return f"<span>{mathml(found['formula'], display='inline')}</span>"

    return INLINE.sub(inline, BLOCK.sub(block, markdown))


def mathml(formula: str, *, display: str) -> str:
    """On one line: Markdown takes an empty or an indented line of HTML for something else."""
    formula = TEXT.sub(lambda text: text[0].replace(r"\_", "_"), formula.strip())
    return FUNCTION.sub(r'\1<mspace width="0.17em"/>', " ".join(convert(formula, display=display).split()))


def on_page_content(html: str, **_: Any) -> str:
    """Keeps the two hyphens of a flag and its first word together."""
    return CODE.sub(lambda code: FLAG.sub(lambda flag: f'<span class="flag">{flag[0]}</span>', code[0]), html)
