"""What would become of a launch line here: which paths load, which flags of ours are read, which are dropped or ignored.

The judgement is that of megatron_rl.validation and of the hosts' rules, which judge the launch itself too: nothing is decided
twice.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module

from megatron_rl.arguments import validate_megatron_rl_args
from megatron_rl.commands.doctor.machine import NOTE, OK, PROBLEM, Finding
from megatron_rl.commands.doctor.probes import MARK, ask
from megatron_rl.commands.doctor.words import (
    OURS_BY_PATH,
    TRAIN,
    LaunchLine,
    Parser,
    host_arguments,
    read_line,
)
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import custom_loss_rules  # noqa: F401  (adds its rules)
from megatron_rl.hosts.advice import host_warnings
from megatron_rl.hosts.facts import Host, HostArgs
from megatron_rl.hosts.init_hook import path_problems
from megatron_rl.hosts.launch import first_on_path
from megatron_rl.hosts.launch_facts import read_launch
from megatron_rl.hosts.megatron_lm import megatron_lm_config
from megatron_rl.hosts.rules import check_launch, dropped_flags
from megatron_rl.validation import ROUTES_OF_FLAG, config_warnings, field_of
from megatron_rl.validation.routes import REASONS

INIT_HOOK = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
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


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """title: whose launcher reads the line, and on which route our loss would be reached. flags: of ours, one finding each."""

    title: str
    route: str | None
    paths: list[Finding] = field(default_factory=list)
    flags: list[Finding] = field(default_factory=list)
    rules: list[Finding] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        return [*self.paths, *self.flags, *self.rules]


def judge_launch(words: list[str], host: str | None) -> LaunchReport:
    """Raises ConfigError for a line that cannot be read."""
    line = read_line(words, host)
    with first_on_path(line.folder):
        paths = [resolved(line, flag, path) for flag, path in line.dotted_paths()]
        is_importable = not any(f.status == PROBLEM and f.subject in OURS_BY_PATH for f in paths)
        if line.host == TRAIN:
            return LaunchReport("megatron-rl train", Route.TRAIN, paths, read_flags(line, Route.TRAIN), list(_train(line)))
        if line.host == Host.MEGATRON_LM:
            rules = list(_megatron_lm(line)) if is_importable else []
            return LaunchReport(_title(line), Route.MEGATRON_LM, paths, read_flags(line, Route.MEGATRON_LM), rules)
        args = host_arguments(line)
        launch = read_launch(args)
        if launch.is_alone and not line.ours and launch.view.ours("loss_aggregation") is None:
            nothing = Finding("megatron_rl", NOTE, "nothing of ours is on this line: neither a path nor a flag")
            return LaunchReport(_title(line), None, paths, [], [nothing])
        rules = list(_rollout_host(line, args)) if is_importable else []
        return LaunchReport(f"{_title(line)}, route {launch.route}", launch.route, paths, read_flags(line, launch.route), rules)


def resolved(line: LaunchLine, flag: str, path: str) -> Finding:
    """Ours in this process, another's in one of its own: importing it may do anything."""
    top, subject = re.split("[.:]", path)[0], flag
    is_ours = top == "megatron_rl"
    if ":" in path and not is_ours:
        return Finding(
            subject, PROBLEM, f"{path}: loaders split on the last dot and cannot load it; write {path.replace(':', '.')}"
        )
    facts = _resolve_ours(path) if is_ours else ask(RESOLVE, path, first_on_path=[str(line.folder.resolve())])
    missing = str(facts.get("missing") or "").split(".")[0]
    if facts["state"] == "here" and not facts.get("kind"):
        colon = f"; write {path.replace(':', '.')}, only our modules accept a colon" if ":" in path else ""
        return Finding(subject, NOTE if colon else OK, f"{path} loads{colon}")
    if facts["state"] == "here":
        return Finding(subject, PROBLEM, f"{path} is {facts['kind']}, not a function")
    if missing and (missing != top or missing in (Host.MILES, Host.SLIME)):
        return Finding(subject, NOTE, f"{path} is not looked at: it imports {missing}, which is not installed here")
    where = f" from {line.folder}" if missing == top else ""
    return Finding(subject, PROBLEM, f"{path} cannot be loaded{where} ({facts['error']}); write module.function")


