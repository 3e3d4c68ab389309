"""Reads a launch line as far as it can be read without the host: script, flags, files, and what a parser would make of them. It
never judges what it reads.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from megatron_rl.arguments import add_megatron_rl_args, read_number, read_switch, read_whole_number
from megatron_rl.commands.doctor.composed import (
    composed_words,
    default_text,
    misspelt_settings,
    model_words,
    named_texts,
    only_defines,
    refused_values,
    settings_of_another,
    text_handed_on,
    text_handed_to_a_function,
    typed_by_environment,
    with_imported,
)
from megatron_rl.commands.doctor.script import LARGEST_SCRIPT, MODELS, ScriptLine, ScriptReader, called_script, is_unread
from megatron_rl.commands.doctor.shell_syntax import syntax_problem
from megatron_rl.errors import ConfigError
from megatron_rl.files.bounds import is_regular, read_regular
from megatron_rl.files.yaml_values import parse_yaml
from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES, ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import OPTIONS, Host, host_named, known_hosts, rollout_hosts
from megatron_rl.hosts.doors import DOORS, door_of
from megatron_rl.hosts.names import COMMON_NAMES, OUR_HOOKS, meant_flag, meant_function
from megatron_rl.hosts.programs import TRAINS_NOTHING
from megatron_rl.hosts.scripts import imported_packages, module_file
from megatron_rl.hosts.settings import Size
from megatron_rl.hosts.step_sizes import launched_processes
from megatron_rl.validation import field_of, flag_of, routes_of_flags
from megatron_rl.validation.auxiliary_losses import MODEL_SETTINGS
from megatron_rl.validation.dashes import require_hyphens
from megatron_rl.validation.experts import EXPERT_SETTINGS
from megatron_rl.validation.model_settings import FURTHER_SETTINGS

TRAIN = "train"
OUR_LAUNCHER = "megatron_rl.hosts.launch"
CONFIG_FILE = "--custom-config-path"
# Options of both hosts that hold a function; other options that end in -path hold a file.
FUNCTION_FLAG = re.compile(
    r"--(custom-[\w-]+-path|[\w-]+-(function|hook|filter|process|postprocess|picker|postprocessor)-path"
    r"|data-source-path|generate-tool-specs-path)"
)
# Other flags that a check reads, by how they begin: of a model, and of Megatron-LM's training.
OF_CHECKS = ("--mtp-", "--num-experts", "--dsa-", "--rl-", "--grpo-")
# What a Megatron-LM script calls to have our flags in its parser.
PROVIDERS = ("compose_extra_args_provider", "call_pretrain", "add_megatron_rl_args")
# How a Python script of miles starts a line that it has put together itself.
COMPOSING = "execute_train("
# What it puts before its own flags: those of the model, from a script of that name; and what its own command line adds to them.
MODEL, ADDED = "megatron_model_type", "--extra-args"
# What doctor then reads in the place of the line: which of them are on it is decided while the script runs.
STRINGS = "the strings of flags that the script assigns, but for those that its settings leave out"
REMEDY_OF_COMPOSED = (
    "give the line that it prints (EXEC: ...), from python3 on; an earlier log has one, and what is new goes to its end"
)
ONLY_DEFINES = "starts no training: it only defines functions; give the script that calls them"
TRAINING_SCRIPT = re.compile(r"(.*/)?[\w-]*train[\w-]*\.py")
# Words that may become several: an array, all arguments, a variable that is called after what it holds.
HIDES_FLAGS = re.compile(r"\$\{\w+\[[@*]\]\}|\$[@*]|\$\{?\w*(ARGS|FLAGS|OPTS|OPTIONS)\w*\}?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """host: the name of one, or train. flags: after the script, each time it is given, with its values. from_file: what
    --custom-config-path adds. takes_our_flags: the parser that reads them has ours. read_from: the shell script, where one names
    the line. unread: words that may hide flags. behind: the words after a lone `--`."""

    host: str
    script: Path | None
    flags: tuple[tuple[str, tuple[str, ...]], ...]
    from_file: dict[str, object]
    takes_our_flags: bool
    uses_our_launcher: bool
    num_ranks: Size | None  # what torchrun is told
    unread: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    read_from: ScriptLine | None = None
    stray: ScriptLine | None = None
    python_path: tuple[str, ...] = ()  # what the line itself puts on Python's path

    @property
    def of_host(self) -> Host | None:
        """None for a command of megatron_rl."""
        return None if self.host == TRAIN else host_named(self.host)

    @property
    def is_of_rollouts(self) -> bool:
        """Of a host that calls our reducer or our loss."""
        return self.of_host in rollout_hosts()

    @property
    def with_meant_functions(self) -> LaunchLine:
        """The line with misspelt paths of ours mended, so that no check tells what follows from the slip alone."""
        flags = tuple(
            (flag, tuple(meant_function(value) or value for value in values) if field_of(flag) in OUR_HOOKS else values)
            for flag, values in self.flags
        )
        of_file = {name: (name in OUR_HOOKS and meant_function(value)) or value for name, value in self.from_file.items()}
        return replace(self, flags=flags, from_file=of_file)

    def meant(self, flag: str) -> str | None:
        """Our flag that this one misspells. A user's script may have --epsilon for anything."""
        is_own_parser = self.of_host is not None and not self.is_of_rollouts
        return None if is_own_parser and flag in COMMON_NAMES else meant_flag(flag)

    @property
    def typed(self) -> dict[str, str]:
        """Settings of megatron_rl on the line itself, by flag, with their value as it was written."""
        return {flag: " ".join(values) for flag, values in self.flags if flag in routes_of_flags()}

    @property
    def filed(self) -> dict[str, str]:
        """Those of the file. A key with dashes is not of megatron_rl: the rules report it."""
        given = {flag_of(name): str(value) for name, value in self.from_file.items() if "-" not in name}
        return {flag: value for flag, value in given.items() if flag in routes_of_flags()}

    @property
    def ours(self) -> dict[str, str]:
        """What counts: the file wins, as it does in a host."""
        return self.typed | self.filed

    @property
    def unknown(self) -> list[str]:
        """Flags whose value only the shell knows that runs the line; of a flag that is given twice the last counts."""
        return sorted(flag for flag, values in dict(self.flags).items() if any(map(is_unread, values)))

    @property
    def unjudged(self) -> list[str]:
        """Those of them that a check reads. Our own command reads all of its flags."""
        if self.of_host is None:
            return self.unknown
        names = {*map(flag_of, (*OPTIONS, *MODEL_SETTINGS, *EXPERT_SETTINGS, *FURTHER_SETTINGS)), *self.of_host.sizes.names}
        names |= {CONFIG_FILE, *routes_of_flags()}
        return [one for one in self.unknown if one in names or one.startswith(OF_CHECKS) or FUNCTION_FLAG.fullmatch(one)]

    @property
    def unknown_of_host(self) -> list[str]:
        """Those that are not of megatron_rl."""
        return [flag for flag in self.unjudged if flag not in routes_of_flags()]

    @property
    def words(self) -> list[str]:
        """What the parser is given, without what is unknown here."""
        return [word for flag, values in self.known for word in (flag, *values)]

    @property
    def known(self) -> list[tuple[str, tuple[str, ...]]]:
        """The flags that are not unknown, without values that a later one replaces and only the shell knows."""
        return [(flag, values) for flag, values in self.flags if flag not in self.unknown and not any(map(is_unread, values))]

    @property
    def is_composed(self) -> bool:
        """Read from the strings of a Python script."""
        return self.read_from is not None and STRINGS in self.read_from.branches

    def lost_settings(self) -> list[str]:
        """Of a file of --custom-config-path that a later one replaces: what the last one does not set to the same value."""
        files = [values[0] for flag, values in self.flags if flag == CONFIG_FILE and values]
        lost = dict[str, object]()
        for given in (one for one in files[:-1] if not is_unread(one)):
            lost |= read_config_file(given, self.folder)
        return [name for name, value in lost.items() if self.from_file.get(name, self) != value]

    @property
    def has_script(self) -> bool:
        return self.script is not None and is_regular(self.script)

    @property
    def folder(self) -> Path:
        """What Python puts first on the path: the script's folder, or here for a module."""
        return Path.cwd() if self.script is None else self.script.parent


