"""The launch that `megatron-rl explain` was asked about, as a host's arguments would say it; the host's rules alone judge it."""

from __future__ import annotations

from argparse import Namespace

from megatron_rl.arguments import given_settings
from megatron_rl.commands.launch_config import LINES_OF_ROUTE, needs_reward_hook
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES, ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import CONVERT_LINE, INIT_LINE, REWARD_LINE, HostLaunch, host_named, read_launch
from megatron_rl.hosts.checks import HOMOGENEOUS_ESTIMATORS, check_launch, host_warnings
from megatron_rl.hosts.companions import HostCounts
from megatron_rl.validation import field_of

TRAIN = "train"
HOSTS = (*HOST_NAMES, *DOOR_NAMES, TRAIN)
# Whose loop calls our forward step: no reducer, no hook.
WITHOUT_ROUTES = (None, TRAIN, *DOOR_NAMES, *(name for name in HOST_NAMES if name not in ROLLOUT_HOST_NAMES))
OWN_REDUCER = "host"
ROUTES = (str(Route.REDUCER), str(Route.CUSTOM_LOSS), OWN_REDUCER)
REWARD, CONVERT, NO_COMPANION = "reward", "convert", "none"
LINES_OF_COMPANION = {REWARD: [REWARD_LINE], CONVERT: [CONVERT_LINE], NO_COMPANION: []}


def our_route(launch: HostLaunch) -> Route | None:
    """Which function of megatron_rl reduces the loss; None: the host's own does."""
    return launch.route if launch.has_reducer or launch.route == Route.CUSTOM_LOSS else None


def refusals_and_warnings(launch: HostLaunch, args: Namespace, num_masked: int) -> tuple[list[str], list[str]]:
    """(why this launch or step would be refused, what it would be warned about at start)."""
    problems, warnings, route = [], [], our_route(launch)
    if not launch.is_alone or args.loss_aggregation is not None:  # else nothing of megatron_rl looks at it
        try:
            warnings = host_warnings(check_launch(args)[1])
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
    if args.host in DOOR_NAMES:  # settings of a trainer of its own, as Megatron-LM is
        return Route.MEGATRON_LM
    if args.host in WITHOUT_ROUTES:
        return host_named(args.host).routes[0]
    return Route.CUSTOM_LOSS if route_name(args) == Route.CUSTOM_LOSS else Route.REDUCER


def given_launch(args: Namespace, config: PolicyLossConfig, counts: HostCounts) -> tuple[Namespace, HostLaunch, list[str]]:
    """A host's arguments, what they ask for, and the hooks among them as lines, none where nothing of megatron_rl is at work.

    The whole input is one step: what the hosts call a dynamic global batch.
    """
    route, companion, totals = None if route_name(args) == OWN_REDUCER else route_of(args), args.companion, counts.totals
    if companion is None:
        needs_one = route is not None and needs_reward_hook(config, per_token=args.calculate_per_token_loss)
        companion = REWARD if needs_one else NO_COMPANION
    if companion == CONVERT and totals.num_prompts is None:
        raise ConfigError("--companion convert makes a rollout of each prompt, and the step does not say which samples share one")
    host, layout = host_named(args.host), ("context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    launch = given_settings(args) | {name: vars(args)[name] for name in layout} | dict.fromkeys(host.own_options, False)
    lines = [*(LINES_OF_ROUTE[route] if route else []), *LINES_OF_COMPANION[companion]]
    if lines:
        lines = [INIT_LINE, *lines]
        launch["loss_aggregation"] = config.loss_aggregation
    launch |= {
        # Hosts have estimators of a few names; beside another loss of megatron_rl a launch line has grpo.
        "advantage_estimator": config.policy_loss if config.policy_loss in HOMOGENEOUS_ESTIMATORS else "grpo",
        "calculate_per_token_loss": args.calculate_per_token_loss,
        "global_batch_size": totals.num_samples,
        "rollout_batch_size": None,
        "n_samples_per_prompt": config.samples_per_prompt,
        "use_dynamic_global_batch_size": True,
    }
    if companion == CONVERT:  # a step of its is counted in prompts
        sizes = dict.fromkeys(("global_batch_size", "rollout_batch_size"), totals.num_prompts)
        launch |= {**sizes, "use_dynamic_global_batch_size": False}
    if counts.has_fan_out or config.one_sample_per_rollout:
        launch["custom_generate_function_path"] = "YOUR.generate"  # whatever it is called
    words = " ".join(lines).split()
    launch |= dict(zip(map(field_of, words[::2]), words[1::2], strict=True))
    given = Namespace(**{host.option_names.get(name, name): value for name, value in launch.items()})
    return given, read_launch(given), lines
