"""Computes which tokens of a document a context-parallel rank owns: zigzag (Megatron, Transformer Engine) or contiguous.

Index arithmetic on python ints, without process groups and masks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError

LAYOUTS = ("zigzag", "contiguous")


def chunk_spans(length: int, cp_rank: int, cp_size: int, *, layout: str = "zigzag") -> list[tuple[int, int]]:
    """The rank's half-open token spans of a document that is padded to a multiple of 2 cp_size (zigzag) or cp_size (contiguous).

    zigzag: chunks r and 2 cp_size - 1 - r of 2 cp_size equal ones, so that causal attention costs the same on each rank.
    contiguous: chunk r of cp_size. Spans may end past `length`: the last chunks then hold padding.
    Raises ConfigError for an unknown layout and a cp_rank outside [0, cp_size).
    """
    places = chunk_places(cp_rank, cp_size, layout=layout)
    size = -(-length // (cp_size * len(places)))
    return [(place * size, (place + 1) * size) for place in places]


def chunk_places(cp_rank: int, cp_size: int, *, layout: str = "zigzag") -> tuple[int, ...]:
    """The places of the rank's chunks among all chunks of a document, in the order in which the rank has them.

    Raises ConfigError for an unknown layout and a cp_rank outside [0, cp_size).
    """
    _check_layout(layout, cp_size)
    if not 0 <= cp_rank < cp_size:
        raise ConfigError(f"cp_rank={cp_rank} must be in [0, cp_size={cp_size})")
    is_zigzag = layout == "zigzag" and cp_size > 1
    return (cp_rank, 2 * cp_size - 1 - cp_rank) if is_zigzag else (cp_rank,)


def _check_layout(layout: str, cp_size: int) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r} is not one of {LAYOUTS}")
    if cp_size < 1:
        raise ConfigError(f"cp_size={cp_size} must be at least 1: it is the number of context-parallel ranks")


def padded_length(length: int, cp_size: int, *, layout: str = "zigzag", multiple: int = 1) -> int:
    """The smallest padded length with equal chunks, where each rank's part is a multiple of `multiple` (tp size under SP).

    Raises ConfigError for an unknown layout and a cp_size below 1.
    """
    _check_layout(layout, cp_size)
    if cp_size == 1:
        return -(-length // multiple) * multiple
    parts = cp_size * (2 if layout == "zigzag" else 1)
    unit = parts * multiple
    return -(-length // unit) * unit


def local_positions(length: int, cp_rank: int, cp_size: int, *, layout: str = "zigzag") -> Tensor:  # [padded / cp_size] int64
    """Global positions of the rank's tokens of one document, in local order. Positions from `length` on are padding."""
    return torch.cat([torch.arange(start, end) for start, end in chunk_spans(length, cp_rank, cp_size, layout=layout)])


def response_spans(
    total_length: int,
    response_length: int,
    cp_rank: int,
    cp_size: int,
    *,
    layout: str = "zigzag",
    padded_to: int | None = None,
) -> list[tuple[int, int]]:
    """Spans of *response indices* whose log-probabilities this rank computes, in local order; an empty span is (0, 0).

    The logits at token position q predict the token at q + 1. With prompt length p, a chunk [a, b) gives the response indices
    [max(a, p - 1) + 1 - p, min(b, total - 1) + 1 - p). With a long prompt a rank may have none: that is no error.
    padded_to: the row's padded length where rows are padded to one length (bshd); None: each sample is padded by itself (thd).
    Raises DataError for a response or a prompt without a token, and for a padded_to below total_length.
    """
    if not 1 <= response_length < total_length:
        raise DataError(
            f"response_length={response_length} of total_length={total_length}: a sample has a prompt of at least one token and a "
            "response of at least one"
        )
    if padded_to is not None and padded_to < total_length:
        raise DataError(f"padded_to={padded_to} is shorter than total_length={total_length}")
    prompt_length = total_length - response_length
    spans = []
    for start, end in chunk_spans(padded_to or total_length, cp_rank, cp_size, layout=layout):
        first, last = max(start, prompt_length - 1), min(end, total_length - 1)
        spans.append((first + 1 - prompt_length, last + 1 - prompt_length) if first < last else (0, 0))
    return spans


def slice_response(
    values: Tensor,  # [response_length, ...]
    total_length: int,
    cp_rank: int,
    cp_size: int,
    *,
    layout: str = "zigzag",
    padded_to: int | None = None,
) -> Tensor:  # [local response tokens, ...]
    """This rank's part of a tensor with one entry per response token, in local order; empty where the rank owns none."""
    spans = response_spans(total_length, values.shape[0], cp_rank, cp_size, layout=layout, padded_to=padded_to)
    return torch.cat([values[start:end] for start, end in spans])


def local_cu_seqlens(cu_seqlens: Tensor, cp_size: int, *, layout: str = "zigzag") -> Tensor:  # [N + 1] -> [N + 1], same dtype
    """Bounds of the local slices, from Megatron's bounds of the whole row. Documents are padded to multiples of 2 cp_size (zigzag)
    or cp_size (contiguous, each document by itself).

    Raises ConfigError for an unknown layout and a cp_size below 1; DataError for a document with another length (on the CPU; on
    CUDA the check would synchronise).
    """
    _check_layout(layout, cp_size)
    num_chunks = 2 * cp_size if layout == "zigzag" and cp_size > 1 else cp_size
    if not cu_seqlens.is_cuda and bool((cu_seqlens % num_chunks != 0).any()):
        raise DataError(
            f"cu_seqlens={cu_seqlens.tolist()} has a document whose length is no multiple of {num_chunks}, the "
            f"chunks of {layout} at cp_size={cp_size}: pad each document and mask the padding"
        )
    return torch.div(cu_seqlens, cp_size, rounding_mode="floor").to(cu_seqlens.dtype)
