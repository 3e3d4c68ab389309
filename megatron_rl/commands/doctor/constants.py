"""What the expressions of a Python script become where constants alone decide. Nothing of the script is run."""

from __future__ import annotations

import ast
import base64
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Of an expression that the text alone does not decide.
UNKNOWN: Any = object()
# What is decided may decide more.
MOST_ROUNDS = 8
LARGEST_NUMBER = 2**63
# miles's function that puts a file's text on the line.
PSEUDO_FILE = "encode_pseudo_file"
# Variables of the environment that hold a secret: a message may show a word of the line.
SECRET = re.compile(r"(^|_)(API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)
OF_A_KEY, SHORTEST_KEY = re.compile(r"(^|_)KEY(_|$)", re.IGNORECASE), 16
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
NUMERIC: dict[str, Callable[..., Any]] = {"max": max, "min": min, "int": int, "str": str}
# Methods after which a dict is another one.
CHANGING = ("update", "setdefault", "pop", "popitem", "clear")


def is_secret(name: str, value: str) -> bool:
    """A service's key is long; a record's, as in INPUT_KEY=prompt, is not."""
    return OF_A_KEY.search(name) is not None and len(value) >= SHORTEST_KEY or SECRET.search(name) is not None


class Table(tuple[tuple[Any, Any], ...]):
    """A dict, or an object of a frozen dataclass: (key or field, value). A value may be UNKNOWN."""

    def value_of(self, key: Any) -> Any:
        return dict(self).get(key, UNKNOWN)

    def __contains__(self, key: object) -> bool:
        return key in dict(self)


@dataclass(frozen=True, slots=True)
class Constants:
    """names: of variables that hold one constant wherever they are assigned. fields: the same of attributes, as the settings of a
    script's own class. modules: names that are imported, whose attributes are another's. records: of each frozen dataclass its
    fields with their defaults."""

    names: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    records: Mapping[str, Mapping[str, ast.expr | None]] = field(default_factory=dict)


def constants_of(tree: ast.Module, settings: Mapping[str, Any]) -> Constants:
    """settings: what its own command line says of the fields of its classes; UNKNOWN: one that says what is not known."""
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    modules = frozenset((alias.asname or alias.name).partition(".")[0] for alias in imports)
    records = dict(_records(tree))
    known = Constants(modules=modules, records=records)
    for _ in range(MOST_ROUNDS):
        names, fields = _values(tree, settings, known)
        found = Constants(names, fields, modules, records)
        if found == known:
            break
        known = found
    return known


def _records(tree: ast.Module) -> Iterator[tuple[str, Mapping[str, ast.expr | None]]]:
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and not one.bases):
        calls = [one for one in node.decorator_list if isinstance(one, ast.Call) and _name(one.func) == "dataclass"]
        is_frozen = "frozen=True" in [ast.unparse(word) for one in calls for word in one.keywords]
        if is_frozen and not any(isinstance(one, ast.FunctionDef) and one.name == "__post_init__" for one in node.body):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            yield node.name, {_name(one.target): None if one.value is None else _default(one.value) for one in fields}


def _values(tree: ast.Module, settings: Mapping[str, Any], known: Constants) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants of names and of fields, among what runs as far as it is known."""
    given: tuple[dict[str, list[Any]], dict[str, list[Any]]] = {}, {}
    nodes = list(nodes_that_run(tree, known))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    own, direct = {node.name for node in classes}, set[int]()
    for field_ in (one for node in classes for one in node.body if isinstance(one, ast.AnnAssign)):
        direct.add(id(field_.target))
        if isinstance(field_.target, ast.Name) and field_.value is not None and field_.target.id not in settings:
            given[1].setdefault(field_.target.id, []).append(evaluate(_default(field_.value), known))
    for name, value in settings.items():
        given[1].setdefault(name, []).append(value)
    for name, value in (_property(one, known) for node in classes for one in node.body if isinstance(one, ast.FunctionDef)):
        given[1].setdefault(name, []).append(value)
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (one for one in targets if isinstance(one, ast.Name | ast.Attribute) and id(one) not in direct):
                direct.add(id(target))
                place = given[0] if isinstance(target, ast.Name) else given[1]
                place.setdefault(_name(target), []).append(evaluate(node.value, known))
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load) and id(node) not in direct:
            given[isinstance(node, ast.Attribute)].setdefault(_name(node), []).append(UNKNOWN)
        elif isinstance(node, ast.arg):
            given[0].setdefault(node.arg, []).append(UNKNOWN)
        elif (changed := _changed(node)) is not None:
            given[isinstance(changed, ast.Attribute)].setdefault(_name(changed), []).append(UNKNOWN)
        elif isinstance(node, ast.Call) and _name(node.func) in own | {"replace", "cls"}:
            for name, value in _arguments(node, known.records.get(_name(node.func), {})):
                given[1].setdefault(name, []).append(evaluate(value, known))
        elif isinstance(node, ast.Call) and _name(node.func) == "setattr" and len(node.args) == 3:
            given[1].setdefault(str(evaluate(node.args[1], known)), []).append(UNKNOWN)
    names, fields = ({name: values[0] for name, values in place.items() if _are_one(values)} for place in given)
    return names, fields


def _property(node: ast.FunctionDef, known: Constants) -> tuple[str, Any]:
    """(name, value) of one that only returns."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    is_property = [_name(one) for one in node.decorator_list] in (["property"], ["cached_property"])
    only = body[0] if is_property and len(body) == 1 else None
    return node.name, evaluate(only.value, known) if isinstance(only, ast.Return) and only.value is not None else UNKNOWN


