"""What would become of a launch line here: which paths load, which flags of megatron_rl are read, which are dropped or ignored.

megatron_rl.validation and the rules of the hosts judge, here and when the launch starts: nothing is decided twice.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_rl.commands.doctor.command_line import (
    ADDED,
    CONFIG_FILE,
    FUNCTION_FLAG,
    HIDES_FLAGS,
    OUR_LAUNCHER,
    TRAIN,
    LaunchLine,
    Parser,
    SeveralTrainings,
    host_arguments,
    read_line,
    through_shell_scripts,
)
from megatron_rl.commands.doctor.probes import look_up
from megatron_rl.commands.doctor.report import NOTE, OK, PROBLEM, Finding, LaunchReport
from megatron_rl.commands.doctor.script import is_unread
from megatron_rl.commands.doctor.script_findings import branches_of, of_script
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.files.settings_file import read_settings_file
from megatron_rl.hosts import stock
from megatron_rl.hosts.base import (
    CUSTOM_LOSS_LINE,
    GUARD_LINE,
    INIT_LINE,
    OPTIONS,
    REDUCER_LINE,
    HostOptions,
    known_hosts,
    read_launch,
)
from megatron_rl.hosts.batch_steps import has_whole_steps
from megatron_rl.hosts.checkpoint_config import checkpoint_config
from megatron_rl.hosts.checks import actors_are_checked, check_launch, constant_is_without_deviation, host_warnings
from megatron_rl.hosts.door_line import judge as judge_line
from megatron_rl.hosts.doors import DOORS, door_of
from megatron_rl.hosts.flags import unjudged_correction
from megatron_rl.hosts.launch import first_on_path
from megatron_rl.hosts.names import (
    OUR_HOOKS,
    dropped_flags,
    is_hook_place,
    meant_host_flag,
    misspelling_hint,
    path_problem,
)
from megatron_rl.hosts.scripts import defines, module_file, syntax_tree
from megatron_rl.hosts.settings import ABSENT, NOT_ASKED, UNKNOWN, StepSizes
from megatron_rl.hosts.step_sizes import PROCESSES
from megatron_rl.hosts.stock import TERMS, VERDICT
from megatron_rl.hosts.training_hooks import trained_in_words
from megatron_rl.validation import field_of, flag_of, routes_of_flags
from megatron_rl.validation.auxiliary_losses import auxiliary_loss_problems, unscaled_indexer_problem
from megatron_rl.validation.checks import Row
from megatron_rl.validation.experts import drift_problem, expert_notes, expert_problems
from megatron_rl.validation.model_settings import default_dropout_note, model_notes, model_problems
from megatron_rl.validation.repeated import repeated
from megatron_rl.validation.routes import REASONS

# A function has a dot, or the colon that no host's loader understands.
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
# Names that are registered or imported; a name without a dot is registered.
OURS_BY_PATH = ("--policy-loss", "--loss-aggregation", "--reward", "--task")
TIS_FLAG = "--custom-tis-function-path"
# The subject of a row that says that they were not judged.
RULES, ADVICE = "rules", "advice"
NOTHING_OF_OURS = "nothing of megatron_rl on this line"
_TEXT_OF_THE_SCRIPT = f"the text that the script gives to {CONFIG_FILE}"
FILES = (".py", ".yaml", ".yml", ".json", ".jsonl")


def judge_launches(words: Sequence[str], host: str | None, **known: Any) -> list[LaunchReport]:
    """`judge_launch` of each training that the line starts: a shell script may start several."""
    try:
        return [judge_launch(words, host, **known)]
    except SeveralTrainings as several:
        return [judge_launch(words, host, training=training, **known) for training in range(several.number)]


def judge_launch(
    words: Sequence[str],
    host: str | None,
    *,
    replicas_drift: bool | None = None,
    scales_indexer_loss: bool | None = None,
    of_step: stock.JudgeStep | None = None,
    asked: StepSizes = NOT_ASKED,
    training: int | None = None,
) -> LaunchReport:
    """replicas_drift, scales_indexer_loss: what the installed Megatron-Core does with replicas of experts, and with the loss of the
    sparse-attention indexer; None: not known. of_step: judges a recorded step. asked: its sizes that win over the line's. training:
    which one of a shell script, where it starts several. ConfigError: a line that cannot be read."""
    if report := _judge_settings(words, host, of_step, asked, training):
        return report
    line = read_line(words, host, training)
    folders: list[str | Path] = [*reversed(line.python_path), line.folder]
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(first_on_path(Path(folder)))
        written, line = line, line.with_meant_functions
        route = _route(line)
        paths = resolve_paths(written, route)
        refused = [] if line.of_host is None else [_finding(row) for row in line.of_host.refused_words(line.known)]
        is_importable = not (refused or any(f.status == PROBLEM and f.subject in OURS_BY_PATH for f in paths))
        found = []
        if is_importable:
            found = [
                *_judged(line, route, of_step, asked),
                *_experts(line, route, replicas_drift),
                *_model(line, route, scales_indexer_loss),
                *_sizes(line),
            ]
        flags = [*refused, *(_read_flags(line, route) if route is not None else []), *_without_effect(line), *_given_twice(line)]
        flags = [row for row in flags if row.status != OK or not any(_refuses(problem, row.subject) for problem in found)]
        scope = "nothing" if all(row.status == NOTE for row in found) else "only what changes any step"
        unjudged = f"{NOTHING_OF_OURS}: {scope} was judged" if route is None else _open(line, route, found)
        if is_importable and (route is None or _trains_without_ours(line)):
            *own, last = _stock(line, of_step, asked)
            found += map(_finding, own)
            unjudged = f"{NOTHING_OF_OURS}; {last.text}"
        found += branches_of(line.read_from)
        of_flags = {row.text for row in found if row.subject != ADVICE}
        found = [row for row in found if row.subject != ADVICE or row.text not in of_flags]
        unknown, remedy = tuple(line.unknown_of_host), ""
        if unknown and line.is_composed:
            remedy = f" (give {'them' if len(unknown) > 1 else 'it'} behind {ADDED})"
        title, reading = _title(line, route), [*_reading(line)]
        return LaunchReport(title, route, reading, paths, flags, found, line.unread, unjudged, unknown, remedy)


def _refuses(row: Finding, flag: str) -> bool:
    """Whether the problem is one of this flag's value: it then is not "ok" as well."""
    return row.status == PROBLEM and re.match(rf"({flag}|{field_of(flag)})(?![\w-])", row.text) is not None


