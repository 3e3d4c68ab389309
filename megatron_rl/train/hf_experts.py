"""Experts of which one tensor holds all, as in folders of gpt-oss, also in MXFP4: one expert's parts, and back.

    gate_up_proj [experts, hidden, 2 width], gate and up in turn, and its bias [experts, 2 width];
    down_proj [experts, width, hidden], and its bias [experts, hidden].
    In MXFP4 a weight is transposed: *_blocks [experts, rows, columns / 32, 16] and *_scales [experts, rows, columns / 32].

OCP Microscaling Formats (MX) Specification v1.0, section 5: 32 numbers of 4 bits have one scale, a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError

GROUP = 32  # numbers of one scale
BLOCKS, SCALES = "_blocks", "_scales"
# By the four bits: a sign, two of the exponent, one of the mantissa.
HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = torch.tensor([*HALF, *(-value for value in HALF)])
SCALE_OF_ONE = 127
NO_SCALE = 255  # NaN


def is_name_of_packed(tensor: str) -> bool:
    return tensor.endswith((BLOCKS, SCALES))


def unpacked(
    blocks: Tensor,  # [rows, groups, 16] uint8, two numbers each, the first one in the low bits
    scales: Tensor,  # [rows, groups] uint8, exponents of 2 with a bias of 127
) -> Tensor:  # [rows, groups * 32] float32, exact; bfloat16 holds each number too
    """Raises ConfigError for a scale that is no number."""
    if (scales == NO_SCALE).any():
        raise ConfigError(f"MXFP4 weights with a scale of {NO_SCALE}, which is no number: fetch the folder again")
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = (scales.int() - SCALE_OF_ONE)[..., None]
    # In float64, where no power of two of them is rounded.
    return torch.ldexp(FP4.double()[pairs.int()], exponents.double()).float().flatten(-2)


def parts_of(tensors: Sequence[Tensor], is_gated: bool) -> list[Tensor]:
    """tensors: one expert's weight [columns, rows], its blocks and scales, or its bias [rows]. [gate, up] or [down], rows first."""
    if len(tensors) == 2:
        rows = unpacked(*tensors)
    else:
        rows = tensors[0].t() if tensors[0].dim() == 2 else tensors[0]
    return [rows[0::2], rows[1::2]] if is_gated else [rows]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of parts_of, unpacked."""
    rows = torch.stack(list(parts), 1).flatten(0, 1)
    return rows.t() if rows.dim() == 2 else rows