def read_line(words: Sequence[str], host: str | None, training: int | None = None) -> LaunchLine:
    """training: which one of a shell script, where it starts several. Raises ConfigError where no script or command of megatron_rl
    is found, and where nothing tells whose it is."""
    words, named, read_from, stray = through_shell_scripts(list(words), training)
    anchor = _anchor(words)
    before, after = words[:anchor], words[anchor + 1 :]
    modules = [module for option, module in pairwise(before) if option == "-m"]
    if wrong := next((name for name in modules if name.startswith("megatron_rl.") and name != OUR_LAUNCHER), None):
        raise ConfigError(f"python -m {wrong} starts no launcher: did you mean python -m {OUR_LAUNCHER}?")
    command = words[anchor]
    script = _script(command, named) if command.endswith(".py") else None
    if script is None and command != TRAIN:
        raise ConfigError(f"megatron-rl {command} trains nothing: give the line that starts the training after --")
    text = read_text(script, "the script") if script is not None and is_regular(script) else ""
    launcher = script
    if script is not None and COMPOSING in text:
        environment = {**os.environ, **dict(read_from.exported if read_from else ()), **assignments(before)}
        launcher, after, read_from = _composed(script, text, after, environment)
        require_hyphens(after)
        script = _script("train.py", script)
    given = after[: after.index("--")] if "--" in after else after
    flags = tuple(_flags(given))
    clues = [*words, *([str(named)] if named else [])]
    found = TRAIN if script is None else host or _host_of(launcher or script, clues, {field_of(flag) for flag, _ in flags})
    # A script of Megatron-LM has its own parser; one that is not here is taken to have our flags.
    is_unseen = script is not None and found not in (TRAIN, *ROLLOUT_HOST_NAMES) and not is_regular(script)
    files = [values[0] for flag, values in flags if flag == CONFIG_FILE and values]
    folder = script.parent if script else Path.cwd()
    return LaunchLine(
        host=found,
        script=script,
        flags=flags,
        from_file=read_config_file(files[-1], folder) if files and not is_unread(files[-1]) else {},
        takes_our_flags=script is None or OUR_LAUNCHER in before or is_unseen or any(name in text for name in PROVIDERS),
        uses_our_launcher=OUR_LAUNCHER in before,
        num_ranks=launched_processes(before),
        unread=tuple(word for word in given if HIDES_FLAGS.fullmatch(word)),
        behind=tuple(after[len(given) + 1 :]),
        read_from=read_from,
        stray=stray,
        python_path=tuple(_python_path([*before, f"PYTHONPATH={read_from.python_path}"] if read_from else before)),
    )