def _judge_settings(
    words: Sequence[str], named: str | None, of_step: stock.JudgeStep | None, asked: StepSizes, training: int | None
) -> LaunchReport | None:
    """A line of a trainer that settings configure; None: it is another host's."""
    is_script = any(word.endswith((".sh", ".bash")) or re.search(r"\s", word) for word in words)
    if named is not None and named not in DOORS or not is_script and named is None and door_of(words) is None:
        return None
    given, _, read_from, stray = through_shell_scripts(list(words), training)
    hidden = tuple(word for word in given if HIDES_FLAGS.fullmatch(word))
    door = door_of(given) if named is None else DOORS[named]
    if door is None:
        return None
    exported = dict(os.environ) | dict(read_from.exported if read_from else ())
    variables = [f"{name}={exported[name]}" for name in door.imports if name in exported]
    # A problem may be found by name and by value.
    judged = judge_line(door, [*variables, *given], read_settings_file, of_step, asked)
    rows = {(row.text, row.subject if row.subject in TERMS else ""): row for row in judged}.values()
    verdict = "; ".join(row.text for row in rows if row.subject == VERDICT) or None
    found = [_finding(row) for row in rows if row.subject != VERDICT]
    reading = (
        [Finding("unread", NOTE, f"{', '.join(hidden)}: not expanded, and the overrides in there are not judged")] if hidden else []
    )
    reading += of_script(read_from, stray)
    place = f", from {read_from.place}" if read_from else ""
    # The settings file is always read; a loss that was judged has its own row.
    is_judged = any(row.status == PROBLEM or (row.status == OK and row.subject != "settings") for row in found)
    is_open = any("not known here" in row.text for row in found)
    why = "the loss is not known here" if is_open else NOTHING_OF_OURS
    unjudged = verdict or (None if is_judged else f"{why}: nothing was judged")
    program = door.programs.named(given) or door.programs.imported(given)
    started = next((Path(word).name for word in given if word.endswith(".py") and door.recognises([word])), door.starts)
    started = started if program is None else program.word
    found += branches_of(read_from)
    return LaunchReport(f"{door.name}, {started}{place}", None, reading, [], found, [], hidden, unjudged)


