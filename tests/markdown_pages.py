"""Reads the Markdown of README.md, docs/ and examples/: links, headings, fences, code. It must never run what it reads."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?:<!-- (?P<comment>.*?) -->\n+)?```(?P<language>\w*)\n(?P<text>(?:(?!```).*\n)*)```$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
SPAN = re.compile(r"(?<!`)`(?!`)([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')

# A page whose Python blocks share one namespace: each goes on where the one before has ended. tests/pages.py runs them.
NOTEBOOK = "docs/step_by_hand.md"


@dataclass(frozen=True)
class Fence:
    page: str
    line: int
    comment: str  # of the line above, "" without one
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """From the root of the repository."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str) -> Iterator[Fence]:
    text = text_of(page)
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Fence(page, line, found["comment"] or "", found["language"], found["text"])


def prose(page: str) -> str:
    """Without fences and comments."""
    return COMMENT.sub("", FENCE.sub("", text_of(page)))


def spans(page: str) -> list[str]:
    """`code` within the prose; a line break within it is a space."""
    return [" ".join(span.split()) for span in SPAN.findall(prose(page))]


def links(page: str) -> list[str]:
    """Targets of links and images."""
    return LINK.findall(SPAN.sub("", prose(page)))


def anchors(page: str) -> set[str]:
    """What a link may name after #: headings that GitHub and mkdocs call alike, once on the page, and anchors in the text."""
    titles = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in HEADING.findall(prose(page))]
    slugs = [slug_of_github(title) for title in titles if slug_of_github(title) == slug_of_mkdocs(title)]
    return {slug for slug in slugs if slugs.count(slug) == 1} | set(ANCHOR.findall(prose(page)))


def slug_of_github(title: str) -> str:
    """Letters of any alphabet; each space is a hyphen."""
    return re.sub(r"[^\w\s-]", "", title.strip().lower()).replace(" ", "-")


def slug_of_mkdocs(title: str) -> str:
    """As markdown.extensions.toc.slugify: ASCII alone; spaces and hyphens in a row are one hyphen."""
    ascii_title = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode("ascii")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_title).strip().lower())
