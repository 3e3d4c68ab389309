"""The launch that `megatron-rl explain` was asked about, as a host's arguments would say it; the host's rules alone judge it."""

from __future__ import annotations

from argparse import Namespace

from megatron_rl.aggregation_record import TOKEN_MEAN
from megatron_rl.arguments import given_settings
from megatron_rl.commands.explain.weights import judged_settings
from megatron_rl.commands.launch_config import LINES_OF_ROUTE, needs_companion
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import HOST_NAMES, ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import CONVERT_LINE, INIT_LINE, REWARD_LINE, HostLaunch, host_named, read_launch
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.companions import RolloutCounts
from megatron_rl.hosts.training_hooks import host_warnings
from megatron_rl.loss_hub import get_loss_aggregation
from megatron_rl.validation import field_of

TRAIN = "train"
HOSTS = (*HOST_NAMES, TRAIN)
# Whose loop calls our forward step: no reducer, no hook.
WITHOUT_ROUTES = (None, TRAIN, *(name for name in HOST_NAMES if name not in ROLLOUT_HOST_NAMES))
OWN_REDUCER = "host"
ROUTES = (str(Route.REDUCER), str(Route.CUSTOM_LOSS), OWN_REDUCER)
REWARD, CONVERT = "reward", "convert"
LINE_OF_COMPANION = {REWARD: REWARD_LINE, CONVERT: CONVERT_LINE}
# What makes several samples of a rollout in a host, whatever it is called there.
YOUR_GENERATE = "YOUR.generate"


def our_route(launch: HostLaunch) -> Route | None:
    """Which function of ours reduces the loss; None: the host's own does."""
    return launch.route if launch.has_reducer or launch.route == Route.CUSTOM_LOSS else None


def lines_beside_our_flags(launch: HostLaunch) -> list[str]:
    """What the launch line needs; none where nothing of ours is at work."""
    route = our_route(launch)
    lines = [] if launch.is_alone else [INIT_LINE, *(LINES_OF_ROUTE[route] if route else [])]
    return lines if launch.companion is None else [*lines, launch.companion_line]


def refusals_and_warnings(launch: HostLaunch, args: Namespace, num_masked: int) -> tuple[list[str], list[str]]:
    """(why this launch or step would be refused, what it would be warned about at start)."""
    problems, warnings, route = [], [], our_route(launch)
    if not launch.is_alone or args.loss_aggregation is not None:  # else nothing of ours looks at it
        try:
            warnings = host_warnings(*check_launch(args))
        except ConfigError as error:
            problems = list(error.problems)
    if num_masked and launch.is_per_token and route is not None:
        ours = "reducer" if route == Route.REDUCER else "loss"
        problems.append(
            f"fully masked samples ({num_masked}): under --calculate-per-token-loss the host counts one token for each (T'), "
            f"which shrinks the gradient, and our {ours} refuses such a step; drop them, or take {REWARD_LINE} in place of the "
            "flag"
        )
    return problems, warnings


def route_name(args: Namespace) -> str | None:
    """The converter goes with the host's own reducer; otherwise ours is what was asked for."""
    if args.host in WITHOUT_ROUTES:
        return None
    return args.route or (OWN_REDUCER if args.companion == CONVERT else ROUTES[0])


def route_of(args: Namespace) -> Route:
    """The route whose rules judge our flags."""
    if args.host in (None, TRAIN):
        return Route.TRAIN
    if args.host in WITHOUT_ROUTES:
        return host_named(args.host).routes[0]
    return Route.CUSTOM_LOSS if route_name(args) == Route.CUSTOM_LOSS else Route.REDUCER


def given_launch(
    args: Namespace, config: PolicyLossConfig, counts: RolloutCounts, *, has_step: bool
) -> tuple[Namespace, HostLaunch]:
    """A host's arguments, and what they ask for. The whole input is one step: what the hosts call a dynamic global batch. Without a
    step no size of it is judged."""
    route = None if route_name(args) == OWN_REDUCER else route_of(args)
    companion, totals = _companion(args, config, route), counts.totals
    if companion == CONVERT and totals.num_prompts is None:
        raise ConfigError("--companion convert makes a rollout of each prompt, and the step does not say which samples share one")
    host, layout = host_named(args.host), ("context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    launch = given_settings(args) | {name: vars(args)[name] for name in layout} | dict.fromkeys(host.own_options, False)
    if route is not None or companion is not None:
        launch["loss_aggregation"] = config.loss_aggregation
    launch |= {
        "advantage_estimator": config.policy_loss,
        "calculate_per_token_loss": args.calculate_per_token_loss,
        "global_batch_size": totals.num_samples if has_step else None,
        "rollout_batch_size": None,
        "n_samples_per_prompt": config.samples_per_prompt,
        "use_dynamic_global_batch_size": True,
    }
    if companion == CONVERT:  # a step of its is counted in prompts
        prompts = totals.num_prompts if has_step else None
        launch |= {"global_batch_size": prompts, "rollout_batch_size": prompts, "use_dynamic_global_batch_size": False}
    if counts.has_fan_out or config.one_sample_per_rollout:
        launch["custom_generate_function_path"] = YOUR_GENERATE
    for line in [*(LINES_OF_ROUTE[route] if route else []), LINE_OF_COMPANION.get(companion or "", "")]:
        words = line.split()
        launch |= dict(zip(map(field_of, words[::2]), words[1::2], strict=True))
    given = Namespace(**{host.option_names.get(name, name): value for name, value in launch.items()})
    return given, read_launch(given)


def _companion(args: Namespace, config: PolicyLossConfig, route: Route | None) -> str | None:
    """As asked for; else the hook that the aggregation needs on a route of ours."""
    if args.companion is not None:
        return None if args.companion == "none" else args.companion
    is_divided_later = args.calculate_per_token_loss and get_loss_aggregation(config.loss_aggregation).formula == TOKEN_MEAN
    needs_one = needs_companion(config) or config.one_sample_per_rollout
    return REWARD if needs_one and route is not None and not is_divided_later else None


def own_problems(args: Namespace, config: PolicyLossConfig) -> list[str]:
    """Why Megatron-LM with this flag would be refused; `train` has no per-token contract."""
    launch = {"loss_aggregation": config.loss_aggregation, "calculate_per_token_loss": args.calculate_per_token_loss}
    try:
        judged_settings(args, route_of(args), **launch)
    except ConfigError as error:
        return list(error.problems)
    return []
