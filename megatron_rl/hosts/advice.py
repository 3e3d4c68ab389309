"""Warnings about launches that run and rarely mean what they say; they never stop one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.config import SEQUENCE_CLIP_RATIO_WARNING, PolicyLossConfig, Route
from megatron_rl.hosts.facts import Host, HostArgs, names_ours
from megatron_rl.hosts.launch_facts import CUSTOM_LOSS_LINE, INIT_LINE, HostLaunch
from megatron_rl.loss_hub import clip_of, get_policy_loss, policy_loss_names
from megatron_rl.validation import config_warnings, flag_of


def host_warnings(config: PolicyLossConfig, launch: HostLaunch) -> list[str]:
    """What a launch without problems should be told, once, at start: config_warnings and what the host adds."""
    if launch.route == Route.CUSTOM_LOSS:
        # The clips are the host's flags, which are never unset: config_warnings would speak of ours.
        others = config_warnings(replace(config, clip_ratio_low=None, clip_ratio_high=None))
        return [*_clip_warning(config, launch), *others, *_advice_on_any_route(launch)]
    return [*_clip_warning(config, launch), *_regularizer_warnings(config, launch), *_unseen(launch), *_advice_on_any_route(launch)]


def without_init_hook(view: HostArgs) -> Iterator[str]:
    """What a launch that the launcher has judged loses without the hook. The FSDP backend of miles calls none."""
    path = view["custom_megatron_init_path"]
    if view["train_backend"] == "megatron" and not names_ours(path, "custom_megatron_init"):
        flag, _, hook = INIT_LINE.partition(" ")
        what = f"{flag} {path} is not ours: call {hook} in it" if path else f"no {flag} is on the launch line: add {INIT_LINE}"
        yield (
            f"{what}. Without it no training actor is checked: no probe of the installed Megatron, no line at start, no look at "
            "the process groups"
        )


def _clip_warning(config: PolicyLossConfig, launch: HostLaunch) -> Iterator[str]:
    view = launch.view
    loss, low = view["advantage_estimator"], view["eps_clip"]
    high = low if view["eps_clip_high"] is None else view["eps_clip_high"]
    if launch.route == Route.CUSTOM_LOSS:
        loss, (low, high) = config.policy_loss, clip_of(config) or (None, None)
    asked_by = "--policy-loss" if launch.route == Route.CUSTOM_LOSS and view.ours("policy_loss") else "--advantage-estimator"
    is_sequence = loss in policy_loss_names() and get_policy_loss(loss).level == "sequence"
    if is_sequence and low is not None and max(low, high) > SEQUENCE_CLIP_RATIO_WARNING:
        yield (
            f"--eps-clip {low:g}, --eps-clip-high {high:g} with {asked_by} {loss} will hardly ever clip: the ratio is a "
            f"geometric mean over the sample, which does not move by {SEQUENCE_CLIP_RATIO_WARNING:g}; the paper's values are "
            "--eps-clip 3e-4 --eps-clip-high 4e-4"
        )


def _regularizer_warnings(config: PolicyLossConfig, launch: HostLaunch) -> list[str]:
    """The host's KL and entropy terms keep the host's scale, which is sample_mean's; under the converter all terms move alike."""
    view = launch.view
    if launch.companion == "convert":
        return []
    kl = view["kl_loss_coef"] if view["use_kl_loss"] else 0.0
    plain = replace(PolicyLossConfig(), loss_aggregation=config.loss_aggregation)
    terms = replace(
        plain,
        loss_aggregation_divisor=config.loss_aggregation_divisor,
        kl_coefficient=kl,
        entropy_coefficient=view["entropy_coef"],
    )
    return [f"{line} (--kl-loss-coef, --entropy-coef)" for line in config_warnings(terms)]


def _unseen(launch: HostLaunch) -> Iterator[str]:
    if launch.has_reducer and launch.view["loss_type"] == "custom_loss":
        yield (
            f"--custom-loss-function-path {launch.view['custom_loss_function_path']}: our reducer is called only if that function "
            "delegates to the host's policy loss"
        )


def _advice_on_any_route(launch: HostLaunch) -> Iterator[str]:
    view, cp_size = launch.view, launch.view["context_parallel_size"]
    is_host_gspo = view["advantage_estimator"] == "gspo" and view["loss_type"] == "policy_loss"
    if is_host_gspo and view["allgather_cp"] and cp_size > 1:
        yield (
            f"--advantage-estimator gspo with --allgather-cp and --context-parallel-size {cp_size}: a rank without a response "
            f"token of a micro-batch skips a collective of the host's backward, and the others wait for it; use {CUSTOM_LOSS_LINE}"
        )
    own = launch.own_rollout_functions
    if own and view["use_dynamic_global_batch_size"] and launch.companion is None and not launch.is_per_token:
        options = ", ".join(f"{flag_of(option)} {path}" for option, path in own.items())
        yield (
            f"--use-dynamic-global-batch-size with {options}: {view.host} then divides by the samples of a step and not by its "
            "rollouts, so that every weight shrinks where a rollout has several samples"
        )
    if view.host == Host.MILES and view["normalize_advantages"] and cp_size > 1:
        yield (
            f"--normalize-advantages with --context-parallel-size {cp_size} in miles: whitening takes mean and deviation over the "
            "ranks without context parallelism, so the halves of one sample are whitened differently (radixark/miles#3229)"
        )
