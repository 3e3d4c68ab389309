"""What a train script imports, from its text: nothing of it is run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.errors import ConfigError
from megatron_rl.files.bounds import is_regular


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


# What a string puts in: ${name} for {name}.
_HOLE = re.compile(r"\$\{\w*\}")


def composed_words(tree: ast.Module) -> list[str]:
    """The flags in the strings that a script assigns or returns, in their order, as if each branch had run."""
    found: list[tuple[int, str | None, str]] = []  # (line, name, text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return) and node.value is not None:
            targets = [] if isinstance(node, ast.Return) else node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found.append((node.lineno, names[0] if names else None, _text_of(node.value)))
    of_flags = {name for _, name, text in found if name is not None and "--" in text}
    words: list[str] = []
    for _, _, text in sorted(found, key=lambda one: one[0]):
        try:
            parts = shlex.split(text)
        except ValueError:  # an open quote
            parts = text.split()
        # What names another text of flags is read where that is assigned.
        others = [word for word in parts if not (_HOLE.fullmatch(word) and word[2:-1] in of_flags)]
        words += others if len(others) < len(parts) or any(word.startswith("--") for word in parts) else []
    return words


def named_texts(tree: ast.Module, name: str) -> set[str] | None:
    """The texts that a script gives to a name or an argument, of its own classes too; None: one may be another, from elsewhere."""
    values: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == name:
            values.append(node.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values += [node.value for target in targets if _last_name(target) == name]
    own = [value for value in values if _last_name(value) != name]  # the others hand it on
    texts = {value.value for value in own if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    is_known = not values or (own and all(isinstance(value, ast.Constant) for value in own))
    return texts if is_known else None


def model_words(models: Path, name: str) -> list[str] | None:
    """The flags in the script of a model, in a folder of one script a model; None: it is not here."""
    file = models / f"{name}.py"
    return composed_words(syntax_tree(file)) if is_regular(file) else None


def _text_of(value: ast.expr) -> str:
    """A literal with ${name} in the place of what is put in; "" for what is no text of flags."""
    parts = value.values if isinstance(value, ast.JoinedStr) else [value]
    text = "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else f"${{{_last_name(part)}}}"
        for part in parts
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )
    return text if re.match(r"\s*(--|\$\{)", text) else ""


def _last_name(part: ast.expr) -> str:
    """The name of what a {...} holds, as get_wandb_args of {tools.get_wandb_args(name)}."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    while isinstance(value, ast.Call):
        value = value.func
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else "value"
