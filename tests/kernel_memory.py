"""What interpreted kernels read and write, address by address: where an access out of range shows. Never for compiled kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy  # the interpreter needs it, compiled kernels do not


@dataclass
class Accesses:
    """Byte addresses in the order of the program; vectors are the rows [*, 16 bytes] of 2-D accesses that are not cut."""

    loads: list[numpy.ndarray] = field(default_factory=list)
    stores: list[numpy.ndarray] = field(default_factory=list)
    vectors: list[numpy.ndarray] = field(default_factory=list)

    def note(self, into: list[numpy.ndarray], pointers, mask) -> None:
        import numpy

        addresses, active = numpy.broadcast_arrays(pointers.data, mask.data)
        into.append(addresses[active].astype(numpy.int64))
        if addresses.ndim == 2:
            self.vectors.append(addresses[active.all(axis=1), 0].astype(numpy.int64))


def counts(accesses: list[numpy.ndarray], memory: torch.Tensor) -> torch.Tensor:
    """How often each element of a contiguous tensor was touched, in its shape."""
    import numpy

    addresses = numpy.concatenate([numpy.empty(0, numpy.int64), *accesses])
    index = (addresses - memory.data_ptr()) // memory.itemsize
    index = index[(index >= 0) & (index < memory.numel())]
    return torch.from_numpy(numpy.bincount(index, minlength=memory.numel())).view(memory.shape)


@contextlib.contextmanager
def recorded_accesses() -> Iterator[Accesses]:
    from triton.runtime.interpreter import interpreter_builder as builder

    accesses = Accesses()
    load, store = builder.create_masked_load, builder.create_masked_store

    def noted_load(pointers, mask, *others):
        accesses.note(accesses.loads, pointers, mask)
        return load(pointers, mask, *others)

    def noted_store(pointers, value, mask, *others):
        accesses.note(accesses.stores, pointers, mask)
        return store(pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = noted_load, noted_store
    try:
        yield accesses
    finally:
        del builder.create_masked_load, builder.create_masked_store
