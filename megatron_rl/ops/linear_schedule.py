"""Which rows of a fused head go through which chunk, decided on the host alone; it must never look at a device tensor.

    in-chunk     whole documents that fit one chunk: their coefficients are known while the chunk's logits are there
    scale-last   one long document, cut into chunks, with one coefficient: chunks accumulate unscaled, the coefficient comes last
    two-pass     one long document with a coefficient a token: chunks are computed twice, but for the one that is still there
    row-by-row   a token's coefficient depends on that token alone: chunks cut anywhere

Row numbers are CPU tensors. A row that takes no part in the loss is in no chunk.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError

# A matmul's tile: other numbers of rows leave a part of the last tile idle.
ROW_MULTIPLE = 128
# Below it the weight gradient is read and written too often: 8 bytes an element and chunk, 18 % of its matmul at 4096 rows.
CUDA_ROWS_WARNING = 4096
# Rows that move when clipped rows leave a chunk do so in blocks; a block's copy is at most this part of the chunk.
MOVE_DIVISOR = 32


class Plan(StrEnum):
    """When the gradient of a chunk's rows is made."""

    IN_CHUNK = "in-chunk"
    SCALE_LAST = "scale-last"
    TWO_PASS = "two-pass"
    ROW_BY_ROW = "row-by-row"


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """Rows whose coefficients become known together."""

    plan: Plan
    documents: tuple[int, ...]  # ascending; the whole micro-batch's, in the order of cu_seqlens. () in plan row-by-row
    chunks: tuple[Tensor, ...]  # row numbers [<= rows_per_chunk] int64 on the CPU, ascending

    @property
    def num_rows(self) -> int:
        return sum(chunk.numel() for chunk in self.chunks)


def rows_per_chunk(max_logits_bytes: int, bytes_per_row: int, *, preferred_bytes: int | None = None) -> int:
    """Rows of a chunk, so that its buffers and the block that moves rows in them stay within max_logits_bytes together.

    bytes_per_row: of all buffers. preferred_bytes: a smaller target, of a cache for instance; it never forbids a row.
    Raises: ConfigError for a budget that holds no row; it names the smallest that works.

    >>> rows_per_chunk(2 * 1024**3, 2 * 128_256)
    8064
    """
    if not isinstance(max_logits_bytes, int) or isinstance(max_logits_bytes, bool):
        raise ConfigError(f"max_logits_bytes={max_logits_bytes!r} must be a whole number of bytes")
    if max_logits_bytes < bytes_per_row:
        raise ConfigError(
            f"max_logits_bytes={max_logits_bytes} holds no row of logits: a row takes {bytes_per_row} bytes on this tp rank, so "
            f"{bytes_per_row} is the smallest budget that works and {CUDA_ROWS_WARNING * bytes_per_row} the smallest that is fast"
        )
    if preferred_bytes is not None:
        max_logits_bytes = min(max_logits_bytes, max(preferred_bytes, bytes_per_row))
    rows = max_logits_bytes // max(bytes_per_row, 1)
    if rows > 1:
        rows -= -(-rows // (MOVE_DIVISOR + 1))
    return rows // ROW_MULTIPLE * ROW_MULTIPLE if rows >= ROW_MULTIPLE else rows


@functools.cache
def warn_of_small_chunks(rows: int, bytes_per_row: int) -> None:
    """Once for each size. For CUDA, where a chunk's cost does not shrink with its rows."""
    warnings.warn(
        f"max_logits_bytes gives chunks of {rows} rows; below {CUDA_ROWS_WARNING} the weight gradient is read and written so often "
        f"that it shows: {CUDA_ROWS_WARNING * bytes_per_row} bytes would hold {CUDA_ROWS_WARNING} rows",
        stacklevel=4,
    )


def document_bins(
    sizes: Sequence[int],  # N rows of each document, on whichever cp rank holds most of it
    capacity: int,
) -> list[tuple[int, ...]]:
    """First fit, decreasing: bins of whole documents, each at most `capacity` rows; a longer document is a bin of its own.

    Long documents come first. A function of its arguments alone, so that cp ranks with equal sizes form equal bins in one order.

    >>> document_bins([3, 10, 5, 0, 4], 8)
    [(1,), (0, 2, 3), (4,)]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for document in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size = sizes[document]
        place = next((number for number, free in enumerate(room) if size <= free), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(document)
        room[place] -= size
    return [tuple(sorted(documents)) for documents in bins]


def schedule_documents(
    bins: Sequence[tuple[int, ...]],
    rows_of_documents: Sequence[Tensor],  # N ascending row numbers each: the rows of this rank that take part
    capacity: int,
    *,
    has_row_terms: bool,
    is_idle: Sequence[bool],  # N: the document's coefficients are known to be 0
) -> list[WorkItem]:
    """One item for each bin, in their order, whatever this rank holds of it: every cp rank meets one reduction a bin.

    A bin with more rows here than elsewhere is cut: that is a local choice, which moves no collective over cp.
    has_row_terms: coefficients differ inside a document, so that scale-last is not possible. An idle document needs no gradient;
    two-pass stops after its first pass there.
    """
    items = []
    for documents in bins:
        rows = torch.cat([rows_of_documents[document] for document in documents] or [torch.zeros(0, dtype=torch.int64)])
        chunks = cut(rows, capacity)
        is_late = len(documents) == 1 and not has_row_terms and not is_idle[documents[0]]
        plan = Plan.IN_CHUNK if len(chunks) <= 1 else Plan.SCALE_LAST if is_late else Plan.TWO_PASS
        if plan == Plan.TWO_PASS:  # the last chunk's logits stay: the fuller it is, the fewer are computed again
            chunks = (*cut(rows[:-capacity], capacity), rows[-capacity:])
        items.append(WorkItem(plan, documents, chunks))
    return items


def schedule_rows(
    rows: Tensor,  # ascending row numbers
    capacity: int,
) -> list[WorkItem]:
    """Plan row-by-row: chunks of nearly equal size."""
    return [WorkItem(Plan.ROW_BY_ROW, (), (chunk,)) for chunk in cut(rows, capacity)]


def cut(rows: Tensor, capacity: int) -> tuple[Tensor, ...]:
    """The fewest chunks of at most `capacity` rows, equal but for one row; none for no rows."""
    num_chunks = -(-rows.numel() // capacity)
    return tuple(torch.tensor_split(rows, num_chunks)) if num_chunks else ()
