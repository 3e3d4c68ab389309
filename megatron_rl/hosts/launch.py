"""`python -m megatron_rl.hosts.launch train.py ...` runs a host's own train script with our flags in the host's parser.

The script's call of parse_args gets add_custom_arguments, which miles and slime have for this, and the result is checked before
the script goes on. No file of a host is changed, and the host's parser reads all flags.
"""

from __future__ import annotations

import functools
import inspect
import runpy
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl, nemo_rl_plugin
from megatron_rl.hosts.actor_checks import is_check
from megatron_rl.hosts.base import Host, rollout_hosts
from megatron_rl.hosts.checks import check_launch, host_warnings
from megatron_rl.hosts.megatron_lm import compose_extra_args_provider
from megatron_rl.hosts.scripts import imported_packages, syntax_tree
from megatron_rl.validation import routes_of_flags
from megatron_rl.validation.checks import Asker
from megatron_rl.validation.dashes import require_hyphens
from megatron_rl.validation.repeated import flags_with_values, repeated

EXIT_CONFIG = 2
PROGRAM = "python -m megatron_rl.hosts.launch"
DESCRIPTION = """\
Runs a train script of miles or slime with the flags below beside the host's own.

    python -m megatron_rl.hosts.launch train.py [the host's flags] [our flags]

For NeMo-RL the script is examples/run_grpo.py, and ++loss_fn.megatron_rl=<loss>.<aggregation> is the setting; none of the flags.

The script, its working directory and its other arguments stay as they are; `train.py --help` after it shows the host's flags.
Settings that would train on a wrong scale end the run before a GPU is taken. MEGATRON_RL_CHECK=1 in the environment prints what
`megatron-rl doctor` says of this command line instead, and ends with its exit code before the host is loaded.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 the script ended, 2 wrong settings; the script's own exit code and exceptions pass through. With
    MEGATRON_RL_CHECK the exit code is doctor's."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["-h"], ["--help"]):
        # For its help only: the host parses what follows the script.
        usage = f"{PROGRAM} SCRIPT ..."
        parser = ArgumentParser(PROGRAM, usage=usage, description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
        add_megatron_rl_args(parser).print_help()
        return 0
    try:
        require_hyphens(arguments)
        script = script_of(arguments)
        trains_nemo_rl = nemo_rl.is_script_of_ours(script)
        hosts = [] if trains_nemo_rl else hosts_of(script)
    except ConfigError as error:
        return _refuse(error)
    if is_check():
        return report("megatron_rl.hosts.launch", arguments, hosts)
    if trains_nemo_rl:
        return run(script, arguments[1:], functools.partial(nemo_rl_plugin.loss_in_setup, _refuse), f"{nemo_rl.TRAINER}.setup")
    for flag, text in repeated(flags_with_values(arguments[1:]), lambda flag: flag in routes_of_flags()):
        print(f"megatron_rl: {flag} {text}", file=sys.stderr, flush=True)
    paths = " nor ".join(f"{host.parser_module}.parse_args" for host in hosts)
    return run(script, arguments[1:], functools.partial(flags_in_parsers, hosts), paths)


def run(script: Path, arguments: Sequence[str], door: Callable[[list[str]], AbstractContextManager[None]], paths: str) -> int:
    """The script inside the door, which notes calls of the host's functions at `paths`. Returns the exit code."""
    calls: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(as_main_program(script, arguments))
        try:
            stack.enter_context(door(calls))
        except ConfigError as error:
            return _refuse(error)
        runpy.run_path(str(script), run_name="__main__")
    if not calls:
        return _refuse(ConfigError(f"{script} has not called {paths}: our flags had no effect; start the host's own train script"))
    return 0


def report(module: str, arguments: Sequence[str], hosts: Sequence[Host] = ()) -> int:
    """What `megatron-rl doctor` says of `python -m module arguments`, in a process of its own; returns its exit code."""
    host = ["--host", hosts[0].name] if len(hosts) == 1 else []
    line = ["python", "-m", module, *arguments]
    return subprocess.call([sys.executable, "-m", "megatron_rl", "doctor", "--launch-only", *host, "--", *line])


