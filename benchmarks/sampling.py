"""`python -m benchmarks sampling`: what a new token costs by the length of its response, with keys and values kept and without.

One process, a small policy of `megatron-rl train`. Without them each token is a forward of the whole sequence, as it is where
layers are Transformer Engine's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

from megatron_rl.config import PolicyLossConfig
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.train import generation
from megatron_rl.train.collection import rows_per_forward
from megatron_rl.train.generation import gumbel_noise
from megatron_rl.train.trainer import PolicyTrainer, TrainerSettings

SIZES = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 4096}
PROMPT = tuple(range(1, 9))
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class SamplingRow:
    new_tokens: int
    has_cache: bool
    ms: float
    """Process CPU time a new token of all samples, the least of the rounds."""


def measure_sampling(lengths: Sequence[int], num_samples: int, rounds: int = ROUNDS) -> Iterator[SamplingRow]:
    """The lengths in turn, so that other load meets all of them. Whole forwards run once."""
    device = initialize_ranks(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1)
    settings = TrainerSettings(**SIZES, max_sequence_length=len(PROMPT) + max(lengths))
    trainer = PolicyTrainer(settings, PolicyLossConfig(), device)
    _seconds(trainer, 1, 1)  # the first call loads kernels
    times = [[_seconds(trainer, length, num_samples) for length in lengths] for _ in range(rounds)]
    for length, of_rounds in zip(lengths, zip(*times, strict=True), strict=True):
        yield SamplingRow(length, True, 1e3 * min(of_rounds) / length)
    with mock.patch.object(generation, "can_cache", lambda model: False):
        for length in lengths:
            yield SamplingRow(length, False, 1e3 * _seconds(trainer, length, num_samples) / length)


def _seconds(trainer: PolicyTrainer, length: int, num_samples: int) -> float:
    settings = generation.SamplingSettings(
        max_new_tokens=length,
        end_tokens=(),
        temperature=1.0,
        vocab_size=SIZES["vocab_size"],
        rows_per_forward=rows_per_forward(trainer, length, records_routes=False),
    )
    before = time.process_time()
    trainer.sample([PROMPT] * num_samples, list(range(num_samples)), settings, partial(gumbel_noise, 0, 0))
    return time.process_time() - before


def table(rows: Sequence[SamplingRow]) -> list[str]:
    lines = ["| keys and values kept | new tokens | ms a token | x first |", "|---|---|---|---|"]
    for row in rows:
        (first, *_) = (other.ms for other in rows if other.has_cache == row.has_cache)
        lines.append(f"| {'yes' if row.has_cache else 'no'} | {row.new_tokens} | {row.ms:.2f} | {row.ms / first:.2f} |")
    return lines
