"""What the expressions of a Python script become where constants alone decide. Nothing of the script is run."""

from __future__ import annotations

import ast
import base64
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from megatron_rl.hosts.settings import UNKNOWN

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
    ast.Div: operator.truediv,
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
# Methods after which a dict or a list is another one.
CHANGING = ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove", "reverse", "sort")
# What a dataclass runs when an object has its fields.
AFTER_INIT = "__post_init__"
# What makes a dict of an object.
AS_DICT = ("asdict", "vars", "dict")


def is_secret(name: str, value: str) -> bool:
    """A service's key is long; a record's, as in INPUT_KEY=prompt, is not."""
    return OF_A_KEY.search(name) is not None and len(value) >= SHORTEST_KEY or SECRET.search(name) is not None


class Table(tuple[tuple[Any, Any], ...]):
    """A dict, or an object of a class of the script: (key or field, value). A value may be UNKNOWN."""

    def value_of(self, key: Any) -> Any:
        return dict(self).get(key, UNKNOWN)

    def __contains__(self, key: object) -> bool:
        return key in dict(self)


@dataclass(frozen=True, slots=True)
class Constants:
    """names: of variables that hold one constant wherever they are assigned. fields: the same of attributes, as the settings of a
    script's own class. modules: names that are imported, whose attributes are another's. records: of each class whose objects are
    followed its fields with their defaults. set_fields: attributes that something is assigned to. set_keys: (name, key) of dicts
    that get a key later."""

    names: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    records: Mapping[str, Mapping[str, ast.expr | None]] = field(default_factory=dict)
    set_fields: frozenset[str] = frozenset()
    set_keys: frozenset[tuple[str, str]] = frozenset()
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


