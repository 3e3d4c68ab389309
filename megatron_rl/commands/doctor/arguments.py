"""Which of the words behind a bash script it reads, by its syntax tree."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

ALL = "@"
# $@, ${@:2}, $1; ${!...} may be any of them.
ONE = re.compile(r"\$\{?(?P<name>[@*!]|[1-9]\d*)")
TAKING = ("shift", "getopts")


def arguments_read(node: Node) -> set[str]:
    """The numbers of those that are read by number, and ALL where each may be read. A function has arguments of its own."""
    text = (node.text or b"").decode(errors="replace")
    if node.type == "function_definition":
        return set()
    if node.type == "ERROR":
        return {ALL} if ONE.search(text) else set()
    if node.type == "command_name" and text in TAKING or "BASH_ARGV" in text and not node.children:
        return {ALL}
    found: set[str] = set()
    if node.type == "for_statement" and all(child.type != "in" for child in node.children):  # for NAME; do
        found.add(ALL)
    if node.type in ("simple_expansion", "expansion") and (match := ONE.match(text.lstrip())):
        found.add(match["name"] if match["name"].isdigit() else ALL)
    for child in node.children:
        found |= arguments_read(child)
    return found
