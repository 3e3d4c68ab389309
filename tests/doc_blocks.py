"""Blocks of a page that a command printed: found by the comment above them, compared without what a machine decides.

    <!-- output of: COMMAND -->
    ```
    ...
    ```

It must never run a command: a test does, and compares.
"""

from __future__ import annotations

import re
from pathlib import Path

BLOCK = re.compile(r"<!-- output of: (?P<command>.*?) -->\n+```\w*\n(?P<text>.*?)```", re.DOTALL)
# What differs from machine to machine, and its stand-in: versions, seconds, roundings.
MACHINE = (
    (re.compile(r"\b\d+\.\d+\.\d+(\+\w+)?(\.\w+)?\b"), "VERSION"),
    (re.compile(r"\b\d+\.\d s\b"), "SECONDS"),
    (re.compile(r" +\de-\d\d"), " ERROR"),
)


def blocks(page: Path, command: str) -> list[str]:
    """The text of each block whose command begins so."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [match["text"] for match in found if match["command"].startswith(command)]


def normalised(text: str) -> str:
    for pattern, stand_in in MACHINE:
        text = pattern.sub(stand_in, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def commands(page: Path) -> list[str]:
    """Of every such block."""
    return [match["command"] for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]