def read_flags(line: LaunchLine, route: Route) -> list[Finding]:
    """For each flag of ours on the line, whether anything reads it, from the one table that validation goes by."""
    found = []
    for flag, value in line.ours.items():
        if not line.takes_our_flags and field_of(flag) not in line.from_file:
            found.append(Finding(flag, PROBLEM, _not_in_parser(line)))
        elif route in ROUTES_OF_FLAG[flag]:
            found.append(Finding(flag, OK, f"{value or 'on'}, read on the route {route}"))
        else:
            places = ", ".join(place for place in Route if place in ROUTES_OF_FLAG[flag])
            reason = f" ({REASONS[flag]})" if flag in REASONS else ""
            found.append(Finding(flag, PROBLEM, f"ignored on the route {route}: it works on {places}{reason}"))
    return found


def _not_in_parser(line: LaunchLine) -> str:
    if line.host == Host.MEGATRON_LM:
        return (
            "unknown to this script's parser: pass compose_extra_args_provider() of megatron_rl.hosts.megatron_lm to its pretrain"
        )
    end = {Host.SLIME: "dropped without a word", Host.MILES: "refused as an unknown argument"}[Host(line.host)]
    return f"{end} by the stock launcher of {line.host}"


def _rollout_host(line: LaunchLine, args: Namespace) -> Iterator[Finding]:
    dropped = dropped_flags(args, list(line.words), ROUTES_OF_FLAG)
    # Of a path that does not load `paths` tells already.
    told = {f"--{name.replace('_', '-')}" for name in vars(args)}
    others = [problem for problem in path_problems(args) if problem.split()[0] not in told]
    if dropped:
        remedy = "put them into the file that megatron-rl launch-config writes, or start with python -m megatron_rl.hosts.launch"
        yield Finding("launcher", PROBLEM, f"{' and '.join(field.split()[0] for field in dropped)} reach nobody: {remedy}")
        return  # what else the rules say would be about settings that nobody meant
    try:
        config, launch = check_launch(args, found=others)
    except ConfigError as error:
        yield from _problems(error, line)
    else:
        for text in host_warnings(config, launch):
            yield Finding("advice", NOTE, text)
    if HostArgs(args)["custom_megatron_init_path"] is None and not line.uses_our_launcher:
        yield Finding("init hook", NOTE, f"nothing checks this launch when it starts: add {INIT_HOOK}")


def _megatron_lm(line: LaunchLine) -> Iterator[Finding]:
    if not line.has_script:
        yield Finding("script", NOTE, f"{line.script} is not here: that its parser has our flags is taken for granted")
    try:
        config = megatron_lm_config(host_arguments(line)) if line.takes_our_flags else None
    except ConfigError as error:
        yield from _problems(error, line)
        return
    for text in config_warnings(config) if config else ():
        yield Finding("advice", NOTE, text)


def _train(line: LaunchLine) -> Iterator[Finding]:
    train, rules = import_module("megatron_rl.commands.train"), import_module("megatron_rl.training.option_rules")
    parser = Parser(add_help=False, allow_abbrev=False)
    train.add_arguments(parser, line.words)
    args = parser.parse_args(list(line.words))
    for judge in (
        lambda: rules.train_options(vars(args), world_size=line.num_ranks or 1),
        lambda: validate_megatron_rl_args(args, Route.TRAIN),
    ):
        try:
            judge()
        except ConfigError as error:
            yield from _problems(error, line)


def _problems(error: ConfigError, line: LaunchLine) -> Iterator[Finding]:
    """Without what `read_flags` says of a flag already."""
    told = {field_of(flag) for flag in line.ours}
    for problem in error.problems:
        if not (" would be ignored on the route " in problem and problem.partition("=")[0] in told):
            yield Finding("rule", PROBLEM, problem)


def _resolve_ours(path: str) -> dict:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        return {"state": "broken", "error": f"{type(error).__name__}: {error}"}
    return {"state": "here", "kind": "" if callable(found) else type(found).__name__}


def _title(line: LaunchLine) -> str:
    if line.uses_our_launcher:
        return f"{line.host}, started by megatron_rl.hosts.launch"
    return f"{line.host}, its own launcher" if line.host != Host.MEGATRON_LM else f"{line.host}, {line.script.name}"
