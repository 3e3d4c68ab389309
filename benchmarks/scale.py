"""`python -m benchmarks scale [--real]`: what counting a step costs one rank of many, in host time and bytes.

count_step runs as rank 0 of torch's fake process group. Its collectives move nothing and return this rank's own rows, as if the
other ranks had as many. So the host's work and the sizes of messages are those of a real step; the network's time is left out.
With --real the ranks are processes of this machine over gloo, and the wall time has the messages in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.aggregation import count_step
from megatron_rl.layout.groups import GATHER_INTO_ONE
from megatron_rl.testing.ranks import run_ranks

COLLECTIVES = (GATHER_INTO_ONE, "all_reduce", "all_to_all_single")
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Form:
    """Of the samples."""

    samples_per_prompt: int = 8
    num_tokens: int = 8
    dtype: str = "bool"
    """Of the masks."""


@dataclass(frozen=True, slots=True)
class ScaleRow:
    ranks: int
    samples: int
    """Of this rank; the step has ranks x samples."""
    prompts: int
    """Different ones of this rank."""
    given: str
    """What count_step gets: masks of `tokens` tokens, or token counts."""
    collectives: int
    sent_bytes: int
    """By this rank, once."""
    received_bytes: int
    """What this rank holds of the others' messages."""
    host_ms: float
    """CPU time of the process, the least of the rounds, without that inside the collectives."""


def measure_scale(num_ranks: Sequence[int], num_samples: Sequence[int], form: Form) -> Iterator[ScaleRow]:
    """A row for each number of ranks, of samples a rank, and for masks and token counts."""
    for ranks in num_ranks:
        with fake_ranks(ranks):
            for samples in num_samples:
                prompts = -(-samples // form.samples_per_prompt)
                for given, count in _forms(samples, form).items():
                    rounds = [_measured(count) for _ in range(ROUNDS)]
                    calls, sent, received, _ = rounds[0]
                    yield ScaleRow(ranks, samples, prompts, given, calls, sent, received, min(round_[3] for round_ in rounds))


def measure_real(num_ranks: Sequence[int], num_samples: Sequence[int], form: Form) -> Iterator[tuple[int, int, str, float, float]]:
    """(ranks, samples of each, given, CPU ms and wall ms of the slowest rank, the least of the rounds), over gloo."""
    for ranks in num_ranks:
        for samples in num_samples:
            times = run_ranks(_seconds_on_rank, ranks, samples, form, use_megatron=False)
            for given in times[0]:
                cpu, wall = (max(1e3 * of_rank[given][kind] for of_rank in times) for kind in (0, 1))
                yield ranks, samples, given, cpu, wall


def _seconds_on_rank(rank: int, samples: int, form: Form) -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    found = {}
    for given, count in _forms(samples, form).items():
        rounds = []
        for _ in range(2 * ROUNDS):
            dist.barrier(group=dist.group.WORLD)
            began = time.process_time(), time.perf_counter()
            count()
            rounds.append((time.process_time() - began[0], time.perf_counter() - began[1]))
        found[given] = (min(cpu for cpu, _ in rounds), min(wall for _, wall in rounds))
    return found


def _forms(samples: int, form: Form) -> dict[str, Callable[[], object]]:
    ids = [f"prompt {index // form.samples_per_prompt}" for index in range(samples)]
    masks = list(torch.ones(samples, form.num_tokens, dtype=getattr(torch, form.dtype)).unbind(0))
    counts = torch.full((samples,), form.num_tokens)
    kind = "" if form.dtype == "bool" else f" {form.dtype}"
    return {
        f"masks of {form.num_tokens}{kind}": lambda: count_step(masks, ids, dist.group.WORLD),
        "token counts": lambda: count_step(None, ids, dist.group.WORLD, token_counts=counts),
    }


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measured(count: Callable[[], object]) -> tuple[int, int, int, float]:
    """(collectives, bytes sent, bytes received, milliseconds of the host)."""
    calls, inside = [], [0.0]
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def watched(name: str) -> Callable:
        def call(first, *rest, **options):
            began = time.process_time()
            result = originals[name](first, *rest, **options)
            inside[0] += time.process_time() - began
            sent = first if name == "all_reduce" else rest[0]
            calls.append((_bytes(sent), _bytes(first)))
            return result

        return call

    for name in COLLECTIVES:
        setattr(dist, name, watched(name))
    try:
        began = time.process_time()
        count()
        seconds = time.process_time() - began - inside[0]
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return len(calls), sum(sent for sent, _ in calls), sum(received for _, received in calls), 1e3 * seconds


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def table_of_real(rows: Sequence[tuple[int, int, str, float, float]]) -> list[str]:
    lines = ["| ranks | samples a rank | given | CPU ms | wall ms |", "|---" * 5 + "|"]
    return lines + [f"| {ranks} | {samples:,} | {given} | {cpu:.1f} | {wall:.1f} |" for ranks, samples, given, cpu, wall in rows]


def table(rows: Sequence[ScaleRow]) -> list[str]:
    heading = ("ranks", "samples a rank", "prompts a rank", "given", "collectives", "sent", "received", "host ms")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row in rows:
        sizes = f"{row.sent_bytes / 1e6:.2f} MB | {row.received_bytes / 1e6:.2f} MB"
        numbers = f"{row.ranks:,} | {row.samples:,} | {row.prompts:,}"
        lines.append(f"| {numbers} | {row.given} | {row.collectives} | {sizes} | {row.host_ms:.1f} |")
    return lines