def _route(line: LaunchLine) -> Route | None:
    """None where megatron_rl does nothing. Then doctor tells only what is meant for megatron_rl and has no effect."""
    if line.of_host is None:
        return Route.TRAIN
    if not line.is_of_rollouts:
        return line.of_host.routes[0]
    launch = read_launch(host_arguments(line))
    is_nothing = launch.is_alone and not line.ours and launch.options.ours("loss_aggregation") is None
    is_told = line.unread or [*misplaced(line)] or any(line.meant(flag) for flag, _ in line.flags)
    return None if is_nothing and (is_told or not line.uses_our_launcher) else launch.route


def _judged(line: LaunchLine, route: Route | None, of_step: stock.JudgeStep | None, asked: StepSizes) -> list[Finding]:
    judge = _train if line.of_host is None else _rollout_host if line.is_of_rollouts else _own_loop
    of_ours = [flag for flag in line.unknown if flag in (*routes_of_flags(), CONFIG_FILE)]
    if any(line.meant(flag) for flag, _ in line.flags):
        return []  # the rules would judge settings that were not meant
    if of_ours:
        return [Finding(RULES, NOTE, f"not judged: the value of {', '.join(of_ours)} is not known here")]
    if route is None:
        place = "what could be read of this line" if line.unread else "this line"
        return [Finding("megatron_rl", NOTE, f"{place} has no path and no flag of megatron_rl; our losses: {_next_step(line)}")]
    try:
        trained: list[PolicyLossConfig] = []
        found = list(judge(line, trained))
        if of_step is not None and not _trains_without_ours(line):
            remarks = tuple(filter(None, [_unjudged_correction(line, route)]))
            of_config = stock.Stock.of_ours if not line.is_of_rollouts else read_launch(host_arguments(line)).weighed
            weighed = [_sized(line, of_config(config), asked) for config in trained]
            weighed = [replace(one, remarks=(*one.remarks, *remarks)) for one in weighed]
            found += [_finding(row) for one in weighed for row in of_step(one)]
    except (TypeError, ValueError) as error:  # a host's own parser would have refused that value
        return [Finding(RULES, NOTE, f"not judged: a value on the line is not of the kind that its flag takes ({error})")]
    if not (line.unread or line.is_composed):
        return found
    unless = f" (unless {', '.join(line.unread) or 'a branch of the script'} says otherwise)"
    return [replace(finding, text=finding.text + unless) if finding.status == PROBLEM else finding for finding in found]


def _open(line: LaunchLine, route: Route, found: Iterable[Finding]) -> str | None:
    """What is said in the place of "no problems" where not all of a launch with our loss could be judged."""
    if any(row.subject == RULES for row in found):
        return "the rules were not judged, see the notes"
    correction = _unjudged_correction(line, route)
    return None if correction is None else f"{correction}, see the notes"


def _unjudged_correction(line: LaunchLine, route: Route | None) -> str | None:
    """Of the host's own loss, which our reducer reduces; our loss refuses another correction."""
    return unjudged_correction(_with_unread(line)) if line.is_of_rollouts and route == Route.REDUCER else None


