"""Sampling noise as a pure function of where it is used: it has no state and does not depend on the layout.

argmax(logits + Gumbel noise) is a draw from softmax(logits) (Gumbel 1954; Maddison et al., arXiv:1411.0030, section 2).
Each number is a hash of (seed, rollout, sample, position, column). So a rank computes only its vocabulary shard and its
samples, and every layout draws the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
# Bits of the hash that become a uniform number. With the added half, which excludes 0 and 1, they fill a float64's 53 bits.
UNIFORM_BITS = 52


def gumbel_noise(
    seed: int,
    rollout: int,
    samples: Tensor,  # [B] int64, index of each sample in the rollout batch
    positions: Tensor,  # [B] int64, position that the next token of each sample takes
    columns: Tensor,  # [V_local] int64, vocabulary ids of this rank's columns
) -> Tensor:  # [B, V_local] float32
    """Standard Gumbel noise, -log(-log(u)), u uniform in (0, 1).

    Row b is a splitmix64 stream; a hash of (seed, rollout, samples[b], positions[b]) is its state, and column c takes its
    number c. It is computed in float64: logarithms differ between devices in the last bit, which the float32 result does
    not hold, and tokens of probability down to 2^-52 are drawn. All values are finite: between -3.61 and 36.74.

    Communication: none.
    """
    for name, tensor in (("samples", samples), ("positions", positions), ("columns", columns)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise TypeError(f"{name} must be one-dimensional int64, got {tuple(tensor.shape)} {tensor.dtype}")
    states = torch.zeros_like(samples)
    for part in (_signed(seed), _signed(rollout), samples, positions):
        states = _scramble((states + _signed(INCREMENT)) ^ part)
    hashes = _scramble(states[:, None] + (columns + 1)[None, :] * _signed(INCREMENT))
    uniform = _logical_shift(hashes, 64 - UNIFORM_BITS).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_().float()


def _scramble(words: Tensor) -> Tensor:
    """The finaliser of splitmix64: an input bit flips each output bit with probability near 1/2. int64 wraps."""
    for shift, multiplier in zip(SHIFTS[:2], MULTIPLIERS, strict=True):
        words = (words ^ _logical_shift(words, shift)) * _signed(multiplier)
    return words ^ _logical_shift(words, SHIFTS[2])


def _logical_shift(words: Tensor, shift: int) -> Tensor:
    """Shift to the right that brings in zeros; torch's own brings in copies of the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of value."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
