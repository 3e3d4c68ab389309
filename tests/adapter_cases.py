"""How one optimiser step goes through a host that hands over dense rows: dealt, called, multiplied by the host's factors.

A new adapter adds <name>_cases.py with its ADAPTER, which says what only that host has: the columns of its batch, its call of a
loss, the factors that it and Megatron put on the number, and its settings as a launch types them. Samples, layouts and the float64
truth are those of dense_row_cases.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import dense_row_cases
import pytest
import torch
from dense_row_cases import LAYOUTS, Result, RowCase, gradients_of, largest_error, own_part, padded, parameters_of, samples_of
from torch import Tensor

from megatron_rl.hosts import SETTINGS_NAMES
from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.oracle import ESTIMATORS
from megatron_rl.testing.reference import CLIPS, DIVISOR
from megatron_rl.weights import get_loss_aggregation

SAMPLER_GAP = 0.1  # the sampler's log-probabilities are so much lower where a correction is tried
# A micro-batch -> the number that the host's code returns to Megatron, and its metrics. The columns of the micro-batch; of each
# sample the log-probabilities that a model gives, [length], of which row p predicts token p + 1; micro-batches of this rank.
Call = Callable[[dict[str, Tensor], list[Tensor], int], tuple[Tensor, dict]]


@dataclass
class Step:
    """log_probs: of the responses. columns: of the host's batch, a row a sample. dropped: samples that the host counts out."""

    samples: Sequence[StepSample]
    log_probs: Sequence[Tensor]
    columns: dict[str, Tensor]
    dropped: Sequence[int] = ()


