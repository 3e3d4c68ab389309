"""What a paper has beside its aggregation, for advice to a launch that has the aggregation alone."""

from __future__ import annotations

from collections.abc import Iterator

CLIP_LOW_OF_DAPO, CLIP_HIGH_OF_DAPO = 0.2, 0.28


def with_deviation(aggregation: str, without: str) -> str:
    """The advice for an aggregation of Dr. GRPO, arXiv:2503.20783, which removes both: the division by length and the one by the
    deviation of a group's rewards. without: what leaves it out, as it is typed."""
    return (
        f"{aggregation} without {without}: rewards are divided by the standard deviation of their group, which Dr. GRPO does not "
        "do; add it, unless you want the one without the other"
    )


def with_another_divisor(divisor: float, longest: int, *, typed: str, limit: str, exact: str) -> str:
    """The advice for an L that is not the longest response. typed, limit, exact: both and the remedy, as they are typed."""
    return (
        f"{typed} is not {limit}, the longest response: the gradient is {longest / divisor:.3g} x as large as with it; type "
        f"{exact}, unless you mean that"
    )


def with_clip_of_dapo(chosen: str, loss: str, aggregation: object, clip: tuple[float, float] | None, of_dapo: str) -> Iterator[str]:
    """The advice for DAPO, arXiv:2503.14476, which has both: prompt_mean, and a clip that is wider above than below. chosen,
    of_dapo: the aggregation and what DAPO's clip changes, as they are typed. clip: (low, high) of the launch."""
    if (loss, aggregation) == ("grpo", "prompt_mean") and clip is not None and clip[1] <= clip[0]:
        low, high = clip
        yield (
            f"{chosen} without {of_dapo}: the clip is {low:g}/{high:g}, and DAPO as published has {CLIP_LOW_OF_DAPO:g}/"
            f"{CLIP_HIGH_OF_DAPO:g}; add it, unless you want the one without the other"
        )
