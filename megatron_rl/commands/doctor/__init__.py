"""`megatron-rl doctor`: what works on this machine, what does not and why; after `--`, what a launch line would train.

It imports no package that may be broken, torch included, changes nothing, and ends with 1 for what would stop or falsify training.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module

from megatron_rl.commands.doctor.machine import findings
from megatron_rl.commands.doctor.probes import collect_facts
from megatron_rl.commands.doctor.report import as_json, as_text, num_problems
from megatron_rl.hosts import ADAPTER_NAMES

EXIT_PROBLEM = 1


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the text.")
    parser.add_argument("--host", choices=ADAPTER_NAMES, help="Whose launch line it is. Default: what its words say.")
    parser.add_argument(
        "launch_line",
        nargs="*",
        metavar="-- LAUNCH LINE",
        help="The words that start the training. The trainer's own parser reads them, so it must be installed here.",
    )


def run(args: Namespace) -> int:
    """Exit code 0, or 1 where anything is a problem."""
    facts = collect_facts()
    found = findings(facts)
    if args.launch_line and facts["torch"]["state"] == "here":
        found += import_module("megatron_rl.commands.doctor.launch").judge_line(args.launch_line, args.host)
    print((as_json if args.json else as_text)(found), flush=True)
    return EXIT_PROBLEM if num_problems(found) else 0
