"""The flags that a Python script puts together, from its strings: nothing of it is run."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.files.bounds import is_regular
from megatron_rl.hosts.script_constants import (
    UNKNOWN,
    Constants,
    assignments_of,
    constants_of,
    evaluate,
    is_secret,
    last_name,
    nodes_of_branches,
    nodes_that_run,
)
from megatron_rl.hosts.scripts import module_file, syntax_tree

# The function of miles that has the logger's flags, and none of the step.
LOGGER = "get_default_wandb_args"
# What a string puts in: ${name} for {name}.
_HOLE = re.compile(r"\$\{\w*\}")
# How similar a word is to the setting that it misspells.
CLOSEST_SETTING = 0.85
# miles's decorator that reads options from the environment too, by names with this prefix; the words that turn a switch on there.
OF_ENVIRONMENT, PREFIX_OF_ENVIRONMENT, ON_WORDS = "dataclass_cli", "MILES_SCRIPT_", ("1", "true", "t", "yes", "y", "on")
# What makes options of a function's parameters, with hyphens.
TYPER = "typer"
# Types of options that are numbers.
NUMBERS: Mapping[str, Callable[[str], object]] = {"int": int, "float": float}
# A value that is another one in each branch.
_BRANCH = "${value}"
# Statements that only define.
DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def composed_words(tree: ast.Module, typed: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> list[str]:
    """The flags in the strings that a script assigns or returns, in their order, as if each branch had run that its settings do not
    leave out. typed: what its own command line says of those. environment: the script's. A value is ${value} where it depends on
    such a branch."""
    found: list[tuple[int, str | None, ast.expr, bool]] = []  # (line, name, value, whether it may be left out)
    settings = typed_settings(tree, typed)
    known = constants_of(tree, settings, environment)
    for node, may_run in nodes_of_branches(tree, known):
        for target, value in _texts_of(node):
            name = target.id if isinstance(target, ast.Name) else None
            if not (isinstance(node, ast.AnnAssign) and name in settings):
                found.append((value.lineno, name, value, may_run))
    # What names another text of flags is read where that is assigned.
    read = {name for _, name, value, _ in found if name is not None and "--" in _text_of(value, known)} | {LOGGER}
    read |= {
        name for _, name, value, _ in found if name is not None and (evaluate(value, known) == "" or _last_name(value) == LOGGER)
    }
    texts: list[tuple[list[str], bool]] = []
    for _, _, value, may_run in sorted(found, key=lambda one: one[0]):
        text = _text_of(value, known)
        try:
            parts = shlex.split(text)
        except ValueError:  # an open quote
            parts = text.split()
        others = [word for word in parts if not (_HOLE.fullmatch(word) and word[2:-1] in read)]
        if len(others) < len(parts) or any(word.startswith("--") for word in parts):
            texts.append((others, may_run))
    return [word for text in _without_branches(texts) for word in text]


def _texts_of(node: ast.AST) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    """(target, value) of what is assigned or returned. In a = b = "--flag 1" the text is one."""
    if isinstance(node, ast.AugAssign):
        yield node.target, node.value
    elif isinstance(node, ast.Return) and node.value is not None:
        yield None, node.value
    elif isinstance(node, ast.Assign):
        yield from assignments_of(ast.Assign(node.targets[:1], node.value))
    else:
        yield from assignments_of(node)


def _without_branches(texts: Sequence[tuple[list[str], bool]]) -> Iterator[list[str]]:
    """(words, whether they may be left out) -> the words. A value that a branch replaces, or gives in the place of an earlier one,
    is ${value}."""
    values = dict[str, tuple[list[str], bool]]()  # of each flag: its values so far, and whether they differ
    for words, may_run in texts:
        parts = _by_flag(words)
        for flag, value in parts:
            before, differs = values.get(flag, (value, False))
            values[flag] = (value, may_run and (differs or before != value))
    for words, _ in texts:
        yield [
            word
            for flag, value in _by_flag(words)
            for word in ([flag] if flag else []) + ([_BRANCH] if values[flag][1] and value and flag else value)
        ]


def _by_flag(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(flag, its values), in their order; the words before the first flag have none."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found


def typed_settings(tree: ast.Module, typed: Sequence[str]) -> dict[str, Any]:
    """What the command line of a script says of the fields of its own classes, as their defaults are: numbers, switches, texts."""
    fields = {_last_name(one.target): one.value for one in _fields(tree)}
    defaults = {name: value.value for name, value in fields.items() if isinstance(value, ast.Constant)}
    settings = dict[str, Any]()
    for word, behind in pairwise([*typed, ""]):
        flag, is_joined, value = word.removeprefix("--").replace("-", "_").partition("=")
        if not word.startswith("--"):
            continue
        value = word.partition("=")[2] if is_joined else behind
        name = flag.removeprefix("no_") if flag not in fields else flag
        if isinstance(defaults.get(name), bool):
            settings[name] = flag == name
        elif _HOLE.search(value):
            settings[name] = UNKNOWN
        else:
            settings[name] = _read_as(defaults.get(name), value)
    return settings


def typed_by_environment(tree: ast.Module, typed: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What miles's dataclass_cli takes from the environment, as words behind the script: options that are not typed."""
    words, prefix = list[str](), _prefix_of_environment(tree, environment)
    given = {word.removeprefix("--").partition("=")[0].replace("-", "_").removeprefix("no_") for word in typed}
    for field, default in {_last_name(one.target): one.value for one in _fields(tree)}.items():
        value = environment.get(variable := f"{prefix}{field.upper()}") if prefix else None
        if value is None or field in given or is_secret(variable, value):
            continue
        is_switch = isinstance(default, ast.Constant) and isinstance(default.value, bool)
        is_off = is_switch and value.lower() not in ON_WORDS
        words.append(f"--no-{field}" if is_off else f"--{field}" if is_switch else f"--{field.replace('_', '-')}={value}")
    return words


