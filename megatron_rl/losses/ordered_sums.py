"""Sums over the earlier or the later tokens of a sample, over all cp ranks: TokenBatch.suffix_sum and prefix_sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.context_parallel import chunk_places
from megatron_rl.layout.groups import Group


@dataclass(frozen=True, slots=True)
class SlicedTokens:
    """The tokens of this cp rank, and where its slices of the samples lie in them."""

    loss_mask: Tensor  # [T] bool
    documents: Tensor  # [T] int64, N on padding
    cu_seqlens: Tensor  # [N + 1] this rank's slices
    cp_group: Group
    cp_layout: str | None  # "zigzag" or "contiguous"; None: not known


def ordered_sum(
    values: Tensor,  # [T] or [T, k]
    tokens: SlicedTokens,
    reduce: Callable[[Tensor], Tensor],  # the sum of [N, c] over cp
    *,
    decay: float,
    from_the_end: bool,
) -> Tensor:  # as values
    """Of each unmasked token the sum over the unmasked tokens of its sample from this one on, or up to it; 0 of a masked one.

    Differentiable: the derivative of the one is the other.
    Communication: at cp above 1 one `reduce` of [N, c], and one in backward; in zigzag order one of [N] before.
    Raises ConfigError for a decay outside (0, 1], and where the order of the slices is not known; DataError for another shape and,
    on the CPU, for slices that are not in zigzag order. On CUDA their samples get NaN.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"decay={decay!r} of a sum over later or earlier tokens must be in (0, 1]; 1 is the plain sum")
    num_tokens = tokens.loss_mask.numel()
    if values.dim() not in (1, 2) or values.shape[0] != num_tokens:
        raise DataError(f"a sum over later or earlier tokens takes [T={num_tokens}] or [T, k], got {tuple(values.shape)}")
    if tokens.cp_group.size() > 1 and tokens.cp_layout is None:
        raise ConfigError(
            "a sum over later or earlier tokens needs the order of the context-parallel slices: pass "
            'cp_layout="zigzag", which is Megatron\'s order, or cp_layout="contiguous"'
        )
    columns = values if values.dim() > 1 else values[:, None]
    bounds = _chunk_bounds(tokens, reduce)
    found: Tensor = _OrderedSum.apply(columns, tokens, bounds, reduce, decay, from_the_end)  # type: ignore[no-untyped-call]  # torch's
    return found if values.dim() > 1 else found[:, 0]


class _OrderedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,  # [T, k]
        tokens: SlicedTokens,
        bounds: Tensor,  # [N, chunks + 1]
        reduce: Callable[[Tensor], Tensor],
        decay: float,
        from_the_end: bool,
    ) -> Tensor:
        ctx.tokens, ctx.bounds, ctx.reduce, ctx.decay, ctx.from_the_end = tokens, bounds, reduce, decay, from_the_end
        return _sums(values, tokens, bounds, reduce, decay, from_the_end)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        # What a token gives to later tokens comes back from these, on all cp ranks.
        gradient = _sums(upstream, ctx.tokens, ctx.bounds, ctx.reduce, ctx.decay, not ctx.from_the_end)
        return gradient, None, None, None, None, None


def _sums(
    values: Tensor,  # [T, k]
    tokens: SlicedTokens,
    bounds: Tensor,  # [N, chunks + 1]
    reduce: Callable[[Tensor], Tensor],
    decay: float,
    from_the_end: bool,
) -> Tensor:  # [T, k]
    mask, num_chunks = tokens.loss_mask[:, None], bounds.shape[1] - 1
    masked, live = torch.where(mask, values, 0.0).double(), tokens.loss_mask.double()
    chunks = _chunk_of_tokens(tokens, bounds)
    runs = tokens.documents * num_chunks + chunks
    sums, counts = _sums_in_runs(masked, live, runs, decay=decay, from_the_end=from_the_end)
    if tokens.cp_group.size() > 1:
        beyond = _sums_on_other_chunks(sums, counts, tokens, bounds, reduce, decay, from_the_end)
        padded = torch.cat([beyond, beyond.new_zeros(1, *beyond.shape[1:])])  # the padding is document N
        sums = sums + decay ** counts[:, None] * padded[tokens.documents, chunks]
        is_misplaced = bounds[:, -1] != tokens.cu_seqlens[1:]
        is_misplaced = torch.cat([is_misplaced, is_misplaced.new_zeros(1)])[tokens.documents]
        sums = torch.where(is_misplaced[:, None], torch.nan, sums)
    return torch.where(mask, sums, 0.0).to(values.dtype)


def _sums_on_other_chunks(
    sums: Tensor,  # [T, k] inside of each chunk
    counts: Tensor,  # [T]
    tokens: SlicedTokens,
    bounds: Tensor,  # [N, chunks + 1]
    reduce: Callable[[Tensor], Tensor],
    decay: float,
    from_the_end: bool,
) -> Tensor:  # [N, chunks, k]
    """For each chunk of this rank the sum over all chunks behind it, or before it, as its next token would have it."""
    places = list(_places(tokens))
    of_chunks = _totals(torch.cat([sums, counts[:, None]], dim=-1), bounds, from_the_end)  # [N, chunks, k + 1]
    everywhere = of_chunks.new_zeros(of_chunks.shape[0], tokens.cp_group.size() * len(places), of_chunks.shape[-1])
    everywhere[:, places] = of_chunks
    everywhere = reduce(everywhere.flatten(1)).view_as(everywhere)
    return _sums_beyond(everywhere, decay, from_the_end)[:, places]


