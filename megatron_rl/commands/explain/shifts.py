"""What a change of aggregation does to the gradient, in words: learning rate, clipping, KL, entropy. It never weights a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from megatron_rl.commands.explain.weights import Weighing
from megatron_rl.config import LossAggregation

# Scales that differ by rounding alone are one scale.
SAME_SCALE = 1e-6


def from_to(weighings: Sequence[Weighing]) -> dict[str, dict[str, float]]:
    """name -> name -> factor on the gradient, for token losses alike in all samples; sample_mean is always one of them."""
    scales = {LossAggregation.SAMPLE_MEAN.value: 1.0} | {weighing.name: weighing.gradient_scale for weighing in weighings}
    return {str(one): {str(other): scales[other] / scales[one] for other in scales} for one in scales}


def shift_lines(weighings: Sequence[Weighing]) -> list[str]:
    """Every pair of those shown; a single one against sample_mean, as the init hook's line of a host says it."""
    if len(weighings) == 1:
        return _against_sample_mean(weighings[0])
    groups: list[list[Weighing]] = []
    for weighing in weighings:
        for group in groups:
            if _is_one(weighing.gradient_scale / group[0].gradient_scale):
                group.append(weighing)
                break
        else:
            groups.append([weighing])
    lines = ["from one aggregation to another:"]
    lines += [
        f"  {_names(group, ', ')}: gradients of one size, learning rate and clipping stay" for group in groups if len(group) > 1
    ]
    for old, new in permutations(groups, 2):
        factor = new[0].gradient_scale / old[0].gradient_scale
        lines.append(f"  {_names(old, ' or ')} -> {_names(new, ' or ')}: {_consequences(factor, '')}")
    return lines


def _against_sample_mean(weighing: Weighing) -> list[str]:
    if weighing.name == LossAggregation.SAMPLE_MEAN:
        return []
    if _is_one(weighing.gradient_scale):
        return ["against sample_mean: a gradient of one size, learning rate and clipping stay; its long samples weigh more"]
    why = (
        f" = m/L, m = {short(weighing.mean_tokens)} mean tokens of a {weighing.unit}"
        if weighing.name == LossAggregation.CONSTANT
        else ""
    )
    return [f"against sample_mean: {_consequences(weighing.gradient_scale, why)}"]


def _consequences(factor: float, why: str) -> str:
    return (
        f"gradient x {short(factor)}{why}; Adam hides it; the same step of SGD is at learning rate x {short(1 / factor)}, the same "
        f"clipping at --clip-grad x {short(factor)}, and KL and entropy terms are {short(1 / factor)} x as strong"
    )


def short(value: float) -> str:
    """Four digits, of six: weights are float32, and two that differ by its rounding alone read the same."""
    return f"{float(f'{value:.6g}'):.4g}"


def _is_one(ratio: float) -> bool:
    return abs(ratio - 1) <= SAME_SCALE


def _names(group: Sequence[Weighing], separator: str) -> str:
    return separator.join(title(weighing) for weighing in group)


def title(weighing: Weighing) -> str:
    return weighing.name if weighing.divisor is None else f"{weighing.name} {weighing.divisor:g}"
