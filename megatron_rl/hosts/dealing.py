"""How a trainer deals the samples of a step to ranks and micro-batches by length, for a step that a command is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Dealing:
    """said: what a trainer does that is not done here, in words. work: of a sample of so many tokens; None: it is not done here.
    of_ranks: whether ranks get piles of as many samples too. multiple: of micro-batches a rank."""

    said: str
    work: Callable[[int], int] | None = None
    of_ranks: bool = False
    multiple: int = 1

    def parts(self, lengths: Sequence[int], ranks: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        """The samples of each micro-batch of each rank: on each rank as many as the fullest one needs. A pile may have more
        tokens than the budget. lengths: tokens of each sample. ranks: the samples of each, in the order given."""
        assert self.work is not None
        if self.of_ranks and len(ranks) > 1:
            missing = -len(lengths) % len(ranks)  # filled with rows of no work, which are then left out
            piles = deal([self.work(length) for length in lengths] + [0] * missing, len(ranks), is_equal=True)
            ranks = [[sample for sample in pile if sample < len(lengths)] for pile in piles]
        tokens = [sum(lengths[sample] for sample in of_rank) for of_rank in ranks]
        number = max(min(len(of_rank), -(-count // budget)) for of_rank, count in zip(ranks, tokens, strict=True))
        number = -(-max(number, 1) // self.multiple) * self.multiple
        return [self._of_rank(of_rank, [self.work(lengths[sample]) for sample in of_rank], number) for of_rank in ranks]

    @staticmethod
    def _of_rank(samples: Sequence[int], work: Sequence[int], number: int) -> list[list[int]]:
        """The micro-batches of least work first and last, as a pipeline fills and drains."""
        piles = deal(work, min(number, len(samples)))
        piles.sort(key=lambda pile: (sum(work[place] for place in pile), pile[:1]), reverse=True)
        return [[samples[place] for place in pile] for pile in [*piles[::2][::-1], *piles[1::2]] if pile]


class _Pile(NamedTuple):
    work: int = 0
    size: int = 0
    samples: tuple[int, ...] = ()


def deal(work: Sequence[int], number: int, *, is_equal: bool = False) -> list[list[int]]:
    """`number` piles of about equal work, by the differencing of Karmarkar and Karp: the two most uneven divisions become one,
    the largest pile of each with the smallest of the other, until one is left.

    work: of each sample. is_equal: piles of as many samples, which `number` must divide. Among equals verl's order decides."""
    order = sorted(range(len(work)), key=lambda sample: (work[sample], sample))
    length = number if is_equal else 1
    heap = []
    for start in range(0, len(order), length):
        piles = [_Pile(work[sample], 1, (sample,)) for sample in order[start : start + length]]
        heap.append(_ordered([*piles, *[_Pile()] * (number - len(piles))]))
    heapify(heap)
    while len(heap) > 1:
        (_, first), (_, second) = heappop(heap), heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        heappush(heap, _ordered([_Pile(a.work + b.work, a.size + b.size, a.samples + b.samples) for a, b in pairs]))
    return [sorted(pile.samples) for pile in heap[0][1]] if heap else []


def _ordered(piles: list[_Pile]) -> tuple[tuple[int, int, int, tuple[int, ...]], list[_Pile]]:
    """(a key that puts the most uneven division first, then that of the largest pile; the piles, the largest one first). No two
    keys are equal, for no two divisions share a sample."""
    piles = sorted(piles, reverse=True)
    largest, smallest = piles[0], piles[-1]
    return (smallest.work - largest.work, -largest.work, -largest.size, tuple(-sample for sample in largest.samples)), piles