def _with_unread(line: LaunchLine) -> HostOptions:
    """A correction whose name is not known here has the word of the line. With a file that is not known here it may be on."""
    args = host_arguments(line)
    if TIS_FLAG in line.unknown:
        args.custom_tis_function_path = " ".join(dict(line.flags)[TIS_FLAG])
    if CONFIG_FILE in line.unknown and HostOptions(args, line.of_host)["custom_tis_function_path"]:
        args.use_tis = True
    return HostOptions(args, line.of_host)


def _next_step(line: LaunchLine) -> str:
    """What a line without anything of ours lacks."""
    hooks = _hooks(line)
    if line.is_composed and CONFIG_FILE in dict(line.flags):
        lines = "the lines that megatron-rl launch-config --loss-aggregation <name> prints"
        return f"{lines}, in {_TEXT_OF_THE_SCRIPT}, and behind the script {ADDED} '{hooks}'"
    if line.is_composed:
        file = "megatron-rl launch-config --loss-aggregation <name> > mrl.yaml"
        return f"{file}, and behind the script {ADDED} '{CONFIG_FILE} /path/to/mrl.yaml {hooks}'"
    if line.is_of_rollouts:
        return f"python -m {OUR_LAUNCHER} before the script, and {hooks} --loss-aggregation <name>"
    return "docs/hosts/megatron_lm.md shows the lines of the script"


def _hooks(line: LaunchLine) -> str:
    """Of a launch with our weights. The FSDP backend of miles gives a reducer no settings, and calls no init hook."""
    is_fsdp = HostOptions(host_arguments(line), line.of_host)["train_backend"] == "fsdp"
    return CUSTOM_LOSS_LINE if is_fsdp else f"{INIT_LINE} {REDUCER_LINE}"


def _reading(line: LaunchLine) -> Iterator[Finding]:
    """What could not be read, and what was taken for granted."""
    if line.unread:
        how = "" if line.read_from else "; give the script that runs the line (-- bash run.sh), where arrays are known"
        if line.is_composed:
            how = "; the line that the script prints (EXEC: ...) has them"
        elif line.read_from and line.read_from.absent:
            how = f"; sourced, and not here: {', '.join(line.read_from.absent)}"
        yield Finding("unread", NOTE, f"{', '.join(line.unread)}: not expanded, and the flags in there are not judged{how}")
    if line.unknown_of_host:
        yield Finding("unread", NOTE, f"not known here, and not judged: what {', '.join(line.unknown_of_host)} will be given")
    yield from of_script(line.read_from, line.stray)


def _trains_without_ours(line: LaunchLine) -> bool:
    """A script of Megatron-LM's own, with no flag of ours; one with our forward step has our flags in its parser."""
    return line.host == "megatron_lm" and not line.ours and not (line.has_script and line.takes_our_flags)


def _finding(row: Row) -> Finding:
    return Finding(row.subject, PROBLEM if row.is_wrong else NOTE if row.is_note else OK, row.text)


def _stock(line: LaunchLine, of_step: stock.JudgeStep | None, asked: StepSizes) -> Iterator[Row]:
    """What the host's own loss weighs. The last row is the verdict."""
    options = _with_unread(line)
    found = options.host.stock(options)
    if isinstance(found, stock.Stock):
        found = _sized(line, found, asked)
    of_ours = f"{_hooks(line)} --loss-aggregation"
    exact = (lambda aggregation: f"{of_ours} {aggregation}") if line.is_of_rollouts else None
    yield from stock.judge(found, str(options.host), exact, of_step, is_partial=line.is_composed or CONFIG_FILE in line.unknown)


def _sized(line: LaunchLine, found: stock.Stock, asked: StepSizes) -> stock.Stock:
    """With the sizes of a step on that line."""
    if line.of_host is None:  # `train` cuts by its own rules
        return replace(found, sizes=asked)
    names = line.of_host.sizes_of(HostOptions(host_arguments(line), line.of_host))
    typed = {flag_of(name): value for name, value in vars(host_arguments(line)).items()} | {PROCESSES: line.num_ranks}
    # What was not read has a size, and may have one that is not here.
    hidden = [*line.unknown, *(name for name in (*names.ranks, *names.shared) if line.unread and name not in typed)]
    typed |= dict.fromkeys(hidden, UNKNOWN)
    return replace(found, sizes=names.read(lambda name: typed.get(name, ABSENT), asked))


