"""`python -m benchmarks scale [--real]`: what counting a step costs one rank of many, in host time and bytes.

count_step runs as rank 0 of torch's fake process group. Its collectives move nothing. The other ranks have as many rows as this
one, and prompts of their own, whose digests are drawn here. So the host's work and the sizes of messages are those of a real step;
the network's time is left out.
With --real the ranks are processes of this machine over gloo, and the wall time has the messages in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.layout.groups import GATHER_INTO_ONE
from megatron_rl.step_counts import count_step
from megatron_rl.testing.ranks import run_ranks

# Of a row of a prompt: digest, tokens, samples. Of a rollout's: two digests, tokens, samples.
ROW_COLUMNS = (3, 4)
COLLECTIVES = (GATHER_INTO_ONE, "all_reduce", "all_to_all_single")
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Form:
    """Of the samples."""

    samples_per_prompt: int = 8
    num_tokens: int = 8
    dtype: str = "bool"
    """Of the masks."""
    samples_per_rollout: int = 2


@dataclass(frozen=True, slots=True)
class ScaleRow:
    ranks: int
    samples: int
    """Of this rank; the step has ranks x samples."""
    prompts: int
    """Different ones of this rank."""
    given: str
    """What count_step gets: masks of `tokens` tokens, or token counts, and these with ids of rollouts too."""
    collectives: int
    sent_bytes: int
    """By this rank, once."""
    received_bytes: int
    """What this rank holds of the others' messages."""
    host_ms: float
    """CPU time of the process, the least of the rounds, without that inside the collectives."""


def measure_scale(num_ranks: Sequence[int], num_samples: Sequence[int], form: Form) -> Iterator[ScaleRow]:
    """A row for each number of ranks, of samples a rank, and for what count_step gets."""
    for ranks in num_ranks:
        with fake_ranks(ranks):
            for samples in num_samples:
                prompts = -(-samples // form.samples_per_prompt)
                for given, count in _forms(samples, form).items():
                    rounds = [_measured(count) for _ in range(ROUNDS)]
                    calls, sent, received, _ = rounds[0]
                    yield ScaleRow(ranks, samples, prompts, given, calls, sent, received, min(round_[3] for round_ in rounds))


def measure_real(
    num_ranks: Sequence[int], num_samples: Sequence[int], form: Form
) -> Iterator[tuple[int, int, str, int, float, float]]:
    """(ranks, samples of each, given, collectives, CPU ms and wall ms of the slowest rank, the least of the rounds), over gloo."""
    for ranks in num_ranks:
        for samples in num_samples:
            times = run_ranks(_seconds_on_rank, ranks, samples, form, use_megatron=False)
            for given in times[0]:
                cpu, wall = (max(1e3 * of_rank[given][kind] for of_rank in times) for kind in (1, 2))
                yield ranks, samples, given, times[0][given][0], cpu, wall


def _seconds_on_rank(rank: int, samples: int, form: Form) -> dict[str, tuple[int, float, float]]:
    """given -> (collectives, CPU and wall seconds). The prompts of a rank are its own."""
    torch.set_num_threads(1)
    found = {}
    for given, count in _forms(samples, form, rank).items():
        collectives, rounds = _measured(count)[0], []
        for _ in range(2 * ROUNDS):
            dist.barrier(group=dist.group.WORLD)
            began = time.process_time(), time.perf_counter()
            count()
            rounds.append((time.process_time() - began[0], time.perf_counter() - began[1]))
        found[given] = (collectives, min(cpu for cpu, _ in rounds), min(wall for _, wall in rounds))
    return found


def _forms(samples: int, form: Form, rank: int = 0) -> dict[str, Callable[[], object]]:
    ids = [f"prompt {rank}.{index // form.samples_per_prompt}" for index in range(samples)]
    masks = list(torch.ones(samples, form.num_tokens, dtype=getattr(torch, form.dtype)).unbind(0))
    counts = torch.full((samples,), form.num_tokens)
    of_prompt = [index % form.samples_per_prompt // form.samples_per_rollout for index in range(samples)]
    rollouts = [f"{prompt}/{number}" for prompt, number in zip(ids, of_prompt, strict=True)]
    kind = "" if form.dtype == "bool" else f" {form.dtype}"
    return {
        f"masks of {form.num_tokens}{kind}": lambda: count_step(masks, ids, dist.group.WORLD),
        "token counts": lambda: count_step(None, ids, dist.group.WORLD, token_counts=counts),
        f"and rollouts of {form.samples_per_rollout}": lambda: count_step(
            None, ids, dist.group.WORLD, token_counts=counts, rollout_ids=rollouts
        ),
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
            sent = first if name == "all_reduce" else rest[0]
            if dist.get_backend() == "fake" and first.dim() == 2 and first.shape[1] in ROW_COLUMNS:
                _draw_digests(first, sent)
            inside[0] += time.process_time() - began
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


def _draw_digests(received: torch.Tensor, sent: torch.Tensor) -> None:  # [R, c], [U, c]: digests, tokens, samples
    """The fake group returns this rank's first rows again and again; the prompts of real ranks differ, which is more to sort.

    After an all-gather this rank's own rows come first, and it looks them up. An owner is sent no digest that it knows.
    """
    others = slice(len(sent) if len(received) > len(sent) else 0, None)
    digests, number = received.shape[1] - 2, len(received[others])
    received[others, :digests] = torch.randint(2**62, (number, digests), generator=torch.Generator().manual_seed(0))
    received[others, digests:] = sent[torch.arange(number) % len(sent), digests:]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def table_of_real(rows: Sequence[tuple[int, int, str, int, float, float]]) -> list[str]:
    lines = ["| ranks | samples a rank | given | collectives | CPU ms | wall ms |", "|---" * 6 + "|"]
    return lines + [
        f"| {ranks} | {samples:,} | {given} | {collectives} | {cpu:.1f} | {wall:.1f} |"
        for ranks, samples, given, collectives, cpu, wall in rows
    ]


def table(rows: Sequence[ScaleRow]) -> list[str]:
    heading = ("ranks", "samples a rank", "prompts a rank", "given", "collectives", "sent", "received", "host ms")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row in rows:
        sizes = f"{row.sent_bytes / 1e6:.2f} MB | {row.received_bytes / 1e6:.2f} MB"
        numbers = f"{row.ranks:,} | {row.samples:,} | {row.prompts:,}"
        lines.append(f"| {numbers} | {row.given} | {row.collectives} | {sizes} | {row.host_ms:.1f} |")
    return lines
