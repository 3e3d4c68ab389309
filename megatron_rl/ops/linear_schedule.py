"""Decides which rows of a fused head are in which chunk. It works on the host and reads no device tensor.

    row-by-row   the coefficient of a token depends on that token only: chunks may be cut anywhere
    in-chunk     whole documents that fit one chunk: their coefficients are known while the chunk's logits exist
    scale-last   one long document in several chunks, with one coefficient: chunks are summed unscaled, then scaled
    two-pass     one long document with a coefficient for each token: every chunk except the last is computed twice

Row numbers are CPU tensors. A row that has no part in the loss is in no chunk.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError

# With fewer rows the weight gradient is read and written too often: 8 bytes an element and chunk, 18 % of its matmul at 4096 rows.
CUDA_ROWS_WARNING = 4096


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """Rows whose coefficients become known at the same time."""

    chunks: tuple[Tensor, ...]  # row numbers [<= rows_per_chunk] int64 on the CPU, ascending
    is_shared: bool = False  # all rows have one coefficient


def rows_per_chunk(max_logits_bytes: int, bytes_per_row: int, *, preferred_bytes: int | None = None) -> int:
    """Rows of a chunk whose buffers fit into max_logits_bytes: as many as can be, so that a micro-batch that fits is one chunk.

    bytes_per_row: in all buffers together. preferred_bytes: a smaller target, such as a cache; one row is always allowed.
    Raises: ConfigError for a max_logits_bytes below one row; the message names the smallest that works.

    >>> rows_per_chunk(2 * 1024**3, 2 * 128_256)
    8371
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
    return max_logits_bytes // max(bytes_per_row, 1)


@functools.cache
def warn_of_small_chunks(rows: int, bytes_per_row: int) -> None:
    """Warns once for each size. For CUDA, where the fixed cost of a chunk does not shrink with its rows."""
    warnings.warn(
        f"max_logits_bytes gives chunks of {rows} rows; below {CUDA_ROWS_WARNING} rows the reads and writes of the weight gradient "
        f"slow the step down: {CUDA_ROWS_WARNING * bytes_per_row} bytes would hold {CUDA_ROWS_WARNING} rows",
        stacklevel=4,
    )


def document_bins(
    sizes: Sequence[int],  # N: rows of each document on the cp rank that holds most of it
    capacity: int,
) -> list[tuple[int, ...]]:
    """Bins of whole documents with at most `capacity` rows each (first fit, decreasing). A longer document has its own bin.

    Long documents come first. The result depends only on the arguments, so cp ranks with equal sizes have equal bins.

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
    is_shared: bool,
) -> list[WorkItem]:
    """One item for each bin, in order, even if this rank has no row of it: every cp rank has the reductions of each bin.

    A bin with more than `capacity` rows on this rank is cut into chunks, which changes no collective over cp.
    is_shared: the rows of a document share one coefficient.
    """
    items = []
    for documents in bins:
        rows = torch.cat([rows_of_documents[document] for document in documents])
        chunks, is_one = cut(rows, capacity), is_shared and len(documents) == 1
        if len(chunks) > 1 and not is_one:  # the logits of the last chunk are kept, so a full one saves the most recomputation
            chunks = (*cut(rows[:-capacity], capacity), rows[-capacity:])
        items.append(WorkItem(chunks, is_one))
    return items


def schedule_rows(
    rows: Tensor,  # ascending row numbers
    capacity: int,
) -> list[WorkItem]:
    """Chunks of nearly equal size, each an item."""
    return [WorkItem((chunk,)) for chunk in cut(rows, capacity)]


def cut(rows: Tensor, capacity: int) -> tuple[Tensor, ...]:
    """The fewest chunks of at most `capacity` rows, of sizes that differ by one row at most; no chunk for no rows."""
    num_chunks = -(-rows.numel() // capacity)
    return tuple(torch.tensor_split(rows, num_chunks)) if num_chunks else ()