def _changed(node: ast.AST) -> ast.expr | None:
    """The variable whose dict, or a dict in it, a statement changes."""
    changed: ast.expr | None = None
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        changed = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        changed = node.func.value
    while isinstance(changed, ast.Subscript):
        changed = changed.value
    return changed


def _default(value: ast.expr) -> ast.expr:
    """What a field of a class begins with: of field(default=3) and of field(default_factory=lambda: 3), the 3."""
    if isinstance(value, ast.Call) and _name(value.func) == "field":
        for given in value.keywords:
            if given.arg == "default":
                return given.value
            if given.arg == "default_factory" and isinstance(given.value, ast.Lambda):
                return given.value.body
    return value


def _are_one(values: Sequence[Any]) -> bool:
    return UNKNOWN not in values and len({(type(value), value) for value in values}) == 1


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def nodes_that_run(node: ast.AST, known: Constants) -> Iterator[ast.AST]:
    """All below a node, without branches that are known not to run."""
    yield from (one for one, _ in nodes_of_branches(node, known))


def nodes_of_branches(node: ast.AST, known: Constants, *, may_run: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """The same; and whether each is in a branch of which it is not known whether it runs."""
    yield node, may_run
    taken: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If):
        is_true = truth_of(node.test, known)
        may_run |= is_true is None
        taken = taken if is_true is None else [node.test, *(node.body if is_true else node.orelse)]
    elif isinstance(node, ast.Match):
        cases = [*_cases(node, known)]
        may_run |= len(cases) > 1
        taken = [node.subject, *cases]
    for child in taken:
        yield from nodes_of_branches(child, known, may_run=may_run)


def _cases(node: ast.Match, known: Constants) -> Iterator[ast.match_case]:
    """Those that may run. Of several subjects some may be known."""
    subjects = node.subject.elts if isinstance(node.subject, ast.Tuple) else None
    subject = evaluate(node.subject, known) if subjects is None else tuple(evaluate(one, known) for one in subjects)
    for case in node.cases:
        is_taken = truth_of_all([_matches(case.pattern, subject, known), True if case.guard is None else None], ends=False)
        if is_taken is not False:
            yield case
        if is_taken:
            return


def _matches(pattern: ast.pattern, subject: Any, known: Constants) -> bool | None:
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return True
    if isinstance(pattern, ast.MatchOr):
        return truth_of_all([_matches(one, subject, known) for one in pattern.patterns], ends=True)
    if subject is UNKNOWN:
        return None
    if isinstance(pattern, ast.MatchSingleton):
        return subject is pattern.value
    if isinstance(pattern, ast.MatchValue):
        value = evaluate(pattern.value, known)
        return None if value is UNKNOWN else bool(subject == value)
    if isinstance(pattern, ast.MatchSequence) and not any(isinstance(one, ast.MatchStar) for one in pattern.patterns):
        if not isinstance(subject, tuple) or len(subject) != len(pattern.patterns):
            return False
        found = [_matches(one, part, known) for one, part in zip(pattern.patterns, subject, strict=True)]
        return truth_of_all(found, ends=False)
    return None


