"""The launch that `megatron-rl explain` was asked about, as a host's arguments would say it; only the host's rules judge it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields

from megatron_rl.arguments import validate_megatron_rl_args
from megatron_rl.commands.launch_config import NEED_COMPANION
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import custom_loss_rules  # noqa: F401  (adds its rules)
from megatron_rl.hosts.facts import Host
from megatron_rl.hosts.launch_facts import CUSTOM_LOSS_LINE, REDUCER_LINE, REWARD_LINE
from megatron_rl.hosts.rules import check_launch

TRAIN = "train"
HOSTS = (*(str(host) for host in Host), TRAIN)
OWN_REDUCER = "host"
ROUTES = (str(Route.REDUCER), str(Route.CUSTOM_LOSS), OWN_REDUCER)
LINE_OF_ROUTE = {Route.REDUCER: REDUCER_LINE, Route.CUSTOM_LOSS: CUSTOM_LOSS_LINE, None: None}


@dataclass(frozen=True, slots=True)
class HostRun:
    """miles or slime with our settings. route None: nothing of ours reduces the loss."""

    host: Host
    route: Route | None
    args: Namespace
    config: PolicyLossConfig

    @property
    def is_per_token(self) -> bool:
        return self.args.calculate_per_token_loss

    @property
    def has_companion(self) -> bool:
        return self.args.custom_reward_post_process_path is not None

    @property
    def lines(self) -> list[str]:
        """What the launch line needs beside our flags."""
        lines = [LINE_OF_ROUTE[self.route], REWARD_LINE if self.has_companion else None]
        return [line for line in lines if line is not None]

    def problems(self) -> list[str]:
        """Why this launch would be refused."""
        try:
            check_launch(self.args)
        except ConfigError as error:
            return list(error.problems)
        return []

    def problems_with(self, num_masked: int) -> list[str]:
        """Why the reducer would refuse this step: as get_pg_loss_reducer does at the first micro-batch."""
        if not (num_masked and self.is_per_token and self.route == Route.REDUCER):
            return []
        return [
            f"fully masked samples ({num_masked}): under --calculate-per-token-loss the host counts one token for each (T'), which "
            "shrinks the gradient, and our reducer refuses such a step; drop them, or take "
            f"{REWARD_LINE} in place of the flag"
        ]


def route_of(args: Namespace) -> Route:
    """The route whose rules judge our flags."""
    if args.host in (None, TRAIN):
        return Route.TRAIN
    if args.host == Host.MEGATRON_LM:
        return Route.MEGATRON_LM
    return Route.CUSTOM_LOSS if args.route == Route.CUSTOM_LOSS else Route.REDUCER


def host_run(args: Namespace, config: PolicyLossConfig, num_samples: int) -> HostRun:
    """The whole input is one step: what the hosts call a dynamic global batch."""
    route = None if args.route == OWN_REDUCER else route_of(args)
    per_token = args.calculate_per_token_loss
    needs_companion = config.loss_aggregation in NEED_COMPANION and not (per_token and config.loss_aggregation == "token_mean")
    paths = dict.fromkeys(
        ("custom_pg_loss_reducer_function_path", "custom_loss_function_path", "custom_reward_post_process_path"), None
    )
    launch = {field.name: vars(args)[field.name] for field in fields(PolicyLossConfig)}
    launch |= {"loss_aggregation": config.loss_aggregation, **paths, "loss_type": "policy_loss"}
    launch |= {
        "advantage_estimator": config.policy_loss,
        "calculate_per_token_loss": per_token,
        "context_parallel_size": args.context_parallel_size or 1,
        "tensor_model_parallel_size": args.tensor_model_parallel_size or 1,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size or 1,
        "global_batch_size": num_samples,
        "rollout_batch_size": None,
        "n_samples_per_prompt": config.samples_per_prompt,
        "use_dynamic_global_batch_size": True,
    }
    if args.host == Host.MILES:
        launch["allow_partial_train_step"] = False  # an option of miles alone, by which it is known
    lines = [LINE_OF_ROUTE[route], REWARD_LINE if needs_companion and route is not None else None]
    for line in lines:
        words = line.split() if line else []
        launch |= {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    return HostRun(Host(args.host), route, Namespace(**launch), config)


def own_problems(args: Namespace, config: PolicyLossConfig) -> list[str]:
    """Why Megatron-LM with this flag would be refused; `train` has no per-token contract."""
    given = {field.name: vars(args)[field.name] for field in fields(PolicyLossConfig)}
    given |= {"loss_aggregation": config.loss_aggregation, "calculate_per_token_loss": args.calculate_per_token_loss}
    try:
        validate_megatron_rl_args(Namespace(**given), route_of(args))
    except ConfigError as error:
        return list(error.problems)
    return []
