"""Reads a launch line as far as it can be read without the host: script, flags, paths. It never judges what it reads."""

from __future__ import annotations

import ast
import base64
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from megatron_rl.arguments import add_megatron_rl_args, read_number, read_switch, read_whole_number
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.facts import MILES_ONLY, OPTIONS, Host
from megatron_rl.hosts.launch import imported_packages
from megatron_rl.validation import ROUTES_OF_FLAG, field_of, flag_of

TRAIN = "train"
HOSTS = tuple(str(host) for host in Host)
OUR_LAUNCHER = "megatron_rl.hosts.launch"
CONFIG_FILE = "--custom-config-path"
# What the parsers of both hosts fill in, where our rules look at it.
HOST_DEFAULTS = {"advantage_estimator": "grpo", "eps_clip": 0.2, "kl_loss_type": "k1", "n_samples_per_prompt": 1}
# What a Megatron-LM script calls to have our flags in its parser.
PROVIDERS = ("compose_extra_args_provider", "call_pretrain", "add_megatron_rl_args")
OF_TRAIN_RL = ("perform_rl_step", "grpo_group_size", "grpo_prompts_per_step")
OF_ROLLOUT_HOSTS = ("rollout_batch_size", "rollout_function_path", "n_samples_per_prompt", "custom_pg_loss_reducer_function_path")
PATH_FLAG = re.compile(r"--(custom-[\w-]+-path|[\w-]+-(function|hook)-path)")
# A file has a slash; a function has a dot, or the colon that no host's loader understands.
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
OURS_BY_PATH = ("--policy-loss", "--loss-aggregation", "--reward", "--task")


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """host: one of HOSTS, or train. flags: after the script, with their values. from_file: what --custom-config-path adds.
    takes_our_flags: the parser that reads them has ours."""

    host: str
    script: Path | None
    flags: tuple[tuple[str, tuple[str, ...]], ...]
    words: tuple[str, ...]  # after the script
    from_file: dict[str, object]
    takes_our_flags: bool
    uses_our_launcher: bool
    num_ranks: int | None  # what torchrun is told

    @property
    def ours(self) -> dict[str, str]:
        """Settings of ours, by flag, with their value as it was written; what the file says wins, as it does in a host."""
        typed = {flag: " ".join(values) for flag, values in self.flags if flag in ROUTES_OF_FLAG}
        return typed | {flag_of(name): str(value) for name, value in self.from_file.items() if flag_of(name) in ROUTES_OF_FLAG}

    @property
    def has_script(self) -> bool:
        return self.script is not None and self.script.is_file()

    @property
    def folder(self) -> Path:
        """What Python puts first on the path: the script's folder, or here for a module."""
        return Path.cwd() if self.script is None else self.script.parent

    def dotted_paths(self) -> Iterator[tuple[str, str]]:
        """(flag, path) of each function that the line names; a name without a dot is registered, not imported."""
        for flag, values in self.flags:
            value = values[0] if len(values) == 1 else ""
            is_path = flag != CONFIG_FILE and (PATH_FLAG.fullmatch(flag) or flag in OURS_BY_PATH)
            if is_path and DOTTED.fullmatch(value) and not value.endswith((".py", ".yaml", ".yml", ".json", ".jsonl")):
                yield flag, value


def read_line(words: Sequence[str], host: str | None) -> LaunchLine:
    """Raises ConfigError where no script or command of ours is found, and where nothing tells whose it is."""
    words = list(words)
    anchor = _anchor(words)
    before, after = words[:anchor], words[anchor + 1 :]
    command = words[anchor]
    script = Path(command) if command.endswith(".py") else None
    if script is None and command != TRAIN:
        raise ConfigError(f"megatron-rl {command} trains nothing: give the line that starts the training after --")
    flags = tuple(_flags(after))
    found = TRAIN if script is None else host or _host_of(script, words, {field_of(flag) for flag, _ in flags})
    # A script of Megatron-LM has a parser of its own; one that is not here is taken to have our flags.
    is_unseen = script is not None and found == Host.MEGATRON_LM and not script.is_file()
    files = [given[0] for flag, given in flags if flag == CONFIG_FILE and given]
    folder = Path.cwd() if script is None else script.parent
    return LaunchLine(
        host=found,
        script=script,
        flags=flags,
        words=tuple(after),
        from_file=read_config_file(files[-1], folder) if files else {},
        takes_our_flags=script is None or OUR_LAUNCHER in before or is_unseen or _adds_our_flags(script),
        uses_our_launcher=OUR_LAUNCHER in before,
        num_ranks=_num_ranks(before),
    )