def _prefix_of_environment(tree: ast.Module, environment: Mapping[str, str]) -> str:
    """Empty: no function has the decorator, or it reads no environment."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for decorator in (one for node in functions for one in node.decorator_list if _last_name(one) == OF_ENVIRONMENT):
        given = decorator.keywords if isinstance(decorator, ast.Call) else []
        values = [evaluate(one.value, constants_of(tree, {}, environment)) for one in given if one.arg == "env_var_prefix"]
        return next((value if isinstance(value, str) else "" for value in values), PREFIX_OF_ENVIRONMENT)
    return ""


def misspelt_settings(tree: ast.Module, typed: Sequence[str], text: str) -> Iterator[str]:
    """Of the words behind a script, those that none of its options is: all of them where the script takes `text`, the option whose
    value is text of flags, and each class that it extends is here; else what is nearly an option."""
    fields = {_last_name(one.target).replace("_", "-") for one in _fields(tree)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    parameters = {one.arg.replace("_", "-") for node in functions for one in (*node.args.args, *node.args.kwonlyargs)}
    names = fields | {f"no-{name}" for name in fields} | parameters | {"help"}
    switched_off = {f"no-{last_name(one.target)}".replace("_", "-") for one in _fields(tree) if _kind(one.annotation) == "bool"}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    extended = {_last_name(base) for node in classes for base in node.bases}
    knows_all = text.removeprefix("--") in fields and extended <= {node.name for node in classes}
    of_typer = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names} & {TYPER}
    written = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for before, word in pairwise(["", *typed]):
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("_", "-")
        if not word.startswith("--") or " " in name or before == text:  # a text of flags is a value
            continue
        if name in names:
            if of_typer and "_" in flag and flag not in written:
                yield f"{flag} is no option of the script: typer makes --{name} of {name.replace('-', '_')}; type that"
            continue
        close = get_close_matches(name, fields | switched_off, n=1, cutoff=CLOSEST_SETTING)
        if close:
            yield f"--{name} is no option of the script: did you mean --{close[0]}?"
        elif knows_all:
            yield f"--{name} is no option of the script, which ends there: flags of train.py go into {text}, as one text"


def refused_values(tree: ast.Module, typed: Sequence[str], text: str) -> Iterator[str]:
    """Of the options behind a script, the values that their types do not take: a word that is none of a Literal's, by an alias too,
    or is no number."""
    nodes = [node for node in tree.body if isinstance(node, ast.Assign)]
    aliases = {name: _kind(node.value) for node in nodes for name in map(_last_name, node.targets)}
    kinds: dict[str, set[str]] = {}
    for one in _fields(tree):
        kind = _kind(one.annotation)
        kinds.setdefault(_last_name(one.target).replace("_", "-"), set()).add(aliases.get(kind, kind))
    words = ["", *typed, ""]
    for before, word, behind in zip(words[:-2], words[1:-1], words[2:], strict=True):
        flag, is_joined, joined = word.partition("=")
        value, of_name = joined if is_joined else behind, kinds.get(flag.removeprefix("--"), set())
        if not word.startswith("--") or before == text or len(of_name) != 1 or not value or "$" in value or "`" in value:
            continue
        (kind,) = of_name
        choices = re.findall(r"'([^']*)'", kind) if kind.startswith("Literal[") else []
        if choices and value not in choices:
            close = get_close_matches(value, choices, n=1)
            yield f"{flag} {value} is none of {', '.join(choices)}{f': did you mean {close[0]}?' if close else ''}"
        elif kind in NUMBERS and not _is_a(NUMBERS[kind], value):
            yield f"{flag} {value} is no {'whole ' * (kind == 'int')}number"


def _kind(annotation: ast.expr) -> str:
    """The text of a type, without None beside it."""
    return re.sub(r"^Optional\[(.*)\]$|\s*\|\s*None\b", r"\1", ast.unparse(annotation)).removeprefix("typing.")


def _is_a(kind: Callable[[str], object], value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def _read_as(default: object, value: str) -> Any:
    """A typed word, as a parser reads it by the kind of the default."""
    kinds = (type(default),) if isinstance(default, int | float | str) else (int, float, str)
    for kind in kinds:
        try:
            return kind(value)
        except ValueError:
            continue
    return UNKNOWN


def _fields(tree: ast.Module) -> Iterator[ast.AnnAssign]:
    classes: Sequence[ast.ClassDef] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    yield from (one for node in classes for one in node.body if isinstance(one, ast.AnnAssign))


def with_imported(tree: ast.Module, folders: Sequence[Path]) -> ast.Module:
    """The script with what it takes from the files of its modules: before it the fields of the classes that its own ones extend,
    and constants in the place of their names."""
    modules = {
        alias.asname or alias.name: alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    extended = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    attributes = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and ast.unparse(one.value) in modules]
    files = {name: module_file(modules[name], folders) for name in {ast.unparse(one.value) for one in attributes}}
    trees = {name: syntax_tree(file) for name, file in files.items() if file is not None}
    found: list[ast.stmt] = []
    for base in (one for one in attributes if one in extended):
        nodes = trees[ast.unparse(base.value)].body if ast.unparse(base.value) in trees else []
        for node in (one for one in nodes if isinstance(one, ast.ClassDef) and one.name == base.attr):
            node.body = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            found.append(node)
    constants = {f"{name}.{constant}": value for name, one in trees.items() for constant, value in _literals(one)}
    tree = _InPlace(constants).visit(tree)
    tree.body = [*found, *tree.body]
    return tree


def _literals(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """What a module assigns once to a name in capitals, where it is written out."""
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    for node in (one for one in tree.body if isinstance(one, ast.Assign)):
        match node.targets:
            case [ast.Name(id=name)] if name.isupper() and names.count(name) == 1 and _is_literal(node.value):
                yield name, node.value


def _is_literal(value: ast.expr) -> bool:
    parts = (ast.Constant, ast.Dict, ast.Tuple, ast.List, ast.Set, ast.UnaryOp, ast.unaryop, ast.expr_context)
    return all(isinstance(one, parts) for one in ast.walk(value))


class _InPlace(ast.NodeTransformer):
    """Puts values in the place of names with dots."""

    def __init__(self, values: Mapping[str, ast.expr]):
        self.values = values

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        value = self.values.get(ast.unparse(node)) if isinstance(node.ctx, ast.Load) else None
        return self.generic_visit(node) if value is None else value


def only_defines(tree: ast.Module) -> bool:
    """Whether a script runs none of its functions, as a file of tests or a library."""
    others = [node for node in tree.body if not isinstance(node, DEFINING)]
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in others) and not any(
        isinstance(node, ast.Call) and _last_name(node) in _functions(tree)
        for one in tree.body
        if isinstance(one, ast.Assign | ast.AnnAssign)
        for node in ast.walk(one)
    )


def _functions(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def settings_of_another(tree: ast.Module, environment: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(module, the words that say the same on its command line): classes of other scripts that a script imports and fills in."""
    known = constants_of(tree, {}, environment)
    nodes = list(nodes_that_run(tree, known))
    modules = {
        alias.asname or alias.name: node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in modules and not node.args:
            words = [_typed(one.arg, evaluate(one.value, known)) for one in node.keywords if one.arg is not None]
            yield str(modules[node.func.id]), words


def _typed(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={f'${{{name}}}' if value is UNKNOWN or isinstance(value, tuple) else value}"


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


def text_handed_to_a_function(tree: ast.Module, name: str, typed: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The one text from which a function makes the value of a name, as in model_type = model_type_of(args.model_name)."""
    known = constants_of(tree, typed_settings(tree, typed), environment)
    calls = [value for other, value in _named(tree, _assigned(tree)) if other == name and isinstance(value, ast.Call)]
    given = [evaluate(one, known) for call in calls for one in call.args]
    return given[0] if len(calls) == len(given) == 1 and isinstance(given[0], str) else None


def text_handed_on(tree: ast.Module, name: str, typed: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The one text that an argument of a name is given from something of that name, as in model_type=recipe.model_type."""
    known = constants_of(tree, typed_settings(tree, typed), environment)
    handed = [value for other, value in _named(tree, _assigned(tree)) if other == _last_name(value) == name]
    texts = {evaluate(value, known) for value in handed}
    return text if len(texts) == 1 and isinstance(text := texts.pop(), str) else None


def default_text(tree: ast.Module, name: str) -> str | None:
    """What a class of a script gives a name where nobody says otherwise."""
    own = [one for one in _fields(tree) if _last_name(one.target) == name]
    values = [one.value.value for one in own if isinstance(one.value, ast.Constant)]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _assigned(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What a script assigns to each name, or to an attribute of that name."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        for target, value in assignments_of(node):
            found.setdefault(_last_name(target), []).append(value)
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


def _text_of(value: ast.expr, known: Constants) -> str:
    """A text with ${name} in the place of what is put in and not known; "" for what is no text of flags."""
    text = _text(value, known) or ""
    return text if re.match(r"\s*(--|\$\{)", text) else ""


def _text(value: ast.expr, known: Constants) -> str | None:
    """None: not a text that is written out here."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(_text(part, known) or "" for part in value.values)
        case ast.FormattedValue():
            return _put_in(value.value, known)
        case ast.IfExp() if evaluate(value, known) is UNKNOWN:  # both, as of each branch that is not decided
            arms = [_text(arm, known) for arm in (value.body, value.orelse)]
            return None if None in arms else " ".join(map(str, arms))
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[ast.List() as texts]):
            return between.join(_put_in(one, known) for one in texts.elts)
    found = evaluate(value, known)
    return found if isinstance(found, str) and not isinstance(value, ast.Name | ast.Attribute) else None


def _put_in(value: ast.expr, known: Constants) -> str:
    """What stands for a {...}: its value, both flags of a condition, or its name. A name that holds flags stays a name."""
    found = evaluate(value, known)
    is_name = isinstance(value, ast.Name | ast.Attribute)
    if found is not UNKNOWN and not isinstance(found, tuple) and not (is_name and "--" in str(found)):
        return str(found)
    text = None if is_name else _text(value, known)
    return text if text is not None and "--" in text else f"${{{_last_name(value)}}}"


def _last_name(part: ast.expr) -> str:
    """The name of what a {...} holds, as get_wandb_args of {tools.get_wandb_args(name)}."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    while isinstance(value, ast.Call):
        value = value.func
    return last_name(value) or "value"
