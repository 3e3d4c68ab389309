"""Trees of settings as trainers read them from files: a file over those that it inherits, overrides of the line, references.

    tree = with_values(inherited(path, read_file))      what the file and its parents say
    merge(tree, nested(read_overrides(words)))          what the line says
    tree = resolved(tree)                               ${a.b} is the value of a.b

Nothing here knows a trainer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.door import ReadFile
from megatron_rl.hosts.settings import ABSENT, UNKNOWN, put, read_value, value_at

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# A reference to a reference to ...: a longer chain may have no end.
DEEPEST_REFERENCE = 8


def inherited(
    path: Path,
    read_file: ReadFile,
    *,
    parents: str = "defaults",  # the name under which a file lists those that it inherits, by paths from its own folder
    replaces: str = "_override_",  # a mapping at the top that has this name replaces the inherited one, and is not merged into it
    heirs: tuple[Path, ...] = (),
) -> dict[str, Any]:
    """The file's settings over its parents' settings; a later parent wins.

    Raises ConfigError for a file that cannot be read, or inherits itself."""
    own = dict(read_file(path))
    if parents not in own:
        return own
    listed = own.pop(parents) or []
    listed = [listed] if isinstance(listed, str) else listed
    if not (isinstance(listed, list) and all(isinstance(one, str) for one in listed)):
        raise ConfigError(f"{path}: {parents}: {listed} is no path, and no list of paths")
    tree: dict[str, Any] = {}
    for parent in (path.parent / one for one in listed):
        lineage = (*heirs, path.resolve())
        if parent.resolve() in lineage:
            raise ConfigError(f"{path}: {parents}: {parent} inherits this file")
        merge(tree, inherited(parent, read_file, parents=parents, replaces=replaces, heirs=lineage), replaces)
    merge(tree, own, replaces)
    return tree


def merge(tree: dict[str, Any], others: Mapping[str, Any], replaces: str | None = None) -> None:
    """Changes `tree`: what `others` sets wins, mapping by mapping. The mappings of `others` are copied. replaces: see inherited."""
    for name, value in others.items():
        if not isinstance(value, Mapping):
            tree[name] = value
            continue
        if not isinstance(tree.get(name), dict) or (replaces is not None and value.get(replaces)):
            tree[name] = {}
        merge(tree[name], {inner: one for inner, one in value.items() if inner != replaces})


def nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of whole names with dots."""
    tree: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            merge(tree, nested({f"{name}.{inner}": one for inner, one in value.items()}))
        else:
            put(tree, name.split("."), value)
    return tree


def with_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """With the text of a YAML file as hydra reads it, of which PyYAML leaves 3e-4 as text, and quotes are no longer seen.
    References stay."""
    return {name: _each_text(value, lambda text: text if "${" in text else read_value(text)) for name, value in tree.items()}


def resolved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """With ${a.b} replaced. UNKNOWN: what stands in no line of the tree, and a text with a reference within."""

    def value_of(text: str, depth: int = 0) -> Any:
        whole = REFERENCE.fullmatch(text)
        found = value_at(tree, whole[1]) if whole is not None and depth < DEEPEST_REFERENCE else ABSENT
        if found is ABSENT:
            return UNKNOWN if "${" in text else text
        return _each_text(found, lambda inner: value_of(inner, depth + 1))

    return {name: _each_text(value, value_of) for name, value in tree.items()}


def _each_text(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _each_text(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_each_text(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value