def host_arguments(line: LaunchLine) -> Namespace:
    """What the host's parser makes of the line, and of the file of --custom-config-path, as far as our rules look at it.

    Flags of ours that this parser does not have are left out, as it leaves them out. Raises ConfigError for a value that our
    parser refuses and for a file that cannot be read.
    """
    values: dict[str, object] = {}
    if line.host in (Host.MILES, Host.SLIME):
        values = {"rollout_batch_size": None, **HOST_DEFAULTS}
    if line.host == Host.MILES:
        values |= dict.fromkeys(MILES_ONLY, False)
    for flag, given in line.flags:
        name = field_of(flag)
        if flag in ROUTES_OF_FLAG:
            continue
        turned_off = re.fullmatch(r"(disable|no)_(\w+)", name)
        if turned_off and turned_off[2] in OPTIONS and not given:
            values[turned_off[2]] = False
        else:
            values[name] = _typed(given)
    if line.takes_our_flags:
        values |= vars(our_arguments(line.words))
    return Namespace(**values | line.from_file)


def our_arguments(words: Sequence[str]) -> Namespace:
    return add_megatron_rl_args(Parser(add_help=False, allow_abbrev=False)).parse_known_args(list(words))[0]


class Parser(ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str):
        raise ConfigError(message)


def read_config_file(given: str, folder: Path) -> dict[str, object]:
    """Its keys; a host merges them over the command line."""
    if given.startswith("base64:"):
        text = base64.b64decode(given.removeprefix("base64:")).decode("utf-8")
    else:
        path = next((path for path in (Path(given), folder / given) if path.is_file()), None)
        if path is None:
            raise ConfigError(f"{CONFIG_FILE} {given} is no file here: start from the folder that the launch starts from")
        text = path.read_text(encoding="utf-8")
    if find_spec("yaml") is not None:
        import yaml

        loaded = yaml.safe_load(text)
        if not isinstance(loaded, dict):
            raise ConfigError(f"{CONFIG_FILE} {given} holds {type(loaded).__name__}: it must be key: value lines")
        return loaded
    # What launch-config writes: one `key: value` a line.
    pairs = [line.partition(":") for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return {key.strip(): _typed([value.strip().strip("\"'")]) for key, _, value in pairs}


def _anchor(words: list[str]) -> int:
    """Where the script stands, or the command of ours."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index
        is_ours = word == "megatron_rl" and words[index - 1 : index] == ["-m"] or Path(word).name == "megatron-rl"
        if is_ours and index + 1 < len(words):
            return index + 1
    raise ConfigError(
        "no train script and no megatron-rl command after --: give the launch line as it is typed, as in megatron-rl doctor -- "
        "python -m megatron_rl.hosts.launch train.py ..."
    )


def _flags(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A flag's values are the words up to the next flag; -1 is a value."""
    starts = [index for index, word in enumerate(words) if word.startswith("--") and len(word) > 2]
    for start, end in pairwise([*starts, len(words)]):
        flag, has_value, value = words[start].partition("=")
        yield flag, ((value,) if has_value else ()) + tuple(words[start + 1 : end])


def _host_of(script: Path, words: Sequence[str], names: set[str]) -> str:
    """From the script's imports, a host's name in a word of the line, or flags that it alone has."""
    imported: set[str] = set()
    if script.is_file():
        try:
            imported = imported_packages(ast.parse(script.read_bytes()))
        except SyntaxError as error:
            raise ConfigError(f"{script} is no Python script: {error}") from error
    for host in (Host.MILES, Host.SLIME):
        if host in imported or any(re.search(rf"(^|[/.]){host}([/.]|$)", word) for word in words):
            return host
    if names & set(MILES_ONLY):
        return Host.MILES
    if names & set(OF_TRAIN_RL) or "megatron" in imported or re.search(r"train_rl|pretrain", script.name):
        return Host.MEGATRON_LM
    which = "miles or slime" if names & set(OF_ROLLOUT_HOSTS) else "whose script this is"
    raise ConfigError(f"nothing on the line tells {which}: add --host {{{','.join(Host)}}} before --")


def _adds_our_flags(script: Path) -> bool:
    return script.is_file() and any(name in script.read_text(encoding="utf-8", errors="replace") for name in PROVIDERS)


def _num_ranks(words: Sequence[str]) -> int | None:
    """torchrun's --nproc-per-node times --nnodes, where both are numbers."""
    product = None
    for flag, values in _flags(words):
        if flag.replace("_", "-") in ("--nproc-per-node", "--nnodes") and values and values[0].isdigit():
            product = int(values[0]) * (product or 1)
    return product


def _typed(given: Sequence[str]) -> object:
    """A number, true or false where a word is one; a flag without a word is a switch; several words stay words."""
    if not given:
        return True
    if len(given) > 1:
        return list(given)
    value = read_switch(read_whole_number(given[0]))
    return read_number(value) if isinstance(value, str) else value
