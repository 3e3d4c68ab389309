"""Corrections on real Megatron layouts: one step, any layout, the gradient of one float64 process with factors by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import pool_of
from test_layouts import GRADIENT_TOLERANCE, config_of
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.ops.backends import is_interpreted
from megatron_rl.testing.comparison import Truth
from megatron_rl.testing.invariance import Layout, StepSample, TinyGPT, steps_on_layout, with_old_log_probs
from megatron_rl.testing.reference import (
    double_model,
    global_parameters,
    losses_by_hand,
    model_log_probs,
    old_log_probs_off_the_edges,
    ragged_samples,
    scale_of_terms,
    weights_by_hand,
)

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

LAYOUTS = [
    pytest.param(Layout(num_microbatches=4), id="one rank, four micro-batches"),
    pytest.param(Layout(data=2, num_microbatches=2), id="DP2"),
    pytest.param(Layout(tensor=2, sequence_parallel=True, num_microbatches=2), id="TP2+SP"),
    pytest.param(Layout(pipeline=2, num_microbatches=4), id="PP2"),
    pytest.param(Layout(context=2, num_microbatches=2), id="CP2: sums of a sample over ranks"),
    pytest.param(Layout(context=4, num_microbatches=1), id="CP4: ranks without a token"),
    pytest.param(Layout(data=2, context=2, distributed_optimizer=True, num_microbatches=2), id="CP2xDP2, distributed optimiser"),
    pytest.param(Layout(packed=True, context=2, tensor=2, sequence_parallel=True, num_microbatches=2), id="packed CP2xTP2+SP"),
]


@dataclass(frozen=True)
class Case:
    """A correction under an aggregation; delta: with off-policy sequences, whose bound the truth chooses."""

    aggregation: str
    kind: str = "none"
    level: str = "token"
    bounds: tuple[float, float] | None = None
    delta: bool = False
    is_dropped: bool = False

    def config(self, policy_loss: str, delta: float, **others) -> PolicyLossConfig:
        low, high = self.bounds or (None, None)
        return config_of(
            *(policy_loss, self.aggregation),
            importance_correction=self.kind,
            importance_correction_level=self.level,
            importance_correction_low=low,
            importance_correction_high=high,
            off_policy_sequence_delta=delta if self.delta else None,
            rejected_tokens="dropped" if self.is_dropped else "counted",
            **others,
        )


TOKEN, MEAN, SUM = (0.75, 1.35), (0.9, 1.1), (0.3, 3.0)
CASES = [
    Case("sample_mean", "tis", bounds=TOKEN),
    Case("prompt_mean", "icepop", bounds=TOKEN, is_dropped=True),
    Case("constant", "icepop", "sequence_mean", MEAN),
    Case("sample_mean", "mask", "sequence_mean", MEAN, is_dropped=True),
    Case("token_mean", "tis", "sequence_sum", SUM, delta=True),
    Case("token_mean", "mask", bounds=TOKEN, is_dropped=True),
    Case("prompt_mean", delta=True),
    Case("sample_mean", "tis", "sequence_mean", MEAN),
    Case("token_mean", "icepop", "sequence_sum", SUM),
    Case("constant", "mask", "sequence_sum", SUM, is_dropped=True),
]


@dataclass(frozen=True)
class Truths:
    samples: list
    delta: float
    by_case: list[Truth]


def with_rollout_log_probs(samples):
    """Differences of old and rollout log-probabilities: per sample 0 or +-0.3, and +-0.05 a token, off the bounds above."""
    changed = []
    for index, sample in enumerate(samples):
        differences = [0.3 * (index % 3 - 1) + 0.05 * (-1) ** t for t in range(len(sample.loss_mask))]
        rollout = [old - difference for old, difference in zip(sample.old_log_probs, differences, strict=True)]
        changed.append(replace(sample, rollout_log_probs=rollout))
    return changed


def divergences(samples, log_probs) -> list[float]:
    """The mean of log(rollout / trained) of each sample; of a masked one 0."""
    found = []
    for sample, values in zip(samples, log_probs, strict=True):
        kept = [t for t, bit in enumerate(sample.loss_mask) if bit]
        found.append(sum(sample.rollout_log_probs[t] - float(values[t]) for t in kept) / max(len(kept), 1))
    return found


@dataclass(frozen=True, slots=True)
class SampleLosses:
    """The loss of each sample before its weight, and its gradient. An aggregation is a weighted sum of them."""

    losses: Tensor  # [N] float64
    gradients: dict[str, Tensor]  # [N, ...] by name, on the CPU

    @classmethod
    def of(cls, sums: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> SampleLosses:
        """sums: those of losses_by_hand. leaves: what the gradient is taken by. The graph of the model stays."""
        parts = [
            torch.autograd.grad(of_sample, [*leaves.values()], retain_graph=True, materialize_grads=True) for of_sample in sums
        ]
        gradients = {name: torch.stack(of_leaf).cpu() for name, of_leaf in zip(leaves, zip(*parts, strict=True), strict=True)}
        return cls(torch.stack([of_sample.detach() for of_sample in sums]).cpu(), gradients)

    def weighed(self, samples: Sequence[StepSample], aggregation: str) -> Truth:
        """The truth of a step. The masks of the samples are those that the aggregation counts."""
        weights = torch.tensor(weights_by_hand(samples, aggregation), dtype=torch.float64)
        gradient = {name: torch.tensordot(weights, parts, 1) for name, parts in self.gradients.items()}
        return Truth(float(weights @ self.losses), scale_of_terms(samples, aggregation), gradient)


def factors_by_hand(case: Case, sample, divergence: float, delta: float) -> list[float]:
    kept = [t for t, bit in enumerate(sample.loss_mask) if bit]
    logs = {t: sample.old_log_probs[t] - sample.rollout_log_probs[t] for t in kept}
    if case.level != "token":
        total = sum(logs.values()) / (max(len(kept), 1) if case.level == "sequence_mean" else 1)
        logs = dict.fromkeys(kept, total)
    factors = [0.0] * len(sample.loss_mask)
    for t in kept:
        ratio, factor, (low, high) = math.exp(logs[t]), 1.0, case.bounds or (0.0, math.inf)
        assert all(abs(ratio / bound - 1) > 1e-3 for bound in (low, high) if 0 < bound < math.inf), "float32 would decide"
        if case.kind == "tis":
            factor = min(max(ratio, low), high)
        elif case.kind != "none":
            factor = 0.0 if not low <= ratio <= high else ratio if case.kind == "icepop" else 1.0
        factors[t] = 0.0 if case.delta and sample.advantage < 0 and divergence > delta else factor
    return factors


def truths_on_rank(rank: int, tiny: TinyGPT, samples: list[StepSample]) -> dict[str, Truths]:
    model = double_model(tiny, samples)
    log_probs, leaves, truths = model_log_probs(model, samples, tiny), global_parameters(model), {}
    for policy_loss in LOSSES:
        old = old_log_probs_off_the_edges(samples, [values.tolist() for values in log_probs], policy_loss)
        step = with_rollout_log_probs(with_old_log_probs(samples, old))
        # In the middle of the widest gap between samples of negative advantage, so that rounding decides no sample.
        found = divergences(step, log_probs)
        bad = sorted(d for d, s in zip(found, step, strict=True) if s.advantage < 0 and any(s.loss_mask))
        low, high = max(zip(bad, bad[1:], strict=False), key=lambda pair: (pair[0] > 0) * (pair[1] - pair[0]))
        delta, by_case = (low + high) / 2, []
        assert low > 0, "no gap between off-policy samples"
        for case in CASES:
            factors = [factors_by_hand(case, *of_sample, delta) for of_sample in zip(step, found, strict=True)]
            pairs = [
                pair for sample, of_one in zip(step, factors, strict=True) for pair in zip(of_one, sample.loss_mask, strict=True)
            ]
            numbers = {factor for factor, bit in pairs if bit}
            assert 0.0 in numbers and len(numbers) > 1 or (case.kind == "tis" and not case.delta), case
            counted = step
            if case.is_dropped:
                counted = [replace(s, loss_mask=[int(f != 0) for f in of_one]) for s, of_one in zip(step, factors, strict=True)]
            sums = losses_by_hand(step, log_probs, policy_loss, {}, factors)
            by_case.append(SampleLosses.of(sums, leaves).weighed(counted, case.aggregation))
        truths[policy_loss] = Truths(step, delta, by_case)
    return truths


LOSSES, MODEL = ("grpo", "gspo"), TinyGPT(num_layers=2)
HEADS = ({}, {"fused_lm_head_loss": True, "max_logits_bytes": 16 * 1024})  # a fused head has chunks of a few rows
pool = pool_of(4)


def check(pool, layout: Layout, truths: dict[str, Truths], rows: list[tuple[int, str, dict]], **others) -> None:
    """rows: (index of a case, loss, options of the head)."""
    runs = [(truths[name].samples, CASES[index].config(name, truths[name].delta, **head, **others)) for index, name, head in rows]
    for (index, name, head), result in zip(rows, steps_on_layout(pool, layout, runs, MODEL), strict=True):
        assert result.gradient_error(truths[name].by_case[index]) < GRADIENT_TOLERANCE, (CASES[index], name, head)


@pytest.fixture(scope="module")
def truths(pool, shared):
    return shared("test_correction_layouts", lambda: pool.run(truths_on_rank, MODEL, ragged_samples(), world_size=1)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_a_corrected_step_is_that_of_one_process(pool, truths, layout):
    """FB-122: rejected tokens counted and dropped, under each aggregation. Each layout meets every case, and four layouts in a row
    meet it with both losses and both heads: so do the four with context-parallel ranks."""
    place = [row.values[0] for row in LAYOUTS].index(layout)
    check(pool, layout, truths, [(n, LOSSES[(n + place) % 2], HEADS[(n + place) // 2 % 2]) for n in range(len(CASES))])


@pytest.fixture(scope="module")
def few_truths(pool):
    """Of four short samples of three prompts, with ten unmasked tokens: interpreted kernels take time with each row."""
    few = [replace(s, tokens=s.tokens[-len(s.loss_mask) - 1 :]) for s in map(ragged_samples().__getitem__, (2, 6, 7, 12))]
    return pool.run(truths_on_rank, MODEL, few, world_size=1)[0]


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 7], ids=lambda place: LAYOUTS[place].id)
def test_interpreted_kernels_give_the_gradient_of_a_corrected_step_too(pool, few_truths, place):
    """Six layouts meet two cases each, in turn, one with each loss and one with each head."""
    if not is_interpreted():
        pytest.skip("Triton is not in its interpreter here")
    rows = [((2 * place + n) % len(CASES), LOSSES[(n + place) % 2], HEADS[(n + place // 2) % 2]) for n in range(2)]
    check(pool, LAYOUTS[place].values[0], few_truths, rows, policy_loss_backend="triton")