def _experts(line: LaunchLine, route: Route | None, replicas_drift: bool | None) -> Iterator[Finding]:
    """What the flags of a mixture of experts do to the step. Rules and advice say the rest, where our loss trains."""
    args = host_arguments(line)
    settings = vars(args)
    for note in expert_notes(settings, route):
        if route is None or not note.is_note:
            yield Finding(flag_of(note.subject), NOTE if note.is_note else OK, note.text)
    if route is None:
        rescaled = auxiliary_loss_problems({**settings, "router_aux_loss": None}, Route.REDUCER)
        yield from (Finding("experts", PROBLEM, text) for text in (*expert_problems(settings), *rescaled))
    drift = drift_problem(settings)
    if drift is not None and replicas_drift is not False:
        yield Finding("experts", NOTE if replicas_drift is None else PROBLEM, drift)
    config = checkpoint_config(HostOptions(args)) if line.is_of_rollouts else None
    if config is not None and config.coefficients and not HostOptions(args).host.takes_checkpoint_coefficient(HostOptions(args)):
        text = f"{config} has no effect: {line.host} takes --moe-aux-loss-coeff of the arguments, which is 0 where it is not typed"
        yield Finding(config.flag, OK, text)
    elif config is not None and config.coefficients and route is None:
        text = f"a bridge takes {config} for the routers' loss, which changes with the layout: add --moe-aux-loss-coeff 0"
        yield Finding(config.flag, NOTE, text)


def _model(line: LaunchLine, route: Route | None, scales_indexer_loss: bool | None) -> Iterator[Finding]:
    """What other flags of the model do to the step, as _experts."""
    if line.of_host is None:  # `train` has no such flag
        return
    settings = vars(host_arguments(line))
    for note in model_notes(settings, route):
        if not note.is_note or route is None or not line.takes_our_flags:  # the advice of _judged has the others
            yield Finding(flag_of(note.subject), NOTE if note.is_note else OK, note.text)
    if route is None:
        yield from (Finding("model", PROBLEM, text) for text in model_problems(settings))
    indexer = None if route == Route.MEGATRON_LM else unscaled_indexer_problem(settings)  # our forward step refuses it anyway
    if indexer is not None and scales_indexer_loss is not True:
        yield Finding("indexer", NOTE if scales_indexer_loss is None else PROBLEM, indexer)
    is_whole = not (line.unread or line.unjudged)
    if is_whole and (dropout := default_dropout_note(settings)) is not None:
        yield Finding(flag_of(dropout.subject), NOTE, dropout.text)


def _sizes(line: LaunchLine) -> Iterator[Finding]:
    """Whether the rollout batch has whole steps, of a line that was read to its end."""
    if line.is_of_rollouts and not (line.unread or line.unjudged):
        yield from map(_finding, has_whole_steps(read_launch(host_arguments(line))))


def _rollout_host(line: LaunchLine, trained: list[PolicyLossConfig]) -> Iterator[Finding]:
    args = host_arguments(line)
    names = [problem.split()[0] for problem in dropped_flags(HostOptions(args), line.words)]
    if names:
        where = "the file that megatron-rl launch-config writes, or start with python -m megatron_rl.hosts.launch"
        yield from _dr_grpo(line, args)
        yield Finding("launcher", NOTE, f"so that they reach our hooks, put {' and '.join(names)} into {where}")
        return  # the other rules would judge settings that were not meant
    in_words: list[str] = []

    def judge() -> Iterable[str]:
        config, launch = check_launch(args)
        trained.append(config)
        in_words.append(trained_in_words(config, launch))
        return host_warnings(launch)

    yield from _told(line, judge)
    yield from (Finding("trains", OK, text) for text in in_words)
    options = HostOptions(args)
    if trained and read_launch(args).route == Route.CUSTOM_LOSS and options["custom_megatron_before_train_step_hook_path"] is None:
        text = "our loss looks for tokens that are not finite once a micro-batch, and waits for the device there"
        yield Finding("step guard", NOTE, f"{text}; to look once a step, add {GUARD_LINE}")
    if line.uses_our_launcher:
        yield from (Finding(row.subject, NOTE, row.text) for row in actors_are_checked(read_launch(args)))
    elif options["custom_megatron_init_path"] is None:
        yield Finding("init hook", NOTE, f"nothing checks this launch when it starts: add {INIT_LINE}")


