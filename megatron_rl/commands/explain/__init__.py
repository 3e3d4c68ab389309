"""`megatron-rl explain`: flags, the step counted, weighed and sent down a chain, and what is printed."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.explain.chain import chain_of
from megatron_rl.commands.explain.report import Explanation, as_json, as_text
from megatron_rl.commands.explain.step import read_step
from megatron_rl.commands.explain.stock import stock_table
from megatron_rl.commands.explain.weights import Weighing, count_input, shown_configs
from megatron_rl.config import LaunchMethod
from megatron_rl.declare import get_policy_loss
from megatron_rl.errors import ConfigError, printable
from megatron_rl.hosts import ADAPTER_NAMES, ROLLOUT_HOST_NAMES, SETTINGS_NAMES
from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.validation import config_warnings, flag_of

EXIT_UNSOUND = 1
EXIT_CODES = "Exit code: 0; 1 where the host would train another weight, and for bad data; 2 for wrong settings."
TRAIN = "train"
SIZES = (
    *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"),
    "num_microbatches",
)
# Where the step comes from -> the flags that do nothing then.
IDLE = {
    "response_lengths": ("rollout_index", "stock"),
    "rollouts": ("prompt_ids", "rollout_ids", "loss_masks", "stock"),
    "micro_batches": ("rollout_ids", "loss_masks", "rollout_index", "host", "json"),
}
IDLE_WITHOUT_HOST = (*SIZES, "calculate_per_token_loss")
# Flags of the loss that a weight, or a factor behind it, depends on. --help lists no others: all are taken, and checked.
FLAGS_OF_WEIGHTS = (
    *("policy_loss", "loss_aggregation", "loss_aggregation_divisor", "samples_per_prompt", "allow_partial_prompt_groups"),
    *("one_sample_per_rollout", "gradient_divisor"),
)
USAGE = "megatron-rl explain --response-lengths LIST [--prompt-ids LIST] [--host HOST] [flags of your launch line]"
NO_CHAIN = "the chain of factors from weight to gradient: --host and the layout give it"
NOT_RUN = (
    "a measurement: the factors were read in Megatron-Core 0.16 to 0.20 and none was run; `torchrun ... -m megatron_rl selftest` "
    "runs the installed ones",
    "auxiliary losses of the model's experts and of MTP: they keep the scale that Megatron gives them",
)


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.usage, parser.epilog = USAGE, EXIT_CODES
    step = parser.add_argument_group(title="the step, from one of three sources")
    source = step.add_mutually_exclusive_group()
    source.add_argument("--response-lengths", metavar="LIST", help="Tokens of each response, as in 3,5,8.")
    source.add_argument("--rollouts", metavar="FILE", help="What train --rollouts reads, or JSON lines of one sample each.")
    between = "| between micro-batches and || between ranks: '3100,900|2500,700'."
    source.add_argument("--micro-batches", metavar="LENGTHS", help=f"With --stock: response lengths, {between}")
    step.add_argument("--prompt-ids", metavar="LIST", help="The prompt of each response, as in a,a,b.")
    step.add_argument("--rollout-ids", metavar="LIST", help="The rollout of each, where one makes several, as in 0,0,1.")
    step.add_argument("--loss-masks", metavar="LIST", help="A digit a token, as in 110,11111,00000000. Default: all 1.")
    step.add_argument("--rollout-index", type=int, metavar="INDEX", help="Which rollout of the file. Default: the first.")
    host = parser.add_argument_group(title="a trainer and its layout")
    host.add_argument("--stock", metavar="HOST:NAME", help="What this aggregation of the trainer weighs: verl:token-mean.")
    hosts = (*ADAPTER_NAMES, TRAIN)
    host.add_argument("--host", choices=hosts, help="Whose loop trains our loss: the chain from weight to gradient is shown.")
    for name in SIZES:
        scope = "Of each rank. " if name == "num_microbatches" else ""
        host.add_argument(flag_of(name), type=int, metavar="SIZE", help=f"{scope}Default: 1.")
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
    """Exit code 0, or 1 where the host would train another weight."""
    check_flags(args)
    if args.micro_batches is not None:
        print("\n".join(stock_table(args)))
        return 0
    explanation = explain(args)
    if not args.json:
        for line in explanation.warnings:
            print(f"megatron_rl: {printable(line)}", file=sys.stderr)
    print(as_json(explanation) if args.json else as_text(explanation, args.rows))
    return 0 if explanation.is_sound else EXIT_UNSOUND


def check_flags(args: Namespace) -> None:
    """No flag that is given does nothing; every problem at once."""
    given = {name: value for name, value in vars(args).items() if value is not None and value is not False}
    source = next((name for name in IDLE if name in given), None)
    if source is None:
        raise ConfigError("nothing to explain: give a step, as --response-lengths 3,5,8 --prompt-ids a,a,b")
    problems = [f"{flag_of(name)} does nothing with {flag_of(source)}: remove it" for name in IDLE[source] if name in given]
    if args.host is None:
        idle = [flag_of(name) for name in IDLE_WITHOUT_HOST if name in given]
        problems += [f"{flag} does nothing without --host: remove it, or give --host" for flag in idle]
    if source == "micro_batches" and args.stock is None:
        problems.append("--micro-batches without --stock: say whose weights, as --stock verl:token-mean")
    sizes = {name: given[name] for name in (*SIZES, "rows") if name in given}
    problems += [f"{flag_of(name)} {size} must be at least 1" for name, size in sizes.items() if size < 1]
    if problems:
        raise ConfigError(problems)


def explain(args: Namespace) -> Explanation:
    step = read_step(args)
    method = LaunchMethod.TRAIN if args.host in (None, TRAIN) else LaunchMethod.MEGATRON_LM
    if args.host in ROLLOUT_HOST_NAMES:
        method = LaunchMethod.REDUCER if args.policy_loss is None else LaunchMethod.CUSTOM_LOSS
    configs, left_out = shown_configs(args, method, step)
    counts = count_input(step, configs[0])
    weighings = [Weighing(config, counts) for config in configs]
    layout, chain = {name: vars(args)[name] or 1 for name in SIZES}, None
    if args.host in SETTINGS_NAMES:
        check_adapter(args.host, weighings[0], per_token=args.calculate_per_token_loss)
    if args.host is not None:
        chain = chain_of(args.host, weighings[0], layout, method, per_token=args.calculate_per_token_loss)
    return Explanation(
        step=step,
        counts=counts,
        weighings=weighings,
        assumes_divisor=args.loss_aggregation_divisor is None,
        host=args.host,
        layout=layout,
        chain=chain,
        warnings=config_warnings(configs[0]),
        left_out=[*step.notes, *left_out, *([NO_CHAIN] if chain is None else NOT_RUN)],
    )


def check_adapter(host: str, weighing: Weighing, *, per_token: bool) -> None:
    """Raises ConfigError for what the trainer does not take."""
    adapter = adapter_named(host)
    why = adapter.OFFER.refusal(get_policy_loss(weighing.config.policy_loss), weighing.record)
    problems = [] if why is None else [why]
    if per_token and adapter.WHY_NOT_PER_TOKEN is not None:
        problems.append(f"--calculate-per-token-loss with --host {host}: {adapter.WHY_NOT_PER_TOKEN}; remove it")
    if weighing.counts.has_fan_out and not adapter.COUNTS_ROLLOUTS:
        problems.append(f"rollouts of several samples with --host {host}: it counts rows; remove --host to see the step")
    if problems:
        raise ConfigError(problems)
