"""Rows [T, V_tp] as pieces of one flat array, for kernels that load 128 bits at a time; it must never read or write an element.

Element j of row r stands `shift + r * stride + j` elements behind an aligned address, so its alignment is known for any V_tp: the
first aligned column of the row is `-(shift + r * stride) % 8`. A tensor that a kernel writes beside the logits has their shift and
stride modulo 8, and with them the same aligned columns.
"""

from __future__ import annotations

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