def _dr_grpo(line: LaunchLine, args: Namespace) -> Iterator[Finding]:
    """The same advice that the rules give to a line whose launcher reads our flags."""
    given = Namespace(**vars(args) | {"loss_aggregation": line.ours.get("--loss-aggregation")})
    yield from (Finding(ADVICE, NOTE, row.text) for row in constant_is_without_deviation(read_launch(given)))


def _own_loop(line: LaunchLine, trained: list[PolicyLossConfig]) -> Iterator[Finding]:
    if not line.has_script:
        yield Finding("script", NOTE, f"{line.script} is not here: that its parser has our flags is taken for granted")
    host = line.of_host if line.takes_our_flags else None
    if host is not None:
        args = host_arguments(line)

        def judge() -> Iterable[str]:
            trained.append(host.config(args, host.routes[0]))
            return host.warnings(trained[0], args)

        yield from _told(line, judge)


def _train(line: LaunchLine, trained: list[PolicyLossConfig]) -> Iterator[Finding]:
    train = import_module("megatron_rl.commands.train")
    known = [word for flag, values in line.flags if line.meant(flag) is None for word in (flag, *values)]
    parser = Parser(add_help=False, allow_abbrev=False)
    train.add_arguments(parser, known)

    def judge() -> Iterable[str]:
        trained.append(train.read_settings(parser.parse_args(known), line.num_ranks.value if line.num_ranks else 1)[1])
        return ()

    yield from _told(line, judge)


def _told(line: LaunchLine, judge: Callable[[], Iterable[str]]) -> Iterator[Finding]:
    """The advice of a judge, or its problems without what `judge_flags` says of a flag already."""
    try:
        yield from [Finding(ADVICE, NOTE, text) for text in judge()]
    except ConfigError as error:
        told = {field_of(flag) for flag in line.ours}
        for problem in error.problems:
            if not (" would be ignored on the route " in problem and problem.partition("=")[0] in told):
                yield Finding("rule", PROBLEM, problem)


def _title(line: LaunchLine, route: Route | None) -> str:
    if line.host == TRAIN:
        return "megatron-rl train"
    own = "its own launcher" if line.is_of_rollouts or line.script is None else line.script.name
    title = f"{line.host}, {'started by megatron_rl.hosts.launch' if line.uses_our_launcher else own}"
    if route and line.is_of_rollouts and not read_launch(host_arguments(line)).is_alone:
        title += f", route {route}"
    return title + (f", from {line.read_from.place}" if line.read_from else "")


# Whether anything reads a flag of megatron_rl, by the table that validation goes by


def _read_flags(line: LaunchLine, route: Route) -> Iterator[Finding]:
    for flag, value in line.ours.items():
        if flag in line.typed and not line.takes_our_flags and (flag not in line.filed or _is_refused(line)):
            yield Finding(flag, PROBLEM, fate_of_unknown_flags(line))
        elif route not in routes_of_flags()[flag]:
            places = ", ".join(place for place in Route if place in routes_of_flags()[flag])
            reason = f" ({REASONS[flag]})" if flag in REASONS else ""
            remedy = f"; remove it, or train our loss: {CUSTOM_LOSS_LINE}" if route == Route.REDUCER else ""
            yield Finding(flag, PROBLEM, f"ignored on the route {route}: it works on {places}{reason}{remedy}")
        elif is_unread(value):
            yield Finding(flag, NOTE, f"{value} is not known here: read on the route {route}, and not judged")
        else:
            yield Finding(flag, OK, f"{value or 'on'}, read on the route {route}")
        others = [typed for name, values in line.flags if name == flag and (typed := " ".join(values)) != line.filed.get(flag)]
        if flag in line.filed and others:
            text = f"the file of --custom-config-path wins: {value}, not the {', '.join(others)} of the line; change it in the file"
            yield Finding(flag, NOTE, text)


