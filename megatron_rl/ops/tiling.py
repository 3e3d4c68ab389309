"""Describes how rows lie in memory, and divides kernels into programs: alignment, block sizes, the number of splits.

Element j of row r is `shift + r * stride + j` elements after an aligned address. So its alignment is known for any V_tp: the first
aligned column of the row is `-(shift + r * stride) % 8`. A kernel's output beside the logits has their shift and stride modulo 8,
and so the same aligned columns. No element of a tensor is read here: all decisions use numbers that the host knows and that are
equal on all tp ranks. So no launch synchronises, and all ranks split their rows in the same way.
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
    """Only the address of `pointer` is used: it is `shift` elements before the first row."""

    pointer: Tensor
    shift: int
    stride: int

    def is_aligned_with(self, other: FlatRows) -> bool:
        return (self.shift - other.shift) % ALIGNMENT == 0 == (self.stride - other.stride) % ALIGNMENT


def flat_rows(
    rows: Tensor,  # [T, V_tp] with adjacent columns
) -> FlatRows:
    """The address is moved down to a multiple of 8 elements where the storage begins early enough.

    Only a tensor over foreign misaligned memory begins too late. Its address is used as it is: slower, not wrong.
    """
    rows = rows.detach()
    stride = rows.stride(0) if rows.shape[0] > 1 else 0
    shift = rows.data_ptr() // rows.itemsize % ALIGNMENT
    if shift == 0 or rows.storage_offset() < shift:
        return FlatRows(rows, 0, stride)
    return FlatRows(rows.as_strided((1,), (1,), rows.storage_offset() - shift), shift, stride)


def has_flat_rows(rows: Tensor) -> bool:
    """Whether columns are adjacent in memory."""
    return rows.stride(1) == 1 or rows.shape[1] <= 1


def rows_overlap(rows: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor. Such rows can be read, not written."""
    (small, count), (large, others) = sorted(zip(rows.stride(), rows.shape, strict=True))
    return rows.numel() > 1 and ((count > 1 and small == 0) or (others > 1 and large <= (count - 1) * small))


def gradient_like(
    logits: Tensor,  # [T, V_tp]
    dtype: torch.dtype | None = None,
) -> Tensor:  # [T, V_tp], uninitialised; the logits' dtype where none is given
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


# Programs an SM needs to hide the latency of its loads: 8 of 4 KiB cover 700 ns at 4.3 TB/s over 132 SMs (23 KiB an SM). With fewer
# rows than this times the number of SMs, rows are split.
PROGRAMS_PER_PROCESSOR = 8
# A split with fewer full tiles spends most of its time on its first load and on the merge.
SMALLEST_SPLIT_IN_TILES = 4
# The interpreter runs one program at a time.
PROCESSORS_OF_A_CPU = 1


@dataclass(frozen=True, slots=True)
class StatisticsConfiguration:
    """The forward kernel: `lanes` with one 128-bit load each, `tiles` loads in flight; splits None: from the shape."""

    lanes: int = 128
    tiles: int = 2
    num_warps: int = 4
    splits: int | None = None


@dataclass(frozen=True, slots=True)
class GradientConfiguration:
    """The gradient kernel: `block` columns at a time; splits None: from the shape."""

    block: int = 4096
    num_warps: int = 8
    splits: int | None = None


STATISTICS_DEFAULTS = StatisticsConfiguration()
GRADIENT_DEFAULTS = GradientConfiguration()


def split_rows(
    num_rows: int, num_columns: int, tile: int, splits: int | None, device: torch.device
) -> tuple[int, int]:  # number of splits, columns of each: a multiple of the tile
    """One split where the rows fill the device; else as many as fill it, each of at least a few tiles.

    splits: this number, or fewer where there are not enough columns.
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
