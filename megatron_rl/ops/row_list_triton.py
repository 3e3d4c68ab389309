"""The Triton kernel that lists unmasked rows on the device; the host must never learn how many: it would have to wait."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of one program, and of the mask that it reads at once.
LIST_BLOCK = 4096


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["MASK", "ORDER", "NUM_ACTIVE"])
def list_rows_kernel(MASK, ORDER, NUM_ACTIVE, num_rows, BLOCK: tl.constexpr):
    """Grid (blocks of rows). ORDER: unmasked rows from 0 and masked ones from their number on, both in their order.

    Each program adds up the whole mask, a byte a row, instead of waiting for those before it.
    """
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0) * BLOCK
    everywhere = tl.zeros((BLOCK,), tl.int32)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        rows = start + lanes
        is_active = tl.load(MASK + rows, mask=rows < num_rows, other=0).to(tl.int32)
        everywhere += is_active
        before += tl.where(rows < first, is_active, 0)
    num_active = tl.sum(everywhere, 0)
    rows = first + lanes
    is_active = tl.load(MASK + rows, mask=rows < num_rows, other=0).to(tl.int32)
    active_before = tl.sum(before, 0) + tl.cumsum(is_active, 0) - is_active
    position = tl.where(is_active != 0, active_before, num_active + rows - active_before)
    tl.store(ORDER + position, rows, mask=rows < num_rows)
    if first == 0:
        tl.store(NUM_ACTIVE, num_active)


def list_rows(
    loss_mask: Tensor,  # [T] bool
) -> tuple[Tensor, Tensor]:  # order [T] int32: unmasked rows, then masked ones; num_active [1] int32
    """The rows that are worth reading, found on the device. Finding them on the host would synchronise."""
    order, num_active = (torch.empty(n, dtype=torch.int32, device=loss_mask.device) for n in (loss_mask.shape[0], 1))
    list_rows_kernel[(triton.cdiv(loss_mask.shape[0], LIST_BLOCK),)](
        as_bytes(loss_mask), order, num_active, loss_mask.shape[0], BLOCK=LIST_BLOCK, num_warps=8, enable_fp_fusion=True
    )
    return order, num_active


def as_bytes(
    mask: Tensor,  # [T] bool
) -> Tensor:  # [T] uint8 in the same memory
    return mask.contiguous().view(torch.uint8)
