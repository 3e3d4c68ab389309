"""`megatron-rl doctor`: what works on this machine, what does not and why; after `--`, what would become of a launch line.

It imports no package that may be broken, torch included, changes nothing, and ends with 1 for what would stop or falsify training.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module

from megatron_rl.commands.doctor.machine import findings
from megatron_rl.commands.doctor.probes import collect_facts
from megatron_rl.commands.doctor.report import PROBLEM, Finding, LaunchReport, as_json, as_text
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES

EXIT_PROBLEM = 1


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the text.")
    parser.add_argument("--launch-only", action="store_true", help="Judge the launch line and not the machine.")
    parser.add_argument("--host", choices=(*HOST_NAMES, *DOOR_NAMES), help="Whose launch line it is. Default: what the line says.")
    parser.add_argument(
        "launch_line",
        nargs="*",
        metavar="-- LAUNCH LINE",
        help="The words that start the training, or the shell script that does: -- bash run.sh",
    )


def run(args: Namespace) -> int:
    """Exit code 0, or 1 where anything is a problem."""
    if args.launch_only and not args.launch_line:
        raise ConfigError("--launch-only judges the line after -- and nothing else: give one")
    launch: LaunchReport | None = None
    facts = None if args.launch_only else collect_facts()
    machine = [] if facts is None else findings(facts)
    if args.launch_line:
        try:
            if facts is not None and facts["torch"]["state"] != "here":  # the rules count weights with it
                launch = LaunchReport("not judged", None, rules=[Finding("rules", PROBLEM, "they need torch, see above")])
            else:
                asked = {} if facts is None else facts["megatron"]
                launch = import_module("megatron_rl.commands.doctor.launch").judge_launch(
                    args.launch_line, args.host, **{name: asked.get(name) for name in ("replicas_drift", "scales_indexer_loss")}
                )
        except ConfigError as error:
            if facts is None:
                raise
            launch = LaunchReport("not read", None, reading=[Finding("line", PROBLEM, problem) for problem in error.problems])
    problems = [finding for finding in [*machine, *(launch.findings if launch else [])] if finding.status == PROBLEM]
    show = as_json if args.json else as_text
    print(show(machine, launch, len(problems)), flush=True)
    return EXIT_PROBLEM if problems else 0
