"""Finds a function of vectors whose result for one element depends on the other elements: it is called on halves of them too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# The rest of a loop over vectors may round in another way, so that few elements show nothing: 64 are four rests of 16. A half of
# 4096 has no rest where the function takes the elements as they are. Of a half 64 are 3 %: a clip may act on 7 %.
NUM_PROBES, FEW = 4096, 64
# Elsewhere a result has the same bits. What a clip ratio of 3e-4 makes of the others is 1e-4 of a value, so a bound for sums of
# float32 would hide it.
_SAME, _SMALLEST = 1e-5, 1e-9


@contextmanager
def leaving_no_trace() -> Iterator[None]:
    """A user's function makes its tensors on the CPU, records no gradient, and moves no generator of random numbers."""
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


def halves(vectors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The places of the smaller half of each vector's values, then of its larger half.

    The sum, the mean and the count of a vector are others in each half. Its largest value is in one half alone, and so is its
    smallest one.
    """
    for vector in vectors:
        yield from vector.argsort(stable=True).chunk(2)


def changed_in(
    parts: Iterable[Tensor],  # places, as `halves` gives them
    results_of: Callable[[Tensor], Sequence[Tensor]],
    whole: Sequence[Tensor],  # the same results, of all places together
) -> set[int]:
    """Which of the results are others where the function is given a part of the elements alone."""
    changed: set[int] = set()
    for places in parts:
        pairs = enumerate(zip(results_of(places), whole, strict=True))
        changed |= {index for index, (alone, joint) in pairs if num_apart(alone, joint[places], _SAME, _SMALLEST) > FEW}
    return changed


def num_apart(values: Tensor, others: Tensor, rtol: float, atol: float) -> int:
    return int((~torch.isclose(values.float(), others.float(), rtol=rtol, atol=atol, equal_nan=True)).sum())
