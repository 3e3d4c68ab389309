"""Reads the micro-batch of a host as the losses take it: flat rows [T] of this rank's logits. No value is checked or weighted.

miles and slime list per-token tensors sample by sample, each the part of the response that the rank owns in zigzag order (all of it
without context parallelism). Their rows in the logits depend on the layout:

    thd         each sample padded to chunks of equal size, the rank's two chunks one after the other, samples end to end, tail
    bshd        the same with one padded length for all samples; a row of logits for each
    allgather   whole samples end to end, then cut into cp_size contiguous parts; the lists stay in zigzag order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.hosts.kept_ids import KeptIds, read_sets, trained_sets, with_tokens
from megatron_rl.layout.context_parallel import chunk_spans, response_spans
from megatron_rl.layout.groups import Group, all_reduce_sum
from megatron_rl.layout.sampling_support import SamplingSupport

# Lists of the batch that hold one number for each response token of this rank.
PER_TOKEN_KEYS = ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs", "opd_reverse_kl")


@dataclass(frozen=True, slots=True)
class HostBatch:
    labels: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool, False where a row predicts no response token
    cu_seqlens: Tensor  # [N + 1] int32, this rank's slices of the samples
    token_counts: Tensor  # [N] int64, over all cp ranks
    rollout_token_counts: Tensor  # [N] float64: the host's rollout_mask_sums, else token_counts
    per_token: dict[str, Tensor]  # name -> [T] float32, 0 outside the response; only what the batch has
    sampling_support: SamplingSupport | None = None  # T rows on the host, empty where the mask is 0; None: not asked for


@dataclass(frozen=True, slots=True)
class _Piece:
    """`length` response tokens of one sample, from `response_start` of the response, predicted by the rows from `row`."""

    sample: int
    row: int
    response_start: int
    length: int


def read_host_batch(
    batch: Mapping,
    logits: Tensor,
    cp_group: Group,
    *,
    is_padded: bool,
    is_contiguous: bool,
    kept: KeptIds | None = None,
    tp_size: int = 1,
) -> HostBatch:
    """The micro-batch of `logits` [1, T, V_tp] (thd) or [N, S, V_tp] (bshd, is_padded). is_contiguous: the layout allgather. kept:
    where the ids are that the sampler kept; None: they are not read. With them labels on a GPU are copied to the host.

    Communication: none; is_contiguous one all-reduce over cp of [response tokens, k], which brings the lists into the order
    of the logits. Raises DataError, naming the key, for what is absent or has a wrong length.
    """
    rows = _read_rows(batch, logits, cp_group, is_padded=is_padded, is_contiguous=is_contiguous)
    lengths, device = rows.lengths, rows.device
    require(batch, "advantages")
    present = [key for key in PER_TOKEN_KEYS if not is_absent(batch.get(key))]
    lists = {key: _check_list(key, batch[key], rows.zigzag_pieces, lengths) for key in present}
    if is_contiguous:
        whole = _whole_responses(lists, rows.zigzag_pieces, lengths, cp_group, device)
        lists = {key: _cut(values, rows.pieces) for key, values in whole.items()}
    token_counts = torch.stack([(mask != 0).sum() for mask in lengths.masks]).to(device)
    support = None
    if kept is not None:
        mask = _concatenate([part != 0 for part in lengths.masks], torch.bool, device)
        sets, vocab_size = read_sets(batch, kept, lengths.response), logits.shape[-1] * tp_size
        support = rows.sets_of(trained_sets(sets, kept, rows.response_tokens(), mask, vocab_size, lengths.response))
    return HostBatch(
        labels=rows.labels(),
        loss_mask=rows.mask(),
        cu_seqlens=torch.tensor(rows.bounds, dtype=torch.int32, device=device),
        sampling_support=support,
        token_counts=token_counts,
        rollout_token_counts=_rollout_counts(batch.get("rollout_mask_sums"), token_counts),
        per_token={key: rows.place(parts, torch.float32) for key, parts in lists.items()},
    )


@dataclass(frozen=True, slots=True)
class HostResponses:
    """The response tokens of a micro-batch, for their log-probabilities."""

    labels: Tensor  # [T] int64
    is_response: Tensor  # [T] bool: the row predicts a response token
    _rows: _Rows

    def kept_sets(self, batch: Mapping, keys: KeptIds) -> SamplingSupport:
        """The sets of the rows, on the host, each with its token: where nothing was sampled the score is 0, as in the host."""
        sets, labels = read_sets(batch, keys, self._rows.lengths.response), self._rows.response_tokens().cpu()
        return self._rows.sets_of(with_tokens(sets, labels, torch.ones_like(labels, dtype=torch.bool))[0])

    def lists_of(self, values: Tensor, cp_group: Group) -> list[Tensor]:  # [T] -> the part of each sample that this rank owns
        """Numbers by rows as the lists of a host's batch, in zigzag order.

        Communication: where rows are contiguous under context parallelism one all-reduce of [response tokens] over cp, else none.
        """
        rows = self._rows

        def joined(pieces: list[_Piece], parts: list[Tensor]) -> list[Tensor]:
            own: list[list[Tensor]] = [[] for _ in rows.lengths.total]
            for piece, part in zip(pieces, parts, strict=True):
                own[piece.sample].append(part)
            return [_concatenate(sample_parts, values.dtype, values.device) for sample_parts in own]

        lists = joined(rows.pieces, [values[piece.row : piece.row + piece.length] for piece in rows.pieces])
        if rows.pieces is rows.zigzag_pieces:
            return lists
        whole = _whole_responses({"": lists}, rows.pieces, rows.lengths, cp_group, values.device)[""]
        return joined(rows.zigzag_pieces, _cut(whole, rows.zigzag_pieces))


def read_host_responses(batch: Mapping, logits: Tensor, cp_group: Group, *, is_padded: bool, is_contiguous: bool) -> HostResponses:
    """The response tokens of `logits`, as read_host_batch has them: masked ones too. No communication; the same errors."""
    responses = [torch.ones(int(length)) for length in require(batch, "response_lengths")]
    unmasked = {**batch, "loss_masks": responses}
    rows = _read_rows(unmasked, logits, cp_group, is_padded=is_padded, is_contiguous=is_contiguous)
    return HostResponses(rows.labels(), rows.mask(), rows)


def require(batch: Mapping, key: str, reason: str = "these settings"):
    """batch[key]; DataError where the host left it out."""
    value = batch.get(key)
    if is_absent(value):
        present = ", ".join(sorted(str(name) for name, held in batch.items() if not is_absent(held)))
        raise DataError(f"the host's batch has no {key!r}, which our loss needs with {reason}; it has: {present}")
    return value


def is_absent(value: object) -> bool:
    """Hosts give None or an empty list for what they do not have."""
    return value is None or (isinstance(value, list) and not value)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which row of the logits predicts which response token."""

    lengths: _Lengths
    zigzag_pieces: list[_Piece]
    """In the order of the host's lists."""
    pieces: list[_Piece]
    """In the order of the logits; the same object unless the slices are contiguous."""
    bounds: list[int]  # [N + 1]
    num_rows: int
    device: torch.device

    def place(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:  # [T]
        """A part for each piece; 0 in the other rows."""
        piece_places = [torch.arange(piece.row, piece.row + piece.length, device=self.device) for piece in self.pieces]
        places, values = _concatenate(piece_places, torch.int64, self.device), _concatenate(parts, dtype, self.device)
        return torch.zeros(self.num_rows, dtype=dtype, device=self.device).index_copy(0, places, values)

    def labels(self) -> Tensor:  # [T]
        return self.place(_cut(self.lengths.responses, self.pieces), torch.int64)

    def response_tokens(self) -> Tensor:  # [sum of the response lengths], of all ranks
        return _concatenate(self.lengths.responses, torch.int64, self.device)

    def sets_of(self, sets: SamplingSupport) -> SamplingSupport:  # a set of each response token -> of each row
        """On the host; empty where a row predicts no response token."""
        starts = [0, *accumulate(self.lengths.response)]
        places = torch.full((self.num_rows,), sets.num_rows)
        for piece in self.pieces:
            first = starts[piece.sample] + piece.response_start
            places[piece.row : piece.row + piece.length] = torch.arange(first, first + piece.length)
        return SamplingSupport.cat([sets, SamplingSupport.from_lists([[]])]).take(places)

    def mask(self) -> Tensor:  # [T]
        return self.place([part != 0 for part in _cut(self.lengths.masks, self.pieces)], torch.bool)


def _read_rows(batch: Mapping, logits: Tensor, cp_group: Group, *, is_padded: bool, is_contiguous: bool) -> _Rows:
    lengths = _Lengths(batch, is_padded)
    zigzag_pieces, bounds = _zigzag_pieces(lengths, cp_group)
    num_rows, pieces = _check_logits(logits, lengths, bounds, is_contiguous, cp_group), zigzag_pieces
    if is_contiguous:
        pieces, bounds = _contiguous_pieces(lengths, cp_group.rank() * num_rows, num_rows)
    return _Rows(lengths, zigzag_pieces, pieces, bounds, num_rows, logits.device)


def _cut(responses: Sequence[Tensor], pieces: list[_Piece]) -> list[Tensor]:
    """The part of each piece, from its sample's whole [response]."""
    return [responses[piece.sample][piece.response_start : piece.response_start + piece.length] for piece in pieces]


class _Lengths:
    """The Python lists of a batch."""

    def __init__(self, batch: Mapping, is_padded: bool):
        self.total = [int(length) for length in require(batch, "total_lengths")]
        self.response = [int(length) for length in require(batch, "response_lengths")]
        self.tokens: list[Tensor] = require(batch, "unconcat_tokens")
        self.masks: list[Tensor] = require(batch, "loss_masks")
        self.is_bshd = is_padded
        self.padded_to = [int(length) for length in require(batch, "max_seq_lens")] if self.is_bshd else [None] * len(self.total)

    @property
    def responses(self) -> list[Tensor]:  # [response] of each sample
        return [tokens[total - size :] for tokens, total, size in zip(self.tokens, self.total, self.response, strict=True)]


def _zigzag_pieces(lengths: _Lengths, cp_group: Group) -> tuple[list[_Piece], list[int]]:
    """The response tokens of this rank's rows, and the bounds of its samples' slices. Python ints only."""
    rank, size = cp_group.rank(), cp_group.size()
    pieces, bounds = [], [0]
    for sample, (total, response, padded) in enumerate(zip(lengths.total, lengths.response, lengths.padded_to, strict=True)):
        first_prediction, row = total - response - 1, bounds[-1]
        chunks = chunk_spans(padded or total, rank, size)
        spans = response_spans(total, response, rank, size, padded_to=padded)
        for (chunk_start, chunk_end), (start, end) in zip(chunks, spans, strict=True):
            if end > start:
                pieces.append(_Piece(sample, row + first_prediction + start - chunk_start, start, end - start))
            row += chunk_end - chunk_start
        bounds.append(row)
    return pieces, bounds


def _contiguous_pieces(lengths: _Lengths, first_row: int, num_rows: int) -> tuple[list[_Piece], list[int]]:
    """As _zigzag_pieces, for rows [first_row, first_row + num_rows) of all samples end to end."""
    pieces, starts = [], [0]
    for sample, (total, response) in enumerate(zip(lengths.total, lengths.response, strict=True)):
        first_prediction = starts[-1] + total - response - 1
        first, last = max(first_prediction, first_row), min(first_prediction + response, first_row + num_rows)
        if last > first:
            pieces.append(_Piece(sample, first - first_row, first - first_prediction, last - first))
        starts.append(starts[-1] + total)
    return pieces, [min(max(start - first_row, 0), num_rows) for start in starts]


def _check_logits(logits: Tensor, lengths: _Lengths, bounds: list[int], is_contiguous: bool, cp_group: Group) -> int:
    """The number of rows T."""
    num_samples, size = len(lengths.total), cp_group.size()
    if logits.dim() != 3:
        raise DataError(f"logits must be [1, T, V] (thd) or [samples, S, V] (bshd), got {tuple(logits.shape)}")
    num_rows = logits.shape[0] * logits.shape[1]
    if is_contiguous and lengths.is_bshd and num_samples > 1:
        # The host finds a sample's rows by the lengths before it, without their padding: its own log_probs are of other tokens.
        raise DataError(
            f"--allgather-cp with --qkv-format bshd and {num_samples} samples in a micro-batch: the host's log_probs of all but "
            "the first are those of other tokens; set --micro-batch-size 1"
        )
    expected = (num_samples if lengths.is_bshd else 1, logits.shape[1])
    if lengths.is_bshd:
        longest = max(length or 0 for length in lengths.padded_to)
        needed = -(-longest // size) if is_contiguous else max(end - start for start, end in pairwise(bounds))
        expected = (num_samples, needed)
    elif is_contiguous:
        needed = -(-sum(lengths.total) // size)
    else:
        needed = bounds[-1]
    if tuple(logits.shape[:2]) != expected or logits.shape[1] < needed:
        raise DataError(
            f"logits {tuple(logits.shape)} do not fit the batch: {num_samples} samples of total_lengths {lengths.total} at cp size "
            f"{size} need {expected[0]} x {needed} rows{'' if lengths.is_bshd else ' or more'}"
        )
    return num_rows


def _check_list(key: str, values: Sequence[Tensor], pieces: list[_Piece], lengths: _Lengths) -> list[Tensor]:
    if len(values) != len(lengths.total):
        raise DataError(f"the host's batch has {len(values)} {key} for {len(lengths.total)} total_lengths")
    for index, value in enumerate(values):
        expected = sum(piece.length for piece in pieces if piece.sample == index)
        if not isinstance(value, Tensor) or value.shape != (expected,):
            given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DataError(f"{key}[{index}] of the host's batch is {given}: it must be [{expected}], the tokens of this cp rank")
    return list(values)


def _whole_responses(
    lists: dict[str, list[Tensor]], pieces: list[_Piece], lengths: _Lengths, cp_group: Group, device: torch.device
) -> dict[str, tuple[Tensor, ...]]:
    """Each sample's whole [response] from the ranks' `pieces`. All are constants: no gradient goes through the all-reduce."""
    columns = torch.zeros(sum(lengths.response), len(lists), dtype=torch.float32, device=device)
    starts = [sum(lengths.response[:sample]) for sample in range(len(lengths.response))]
    for column, values in enumerate(lists.values()):
        taken = [0] * len(starts)
        for piece in pieces:
            first, local = starts[piece.sample] + piece.response_start, taken[piece.sample]
            columns[first : first + piece.length, column] = values[piece.sample][local : local + piece.length].detach()
            taken[piece.sample] += piece.length
    columns = all_reduce_sum(columns, cp_group)
    return {key: columns[:, column].split(lengths.response) for column, key in enumerate(lists)}


def _rollout_counts(sums, token_counts: Tensor) -> Tensor:  # [N] float64
    """The hosts' rollout_mask_sums, a tensor or a list of numbers or 0-d tensors; without it a sample is its own rollout."""
    if sums is None:
        return token_counts.double()
    if not isinstance(sums, Tensor):
        sums = torch.stack([torch.as_tensor(value, device=token_counts.device) for value in sums])
    if sums.shape != token_counts.shape:
        raise DataError(f"rollout_mask_sums of the host's batch is {tuple(sums.shape)}, expected [{token_counts.numel()}]")
    return sums.to(token_counts.device, torch.float64)


def _concatenate(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [part.detach().to(device, dtype) for part in parts]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=device)