def _without_effect(line: LaunchLine) -> Iterator[Finding]:
    """Misspelt flags, and those behind a lone `--`."""
    misplaced_functions = {finding.subject for finding in misplaced(line)}
    for flag in dict.fromkeys(flag for flag, _ in line.flags if flag not in misplaced_functions):
        if line.of_host is not None and line.is_of_rollouts and (meant := meant_host_flag(flag, line.of_host)) is not None:
            yield Finding(flag, PROBLEM, f"{fate_of_unknown_flags(line)}: did you mean {meant}?")
        elif line.meant(flag) is not None:
            yield Finding(flag, PROBLEM, f"{fate_of_unknown_flags(line)}: {misspelling_hint(flag)}")
    lost = [word for word in line.behind if word.partition("=")[0] in routes_of_flags() or word.startswith("megatron_rl.")]
    if lost:
        verb = "has" if len(lost) == 1 else "have"
        text = f"a parser reads no flag after it: {', '.join(lost)} {verb} no effect; remove the --"
        yield Finding("--", PROBLEM, text)


def _given_twice(line: LaunchLine) -> Iterator[Finding]:
    """Which of the strings of a script are on its line is not known, and flags after them are given to replace them: but ours are a
    person's own, and a file that is replaced takes all its settings with it."""

    def is_read(flag: str) -> bool:
        is_ours = flag in routes_of_flags() and flag not in line.filed
        return is_ours or flag == CONFIG_FILE or not line.is_composed and field_of(flag) in OPTIONS

    for flag, text in repeated(((flag, " ".join(map(_shown, values))) for flag, values in line.flags), is_read):
        if flag != CONFIG_FILE:
            yield Finding(flag, NOTE, text)
            continue
        remedy = f"put our lines into {_TEXT_OF_THE_SCRIPT}, and leave ours out" if line.is_composed else "write one file"
        if lost := line.lost_settings():
            yield Finding(flag, PROBLEM, f"{text}, and what it sets is lost: {', '.join(lost)}; {remedy}")
        else:
            yield Finding(flag, NOTE, f"{text}; what the other files set is lost: {remedy}")


def _shown(value: str) -> str:
    """The text of a file on the line is a long one."""
    return "base64:..." if value.startswith("base64:") else value


def fate_of_unknown_flags(line: LaunchLine) -> str:
    """What the parser that reads the line does with a flag that it does not have."""
    if line.host == TRAIN:
        return "refused as an unknown argument"
    if not line.is_of_rollouts:
        remedy = "pass compose_extra_args_provider() of megatron_rl.hosts.megatron_lm to its pretrain"
        return "unknown to this script's parser" + ("" if line.takes_our_flags else f": {remedy}")
    end = "refused as an unknown argument" if _is_refused(line) else "dropped without a word"
    return f"{end} by the {'' if line.uses_our_launcher else 'stock '}launcher of {line.host}"


def _is_refused(line: LaunchLine) -> bool:
    return line.of_host is not None and line.is_of_rollouts and line.of_host.refuses_unknown_flags


# Whether the functions that a line names can be loaded, tried as the hosts do it


def resolve_paths(line: LaunchLine, route: Route | None) -> list[Finding]:
    """One finding for each function that the line or its file names; of a flag that is given twice the last counts. Where nothing
    of megatron_rl is on the line, a file that is here is read and not imported: an import takes up to a minute."""
    found, reads = [], route is None and not line.uses_our_launcher
    for flag, path in dict.fromkeys(named_functions(line)):
        found.append((_read_in_file(line, flag, path) if reads else None) or resolved(line, flag, path))
    return [*found, *misplaced(line)]


