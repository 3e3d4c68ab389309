"""What would become of a launch line here: which paths load, which flags of ours are read, which are dropped or ignored.

The judgement is that of megatron_rl.validation and of the hosts' rules, which judge the launch itself too: nothing is decided
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from megatron_rl.arguments import validate_megatron_rl_args
from megatron_rl.commands.doctor.config_file import FLAG as CONFIG_FILE
from megatron_rl.commands.doctor.findings import NOTE, PROBLEM, Finding, LaunchReport
from megatron_rl.commands.doctor.flags import judge_flags
from megatron_rl.commands.doctor.host_arguments import Parser, host_arguments
from megatron_rl.commands.doctor.paths import OURS_BY_PATH, resolve_paths
from megatron_rl.commands.doctor.words import TRAIN, LaunchLine, read_line
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.advice import host_warnings, without_init_hook
from megatron_rl.hosts.facts import Host, HostArgs
from megatron_rl.hosts.init_hook import path_problems
from megatron_rl.hosts.launch import first_on_path
from megatron_rl.hosts.launch_facts import INIT_LINE, read_launch
from megatron_rl.hosts.megatron_lm import megatron_lm_config
from megatron_rl.hosts.rules import check_launch, dropped_flags
from megatron_rl.hosts.slips import meant_flag
from megatron_rl.validation import ROUTES_OF_FLAG, config_warnings, field_of


def judge_launch(words: Sequence[str], host: str | None) -> LaunchReport:
    """Raises ConfigError for a line that cannot be read."""
    line = read_line(words, host)
    with ExitStack() as stack:
        for folder in (*reversed(line.python_path), line.folder):
            stack.enter_context(first_on_path(Path(folder)))
        paths = resolve_paths(line)
        is_importable = not any(f.status == PROBLEM and f.subject in OURS_BY_PATH for f in paths)
        if line.host == TRAIN:
            route, rules = Route.TRAIN, _train
        elif line.host == Host.MEGATRON_LM:
            route, rules = Route.MEGATRON_LM, _megatron_lm
        else:
            args = host_arguments(line)
            launch = read_launch(args)
            is_nothing = launch.is_alone and not line.ours and launch.view.ours("loss_aggregation") is None
            route, rules = (None, _nothing) if is_nothing else (launch.route, _rollout_host)
        report = LaunchReport(_title(line, route), route, _reading(line), paths, judge_flags(line, route), unread=line.unread)
        return replace(report, rules=_judged(line, rules) if is_importable else [])


def _judged(line: LaunchLine, rules: Callable[[LaunchLine], Iterator[Finding]]) -> list[Finding]:
    of_ours = [flag for flag in line.unknown if flag in (*ROUTES_OF_FLAG, CONFIG_FILE)]
    if any(meant_flag(flag) for flag, _ in line.flags):
        return []  # what the rules say would be about settings that nobody meant
    if of_ours:
        return [Finding("rules", NOTE, f"not judged: the value of {', '.join(of_ours)} is not known here")]
    try:
        found = list(rules(line))
    except (TypeError, ValueError) as error:  # a host's own parser would have refused that value
        return [Finding("rules", NOTE, f"not judged: a value on the line is not of the kind that its flag takes ({error})")]
    if not line.unread:
        return found
    unless = f" (unless {', '.join(line.unread)} says otherwise)"
    return [replace(finding, text=finding.text + unless) if finding.status == PROBLEM else finding for finding in found]


def _reading(line: LaunchLine) -> list[Finding]:
    """What could not be read, and what was taken for granted."""
    found = []
    if line.unread:
        how = "" if line.read_from else "; give the script that runs the line (-- bash run.sh), where arrays are known"
        found.append(Finding("unread", NOTE, f"{', '.join(line.unread)}: not expanded, and the flags in there are not judged{how}"))
    others = [flag for flag in line.unknown if flag not in ROUTES_OF_FLAG]
    if others:
        found.append(Finding("unread", NOTE, f"not known here, and not judged: what {', '.join(others)} will be given"))
    if line.read_from and line.read_from.branches:
        text = f"taken as if each branch of the script had run: {', '.join(line.read_from.branches)}"
        found.append(Finding("branches", NOTE, text))
    if line.read_from and line.read_from.unparsed:
        text = f"not understood, and what they set is not known: line {', '.join(line.read_from.unparsed)}"
        found.append(Finding("script", NOTE, text))
    if line.stray:
        words = f"{line.stray.words[0]} and {len(line.stray.words) - 1} words after it"
        text = f"{words} stand alone on line {line.stray.line} and reach nobody: the line above lacks its \\ at the end"
        found.append(Finding("script", PROBLEM, text))
    return found


def _nothing(line: LaunchLine) -> Iterator[Finding]:
    place = "what could be read of this line" if line.unread else "this line"
    yield Finding("megatron_rl", NOTE, f"nothing of ours is on {place}: neither a path nor a flag")


def _rollout_host(line: LaunchLine) -> Iterator[Finding]:
    args = host_arguments(line)
    # Of a slip `flags` tells already.
    dropped = [problem for problem in dropped_flags(args, line.words, ROUTES_OF_FLAG) if meant_flag(problem.split()[0]) is None]
    # Of a path that does not load `paths` tells already.
    told = {f"--{name.replace('_', '-')}" for name in vars(args)}
    others = [problem for problem in path_problems(args) if problem.split()[0] not in told]
    if dropped:
        remedy = "put them into the file that megatron-rl launch-config writes, or start with python -m megatron_rl.hosts.launch"
        names = [problem.split()[0] for problem in dropped]
        verb = "reaches" if len(names) == 1 else "reach"
        yield Finding("launcher", PROBLEM, f"{' and '.join(names)} {verb} nobody: {remedy}")
        return  # what else the rules say would be about settings that nobody meant
    try:
        config, launch = check_launch(args, found=others)
    except ConfigError as error:
        yield from _problems(error, line)
    else:
        for text in host_warnings(config, launch):
            yield Finding("advice", NOTE, text)
    if line.uses_our_launcher:
        yield from (Finding("init hook", NOTE, text) for text in without_init_hook(HostArgs(args)))
    elif HostArgs(args)["custom_megatron_init_path"] is None:
        yield Finding("init hook", NOTE, f"nothing checks this launch when it starts: add {INIT_LINE}")


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
    known = [word for flag, values in line.flags if meant_flag(flag) is None for word in (flag, *values)]
    parser = Parser(add_help=False, allow_abbrev=False)
    train.add_arguments(parser, known)
    try:
        args = parser.parse_args(known)
    except ConfigError as error:
        yield from _problems(error, line)
        return
    for judge in (
        lambda: rules.train_options(vars(args), world_size=line.num_ranks or 1),
        lambda: validate_megatron_rl_args(args, Route.TRAIN),
    ):
        try:
            judge()
        except ConfigError as error:
            yield from _problems(error, line)


def _problems(error: ConfigError, line: LaunchLine) -> Iterator[Finding]:
    """Without what `judge_flags` says of a flag already."""
    told = {field_of(flag) for flag in line.ours}
    for problem in error.problems:
        if not (" would be ignored on the route " in problem and problem.partition("=")[0] in told):
            yield Finding("rule", PROBLEM, problem)


def _title(line: LaunchLine, route: Route | None) -> str:
    if line.host == TRAIN:
        return "megatron-rl train"
    if line.uses_our_launcher:
        title = f"{line.host}, started by megatron_rl.hosts.launch"
    else:
        title = f"{line.host}, its own launcher" if line.host != Host.MEGATRON_LM else f"{line.host}, {line.script.name}"
    title += f", route {route}" if route and line.host != Host.MEGATRON_LM else ""
    return title + (f", from line {line.read_from.line} of the script" if line.read_from else "")
