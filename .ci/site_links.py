"""A hook of mkdocs: files outside docs/ that a page links to become pages of the site. Only the targets of links change.

In a checkout `[contributing](../CONTRIBUTING.md)` leads to the file; mkdocs knows docs/ alone. So each linked file gets a page
below source/: Markdown as it is, with its links followed; a program as one block of code; a folder as a list of its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# [text](target) and ![text](target), where the target is a path, with or without an anchor.
LINK = re.compile(r"(?<=\]\()(?P<target>[^()\s:#]+)(?P<anchor>#[^()\s]*)?(?=\))")
FENCE = re.compile(r"^ *```")
LANGUAGES = {".py": "python", ".sh": "bash"}
# A search should find the page that explains a program, not the program's lines.
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n"
# A search should find a page to read before a list of names, a report or the changelog: factors of what it takes a page for worth.
BOOSTS = {"index.md": 4.0, "losses.md": 2.0, "aggregation.md": 2.0, "api.md": 0.3, "benchmarks/": 0.1, "source/": 0.1}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each path that a page links to, and for each that these link to."""
    waiting = [repository_path(file) for file in files.documentation_pages()]
    while waiting:
        for path in links_of(waiting.pop()):
            if is_outside(path) and (ROOT / path).exists() and files.get_file_from_path(page_of(path)) is None:
                files.append(new_page(path, config))
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points the links of a page to the pages that `on_files` has added, and sets its place in a search."""
    boost = next((boost for begins, boost in BOOSTS.items() if page.file.src_uri.startswith(begins)), None)
    if boost is not None:
        page.meta.setdefault("search", {"boost": boost})
    if page.file.abs_src_path is None:
        return markdown
    here = repository_path(page.file)

    def on_the_site(path: str) -> str:
        return relpath(page_of(path), dirname(page.file.src_uri) or ".")

    def lead(link: re.Match) -> str:
        path = normpath(join(dirname(here), link["target"]))
        is_moved = is_outside(path) or is_outside(here)
        return on_the_site(path) + (link["anchor"] or "") if is_moved and (ROOT / path).exists() else link[0]

    return outside_fences(markdown, lambda line: LINK.sub(lead, line))


def repository_path(file: File) -> str:
    """The path of a page's source. A page without a source was made here, and its name holds the path."""
    if file.abs_src_path is None:
        return file.src_uri.removeprefix("source/").removesuffix(".md").removesuffix("/index")
    return Path(file.abs_src_path).relative_to(ROOT).as_posix()


def is_outside(path: str) -> bool:
    return not path.startswith("docs/")


def page_of(path: str) -> str:
    """The name of a path's page among the sources of the site."""
    if not is_outside(path):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def new_page(path: str, config: MkDocsConfig) -> File:
    where = ROOT / path
    add = {"src_uri": page_of(path), "inclusion": InclusionLevel.NOT_IN_NAV}
    if path.endswith(".md"):
        return File.generated(config, abs_src_path=str(where), **add)
    if where.is_dir():
        names = {name: relpath(page_of(f"{path}/{name}"), dirname(page_of(path))) for name in names_in(where)}
        content = f"# {path}\n\n" + "".join(f"- [{name}]({page})\n" for name, page in names.items())
    else:
        content = f"{NOT_SEARCHED}# {path}\n\n````{LANGUAGES.get(where.suffix, '')}\n{where.read_text(encoding='utf-8')}````\n"
    return File.generated(config, content=content, **add)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def links_of(path: str) -> Iterator[str]:
    """The paths that a file links to, from the root of the repository."""
    where = ROOT / path
    if where.is_dir():
        yield from (f"{path}/{name}" for name in names_in(where))
    elif path.endswith(".md"):
        found: list[str] = []
        outside_fences(where.read_text(encoding="utf-8"), lambda line: found.extend(m["target"] for m in LINK.finditer(line)) or "")
        yield from (normpath(join(dirname(path), target)) for target in found)


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """The text, with each line outside blocks of code changed."""
    lines, is_code = [], False
    for line in markdown.split("\n"):
        is_fence = FENCE.match(line) is not None
        is_code ^= is_fence
        lines.append(line if is_code or is_fence else change(line))
    return "\n".join(lines)
