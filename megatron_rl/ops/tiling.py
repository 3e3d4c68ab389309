"""How rows lie in memory and how kernels are cut into programs: aligned pieces of a flat array, block sizes, the number of splits.

Element j of row r lies `shift + r * stride + j` elements behind an aligned address, so its alignment is known for any V_tp: the
first aligned column of the row is `-(shift + r * stride) % 8`. A tensor that a kernel writes beside the logits has their shift and
stride modulo 8, and with them the same aligned columns. No element is read here, and no value of a tensor decides anything: what is
known on the host is equal on all tp ranks, so that no launch synchronises and all ranks cut their rows in the same way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements between aligned columns: 16 bytes of 16-bit logits, 32 of float32.
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FlatRows:
    """`pointer` is a tensor for its address alone: it stands `shift` elements before the first row."""

    pointer: Tensor
    shift: int
    stride: int

    def is_aligned_with(self, other: FlatRows) -> bool:
        return (self.shift - other.shift) % ALIGNMENT == 0 == (self.stride - other.stride) % ALIGNMENT


def flat_rows(
    rows: Tensor,  # [T, V_tp] whose columns lie side by side
) -> FlatRows:
    """The address is moved down to a multiple of 8 elements where the storage begins early enough.

    It does unless somebody else's misaligned memory was wrapped; the address is then taken as it is: slower, not wrong.
    """
    rows = rows.detach()
    stride = rows.stride(0) if rows.shape[0] > 1 else 0
    shift = rows.data_ptr() // rows.itemsize % ALIGNMENT
    if shift == 0 or rows.storage_offset() < shift:
        return FlatRows(rows, 0, stride)
    return FlatRows(rows.as_strided((1,), (1,), rows.storage_offset() - shift), shift, stride)


def has_flat_rows(rows: Tensor) -> bool:
    """The columns lie side by side."""
    return rows.stride(1) == 1 or rows.shape[1] <= 1


def rows_overlap(rows: Tensor) -> bool:
    """Two elements share their memory, as in an expanded tensor: such rows can be read and not written."""
    (small, count), (large, others) = sorted(zip(rows.stride(), rows.shape, strict=True))
    return rows.numel() > 1 and ((count > 1 and small == 0) or (others > 1 and large <= (count - 1) * small))


def gradient_like(
    logits: Tensor,  # [T, V_tp]
    dtype: torch.dtype | None = None,
) -> Tensor:  # [T, V_tp], not written to; the logits' dtype where none is given
    """Memory for a gradient with the logits' aligned columns: contiguous, or with rows up to 7 elements apart for a view."""
    num_rows, width = logits.shape
    shift, stride = 0, width
    if has_flat_rows(logits) and logits.numel() > 0:
        flat = flat_rows(logits)
        shift = flat.shift
        stride += (flat.stride - width) % ALIGNMENT if num_rows > 1 else 0
    if shift == 0 and stride == width:
        return torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)
    return logits.new_empty(shift + num_rows * stride, dtype=dtype).as_strided((num_rows, width), (stride, 1), shift)


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
