"""A hook of mkdocs: a link from docs/ to a file outside it leads to the repository, REPOSITORY_URL; without that it becomes text.

In a checkout `[contributing](../CONTRIBUTING.md)` leads to the file; mkdocs knows docs/ alone.
"""

from __future__ import annotations

import os
import re
from posixpath import dirname, join, normpath
from typing import Any

from mkdocs.structure.pages import Page

# [text](target), where the target is a path, with or without an anchor. The text may have a word in brackets.
LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s:#]+)(?P<anchor>#[^()\s]*)?\)")
REPOSITORY_URL = os.environ.get("REPOSITORY_URL", "").rstrip("/")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    folder = dirname(join("docs", page.file.src_uri))

    def lead(link: re.Match[str]) -> str:
        path = normpath(join(folder, link["target"]))
        if path.startswith("docs/"):
            return link[0]
        if not REPOSITORY_URL:
            return link["text"]
        return f"[{link['text']}]({REPOSITORY_URL}/blob/main/{path}{link['anchor'] or ''})"

    # Outside blocks of code, which every second part is.
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(lead, part) for number, part in enumerate(parts))
