"""`python -m benchmarks rollouts`: host time of a sample on its way through `megatron-rl train`: weighing, batches, files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.groups import SINGLE, ParallelGroups
from megatron_rl.megatron.batch import StepContext, make_packed_batch, make_padded_batch
from megatron_rl.megatron.samples import weigh_samples
from megatron_rl.train.rollout_files import load_rollouts, save_rollouts
from megatron_rl.train.rollouts import RolloutBatch, Sample

ROUNDS, VOCAB_SIZE, IN_A_BATCH = 5, 50_000, 8


def measure_rollouts(lengths: Sequence[int], num_samples: int) -> Iterator[tuple[int, str, float]]:
    """(tokens of a sample, half of them prompt, what is done, process CPU ms a sample): the least of the rounds."""
    for length in lengths:
        with tempfile.TemporaryDirectory() as folder:
            for name, work in works(make_samples(length, num_samples), length, Path(folder) / "rollouts.jsonl").items():
                yield length, name, 1e3 * min(_seconds(work) for _ in range(ROUNDS)) / num_samples


def works(samples: list[Sample], length: int, file: Path) -> dict[str, Callable[[], object]]:
    groups, place = ParallelGroups(), {"cp_group": SINGLE, "device": torch.device("cpu")}
    weighed, totals = weigh_samples(PolicyLossConfig(), samples, groups)
    context, batch = StepContext(num_microbatches=1, totals=totals), RolloutBatch(samples=samples, rollout_index=0)
    parts = [weighed[start : start + IN_A_BATCH] for start in range(0, len(samples), IN_A_BATCH)]
    packed, padded = {"row_length": IN_A_BATCH * length, **place}, {"num_rows": IN_A_BATCH, "row_length": length, **place}
    return {
        "weigh": lambda: weigh_samples(PolicyLossConfig(), samples, groups),
        "packed rows": lambda: [make_packed_batch(part, context, **packed) for part in parts],
        "padded rows": lambda: [make_padded_batch(part, context, **padded) for part in parts],
        "write": lambda: (file.unlink(missing_ok=True), save_rollouts(file, batch)),
        "read": lambda: list(load_rollouts(file, vocab_size=VOCAB_SIZE)),
    }


def make_samples(length: int, number: int) -> list[Sample]:
    generator, response = torch.Generator().manual_seed(0), length // 2
    return [
        Sample(
            prompt_id=f"prompt {index // 8}",
            tokens=torch.randint(VOCAB_SIZE, (length,), generator=generator),
            response_length=response,
            loss_mask=torch.ones(response, dtype=torch.bool),
            reward=1.0,
            advantage=0.1,
            old_log_probs=-torch.rand(response, generator=generator),
            index=index,
        )
        for index in range(number)
    ]


def _seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def table(rows: Sequence[tuple[int, str, float]]) -> list[str]:
    lines = ["| tokens a sample | what | ms a sample |", "|---|---|---|"]
    return lines + [f"| {length:,} | {name} | {ms:.3f} |" for length, name, ms in rows]
