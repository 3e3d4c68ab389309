"""A hook of mkdocs: a block of ```math becomes MathML, which browsers draw without a script and without a network. GitHub draws the
same block from its source."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(?P<formula>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$`(?P<formula>[^`]+)`\$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    def block(found: re.Match[str]) -> str:
        return f'<div class="math">{mathml(found["formula"], display="block")}</div>'

    def inline(found: re.Match[str]) -> str:
        # Markdown takes a line that begins with <math> for a block of HTML, and one with <span> for text.
        return f"<span>{mathml(found['formula'], display='inline')}</span>"

    return INLINE.sub(inline, BLOCK.sub(block, markdown))


def mathml(formula: str, *, display: str) -> str:
    """On one line: Markdown takes an empty or an indented line of HTML for something else."""
    return " ".join(convert(formula.strip(), display=display).split())