def script_of(arguments: Sequence[str]) -> Path:
    if not arguments or arguments[0].startswith("-"):
        given = f"{arguments[0]} is" if arguments else "nothing is"
        raise ConfigError(f"{given} where the train script belongs: {PROGRAM} train.py, and all flags after it; --help lists ours")
    script = Path(arguments[0])
    if not script.is_file():
        raise ConfigError(
            f"{script} is no file in {Path.cwd()}: run from the checkout of miles or slime, or give the script's path"
        )
    return script


def hosts_of(script: Path) -> list[Host]:
    """The hosts that the script imports, else every host that can be imported. Raises ConfigError when there is none."""
    with first_on_path(script.parent):
        hosts = [host for host in rollout_hosts() if host.parser_module is not None]
        importable = [host for host in hosts if _is_package(host.package)]
    packages = imported_packages(syntax_tree(script))
    named = [host for host in hosts if host.package in packages]
    missing = [host for host in named if host not in importable]
    if missing:
        raise ConfigError(
            f"{script} imports {missing[0].package}, which cannot be imported here: run from its checkout, or install it (pip "
            "install -e)"
        )
    if not importable:
        raise ConfigError(
            f"neither {' nor '.join(host.package for host in hosts)} can be imported beside {script}: run from the host's "
            "checkout, or install it; Megatron-LM needs no launcher, see megatron_rl.hosts.megatron_lm.compose_extra_args_provider"
        )
    return named or importable


@contextmanager
def flags_in_parsers(hosts: Sequence[Host], calls: list[str]) -> Iterator[None]:
    """parse_args of these hosts carries our flags; each call is noted in `calls`. Undone at the end."""
    originals: list[tuple[Any, Callable]] = []
    try:
        for host in hosts:
            if host.parser_module is None:
                continue
            module: Any = import_module(host.parser_module)
            originals.append((module, module.parse_args))
            module.parse_args = with_our_flags(module.parse_args, functools.partial(calls.append, host.name))
        yield
    finally:
        for module, parse_args in originals:
            module.parse_args = parse_args


def with_our_flags(parse_args: Callable, on_call: Callable[[], None] = lambda: None) -> Callable:
    """The host's parse_args with our flags beside the custom arguments that the script adds itself.

    Where the launch has problems, the process ends with code 2, and each problem is on standard error.
    """
    signature = inspect.signature(parse_args)
    if "add_custom_arguments" not in signature.parameters:
        raise ConfigError(
            f"{parse_args.__module__}.parse_args{signature} takes no add_custom_arguments: this version of the host cannot carry "
            "flags; use megatron-rl launch-config and --custom-config-path"
        )

    @functools.wraps(parse_args)
    def parse(*positional, **named):
        on_call()
        bound = signature.bind(*positional, **named)
        given = bound.arguments.get("add_custom_arguments")
        bound.arguments["add_custom_arguments"] = compose_extra_args_provider(given)
        args = parse_args(*bound.args, **bound.kwargs)
        try:
            _, launch = check_launch(args, asker=Asker.LAUNCHER)
        except ConfigError as error:
            sys.exit(_refuse(error))
        for warning in host_warnings(launch, Asker.LAUNCHER):
            print(f"megatron_rl: {warning}", file=sys.stderr, flush=True)
        return args

    return parse


@contextmanager
def as_main_program(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """sys.argv and sys.path as `python script arguments` sets them."""
    given = sys.argv
    sys.argv = [str(script), *arguments]
    try:
        with first_on_path(script.parent):
            yield
    finally:
        sys.argv = given


@contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _is_package(name: str) -> bool:
    """A namespace package has no origin: it is a mere folder of that name, as in a checkout."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _refuse(error: ConfigError) -> int:
    print(f"{PROGRAM}: ConfigError: {error}", file=sys.stderr, flush=True)
    return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
