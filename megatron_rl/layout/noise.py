"""Makes numbers that look random of whole numbers, such as the seed, a sample's number and a position: in each layout the same."""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def hash_of(*parts: int | Tensor) -> Tensor:  # int64, of one shape -> that shape
    """A hash of the parts in their order. A number is the part of each element."""
    states = torch.zeros((), dtype=torch.int64)
    for part in parts:
        states = scramble((states + signed(INCREMENT)) ^ (part if isinstance(part, Tensor) else signed(part)))
    return states


def scramble(words: Tensor) -> Tensor:
    """The finaliser of splitmix64: an input bit flips each output bit with probability near 1/2. int64 wraps."""
    for shift, multiplier in zip(SHIFTS[:2], MULTIPLIERS, strict=True):
        words = (words ^ logical_shift(words, shift)) * signed(multiplier)
    return words ^ logical_shift(words, SHIFTS[2])


def logical_shift(words: Tensor, shift: int) -> Tensor:
    """Shift to the right that brings in zeros; torch's own brings in copies of the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def signed(value: int) -> int:
    """The int64 with the low 64 bits of value."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
