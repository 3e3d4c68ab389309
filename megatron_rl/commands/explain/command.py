"""`megatron-rl explain`: flags, the step counted, weighed and sent down a chain, and what is printed or drawn."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.explain.chain import Chain, Layout, host_chain, own_chain
from megatron_rl.commands.explain.launch import (
    HOSTS,
    LINE_OF_COMPANION,
    NONE,
    ROUTES,
    TRAIN,
    WITHOUT_ROUTES,
    host_run,
    own_problems,
    route_name,
    route_of,
)
from megatron_rl.commands.explain.peers import DEEPSPEED, FRAMEWORKS, Equivalent, equivalents, framework
from megatron_rl.commands.explain.plot import check_plot, draw_weights
from megatron_rl.commands.explain.report import DeepSpeed, Explanation, as_json, as_text
from megatron_rl.commands.explain.step import StepInput, read_step
from megatron_rl.commands.explain.weights import Counts, Weighing, count, read_sample_losses, shown_configs, weigh
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, printable
from megatron_rl.loss_hub import loss_aggregation_names
from megatron_rl.validation import config_warnings

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
DEFAULT_CLIP_GRAD = 1.0


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What --host says of the launch. A refused one has a chain as far as it can be computed."""

    chain: Chain | None = None
    companion: str | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def explain(args: Namespace) -> Explanation:
    step = read_step(args)
    configs, left_out, is_assumed = shown_configs(args, route_of(args), step)
    if not step.is_given:  # the group size of a launch is none of the example's
        configs = [replace(config, samples_per_prompt=None) for config in configs]
    counts = count(step, configs[0])
    weighings = [weigh(config, counts, is_assumed=is_assumed) for config in configs]
    layout = Layout(**{name: vars(args)[option] or 1 for option, name in LAYOUT_FLAGS.items()})
    judged = Judged(warnings=config_warnings(configs[0]))
    if args.host is None:
        left_out.append(NO_CHAIN)
    else:
        judged = judge(args, step, configs[0], counts, weighings[0], layout)
        left_out += [NOT_RUN, MULTIPLIED if args.calculate_per_token_loss else UNTOUCHED] if judged.chain is not None else []
        left_out += [PHANTOMS] if args.calculate_per_token_loss and not step.is_given and args.host not in WITHOUT_ROUTES else []
    shows_words = args.framework is not None or (len(weighings) == 1 and args.host is None)
    return Explanation(
        step=step,
        counts=counts,
        weighings=weighings,
        policy_loss=configs[0].policy_loss,
        losses=read_sample_losses(args.sample_losses, counts.num_samples),
        host=args.host,
        route=route_name(args),
        companion=judged.companion,
        layout=layout,
        chain=judged.chain,
        problems=judged.problems,
        warnings=judged.warnings,
        launch_lines=judged.lines,
        equivalents=words(args, weighings, step, counts, layout) if shows_words else [],
        deepspeed=deepspeed(args, counts) if step.is_given and (shows_words or args.clip_grad is not None) else None,
        left_out=[*step.notes, *left_out],
        plot=args.plot,
    )


def judge(args: Namespace, step: StepInput, config: PolicyLossConfig, counts: Counts, weighing: Weighing, layout: Layout) -> Judged:
    if args.host in WITHOUT_ROUTES:
        own = own_chain(config, counts, weighing, layout, per_token=args.calculate_per_token_loss)
        return Judged(chain=own, problems=own_problems(args, config), warnings=config_warnings(config))
    launch = host_run(args, config, counts, has_step=step.is_given)
    problems, warnings = launch.judged(counts.num_masked)
    chain = host_chain(launch, counts, weighing, layout)
    return Judged(chain=chain, companion=launch.companion, problems=problems, warnings=warnings, lines=launch.lines)


def words(args: Namespace, weighings: list[Weighing], step: StepInput, counts: Counts, layout: Layout) -> list[Equivalent]:
    """The rows of one framework, or of all where they match the one aggregation that is shown."""
    frameworks = FRAMEWORKS if args.framework is None else (args.framework,)
    names = [weighing.name for weighing in weighings]
    sizes = (counts.totals.num_samples, layout.data, layout.num_microbatches) if step.is_given else None
    divisor = weighings[-1].divisor or float(step.longest)
    return equivalents(frameworks, [*loss_aggregation_names(), None] if args.framework else names, divisor, sizes)


def deepspeed(args: Namespace, counts: Counts) -> DeepSpeed | None:
    if args.framework not in (None, DEEPSPEED) and args.clip_grad is None:
        return None
    clip = DEFAULT_CLIP_GRAD if args.clip_grad is None else args.clip_grad
    factor, has_flag = 1 / counts.totals.num_samples, route_name(args) is None
    return DeepSpeed(
        gradient_factor=factor,
        clip_grad_with_divisor=clip if has_flag else None,
        clip_grad_without_divisor=clip / factor,
    )
