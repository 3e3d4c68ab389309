"""What is said of the clip of a launch that trains. The clips are the host's flags, which always have a value."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config import SEQUENCE_CLIP_RATIO_WARNING
from megatron_rl.hosts.base import HostLaunch
from megatron_rl.hosts.published import CLIP_HIGH_OF_DAPO, with_clip_of_dapo
from megatron_rl.hosts.skip_checks import FLAG, both_forwards_are_the_same, is_left_out_for_free, skips
from megatron_rl.loss_hub import get_policy_loss, policy_loss_names
from megatron_rl.validation.advice import bounds_for_distances
from megatron_rl.validation.checks import Asker, check
from megatron_rl.validation.model_settings import default_dropout_note

# A clip nearer to 1 than this suits a mean: one bfloat16 rounding of a logit moves a token's ratio as far.
LEAST_TOKEN_CLIP = 0.01


def has_ratios_of_1(launch: HostLaunch) -> bool:
    """Whether the policy in training is the old one in each step, with the same log-probabilities but for rounding."""
    options = launch.options
    is_one_step = options.is_one_step and not options["use_dynamic_global_batch_size"]
    of_another = options["use_rollout_logprobs"] or options["keep_old_actor"]
    has_noise = default_dropout_note(options.of_model) is not None or any(both_forwards_are_the_same.find(launch))
    return is_one_step and not of_another and not has_noise


def misfit_of_the_clip(launch: HostLaunch) -> str | None:
    """What a clip does that is of the other kind of ratio, of a token or of a sample's mean."""
    loss, clip = launch.loss_and_clip
    if loss not in policy_loss_names() or clip is None:
        return None
    declared = get_policy_loss(loss)
    if declared.clips_means and max(clip) > SEQUENCE_CLIP_RATIO_WARNING:
        return (
            "will hardly ever clip on long responses: the ratio is a geometric mean over the sample, which does not move by "
            f"{SEQUENCE_CLIP_RATIO_WARNING:g} there; the paper's values are --eps-clip 3e-4 --eps-clip-high 4e-4"
        )
    if declared.clip_ratios and not declared.clips_means and 0 < clip[1] < LEAST_TOKEN_CLIP:
        flag = "--policy-loss" if launch.has_our_loss() else "--advantage-estimator"
        return (
            "will clip nearly every token: its ratio is of a token, and is clipped at about 0.2; these are values for a mean over "
            f"a sample: did you mean {flag} gspo?"
        )
    return None


@check(is_warning=True)
def clip_fits_the_ratio(launch: HostLaunch) -> Iterator[str]:
    options, (loss, clip) = launch.options, launch.loss_and_clip
    if loss not in policy_loss_names() or clip is None:
        return
    declared, is_chosen = get_policy_loss(loss).clip_ratios, launch.has_our_loss() and options.ours("policy_loss")
    given = f"--eps-clip {clip[0]:g}, --eps-clip-high {clip[1]:g}"
    yield from bounds_for_distances(get_policy_loss(loss), clip, low="--eps-clip ", high="--eps-clip-high ")
    if (misfit := misfit_of_the_clip(launch)) is not None:
        by = f"{given} with {'--policy-loss' if is_chosen else '--advantage-estimator'} {loss}"
        now = "act on rounding at most now: a rollout is one step, so each ratio is 1. With several steps they "
        yield f"{by} {now if has_ratios_of_1(launch) else ''}{misfit}"
    elif is_chosen and declared is not None and declared != clip:
        if options["eps_clip_high"] is None and clip[0] == options.host.parser_defaults.get("eps_clip"):
            yield (
                f"{given} act on --policy-loss {loss}, because the host fills them in; the loss's own values are "
                f"--eps-clip {declared[0]:g} --eps-clip-high {declared[1]:g}"
            )


@check(asked_by=(Asker.DOCTOR,), is_warning=True)
def clip_has_a_use(launch: HostLaunch) -> Iterator[str]:
    _, clip = launch.loss_and_clip
    if clip is None or skips(launch) or not has_ratios_of_1(launch) or misfit_of_the_clip(launch) is not None:
        return
    saved = f"; {FLAG} saves the forward that measures old log-probabilities" if is_left_out_for_free(launch) else ""
    yield f"a rollout is one step, so each ratio is 1, and the clip {clip[0]:g}/{clip[1]:g} acts on rounding at most{saved}"


@check(is_warning=True)
def prompt_mean_has_the_clip_of_dapo(launch: HostLaunch) -> Iterator[str]:
    loss, clip = launch.loss_and_clip
    given = f"--eps-clip-high {CLIP_HIGH_OF_DAPO}"
    yield from with_clip_of_dapo("--loss-aggregation prompt_mean", loss, launch.aggregation, clip, given)
