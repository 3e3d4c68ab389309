"""Gives a wrong factor its name: a gradient off by exactly cp, 1/micro-batches or dp points at one line. It never measures."""

from __future__ import annotations

from collections.abc import Mapping

# How close a ratio comes to a size to be called by its name; other factors of a step are not as near to a whole number.
TOLERANCE = 1e-4
# Name of a size -> (what a factor of it means, what its inverse means).
CAUSES: dict[str, tuple[str, str]] = {
    "cp": (
        "each context-parallel rank counts what all of them hold together",
        "the mean that DDP takes over context-parallel ranks is left in, or a rank divides by its own tokens",
    ),
    "dp": (
        "nothing divides by the data-parallel ranks, as DDP does under the other contract",
        "the mean that DDP takes over data-parallel ranks is left in",
    ),
    "dp x cp": (
        "the mean over data- and context-parallel ranks is undone where nobody took it",
        "the mean that DDP takes over data- and context-parallel ranks is left in",
    ),
    "micro-batches": (
        "the schedule's mean over micro-batches is undone where it took none",
        "the schedule's mean over micro-batches is left in",
    ),
    "tp": ("equal parts of tensor-parallel ranks are added", "equal parts of tensor-parallel ranks are averaged"),
    "pp": ("each pipeline stage adds the loss of the last", "the loss of the last pipeline stage is averaged over all of them"),
    "samples": ("nothing divides by the step's samples", "the step's samples divide twice, as with --gradient-divisor num_samples"),
    "prompts": ("nothing divides by the step's prompts", "the step's prompts divide twice"),
    "tokens": ("nothing divides by the step's tokens", "the step's tokens divide twice"),
}


def factor_names(ratio: float, sizes: Mapping[str, int]) -> list[str]:
    """Every size that the ratio is, then every size whose inverse it is: ["cp", "1/(micro-batches)"]; sizes of 1 have no name."""
    named = [name for name, size in sizes.items() if size > 1 and abs(ratio - size) < TOLERANCE * size]
    return named + [f"1/({name})" for name, size in sizes.items() if size > 1 and abs(ratio * size - 1) < TOLERANCE]


def cause_of(ratio: float, sizes: Mapping[str, int]) -> str:
    """`= 1/cp: the mean that DDP takes ...`, with `or` between sizes that are alike; empty for a ratio without a name."""
    names = factor_names(ratio, sizes)
    causes = [CAUSES[name.removeprefix("1/(").removesuffix(")")][name.startswith("1/(")] for name in names]
    shown = [name.replace("(", "").replace(")", "") if " " not in name else name for name in names]
    return f"= {' or '.join(shown)}: {'; or '.join(causes)}" if names else ""
