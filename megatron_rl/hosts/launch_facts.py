"""What the rules may know of a launch in a host, read once; nothing here judges and nothing is changed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_rl.aggregation import StepTotals
from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.facts import HostArgs, companion_of, names_ours
from megatron_rl.loss_hub import get_loss_aggregation

INIT_LINE = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"
REDUCER_LINE = f"{REDUCER_FLAG} megatron_rl.reducers.get_pg_loss_reducer"
REWARD_LINE = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
CONVERT_LINE = "--custom-convert-samples-to-train-data-path megatron_rl.hooks.convert_samples_to_train_data"
CUSTOM_LOSS_LINE = "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss"

# What the hosts put into --rollout-function-path by themselves: each makes one sample of a rollout.
ROLLOUT_FUNCTIONS_OF_HOSTS = (
    "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",
    "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn",
    "miles.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.sglang_rollout.generate_rollout",
)

# The host divides by the step's rollouts, or by its tokens under the per-token contract, after we have returned: each is 1 here.
HOST_DIVIDES = StepTotals(num_samples=1, num_prompts=None, num_tokens=1)


DEFAULT_AGGREGATION = PolicyLossConfig().loss_aggregation


def aggregation_name(view: HostArgs) -> object:
    given = view.ours("loss_aggregation")
    return DEFAULT_AGGREGATION if given is None else given


def aggregation_record(view: HostArgs) -> AggregationRecord | None:
    """None for a wrong name: validation says what is wrong with it."""
    try:
        return get_loss_aggregation(aggregation_name(view))
    except ConfigError:
        return None


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """route: which of ours reduces the loss. Where the host's own reducer does, on samples that a companion has weighted, the
    settings in force are those of the reducer route."""

    view: HostArgs
    route: Route
    has_reducer: bool
    """Our reducer is on the launch line, or is the one that asks."""

    @property
    def aggregation(self) -> object:
        return aggregation_name(self.view)

    @property
    def record(self) -> AggregationRecord | None:
        return aggregation_record(self.view)

    @property
    def companion(self) -> str | None:
        return companion_of(self.view)

    @property
    def is_per_token(self) -> bool:
        return self.view["calculate_per_token_loss"]

    @property
    def masks_change_later(self) -> bool:
        """A custom importance-sampling function may reject tokens after the counts were taken; the built-in one does not."""
        is_at_work = self.view["use_tis"] or self.view["get_mismatch_metrics"]
        return bool(is_at_work and self.view["custom_tis_function_path"])

    @property
    def own_rollout_functions(self) -> dict[str, str]:
        """Those of the user's, by option: each may return several samples for one rollout."""
        options = ("custom_generate_function_path", "rollout_function_path")
        paths = {option: self.view[option] for option in options}
        return {option: path for option, path in paths.items() if path and path not in ROLLOUT_FUNCTIONS_OF_HOSTS}

    @property
    def is_alone(self) -> bool:
        """Nothing of ours reduces the loss or weights the samples."""
        return self.route == Route.REDUCER and not self.has_reducer and self.companion is None


def read_launch(args: Namespace, route: Route | None = None) -> HostLaunch:
    """`route` is what asks, where the reducer or custom_loss asks; None: what the launch line says."""
    view = HostArgs(args)
    if route is None:
        is_custom_loss = view["loss_type"] == "custom_loss" and names_ours(view["custom_loss_function_path"], "custom_loss")
        has_reducer = names_ours(view["custom_pg_loss_reducer_function_path"], "get_pg_loss_reducer")
        return HostLaunch(view, Route.CUSTOM_LOSS if is_custom_loss else Route.REDUCER, has_reducer)
    return HostLaunch(view, route, has_reducer=route == Route.REDUCER)
