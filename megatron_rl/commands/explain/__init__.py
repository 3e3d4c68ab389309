"""`megatron-rl explain`: flags, the step counted, weighed and sent down a chain, and what is printed."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.explain.chain import Layout, host_chain, own_chain
from megatron_rl.commands.explain.corrected import NO_LOG_PROBS, correct_step
from megatron_rl.commands.explain.launch import (
    HOSTS,
    LINE_OF_COMPANION,
    ROUTES,
    TRAIN,
    WITHOUT_ROUTES,
    given_launch,
    lines_beside_our_flags,
    own_problems,
    refusals_and_warnings,
    route_name,
    route_of,
)
from megatron_rl.commands.explain.peers import FRAMEWORKS, equivalents, framework
from megatron_rl.commands.explain.report import Explanation, as_json, as_text
from megatron_rl.commands.explain.step import given_flags, read_step
from megatron_rl.commands.explain.weights import count, shown_configs, weigh
from megatron_rl.config import ImportanceCorrection
from megatron_rl.errors import ConfigError, printable
from megatron_rl.loss_hub import loss_aggregation_names
from megatron_rl.validation import config_warnings, flag_of

EXIT_UNSOUND = 1
EXIT_CODES = (
    "Exit code: 0; 1 where the host would refuse the launch or train another weight, and for bad data; 2 for wrong settings."
)
LAYOUT_FLAGS = {
    "tensor_model_parallel_size": "tensor",
    "context_parallel_size": "context",
    "pipeline_model_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "num_microbatches": "num_microbatches",
}
NO_CHAIN = "the chain of factors from weight to gradient: --host and the layout give it"
NOT_RUN = (
    "a measurement: the factors of the schedule, DDP and finalize_model_grads are those of Megatron-Core 0.13 to 0.19, and none of "
    "them was run; `torchrun ... -m megatron_rl selftest` runs the installed ones"
)
UNTOUCHED = (
    "auxiliary losses of experts and of MTP: they keep the scale that Megatron gives them, whatever the policy loss weighs; under "
    "--calculate-per-token-loss they would not"
)
MULTIPLIED = (
    "auxiliary losses of experts, whose gradient is x routed tokens / response tokens under --calculate-per-token-loss, and a "
    "launch with one is refused; so is one with MTP where its gradient would be rescaled"
)
PHANTOMS = (
    "fully masked samples: under --calculate-per-token-loss the host counts one token for each, and our reducer and our loss "
    "refuse such a step"
)


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.epilog = EXIT_CODES
    add_megatron_rl_args(parser, arguments)
    step = parser.add_argument_group(title="the step, from one of three sources")
    step.add_argument("--response-lengths", metavar="LIST", help="Tokens of each response, as in 3,5,8.")
    step.add_argument("--prompt-ids", metavar="LIST", help="The prompt of each response, as in a,a,b.")
    step.add_argument("--rollout-ids", metavar="LIST", help="The rollout of each, where one makes several, as in 0,0,1.")
    step.add_argument("--loss-masks", metavar="LIST", help="A digit a token, as in 110,11111,00000000. Default: all 1.")
    step.add_argument("--rollouts", metavar="FILE", help="JSON lines: of `megatron-rl train --save-rollouts`, or a sample a line.")
    step.add_argument("--rollout-index", type=int, metavar="INDEX", help="Which of its rollouts. Default: the first.")
    step.add_argument("--rollout-dump", metavar="FILE", help="What miles or slime write with --save-debug-rollout-data.")
    host = parser.add_argument_group(title="the chain of factors")
    host.add_argument("--host", choices=HOSTS, help="Whose loop trains: the chain from weight to gradient is shown.")
    host.add_argument(
        "--route", choices=ROUTES, help="In miles and slime: our reducer, our custom_loss or neither. Default: reducer."
    )
    host.add_argument(
        "--companion",
        choices=(*LINE_OF_COMPANION, "none"),
        help="In miles and slime: the hook that weights samples before training. Default: reward where the aggregation needs one.",
    )
    for name in LAYOUT_FLAGS:
        of_rank = "Of each rank. " if name == "num_microbatches" else ""
        host.add_argument(flag_of(name), type=int, metavar="SIZE", help=f"{of_rank}Default: 1.")
    host.add_argument("--calculate-per-token-loss", action="store_true", help="The launch sets Megatron's flag of that name.")
    output = parser.add_argument_group(title="output")
    output.add_argument(
        "--framework",
        type=framework,
        metavar="NAME",
        help=f"How to reproduce its settings: {', '.join(FRAMEWORKS)}. Default: those that match, where one aggregation is shown.",
    )
    output.add_argument("--rows", type=int, default=16, metavar="COUNT", help="Samples and prompts to print. Default: 16.")
    output.add_argument("--json", action="store_true", help="Print one JSON object instead.")


def run(args: Namespace) -> int:
    """Exit code 0, or 1 where the launch would be refused or train another weight."""
    check_flags(args)
    explanation = explain(args)
    if not args.json:
        for line in explanation.warnings:
            print(f"megatron_rl: {printable(line)}", file=sys.stderr)
    print(as_json(explanation) if args.json else as_text(explanation, args.rows))
    return 0 if explanation.is_sound else EXIT_UNSOUND


def check_flags(args: Namespace) -> None:
    """No flag that is given does nothing; every problem at once."""
    problems = []
    sizes, of_hosts = given_flags(args, *LAYOUT_FLAGS), given_flags(args, "route", "companion")
    needs_host = [*sizes, *of_hosts, *(["--calculate-per-token-loss"] if args.calculate_per_token_loss else [])]
    if args.host is None and needs_host:
        problems.append(
            f"{', '.join(needs_host)} without --host: a chain of factors belongs to a host; give one of {', '.join(HOSTS)}"
        )
    if args.host is not None and args.host in WITHOUT_ROUTES:
        problems += [
            f"{flag} {value} with --host {args.host}: only miles and slime have several routes and rollouts; remove it"
            for flag, value in {**of_hosts, **given_flags(args, "rollout_ids")}.items()
        ]
    if args.host == TRAIN and args.calculate_per_token_loss:
        problems.append("--calculate-per-token-loss with --host train: `megatron-rl train` has no such flag; remove it")
    problems += [f"{flag} {size} must be at least 1" for flag, size in {**sizes, "--rows": args.rows}.items() if size < 1]
    if problems:
        raise ConfigError(problems)


def explain(args: Namespace) -> Explanation:
    step = read_step(args)
    configs, left_out, is_assumed = shown_configs(args, route_of(args), step)
    if not step.is_given:  # the group size of a launch is none of the example's
        configs = [replace(config, samples_per_prompt=None) for config in configs]
    counts = count(step, configs[0])
    shown = Explanation(
        step=step,
        counts=counts,
        weighings=[weigh(config, counts, is_assumed=is_assumed) for config in configs],
        host=args.host,
        route=route_name(args),
        layout=Layout(**{name: vars(args)[option] or 1 for option, name in LAYOUT_FLAGS.items()}),
        warnings=config_warnings(configs[0]),
        left_out=[*step.notes, *left_out],
    )
    shown.corrected = correct_step(step, shown.weighings)
    if configs[0].importance_correction != ImportanceCorrection.NONE and shown.corrected is None:
        shown.left_out.append(NO_LOG_PROBS)
    judge_host(args, shown)
    if args.framework is not None or (len(shown.weighings) == 1 and args.host is None):
        frameworks = FRAMEWORKS if args.framework is None else (args.framework,)
        names = [*loss_aggregation_names(), None] if args.framework else [weighing.name for weighing in shown.weighings]
        sizes = (counts.totals.num_samples, shown.layout.data, shown.layout.num_microbatches) if step.is_given else None
        shown.equivalents = [*equivalents(frameworks, names, shown.weighings[-1].divisor or float(step.longest), sizes)]
    return shown


def judge_host(args: Namespace, shown: Explanation) -> None:
    """Adds what --host says of the launch. A refused one has a chain as far as it can be computed."""
    weighing, counts, per_token = shown.weighings[0], shown.counts, args.calculate_per_token_loss
    if args.host is None:
        shown.left_out.append(NO_CHAIN)
    elif args.host in WITHOUT_ROUTES:
        shown.chain = own_chain(weighing, shown.layout, per_token=per_token)
        shown.problems = own_problems(args, weighing.config)
    else:
        given, launch = given_launch(args, weighing.config, counts, has_step=shown.step.is_given)
        shown.companion, shown.launch_lines = launch.companion, lines_beside_our_flags(launch)
        shown.problems, shown.warnings = refusals_and_warnings(launch, given, counts.num_masked)
        shown.chain = host_chain(launch, weighing, shown.layout)
    if shown.chain is not None:
        shown.left_out += [NOT_RUN, MULTIPLIED if per_token else UNTOUCHED]
    if per_token and not shown.step.is_given and args.host not in WITHOUT_ROUTES:
        shown.left_out.append(PHANTOMS)
