"""The TRL that a run would import: its version, its fields and their defaults, from its text. Nothing of it is imported."""

from __future__ import annotations

import ast
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.hosts.scripts import syntax_tree

CONFIG = "trainer/{}_config.py"


def installed() -> tuple[int, int] | None:
    """The version, a development one as the last release before it; None: there is no TRL, or it says no version."""
    found = re.match(r"(\d+)\.(\d+)(.*)", found_version() or "")
    return None if found is None else (int(found[1]), int(found[2]) - ("dev" in found[3]))


def found_version() -> str | None:
    """As TRL writes it. A checkout says it in a file, whatever was installed from it, or beside it."""
    folder = _folder("trl")
    file = None if folder is None else folder.parent / "VERSION"
    if file is not None and file.is_file() and (file.parent / "pyproject.toml").is_file():
        return file.read_text(encoding="utf-8").strip()
    try:
        return version("trl")
    except PackageNotFoundError:
        return None


def declared(package: str, path: str, name: str) -> dict[str, ast.expr | None]:
    """The annotated names of a class and of its bases, with what is behind the sign; none where one is not found."""
    node, found = _class(package, path, name), dict[str, ast.expr | None]()
    for base in () if node is None else map(ast.unparse, node.bases):
        place = ("transformers", "training_args.py") if base == "TrainingArguments" else (package, CONFIG.format("base"))
        of_base = declared(*place, base)
        if not of_base:
            return {}
        found |= of_base
    return found | _own(node)


def default_of(file: str, name: str, field: str) -> Any:
    """What a field of a class of TRL's own has by default, where a constant says it; else None."""
    value = _own(_class("trl", file, name)).get(field)
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), value)
    return value.value if isinstance(value, ast.Constant) else None


def _class(package: str, path: str, name: str) -> ast.ClassDef | None:
    folder = _folder(package)
    file = None if folder is None else folder / path
    if file is None or not file.is_file():
        return None
    return next((one for one in syntax_tree(file).body if isinstance(one, ast.ClassDef) and one.name == name), None)


def _own(node: ast.ClassDef | None) -> dict[str, ast.expr | None]:
    """The annotated names of a class, without those of its bases."""
    return {} if node is None else {ast.unparse(one.target): one.value for one in node.body if isinstance(one, ast.AnnAssign)}


def _folder(package: str) -> Path | None:
    """Where Python would import it from. A folder of the name alone is no package."""
    try:
        spec = find_spec(package)
    except ValueError:  # a module in its place that was not imported from a file
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
