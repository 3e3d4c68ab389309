"""Launches that fail in the first minute on a GPU, each in its own way: tests/first_launch.py must say so of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load_with(X, offsets, POLICY: tl.constexpr = "evict_first"):
    return tl.load(X + offsets, eviction_policy=POLICY)


@triton.jit
def copy_kernel(X, OUT, number, BLOCK: tl.constexpr, HAS_TEXT: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(X + offsets)
    if HAS_TEXT:
        x = load_with(X, offsets)
    tl.store(OUT + offsets, x + number)


@triton.jit
def copy_tile_kernel(X, OUT, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(OUT + offsets, X.load([0, 0]))


def copy(*, number: object = 1, HAS_TEXT: bool = False, grid: tuple[int, ...] = (1,), **options: object) -> Callable[[], None]:
    def run() -> None:
        x = torch.empty(128, device="cuda")
        copy_kernel[grid](x, x, number, BLOCK=128, HAS_TEXT=HAS_TEXT, **options)

    return run


def copy_tile(rows: int, columns: int, size: int = 4096) -> Callable[[], None]:
    def run() -> None:
        x = torch.empty(size, 4096, dtype=torch.bfloat16, device="cuda")
        copy_tile_kernel[(1,)](TensorDescriptor.from_tensor(x, [rows, columns]), x, ROWS=rows, COLUMNS=columns)

    return run


LAUNCHES = {
    "good": copy(),
    "good tile": copy_tile(64, 64),
    "an option that Triton does not know": copy(max_registers=64),
    "a text as the default of a constant": copy(HAS_TEXT=True),
    "too many programs on grid y": copy(grid=(1, 70000)),
    "more threads than a block has": copy(num_warps=64),
    "a row too long for a tensor map": copy_tile(64, 64, size=2**32 + 1),
}
