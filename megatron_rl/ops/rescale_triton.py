"""Multiplies a gradient that forward has made with another factor than the one that backward delivers.

    rescale   grid (programs)   upstream [], assumed [] -> gradient [T, V] in place, the factor for the next forward []

Each program reads both numbers. Equal ones end it: the launch then costs its latency alone. Other ones cost a read and a write of
the gradient. The host never learns which it was. Derivation: docs/kernels.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.ops.backends import (
    ALIGNMENT,
    GRADIENT_DEFAULTS,
    PROGRAMS_PER_PROCESSOR,
    GradientConfiguration,
    flat_rows,
    num_processors,
)
from megatron_rl.ops.log_probs_triton import edge_columns

UNIT = tl.constexpr(ALIGNMENT)
# A factor outside is not assumed. What the real ones are made of lies inside: 1 / tokens of a step, and the 2^32 at which a loss
# scale begins. Far outside, the gradient of a wrong guess would leave the range of float32, and no factor would bring it back.
SMALLEST_ASSUMED, LARGEST_ASSUMED = tl.constexpr(2.0**-40), tl.constexpr(2.0**40)


@triton.jit(
    do_not_specialize="num_rows num_columns shift stride".split(),
    do_not_specialize_on_alignment="UPSTREAM ASSUMED LAST".split(),
)
def rescale_kernel(
    X,  # [T, V]
    UPSTREAM,  # [] float32
    ASSUMED,  # [] float32
    LAST,  # [] float32
    num_rows,
    num_columns,
    shift,
    stride,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Grid (programs). A program takes each of its rows in full blocks, one masked block of whole vectors, and the edges."""
    program = tl.program_id(0)
    upstream, assumed = tl.load(UPSTREAM), tl.load(ASSUMED)
    size = tl.abs(upstream)
    # Both comparisons are false for NaN. No program reads LAST.
    tl.store(LAST, upstream, mask=(program == 0) & (size >= SMALLEST_ASSUMED) & (size <= LARGEST_ASSUMED))
    if upstream != assumed:  # true for NaN
        ratio = tl.div_rn(upstream, assumed)  # the operator / may be off by two in the last place
        firsts = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR
        lanes = firsts + tl.arange(0, VECTOR)[None, :]
        for row in range(program, num_rows, tl.num_programs(0)):
            start = tl.cast(row, tl.int64) * stride + shift
            head = ((-start) & (UNIT - 1)).to(tl.int32)
            # From here on columns count from the first aligned one of the row.
            base = X + (start + head) // UNIT * UNIT
            length = num_columns - head
            vector_end = tl.maximum(length, 0) // VECTOR * VECTOR
            full_end = tl.maximum(length, 0) // BLOCK * BLOCK
            for offset in range(0, full_end, BLOCK):
                x = tl.load(base + offset + lanes).to(tl.float32)
                tl.store(base + offset + lanes, (x * ratio).to(X.dtype.element_ty))
            if full_end < vector_end:
                inside = full_end + firsts < vector_end
                x = tl.load(base + full_end + lanes, mask=inside, other=0.0).to(tl.float32)
                tl.store(base + full_end + lanes, (x * ratio).to(X.dtype.element_ty), mask=inside)
            if (head > 0) | (vector_end < length):
                columns, inside = edge_columns(head, 0, vector_end, length)
                x = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32)
                tl.store(base + columns, (x * ratio).to(X.dtype.element_ty), mask=inside)


def rescale(
    gradient: Tensor,  # [T, V], with adjacent columns and at least one element
    upstream: Tensor,  # []
    assumed: Tensor,  # [] float32
    last: Tensor,  # [] float32
    *,
    configuration: GradientConfiguration = GRADIENT_DEFAULTS,
) -> None:
    """One launch: gradient times upstream / assumed, where they differ; `last` becomes upstream where that can be assumed."""
    num_rows, num_columns = gradient.shape
    rows = flat_rows(gradient)
    num_programs = min(num_rows, PROGRAMS_PER_PROCESSOR * num_processors(gradient.device))
    with torch.cuda.device_of(gradient):
        rescale_kernel[(num_programs,)](
            rows.pointer,
            upstream.float(),
            assumed,
            last,
            num_rows,
            num_columns,
            rows.shift,
            rows.stride,
            BLOCK=configuration.block,
            VECTOR=16 // gradient.itemsize,
            num_warps=configuration.num_warps,
            enable_fp_fusion=True,
        )
    # Autograd does not see the write of a kernel.
    torch.autograd.graph.increment_version(gradient)


def multiply(
    tensor: Tensor,  # [n, H] with at least one element, not float64
    factor: Tensor,  # 0-d
    out: Tensor,  # [n, H] of any dtype; may be `tensor`
) -> Tensor:
    """tensor x factor into `out`; a factor of 1 ends it at once.

    On an H100 the fused head took 6 ms more with a gradient of 1 GiB in 16 bits than with one in main_grad. Only this sum is
    measured: that torch's product of bfloat16 with a float32 factor took it is likely.
    """
    one = torch.ones((), dtype=torch.float32, device=tensor.device)
    rescale(tensor, factor, one, torch.empty_like(one))
    return out if out is tensor else out.copy_(tensor)
