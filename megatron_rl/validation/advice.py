"""Warns of valid settings that rarely do what they seem to do. A warning does not stop a launch; a rule does."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config import SEQUENCE_CLIP_RATIO_WARNING, Backend, CorrectionLevel
from megatron_rl.loss_hub import PolicyLoss, clip_of, get_loss_aggregation, get_policy_loss, is_built_in
from megatron_rl.registries.kl_estimators import get_kl_estimator, kl_estimator_names
from megatron_rl.registries.token_selections import Effect
from megatron_rl.validation.checks import check
from megatron_rl.validation.routes import Settings


@check(is_warning=True)
def own_loss_follows_the_advantages(launch: Settings) -> Iterator[str]:
    if launch.loss is not None and not is_built_in(launch.loss.name):
        from megatron_rl.validation.own_loss import own_loss_warnings  # torch, which a user's loss has imported

        yield from own_loss_warnings(launch.config)


@check(is_warning=True)
def clip_of_a_mean_clips(launch: Settings) -> Iterator[str]:
    config = launch.config
    loss, clip = get_policy_loss(config.policy_loss), clip_of(config)
    if not loss.clips_means or clip is None or loss.clip_ratios is None:
        return
    if max(clip) > SEQUENCE_CLIP_RATIO_WARNING:
        (low, high), (default_low, default_high) = clip, loss.clip_ratios
        yield (
            f"clip_ratio_low={low:g}, clip_ratio_high={high:g} with policy_loss={config.policy_loss} will hardly ever clip on long "
            f"responses: the ratio is a geometric mean over the sample, which does not move by {SEQUENCE_CLIP_RATIO_WARNING:g} "
            f"there; the loss's own values are {default_low:g}/{default_high:g}, and unset flags give them"
        )


def bounds_for_distances(loss: PolicyLoss, clip: tuple[float, float], *, low: str, high: str) -> Iterator[str]:
    """Of a clip that is typed as bounds of a ratio, where 0.8 and 1.28 are 0.2 and 0.28. low, high: what is typed before a
    value. A loss without a lower bound may have an upper one that is far."""
    if loss.clip_ratios is None or loss.clip_ratios[0] == 1:
        return
    is_low, is_high = 0.5 <= clip[0] < 1, clip[1] >= 1
    typed = [f"{low}{clip[0]:g}"] * is_low + [f"{high}{clip[1]:g}"] * is_high
    if not typed:
        return
    reach = [f"down to {1 - clip[0]:g}"] * is_low + [f"up to {1 + clip[1]:g}"] * is_high
    text = f"{', '.join(typed)}: a distance from 1, so a ratio {' and '.join(reach)}"
    bounds = [(clip[0], 1 - clip[0])] * is_low + [(clip[1], clip[1] - 1)] * (is_high and clip[1] < 2)
    if bounds:
        meant, distances = (" and ".join(f"{one:g}" for one in side) for side in zip(*bounds, strict=True))
        text += f"; for {'bounds' if len(bounds) > 1 else 'a bound of'} {meant} type {distances}"
    yield text


@check(is_warning=True)
def clip_is_a_distance(launch: Settings) -> Iterator[str]:
    config = launch.config
    if (clip := clip_of(config)) is not None:
        yield from bounds_for_distances(get_policy_loss(config.policy_loss), clip, low="clip_ratio_low=", high="clip_ratio_high=")


@check(is_warning=True)
def estimates_are_not_noise(launch: Settings) -> Iterator[str]:
    config = launch.config
    if config.importance_correction_level == CorrectionLevel.SEQUENCE_SUM:
        yield (
            "importance_correction_level=sequence_sum multiplies the ratios of all tokens of a sample: over thousands of tokens "
            "the product leaves most bounds; look at policy/correction_kept_samples and policy/correction_effective_sample_size, "
            "or choose sequence_mean"
        )
    if config.kl_coefficient and launch.kl_estimator is not None and launch.kl_estimator.caution:
        yield f"kl_estimator={config.kl_estimator} in the loss: {launch.kl_estimator.caution}"


@check(is_warning=True)
def coefficients_keep_their_strength(launch: Settings) -> Iterator[str]:
    """One warning for both terms. Against the policy term they are 1 / (N W_i) times as strong, W_i the sum of i's weights."""
    config = launch.config
    given = [name for name in ("kl_coefficient", "entropy_coefficient") if getattr(config, name) != 0]
    record = get_loss_aggregation(config.loss_aggregation)
    if not given or (record.strength is not None and not record.strength.powers):
        return
    if record.mean_strength is not None:
        divisor = f"{config.loss_aggregation_divisor:g}" if record.takes_divisor else "1"
        change = f"about {divisor} / (mean tokens of a sample) times as strong as under sample_mean; for the strength that a "
        change += f"coefficient b has there, type b x (mean tokens of a sample) / {divisor}"
    elif record.mean_of is not None:
        change = (
            f"stronger in a short sample and weaker in a long one, by (mean tokens of {record.mean_of}) / (tokens of the sample): "
            "no coefficient undoes it; sample_mean does. Over the step they are as strong as there"
        )
    else:
        change = "1 / (the sum of its weights over the step) times as strong as under sample_mean; for the strength that a "
        change += "coefficient b has there, type b x that sum"
    settings = ", ".join(f"{name}={getattr(config, name):g}" for name in given)
    yield (
        f"{settings} with loss_aggregation={config.loss_aggregation}: KL and entropy stay averaged over samples. So beside the "
        f"policy term they are {change}"
    )


@check(is_warning=True)
def kernels_have_their_twins(launch: Settings) -> Iterator[str]:
    """`has_twin` in losses/api.py decides it. A correction has no twin: its weights are computed in torch beside every kernel."""
    config, loss, estimator = launch.config, launch.loss, launch.kl_estimator
    if loss is None or config.policy_loss_backend == Backend.TORCH:
        return
    if loss.triton is None:
        if config.policy_loss_backend == Backend.TRITON:
            twin = "" if loss.level == "batch" else "declare a twin by triton= (docs/losses.md), or "
            yield (
                f"policy_loss_backend=triton with policy_loss={config.policy_loss}, which has no Triton twin: log-probabilities "
                "and the gradient of the logits run in Triton, and the arithmetic of the loss on tokens in torch, as they do under "
                f"auto; {twin}leave --policy-loss-backend out"
            )
    elif config.kl_coefficient and estimator is not None and estimator.triton is None:
        others = [name for name in kl_estimator_names() if get_kl_estimator(name).triton is not None]
        yield (
            f"policy_loss={config.policy_loss} has a Triton twin, and kl_estimator={config.kl_estimator} has none: on a GPU the "
            "arithmetic of the whole loss on tokens then runs in torch, about a hundred small kernels in place of three, and the "
            "kernel that reads the logits once cannot be used; declare a twin by triton= (CONTRIBUTING.md), or choose one of "
            f"{', '.join(others)}"
        )
    elif launch.token_selection is not None and launch.token_selection.effect == Effect.PENALIZED:
        yield (
            f"policy_loss={config.policy_loss} has a Triton twin, and the penalty of token_selection={config.token_selection} has "
            "none: on a GPU the arithmetic of the whole loss on tokens then runs in torch, about a hundred small kernels in place "
            "of three, and the kernel that reads the logits once cannot be used"
        )
