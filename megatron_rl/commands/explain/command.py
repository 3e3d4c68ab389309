"""`megatron-rl explain`: what each token of a step weighs, before anything is launched; it must never weight a token by itself."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.explain.chain import Chain, Layout, gradient_divisor_factor, host_chain, own_chain
from megatron_rl.commands.explain.input import StepInput, read_step
from megatron_rl.commands.explain.launch import HOSTS, ROUTES, TRAIN, host_run, own_problems, route_of
from megatron_rl.commands.explain.peers import FRAMEWORKS, equivalents
from megatron_rl.commands.explain.plot import draw_weights
from megatron_rl.commands.explain.report import Explanation, as_json, as_text
from megatron_rl.commands.explain.weights import Counts, Weighing, count, read_sample_losses, shown_configs, weigh
from megatron_rl.config import LossAggregation, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.facts import Host
from megatron_rl.validation import config_warnings

LAYOUT_FLAGS = {
    "tensor_model_parallel_size": "tensor",
    "context_parallel_size": "context",
    "pipeline_model_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "num_microbatches": "num_microbatches",
}
NOT_RUN = (
    "a measurement: the factors of the schedule, DDP and finalize_model_grads are those of Megatron-Core 0.13 to 0.19, and none of "
    "them was run; `torchrun ... -m megatron_rl selftest` runs the installed ones"
)
UNTOUCHED = "auxiliary losses of MoE and MTP: Megatron scales them by itself and nothing here touches them"


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    add_megatron_rl_args(parser)
    step = parser.add_argument_group(title="the step, from one of three sources")
    step.add_argument("--response-lengths", metavar="LIST", help="Tokens of each response, as in 3,5,8.")
    step.add_argument("--prompt-ids", metavar="LIST", help="The prompt of each response, as in a,a,b.")
    step.add_argument("--loss-masks", metavar="LIST", help="A digit a token, as in 110,11111,00000000. Default: all 1.")
    step.add_argument("--rollouts", metavar="FILE", help="JSON lines of `megatron-rl train --save-rollouts`.")
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
    for name in LAYOUT_FLAGS:
        flag = f"--{name.replace('_', '-')}"
        host.add_argument(
            flag, type=int, metavar="SIZE", help="Default: 1." if name != "num_microbatches" else "Of each rank. Default: 1."
        )
    host.add_argument("--calculate-per-token-loss", action="store_true", help="The launch sets Megatron's flag of that name.")
    output = parser.add_argument_group(title="output")
    output.add_argument(
        "--framework", choices=FRAMEWORKS, help="How to reproduce this framework's settings. Default: all that match."
    )
    output.add_argument("--clip-grad", type=float, default=1.0, metavar="NORM", help="Your value under DeepSpeed. Default: 1.0.")
    output.add_argument("--rows", type=int, default=16, metavar="COUNT", help="Samples and prompts to print. Default: 16.")
    output.add_argument("--plot", metavar="PNG", help="A picture of shares and weights; needs matplotlib.")
    output.add_argument("--json", action="store_true", help="Print one JSON object instead.")


def run(args: Namespace) -> int:
    check_flags(args)
    explanation = explain(args)
    if args.plot is not None:
        draw_weights(explanation, args.plot)
    if args.json:
        print(json.dumps(as_json(explanation)))
    else:
        for line in explanation.warnings:
            print(f"megatron_rl: {line}", file=sys.stderr)
        as_text(explanation, args.rows)
    return 0


def check_flags(args: Namespace) -> None:
    """No flag that is given does nothing; every problem at once."""
    problems = []
    layout = [name for name in LAYOUT_FLAGS if vars(args)[name] is not None]
    needs_host = [f"--{name.replace('_', '-')}" for name in layout]
    needs_host += ["--route"] if args.route is not None else []
    needs_host += ["--calculate-per-token-loss"] if args.calculate_per_token_loss else []
    if args.host is None and needs_host:
        problems.append(
            f"{', '.join(needs_host)} without --host: a chain of factors belongs to a host; give one of {', '.join(HOSTS)}"
        )
    if args.host in (TRAIN, Host.MEGATRON_LM) and args.route is not None:
        problems.append(f"--route {args.route} with --host {args.host}: only miles and slime have several routes; remove it")
    if args.host == TRAIN and args.calculate_per_token_loss:
        problems.append("--calculate-per-token-loss with --host train: `megatron-rl train` has no such flag; remove it")
    problems += [
        f"--{name.replace('_', '-')} {vars(args)[name]} must be at least 1" for name in [*layout, "rows"] if vars(args)[name] < 1
    ]
    if not 0 < args.clip_grad < float("inf"):
        problems.append(f"--clip-grad {args.clip_grad} must be a finite number above 0")
    if problems:
        raise ConfigError(problems)


def explain(args: Namespace) -> Explanation:
    step = read_step(args)
    configs, left_out, is_assumed = shown_configs(args, route_of(args), step)
    counts = count(step, configs[0])
    weighings = [weigh(config, counts, is_assumed=is_assumed) for config in configs]
    layout = Layout(**{field: vars(args)[name] or 1 for name, field in LAYOUT_FLAGS.items()})
    chain, problems, lines = None, [], []
    if args.host is None:
        left_out.append("the chain of factors from weight to gradient: --host and the layout give it")
    else:
        chain, problems, lines = chain_of(args, step, configs[0], counts, weighings[0], layout)
        left_out += [NOT_RUN, UNTOUCHED] if chain is not None else []
    names = [weighing.name for weighing in weighings]
    divisor = weighings[-1].divisor or float(step.longest)
    frameworks = FRAMEWORKS if args.framework is None else (args.framework,)
    return Explanation(
        step=step,
        counts=counts,
        weighings=weighings,
        policy_loss=configs[0].policy_loss,
        losses=read_sample_losses(args.sample_losses, len(step.masks)),
        host=args.host,
        route=None if args.host in (None, TRAIN, Host.MEGATRON_LM) else args.route or ROUTES[0],
        layout=layout,
        chain=chain,
        problems=problems,
        launch_lines=lines,
        equivalents=equivalents(
            frameworks,
            [*LossAggregation, None] if args.framework else names,
            divisor,
            counts.totals.num_samples,
            layout.data,
        ),
        shows_equivalents=args.framework is not None or (len(weighings) == 1 and args.host is None),
        gradient_divisor_factor=gradient_divisor_factor(counts),
        clip_grad=args.clip_grad,
        warnings=config_warnings(configs[0]) if len(configs) == 1 else [],
        left_out=[*step.notes, *left_out],
        plot=args.plot,
    )


def chain_of(
    args: Namespace, step: StepInput, config: PolicyLossConfig, counts: Counts, weighing: Weighing, layout: Layout
) -> tuple[Chain | None, list[str], list[str]]:
    """(chain, why the launch would be refused, lines that it needs). A refused launch has a chain as far as it can be computed."""
    if args.host in (TRAIN, Host.MEGATRON_LM):
        chain = own_chain(config, counts, weighing, layout, per_token=args.calculate_per_token_loss)
        return chain, own_problems(args, config), []
    launch = host_run(args, config, counts.totals.num_samples)
    problems = [*launch.problems(), *launch.problems_with(counts.num_masked)]
    if config.loss_aggregation not in list(LossAggregation):
        return None, problems, []
    try:
        return host_chain(launch, step, counts, weighing, layout), problems, launch.lines
    except (ConfigError, DataError) as error:
        return None, [*problems, str(error)], launch.lines
