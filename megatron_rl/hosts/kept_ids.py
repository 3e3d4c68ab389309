"""Reads the ids that a sampler kept from a host's batch, as a set of each response token.

A host lists them sample by sample for the whole response, which no context-parallel rank has cut: ids [nnz], and offsets
[response + 1] that count the ids before each response token. A token that nothing sampled (the text of a tool) has an empty set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.sampling_support import SamplingSupport, offsets_of


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptIds:
    """How a host hands the loss what its sampler kept."""

    ids: str
    """The key of its batch for the ids of each sample."""
    offsets: str
    filters: tuple[str, ...]
    """The sampler returns its sets where one of these is on. They are what all its filters together leave."""
    adds_token: bool
    """Sampler and trainer count a sampled token that its set lacks as kept: two kernels may differ at the edge of a set."""
    has_reference: bool
    """The host's trainer measures ref_log_probs and log_probs over them; else ref_log_probs are over the whole vocabulary."""
    arguments: tuple[str, str] | tuple[()] = ()
    """Those of its get_log_probs_and_entropy for both lists."""


def read_sets(batch: Mapping[str, Any], keys: KeptIds, response_lengths: Sequence[int]) -> SamplingSupport:
    """The sets of all response tokens, sample by sample, on the host. DataError, with key and sample, where lists do not fit."""
    lists: dict[str, Any] = {}
    for key in (keys.ids, keys.offsets):
        lists[key] = () if batch.get(key) is None else batch[key]
        if response_lengths and len(lists[key]) == 0:
            raise DataError(
                f"the host's batch has no {key!r}, which --sampling-support replay needs: this host does not hand a custom loss "
                "what its sampler kept, or a rollout function does not record it; remove --sampling-support"
            )
        if len(lists[key]) != len(response_lengths):
            raise DataError(f"the host's batch has {len(lists[key])} {key} for {len(response_lengths)} samples")
    found = [
        _sets_of_sample(keys, number, ids, offsets, length)
        for number, (ids, offsets, length) in enumerate(zip(lists[keys.ids], lists[keys.offsets], response_lengths, strict=True))
    ]
    return SamplingSupport.cat(found) if found else SamplingSupport.from_lists([])


def _sets_of_sample(keys: KeptIds, number: int, ids: Any, offsets: Any, length: int) -> SamplingSupport:
    for key, value in ((keys.ids, ids), (keys.offsets, offsets)):
        if value is None:
            why = "with --sampling-support replay each sample needs the ids that its sampler kept; drop it"
            raise DataError(f"{key}[{number}] of the host's batch is None: {why}")
    kept, starts = (torch.as_tensor(value).reshape(-1).cpu().long() for value in (ids, offsets))
    if starts.numel() != length + 1:
        raise DataError(
            f"{keys.offsets}[{number}] of the host's batch has {starts.numel()} offsets, and its response of {length} tokens needs "
            f"{length + 1}: one before each token and one at the end"
        )
    try:
        return SamplingSupport(kept, starts)
    except DataError as error:
        raise DataError(f"{keys.ids}[{number}] and {keys.offsets}[{number}] of the host's batch: {error}") from error


def trained_sets(
    sets: SamplingSupport,  # R rows, from read_sets
    keys: KeptIds,
    labels: Tensor,  # [R] int64: all response tokens
    loss_mask: Tensor,  # [R] bool
    vocab_size: int,  # padded columns too
    response_lengths: Sequence[int],
) -> SamplingSupport:
    """The sets of the trained tokens; the others are empty. It is the same on all ranks, and so is an error.

    Where labels lie on a GPU they are copied: one synchronisation. Where the host counts a sampled token as kept, one outside its
    set is added to it.
    Raises DataError, with token and sample, for a trained token with an empty set or outside its set, an id outside the vocabulary
    or given twice; where a token is added, for more than half of the tokens outside their sets.
    """
    labels, loss_mask = labels.cpu(), loss_mask.cpu()
    sets = sets.only(loss_mask)
    has_set = sets.sizes > 0
    if keys.adds_token and sets.is_inside(vocab_size):
        found, num_added = with_tokens(sets, labels, has_set)
        if num_added <= max(1, int(has_set.sum()) // 2):
            sets = found
    sets.check(sets.num_rows, vocab_size, labels, loss_mask, offsets_of(torch.tensor([*response_lengths], dtype=torch.int64)))
    return sets


def with_tokens(sets: SamplingSupport, labels: Tensor, rows: Tensor) -> tuple[SamplingSupport, int]:  # [R] int64, [R] bool
    """(the sets, those of `rows` with their row's token; the number of sets that lacked it)."""
    lacks = rows & ~sets.have(labels)
    added = lacks.nonzero()[:, 0]
    if not added.numel():
        return sets, 0
    order = torch.cat([sets.rows, added]).argsort(stable=True)
    return SamplingSupport(torch.cat([sets.ids.long(), labels[added]])[order], offsets_of(sets.sizes + lacks)), added.numel()
