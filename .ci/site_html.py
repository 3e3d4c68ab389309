"""A hook of mkdocs: formulas become MathML, which browsers draw without a script and without a network."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(?P<formula>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$`(?P<formula>[^`]+)`\$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = BLOCK.sub(lambda found: f'<div class="math">{mathml(found["formula"], "block")}</div>', markdown)
    # Markdown takes a line that begins with <math> for a block of HTML, and one with <span> for text.
    return INLINE.sub(lambda found: f"<span>{mathml(found['formula'], 'inline')}</span>", markdown)


def mathml(formula: str, display: str) -> str:
    """On one line: Markdown takes an empty or an indented line of HTML for something else."""
    drawn = " ".join(convert(formula.strip(), display=display).split())
    return drawn.replace(r"\_", "_")  # the converter keeps the backslash of an underscore in a text
