"""What an expression of a train script holds, as far as the script's own constants say it: nothing of it is run."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_rl.hosts.settings import UNKNOWN

# Names that refer to one another are followed so far.
DEEPEST = 20
# Methods that change a dict in its place.
CHANGING = ("update", "pop", "popitem", "setdefault", "clear")
# What makes a dict of an object.
AS_DICT = ("asdict", "vars", "dict")
ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def last_name(call: ast.expr) -> str:
    """GRPOConfig of trl.GRPOConfig."""
    return ast.unparse(call).rpartition(".")[2]


class Constants:
    """Names that a script gives one value and never changes, dicts of them, and the fields of its own classes.

    A dict or an object is a dict by names, where single values may be UNKNOWN."""

    def __init__(self, tree: ast.Module):
        nodes = [*ast.walk(tree)]
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
        stored.update(node.arg for node in nodes if isinstance(node, ast.arg))
        self.set_fields = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        changed = {name for node in nodes for name in _changed(node)}
        self.set_keys = [pair for node in nodes for pair in _set_keys(node)]
        self.values = {
            name: value for node in nodes for name, value in _assigned(node) if stored[name] == 1 and name not in changed
        }

    def of(self, value: ast.expr | None, depth: int = 0) -> Any:
        """Its value, a dict, or UNKNOWN."""
        if value is None or depth > DEEPEST:
            return UNKNOWN
        depth += 1
        if isinstance(value, ast.Name) and value.id in self.values:
            found = self.of(self.values[value.id], depth)
            later = {key: UNKNOWN for name, key in self.set_keys if name == value.id}
            return found | later if isinstance(found, dict) else found
        if isinstance(value, ast.Dict):
            keys = [None if key is None else self.of(key, depth) for key in value.keys]
            return _joined(
                [item if key is None else {key: item} for key, item in zip(keys, self._all(value.values, depth), strict=True)]
            )
        if isinstance(value, ast.BinOp):
            return self._of_two(value.op, self.of(value.left, depth), self.of(value.right, depth))
        if isinstance(value, ast.Subscript | ast.Attribute):
            return self._part(value, depth)
        if isinstance(value, ast.Call):
            return self._made(value, depth)
        try:
            return ast.literal_eval(value)
        except (ValueError, TypeError, RecursionError):
            return UNKNOWN

    def fields(self, name: str, depth: int = 0) -> dict[str, Any]:
        """What a class of the script gives its fields, its own bases first."""
        node, found = self.classes.get(name), dict[str, Any]()
        if node is None or depth > DEEPEST:
            return found
        for base in node.bases:
            found |= self.fields(last_name(base), depth + 1)
        for target, value in (pair for one in node.body for pair in _assigned(one)):
            found[target] = self.of(_default_of(value), depth)
        return found

    def given(self, call: ast.Call, depth: int = 0) -> tuple[dict[str, Any], list[str]]:
        """(the arguments of a call by their names, the ** of it that are not known here)."""
        found, unread = dict[str, Any](), list[str]()
        for one in call.keywords:
            value = self.of(one.value, depth)
            if one.arg is not None:
                found[one.arg] = value
            elif isinstance(value, dict):
                found |= value
            else:
                unread.append(f"**{ast.unparse(one.value)}")
        return found, unread

    def _all(self, values: list[ast.expr], depth: int) -> list[Any]:
        return [self.of(one, depth) for one in values]

    def _of_two(self, sign: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(sign, ast.BitOr):
            return _joined([left, right])
        if type(sign) in ARITHMETIC and all(isinstance(one, int | float) for one in (left, right)):
            try:
                return ARITHMETIC[type(sign)](left, right)
            except (ZeroDivisionError, OverflowError):
                return UNKNOWN
        return UNKNOWN

    def _part(self, value: ast.Subscript | ast.Attribute, depth: int) -> Any:
        """settings["beta"] and settings.beta; an object's own dict."""
        owner = self.of(value.value, depth)
        if isinstance(value, ast.Attribute):
            if value.attr == "__dict__":
                return owner
            if isinstance(value.value, ast.Name) and value.value.id in self.classes:
                owner = self.fields(value.value.id)
            return UNKNOWN if value.attr in self.set_fields else _item(owner, value.attr)
        return _item(owner, self.of(value.slice, depth))

    def _made(self, call: ast.Call, depth: int) -> Any:
        """dict(a=1), asdict(settings), settings.copy() and Settings()."""
        name = last_name(call.func)
        if isinstance(call.func, ast.Attribute) and name == "copy":
            return self.of(call.func.value, depth)
        given, unread = self.given(call, depth)
        if unread:
            return UNKNOWN
        if name in AS_DICT:
            return _joined([*self._all(call.args, depth), given])
        if name not in self.classes:
            return UNKNOWN
        made = self.fields(name) | given
        return dict.fromkeys(made, UNKNOWN) if call.args else made | dict.fromkeys(made.keys() & self.set_fields, UNKNOWN)


def _joined(parts: list[Any]) -> Any:
    if not all(isinstance(one, dict) and UNKNOWN not in one for one in parts):
        return UNKNOWN
    return {name: value for one in parts for name, value in one.items()}


def _item(owner: Any, name: Any) -> Any:
    return owner[name] if isinstance(owner, dict) and isinstance(name, str) and name in owner else UNKNOWN


def _default_of(value: ast.expr) -> ast.expr | None:
    """What field(default=...) of a dataclass gives; None: a factory does."""
    if isinstance(value, ast.Call) and last_name(value.func) == "field":
        return next((one.value for one in value.keywords if one.arg == "default"), None)
    return value


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """name = value and name: kind = value, not of several names at once."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id, node.value


def _set_keys(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(settings, beta) of settings["beta"] = ..., wherever it is."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            yield node.value.id, node.slice.value


def _changed(node: ast.AST) -> Iterator[str]:
    """The name of a dict that is changed in its place by keys that are not seen, or of what a loop adds to."""
    is_seen = any(_set_keys(node))
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name) and not is_seen:
        yield node.value.id
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        if isinstance(node.func.value, ast.Name):
            yield node.func.value.id
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Global | ast.Nonlocal):
        yield from node.names
