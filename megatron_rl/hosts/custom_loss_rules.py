"""What custom_loss would ignore if it were set: each option of a host that changes its policy loss. Judges; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config import Route
from megatron_rl.hosts.facts import Host
from megatron_rl.hosts.launch_facts import CONVERT_LINE, HostLaunch
from megatron_rl.hosts.rules import rule

# low_var_kl is k3; the hosts also clamp its value to 10, where its gradient then vanishes, and that clamp is left out.
KL_TYPES = ("k3", "low_var_kl")
# What both hosts take for --kl-loss-type when it is unset.
DEFAULT_KL_TYPE = "k1"


@rule
def loss_options_of_the_host_are_honoured(launch: HostLaunch) -> Iterator[str]:
    if launch.route != Route.CUSTOM_LOSS:
        return
    view = launch.view
    options = {
        f"--eps-clip-c {view['eps_clip_c']} (dual clip)": view["eps_clip_c"] is not None,
        "--use-opsm (off-policy sequence masking)": view["use_opsm"],
        "--get-mismatch-metrics": view["get_mismatch_metrics"],
        f"--custom-tis-function-path {view['custom_tis_function_path']}": view["use_tis"] and view["custom_tis_function_path"],
        "--use-unbiased-kl": view["use_kl_loss"] and view["use_unbiased_kl"],
        "--true-on-policy-mode": view["true_on_policy_mode"],
        f"--rollout-top-p {view['rollout_top_p']} (log-probabilities of the sampled nucleus alone)": (
            view.host == Host.SLIME and view["rollout_top_p"] != 1.0
        ),
    }
    for option, is_set in options.items():
        if is_set:
            yield (
                f"{option} is not implemented by megatron_rl.hooks.custom_loss, which would train as if it were not there: remove "
                "it, or train with the host's --loss-type policy_loss and megatron_rl.reducers.get_pg_loss_reducer"
            )


@rule
def kl_estimator_is_known(launch: HostLaunch) -> Iterator[str]:
    kl_type = launch.view["kl_loss_type"] or DEFAULT_KL_TYPE
    if launch.route == Route.CUSTOM_LOSS and launch.view["use_kl_loss"] and kl_type not in KL_TYPES:
        yield (
            f"--kl-loss-type {kl_type} with --use-kl-loss: megatron_rl.hooks.custom_loss has {' and '.join(KL_TYPES)}, two names "
            "of one estimator; set one of them"
        )


@rule
def converted_rollouts_are_divided_by_prompts(launch: HostLaunch) -> Iterator[str]:
    if launch.route == Route.CUSTOM_LOSS and launch.companion == "convert" and launch.is_per_token:
        yield (
            f"--calculate-per-token-loss with {CONVERT_LINE}: the host would divide by tokens what the converter has made a mean "
            "over prompts; remove one of them"
        )
