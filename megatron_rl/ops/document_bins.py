"""Puts whole documents into chunks of a head, for losses whose coefficient of a token needs its whole sample; plan scale-last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.ops.linear_gradient import Coefficients, HeadGradient, WorkItem, cut, forward_item, multiply_chunk, scaled
from megatron_rl.ops.linear_head import LinearHead, multiply_into


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
        items.append(WorkItem(chunks, scale_last if is_one and len(chunks) > 1 else None))
    return items


def scale_last(head: LinearHead, item: WorkItem, coefficients: Coefficients, gradient: HeadGradient, *, is_last: bool) -> None:
    """Plan scale-last: all chunks except the last are multiplied before the coefficient c is known, because it commutes:

        dX_k = c (G_k W)     dW = c sum_k G_k^T X_k

    The sum needs a scratch buffer of the weight's size, unless there is no weight gradient yet. The last chunk is multiplied
    with its coefficient, as in plan in-chunk.
    """
    early: list[slice | Tensor] = []
    target = gradient if gradient.weight is None else replace(gradient, weight=None)
    for number in range(len(item.chunks) - 1):
        chunk = forward_item(head, item, number, leaves_gradient=True)
        early.append(chunk.rows)
        multiply_chunk(head, chunk, None, None, target, is_last=False)
    last = forward_item(head, item, len(item.chunks) - 1, leaves_gradient=True)
    c, _ = scaled(coefficients(item), gradient)
    is_dropped = bool(c[0] == 0)  # then 0 is written, because 0 x inf would be NaN
    if gradient.hidden is not None:
        for rows in early:
            part = gradient.hidden[rows]
            gradient.hidden[rows] = 0 if is_dropped else multiply_into(part, c[0], part)
    if is_dropped:
        target.weight = None
        return
    if target.weight is not None and target is gradient:
        target.weight.mul_(c[0])
    elif target.weight is not None and gradient.weight is not None:
        gradient.weight.addcmul_(target.weight, c[0].to(target.weight.dtype))
    multiply_chunk(head, last, c[-last.labels.numel() :], None, gradient, is_last=is_last)