def _places(tokens: SlicedTokens) -> tuple[int, ...]:
    """Where this rank's chunks of a sample stand among all its chunks."""
    return chunk_places(tokens.cp_group.rank(), tokens.cp_group.size(), layout=tokens.cp_layout or "contiguous")


def _chunk_bounds(tokens: SlicedTokens, reduce: Callable[[Tensor], Tensor]) -> Tensor:  # [N, chunks + 1] int64
    """The bounds of this rank's chunks of each sample.

    In zigzag order all chunks of a sample have one size; where its padding is left out, the last ones are shorter.
    Communication: in zigzag order at cp above 1 one `reduce` of [N], the lengths of whole samples.
    """
    starts, lengths = tokens.cu_seqlens[:-1].long(), tokens.cu_seqlens.diff().long()
    places = _places(tokens)
    if len(places) == 1:
        return torch.stack([starts, starts + lengths], dim=-1)
    num_chunks = len(places) * tokens.cp_group.size()
    whole = reduce(lengths.double()).long()
    size = (whole + num_chunks - 1) // num_chunks
    sizes = torch.stack([torch.minimum((whole - place * size).clamp(min=0), size) for place in places])  # [chunks, N]
    if not lengths.is_cuda and bool((sizes.sum(0) != lengths).any()):
        raise DataError(
            f"slices of {lengths.tolist()} tokens, of samples of {whole.tolist()} tokens, are not in zigzag order: a "
            f'rank has chunks r and {num_chunks - 1} - r of {num_chunks} equal ones; pass cp_layout="contiguous" where slices '
            "follow each other"
        )
    return torch.stack([starts, *(starts + sizes.cumsum(0))], dim=-1)


def _chunk_of_tokens(tokens: SlicedTokens, bounds: Tensor) -> Tensor:  # [T] int64, 0 on padding
    if bounds.shape[1] == 2:
        return torch.zeros_like(tokens.documents)
    of_padding = tokens.documents.numel()
    middle = torch.cat([bounds[:, 1], bounds.new_full((1,), of_padding)])[tokens.documents]
    return (torch.arange(of_padding, device=middle.device) >= middle).long()


def _totals(sums: Tensor, bounds: Tensor, from_the_end: bool) -> Tensor:  # [T, c], [N, chunks + 1] -> [N, chunks, c]
    """The sums of whole chunks, which their first token has, or their last one. 0 for an empty chunk."""
    first, end = bounds[:, :-1], bounds[:, 1:]
    at = torch.where(end > first, first if from_the_end else end - 1, sums.shape[0])
    return torch.cat([sums, sums.new_zeros(1, sums.shape[1])])[at]


def _sums_beyond(totals: Tensor, decay: float, from_the_end: bool) -> Tensor:  # [N, places, k + 1] -> [N, places, k]
    """Of each chunk the sum over all chunks behind it, or before it, as its next token would have it."""
    sums, counts = totals[..., :-1], totals[..., -1:]
    places = range(totals.shape[1])
    beyond, found = torch.zeros_like(sums[:, 0]), [torch.zeros_like(sums[:, 0])] * len(places)
    for place in reversed(places) if from_the_end else places:
        found[place] = beyond
        beyond = sums[:, place] + decay ** counts[:, place] * beyond
    return torch.stack(found, dim=1)


def _sums_in_runs(
    values: Tensor,  # [T, k] float64, 0 where masked
    live: Tensor,  # [T] float64, 1 for a token that counts, else 0
    runs: Tensor,  # [T] int64, the run of each token; the tokens of a run are neighbours
    *,
    decay: float,
    from_the_end: bool,
) -> tuple[Tensor, Tensor]:  # [T, k] float64, [T] float64
    """For each token the sum from it to the end of its run, or from the begin of its run to it, and how many live tokens that are.

        sum_t = sum_k decay^(live tokens between t and k, one of the two counted) values_k

    A number is added to its neighbour, then to the second next, then to the fourth next, and so on. So the bits of a run depend on
    nothing outside of it. No synchronisation.
    """
    if not from_the_end:
        flipped = (tensor.flip(0) for tensor in (values, live, runs))
        sums, counts = _sums_in_runs(*flipped, decay=decay, from_the_end=True)
        return sums.flip(0), counts.flip(0)
    num_tokens, distance = values.shape[0], 1
    sums, counts = values, live
    while distance < num_tokens:
        is_same = runs[distance:] == runs[:-distance]
        added = sums[distance:] if decay == 1.0 else decay ** counts[:-distance, None] * sums[distance:]
        # A choice and no factor 0, because another run may hold what is not finite.
        added, further = torch.where(is_same[:, None], added, 0.0), torch.where(is_same, counts[distance:], 0.0)
        sums = torch.cat([sums[:-distance] + added, sums[-distance:]])
        counts = torch.cat([counts[:-distance] + further, counts[-distance:]])
        distance *= 2
    return sums, counts
