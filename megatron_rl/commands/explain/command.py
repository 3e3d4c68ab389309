"""`megatron-rl explain`: flags, and what is printed or drawn; it must never weight a token by itself."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.explain.build import LAYOUT_FLAGS, explain
from megatron_rl.commands.explain.launch import HOSTS, LINE_OF_COMPANION, NONE, ROUTES, TRAIN, WITHOUT_ROUTES
from megatron_rl.commands.explain.peers import FRAMEWORKS, framework
from megatron_rl.commands.explain.plot import check_plot, draw_weights
from megatron_rl.commands.explain.report import as_text
from megatron_rl.commands.explain.report_json import as_json
from megatron_rl.errors import ConfigError, printable

EXIT_UNSOUND = 1
EXIT_CODES = (
    "Exit code: 0; 1 where the host would refuse the launch or train another weight, and for bad data; 2 for wrong settings."
)


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.epilog = EXIT_CODES
    add_megatron_rl_args(parser)
    step = parser.add_argument_group(title="the step, from one of three sources")
    step.add_argument("--response-lengths", metavar="LIST", help="Tokens of each response, as in 3,5,8.")
    step.add_argument("--prompt-ids", metavar="LIST", help="The prompt of each response, as in a,a,b.")
    step.add_argument("--rollout-ids", metavar="LIST", help="The rollout of each, where one makes several, as in 0,0,1.")
    step.add_argument("--loss-masks", metavar="LIST", help="A digit a token, as in 110,11111,00000000. Default: all 1.")
    step.add_argument("--rollouts", metavar="FILE", help="JSON lines: of `megatron-rl train --save-rollouts`, or a sample a line.")
    step.add_argument("--rollout-index", type=int, metavar="INDEX", help="Which of its rollouts. Default: the first.")
    step.add_argument("--rollout-dump", metavar="FILE", help="What miles or slime write with --save-debug-rollout-data.")
    step.add_argument(
        "--sample-losses", metavar="LIST", help="The loss of each token of a sample, as in 1,2,0.5: gives the step's loss."
    )
    host = parser.add_argument_group(title="the chain of factors")
    host.add_argument("--host", choices=HOSTS, help="Whose loop trains: the chain from weight to gradient is shown.")
    host.add_argument(
        "--route", choices=ROUTES, help="In miles and slime: our reducer, our custom_loss or neither. Default: reducer."
    )
    host.add_argument(
        "--companion",
        choices=(*LINE_OF_COMPANION, NONE),
        help="In miles and slime: the hook that weights samples before training. Default: reward where the aggregation needs one.",
    )
    for name in LAYOUT_FLAGS:
        of_rank = "Of each rank. " if name == "num_microbatches" else ""
        host.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="SIZE", help=f"{of_rank}Default: 1.")
    host.add_argument("--calculate-per-token-loss", action="store_true", help="The launch sets Megatron's flag of that name.")
    output = parser.add_argument_group(title="output")
    output.add_argument(
        "--framework",
        type=framework,
        metavar="NAME",
        help=f"How to reproduce its settings: {', '.join(FRAMEWORKS)}. Default: those that match, where one aggregation is shown.",
    )
    output.add_argument("--clip-grad", type=float, metavar="NORM", help="Your value under DeepSpeed. Default: 1.0.")
    output.add_argument("--rows", type=int, default=16, metavar="COUNT", help="Samples and prompts to print. Default: 16.")
    output.add_argument("--plot", metavar="PNG", help="A picture of shares and weights; needs matplotlib.")
    output.add_argument("--json", action="store_true", help="Print one JSON object instead.")


def run(args: Namespace) -> int:
    """Exit code 0, or 1 where the launch would be refused or train another weight."""
    check_flags(args)
    explanation = explain(args)
    if args.plot is not None:
        draw_weights(explanation, args.plot)
    if args.json:
        print(json.dumps(as_json(explanation)))
    else:
        for line in explanation.warnings:
            print(f"megatron_rl: {printable(line)}", file=sys.stderr)
        as_text(explanation, args.rows)
    return 0 if explanation.is_sound else EXIT_UNSOUND


def check_flags(args: Namespace) -> None:
    """No flag that is given does nothing; every problem at once."""
    problems = []
    sizes = [name for name in LAYOUT_FLAGS if vars(args)[name] is not None]
    of_hosts = {"--route": args.route, "--companion": args.companion}
    needs_host = [_flag(name) for name in sizes] + [flag for flag, value in of_hosts.items() if value is not None]
    needs_host += ["--calculate-per-token-loss"] if args.calculate_per_token_loss else []
    if args.host is None and needs_host:
        problems.append(
            f"{', '.join(needs_host)} without --host: a chain of factors belongs to a host; give one of {', '.join(HOSTS)}"
        )
    if args.host is not None and args.host in WITHOUT_ROUTES:
        problems += [
            f"{flag} {value} with --host {args.host}: only miles and slime have several routes and rollouts; remove it"
            for flag, value in {**of_hosts, "--rollout-ids": args.rollout_ids}.items()
            if value is not None
        ]
    if args.host == TRAIN and args.calculate_per_token_loss:
        problems.append("--calculate-per-token-loss with --host train: `megatron-rl train` has no such flag; remove it")
    problems += [f"{_flag(name)} {vars(args)[name]} must be at least 1" for name in [*sizes, "rows"] if vars(args)[name] < 1]
    if args.clip_grad is not None and not 0 < args.clip_grad < math.inf:
        problems.append(f"--clip-grad {args.clip_grad} must be a finite number above 0")
    problems += [] if args.plot is None else check_plot(args.plot)
    if problems:
        raise ConfigError(problems)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
