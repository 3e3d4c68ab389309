"""The token ids that a sampler kept at each position: the support of the distribution that it drew from.

With top-p, top-k or min-p a token is drawn from a part S of the vocabulary. Its score is then log softmax over S, which is above
that over the whole vocabulary by -log M, with M the kept mass. The sets come from the sampler: computed again from other logits
they would be other sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.errors import DataError

# Ids whose numbers, up to 45 bytes each, exist at one time: 50 MB.
PAIRS_AT_ONCE = 2**20
# Above every int32: no vocabulary is as large.
WRONG = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSupport:
    """`ids[offsets[t]:offsets[t + 1]]` are the ids kept at row t, in any order; here they are sorted, so that order decides no bit.

    Rows are the rows of the logits: labels[t] was drawn from set t. The row of a masked token may be empty, or hold anything. Both
    tensors lie on one device. On CUDA the constructor synchronises; make it from host tensors and call `to`, which does not.
    Raises: DataError for other shapes or dtypes, and for offsets that do not start with 0, decrease, or do not end with nnz.
    `check` raises for wrong ids.

    >>> support = SamplingSupport(torch.tensor([7, 2, 5], dtype=torch.int32), torch.tensor([0, 2, 2, 3]))
    >>> support.ids.tolist(), support.sizes.tolist()
    ([2, 7, 5], [2, 0, 1])
    """

    ids: Tensor  # [nnz] int32
    offsets: Tensor  # [T + 1] int64
    # What the host knows, so that nothing asks the device.
    bounds: Tensor = field(init=False)  # [T + 1] int64 on the CPU
    """offsets."""
    bound: int = field(init=False)
    """No id is as large as this one; WRONG where one is below 0, or in its row twice."""

    def __post_init__(self) -> None:
        for name, tensor, dtypes in (
            ("ids", self.ids, (torch.int32, torch.int64)),
            ("offsets", self.offsets, (torch.int64, torch.int32)),
        ):
            if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.dtype not in dtypes:
                given = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DataError(f"sampling support: {name} must be a vector of {dtypes[0]}, got {given}")
        if self.ids.device != self.offsets.device:
            raise DataError(f"sampling support: ids are on {self.ids.device} and offsets on {self.offsets.device}")
        offsets = self.offsets.long()
        bounds = offsets.cpu()
        if bounds.numel() < 1 or bounds[0] != 0 or bounds[-1] != self.ids.numel() or bool((bounds.diff() < 0).any()):
            ends = f"{bounds[0]} to {bounds[-1]}" if bounds.numel() else "none"
            raise DataError(
                f"sampling support: offsets [T + 1] must rise from 0 to the {self.ids.numel()} ids, got {bounds.numel()} offsets, "
                f"{ends}: offsets[t] counts the ids of the rows before t"
            )
        ids = self.ids.clamp(-1, torch.iinfo(torch.int32).max).int()  # a number beyond int32 stays one that no vocabulary has
        rows = _rows_of(offsets, ids.numel())
        order = ids.argsort(stable=True)
        order = order[rows[order].argsort(stable=True)]
        ids = ids[order]
        _set(self, ids=ids, offsets=offsets, bounds=bounds)
        bound = int(ids.max()) + 1 if ids.numel() else 0
        _set(self, bound=WRONG if bool((self.are_repeated | (ids < 0)).any()) else bound)

    @classmethod
    def from_lists(cls, ids: Sequence[Sequence[int]]) -> SamplingSupport:
        """One list of ids a row, as samplers return them; on the host."""
        sizes = torch.tensor([len(row) for row in ids], dtype=torch.int64)
        numbers = [number for row in ids for number in row]  # their own dtype: a fraction is refused
        return cls(torch.tensor(numbers) if numbers else sizes[:0], offsets_of(sizes))

    @property
    def num_rows(self) -> int:
        return self.offsets.numel() - 1

    @property
    def num_pairs(self) -> int:
        return self.ids.numel()

    @property
    def sizes(self) -> Tensor:  # [T] int64
        return self.offsets.diff()

    @property
    def rows(self) -> Tensor:  # [nnz] int64: the row of each id
        return _rows_of(self.offsets, self.num_pairs)

    @property
    def are_repeated(self) -> Tensor:  # [nnz] bool: the second and later of equal ids in a row
        is_again, rows = torch.zeros_like(self.ids, dtype=torch.bool), self.rows
        is_again[1:] = (self.ids[1:] == self.ids[:-1]) & (rows[1:] == rows[:-1])
        return is_again

    def have(self, tokens: Tensor) -> Tensor:  # [T] int64 -> [T] bool: whether the set of a row holds its token
        """On CUDA it synchronises."""
        rows = self.rows
        return torch.zeros_like(tokens, dtype=torch.bool).index_fill_(0, rows[self.ids == tokens[rows]], True)

    def to(self, device: torch.device) -> SamplingSupport:
        """The same sets there; only a copy from CUDA to the host synchronises."""
        waits = torch.device(device).type == "cpu"
        ids, offsets = (part.to(device, non_blocking=not waits) for part in (self.ids, self.offsets))
        return _made([self], ids, offsets, self.bounds)

    def take(self, rows: Tensor) -> SamplingSupport:  # [n] int64, on the same device
        """The sets of these rows, in this order. On CUDA it synchronises."""
        starts, sizes = self.offsets[:-1][rows], self.sizes[rows]
        offsets = offsets_of(sizes)
        bounds = offsets.cpu()
        shift = torch.repeat_interleave(starts - offsets[:-1], sizes, output_size=int(bounds[-1]))
        return _made([self], self.ids[shift + torch.arange(len(shift), device=rows.device)], offsets, bounds)

    def only(self, rows: Tensor) -> SamplingSupport:  # [T] bool, on the same device
        """As many rows, of which the others are empty: what is wrong with their ids is gone too. On CUDA it synchronises."""
        return SamplingSupport(self.ids[rows[self.rows]], offsets_of(torch.where(rows, self.sizes, 0)))

    def blocks(self, most: int = PAIRS_AT_ONCE) -> Iterator[tuple[slice, slice, SamplingSupport]]:
        """(rows, pairs, their sets): neighbouring rows with at most so many ids together, or one row. No synchronisation."""
        for rows, pairs in neighbouring_rows(self.bounds, most):
            ends = slice(rows.start, rows.stop + 1)
            yield rows, pairs, _made([self], self.ids[pairs], self.offsets[ends] - pairs.start, self.bounds[ends] - pairs.start)

    @staticmethod
    def cat(parts: Sequence[SamplingSupport]) -> SamplingSupport:
        """The rows of all parts, one after the other."""
        sizes, known = torch.cat([part.sizes for part in parts]), torch.cat([part.bounds.diff() for part in parts])
        return _made(parts, torch.cat([part.ids for part in parts]), offsets_of(sizes), offsets_of(known))

    def is_inside(self, vocab_size: int) -> bool:
        """Whether the host knows that all ids are distinct in their rows and in [0, vocab_size). False: some are not, somewhere."""
        return self.bound <= vocab_size

    def are_wrong(self, vocab_size: int) -> Tensor:  # [nnz] bool
        """Ids outside [0, vocab_size), and those that are_repeated."""
        return (self.ids < 0) | (self.ids >= vocab_size) | self.are_repeated

    def check(
        self,
        num_tokens: int,
        vocab_size: int,
        labels: Tensor,  # [T] int64
        loss_mask: Tensor | None = None,  # [T] bool; None: every row counts
        cu_seqlens: Tensor | None = None,  # [N + 1], to name the sample
    ) -> None:
        """Raises DataError for another number of rows or another device; and on the CPU, for an unmasked token, where its set is
        empty, does not hold the label, or has ids outside [0, vocab_size) or one twice. On CUDA no value is read: a score over such
        a set is not finite."""
        if self.num_rows != num_tokens:
            raise DataError(
                f"sampling_support has {self.num_rows} rows and the micro-batch {num_tokens} tokens: it needs one for each row of "
                "the logits, which may be empty for padding and masked tokens"
            )
        if self.ids.device != labels.device:
            raise DataError(
                f"sampling_support is on {self.ids.device} and the logits on {labels.device}: move it with .to(logits.device)"
            )
        if self.ids.is_cuda:
            return
        is_live = torch.ones(num_tokens, dtype=torch.bool) if loss_mask is None else loss_mask
        has_label, is_wrong = (torch.zeros(num_tokens, dtype=torch.bool) for _ in range(2))
        for block, _, sets in self.blocks():
            has_label[block] = sets.have(labels[block])
            if not self.is_inside(vocab_size):
                is_wrong[block].index_fill_(0, sets.rows[sets.are_wrong(vocab_size)], True)
        bad = (is_live & (is_wrong | ~has_label)).nonzero()[:, 0].tolist()
        if bad:
            raise DataError(self._fault(bad, vocab_size, labels, bool(is_wrong[bad[0]]), cu_seqlens))

    def _fault(self, bad: list[int], vocab_size: int, labels: Tensor, is_wrong: bool, cu_seqlens: Tensor | None) -> str:
        token = bad[0]
        kept = self.ids[self.bounds[token] : self.bounds[token + 1]].tolist()
        shown = ", ".join(map(str, kept[:6])) + (", ..." if len(kept) > 6 else "")
        where = f"token {token}"
        if cu_seqlens is not None:
            where += f" (sample {int(torch.searchsorted(cu_seqlens[1:].cpu().long(), token, right=True))} of the micro-batch)"
        if not kept:
            what = "is trained and its set is empty: mask the token, or pass the ids that the sampler kept"
        elif is_wrong:
            what = (
                f"has the ids {shown}: they must be distinct and in [0, {vocab_size}); pass only the kept ids, without the "
                "padding of their list"
            )
        else:
            what = (
                f"took the id {int(labels[token])}, which is not among its {len(kept)} ids {shown}: a token is drawn from its own "
                "set, so these sets belong to other tokens (shifted by one?), or something after the sampler has changed the "
                "token (speculative decoding, a logits processor); pass the sets that the tokens were drawn from, or mask the token"
            )
        return f"sampling_support: {where} {what}. {len(bad)} unmasked tokens have such a fault"


def offsets_of(sizes: Tensor) -> Tensor:  # [n] -> [n + 1] int64: how many come before each, and all
    sums = sizes.cumsum(0)
    return torch.cat([sums.new_zeros(1), sums])


def neighbouring_rows(bounds: Tensor, most: int) -> Iterator[tuple[slice, slice]]:  # [n + 1] offsets on the CPU
    """(rows, pairs) of neighbouring rows with at most so many pairs together, or of one row."""
    first, num_rows = 0, bounds.numel() - 1
    while first < num_rows:
        start = int(bounds[first])
        last = max(int(torch.searchsorted(bounds, start + most, right=True)) - 1, first + 1)
        yield slice(first, last), slice(start, int(bounds[last]))
        first = last


def _made(parts: Sequence[SamplingSupport], ids: Tensor, offsets: Tensor, bounds: Tensor) -> SamplingSupport:
    """Of rows of the parts, without the checks and the sort of the constructor."""
    made = object.__new__(SamplingSupport)
    return _set(made, ids=ids, offsets=offsets, bounds=bounds, bound=max(part.bound for part in parts))


def _set(support: SamplingSupport, **values: object) -> SamplingSupport:
    for name, value in values.items():
        object.__setattr__(support, name, value)
    return support


def _rows_of(offsets: Tensor, num_pairs: int) -> Tensor:
    rows = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=num_pairs)
