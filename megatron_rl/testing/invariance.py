"""Runs one optimiser step of a real GPTModel on any layout, and gives its loss and whole gradient to compare.

    with RankPool(4) as pool:
        truth = step_on_layout(pool, Layout(), step, config)
        found = step_on_layout(pool, Layout(tensor=2, context=2, num_microbatches=2), step, config)
        assert found.gradient_error(truth) < 1e-5

No factor undoes a layout by hand: schedule, DDP and optimiser are Megatron's. layout_step.py holds what the ranks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.testing.layout_step import Layout, LayoutModel, RankStep, Shard, StepSample, TinyGPT, joined, row_length
from megatron_rl.testing.ranks import RankPool


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: the step's L with its regularisers. gradient: the whole gradient by global parameter name, float64, on the CPU."""

    loss: float
    gradient: dict[str, Tensor]
    optimizer_norm: float | None
    metrics: dict[str, float]
    reported: dict[str, float] = field(default_factory=dict)  # what Megatron's train_step would log

    def gradient_error(self, truth: StepResult) -> float:
        """Norm of the difference over the norm of the truth, all parameters as one vector."""
        difference = sum(float((self.gradient[name] - value).square().sum()) for name, value in truth.gradient.items())
        return (difference / sum(float(value.square().sum()) for value in truth.gradient.values())) ** 0.5


def step_on_layout(
    pool: RankPool, layout: Layout, step: Sequence[StepSample], config: PolicyLossConfig, model: TinyGPT | None = None
) -> StepResult:
    """The step through the installed Megatron-Core on `layout`: count_step over dp, schedule, DDP, optimiser."""
    return steps_on_layout(pool, layout, [(step, config)], model)[0]


def steps_on_layout(
    pool: RankPool,
    layout: Layout,
    runs: Sequence[tuple[Sequence[StepSample], PolicyLossConfig]],
    model: TinyGPT | None = None,
) -> list[StepResult]:
    """step_on_layout for several steps and losses on one model, one after another. The ranks start once."""
    arguments = (layout, list(runs), TinyGPT() if model is None else model)
    answers = pool.run(_run_on_rank, *arguments, world_size=layout.world_size, **layout.model_parallel)
    return [merged([answer[index] for answer in answers]) for index in range(len(runs))]


def _run_on_rank(rank: int, layout: Layout, runs, tiny: TinyGPT) -> list[RankStep]:
    model = LayoutModel(layout, max(row_length(step, layout) for step, _ in runs), tiny)
    return [model.step(policy_config, step) for step, policy_config in runs]


def merged(answers: list[RankStep]) -> StepResult:
    """One whole gradient from all ranks' shards. AssertionError where ranks with the same shard hold different numbers."""
    shards: dict[str, dict[int, Shard]] = {}
    for answer in answers:
        for model in answer.gradients:
            for name, shard in model.items():
                known = shards.setdefault(name, {}).setdefault(0 if shard.dim is None else shard.number, shard).gradient
                # All-reduce gives each rank the same bits; each tp rank sums sequence-parallel norms in another order.
                torch.testing.assert_close(shard.gradient, known, rtol=1e-5, atol=1e-7 * float(known.abs().max() + 1e-30))
    whole = {name: joined([parts[number] for number in sorted(parts)]) for name, parts in shards.items()}
    losses = {answer.loss for answer in answers}
    first = answers[0]
    if max(losses) - min(losses) > 1e-6 * max(abs(first.loss), 1e-6):
        raise AssertionError(f"ranks report different losses: {sorted(losses)}")
    reported = next(answer.reported for answer in answers if answer.reported)
    return StepResult(first.loss, whole, first.optimizer_norm, first.metrics, reported)
