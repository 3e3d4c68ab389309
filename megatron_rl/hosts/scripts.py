"""What a train script imports, from its text: nothing of it is run."""

from __future__ import annotations

import ast
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
