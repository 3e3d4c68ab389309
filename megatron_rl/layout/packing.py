"""Says which packed token belongs to which document, and sums over documents in a fixed order. It weights nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def document_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:  # [num_tokens] int64
    """The document of each token; N for the padding past cu_seqlens[-1]. No synchronisation."""
    positions = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


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
