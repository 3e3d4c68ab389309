"""From the flags of `megatron-rl explain` to what it says: the step counted, weighed and sent down a chain. It never prints."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field, replace

from megatron_rl.commands.explain.chain import Chain, host_chain, own_chain
from megatron_rl.commands.explain.factors import Layout, gradient_divisor_factor
from megatron_rl.commands.explain.input import read_step
from megatron_rl.commands.explain.launch import WITHOUT_ROUTES, host_run, own_problems, route_name, route_of
from megatron_rl.commands.explain.peers import DEEPSPEED, FRAMEWORKS, Equivalent, equivalents
from megatron_rl.commands.explain.report import DeepSpeed, Explanation
from megatron_rl.commands.explain.step import StepInput
from megatron_rl.commands.explain.weights import Counts, Weighing, count, read_sample_losses, shown_configs, weigh
from megatron_rl.config import LossAggregation, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.validation import config_warnings

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
        chain = own_chain(config, counts, weighing, layout, per_token=args.calculate_per_token_loss)
        return Judged(chain=chain, problems=own_problems(args, config), warnings=config_warnings(config))
    launch = host_run(args, config, counts, has_step=step.is_given)
    problems, warnings = launch.judged()
    problems += launch.problems_with(counts.num_masked)
    chain = None
    # An aggregation of a user's own is refused in a host, and no formula is known of it.
    if config.loss_aggregation in list(LossAggregation):
        try:
            chain = host_chain(launch, step, counts, weighing, layout)
        except (ConfigError, DataError) as error:
            problems = problems or [str(error)]
    return Judged(chain=chain, companion=launch.companion, problems=problems, warnings=warnings, lines=launch.lines)


def words(args: Namespace, weighings: list[Weighing], step: StepInput, counts: Counts, layout: Layout) -> list[Equivalent]:
    """The rows of one framework, or of all where they match the one aggregation that is shown."""
    frameworks = FRAMEWORKS if args.framework is None else (args.framework,)
    names = [weighing.name for weighing in weighings]
    sizes = (counts.totals.num_samples, layout.data, layout.num_microbatches) if step.is_given else None
    divisor = weighings[-1].divisor or float(step.longest)
    return equivalents(frameworks, [*LossAggregation, None] if args.framework else names, divisor, sizes)


def deepspeed(args: Namespace, counts: Counts) -> DeepSpeed | None:
    if args.framework not in (None, DEEPSPEED) and args.clip_grad is None:
        return None
    clip = DEFAULT_CLIP_GRAD if args.clip_grad is None else args.clip_grad
    factor, has_flag = gradient_divisor_factor(counts), route_name(args) is None
    return DeepSpeed(
        gradient_factor=factor,
        clip_grad_with_divisor=clip if has_flag else None,
        clip_grad_without_divisor=clip / factor,
    )
