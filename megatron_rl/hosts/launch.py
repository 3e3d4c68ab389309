"""`python -m megatron_rl.hosts.launch train.py ...` runs a host's own train script with our flags in the host's parser.

The script's call of parse_args gets add_custom_arguments, which miles and slime have for this, and the result is checked before
the script goes on. No file of a host is changed, and the host's parser reads all flags.
"""

from __future__ import annotations

import functools
import inspect
import runpy
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl
from megatron_rl.hosts.after_import import after_import
from megatron_rl.hosts.args import INIT_LINE, rollout_hosts
from megatron_rl.hosts.checks import check_launch, dropped_flags, launch_warnings
from megatron_rl.hosts.flags import compose_extra_args_provider
from megatron_rl.hosts.start_check import end_after_check, say
from megatron_rl.hosts.training_hooks import trained_in_words

EXIT_CONFIG = 2
PROGRAM = "python -m megatron_rl.hosts.launch"
DESCRIPTION = """\
Runs a train script of miles or slime with the flags below beside the host's own.

    python -m megatron_rl.hosts.launch train.py [the host's flags] [our flags]

For NeMo-RL the script is examples/run_grpo.py, and ++loss_fn.megatron_rl=<loss>.<aggregation> is the setting; none of the flags.
`train.py --help` after it shows the host's flags. Settings that would train on a wrong scale end the run before a GPU is taken.
With MEGATRON_RL_CHECK=1 in the environment a run without a problem ends there too, with exit code 0.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 the script ended, or MEGATRON_RL_CHECK found no problem; 2 wrong settings; the script's own exit code and
    exceptions pass through."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["-h"], ["--help"]):
        # For its help only: the host parses what follows the script.
        usage = f"{PROGRAM} SCRIPT ..."
        parser = ArgumentParser(PROGRAM, usage=usage, description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
        add_megatron_rl_args(parser).print_help()
        return 0
    if not arguments or not Path(arguments[0]).is_file():
        given = arguments[0] if arguments else "nothing"
        return _refuse(ConfigError(f"{given} is no train script in {Path.cwd()}: write {PROGRAM} train.py, and all flags after it"))
    script, calls = Path(arguments[0]), list[str]()
    # As `python script arguments` sets them.
    sys.argv = arguments
    sys.path.insert(0, str(script.parent.resolve()))
    with ExitStack() as stack:
        try:
            if nemo_rl.is_script_of_ours(script):
                paths = f"{nemo_rl.TRAINER}.setup"
                stack.enter_context(nemo_rl.loss_in_setup(_refuse, calls))
            else:
                paths = " nor ".join(f"{host.parser_module}.parse_args" for host in rollout_hosts())
                put_flags_into_parsers(calls)
        except ConfigError as error:
            return _refuse(error)
        runpy.run_path(str(script), run_name="__main__")
    if not calls:
        return _refuse(ConfigError(f"{script} has not called {paths}: our flags had no effect; start the host's own train script"))
    return 0


def put_flags_into_parsers(calls: list[str]) -> None:
    """parse_args of miles and of slime carries our flags, whichever the script loads; each call is noted in `calls`."""

    def put_in(module: Any) -> None:
        try:
            module.parse_args = with_our_flags(module.parse_args, functools.partial(calls.append, module.__name__))
        except ConfigError as error:
            sys.exit(_refuse(error))

    for host in rollout_hosts():
        after_import(host.parser_module, put_in)


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
            launch = check_launch(args, found=[*dropped_flags(args, sys.argv[1:])])
        except ConfigError as error:
            sys.exit(_refuse(error))
        for warning in launch_warnings(launch):
            say(warning)
        if launch["custom_megatron_init_path"] is None:
            say(f"no training actor is checked, no line comes at start, and Megatron is not probed: add {INIT_LINE}")
        end_after_check([trained_in_words(launch)])
        return args

    return parse


def _refuse(error: ConfigError) -> int:
    print(f"{PROGRAM}: ConfigError: {error}", file=sys.stderr, flush=True)
    return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
