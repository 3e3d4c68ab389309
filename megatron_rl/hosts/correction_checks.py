"""What a launch's importance-sampling function does to tokens that are counted, and to weights: refusals and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config import Route
from megatron_rl.hosts.base import CUSTOM_LOSS_LINE, HostLaunch
from megatron_rl.hosts.flags import (
    MIS_FUNCTION,
    MIS_SETTINGS,
    is_mis,
    known_correction,
    normalised_weights,
    unjudged_correction,
)
from megatron_rl.validation.checks import check


@check()
def tokens_stay_as_counted(launch: HostLaunch) -> Iterator[str]:
    """FB-08: truncated or rejected tokens leave the numerator and remain in the denominator."""
    if not launch.masks_change_later:
        return
    given = f"--custom-tis-function-path {launch.options['custom_tis_function_path']}"
    if launch.companion is not None:
        yield (
            f"{given} with {launch.companion_line}: it may reject tokens after the weights were counted; remove it (the built-in "
            f"--use-tis keeps the masks{_or_our_loss(launch)}), or choose sample_mean or constant without the hook"
        )
    elif launch.record is not None and launch.record.counts_other_samples:
        yield (
            f"{given} with --loss-aggregation {launch.aggregation}: it may reject tokens that the denominator has counted; the "
            "built-in --use-tis keeps the masks, and sample_mean and constant go with rejection"
        )


def _or_our_loss(launch: HostLaunch) -> str:
    return f"; our loss has its weights and keeps them too: {CUSTOM_LOSS_LINE}" if is_mis(launch.options) else ""


@check(is_warning=True)
def settings_of_the_function_have_one(launch: HostLaunch) -> Iterator[str]:
    """They stay in the file when the function is taken off the line."""
    options, path = launch.options, launch.options["custom_tis_function_path"]
    idle = [name for name in MIS_SETTINGS if options.has(name)]
    if idle and not is_mis(options) and (path is None or known_correction(options) is not None):
        yield f"{', '.join(idle)}: no effect without --custom-tis-function-path ...{MIS_FUNCTION}; remove them, or add it"


@check()
def weights_stay_as_they_are_cut(launch: HostLaunch) -> Iterator[str]:
    """The host's own loss weighs tokens before our reducer sees them."""
    normalised = normalised_weights(launch.options)
    if normalised is not None and _is_of_the_host(launch):
        yield f"--custom-tis-function-path {launch.options['custom_tis_function_path']}: {normalised}"


@check(is_warning=True)
def correction_of_the_host_is_known(launch: HostLaunch) -> Iterator[str]:
    """Our own loss refuses another."""
    unjudged = unjudged_correction(launch.options)
    if unjudged is not None and _is_of_the_host(launch):
        yield f"--custom-tis-function-path {unjudged}"


def _is_of_the_host(launch: HostLaunch) -> bool:
    """The loss is the host's, and something of ours reduces or weights it."""
    return launch.route == Route.REDUCER and not launch.is_alone
