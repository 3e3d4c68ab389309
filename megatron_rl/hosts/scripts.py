"""What a train script imports, from its text: nothing of it is run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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


# The function of miles that has the logger's flags, and none of the step.
LOGGER = "get_default_wandb_args"
# What a string puts in: ${name} for {name}.
_HOLE = re.compile(r"\$\{\w*\}")


def composed_words(tree: ast.Module, typed: Sequence[str] = ()) -> list[str]:
    """The flags in the strings that a script assigns or returns, in their order, as if each branch had run that its settings do not
    leave out. typed: what its own command line says of those."""
    found: list[tuple[int, str | None, ast.expr]] = []  # (line, name, value)
    replaced = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in typed if word.startswith("--")}
    for node in _nodes_that_run(tree, script_settings(tree, typed)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return) and node.value is not None:
            targets = [] if isinstance(node, ast.Return) else node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if not (isinstance(node, ast.AnnAssign) and names and names[0] in replaced):
                found.append((node.lineno, names[0] if names else None, node.value))
    # What names another text of flags is read where that is assigned.
    read = {name for _, name, value in found if name is not None and "--" in _text_of(value)} | {LOGGER}
    read |= {name for _, name, value in found if name is not None and (_is_empty(value) or _last_name(value) == LOGGER)}
    words: list[str] = []
    for _, _, value in sorted(found, key=lambda one: one[0]):
        text = _text_of(value)
        try:
            parts = shlex.split(text)
        except ValueError:  # an open quote
            parts = text.split()
        others = [word for word in parts if not (_HOLE.fullmatch(word) and word[2:-1] in read)]
        words += others if len(others) < len(parts) or any(word.startswith("--") for word in parts) else []
    return words


def _is_empty(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == ""


def script_settings(tree: ast.Module, typed: Sequence[str]) -> dict[str, Any]:
    """The fields of a script's own classes that have a constant, and that nothing else of the script sets. typed: what its command
    line says."""
    assigned, known = _assigned(tree), dict[str, Any]()
    passed = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and _last_name(node.value) != node.arg}
    classes: Sequence[ast.ClassDef] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for field in (one for node in classes for one in node.body if isinstance(one, ast.AnnAssign)):
        name = _last_name(field.target)
        if isinstance(field.value, ast.Constant) and len(assigned[name]) == 1 and name not in passed:
            known[name] = field.value.value
    for word, behind in pairwise([*typed, ""]):
        flag, is_joined, value = word.removeprefix("--").replace("-", "_").partition("=")
        name = flag.removeprefix("no_") if flag not in known else flag
        if word.startswith("--") and name in known:
            is_switch = isinstance(known[name], bool)
            known[name] = flag == name if is_switch else type(known[name])(value if is_joined else behind)
    return known


def _nodes_that_run(node: ast.AST, known: Mapping[str, Any]) -> Iterator[ast.AST]:
    """All below a node, without branches that the settings leave out."""
    yield node
    taken: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and (is_true := _truth_of(node.test, known)) is not None:
        taken = node.body if is_true else node.orelse
    for child in taken:
        yield from _nodes_that_run(child, known)


def _truth_of(test: ast.expr, known: Mapping[str, Any]) -> bool | None:
    """Of a condition on settings; None: it depends on more."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = _truth_of(test.operand, known)
        return None if found is None else not found
    if isinstance(test, ast.BoolOp):
        return truth_of_all([_truth_of(one, known) for one in test.values], ends=isinstance(test.op, ast.Or))
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        left, right = test.left, test.comparators[0].value
        if isinstance(left, ast.Attribute) and left.attr in known and isinstance(test.ops[0], ast.Eq | ast.NotEq):
            return bool(known[left.attr] == right) == isinstance(test.ops[0], ast.Eq)
    return bool(known[test.attr]) if isinstance(test, ast.Attribute) and test.attr in known else None


def truth_of_all(parts: Sequence[bool | None], *, ends: bool) -> bool | None:
    """Of parts joined by or, where a true one ends it, or by and, where a false one does. None: not known."""
    return ends if ends in parts else None if None in parts else not ends


def named_texts(tree: ast.Module, name: str) -> set[str] | None:
    """The texts that a script gives to a name or an argument, of its own classes too, and by other names of its own; None: one may
    be another, from elsewhere."""
    assigned = _assigned(tree)
    values = [value for other, value in _named(tree, assigned) if other == name]
    own: list[ast.expr] = []
    for value in values:
        other = value.id if isinstance(value, ast.Name) else None
        if _last_name(value) != name:  # the others hand it on
            own += assigned[other] if other in assigned else [value]
    texts = {value.value for value in own if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    is_known = not values or (own and all(isinstance(value, ast.Constant) for value in own))
    return texts if is_known else None


def default_text(tree: ast.Module, name: str) -> str | None:
    """What a class of a script gives a name where nobody says otherwise."""
    fields: Sequence[ast.ClassDef] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = [one for node in fields for one in node.body if isinstance(one, ast.AnnAssign) and _last_name(one.target) == name]
    values = [one.value.value for one in own if isinstance(one.value, ast.Constant)]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _assigned(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What a script assigns to each name, or to an attribute of that name."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found.setdefault(_last_name(target), []).append(node.value)
    return found


def _named(tree: ast.Module, assigned: Mapping[str, list[ast.expr]]) -> Iterator[tuple[str, ast.expr]]:
    """The same, and the values of arguments by their names."""
    yield from ((name, value) for name, values in assigned.items() for value in values)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, node.value


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
