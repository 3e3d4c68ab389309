"""What a launch without problems is told once, at start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.config import SEQUENCE_CLIP_RATIO_WARNING, PolicyLossConfig, Route
from megatron_rl.hosts.base import HostLaunch
from megatron_rl.hosts.checks import checks_of
from megatron_rl.loss_hub import clip_of, get_policy_loss, policy_loss_names
from megatron_rl.validation import config_warnings


def host_warnings(config: PolicyLossConfig, launch: HostLaunch) -> list[str]:
    """What a launch without problems should be told, once, at start: config_warnings and what the host adds."""
    if launch.route == Route.CUSTOM_LOSS:
        # The clips are the host's flags, which are never unset: config_warnings would name our flags instead.
        others = config_warnings(replace(config, clip_ratio_low=None, clip_ratio_high=None))
    else:
        others = _regularizer_warnings(config, launch)
    return [
        *_clip_warning(config, launch),
        *others,
        *(text for one in checks_of(launch) if one.is_warning for text in one.find(launch)),
    ]


def _clip_warning(config: PolicyLossConfig, launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    loss, low = options["advantage_estimator"], options["eps_clip"]
    high = low if options["eps_clip_high"] is None else options["eps_clip_high"]
    if launch.route == Route.CUSTOM_LOSS:
        loss, (low, high) = config.policy_loss, clip_of(config) or (None, None)
    asked_by = "--policy-loss" if launch.route == Route.CUSTOM_LOSS and options.ours("policy_loss") else "--advantage-estimator"
    is_sequence = loss in policy_loss_names() and get_policy_loss(loss).level == "sequence"
    if is_sequence and low is not None and max(low, high) > SEQUENCE_CLIP_RATIO_WARNING:
        yield (
            f"--eps-clip {low:g}, --eps-clip-high {high:g} with {asked_by} {loss} will hardly ever clip: the ratio is a "
            f"geometric mean over the sample, which does not move by {SEQUENCE_CLIP_RATIO_WARNING:g}; the paper's values are "
            "--eps-clip 3e-4 --eps-clip-high 4e-4"
        )
    elif launch.route == Route.CUSTOM_LOSS and options.ours("policy_loss") and low is not None:
        declared = get_policy_loss(loss).clip_ratios
        left_alone = options["eps_clip_high"] is None and low == options.host.parser_defaults.get("eps_clip")
        if left_alone and declared is not None and declared != (low, high):
            yield (
                f"--eps-clip {low:g}, --eps-clip-high {high:g} act on --policy-loss {loss}, because the host fills them in; the "
                f"loss's own values are --eps-clip {declared[0]:g} --eps-clip-high {declared[1]:g}"
            )


def _regularizer_warnings(config: PolicyLossConfig, launch: HostLaunch) -> list[str]:
    """The host's KL and entropy terms keep the host's scale, which is sample_mean's; under the converter all terms move alike."""
    options = launch.options
    if launch.companion == "convert":
        return []
    kl = options["kl_loss_coef"] if options["use_kl_loss"] else 0.0
    plain = replace(PolicyLossConfig(), loss_aggregation=config.loss_aggregation)
    terms = replace(
        plain,
        loss_aggregation_divisor=config.loss_aggregation_divisor,
        kl_coefficient=kl,
        entropy_coefficient=options["entropy_coef"],
    )
    return [f"{line} (--kl-loss-coef, --entropy-coef)" for line in config_warnings(terms)]
