"""`python -m benchmarks cliff`: from how many columns on the kernel that reads a logit once is slower than two kernels.

Its second walk finds a row in the L2 cache as long as the rows under way at once fit there. How much of the cache that is, only
a GPU says: an H100's has two parts, and lines of the far one may be held twice. Both paths are timed by the number of columns, in
place and out of place, with each number of warps; from these times follows the CACHE_SHARE of megatron_rl/ops/backends.py. A shape
has rows for LOGITS_BYTES: with few columns and few rows the host, which takes about a millisecond to start a step, is timed.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf, log
from typing import Any
from unittest import mock

import torch

from benchmarks.measure import Device
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses import policy_loss
from megatron_rl.ops import backends

COLUMNS = (16384, 32768, 49152, 65536, 98304, 131072, 151936, 262144)
LOGITS_BYTES, ROUNDS = {"cuda": 4 << 30, "cpu": 64 << 10}, {"cuda": 5, "cpu": 1}
TITLES = ("V", "place", "path", "of the cache", "ms", "x two kernels")


@dataclass(frozen=True, slots=True)
class CliffPoint:
    """One path at one shape. num_warps 0: two kernels. share: of the L2 cache, what the rows under way at once take."""

    columns: int
    in_place: bool
    num_warps: int
    share: float
    milliseconds: float


def measure_cliff(columns: Sequence[int], rows: int | None, device: Device, time_limit: float) -> Iterator[CliffPoint]:
    """The points of each shape, with rows for LOGITS_BYTES where none are given; no shape starts after time_limit seconds.

    Raises ConfigError without Triton.
    """
    if device.kind == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
    if backends.why_triton_is_missing() is not None:
        raise ConfigError("cliff compares Triton kernels: install Triton")
    started = time.perf_counter()
    for number in columns:
        for in_place in (True, False):
            if time_limit and time.perf_counter() - started > time_limit:
                return
            yield from _points(number, rows or max(LOGITS_BYTES[device.kind] // (2 * number), 1), device, in_place=in_place)
        device.release_memory()


def _points(columns: int, rows: int, device: Device, *, in_place: bool) -> Iterator[CliffPoint]:
    where = device.torch_device
    logits = torch.randn(rows, columns, device=where).to(torch.bfloat16)
    labels, mask = torch.zeros(rows, dtype=torch.int64, device=where), torch.ones(rows, dtype=torch.bool, device=where)
    numbers, one = torch.full((rows,), -7.0, device=where), torch.ones(1, device=where)
    inputs = (labels, numbers, one, mask, torch.tensor([0, rows], dtype=torch.int32, device=where), one)
    options: dict[str, Any] = {"tp_group": SINGLE, "cp_group": SINGLE, "backend": "triton", "check_ranks": False}
    options |= {"loss_scale": 1.0, "inplace": in_place, "advantages_per": "sample"}

    def step() -> object:
        given = logits.detach().requires_grad_().view_as(logits)  # an operator's output, as in a model
        return torch.autograd.grad(policy_loss("grpo", given, *inputs, **options).loss, given)

    row_bytes = columns * logits.itemsize
    at_once = {0: 0, **backends.ROWS_AT_ONCE}
    times: dict[int, list[float]] = {num_warps: [] for num_warps in at_once}
    for number in range(ROUNDS[device.kind] + 1):
        for num_warps, taken in times.items():
            with forced(num_warps):
                milliseconds, _ = device.timed(step)
            if number:  # the first one may compile
                taken.append(milliseconds)
    for num_warps, taken in times.items():
        share = at_once[num_warps] * backends.num_processors(where) * row_bytes / backends.cache_bytes(where)
        yield CliffPoint(columns, in_place, num_warps, share, statistics.median(taken))


@contextmanager
def forced(num_warps: int) -> Iterator[None]:
    """One program of so many warps reads each row once, whatever the cache holds; 0: two kernels."""
    programs = {num_warps: 1} if num_warps else {}
    with mock.patch.multiple(backends, ROWS_AT_ONCE=programs, CACHE_SHARE=inf, FEWEST_WAVES=0):
        yield


# The decision


def choice(points: Sequence[CliffPoint], cache_share: float) -> CliffPoint:
    """What one_read_configuration takes of the points of one shape: the first number of warps whose rows fit, else the last."""
    _, *programs = sorted(points, key=lambda point: point.num_warps)
    return next((point for point in programs if point.share <= cache_share), programs[-1])


def by_shape(points: Iterable[CliffPoint]) -> list[list[CliffPoint]]:
    shapes: dict[tuple[int, bool], list[CliffPoint]] = defaultdict(list)
    for point in points:
        shapes[point.columns, point.in_place].append(point)
    return list(shapes.values())


def loss_of_time(shapes: Sequence[Sequence[CliffPoint]], cache_share: float) -> list[float]:
    """For each shape: the time of what this share chooses over that of the best path."""
    return [choice(points, cache_share).milliseconds / min(point.milliseconds for point in points) for points in shapes]


def recommended_share(points: Iterable[CliffPoint]) -> float:
    """The measured share whose choices lose least over all shapes, as a product of their ratios; 0: the most warps everywhere.

    Of equal ones the least: what lies between it and the next was not measured.
    """
    shapes = by_shape(points)
    shares = sorted({0.0, *(point.share for points in shapes for point in points)})
    return min(shares, key=lambda share: (round(sum(map(log, loss_of_time(shapes, share))), 6), share))


def table(points: Iterable[CliffPoint]) -> Iterator[str]:
    """A line for each point, as it comes."""
    yield "| " + " | ".join(TITLES) + " |"
    yield "|---" * len(TITLES) + "|"
    two = 1.0
    for point in points:
        two = two if point.num_warps else point.milliseconds
        path = f"one kernel, {point.num_warps} warps" if point.num_warps else "two kernels"
        place = "in place" if point.in_place else "out of place"
        numbers = f"{point.share:.2f} | {point.milliseconds:.3f} | {point.milliseconds / two:.2f}"
        yield f"| {point.columns:,} | {place} | {path} | {numbers} |"


def verdict(points: Sequence[CliffPoint], device_name: str, *, is_gpu: bool = True) -> tuple[str, str]:
    """What to do, in words and as a line of JSON."""
    share, shapes = recommended_share(points), by_shape(points)
    now, then = (max(loss_of_time(shapes, share)) for share in (backends.CACHE_SHARE, share))
    found = {
        "device": device_name,
        "cache_share": share,
        "cache_share_now": backends.CACHE_SHARE,
        "worst_now": now,
        "worst_then": then,
    }
    if not is_gpu:
        words = "on a CPU, whose interpreter says nothing of a cache: only that the command runs"
        return words, json.dumps({"cliff": {"device": device_name, "points": [asdict(point) for point in points]}})
    words = f"on {device_name}: CACHE_SHARE = {share:.2f} in megatron_rl/ops/backends.py loses least"
    words += f"; its slowest choice takes {then:.2f}x of the best path, that of {backends.CACHE_SHARE:g} {now:.2f}x"
    lost = [points[0] for points in shapes if choice(points, backends.CACHE_SHARE).milliseconds > points[0].milliseconds]
    words += f"; two kernels are faster than its choice in {len(lost)} of {len(shapes)} shapes"
    words += "".join(f", {'in' if point.in_place else 'out of'} place at V {point.columns:,}" for point in lost)
    return words, json.dumps({"cliff": found | {"points": [asdict(point) for point in points]}})
