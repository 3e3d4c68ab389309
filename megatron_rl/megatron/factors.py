"""Names a wrong factor of the gradient: exactly cp, 1/micro-batches or dp points at one cause. It measures nothing."""

from __future__ import annotations

from collections.abc import Mapping

# Relative distance below which a ratio gets the name of a size. Other factors of a step are not so close to a whole number.
TOLERANCE = 1e-4
# Name of a size -> (what a factor of it means, what its inverse means).
CAUSES: dict[str, tuple[str, str]] = {
    "cp": (
        "each context-parallel rank counts the tokens of all of them",
        "the mean that DDP takes over context-parallel ranks is left in, or a rank divides by its own tokens",
    ),
    "dp": (
        "nothing divides by the data-parallel ranks, as DDP does under the other contract",
        "the mean that DDP takes over data-parallel ranks is left in",
    ),
    "dp x cp": (
        "the mean over data- and context-parallel ranks is undone, but it was not taken",
        "the mean that DDP takes over data- and context-parallel ranks is left in",
    ),
    "micro-batches": (
        "the schedule's mean over micro-batches is undone, but it was not taken",
        "the schedule's mean over micro-batches is left in",
    ),
    "tp": ("equal parts of tensor-parallel ranks are added", "equal parts of tensor-parallel ranks are averaged"),
    "pp": ("each pipeline stage adds the loss of the last", "the loss of the last pipeline stage is averaged over all of them"),
    "ep": (
        "gradients of experts are added over ranks that have averaged them",
        "gradients of experts are averaged over the expert-parallel ranks too, which hold other experts",
    ),
    "samples": ("nothing divides by the step's samples", "the step's samples divide twice, as with --gradient-divisor num_samples"),
    "prompts": ("nothing divides by the step's prompts", "the step's prompts divide twice"),
    "tokens": ("nothing divides by the step's tokens", "the step's tokens divide twice"),
}


def factor_names(ratio: float, sizes: Mapping[str, int]) -> list[str]:
    """The names of the sizes that equal the ratio, then of those whose inverse does: ["cp", "1/(micro-batches)"]; sizes above 1."""
    named = [name for name, size in sizes.items() if size > 1 and abs(ratio - size) < TOLERANCE * size]
    return named + [f"1/({name})" for name, size in sizes.items() if size > 1 and abs(ratio * size - 1) < TOLERANCE]


def cause_of(ratio: float, sizes: Mapping[str, int]) -> str:
    """The cause as text: `= 1/cp: the mean that DDP takes ...`, with `or` between equal sizes; empty for a ratio without a name."""
    names = factor_names(ratio, sizes)
    causes = [CAUSES[name.removeprefix("1/(").removesuffix(")")][name.startswith("1/(")] for name in names]
    shown = [name.replace("(", "").replace(")", "") if " " not in name else name for name in names]
    return f"= {' or '.join(shown)}: {'; or '.join(causes)}" if names else ""