def truth_of(test: ast.expr, known: Constants) -> bool | None:
    """Of a condition; None: it depends on more."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = truth_of(test.operand, known)
        return None if found is None else not found
    if isinstance(test, ast.BoolOp):
        return truth_of_all([truth_of(one, known) for one in test.values], ends=isinstance(test.op, ast.Or))
    value = evaluate(test, known)
    return None if value is UNKNOWN else bool(value)


def truth_of_all(parts: Sequence[bool | None], *, ends: bool) -> bool | None:
    """Of parts joined by or, where a true one ends it, or by and, where a false one does. None: not known."""
    return ends if ends in parts else None if None in parts else not ends


def evaluate(node: ast.expr, known: Constants) -> Any:
    """A text, a number, a bool, None, a tuple of these, or UNKNOWN."""
    try:
        return _evaluated(node, known)
    except (TypeError, ValueError, ArithmeticError):  # the script would fail there
        return UNKNOWN


def _evaluated(node: ast.expr, known: Constants) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name():
            return known.names.get(node.id, UNKNOWN)
        case ast.Attribute():
            owner = evaluate(node.value, known)
            is_own = isinstance(node.value, ast.Name) and node.value.id not in known.modules
            is_record = isinstance(owner, Table)
            return owner.value_of(node.attr) if is_record else known.fields.get(node.attr, UNKNOWN) if is_own else UNKNOWN
        case ast.Subscript():
            owner = evaluate(node.value, known)
            return owner.value_of(evaluate(node.slice, known)) if isinstance(owner, Table) else UNKNOWN
        case ast.Dict():
            keys = [UNKNOWN if one is None else evaluate(one, known) for one in node.keys]
            values = [evaluate(one, known) for one in node.values]
            return UNKNOWN if UNKNOWN in keys else Table(dict(zip(keys, values, strict=True)).items())
        case ast.Tuple() | ast.List() | ast.Set():
            parts = [evaluate(one, known) for one in node.elts]
            return UNKNOWN if UNKNOWN in parts else tuple(parts)
        case ast.JoinedStr():
            parts = [evaluate(one, known) for one in node.values]
            return UNKNOWN if UNKNOWN in parts else "".join(parts)
        case ast.FormattedValue(conversion=-1, format_spec=None):
            value = evaluate(node.value, known)
            return UNKNOWN if value is UNKNOWN or isinstance(value, Table) else str(value)
        case ast.IfExp():
            is_true = truth_of(node.test, known)
            arms = [evaluate(one, known) for one in (node.body, node.orelse)]
            return arms[0] if is_true or is_true is None and _are_one(arms) else UNKNOWN if is_true is None else arms[1]
        case ast.UnaryOp(op=ast.Not()):
            is_true = truth_of(node, known)
            return UNKNOWN if is_true is None else is_true
        case ast.BoolOp():
            return _chosen(node, known)
        case ast.Compare(ops=[how], comparators=[right]):
            sides = evaluate(node.left, known), evaluate(right, known)
            return UNKNOWN if UNKNOWN in sides else COMPARISONS[type(how)](*sides)
        case ast.BinOp():
            return _computed(node, known)
        case ast.Call():
            return _called(node, known)
    return UNKNOWN


def _chosen(node: ast.BoolOp, known: Constants) -> Any:
    """The part that `a or b`, `a and b` becomes."""
    value = UNKNOWN
    for part in node.values:
        value = evaluate(part, known)
        if value is UNKNOWN or bool(value) == isinstance(node.op, ast.Or):
            return value
    return value


def _computed(node: ast.BinOp, known: Constants) -> Any:
    """Of numbers that stay small, and of texts that are joined."""
    left, right = evaluate(node.left, known), evaluate(node.right, known)
    are_texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
    are_numbers = all(isinstance(side, int | float) and abs(side) < LARGEST_NUMBER for side in (left, right))
    how = ARITHMETIC.get(type(node.op))
    return how(left, right) if how is not None and (are_texts or are_numbers) else UNKNOWN


def _called(node: ast.Call, known: Constants) -> Any:
    """What reads the environment, strips a text, compares numbers or puts a file's text on the line."""
    given, name = [evaluate(one, known) for one in node.args], _name(node.func)
    if isinstance(node.func, ast.Name) and name in known.records:
        return _record(node, known.records[name], known)
    if UNKNOWN in given or node.keywords:
        return UNKNOWN
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is not None and name == "strip" and not given:
        text = evaluate(owner, known)
        return text.strip() if isinstance(text, str) else UNKNOWN
    is_environment = name == "getenv" or name == "get" and isinstance(owner, ast.Attribute) and owner.attr == "environ"
    if is_environment and len(given) in (1, 2) and isinstance(given[0], str):
        value = os.environ.get(given[0], "")
        return UNKNOWN if is_secret(given[0], value) else os.environ.get(*given)
    if name == PSEUDO_FILE and len(given) == 1 and isinstance(given[0], str):
        return "base64:" + base64.b64encode(given[0].encode()).decode()
    return NUMERIC[name](*given) if isinstance(node.func, ast.Name) and name in NUMERIC and given else UNKNOWN


def _record(node: ast.Call, fields: Mapping[str, ast.expr | None], known: Constants) -> Any:
    if len(node.args) > len(fields) or any(isinstance(one, ast.Starred) for one in node.args):
        return UNKNOWN
    if any(one.arg is None for one in node.keywords):
        return UNKNOWN
    given = {**fields, **dict(_arguments(node, fields))}
    return Table((name, UNKNOWN if value is None else evaluate(value, known)) for name, value in given.items())


def _arguments(node: ast.Call, fields: Mapping[str, ast.expr | None]) -> list[tuple[str, ast.expr]]:
    """Of a call, by name. fields: the names of those that are given by their place."""
    placed = zip([*fields][: len(node.args)], node.args[: len(fields)], strict=True)
    return [*placed, *((one.arg, one.value) for one in node.keywords if one.arg is not None)]