class Adapter:
    """What the suite asks of a host.

    metrics: what our loss reports there, by the host's names. num_ranks: processes that the layouts need, on Megatron's groups;
    1: ranks are a loop. shorts: layouts of several micro-batches in one process. other: the layout of the losses beside LOSSES.
    terms: the host's own terms that read masked positions too, for `run`. of_sampler: its settings beside a correction of ours.
    numbers: the host's names of clip, dual clip and divisor."""

    name: str
    metrics: frozenset[str]
    num_ranks = 1
    layouts: Sequence[Mapping[str, Any]] = LAYOUTS
    shorts: Sequence[Mapping[str, Any]] = ({"sizes": (3, 5)},)
    other: Mapping[str, Any] = {"dp": 2, "cp": 2, "sizes": (2, 5), "num_samples": 14}
    terms: Mapping[str, Any] = {}
    of_sampler: Mapping[str, Any] = {}
    numbers: tuple[str, str, str, str]

    @property
    def module(self) -> Any:
        return adapter_named(self.name)

    def modes(self) -> list[tuple[str, str]]:
        """(loss, aggregation), all that can be trained there by name."""
        return self.module.OFFER.pairs()

    @property
    def aggregations(self) -> list[str]:
        return [*dict.fromkeys(aggregation for _, aggregation in self.modes())]

    def matrix(self, losses: Sequence[str]) -> list[RowCase]:
        return [
            RowCase(loss=loss, aggregation=one, **layout) for loss in losses for one in self.aggregations for layout in self.layouts
        ]

    def others(self, losses: Sequence[str]) -> list[RowCase]:
        """A layout for each aggregation of the other losses."""
        return [RowCase(loss=loss, aggregation=one, **self.other) for loss, one in self.modes() if loss not in losses]

    def install(self, monkeypatch: Any) -> None:
        """The modules of the host that ours imports, emulated."""

    # What a host says

    def place(self, samples: Sequence[StepSample], rows: Sequence[Sequence[float]]) -> Tensor:
        """Values of the responses in a column of the host, [S, *]; here the responses only, padded on the right."""
        return padded(rows, max(len(sample.loss_mask) for sample in samples))

    def columns(self, case: RowCase, samples: Sequence[StepSample]) -> dict[str, Tensor]:
        raise NotImplementedError

    def dropped(self, case: RowCase) -> Sequence[int]:
        return ()

    def start(self, case: RowCase, step: Step, own: Mapping[str, Any], **settings: Any) -> Call:
        """own: our settings by their names here. settings: the host's."""
        raise NotImplementedError

    def factor(self, case: RowCase, num_microbatches: int) -> float:
        """What Megatron's schedule and DDP multiply the number by, and what the host does after its call."""
        raise NotImplementedError

    def given_numbers(self, case: RowCase) -> dict[str, Any]:
        """What a launch types of the numbers of a loss."""
        values = [*(CLIPS[case.loss] or (None, None)), *parameters_of(case).values()]
        found = dict(zip(self.numbers, values, strict=False))
        if get_loss_aggregation(case.aggregation).takes_divisor:
            found[self.numbers[-1]] = DIVISOR
        return {name: value for name, value in found.items() if value is not None}

    # The step

    def step(self, case: RowCase, samples: Sequence[StepSample] | None = None, log_probs: Sequence[Tensor] | None = None) -> Step:
        """samples: samples_of the case where they are not given."""
        if samples is None or log_probs is None:
            samples, log_probs = samples_of(case)
        prompts = [len(sample.tokens) - len(sample.loss_mask) for sample in samples]
        numbers = {"number": torch.arange(len(samples)), "prompt_lens": torch.tensor(prompts)}
        return Step(samples, log_probs, self.columns(case, samples) | numbers, self.dropped(case))

    def run(
        self,
        case: RowCase,
        step: Step,
        *,
        poison: float | None = None,
        own: Mapping[str, Any] | None = None,
        call: Call | None = None,
        cp_group: Any = None,
        **settings: Any,
    ) -> Result:
        """The gradient that the optimiser gets, and the sum of the reported losses over ranks and micro-batches.

        poison: in masked positions. call: in the place of `start`. cp_group: this process is one of its ranks, and the call takes
        its part of the rows and communicates; None: the ranks are a loop."""
        leaves = [values.float().requires_grad_() for values in step.log_probs]
        step = step if poison is None else self.poisoned(step, poison)
        call = call or self.start(case, step, own or {}, **settings)
        total, metrics, num_cp = 0.0, [], case.cp if cp_group is None else 1
        for micro_batches in case.micro_batches():
            for chosen in micro_batches:
                for cp_rank in range(num_cp):
                    rows = [row_of(step, leaves, index, cp_rank, num_cp, poison) for index in chosen]
                    data = {name: column[chosen] for name, column in step.columns.items()}
                    value, log = call(data, rows, len(micro_batches))
                    scaled = value * self.factor(case, len(micro_batches)) * num_cp / case.cp
                    scaled.backward()
                    if cp_rank == 0:
                        total += float(scaled.detach()) * case.cp / num_cp
                        metrics.append(log)
        gradients = gradients_of(leaves)
        if cp_group is not None:
            for gradient in gradients:
                torch.distributed.all_reduce(gradient, group=cp_group)
        return Result(total, gradients, metrics)

    def poisoned(self, step: Step, poison: float) -> Step:
        """The step with this in each masked position of its columns."""
        masks = [[0] * len(s.loss_mask) if i in step.dropped else s.loss_mask for i, s in enumerate(step.samples)]
        kept = self.place(step.samples, masks).bool()
        floats = [name for name, values in step.columns.items() if values.is_floating_point() and not name.endswith("mask")]
        return replace(step, columns=step.columns | {name: torch.where(kept, step.columns[name], poison) for name in floats})

    def truth(self, case: RowCase, step: Step, factors: Sequence[Sequence[float]] | None = None) -> tuple[float, list[Tensor]]:
        """Of the samples that the host counts: the others are not in the step. factors: see dense_row_cases.truth."""
        kept = [index for index in range(len(step.samples)) if index not in step.dropped]
        of_kept = ([every[index] for index in kept] for every in (step.samples, step.log_probs))
        loss, found = dense_row_cases.truth(case, *of_kept, None if factors is None else [factors[index] for index in kept])
        gradients = [torch.zeros_like(values) for values in step.log_probs]
        for index, gradient in zip(kept, found, strict=True):
            gradients[index] = gradient
        return loss, gradients

    def error(self, case: RowCase, **by: Any) -> float:
        """by: of `run`."""
        step = self.step(case)
        return largest_error(self.run(case, step, **by), *self.truth(case, step))

    def errors(self, cases: Sequence[RowCase], pool: Callable[[], Any]) -> dict[str, float]:
        """pool: makes the RankPool of num_ranks processes."""
        return {str(case): self.error(case) for case in cases}

    def below(self, case: RowCase) -> Step:
        """The step of a sampler SAMPLER_GAP below."""
        samples, log_probs = samples_of(case)
        gaps = [[value - SAMPLER_GAP for value in sample.old_log_probs or []] for sample in samples]
        return self.step(case, [replace(one, rollout_log_probs=gap) for one, gap in zip(samples, gaps, strict=True)], log_probs)


def adapters() -> dict[str, Adapter]:
    return {name: import_module(f"{name}_cases").ADAPTER for name in SETTINGS_NAMES}