def constants_of(tree: ast.Module, settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Constants:
    """Of a script whose command line fills its own classes. settings: what it says of their fields; UNKNOWN: what is not known.
    Objects of frozen dataclasses alone are followed."""
    return _constants(tree, settings, dict(_frozen(tree)), frozenset(), environment)


def constants_and_objects(tree: ast.Module) -> Constants:
    """Of a script that makes its settings itself: objects of each class are followed, and no other attribute is known."""
    set_fields = (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    records = {name: _fields_of(name, classes, frozenset()) for name in classes}
    return _constants(tree, None, records, frozenset(set_fields), os.environ)


def _constants(
    tree: ast.Module,
    settings: Mapping[str, Any] | None,  # None: no attribute is known but an object's
    records: Mapping[str, Mapping[str, ast.expr | None]],
    set_fields: frozenset[str],
    environment: Mapping[str, str],
) -> Constants:
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    modules = frozenset((alias.asname or alias.name).partition(".")[0] for alias in imports)
    set_keys = frozenset(pair for node in ast.walk(tree) for pair in _set_keys(node))
    known = Constants({}, {}, modules, records, set_fields, set_keys, environment)
    for _ in range(MOST_ROUNDS):
        names, fields = _values(tree, settings or {}, known)
        found = replace(known, names=names, fields={} if settings is None else fields)
        if found == known:
            break
        known = found
    return known


def _frozen(tree: ast.Module) -> Iterator[tuple[str, Mapping[str, ast.expr | None]]]:
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and not one.bases):
        calls = [one for one in node.decorator_list if isinstance(one, ast.Call) and last_name(one.func) == "dataclass"]
        is_frozen = "frozen=True" in [ast.unparse(word) for one in calls for word in one.keywords]
        if is_frozen and not any(isinstance(one, ast.FunctionDef) and one.name == AFTER_INIT for one in node.body):
            yield node.name, _fields_of(node.name, {node.name: node}, frozenset())


def _fields_of(name: str, classes: Mapping[str, ast.ClassDef], below: frozenset[str]) -> dict[str, ast.expr | None]:
    """The fields of a class with their defaults, those of its bases in the script first."""
    if name not in classes or name in below:
        return {}
    found = dict[str, ast.expr | None]()
    for base in classes[name].bases:
        found |= _fields_of(last_name(base), classes, below | {name})
    for one in classes[name].body:
        if isinstance(one, ast.AnnAssign):
            found[last_name(one.target)] = None if one.value is None else _default(one.value)
        elif isinstance(one, ast.Assign):
            found |= {target.id: one.value for target in one.targets if isinstance(target, ast.Name)}
    return found


def _values(tree: ast.Module, settings: Mapping[str, Any], known: Constants) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants of names and of fields, among what runs as far as it is known."""
    given: tuple[dict[str, list[Any]], dict[str, list[Any]]] = {}, {}
    nodes = list(nodes_that_run(tree, known))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    declared = [one for node in classes for one in node.body if isinstance(one, ast.AnnAssign)]
    after_init = [one for node in classes for one in node.body if isinstance(one, ast.FunctionDef) and one.name == AFTER_INIT]
    own, direct = {node.name for node in classes}, {id(one) for function in after_init for one in _set_attributes(function)}
    for field_ in declared:
        direct.add(id(field_.target))
        if isinstance(field_.target, ast.Name) and field_.value is not None and field_.target.id not in settings:
            given[1].setdefault(field_.target.id, []).append(evaluate(_default(field_.value), known))
    for name, value in settings.items():
        given[1].setdefault(name, []).append(value)
    of_fields = {name: len(values) for name, values in given[1].items()}
    for name, value in (_property(one, known) for node in classes for one in node.body if isinstance(one, ast.FunctionDef)):
        given[1].setdefault(name, []).append(value)
    for node in nodes:
        for target, value in assignments_of(node):
            if isinstance(target, ast.Name | ast.Attribute) and id(target) not in direct:
                direct.add(id(target))
                place = given[0] if isinstance(target, ast.Name) else given[1]
                place.setdefault(last_name(target), []).append(evaluate(value, known))
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load) and id(node) not in direct:
            given[isinstance(node, ast.Attribute)].setdefault(last_name(node), []).append(UNKNOWN)
        elif isinstance(node, ast.arg):
            given[0].setdefault(node.arg, []).append(UNKNOWN)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            for name in node.names:
                given[0].setdefault(name, []).append(UNKNOWN)
        elif (changed := _changed(node)) is not None:
            given[isinstance(changed, ast.Attribute)].setdefault(last_name(changed), []).append(UNKNOWN)
        elif isinstance(node, ast.Call) and last_name(node.func) in own | {"replace", "cls"}:
            for name, value in _arguments(node, known.records.get(last_name(node.func), {})):
                given[1].setdefault(name, []).append(evaluate(value, known))
        elif isinstance(node, ast.Call) and last_name(node.func) == "setattr" and len(node.args) == 3:
            given[1].setdefault(str(evaluate(node.args[1], known)), []).append(UNKNOWN)
    names, fields = ({name: values[0] for name, values in place.items() if _are_one(values)} for place in given)
    if set_there := {one.attr for function in after_init for one in _set_attributes(function)}:
        before = {**known.fields, **{name: fields.get(name, UNKNOWN) for name in set_there}}
        for function in after_init:
            before = _run_method(function, before, known)
        # What is given elsewhere may come before or after it. Of two classes one may have the field without that method.
        names_of_fields = [last_name(one.target) for one in declared]
        for name in set_there:
            is_alone = names_of_fields.count(name) < 2 and len(given[1].get(name, ())) == of_fields.get(name, 0)
            if not is_alone and before[name] != fields.get(name, UNKNOWN):
                before[name] = UNKNOWN
        later = {name: before[name] for name in set_there}
        fields = {name: value for name, value in (fields | later).items() if value is not UNKNOWN}
    return names, fields


def assignments_of(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment. Of `a, b = value` its parts, and of `a, *b = value` the whole."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _by_part(target, node.value)


def _by_part(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if not isinstance(target, ast.Tuple | ast.List) or any(isinstance(one, ast.Starred) for one in target.elts):
        yield target, value
        return
    for place, one in enumerate(target.elts):
        yield from _by_part(one, _part(value, place, len(target.elts)))


def _part(value: ast.expr, place: int, length: int) -> ast.expr:
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == length:
        return value.elts[place]
    if isinstance(value, ast.IfExp):
        arms = (_part(arm, place, length) for arm in (value.body, value.orelse))
        return ast.copy_location(ast.IfExp(value.test, *arms), value)
    return ast.copy_location(ast.Subscript(value, ast.Constant(place), ast.Load()), value)


def _set_attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    yield from (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load))


def _run_method(function: ast.FunctionDef, fields: Mapping[str, Any], known: Constants) -> dict[str, Any]:
    """What a method leaves of the fields that it sets, statement by statement. fields: what they are before it."""
    if any(isinstance(one, ast.Return) for one in ast.walk(function)):
        return {**fields, **dict.fromkeys((one.attr for one in _set_attributes(function)), UNKNOWN)}
    return _after(function.body, dict(fields), known)


def _after(statements: Sequence[ast.stmt], fields: dict[str, Any], known: Constants) -> dict[str, Any]:
    for one in statements:
        now = replace(known, fields={name: value for name, value in fields.items() if value is not UNKNOWN})
        match one:
            case ast.If():
                is_true = truth_of(one.test, now)
                taken = [one.body] * (is_true is not False) + [one.orelse] * (is_true is not True)
                arms = [_after(body, fields, known) for body in taken]
                keys = {name: [arm.get(name, UNKNOWN) for arm in arms] for name in set().union(*arms)}
                fields = {name: values[0] if _are_one(values) else UNKNOWN for name, values in keys.items()}
            case _:
                set_there = {stored.attr: UNKNOWN for stored in _set_attributes(one)}
                own = {target.attr: evaluate(value, now) for target, value in assignments_of(one) if _is_of_self(target)}
                fields = {**fields, **set_there, **own}
    return fields


def _is_of_self(target: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def _property(node: ast.FunctionDef, known: Constants) -> tuple[str, Any]:
    """(name, value) of one that only returns."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    is_property = [last_name(one) for one in node.decorator_list] in (["property"], ["cached_property"])
    only = body[0] if is_property and len(body) == 1 else None
    return node.name, evaluate(only.value, known) if isinstance(only, ast.Return) and only.value is not None else UNKNOWN


def _changed(node: ast.AST) -> ast.expr | None:
    """The variable whose dict or list, or one in it, a statement changes."""
    changed: ast.expr | None = None
    if any(_set_keys(node)):
        return None
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        changed = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        changed = node.func.value
    while isinstance(changed, ast.Subscript):
        changed = changed.value
    return changed


def _set_keys(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(settings, beta) of settings["beta"] = ..., which leaves the other keys as they are."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            yield node.value.id, node.slice.value


def _default(value: ast.expr) -> ast.expr:
    """What a field of a class begins with: of field(default=3) and of field(default_factory=lambda: 3), the 3."""
    if isinstance(value, ast.Call) and last_name(value.func) == "field":
        for given in value.keywords:
            if given.arg == "default":
                return given.value
            if given.arg == "default_factory" and isinstance(given.value, ast.Lambda):
                return given.value.body
    return value


def _are_one(values: Sequence[Any]) -> bool:
    return UNKNOWN not in values and len({(type(value), value) for value in values}) == 1


def last_name(node: ast.expr) -> str:
    """GRPOConfig of trl.GRPOConfig; empty of what is no name."""
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
            value = known.names.get(node.id, UNKNOWN)
            later = {key: UNKNOWN for name, key in known.set_keys if name == node.id}
            return Table((dict(value) | later).items()) if isinstance(value, Table) else value
        case ast.Attribute():
            of_class = node.value.id if isinstance(node.value, ast.Name) and node.value.id in known.records else None
            owner = evaluate(node.value, known) if of_class is None else Table(defaults_of(of_class, known).items())
            if isinstance(owner, Table):
                return owner if node.attr == "__dict__" else owner.value_of(node.attr)
            is_own = isinstance(node.value, ast.Name) and node.value.id not in known.modules
            return known.fields.get(node.attr, UNKNOWN) if is_own else UNKNOWN
        case ast.Subscript():
            owner, key = evaluate(node.value, known), evaluate(node.slice, known)
            if isinstance(owner, Table):
                return owner.value_of(key)
            is_place = isinstance(owner, tuple) and type(key) is int and -len(owner) <= key < len(owner)
            return owner[key] if is_place else UNKNOWN
        case ast.Dict():
            return _dict(node, known)
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
        case ast.UnaryOp(op=ast.USub()):
            value = evaluate(node.operand, known)
            return UNKNOWN if value is UNKNOWN else -value
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


def _dict(node: ast.Dict, known: Constants) -> Any:
    """Of a dict with ** in it too."""
    keys = [None if key is None else evaluate(key, known) for key in node.keys]
    values = [evaluate(value, known) for value in node.values]
    parts = [value if key is None else Table([(name, value)]) for key, name, value in zip(node.keys, keys, values, strict=True)]
    return UNKNOWN if UNKNOWN in keys else _joined(parts)


def _chosen(node: ast.BoolOp, known: Constants) -> Any:
    """The part that `a or b`, `a and b` becomes."""
    value = UNKNOWN
    for part in node.values:
        value = evaluate(part, known)
        if value is UNKNOWN or bool(value) == isinstance(node.op, ast.Or):
            return value
    return value


def _computed(node: ast.BinOp, known: Constants) -> Any:
    """Of numbers that stay small, of texts that are joined, and of dicts."""
    left, right = evaluate(node.left, known), evaluate(node.right, known)
    if isinstance(node.op, ast.BitOr):
        return _joined([left, right])
    are_texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
    are_numbers = all(isinstance(side, int | float) and abs(side) < LARGEST_NUMBER for side in (left, right))
    how = ARITHMETIC.get(type(node.op))
    return how(left, right) if how is not None and (are_texts or are_numbers) else UNKNOWN


def _called(node: ast.Call, known: Constants) -> Any:
    """What reads the environment, strips a text, compares numbers or puts a file's text on the line."""
    given, name = [evaluate(one, known) for one in node.args], last_name(node.func)
    if isinstance(node.func, ast.Name) and name in known.records:
        return _record(node, known.records[name], known)
    if isinstance(node.func, ast.Attribute) and name == "copy":
        return evaluate(node.func.value, known)
    if name in AS_DICT:
        named, unread = keywords_of(node, known)
        return UNKNOWN if unread else _joined([*given, Table(named.items())])
    if UNKNOWN in given or node.keywords:
        return UNKNOWN
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is not None and name == "strip" and not given:
        text = evaluate(owner, known)
        return text.strip() if isinstance(text, str) else UNKNOWN
    is_environment = name == "getenv" or name == "get" and isinstance(owner, ast.Attribute) and owner.attr == "environ"
    if is_environment and len(given) in (1, 2) and isinstance(given[0], str):
        value = known.environment.get(given[0], "")
        return UNKNOWN if is_secret(given[0], value) else known.environment.get(*given)
    if name == PSEUDO_FILE and len(given) == 1 and isinstance(given[0], str):
        return "base64:" + base64.b64encode(given[0].encode()).decode()
    return NUMERIC[name](*given) if isinstance(node.func, ast.Name) and name in NUMERIC and given else UNKNOWN


def _record(node: ast.Call, fields: Mapping[str, ast.expr | None], known: Constants) -> Any:
    named, unread = keywords_of(node, known)
    if unread or len(node.args) > len(fields) or any(isinstance(one, ast.Starred) for one in node.args):
        return UNKNOWN
    placed = zip([*fields][: len(node.args)], node.args, strict=True)
    return Table(_object(fields, {name: evaluate(value, known) for name, value in placed} | named, known).items())


def defaults_of(name: str, known: Constants) -> dict[str, Any]:
    """What a class whose objects are followed gives its fields; UNKNOWN where something is assigned to one."""
    return _object(known.records[name], {}, known)


def _object(fields: Mapping[str, ast.expr | None], given: Mapping[str, Any], known: Constants) -> dict[str, Any]:
    """given: the values of its fields that are not their defaults."""
    defaults = {name: UNKNOWN if value is None else evaluate(value, known) for name, value in fields.items()}
    made = {**defaults, **given}
    return made | dict.fromkeys(made.keys() & known.set_fields, UNKNOWN)


def keywords_of(call: ast.Call, known: Constants) -> tuple[dict[str, Any], list[str]]:
    """(the arguments of a call by their names, the ** of it that are not known here)."""
    found, unread = dict[str, Any](), list[str]()
    for one in call.keywords:
        value = evaluate(one.value, known)
        if one.arg is not None:
            found[one.arg] = value
        elif isinstance(value, Table):
            found |= dict(value)
        else:
            unread.append(f"**{ast.unparse(one.value)}")
    return found, unread


def plain(value: Any) -> Any:
    """With dicts in the place of tables."""
    return {key: plain(one) for key, one in value} if isinstance(value, Table) else value


def _joined(parts: Sequence[Any]) -> Any:
    """Of dicts the one that has the keys of all."""
    if not all(isinstance(one, Table) for one in parts):
        return UNKNOWN
    return Table({key: value for one in parts for key, value in one}.items())


def _arguments(node: ast.Call, fields: Mapping[str, ast.expr | None]) -> list[tuple[str, ast.expr]]:
    """Of a call, by name. fields: the names of those that are given by their place."""
    placed = zip([*fields][: len(node.args)], node.args[: len(fields)], strict=True)
    return [*placed, *((one.arg, one.value) for one in node.keywords if one.arg is not None)]
