"""`python -m benchmarks cliff`: its numbers lead to the right CACHE_SHARE, on simulated caches."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from unittest import mock

import pytest
from helpers import KERNEL_DEVICE

import benchmarks.__main__ as command
from benchmarks import cliff
from benchmarks.cliff import CliffPoint, choice, recommended_share
from megatron_rl.ops import backends

# An H100 at an eighth of its size: processors and cache together, so that shares are the same. Caches are counted in blocks.
PROCESSORS, CACHE_BYTES, BLOCK = 132 // 8, (50 << 20) // 8, 16 << 10
# One program a multiprocessor hides less of the memory's latency than two kernels of many.
SLOWER = {8: 1.0, 16: 1.0, 32: 1.1}
BETWEEN = (24576, 57344, 81920, 114688, 140000, 200000)


@dataclass(frozen=True)
class Cache:
    """One LRU cache; or two of half the size, each for half of the blocks, which keeps a block that the far half asks for twice."""

    has_halves: bool

    def parts(self) -> list[OrderedDict]:
        return [OrderedDict() for _ in range(2 if self.has_halves else 1)]

    def read(self, parts: list[OrderedDict], block: tuple, processor: int) -> bool:
        """Whether memory is asked."""
        home = hash(block) % len(parts)
        is_missing = block not in parts[home]
        for part in {home, processor % len(parts)}:
            parts[part][block] = None
            parts[part].move_to_end(block)
            if len(parts[part]) > CACHE_BYTES // BLOCK // len(parts):
                parts[part].popitem(last=False)
        return is_missing


ONE, HALVES = Cache(has_halves=False), Cache(has_halves=True)


@cache
def misses(of: Cache, columns: int, in_place: bool, programs: int) -> float:
    """The share of the second walk that memory is asked for. Programs run side by side, each at its own place of its row; a
    gradient out of place takes blocks of its own."""
    num_blocks = max(columns * 2 // BLOCK, 1)
    walk = [(False, n) for n in range(num_blocks)] + [(True, n) for n in reversed(range(num_blocks))]
    parts, generator, asked, total = of.parts(), random.Random(0), 0, 0
    states = [(number, generator.randrange(len(walk))) for number in range(programs)]
    for turn in range(2 * len(walk)):
        for number, (row, place) in enumerate(states):
            is_second, block = walk[place]
            is_missing = of.read(parts, (row, block), number)
            if is_second:
                asked, total = asked + (is_missing and turn >= len(walk)), total + (turn >= len(walk))
                if not in_place:
                    of.read(parts, (row, block, "gradient"), number)
            states[number] = (row, place + 1) if place + 1 < len(walk) else (row + programs, 0)
    return asked / max(total, 1)


def points_of(of: Cache, columns: int, in_place: bool) -> list[CliffPoint]:
    """A time is the bytes: 2 read, 2 written, and 2 for what the second walk misses; two kernels read twice."""
    points = [CliffPoint(columns, in_place, 0, 0.0, 6.0 * columns)]
    for num_warps, at_once in backends.ROWS_AT_ONCE.items():
        share = at_once * PROCESSORS * columns * 2 / CACHE_BYTES
        time = (4.0 + 2.0 * misses(of, columns, in_place, at_once * PROCESSORS)) * columns * SLOWER.get(num_warps, 1.0)
        points.append(CliffPoint(columns, in_place, num_warps, share, time))
    return points


@pytest.mark.parametrize("of", [ONE, HALVES], ids=["one cache", "two halves, far blocks twice"])
def test_the_recommended_share_chooses_a_good_path_also_between_the_measured_shapes(of):
    """Where it chooses one kernel, that is not slower than two by more than a twentieth; of the third that one read can spare
    it passes up a fifth at most: one number stands for all numbers of warps."""
    share = recommended_share(all_points(of))
    for columns in (*cliff.COLUMNS, *BETWEEN):
        for in_place in (True, False):
            points = points_of(of, columns, in_place)
            chosen, best = choice(points, share).milliseconds, min(point.milliseconds for point in points)
            assert chosen <= 1.05 * points[0].milliseconds, (columns, in_place, share)
            assert chosen <= 1.25 * best, (columns, in_place, share)


def all_points(of: Cache) -> list[CliffPoint]:
    return [point for columns in cliff.COLUMNS for in_place in (True, False) for point in points_of(of, columns, in_place)]


def test_a_cache_that_holds_far_blocks_twice_gets_a_smaller_share():
    """The risk that the stage is for: the size that the device reports is not the size that a second walk finds."""
    shares = {of: recommended_share(all_points(of)) for of in (ONE, HALVES)}
    assert 0.2 < shares[HALVES] < shares[ONE] <= 1.3, shares


def test_the_choice_is_that_of_the_package():
    """By the same shares, for a device of 132 multiprocessors."""
    cache_bytes = 50 << 20
    with mock.patch.multiple(backends, num_processors=lambda device: 132, cache_bytes=lambda device: cache_bytes):
        for columns in (*cliff.COLUMNS, *BETWEEN):
            points = [CliffPoint(columns, True, 0, 0.0, 1.0)] + [
                CliffPoint(columns, True, warps, at_once * 132 * columns * 2 / cache_bytes, 1.0)
                for warps, at_once in backends.ROWS_AT_ONCE.items()
            ]
            taken = backends.one_read_configuration(10**6, columns * 2, None)
            assert choice(points, backends.CACHE_SHARE).num_warps == (0 if taken is None else taken.num_warps)


@pytest.mark.kernel
def test_the_command_times_both_paths_and_says_what_to_set(capsys):
    assert command.main(["cliff", "--columns", "512", "--rows", "2", "--device", KERNEL_DEVICE]) == 0
    lines = capsys.readouterr().out.splitlines()
    paths = [line.split("|")[3].strip() for line in lines if line.startswith("| 512")]
    assert paths == 2 * ["two kernels", *(f"one kernel, {warps} warps" for warps in backends.ROWS_AT_ONCE)]
    assert len(json.loads(lines[-1])["cliff"]["points"]) == len(paths)
    words, line = cliff.verdict(all_points(HALVES), "NVIDIA H100")
    found = json.loads(line)["cliff"]
    assert f"on NVIDIA H100: CACHE_SHARE = {found['cache_share']:.2f} in megatron_rl/ops/backends.py loses least" in words
    assert found["cache_share_now"] == backends.CACHE_SHARE and found["worst_then"] <= found["worst_now"]
