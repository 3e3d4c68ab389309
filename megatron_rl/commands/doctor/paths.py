"""Whether the functions that a launch line names can be loaded, tried as the hosts do it; it never says what they should do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

from megatron_rl.commands.doctor.config_file import FLAG as CONFIG_FILE
from megatron_rl.commands.doctor.findings import NOTE, OK, PROBLEM, Finding
from megatron_rl.commands.doctor.probes import MARK, ask
from megatron_rl.commands.doctor.script import is_unread
from megatron_rl.commands.doctor.words import LaunchLine
from megatron_rl.hosts.facts import Host
from megatron_rl.hosts.slips import OUR_HOOKS, is_hook_place
from megatron_rl.validation import field_of, flag_of

# Options of both hosts that hold a function; other options that end in -path hold a file.
FUNCTION_FLAG = re.compile(
    r"--(custom-[\w-]+-path|[\w-]+-(function|hook|filter|process|postprocess|picker|postprocessor)-path"
    r"|data-source-path|generate-tool-specs-path)"
)
# A function has a dot, or the colon that no host's loader understands.
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
# Names that are registered or imported; a name without a dot is registered.
OURS_BY_PATH = ("--policy-loss", "--loss-aggregation", "--reward", "--task")
# Megatron's layer spec: a module and a name in it.
SPEC = "--spec"
# The loader of both hosts: what follows the last dot is an attribute.
RESOLVE = f"""
import importlib, json, os, sys
path = sys.argv[1]
module, _, name = path.rpartition(".")
facts = {{"state": "here"}}
try:
    found = getattr(importlib.import_module(module), name)
    facts["kind"] = "" if callable(found) else type(found).__name__
except BaseException as error:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    facts |= {{"state": "broken", "error": f"{{type(error).__name__}}: {{error}}", "missing": missing}}
print({MARK!r} + json.dumps(facts), flush=True)
os._exit(0)
"""


def resolve_paths(line: LaunchLine) -> list[Finding]:
    """One finding for each function that the line or its file names; of a flag that is given twice the last counts."""
    found: dict[tuple[str, str], Finding] = {}
    for flag, path in named_functions(line):
        if flag not in OURS_BY_PATH and not DOTTED.fullmatch(path):
            text = f"{path} is no module.function: a loader splits it on the last dot and imports what stands before"
            found[flag, path] = Finding(flag, PROBLEM, text)
        elif (flag, path) not in found:
            found[flag, path] = resolved(line, flag, path)
    return [*found.values(), *misplaced(line)]


def named_functions(line: LaunchLine) -> Iterator[tuple[str, str]]:
    given = {flag: values for flag, values in line.flags}
    for name, value in line.from_file.items():
        if isinstance(value, str) and "-" not in name:
            given[flag_of(name)] = (value,)
    for flag, values in given.items():
        if flag == SPEC and len(values) == 2 and not any(map(is_unread, values)):
            yield flag, ".".join(values)
        elif flag != CONFIG_FILE and FUNCTION_FLAG.fullmatch(flag):
            yield from ((flag, value) for value in values if not is_unread(value))
        elif flag in OURS_BY_PATH and len(values) == 1 and DOTTED.fullmatch(values[0]) and not _is_file(values[0]):
            yield flag, values[0]


def misplaced(line: LaunchLine) -> Iterator[Finding]:
    """Functions of ours behind a flag that no host has, or that takes no function of ours."""
    for flag, values in line.flags:
        is_ours = values[:1] and re.match(r"megatron_rl\.(reducers|hooks)\b", values[0])
        if is_ours and flag != CONFIG_FILE and not is_hook_place(flag) and flag not in OURS_BY_PATH:
            name = field_of(flag)
            near = next((option for option in OUR_HOOKS if option.startswith(name) or name.startswith(option)), None)
            meant = f": did you mean {flag_of(near)}?" if near else f"; the places are {', '.join(flag_of(o) for o in OUR_HOOKS)}"
            yield Finding(flag, PROBLEM, f"{values[0]} reaches nobody behind this flag{meant}")


def resolved(line: LaunchLine, flag: str, path: str) -> Finding:
    """Ours in this process, another's in one of its own: importing it may do anything."""
    top = re.split("[.:]", path)[0]
    is_ours = top == "megatron_rl"
    if ":" in path and not is_ours:
        return Finding(flag, PROBLEM, f"{path}: loaders split on the last dot and cannot load it; write {path.replace(':', '.')}")
    facts = _resolve_ours(path) if is_ours else ask(RESOLVE, path, first_on_path=[str(line.folder.resolve())], waits_for=path)
    missing = str(facts.get("missing") or "").split(".")[0]
    if facts["state"] == "here" and not facts.get("kind"):
        colon = f"; write {path.replace(':', '.')}, only our modules accept a colon" if ":" in path else ""
        return Finding(flag, NOTE if colon else OK, f"{path} loads{colon}")
    if facts["state"] == "here":
        return Finding(flag, PROBLEM, f"{path} is {facts['kind']}, not a function")
    if missing and (missing != top or missing in (Host.MILES, Host.SLIME)):
        return Finding(flag, NOTE, f"{path} is not looked at: it imports {missing}, which is not installed here")
    if missing and line.script is not None and not line.has_script:
        return Finding(flag, NOTE, f"{path} is not looked at: {line.script} is not here, and no module {missing} either")
    where = f" from {line.folder}" if missing == top else ""
    return Finding(flag, PROBLEM, f"{path} cannot be loaded{where} ({facts['error']}); write module.function")


def _is_file(value: str) -> bool:
    return value.endswith((".py", ".yaml", ".yml", ".json", ".jsonl"))


def _resolve_ours(path: str) -> dict:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        return {"state": "broken", "error": f"{type(error).__name__}: {error}"}
    return {"state": "here", "kind": "" if callable(found) else type(found).__name__}