def assignments(words: Iterable[str]) -> dict[str, str]:
    """NAME=value before a program, as a shell or env takes it."""
    return dict(word.split("=", 1) for word in words if re.match(r"[A-Za-z_]\w*=", word))


def _composed(script: Path, text: str, typed: Sequence[str], environment: Mapping[str, str]) -> tuple[Path, list[str], ScriptLine]:
    """The words that a Python script puts together, from its strings, and what is typed after it; and the script whose strings they
    are. environment: the script's. Raises ConfigError where only the real line has them."""
    try:
        folders = [Path(), *script.resolve().parents]
        tree = with_imported(ast.parse(text), folders)
        if only_defines(tree):
            raise ConfigError(f"{script} {ONLY_DEFINES}")
        typed = [*typed_by_environment(tree, typed, environment), *typed]
        own = composed_words(tree, typed, environment)
        if own or (other := _of_another(script, tree, environment)) is None:
            return script, *_with_added(script, text, tree, typed, own, environment)
        launcher, text, typed = other
        tree = with_imported(ast.parse(text), folders)
        words, line = _with_added(launcher, text, tree, typed, composed_words(tree, typed, environment), environment)
        return launcher, words, replace(line, called=str(launcher))
    except RecursionError as error:
        raise ConfigError(f"{script} is nested too deeply to be read: {REMEDY_OF_COMPOSED}") from error


def _of_another(script: Path, tree: ast.Module, environment: Mapping[str, str]) -> tuple[Path, str, list[str]] | None:
    """(script, text, typed) of the one whose settings this script fills in and whose functions it calls."""
    for module, typed in settings_of_another(tree, environment):
        file = module_file(module, [Path(), *script.resolve().parents])
        text = "" if file is None else read_text(file, "the script")
        if file is not None and COMPOSING in text and file.resolve() != script.resolve():
            return file, text, typed
    return None


