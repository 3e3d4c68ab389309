"""The token ids that a sampler kept at each position: the support of the distribution that it drew from.

With top-p, top-k or min-p a token is drawn from a part S of the vocabulary. Its score is then log softmax over S, which is above
that over the whole vocabulary by -log M, with M the kept mass. The sets come from the sampler: computed again from other logits
they would be other sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSupport:
    """`ids[offsets[t]:offsets[t + 1]]` are the ids kept at row t, in any order; here they are sorted, so that order decides no bit.

    Rows are the rows of the logits: labels[t] was drawn from set t. A row of a masked token may be empty. Both tensors lie on one
    device. On CUDA the constructor synchronises; make it from host tensors and call `to`, which does not.
    Raises: DataError for other shapes or dtypes, and for offsets that do not start with 0, decrease, or do not end with nnz.

    >>> support = SamplingSupport(torch.tensor([7, 2, 5], dtype=torch.int32), torch.tensor([0, 2, 2, 3]))
    >>> support.ids.tolist(), support.sizes.tolist(), support.largest
    ([2, 7, 5], [2, 0, 1], 2)
    """

    ids: Tensor  # [nnz] int32
    offsets: Tensor  # [T + 1] int64
    largest: int = field(init=False)
    """The most ids of a row, known on the host."""

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
        rows = _rows_of(offsets, self.ids.numel())
        order = self.ids.argsort(stable=True)
        order = order[rows[order].argsort(stable=True)]
        object.__setattr__(self, "ids", self.ids[order].int())
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "largest", int(bounds.diff().max()) if bounds.numel() > 1 else 0)

    @classmethod
    def from_lists(cls, ids: Sequence[Sequence[int]]) -> SamplingSupport:
        """One list of ids a row, as samplers return them; on the host."""
        sizes = torch.tensor([0, *(len(row) for row in ids)], dtype=torch.int64)
        return cls(torch.tensor([number for row in ids for number in row], dtype=torch.int32), sizes.cumsum(0))

    @classmethod
    def from_padded(cls, ids: Tensor, sizes: Tensor) -> SamplingSupport:  # [T, K] int, [T] int
        """The first sizes[t] ids of each row count; the others are padding."""
        kept = torch.arange(ids.shape[1], device=ids.device) < sizes[:, None]
        return cls(ids[kept].int(), torch.cat([sizes.new_zeros(1), sizes]).long().cumsum(0))

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

    def to(self, device: torch.device) -> SamplingSupport:
        """The same sets there, without a synchronisation."""
        return _made(self.ids.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True), self.largest)

    def take(self, rows: Tensor) -> SamplingSupport:  # [n] int64, on the same device
        """The sets of these rows, in this order. On CUDA it synchronises."""
        starts, sizes = self.offsets[rows], self.sizes[rows]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        inside = torch.arange(int(offsets[-1]), device=rows.device) - torch.repeat_interleave(offsets[:-1], sizes)
        ids = self.ids[torch.repeat_interleave(starts, sizes) + inside]
        return _made(ids, offsets, int(sizes.max()) if sizes.numel() else 0)

    @staticmethod
    def cat(parts: Sequence[SamplingSupport]) -> SamplingSupport:
        """The rows of all parts, one after the other."""
        sizes = torch.cat([part.sizes for part in parts])
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return _made(torch.cat([part.ids for part in parts]), offsets, max(part.largest for part in parts))


def _made(ids: Tensor, offsets: Tensor, largest: int) -> SamplingSupport:
    """Without the checks and the sort of the constructor."""
    support = object.__new__(SamplingSupport)
    for name, value in (("ids", ids), ("offsets", offsets), ("largest", largest)):
        object.__setattr__(support, name, value)
    return support


def _rows_of(offsets: Tensor, num_pairs: int) -> Tensor:
    rows = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=num_pairs)
