"""How the row kernels are cut into programs: block sizes and the number of splits. It must never depend on a value of a tensor.

What is here is known on the host and equal on all tp ranks, so that no launch synchronises and all ranks cut their rows alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# Programs that keep an SM's loads in flight: 8 of 4 KiB cover 700 ns at 4.3 TB/s over 132 SMs (23 KiB an SM). Fewer rows than
# this times the number of SMs are split.
PROGRAMS_PER_PROCESSOR = 8
# A split below this many full tiles spends its time on its first load and on the merge.
SMALLEST_SPLIT_IN_TILES = 4
# The interpreter runs one program at a time.
PROCESSORS_OF_A_CPU = 1


@dataclass(frozen=True, slots=True)
class StatisticsConfiguration:
    """Of the forward kernel: `lanes` of one 128-bit load each, `tiles` of them in flight; splits None: from the shape."""

    lanes: int = 128
    tiles: int = 2
    num_warps: int = 4
    splits: int | None = None


@dataclass(frozen=True, slots=True)
class GradientConfiguration:
    """Of the gradient kernel: `block` columns at a time; splits None: from the shape."""

    block: int = 4096
    num_warps: int = 8
    splits: int | None = None


STATISTICS_DEFAULTS = StatisticsConfiguration()
GRADIENT_DEFAULTS = GradientConfiguration()


def split_rows(
    num_rows: int, num_columns: int, tile: int, splits: int | None, device: torch.device
) -> tuple[int, int]:  # number of splits, columns of each: a multiple of the tile
    """One split where the rows alone fill the device; else as many as fill it, each of at least a few tiles.

    splits: as many as these, or fewer where the columns do not suffice.
    """
    if splits is None:
        wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors(device) // max(num_rows, 1))
        splits = min(wanted, num_columns // (SMALLEST_SPLIT_IN_TILES * tile))
    per_split = -(-num_columns // (max(splits, 1) * tile)) * tile
    return max(-(-num_columns // max(per_split, 1)), 1), max(per_split, tile)


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS_OF_A_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count