def _with_added(
    script: Path, text: str, tree: ast.Module, typed: Sequence[str], own: list[str], environment: Mapping[str, str]
) -> tuple[list[str], ScriptLine]:
    added = [value for flag, value in pairwise(typed) if flag == ADDED]  # a value may begin with --
    added += [word.partition("=")[2] for word in typed if word.startswith(f"{ADDED}=")]
    if added or named_texts(tree, field_of(ADDED)) == {""}:
        own = [word for word in own if word != f"${{{field_of(ADDED)}}}"]
    model, of_model = _of_model(script, tree, typed, environment)
    words = [*of_model, *own, *(added[-1].split() if added else [])]
    if not own:
        raise ConfigError(f"{script} puts its launch line together while it runs: {REMEDY_OF_COMPOSED}")
    number = next(at for at, line in enumerate(text.splitlines(), 1) if COMPOSING in line)
    slips = [*misspelt_settings(tree, typed, ADDED), *refused_values(tree, typed, ADDED)]
    branches = (STRINGS, *([f"the flags of the model {model}"] if model else []))
    return words, ScriptLine(tuple(words), number, branches, slips=tuple(slips))


def _of_model(script: Path, tree: ast.Module, typed: Sequence[str], environment: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """(the one model that a Python script names, or its default of several; its flags, from the strings of that model's script)."""
    names = named_texts(tree, MODEL)
    if names == set():
        return None, []
    asked = [value for flag, value in pairwise(typed) if flag == flag_of(MODEL)]
    asked += [word.partition("=")[2] for word in typed if word.startswith(f"{flag_of(MODEL)}=")]
    own = min(names) if names and len(names) == 1 else text_handed_on(tree, MODEL, typed, environment) or default_text(tree, MODEL)
    name = asked[-1] if asked else own
    folders = [folder / place for folder in script.resolve().parents for place in (MODELS.name, MODELS)]
    if name is None and (of_function := text_handed_to_a_function(tree, MODEL, typed, environment)) is not None:
        # A model by its public name: Qwen3-4B, of which the script is qwen3-4B.
        files = (path.stem for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.py")))
        name = next((stem for stem in files if stem.lower() == of_function.lower()), None)
    found = (model_words(folder, name) for folder in folders) if name else iter(())
    words = next((words for words in found if words is not None), None)
    return (None, [f"${{{MODEL.upper()}_ARGS}}"]) if words is None else (name, words)


def read_text(path: Path, what: str) -> str:
    """ConfigError where it cannot be read, or is larger than a file that a person writes."""
    try:
        return read_regular(path, LARGEST_SCRIPT).decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error


def _python_path(words: Sequence[str]) -> Iterator[str]:
    """Folders that are here, from PYTHONPATH=... before the script or in what Ray is told."""
    given = [word.removeprefix("PYTHONPATH=") for word in words if word.startswith("PYTHONPATH=")]
    for flag, values in _flags(words):
        if flag == "--runtime-env-json" and values:
            try:
                given.append(str(json.loads(values[0])["env_vars"]["PYTHONPATH"]))
            except (ValueError, KeyError, TypeError):  # what it holds is Ray's to judge
                continue
    yield from (folder for path in given for folder in path.split(":") if folder and Path(folder).is_dir())


def through_shell_scripts(
    words: list[str], training: int | None = None
) -> tuple[list[str], Path | None, ScriptLine | None, ScriptLine | None]:
    """The line itself, or the one that a shell script in it starts the training with: (words, script, line, stray flags).
    training: which one, of several."""
    found = _through_shell_scripts(words, training)
    require_hyphens(found[0])
    return found


def _through_shell_scripts(
    words: list[str], training: int | None
) -> tuple[list[str], Path | None, ScriptLine | None, ScriptLine | None]:
    place = next((index for index, word in enumerate(words) if word.endswith((".sh", ".bash", ".py"))), None)
    if len(words) == 1 and re.search(r"\s", words[0]):  # a whole line in quotes, as launchers print it
        reader = ScriptReader(Path())
        reader.may_be_anything = True  # whatever script it is from has set more
        try:
            lines = list(reader.lines_of_text(words[0]))
            return list(training_line(lines, "the line after --", training)[0].words), None, None, None
        except RecursionError as error:
            raise ConfigError("the line after -- is nested too deeply to be read") from error
    if place is None or words[place].endswith(".py"):
        return words, None, None, None
    script = Path(words[place])
    if not is_regular(script):
        raise ConfigError(f"{script} is no file in {Path.cwd()}: start from the folder that the launch starts from")
    unreadable = syntax_problem(script, LARGEST_SCRIPT)
    try:
        lines = list(ScriptReader(script, words[place + 1 :], assignments(words[:place])).lines())
        line, stray = training_line(lines, str(script), training)
    except RecursionError as error:
        raise ConfigError(f"{script} is nested too deeply to be read: give the words that start the training after --") from error
    except SeveralTrainings:
        raise
    except ConfigError as error:
        if unreadable is None:
            raise
        raise ConfigError(f"{script}: {unreadable}") from error
    return list(line.words), script, line if unreadable is None else replace(line, slips=(unreadable, *line.slips)), stray


class SeveralTrainings(ConfigError):
    """number: of the trainings that a script starts, for `training`."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


def training_line(lines: Sequence[ScriptLine], name: str, training: int | None = None) -> tuple[ScriptLine, ScriptLine | None]:
    """The line of a script that starts a training, and the flags after it that a missing backslash has cut off. training: which of
    several. Raises SeveralTrainings where that is not said."""
    places = [index for index, line in enumerate(lines) if _trains(line.words) and not line.called]
    # What a script calls counts where it starts none itself; a script of one's own may say whose it is by what it imports.
    places = places or [index for index, line in enumerate(lines) if _trains(line.words)]
    places = places or [index for index, line in enumerate(lines) if door_of(line.words) is not None]
    if len(places) > 1:  # an evaluation behind the training, say
        places = [index for index in places if not _trains_nothing(lines[index].words)] or places
    if not places:
        others = sorted({Path(word).name for line in lines for word in line.words if word.endswith((".py", ".sh"))})
        others += sorted({f"-m {word}" for line in lines for flag, word in pairwise(line.words) if flag == "-m"})
        runs = f", it runs {', '.join(others)}" if others else ""
        scripts = [line.words for line in lines if called_script(line.words) is not None]
        remedy = (
            f"give the script that does, as in -- {' '.join(scripts[0][:2])}" if scripts else "give the line that does, after --"
        )
        raise ConfigError(f"{name} starts no training that can be seen here{runs}: {remedy}")
    if len(places) > 1 and training is None:
        numbers = " and ".join(str(lines[index].line) for index in places)
        raise SeveralTrainings(f"{name} starts a training on the lines {numbers}: give one of them after --", len(places))
    place = places[training or 0]
    behind = lines[place + 1 : place + 2]
    return lines[place], next((line for line in behind if re.match(r"-|[+~]{0,2}\w+\.[\w.]+=", line.words[0])), None)


def _trains(words: Sequence[str]) -> bool:
    is_ours = (
        OUR_LAUNCHER in words
        or door_of(words, by_imports=False) is not None
        or any(a.endswith(("megatron_rl", "megatron-rl")) and b == TRAIN for a, b in pairwise(words))
    )
    return is_ours or any(TRAINING_SCRIPT.fullmatch(word) for word in words)


def _trains_nothing(words: Sequence[str]) -> bool:
    door = door_of(words, by_imports=False)
    program = None if door is None else door.programs.named(words)
    return program is not None and program.why == TRAINS_NOTHING


def _script(command: str, shell_script: Path | None) -> Path:
    """Where it is from here; a shell script may name one in a folder above itself."""
    script = Path(command)
    if shell_script is not None and not script.is_absolute() and not is_regular(script):
        return next((folder / script for folder in shell_script.resolve().parents if is_regular(folder / script)), script)
    return script


def _anchor(words: list[str]) -> int:
    """The place of the script in the words, or of the command of megatron_rl."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index
        is_ours = word == "megatron_rl" and words[index - 1 : index] == ["-m"] or Path(word).name == "megatron-rl"
        if is_ours and index + 1 < len(words):
            return index + 1
    starts = [door.starts for door in DOORS.values()]
    for word in words:
        if close := get_close_matches(word, starts, 1, cutoff=0.85):
            raise ConfigError(f"{word} starts no training that is known here: did you mean {close[0]}?")
    raise ConfigError(
        "no train script and no megatron-rl command after --: give the launch line as it is typed, as in megatron-rl doctor -- "
        "python -m megatron_rl.hosts.launch train.py ... or megatron-rl doctor -- bash run.sh"
    )


def _flags(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A flag's values are the words up to the next flag, or to one that may hide flags; -1 is a value."""
    starts = [index for index, word in enumerate(words) if word.startswith("--") or HIDES_FLAGS.fullmatch(word)]
    for start, end in pairwise([*starts, len(words)]):
        flag, has_value, value = words[start].partition("=")
        if flag.startswith("--"):
            yield flag, ((value,) if has_value else ()) + tuple(words[start + 1 : end])


def _host_of(script: Path, clues: Sequence[str], names: set[str]) -> str:
    """From the script's imports, a host's name in a word of the line, or flags that it alone has."""
    tree = None
    if is_regular(script):
        try:
            tree = ast.parse(read_text(script, "the script"))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of a NUL, and of deep nesting
            raise ConfigError(f"{script} is no Python script: {error}") from error
    imported = set() if tree is None else imported_packages(tree)
    for host in rollout_hosts():
        if host.package in imported:
            return host.name
    for host in rollout_hosts():
        if any(re.search(rf"(^|[/.]){host.package}([/.]|$)", word) for word in clues):
            return host.name
    for host in known_hosts():
        has_name = bool(host.script_name and re.search(host.script_name, script.name))
        if names & set(host.own_options) or host.package in imported or has_name:
            return host.name
    if tree is not None and only_defines(tree):
        raise ConfigError(f"{script} {ONLY_DEFINES}")
    remedy = f"add --host {{{','.join((*HOST_NAMES, *DOOR_NAMES))}}} before --"
    if not is_regular(script):
        remedy = f"{script.name} is not here; start doctor from the checkout that has it, or {remedy}"
    raise ConfigError(f"nothing on the line tells whose script this is: {remedy}")


def host_arguments(line: LaunchLine) -> Namespace:
    """The line with the file of --custom-config-path over it. A word that is a number, true or false is one.

    Flags of megatron_rl that this parser does not have are left out, as the parser does. What is not known here is left out too.
    Raises ConfigError for a value that our parser refuses.
    """
    values: dict[str, object] = {} if line.of_host is None else dict(line.of_host.parser_defaults)
    for flag, given in line.known:
        name = field_of(flag)
        if flag in routes_of_flags() or line.meant(flag) is not None:
            continue
        turned_off = re.fullmatch(r"(disable|no)_(\w+)", name)
        if turned_off and turned_off[2] in OPTIONS and not given:
            values[turned_off[2]] = False
        else:
            value = read_switch(read_whole_number(given[0])) if len(given) == 1 else list(given) or True
            values[name] = read_number(value) if isinstance(value, str) else value
    if line.takes_our_flags:
        parser = add_megatron_rl_args(Parser(add_help=False, allow_abbrev=False), line.words)
        try:
            values |= vars(parser.parse_known_args(line.words)[0])
        except ConfigError as error:  # a slip of the script's may be why
            raise ConfigError([*(line.read_from.slips if line.read_from else ()), *error.problems]) from error
    if line.is_of_rollouts and line.of_host is not None:
        typed, is_whole = {field_of(flag) for flag, _ in line.known}, not (line.unread or line.unknown)
        values |= line.of_host.filled_in({name: value for name, value in values.items() if is_whole or name in typed})
    return Namespace(**values | line.from_file)


class Parser(ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str):
        raise ConfigError(message)


def read_config_file(given: str, folder: Path) -> dict[str, object]:
    """Its keys; a host merges them over the command line. Raises ConfigError for what is no file of keys."""
    if given.startswith("base64:"):
        try:
            text = base64.b64decode(given.removeprefix("base64:")).decode("utf-8")
        except ValueError as error:  # of base64 and of UTF-8
            raise ConfigError(f"{CONFIG_FILE} base64:... cannot be decoded: {error}") from error
    elif path := next((path for path in (Path(given), folder / given) if is_regular(path)), None):
        text = read_text(path, CONFIG_FILE)
    else:
        raise ConfigError(f"{CONFIG_FILE} {given[:200]} is no file here: start from the folder that the launch starts from")
    return read_yaml(text, f"{CONFIG_FILE} {given[:200]}")


def read_yaml(text: str, name: object) -> dict[str, object]:
    """The keys of a file of settings. Raises ConfigError."""
    loaded = parse_yaml(text, name) or {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{name} holds {type(loaded).__name__}: it must be key: value lines")
    return {str(key): value for key, value in loaded.items()}
