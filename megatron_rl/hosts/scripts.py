"""What a train script imports, from its text: nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.errors import ConfigError


def syntax_tree(script: Path) -> ast.Module:
    try:
        return ast.parse(script.read_bytes(), filename=str(script))
    except SyntaxError as error:
        raise ConfigError(f"{script} is no Python script: {error}") from error


def imported_packages(tree: ast.Module) -> set[str]:
    """The top-level names that a script imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def taken_from(tree: ast.Module, module: str) -> list[str]:
    """The names that a script takes by `from module import`."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module]
    return [alias.name for node in froms for alias in node.names]


def module_file(module: str, folders: Iterable[str | Path]) -> Path | None:
    """The file that an import of the module would find first in these folders."""
    parts = module.split(".")
    for folder in folders:
        place = Path(folder, *parts)
        for path in (place.parent / f"{place.name}.py", place / "__init__.py"):
            if path.is_file():
                return path
    return None


def defines(tree: ast.Module, name: str) -> bool:
    """Whether a module may have that name, as far as its text tells: anything is possible after `import *`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return not found.isdisjoint({name, "*", "__getattr__"})
