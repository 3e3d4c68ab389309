"""Says which packed token belongs to which document, and sums over documents in a fixed order. It weights nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def document_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:  # [num_tokens] int64
    """The document of each token; N for the padding past cu_seqlens[-1]. No synchronisation."""
    positions = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


def turn_cu_seqlens(
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] integer, of whole documents
) -> tuple[Tensor, Tensor]:  # [M + 1] like cu_seqlens, [M] int64: the document of each turn
    """Bounds of turns, which are the runs of unmasked tokens of a document. With them as cu_seqlens a loss has a ratio a turn.

    Masked tokens belong to the turn before them, or to the document's first one. A document without an unmasked token is one turn.
    Take it before context-parallel slicing, and on the CPU: it reads the mask.
    Example: the mask 1 1 0 1 | 0 1 and cu_seqlens 0, 4, 6 give 0, 3, 4, 6 and the documents 0, 0, 1.
    """
    documents = document_ids(cu_seqlens, loss_mask.numel())
    mask, before = loss_mask.bool(), documents.new_full((1,), -1)
    is_new = torch.cat([before, documents[:-1]]) != documents
    follows = torch.cat([mask.new_zeros(1), mask[:-1]]) & ~is_new
    starts = (mask & ~follows & (documents < cu_seqlens.numel() - 1)).nonzero()[:, 0]
    of = documents[starts]
    is_inner = torch.cat([before, of[:-1]])[: of.numel()] == of  # the first turn begins with its document
    bounds = torch.cat([cu_seqlens[:-1], starts[is_inner].to(cu_seqlens.dtype)])
    of = torch.cat([torch.arange(cu_seqlens.numel() - 1, device=of.device), of[is_inner]])
    order = bounds.argsort(stable=True)
    return torch.cat([bounds[order], cu_seqlens[-1:]]), of[order]


def document_sums(
    values: Tensor,  # [T] or [T, k]
    cu_seqlens: Tensor,  # [N + 1] integer
) -> Tensor:  # [N] or [N, k] float64
    """Sum over each document without padding, in float64 and in the order of the tokens: the same bits in every run.

    float64, because a sum over 100 k tokens in float32 loses digits that a GSPO clip of 3e-4 needs.
    """
    num_tokens = values.shape[0]
    tail = cu_seqlens.new_full((1,), num_tokens)  # a fill: a copy from the host would synchronise
    offsets = torch.cat([cu_seqlens, tail]).to(torch.int64)  # the padding is one more segment, left out below
    sums = torch.segment_reduce(values.double(), "sum", offsets=offsets, axis=0, unsafe=True, initial=0.0)
    return sums[:-1]


def spread(
    per_document: Tensor,  # [N] or [N, k]
    token_documents: Tensor,  # [T] int64, N for padding
) -> Tensor:  # [T] or [T, k]
    """Gives each token the value of its document; padding tokens get 0."""
    return torch.cat([per_document, per_document.new_zeros(1, *per_document.shape[1:])])[token_documents]