def put(config: Any, settings: Mapping[str, Any]) -> Any:
    """The config with these values at dotted names of its dicts and Namespaces. A section that is not there is made."""
    for name, value in settings.items():
        *outer, last = name.split(".")
        section = config
        for part in outer:
            section = fields_of(section).setdefault(part, {})
        fields_of(section)[last] = value
    return config


def fields_of(section: Any) -> dict[str, Any]:
    return section if isinstance(section, dict) else vars(section)


def row_of(step: Step, leaves: Sequence[Tensor], index: int, cp_rank: int, cp_size: int, poison: float | None) -> Tensor:
    """[length]: with gradient where this context-parallel rank has the logits, and poison in masked positions."""
    sample = step.samples[index]
    prompt = len(sample.tokens) - len(sample.loss_mask)
    row = own_part(torch.cat([torch.full((prompt - 1,), -1.0), leaves[index], torch.zeros(1)]), cp_rank, cp_size)
    if poison is None:
        return row
    is_kept = torch.tensor([0] * (prompt - 1) + sample.loss_mask + [0]).bool() & (index not in step.dropped)
    return torch.where(is_kept, row, poison)


def responses(data: Mapping[str, Tensor], rows: Sequence[Tensor], width: int) -> Tensor:  # [S, width]
    """The log-probabilities of the responses' tokens, padded on the right."""
    own = [row[prompt - 1 : -1] for row, prompt in zip(rows, data["prompt_lens"].tolist(), strict=True)]
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in own])


def old_of(samples: Sequence[StepSample]) -> list[Sequence[float]]:
    return [sample.old_log_probs or [] for sample in samples]


def sampled_of(samples: Sequence[StepSample]) -> list[Sequence[float]]:
    """The sampler's; SAMPLER_GAP below the old ones where nothing else is known of it."""
    both = zip(samples, old_of(samples), strict=True)
    return [sample.rollout_log_probs or [value - SAMPLER_GAP for value in old] for sample, old in both]


def advantages_of(samples: Sequence[StepSample]) -> Tensor:  # [S, 1]
    return torch.tensor([sample.advantage for sample in samples])[:, None]


def check_kl(plain: Result, found: Result, step: Step, estimator: str, *, is_over_tokens: bool = False) -> None:
    """found: the step with the KL term 0.1 x estimator, a mean over samples, or over tokens. The reference is 0.3 above the old
    policy."""
    total, num_tokens = 0.0, sum(sum(sample.loss_mask) for sample in step.samples)
    for index, sample in enumerate(step.samples):
        leaf, old = step.log_probs[index].clone().requires_grad_(), torch.tensor(sample.old_log_probs, dtype=torch.float64)
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        weight = 0.1 * mask / (num_tokens if is_over_tokens else max(float(mask.sum()), 1) * len(step.samples))
        value, trained = ESTIMATORS[estimator](leaf, old + 0.3, leaf - old)
        (weight * trained).sum().backward()
        # A difference of float32 gradients.
        torch.testing.assert_close((found.gradients[index] - plain.gradients[index]).double(), leaf.grad, rtol=1e-4, atol=1e-7)
        total += float((weight * value).sum().detach())
    assert found.loss - plain.loss == pytest.approx(total, rel=1e-4)


# Our corrections, and the factor of each token's loss where the sampler is SAMPLER_GAP below.
TIS, ICEPOP, MASK = ({"importance_correction": kind} for kind in ("tis", "icepop", "mask"))
OF_SEQUENCES = {"importance_correction_level": "sequence_mean"}


def bounds(high: float, low: float | None = None) -> dict[str, float]:
    return {"importance_correction_high": high} | ({} if low is None else {"importance_correction_low": low})


CORRECTIONS: tuple[tuple[Mapping[str, Any], float], ...] = (
    (TIS, math.exp(SAMPLER_GAP)),
    (TIS | bounds(1.05), 1.05),
    (TIS | OF_SEQUENCES | bounds(2), math.exp(SAMPLER_GAP)),
    (TIS | OF_SEQUENCES | bounds(1.05), 1.05),
    (ICEPOP | bounds(1.05, 0.5), 0.0),
    (MASK | bounds(1.2, 0.5), 1.0),
    (MASK | bounds(1.05, 0.5), 0.0),
    (MASK | OF_SEQUENCES | bounds(1.05, 0.5), 0.0),
    ({"off_policy_sequence_delta": 10.0}, 1.0),
)
