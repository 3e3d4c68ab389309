"""Runs a command of the command line, and reports errors without a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType

from megatron_rl import __version__
from megatron_rl.commands.start_signals import StartSignals
from megatron_rl.commands.unknown_flags import problems_of_unknown
from megatron_rl.errors import ConfigError, DataError, RunError, printable

COMMANDS = {
    "train": "Train a Megatron-Core model on a task, a prompt file or recorded rollouts.",
    "explain": "Show the weight of each token of a step, and each factor between that weight and its gradient.",
    "doctor": "Say what works on this machine, and whether a launch line passes its trainer's parser and our check at start.",
    "selftest": "Run one tiny step on these ranks for every loss, aggregation, head and backend, against a float64 reference.",
    "launch-config": "Write the settings for --custom-config-path, and say which lines a stock miles or slime launcher needs.",
}
# torchrun ends the other ranks when rank 0 is gone. A rank that lives longer has an error that rank 0 did not have, and prints it.
SECONDS_FOR_RANK_0 = 5.0
# argparse's own code for a wrong command line.
EXIT_CONFIG, EXIT_DATA = 2, 1
# A closed pipe of these may be another process's, whose end is an error.
TALKS_TO_PROCESSES = (["train"], ["selftest"], ["doctor"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. 0: done. 1: bad data, a run that cannot go on, or something that explain, doctor or selftest finds
    wrong. 2: wrong settings. 128 + n: signal n, SIGPIPE where the reader of the output has ended, as `head` does."""
    if arguments is None:
        arguments = sys.argv[1:]
        if not sys.flags.safe_path:
            sys.path.append("")  # a module of one's own in the current directory, as with python -m, behind what is installed
        if arguments[:1] not in TALKS_TO_PROCESSES:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return run_command(list(arguments))


def run_command(arguments: list[str]) -> int:
    is_training = arguments[:1] == ["train"]
    parser = ArgumentParser("megatron-rl", description="The policy-gradient loss layer for Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megatron-rl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    try:
        if is_training:
            reader = ArgumentParser("megatron-rl train", add_help=False, fromfile_prefix_chars="@")
            arguments = reader.parse_known_args(arguments)[1]  # with the lines of @FILE in its place
        with StartSignals("train") if is_training else contextlib.nullcontext():
            for name, line in COMMANDS.items():
                command = commands.add_parser(name, help=line, description=line, allow_abbrev=False)
                if arguments[:1] == [name]:  # the imports of the other commands are not needed
                    with says_that_torch_is_missing(name):
                        command_module(name).add_arguments(command, arguments[1:])
            args, unknown = parser.parse_known_args(arguments)
            if unknown:
                raise ConfigError([*problems_of_unknown(unknown, args.command, commands.choices[args.command])])
            with says_that_torch_is_missing(args.command):
                return run_module(command_module(args.command), args)
    except (ConfigError, DataError, RunError) as error:
        # All ranks meet a wrong setting, so one of them prints it. Bad data may be on one rank alone.
        if isinstance(error, ConfigError) and os.environ.get("RANK", "0") != "0":
            time.sleep(SECONDS_FOR_RANK_0)
        if isinstance(error, ConfigError):  # a problem is a line, whatever a file has put into it
            error = ConfigError([printable(problem) for problem in error.problems])
        text = "\n".join(printable(line) for line in str(error).split("\n"))
        print(f"megatron-rl {arguments[0]}: {type(error).__name__}: {text}", file=sys.stderr, flush=True)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_DATA


def run_module(module: ModuleType, args: Namespace) -> int:
    """Commands return their exit code. Only a user's code calls sys.exit inside them, and its code 0 would report success."""
    try:
        return module.run(args)
    except SystemExit as error:
        if error.code in (None, 0):
            raise RunError("code that the command ran called sys.exit: the command did not finish") from error
        raise


def command_module(name: str) -> ModuleType:
    return import_module(f"megatron_rl.commands.{name.replace('-', '_')}")


@contextlib.contextmanager
def says_that_torch_is_missing(name: str) -> Iterator[None]:
    """Raises ConfigError where torch cannot be imported. Only doctor works without torch."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            f"{name} needs torch, which {sys.executable} cannot import: install one for your CUDA; "
            "`megatron-rl doctor` says what else is missing"
        ) from error
