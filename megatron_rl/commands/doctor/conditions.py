"""Which branches of a bash script may run, from its syntax tree, and what its variables then hold. Nothing of it is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megatron_rl.hosts.script_constants import truth_of_all

if TYPE_CHECKING:
    from tree_sitter import Node

# What a node of the script becomes; None: not known here.
TextOf = Callable[["Node"], str | None]
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}
CLAUSES = ("elif_clause", "else_clause")
EXPRESSIONS = ("binary_expression", "unary_expression", "parenthesized_expression")


def arms(node: Node, text_of: TextOf) -> list[list[Node]]:
    """The bodies of an if, a case or `A && B` that may run: a single one where that is decided. An empty one: none of them."""
    if node.type == "case_statement":
        return _arms_of_case(node, text_of)
    if node.type == "list":
        is_true, body = truth(node.children[0], text_of), node.children[2:]
        runs = None if is_true is None else is_true == (node.children[1].type == "&&")
        return [body, []] if runs is None else [body if runs else []]
    found: list[list[Node]] = []
    for clause in (node, *(child for child in node.children if child.type in CLAUSES)):
        place = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
        condition = _condition(clause)
        is_true = True if clause.type == "else_clause" else truth(condition[0], text_of) if len(condition) == 1 else None
        if is_true is not False:
            found.append([child for child in clause.children[place:] if child.is_named and child.type not in CLAUSES])
        if is_true:
            return found
    return [*found, []]


def conditions(node: Node) -> list[Node]:
    """What decides between the arms."""
    if node.type == "case_statement":
        return node.children_by_field_name("value")
    if node.type == "list":
        return node.children[:1]
    return [*_condition(node), *(one for child in node.children if child.type == "elif_clause" for one in _condition(child))]


def variables_in(node: Node) -> Iterator[tuple[str, Node]]:
    """(name, the expression that takes its value)."""
    for child in node.children:
        if child.type == "variable_name":
            yield (child.text or b"").decode(errors="replace"), node
        yield from variables_in(child)


def ends_the_script(body: Sequence[Node]) -> bool:
    commands = [node for node in body if node.type != "comment"]
    return bool(commands) and (commands[-1].text or b"").split()[:1] == [b"exit"]


def _condition(clause: Node) -> list[Node]:
    place = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
    return [child for child in clause.children[:place] if child.is_named and child.type != "comment"]


def _arms_of_case(node: Node, text_of: TextOf) -> list[list[Node]]:
    (value,) = node.children_by_field_name("value")
    items = [child for child in node.children if child.type == "case_item"]
    found: list[list[Node]] = []
    falls_through = any(item.child_by_field_name("fallthrough") for item in items)
    text = None if falls_through else text_of(value)
    for item in items:
        place = next(at for at, child in enumerate(item.children) if child.type == ")")
        is_true = truth_of_all([_matches(text, pattern, text_of) for pattern in item.children_by_field_name("value")], ends=True)
        if is_true is not False:
            found.append([child for child in item.children[place:] if child.is_named])
        if is_true:
            return found
    return [*found, []]


def truth(node: Node, text_of: TextOf) -> bool | None:
    """Of a command as a condition; None: not known here, as of all that only a machine knows."""
    children = [child for child in node.children if child.is_named]
    if node.type == "test_command" and len(children) == 1:
        return _test(children[0], text_of, has_patterns=node.children[0].type == "[[")
    if node.type == "list" and len(node.children) == 3:
        return truth_of_all([truth(child, text_of) for child in children], ends=node.children[1].type == "||")
    if node.type == "negated_command":
        return _not(truth(children[0], text_of))
    if node.type == "compound_statement" and node.children[0].type == "{" and len(children) == 1:
        return truth(children[0], text_of)
    if node.type == "command":
        words = [part for child in children for part in (child.children if child.type == "command_name" else [child])]
        match [text_of(word) for word in words]:
            case ["true" | ":"]:
                return True
            case ["false"]:
                return False
            case ["test", str(left), str(how), str(right)]:
                return _compared(left, how, right)
    return None


def _test(node: Node, text_of: TextOf, *, has_patterns: bool) -> bool | None:
    """Of what is between brackets."""
    how = node.child_by_field_name("operator")
    operator = (how.text or b"").decode() if how else ""
    children = [child for child in node.children if child.is_named and child != how]
    if node.type == "parenthesized_expression" and len(children) == 1:
        return _test(children[0], text_of, has_patterns=has_patterns)
    if operator in ("&&", "||"):
        return truth_of_all([_test(child, text_of, has_patterns=has_patterns) for child in children], ends=operator == "||")
    if operator == "!" and len(children) == 1:
        return _not(_test(children[0], text_of, has_patterns=has_patterns))
    # The grammar nests what it misreads, as in [ "$A" = b -a "$C" = d ].
    if any(child.type in EXPRESSIONS for child in children):
        return None
    if node.type == "binary_expression" and len(children) == 2:
        left = text_of(children[0])
        if has_patterns and operator in ("=", "==", "!="):
            is_equal = _matches(left, children[1], text_of)
            return is_equal if operator != "!=" else _not(is_equal)
        right = text_of(children[1])
        return None if left is None or right is None else _compared(left, operator, right)
    if node.type == "unary_expression" and operator in ("-n", "-z") and len(children) == 1:
        text = text_of(children[0])
        return None if text is None else bool(text) == (operator == "-n")
    if node.type in EXPRESSIONS:
        return None
    text = text_of(node)
    return None if text is None else bool(text)


def _compared(left: str, how: str, right: str) -> bool | None:
    if how in ("=", "==", "!="):
        return (left == right) == (how != "!=")
    if how in NUMBERS and re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
        return NUMBERS[how](int(left), int(right))
    return None


def _matches(text: str | None, pattern: Node, text_of: TextOf) -> bool | None:
    glob = (pattern.text or b"").decode(errors="replace")
    if glob == "*":
        return True
    if text is None:
        return None
    if pattern.type in ("string", "raw_string", "simple_expansion", "expansion"):
        other = text_of(pattern)
        is_literal = pattern.type in ("string", "raw_string") or (other is not None and re.search(r"[*?\[]", other) is None)
        return text == other if other is not None and is_literal else None
    return None if re.search(r"[($\\'\"`]", glob) else fnmatchcase(text, glob.replace("[^", "[!"))


def _not(is_true: bool | None) -> bool | None:
    return None if is_true is None else not is_true


# What variables hold behind branches of which it is not known which one runs


def merged_text(name: str, texts: Sequence[str]) -> str:
    """Of a variable that has these in the branches: the one, a line of all their flags, or its own name."""
    if len({*texts}) == 1:
        return texts[0]
    is_line = any(re.match(r"[-+]", text) or " " in text or "=" in text for text in texts)
    return " ".join(merged_words(name, [text.split() for text in texts])) if is_line else f"${{{name}}}"


def merged_words(name: str, lists: Sequence[Sequence[str]], start: Sequence[str] = ()) -> list[str]:
    """Each flag and setting of the branches, beside what they all start with. A value is $NAME where branches differ, and so is a
    number that not all of them have: no count is a branch's."""
    start = start if all(list(words[: len(start)]) == list(start) for words in lists) else []
    entries = [_entries(words[len(start) :]) for words in lists]
    known: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for of_arm in entries for key in of_arm):
        values = [of_arm[key] for of_arm in entries if key in of_arm]
        is_count = any(re.fullmatch(r"\d+", _value(word, key)) for word in values[0])
        if all(value == values[0] for value in values) and not (is_count and len(values) < len(entries)):
            known[key] = values[0]
        elif key.endswith("="):
            known[key] = [f"{key}${{{name}}}"]
        else:
            known[key] = [key, f"${{{name}}}"] if key.startswith("-") else max(values, key=len)
    return [*start, *(word for words in known.values() for word in words)]


def _entries(words: Sequence[str]) -> dict[str, list[str]]:
    """A flag with its values, and a setting, by its name; other words at the start by ""."""
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if setting := re.match(r"[+~-]*[A-Za-z_][\w.@/-]*=", word):
            key = setting[0]
        elif re.match(r"--?[A-Za-z]", word):
            key = word
        found.setdefault(key, []).append(word)
    return found


def _value(word: str, key: str) -> str:
    return word.removeprefix(key) if key.endswith("=") else word
