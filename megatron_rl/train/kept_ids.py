"""Reads and checks the sets of ids that a sampler kept, as rollout files and the dumps of samplers hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.sampling_support import SamplingSupport, offsets_of

FORMS = (
    'must be null, or a list of ids for each response token; or {"ids": [...], "counts": [...]}, or {"token_ids": [...], '
    '"offsets": [...]}, all ids one after the other'
)


def read_kept_ids(value: Any) -> SamplingSupport:
    """One row a response token. Raises DataError with what is wrong, without a place.

    Lists are of a file of ours; ids with counts of prime-rl; token_ids with offsets, 0 first, of vLLM's SamplingMask and of slime.
    """
    if isinstance(value, SamplingSupport):
        return value
    if isinstance(value, list):
        if not all(isinstance(row, list) and _are_integers(row) for row in value):
            raise DataError(FORMS)
        return SamplingSupport.from_lists(value)
    if not isinstance(value, dict):
        raise DataError(FORMS)
    ids, sizes = (_first(value, names) for names in (("ids", "token_ids"), ("counts", "offsets")))
    if ids is None or sizes is None or not (_are_integers(ids) and _are_integers(sizes)):
        raise DataError(FORMS)
    counted = torch.tensor(sizes, dtype=torch.int64)
    return SamplingSupport(torch.tensor(ids, dtype=torch.int64), counted if "offsets" in value else offsets_of(counted))


def _first(value: dict, names: tuple[str, str]) -> Any:
    found = [value[name] for name in names if name in value]
    return found[0] if len(found) == 1 and isinstance(found[0], list) else None


def _are_integers(values: list) -> bool:
    return set(map(type, values)) <= {int} and all(-(2**63) <= value < 2**63 for value in values)


def problems_of_kept_ids(
    kept: SamplingSupport,
    tokens: Tensor,  # [response_length] int64
    loss_mask: Tensor,  # [response_length] bool
    vocab_size: int | None,
) -> Iterator[str]:
    """What is wrong with the sets of a sample. The caller stops at the first."""
    if kept.num_rows != len(tokens):
        yield f"{kept.num_rows} sets for a response of {len(tokens)} tokens; a masked token may have an empty one"
        return
    rows, ids = kept.rows, kept.ids
    is_outside = (ids < 0) | (ids >= vocab_size) if vocab_size is not None else ids < 0
    for pair in (loss_mask[rows] & is_outside).nonzero().flatten().tolist():
        bounds = "of at least 0" if vocab_size is None else f"in [0, {vocab_size}), the vocabulary of the model, without padding"
        yield f"{int(ids[pair])} in the set of response token {int(rows[pair])} must be an id {bounds}"
    for pair in (loss_mask[rows] & kept.are_repeated).nonzero().flatten().tolist():
        yield f"{int(ids[pair])} is twice in the set of response token {int(rows[pair])}: each id stands once"
    for place in (loss_mask & ~kept.have(tokens)).nonzero().flatten().tolist():
        size = int(kept.sizes[place])
        yield (
            f"response token {place}, {int(tokens[place])}, is not in its set of {size}: it is drawn from its set, so sets and "
            "tokens are shifted, or something after the sampler changed it; give the sampler's own sets, or set its loss_mask to 0"
        )
