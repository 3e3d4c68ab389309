"""`megatron-rl doctor`: what works on this machine, what does not and why; after `--`, what would become of a launch line.

It imports no package that may be broken, torch included, changes nothing, and ends with 1 for what would stop or falsify training.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from megatron_rl.commands.doctor.machine import findings
from megatron_rl.commands.doctor.probes import collect_facts
from megatron_rl.commands.doctor.report import NOTE, PROBLEM, Finding, LaunchReport, as_json, as_text, num_problems
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES

EXIT_PROBLEM = 1
SOURCES = ("response_lengths", "rollouts", "rollout_dump")
# Flags that do nothing without a step.
OF_A_STEP = ("loss_masks", "rollout_index", "data_parallel_size", "micro_batch_size", "plot")


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the text.")
    parser.add_argument("--launch-only", action="store_true", help="Judge the launch line and not the machine.")
    parser.add_argument("--host", choices=(*HOST_NAMES, *DOOR_NAMES), help="Whose launch line it is. Default: what the line says.")
    add_step_arguments(parser)
    parser.add_argument(
        "launch_line",
        nargs="*",
        metavar="-- LAUNCH LINE",
        help="The words that start the training, or the shell script that does: -- bash run.sh",
    )


def add_step_arguments(parser: ArgumentParser) -> None:
    step = parser.add_argument_group(
        "a recorded step", "How far the loss of the line after -- is from its exact weights on this step."
    )
    step.add_argument("--response-lengths", metavar="LIST", help="Tokens of each response, as in 3,5,8.")
    step.add_argument("--loss-masks", metavar="LIST", help="A digit a token, as in 110,11111,00000000. Default: all 1.")
    step.add_argument("--rollouts", metavar="FILE", help="JSON lines, as `megatron-rl explain` reads them.")
    step.add_argument("--rollout-index", type=int, metavar="INDEX", help="Which of its rollouts. Default: the first.")
    step.add_argument("--rollout-dump", metavar="FILE", help="What miles or slime write with --save-debug-rollout-data.")
    step.add_argument(
        "--data-parallel-size",
        type=int,
        metavar="SIZE",
        help="Ranks that share the samples, in their order. Default: of the line, or 1.",
    )
    step.add_argument("--micro-batch-size", type=int, metavar="SIZE", help="Samples of a micro-batch. Default: of the line, or 1.")
    step.add_argument("--plot", metavar="FILE", help="Draws the weights as PNG.")
    parser.set_defaults(prompt_ids=None, rollout_ids=None)


def check_step_arguments(args: Namespace) -> None:
    """Raises ConfigError for a flag that does nothing."""
    given = [name for name in SOURCES if vars(args)[name] is not None]
    if not given:
        if idle := [name for name in OF_A_STEP if vars(args)[name] is not None]:
            flag = f"--{idle[0].replace('_', '-')}"
            raise ConfigError(
                f"{flag} goes with a recorded step: give --response-lengths, --rollouts or --rollout-dump, or remove it"
            )
        return
    if not args.launch_line:
        raise ConfigError(f"--{given[0].replace('_', '-')} is for the launch line after --: give one, as -- bash run.sh")
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(f'--{name}' for name in given).replace('_', '-')}: a step has one source; give one of them"
        )
    for name in ("data_parallel_size", "micro_batch_size"):
        if vars(args)[name] is not None and vars(args)[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {vars(args)[name]} must be at least 1")


def run(args: Namespace) -> int:
    """Exit code 0, or 1 where anything is a problem."""
    check_step_arguments(args)
    if args.launch_only and not args.launch_line:
        raise ConfigError("--launch-only judges the line after -- and nothing else: give one")
    launches: list[LaunchReport] = []
    step = None
    facts = None if args.launch_only else collect_facts()
    machine = [] if facts is None else findings(facts)
    if args.launch_line:
        try:
            if facts is not None and facts["torch"]["state"] != "here":  # the rules count weights with it
                launches = [LaunchReport("not judged", None, rules=[Finding("rules", PROBLEM, "they need torch, see above")])]
            else:
                asked = {} if facts is None else facts["megatron"]
                if any(vars(args)[name] is not None for name in SOURCES):
                    step = import_module("megatron_rl.commands.doctor.recorded_step")
                launches = import_module("megatron_rl.commands.doctor.launch").judge_launches(
                    args.launch_line,
                    args.host,
                    **{name: asked.get(name) for name in ("replicas_drift", "scales_indexer_loss")},
                    **({} if step is None else {"of_step": partial(step.judge_step, args=args), "asked": step.asked_sizes(args)}),
                )
        except ConfigError as error:
            if facts is None:
                raise
            unread = [Finding("line", PROBLEM, problem) for problem in error.problems]
            launches = [LaunchReport("not read", None, reading=unread)]
    for launch in launches:
        if step is not None and not any(finding.subject == "this step" for finding in launch.findings):
            launch.rules.append(Finding("this step", NOTE, "not judged: what the line trains is refused, or not known here"))
    show = as_json if args.json else as_text
    print(show(machine, launches), flush=True)
    return EXIT_PROBLEM if num_problems([*machine, *(one for launch in launches for one in launch.findings)]) else 0
