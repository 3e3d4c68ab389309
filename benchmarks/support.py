"""`python -m benchmarks head --support`: the head with sets of kept ids, as pairs and as matmuls of all columns, by ids of a row.

Both paths are the package's: SPARSE_ROW_LIMIT of megatron_rl/ops/sparse_head.py says which one a row takes. Each row of the table
has one size for all sets; the last one is drawn as a sampler with top-p leaves them, half of them of one id. From the times follows
the size at which both cost the same. Times are CPU time of one thread on a CPU, and events on CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log
from unittest import mock

import torch
from torch import Tensor

from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses import linear_policy_loss
from megatron_rl.ops import support_head

IDS = (1, 2, 8, 32, 128, 512, 1024)
# Tokens, hidden size, columns.
SIZES = {"cpu": (512, 256, 32000), "cuda": (8192, 4096, 151_936)}
ROUNDS = {"cpu": 3, "cuda": 5}
DRAWN = "drawn"
TITLES = ("ids of a row", "pairs", "ms, pairs", "ms, all columns", "all columns / pairs", "gradients differ by")


@dataclass(frozen=True, slots=True)
class SupportPoint:
    """ids: of each row, or DRAWN. difference: relative Frobenius norm, of dX or dW, whichever is larger."""

    ids: int | str
    num_pairs: int
    sparse_ms: float
    dense_ms: float
    difference: float


def drawn_sizes(num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:  # [T] int64
    """47 % of one id; the others log-normal, median 7, at most 512: in all a mean of 8 and a median of 2."""
    sizes = (torch.randn(num_rows, generator=generator) * 1.15 + 2.0).exp().clamp(2, min(512, vocab_size))
    return torch.where(torch.rand(num_rows, generator=generator) < 0.47, 1.0, sizes).long()


def measure_support(
    ids: Sequence[int], num_rows: int, hidden_size: int, vocab_size: int, device: torch.device, max_logits_bytes: int
) -> Iterator[SupportPoint]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden = torch.randn(num_rows, hidden_size, generator=generator).to(device, dtype)
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5).to(device, dtype)
    for number in (*ids, DRAWN):
        fixed = torch.full((num_rows,), min(number, vocab_size)) if isinstance(number, int) else None
        sizes = drawn_sizes(num_rows, vocab_size, generator) if fixed is None else fixed
        lists = [torch.randint(vocab_size, (2 * size + 8,), generator=generator).unique()[:size] for size in sizes.tolist()]
        support = SamplingSupport(torch.cat(lists).int(), torch.tensor([0, *(len(row) for row in lists)]).cumsum(0))
        labels = torch.stack([row[len(row) // 2] for row in lists]).to(device)
        paths = [_step(hidden, weight, labels, support, limit, max_logits_bytes) for limit in (vocab_size, 0)]
        found = [path() for path in paths]
        difference = max(float((a - b).double().norm() / b.double().norm().clamp(min=1e-30)) for a, b in zip(*found, strict=True))
        times = [inf, inf]
        for _ in range(ROUNDS[device.type]):  # in turn, so that a slow moment is not one path's
            times = [min(best, _milliseconds(path, device)) for best, path in zip(times, paths, strict=True)]
        yield SupportPoint(number, support.num_pairs, *times, difference)


def _step(
    hidden: Tensor, weight: Tensor, labels: Tensor, support: SamplingSupport, limit: int, max_logits_bytes: int
) -> Callable[[], Sequence[Tensor]]:
    """Forward and backward into main_grad; rows above the limit take the matmuls of all columns."""
    num_rows = hidden.shape[0]
    parameter = torch.nn.Parameter(weight)
    parameter.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    ones = torch.ones(1, device=hidden.device)
    packed = (ones, torch.ones(num_rows, dtype=torch.bool), torch.tensor([0, num_rows], dtype=torch.int32), ones / num_rows)
    options = {"sampling_support": support, "loss_scale": 1.0, "tp_group": SINGLE, "cp_group": SINGLE}
    options |= {"max_logits_bytes": max_logits_bytes}

    def step() -> Sequence[Tensor]:
        leaf = hidden.detach().requires_grad_()
        parameter.main_grad.zero_()
        with mock.patch.object(support_head, "SPARSE_ROW_LIMIT", limit):
            loss = linear_policy_loss("grpo", leaf, parameter, labels, None, *packed, advantages_per="sample", **options).loss
        (of_hidden, _) = torch.autograd.grad(loss, (leaf, parameter), allow_unused=True)
        return of_hidden, parameter.main_grad

    return step


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        began = time.process_time()
        step()
        return (time.process_time() - began) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    stop.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop)


def crossing(points: Sequence[SupportPoint]) -> float | None:
    """Ids of a row at which both paths cost the same, between the two measured sizes around it; None: pairs are always faster."""
    ratios = [(point.ids, log(point.sparse_ms / point.dense_ms)) for point in points if isinstance(point.ids, int)]
    for (small, before), (large, after) in pairwise(sorted(ratios)):
        if before < 0 <= after:
            return exp(log(small) + (log(large) - log(small)) * before / (before - after))
    return None


def table(points: Iterator[SupportPoint]) -> Iterator[str]:
    """A line for each point, as it comes, then the verdict."""
    yield "| " + " | ".join(TITLES) + " |"
    yield "|---" * len(TITLES) + "|"
    seen = []
    for point in points:
        seen.append(point)
        ratio = point.dense_ms / point.sparse_ms
        times = f"{point.sparse_ms:.2f}", f"{point.dense_ms:.2f}", f"{ratio:.1f}"
        cells = (point.ids, point.num_pairs, *times, f"{point.difference:.0e}")
        yield "| " + " | ".join(map(str, cells)) + " |"
    found = crossing(seen)
    yield "Pairs are faster at each size." if found is None else f"Both cost the same at {found:.0f} ids of a row."
