"""Reads and checks the sets of ids that a sampler kept, as rollout files and the dumps of samplers hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.sampling_support import SamplingSupport, offsets_of

# The list with all ids -> those that say where the ids of each token are.
PLACES = {"ids": ("counts", "offsets"), "token_ids": ("counts", "offsets", "lengths", "sizes")}
FORMS = (
    'must be null, or a list of ids for each response token; or all ids one after the other, as {"ids": [...], "counts": [...]}, '
    '{"token_ids": [...], "offsets": [...]} or {"token_ids": [...], "lengths": [...]}; or padded rows of them with their "sizes"'
)


def read_kept_ids(value: Any) -> SamplingSupport:
    """One row a response token. Raises DataError with what is wrong, without a place.

    A list of lists is of a file of ours, and SGLang's output_token_sampling_mask; ids with counts of prime-rl; token_ids with
    offsets, 0 first, of vLLM's SamplingMask and of slime, with lengths of SGLang; padded token_ids with sizes of NeMo-RL.
    """
    if isinstance(value, SamplingSupport):
        return value
    if isinstance(value, list):
        if not _are_rows(value):
            raise DataError(FORMS)
        return SamplingSupport.from_lists(value)
    name, place = _names_of(value) if isinstance(value, dict) else ("", "")
    if not place or not _are_integers(value[place]):
        raise DataError(FORMS)
    ids, numbers = value[name], torch.tensor(value[place], dtype=torch.int64)
    if place == "sizes":
        return SamplingSupport.from_padded(_padded(ids, value[place]), numbers)
    if not _are_integers(ids):
        raise DataError(FORMS)
    return SamplingSupport(torch.tensor(ids, dtype=torch.int64), numbers if place == "offsets" else offsets_of(numbers))


def _padded(rows: list, sizes: list) -> Tensor:  # [response_length, K] int64
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    if not _are_rows(rows) or {len(row) for row in rows} - {width} or any(not 0 <= size <= width for size in sizes):
        raise DataError(FORMS)
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)


def _names_of(value: dict) -> tuple[str, str]:
    """The two keys of lists, where there is one of each kind; else ("", "")."""
    found = [(ids, place) for ids, places in PLACES.items() for place in places if ids in value and place in value]
    are_lists = len(found) == 1 and all(isinstance(value[name], list) for name in found[0])
    return found[0] if are_lists else ("", "")


def _are_rows(values: list) -> bool:
    return all(isinstance(row, list) and _are_integers(row) for row in values)


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
