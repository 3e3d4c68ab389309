"""The end of a row, for the two kernels that may finish it: merged statistics become RowResult's numbers. It must never merge."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def store_row_result(
    OUT, LOG_PROBS, ENTROPIES, row, num_rows, maximum, total, target, weighted, inverse_temperature, mask, ENTROPY: tl.constexpr
):
    """RowResult of merged statistics: OUT [2, T] has maximum and total; `weighted` in log2 units."""
    log_total = tl.log(total)
    log_prob = (target - maximum) * inverse_temperature - log_total
    entropy = tl.zeros_like(total)
    if ENTROPY:
        entropy = log_total - weighted * LN_2 / total
    tl.store(OUT + row, maximum, mask=mask)
    tl.store(OUT + num_rows + row, total, mask=mask)
    tl.store(LOG_PROBS + row, log_prob, mask=mask)
    tl.store(ENTROPIES + row, entropy, mask=mask)


def row_result_memory(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum and total [2, T], log_probs [T], entropy [T]). What callers get are no views: they may be changed in place."""
    return tuple(torch.empty(shape, dtype=torch.float32, device=device) for shape in ((2, num_rows), num_rows, num_rows))