def _read_in_file(line: LaunchLine, flag: str, path: str) -> Finding | None:
    """None: no file of that module is here, or it cannot be parsed."""
    module, _, name = path.rpartition(".")
    is_read = DOTTED.fullmatch(path) and ":" not in path and not path.startswith("megatron_rl.")
    file = module_file(module, [*line.python_path, line.folder, *sys.path]) if is_read else None
    try:
        is_there = None if file is None else defines(syntax_tree(file), name)
    except (ConfigError, ValueError, RecursionError, MemoryError):
        return None
    if is_there is None:
        return None
    text = f"{path} is there: {file} was read, and not imported" if is_there else f"{path} cannot be loaded: {file} has no {name}"
    return Finding(flag, OK if is_there else PROBLEM, text)


def named_functions(line: LaunchLine) -> Iterator[tuple[str, str]]:
    given = dict(line.flags)
    for name, value in line.from_file.items():
        if isinstance(value, str) and "-" not in name:
            given[flag_of(name)] = (value,)
    for flag, values in given.items():
        if flag == "--spec" and len(values) == 2 and not any(map(is_unread, values)):
            yield flag, ".".join(values)
        elif flag != CONFIG_FILE and FUNCTION_FLAG.fullmatch(flag):
            yield from ((flag, value) for value in values if not is_unread(value))
        elif flag in OURS_BY_PATH and len(values) == 1 and DOTTED.fullmatch(values[0]) and not values[0].endswith(FILES):
            yield flag, values[0]


def misplaced(line: LaunchLine) -> Iterator[Finding]:
    """Functions of megatron_rl behind a flag that no host has, or that takes no function of megatron_rl."""
    for flag, values in line.flags:
        is_ours = values[:1] and re.match(r"megatron_rl\.(reducers|hooks)\b", values[0])
        if is_ours and flag != CONFIG_FILE and not is_hook_place(flag) and flag not in OURS_BY_PATH:
            places = get_close_matches(flag, map(flag_of, OUR_HOOKS), n=1) or map(flag_of, OUR_HOOKS)
            text = f"{values[0]} has no effect with this flag: did you mean {' or '.join(places)}?"
            yield Finding(flag, PROBLEM, text)


def resolved(line: LaunchLine, flag: str, path: str) -> Finding:
    """Ours is loaded in this process, another's in a separate one: the import of a user's module may do anything."""
    if not DOTTED.fullmatch(path):
        text = f"{path} is no module.function: a loader splits it on the last dot and imports what stands before"
        return Finding(flag, PROBLEM, text)
    problem, top = path_problem(path), re.split("[.:]", path)[0]
    if problem is not None:
        return Finding(flag, PROBLEM, problem)
    if ":" in path:
        return Finding(flag, NOTE, f"{path} loads; write {path.replace(':', '.')}, only our modules accept a colon")
    if top == "megatron_rl":
        return Finding(flag, OK, f"{path} loads")
    facts = look_up(path, [str(line.folder.resolve())])
    missing = str(facts.get("missing") or "").split(".")[0]
    if facts["state"] == "here":
        kind = facts["kind"]
        return Finding(flag, PROBLEM if kind else OK, f"{path} is {kind}, not a function" if kind else f"{path} loads")
    if missing and (missing != top or missing in {host.package for host in known_hosts()}):
        return Finding(flag, NOTE, f"{path} is not looked at: it imports {missing}, which is not installed here")
    if missing and line.is_composed:
        return Finding(flag, NOTE, f"{path} is not looked at: the script may put its folder on Python's path")
    if missing and line.script is not None and not line.has_script:
        return Finding(flag, NOTE, f"{path} is not looked at: {line.script} is not here, and no module {missing} either")
    where = f" from {line.folder}" if missing == top else ""
    return Finding(flag, PROBLEM, f"{path} cannot be loaded{where} ({facts['error']}); write module.function")
