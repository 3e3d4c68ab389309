"""`megatron-rl explain`: flags, the step counted, weighed and sent down a chain, and what is printed."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.explain.chain import door_chain, host_chain, own_chain
from megatron_rl.commands.explain.launch import (
    HOSTS,
    LINES_OF_COMPANION,
    ROUTES,
    TRAIN,
    WITHOUT_ROUTES,
    given_launch,
    refusals_and_warnings,
    route_name,
    route_of,
)
from megatron_rl.commands.explain.report import Explanation, as_json, as_text
from megatron_rl.commands.explain.step import LaunchLayout, read_step
from megatron_rl.commands.explain.weights import Weighing, correct_step, count_input, judged_settings, shown_configs
from megatron_rl.errors import ConfigError, printable
from megatron_rl.hosts.base import HostOptions, host_named
from megatron_rl.hosts.door import ONE_SAMPLE
from megatron_rl.hosts.door_line import write
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.settings import Settings
from megatron_rl.hosts.stock import Stock
from megatron_rl.registries.correction_settings import CorrectionSettings
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
# A flag -> those that do nothing without it.
GO_WITH = {
    "response_lengths": ("prompt_ids", "rollout_ids", "loss_masks"),
    "rollouts": ("rollout_index",),
    "host": (*LAYOUT_FLAGS, "route", "companion", "calculate_per_token_loss"),
}
# Flags of the loss that a weight, or a factor behind it, depends on. --help lists no others: all are taken, and checked.
FLAGS_OF_WEIGHTS = (
    *("policy_loss", "loss_aggregation", "loss_aggregation_divisor", "samples_per_prompt", "allow_partial_prompt_groups"),
    *("one_sample_per_rollout", "importance_correction", "importance_correction_level", "importance_correction_low"),
    *("importance_correction_high", "rejected_tokens", "gradient_divisor"),
)
USAGE = "megatron-rl explain --response-lengths LIST [--prompt-ids LIST] [--host HOST] [flags of your launch line | -- LAUNCH LINE]"
NO_LOG_PROBS = "the factors: give --rollouts FILE whose samples have old_log_probs and rollout_log_probs"
NO_CHAIN = "the chain of factors from weight to gradient: --host and the layout give it"
READ = "a measurement: the factors were read in {}, and none was run here"
WAS_RUN = "; the gradient was compared in {}"
NOT_RUN = (
    "a measurement: the factors of the schedule, DDP and finalize_model_grads{} were read in Megatron-Core 0.13 to 0.19, and none "
    "was run; `torchrun ... -m megatron_rl selftest` runs the installed ones"
)
OF_TRAIN = "--advantage-normalization none"
UNTOUCHED = "auxiliary losses of {}: they keep the scale that Megatron gives them, whatever the policy loss weighs"
MULTIPLIED = "auxiliary losses of experts: under Megatron's per-token contract their gradient is x routed tokens / response tokens"
ARE_REFUSED = f"{MULTIPLIED}, and a launch with one is refused; so is one with MTP where its gradient would be rescaled"


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.usage, parser.epilog = USAGE, EXIT_CODES
    step = parser.add_argument_group(title="the step, from one of three sources")
    step.add_argument("--response-lengths", metavar="LIST", help="Tokens of each response, as in 3,5,8.")
    step.add_argument("--prompt-ids", metavar="LIST", help="The prompt of each response, as in a,a,b.")
    step.add_argument("--rollout-ids", metavar="LIST", help="The rollout of each, where one makes several, as in 0,0,1.")
    step.add_argument("--loss-masks", metavar="LIST", help="A digit a token, as in 110,11111,00000000. Default: all 1.")
    step.add_argument("--rollouts", metavar="FILE", help="What train --rollouts reads, or JSON lines of one sample each.")
    step.add_argument("--rollout-index", type=int, metavar="INDEX", help="Which of its rollouts. Default: the first.")
    step.add_argument("--rollout-dump", metavar="FILE", help="What miles or slime write with --save-debug-rollout-data.")
    host = parser.add_argument_group(title="a host and its layout")
    host.add_argument("--host", choices=HOSTS, help="Whose loop trains: the chain from weight to gradient is shown.")
    host.add_argument(
        "--route", choices=ROUTES, help="In miles and slime: our reducer, our custom_loss or neither. Default: reducer."
    )
    host.add_argument(
        "--companion",
        choices=LINES_OF_COMPANION,
        help="In miles and slime: the hook that weights samples before training. Default: reward where the aggregation needs one.",
    )
    for name in LAYOUT_FLAGS:
        of_rank = "Of each rank. " if name == "num_microbatches" else ""
        host.add_argument(flag_of(name), type=int, metavar="SIZE", help=f"{of_rank}Default: 1.")
    host.add_argument("--calculate-per-token-loss", action="store_true", help="The launch sets Megatron's flag of that name.")
    output = parser.add_argument_group(title="output")
    output.add_argument("--rows", type=int, default=16, metavar="COUNT", help="Samples and prompts to print. Default: 16.")
    output.add_argument("--json", action="store_true", help="Print one JSON object instead.")
    parser.add_argument(
        "launch_line",
        nargs="*",
        metavar="-- LAUNCH LINE",
        help="A launch line as you type it, or -- bash run.sh: what its loss weighs, a trainer's or ours.",
    )
    before = set(parser._actions)
    add_megatron_rl_args(parser, arguments)
    parser._action_groups[-1].description = "Flags of the loss. `megatron-rl train --help` lists those that change no weight."
    for action in set(parser._actions) - before:
        if action.dest not in FLAGS_OF_WEIGHTS:
            action.help = SUPPRESS


def run(args: Namespace) -> int:
    """Exit code 0, or 1 where the launch would be refused or train another weight."""
    check_flags(args)
    if args.launch_line:
        return import_module("megatron_rl.commands.explain.loss_of_line").run(args)
    explanation = explain(args)
    if not args.json:
        for line in explanation.warnings:
            print(f"megatron_rl: {printable(line)}", file=sys.stderr)
    print(as_json(explanation) if args.json else as_text(explanation, args.rows))
    return 0 if explanation.is_sound else EXIT_UNSOUND


def given_flags(args: Namespace, *names: str) -> dict[str, Any]:
    """Flag -> value, of those that are on the command line."""
    return {flag_of(name): vars(args)[name] for name in names if vars(args)[name] is not None and vars(args)[name] is not False}


def check_flags(args: Namespace) -> None:
    """No flag that is given does nothing; every problem at once."""
    problems = []
    if len(sources := given_flags(args, "response_lengths", "rollouts", "rollout_dump")) > 1:
        problems.append(f"{' and '.join(sources)}: a step has one source; give one of them")
    for needed, names in GO_WITH.items():
        if vars(args)[needed] is None and not (needed == "host" and args.launch_line):
            remedy = f"goes with {flag_of(needed)} alone: remove it, or give {flag_of(needed)}"
            problems += [f"{flag} {remedy}" for flag in given_flags(args, *names)]
    if args.host is not None and args.host in WITHOUT_ROUTES:
        problems += [
            f"{flag} {value} with --host {args.host}: only miles and slime have several routes; remove it"
            for flag, value in given_flags(args, "route", "companion").items()
        ]
    if args.host == TRAIN and args.calculate_per_token_loss:
        problems.append("--calculate-per-token-loss with --host train: `megatron-rl train` has no such flag; remove it")
    refusal = DOORS[args.host].why_not_per_token if args.host in DOORS else None
    if refusal is not None and args.calculate_per_token_loss:
        problems.append(f"--calculate-per-token-loss with --host {args.host}: {refusal}; remove it")
    counts = {**given_flags(args, *LAYOUT_FLAGS), "--rows": args.rows}
    problems += [f"{flag} {size} must be at least 1" for flag, size in counts.items() if size < 1]
    if problems:
        raise ConfigError(problems)


def explain(args: Namespace) -> Explanation:
    step = read_step(args)
    if step.rollouts is not None and args.host in DOORS and not DOORS[args.host].counts_rollouts:
        raise ConfigError(
            f"{step.source} says which samples are of one rollout, and --host {args.host} counts rows by its own rule: leave "
            "--host out to see the step, or give one sample a rollout"
        )
    configs, left_out = shown_configs(args, route_of(args), step)
    counts = count_input(step, configs[0])
    shown = Explanation(
        step=step,
        counts=counts,
        weighings=[Weighing(config, counts) for config in configs],
        assumes_divisor=args.loss_aggregation_divisor is None,
        host=args.host,
        route=route_name(args),
        layout=layout_of(args),
        warnings=config_warnings(configs[0]),
        left_out=[*step.notes, *left_out],
    )
    shown.corrected = correct_step(step, shown.weighings)
    if CorrectionSettings.of(configs[0]).has_factor and shown.corrected is None:
        shown.left_out.append(NO_LOG_PROBS)
    judge_host(args, shown)
    return shown


def layout_of(args: Namespace) -> LaunchLayout:
    return LaunchLayout(**{name: vars(args)[option] or 1 for option, name in LAYOUT_FLAGS.items()})


def judge_host(args: Namespace, shown: Explanation) -> None:
    """Adds what --host says of the launch. A refused one has a chain as far as it can be computed."""
    weighing, counts, per_token = shown.weighings[0], shown.counts, args.calculate_per_token_loss
    door = DOORS.get(args.host)
    if args.host is None:
        shown.left_out.append(NO_CHAIN)
    elif door is not None:
        shown.chain = door_chain(door, weighing, shown.layout, per_token=per_token)
        rescaled = MULTIPLIED if per_token or door.is_per_token else None
        is_megatron, of_run = door.megatron is not None, WAS_RUN.format(door.was_run) if door.was_run else ""
        shown.left_out += of_megatron("experts", rescaled, door.megatron) if is_megatron else [READ.format(door.probed) + of_run]
        shown.launch_lines, problems = write(door, weighing.config)
        shown.of_lines = [*door.of_written(weighing.config)]
        typed = door.line_of(door.own.name(ONE_SAMPLE), True)
        shown.problems = [
            problem.replace(f"type {typed}", f"give {flag_of(ONE_SAMPLE)} here, and {typed} there") for problem in problems
        ]
    elif args.host in WITHOUT_ROUTES:
        shown.chain = own_chain(weighing, shown.layout, per_token=per_token)
        shown.left_out += of_megatron("experts", ARE_REFUSED if per_token else None)
        try:  # `train` has no per-token contract
            judged_settings(
                args,
                route_of(args),
                loss_aggregation=weighing.name,
                calculate_per_token_loss=per_token,
            )
        except ConfigError as error:
            shown.problems = list(error.problems)
    else:
        given, launch, shown.launch_lines = given_launch(args, weighing.config, counts)
        shown.companion = launch.companion
        shown.problems, shown.warnings = refusals_and_warnings(launch, given, counts.num_masked)
        shown.chain = host_chain(launch, weighing, shown.layout)
        if shown.chain is not None:
            shown.left_out += of_megatron("experts and of MTP", ARE_REFUSED if per_token else None)
    shown.left_out += of_own_loss(args.host)
    if args.host is not None:
        shown.without_deviation = OF_TRAIN if args.host == TRAIN else (door or host_named(args.host)).without_deviation


def of_megatron(attached: str, rescaled: str | None, setting: str | None = None) -> list[str]:
    """What is left out where Megatron-Core trains. attached: what it adds losses of. rescaled: what is said where it rescales them.
    setting: see Door.megatron."""
    return [NOT_RUN.format(f", with {setting}," if setting else ""), rescaled or UNTOUCHED.format(attached)]


def of_own_loss(host: str | None) -> list[str]:
    """The host's own loss, with the command that shows it."""
    if host in (None, TRAIN):
        return []
    stock: Stock | str | None
    if host in DOORS:
        door = DOORS[host]
        title, stock = door.title, door.stock(Settings.of_names({}, door.all_defaults))
    else:
        title, stock = host, host_named(host).stock(HostOptions(Namespace(), host_named(host)))
    weight = f", by default {stock.policy} a token" if isinstance(stock, Stock) and stock.policy is not None else ""
    return [f"{title}'s own loss{weight}: `megatron-rl explain ... -- YOUR LAUNCH LINE` shows what it weighs on this step"]
