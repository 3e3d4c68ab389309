"""The launch that `megatron-rl explain` was asked about, as a host's arguments would say it; the host's rules alone judge it."""

from __future__ import annotations

from argparse import Namespace

from megatron_rl.arguments import given_settings
from megatron_rl.commands.launch_config import LINES_OF_ROUTE, needs_reward_hook
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import HOST_NAMES, ROLLOUT_HOST_NAMES, SETTINGS_NAMES
from megatron_rl.hosts.args import INIT_LINE, REWARD_LINE, HostLaunch, host_named, read_launch
from megatron_rl.hosts.checks import HOMOGENEOUS_ESTIMATORS, check_launch, launch_warnings
from megatron_rl.hosts.rewards import HostCounts
from megatron_rl.validation import field_of

TRAIN = "train"
HOSTS = (*HOST_NAMES, *SETTINGS_NAMES, TRAIN)
# Whose loop calls our forward step: no reducer, no hook.
WITHOUT_ROUTES = (None, TRAIN, *SETTINGS_NAMES, *(name for name in HOST_NAMES if name not in ROLLOUT_HOST_NAMES))
OWN_REDUCER = "host"
ROUTES = (str(Route.REDUCER), str(Route.CUSTOM_LOSS), OWN_REDUCER)
REWARD, NO_COMPANION = "reward", "none"


def our_route(launch: HostLaunch) -> Route | None:
    """Which function of megatron_rl reduces the loss; None: the host's own does."""
    return launch.route if launch.has_reducer or launch.has_our_loss else None


def refusals_and_warnings(launch: HostLaunch, args: Namespace, num_masked: int) -> tuple[list[str], list[str]]:
    """(why this launch or step would be refused, what it would be warned about at start)."""
    problems, warnings, route = [], [], our_route(launch)
    if not launch.is_alone or args.loss_aggregation is not None:  # else nothing of megatron_rl looks at it
        try:
            warnings = launch_warnings(check_launch(args))
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
    return None if args.host in WITHOUT_ROUTES else args.route or ROUTES[0]


def route_of(args: Namespace) -> Route:
    """The route whose rules judge our flags."""
    if args.host in (None, TRAIN):
        return Route.TRAIN
    if args.host in WITHOUT_ROUTES:  # settings of a trainer of its own, as Megatron-LM is
        return Route.MEGATRON_LM
    return Route.CUSTOM_LOSS if route_name(args) == Route.CUSTOM_LOSS else Route.REDUCER


def given_launch(args: Namespace, config: PolicyLossConfig, counts: HostCounts) -> tuple[Namespace, HostLaunch, list[str]]:
    """A host's arguments, what they ask for, and the hooks among them as lines, none where nothing of megatron_rl is at work.

    The whole input is one step.
    """
    route, companion, totals = None if route_name(args) == OWN_REDUCER else route_of(args), args.companion, counts.totals
    if companion is None:
        needs_one = route is not None and needs_reward_hook(config, per_token=args.calculate_per_token_loss)
        companion = REWARD if needs_one else NO_COMPANION
    layout = ("context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    launch = given_settings(args) | {name: vars(args)[name] for name in layout} | dict.fromkeys(host_named(args.host).marks, False)
    lines = [*(LINES_OF_ROUTE[route] if route else []), *([REWARD_LINE] if companion == REWARD else [])]
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
        "num_steps_per_rollout": 1,
    }
    if counts.has_fan_out:
        launch["custom_generate_function_path"] = "YOUR.generate"  # whatever it is called
    words = " ".join(lines).split()
    launch |= dict(zip(map(field_of, words[::2]), words[1::2], strict=True))
    given = Namespace(**launch)
    return given, read_launch(given), lines
