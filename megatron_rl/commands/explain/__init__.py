"""`megatron-rl explain`: flags, the step counted, weighed and sent down a chain, and what is printed."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.explain.chain import adapter_chain, host_chain, own_chain
from megatron_rl.commands.explain.launch import (
    HOSTS,
    NO_COMPANION,
    REWARD,
    ROUTES,
    TRAIN,
    WITHOUT_ROUTES,
    given_launch,
    refusals_and_warnings,
    route_name,
    route_of,
)
from megatron_rl.commands.explain.report import Explanation, as_json, as_text, columns
from megatron_rl.commands.explain.step import LaunchLayout, read_step
from megatron_rl.commands.explain.stock import exact_formula, exact_weights, gradient_error, read_layout, stock_weight, weights_of
from megatron_rl.commands.explain.weights import Weighing, correct_step, count_input, judged_settings, short, shown_configs
from megatron_rl.errors import ConfigError, printable
from megatron_rl.hosts import SETTINGS_NAMES
from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.loss_hub import get_policy_loss
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
USAGE = "megatron-rl explain --response-lengths LIST [--prompt-ids LIST] [--host HOST] [flags of your launch line]"
NO_LOG_PROBS = "the factors: give --rollouts FILE whose samples have old_log_probs and rollout_log_probs"
NO_CHAIN = "the chain of factors from weight to gradient: --host and the layout give it"
NOT_RUN = (
    "a measurement: the factors of the schedule, DDP and finalize_model_grads were read in Megatron-Core 0.13 to 0.20, and none "
    "was run; `torchrun ... -m megatron_rl selftest` runs the installed ones"
)
UNTOUCHED = "auxiliary losses of {}: they keep the scale that Megatron gives them, whatever the policy loss weighs"
MULTIPLIED = "auxiliary losses of experts: under Megatron's per-token contract their gradient is x routed tokens / response tokens"
ARE_REFUSED = f"{MULTIPLIED}, and a launch with one is refused; so is one with MTP where its gradient would be rescaled"


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.usage, parser.epilog = USAGE, EXIT_CODES
    step = parser.add_argument_group(title="the step, from one of two sources")
    step.add_argument("--response-lengths", metavar="LIST", help="Tokens of each response, as in 3,5,8.")
    step.add_argument("--prompt-ids", metavar="LIST", help="The prompt of each response, as in a,a,b.")
    step.add_argument("--rollout-ids", metavar="LIST", help="The rollout of each, where one makes several, as in 0,0,1.")
    step.add_argument("--loss-masks", metavar="LIST", help="A digit a token, as in 110,11111,00000000. Default: all 1.")
    step.add_argument("--rollouts", metavar="FILE", help="What train --rollouts reads, or JSON lines of one sample each.")
    step.add_argument("--rollout-index", type=int, metavar="INDEX", help="Which of its rollouts. Default: the first.")
    stock = parser.add_argument_group(title="a trainer's own loss")
    stock.add_argument("--stock", metavar="HOST:NAME", help="What this aggregation of the trainer weighs: verl:token-mean.")
    stock.add_argument(
        "--micro-batches",
        metavar="LENGTHS",
        help="Response lengths, | between micro-batches and || between ranks: '3100,900|2500,700'.",
    )
    host = parser.add_argument_group(title="a host and its layout")
    host.add_argument("--host", choices=HOSTS, help="Whose loop trains: the chain from weight to gradient is shown.")
    host.add_argument(
        "--route", choices=ROUTES, help="In miles and slime: our reducer, our custom_loss or neither. Default: reducer."
    )
    host.add_argument(
        "--companion",
        choices=(REWARD, NO_COMPANION),
        help="In miles and slime: the hook that weights samples before training. Default: reward where the aggregation needs one.",
    )
    for name in LAYOUT_FLAGS:
        of_rank = "Of each rank. " if name == "num_microbatches" else ""
        host.add_argument(flag_of(name), type=int, metavar="SIZE", help=f"{of_rank}Default: 1.")
    host.add_argument("--calculate-per-token-loss", action="store_true", help="The launch sets Megatron's flag of that name.")
    output = parser.add_argument_group(title="output")
    output.add_argument("--rows", type=int, default=16, metavar="COUNT", help="Samples and prompts to print. Default: 16.")
    output.add_argument("--json", action="store_true", help="Print one JSON object instead.")
    before = set(parser._actions)
    add_megatron_rl_args(parser, arguments)
    parser._action_groups[-1].description = "Flags of the loss. `megatron-rl train --help` lists those that change no weight."
    for action in set(parser._actions) - before:
        if action.dest not in FLAGS_OF_WEIGHTS:
            action.help = SUPPRESS


def run(args: Namespace) -> int:
    """Exit code 0, or 1 where the launch would be refused or train another weight."""
    check_flags(args)
    if args.stock is not None:
        print(stock_table(args))
        return 0
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
    if len(sources := given_flags(args, "response_lengths", "rollouts", "micro_batches")) > 1:
        problems.append(f"{' and '.join(sources)}: a step has one source; give one of them")
    for needed, names in GO_WITH.items():
        if vars(args)[needed] is None:
            remedy = f"goes with {flag_of(needed)} alone: remove it, or give {flag_of(needed)}"
            idle = [name for name in names if name != "prompt_ids" or args.micro_batches is None]
            problems += [f"{flag} {remedy}" for flag in given_flags(args, *idle)]
    if args.host is not None and args.host in WITHOUT_ROUTES:
        problems += [
            f"{flag} {value} with --host {args.host}: only miles and slime have several routes; remove it"
            for flag, value in given_flags(args, "route", "companion").items()
        ]
    if args.host == TRAIN and args.calculate_per_token_loss:
        problems.append("--calculate-per-token-loss with --host train: `megatron-rl train` has no such flag; remove it")
    if (args.stock is None) != (args.micro_batches is None):
        problems.append("--stock HOST:NAME and --micro-batches '3100,900|2500,700' go together: give both")
    refusal = adapter_named(args.host).WHY_NOT_PER_TOKEN if args.host in SETTINGS_NAMES else None
    if refusal is not None and args.calculate_per_token_loss:
        problems.append(f"--calculate-per-token-loss with --host {args.host}: {refusal}; remove it")
    counts = {**given_flags(args, *LAYOUT_FLAGS), "--rows": args.rows}
    problems += [f"{flag} {size} must be at least 1" for flag, size in counts.items() if size < 1]
    if problems:
        raise ConfigError(problems)


def explain(args: Namespace) -> Explanation:
    step = read_step(args)
    if step.rollouts is not None and args.host in SETTINGS_NAMES and not adapter_named(args.host).COUNTS_ROLLOUTS:
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
    if args.host is None:
        shown.left_out.append(NO_CHAIN)
    elif args.host in SETTINGS_NAMES:
        adapter = adapter_named(args.host)
        shown.chain = adapter_chain(adapter, weighing, shown.layout, per_token=per_token)
        shown.left_out += of_megatron("experts", MULTIPLIED if per_token else None)
        if why := adapter.OFFER.refusal(get_policy_loss(weighing.config.policy_loss), weighing.record):
            shown.problems = [why]
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
        shown.companion = REWARD if launch.has_reward_hook else None
        shown.problems, shown.warnings = refusals_and_warnings(launch, given, counts.num_masked)
        shown.chain = host_chain(launch, weighing, shown.layout)
        if shown.chain is not None:
            shown.left_out += of_megatron("experts and of MTP", ARE_REFUSED if per_token else None)


def of_megatron(attached: str, rescaled: str | None) -> list[str]:
    """What is left out where Megatron-Core trains. attached: what adds losses. rescaled: what is said where they are scaled."""
    return [NOT_RUN, rescaled or UNTOUCHED.format(attached)]


def stock_table(args: Namespace) -> str:
    """The trainer's own weights beside the exact ones, and by how much the gradient is off."""
    title, weight = stock_weight(args.stock)
    counts, layout = read_layout(args.micro_batches)
    tokens, prompts = torch.tensor(counts), None if args.prompt_ids is None else args.prompt_ids.split(",")
    given: dict[str, Any] = {"divisor": args.loss_aggregation_divisor, "prompts": prompts}
    own, exact = (weigh(weight, tokens, tokens, layout, **given) for weigh in (weights_of, exact_weights))
    rows = [["", "rank.micro-batch", "tokens", f"{title} {weight}", f"exact {exact_formula(weight)}", "ratio"]]
    for rank, of_rank in enumerate(layout):
        for number, samples in enumerate(of_rank):
            for one in samples:
                cells = [short(float(own[one])), short(float(exact[one])), f"x {short(float(own[one] / exact[one]))}"]
                rows.append([f"sample {one}", f"{rank}.{number}", str(counts[one]), *cells])
    error = gradient_error(own, exact, tokens)
    is_exact = exact_formula(weight) == weight and "L_b" not in weight.powers
    verdict = "EXACT: the weight is the same on every layout"
    if not is_exact:
        verdict = f"NOT exact: the weight depends on the layout; of independent tokens this one is {error:.0%} off"
    return "\n".join([*columns(rows[: args.rows + 1]), verdict])
