"""How one optimiser step goes through a host that hands over dense rows: dealt, called, multiplied by the host's factors.

A new adapter adds <name>_cases.py with its ADAPTER, which says what only that host has: the columns of its batch, its call of a
loss, the factors that it and Megatron put on the number, and its settings as a launch types them. A response's log-probabilities
are the parameters, so no model runs. Ranks are a loop where a loss communicates nothing. The truth is a float64 step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.declare import get_policy_loss
from megatron_rl.hosts import SETTINGS_NAMES
from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.layout.context_parallel import chunk_spans
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.oracle import ESTIMATORS, Scores, StepTerms
from megatron_rl.testing.reference import CLIPS, DIVISOR, dense_samples, ragged_samples, settings_of, with_anchors
from megatron_rl.weights import get_loss_aggregation

VOCABULARY = 50
# Of these losses every layout is run, of the others one.
LOSSES = ("grpo", "gspo", "cispo")
TOLERANCE = 1e-5
# How a host calls a loss: with padded rows, once a sequence, or with all sequences behind one another.
ROWS, EACH_SEQUENCE, ONE_CALL = PACKINGS = ("rows", "a call a sequence", "one call")


@dataclass(frozen=True, kw_only=True)
class RowCase:
    loss: str
    aggregation: str
    dp: int = 1
    cp: int = 1
    tp: int = 1
    sizes: tuple[int, ...] = (16,)  # samples of the micro-batches of each data-parallel rank, in turn
    num_samples: int = 16
    has_rollouts: bool = False  # of one row to three, which are dealt to any ranks and micro-batches
    packing: str = ROWS
    has_second_mask: bool = False  # a mask of the host's beside that of responses

    def micro_batches(self) -> Iterator[list[list[int]]]:
        """Of each data-parallel rank the numbers of its samples. They are shuffled, so that prompt groups are cut."""
        order = list(range(self.num_samples))
        random.Random(7).shuffle(order)
        share = self.num_samples // self.dp
        assert share * self.dp == self.num_samples
        for rank in range(self.dp):
            yield deal(order[rank * share : (rank + 1) * share], self.sizes)

    def __str__(self) -> str:
        rest = f" {self.packing}{' rollouts' * self.has_rollouts}{' second mask' * self.has_second_mask}"
        ranks = f"dp{self.dp} cp{self.cp} tp{self.tp}"
        return f"{self.loss} {self.aggregation} {ranks} {'+'.join(map(str, self.sizes))}{rest}"


# Micro-batches of one size and of many, as dynamic batch sizes make; 14 samples: the last prompt group is smaller.
LAYOUTS = (
    {},
    {"sizes": (1, 5, 3, 7)},
    {"cp": 2, "sizes": (4, 12)},
    {"dp": 2, "sizes": (2, 5), "num_samples": 14},
    {"dp": 2, "cp": 2, "sizes": (1, 1, 2, 3), "num_samples": 14},
    {"dp": 4, "cp": 4, "sizes": (3, 1)},
)


def rollout_cases(losses: Sequence[str]) -> list[RowCase]:
    """Of rollouts of several rows: grpo with each aggregation and layout, and one of each of these losses."""
    layouts = [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4], {"dp": 4, "sizes": (1,)}]
    aggregations = ("sample_mean", "row_mean", "prompt_mean", "token_mean", "constant")
    rows = [("grpo", one, layout) for one in aggregations for layout in layouts]
    rows += [(loss, "sample_mean", layouts[2]) for loss in losses]
    return [RowCase(loss=loss, aggregation=one, has_rollouts=True, **layout) for loss, one, layout in rows]


def samples_of(case: RowCase, seed: int = 3) -> tuple[list[StepSample], list[Tensor]]:
    """The samples with old log-probabilities on both sides of the clip, and the log-probabilities of their responses."""
    samples = ragged_samples(seed, vocab_size=VOCABULARY, num_samples=case.num_samples)
    numbers = random.Random(seed)
    log_probs = [[math.log(numbers.uniform(0.05, 0.9)) for _ in sample.loss_mask] for sample in samples]
    step = with_anchors(samples, log_probs, case.loss)
    return step, [torch.tensor(values, dtype=torch.float64) for values in log_probs]


def truth(
    case: RowCase,
    samples: Sequence[StepSample],
    log_probs: Sequence[Tensor],
    factors: Sequence[Sequence[float]] | None = None,  # of each token: a correction
) -> tuple[float, list[Tensor]]:
    leaves, (low, high) = [values.clone().requires_grad_() for values in log_probs], CLIPS[case.loss] or (None, None)
    config = PolicyLossConfig(
        policy_loss=case.loss,
        loss_aggregation=case.aggregation,
        loss_aggregation_divisor=DIVISOR if case.aggregation == "constant" else None,
        clip_ratio_low=low,
        clip_ratio_high=high,
        loss_parameters=parameters_of(case),
    )
    step = dense_samples(samples)
    if case.has_rollouts:
        step = [replace(one, rollout_id=rollout) for one, rollout in zip(step, rollouts_of(samples), strict=True)]
    if factors is not None:
        step = [replace(one, importance=[*of_one]) for one, of_one in zip(step, factors, strict=True)]
    live = torch.cat([leaf[torch.tensor(sample.loss_mask, dtype=torch.bool)] for leaf, sample in zip(leaves, samples, strict=True)])
    loss = StepTerms(step, Scores(live, torch.zeros_like(live)), settings_of(config)).loss()
    loss.backward()
    return float(loss.detach()), gradients_of(leaves)


def rollouts_of(samples: Sequence[StepSample]) -> list[str]:
    """The rollout of each sample: of a prompt's samples one, two, three and so on. Two of a prompt have one advantage here or not:
    a weight does not depend on it."""
    sizes, found = (1, 2, 3), []
    for index, sample in enumerate(samples):
        before = [other.prompt_id for other in samples[:index]].count(sample.prompt_id)
        number = sum(before >= end for end in accumulate(sizes * len(samples)))
        found.append(f"{sample.prompt_id}: {number}")
    return found


def parameters_of(case: RowCase) -> dict[str, float]:
    has_dual_clip = any(parameter.name == "clip_ratio_c" for parameter in get_policy_loss(case.loss).parameters)
    return {"clip_ratio_c": 3.0} if has_dual_clip else {}


def padded(rows: Sequence[Sequence[float]], width: int) -> Tensor:  # [S, width] float32
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float32)


def in_place(samples: Sequence[StepSample], rows: Sequence[Sequence[float]], width: int) -> Tensor:  # [S, width] float32
    """The responses' values at the places of their tokens, behind the prompts."""
    prompts = [len(sample.tokens) - len(sample.loss_mask) for sample in samples]
    return padded([[*[0.0] * prompt, *row] for prompt, row in zip(prompts, rows, strict=True)], width)


def padded_ids(samples: Sequence[StepSample], width: int) -> Tensor:  # [S, width]
    return padded([sample.tokens for sample in samples], width).long()


def logits_of(log_probs: Tensor, ids: Tensor) -> Tensor:  # [length - 1], [>= length] -> [length, V]
    """Logits whose log-softmax at each next token is its log-probability, with derivative 1."""
    others = torch.log(-torch.expm1(log_probs)) - math.log(VOCABULARY - 1)
    rows = others[:, None].expand(-1, VOCABULARY)
    rows = rows.scatter(1, ids[1 : len(log_probs) + 1, None], log_probs[:, None])
    return torch.cat([rows, torch.zeros(1, VOCABULARY)])


@dataclass
class Result:
    loss: float
    gradients: list[Tensor]
    metrics: list[dict]


def deal(order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        size = sizes[len(batches) % len(sizes)]
        batches.append(list(order[start : start + size]))
        start += size
    return batches


def own_part(values: Tensor, cp_rank: int, cp_size: int) -> Tensor:  # [length]
    """The values of a sample, with gradient where this context-parallel rank has the logits."""
    owned = torch.zeros(len(values), dtype=torch.bool)
    for start, end in chunk_spans(-(-len(values) // (2 * cp_size)) * 2 * cp_size, cp_rank, cp_size):
        owned[start : min(end, len(values))] = True
    return torch.where(owned, values, values.detach())


def too_large(found: Mapping[str, float]) -> dict[str, float]:
    return {name: error for name, error in found.items() if not error <= TOLERANCE}


def gradients_of(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.double() for leaf in leaves]


def largest_error(found: Result, loss: float, gradients: Sequence[Tensor]) -> float:
    """Relative to the largest number of the truth."""
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    errors = [float((a - b).abs().max()) for a, b in zip(found.gradients, gradients, strict=True)]
    return max(max(errors) / scale, abs(found.loss - loss) / max(abs(loss), scale))


# The step of a host

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
    terms: the host's own terms that read masked positions too, for `run`. numbers: the host's names of clip, dual clip, divisor."""

    name: str
    metrics: frozenset[str]
    num_ranks = 1
    layouts: Sequence[Mapping[str, Any]] = LAYOUTS
    shorts: Sequence[Mapping[str, Any]] = ({"sizes": (3, 5)},)
    other: Mapping[str, Any] = {"dp": 2, "cp": 2, "sizes": (2, 5), "num_samples": 14}
    terms: Mapping[str, Any] = {}
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

    def host_factor(self, case: RowCase, num_microbatches: int) -> float:
        """What the host multiplies the number of our loss by. A `Call` has done it."""
        raise NotImplementedError

    def factor(self, case: RowCase, num_microbatches: int) -> float:
        """Megatron: x c / M. DDP: the mean over D c ranks."""
        return case.cp / num_microbatches / (case.dp * case.cp)

    def given_numbers(self, case: RowCase) -> dict[str, Any]:
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
        start: Callable[..., Call] | None = None,
        cp_group: Any = None,
        **settings: Any,
    ) -> Result:
        """The gradient that the optimiser gets, and the sum of the reported losses over ranks and micro-batches.

        poison: in masked positions. start: in the place of the adapter's. cp_group: this process is one of its ranks, and the call
        takes its part of the rows and communicates; None: the ranks are a loop."""
        leaves = [values.float().requires_grad_() for values in step.log_probs]
        step = step if poison is None else self.poisoned(step, poison)
        call = (start or self.start)(case, step, own or {}, **settings)
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
        """Of the samples that the host counts: the others are not in the step. factors: see truth."""
        kept = [index for index in range(len(step.samples)) if index not in step.dropped]
        of_kept = ([every[index] for index in kept] for every in (step.samples, step.log_probs))
        loss, found = truth(case, *of_kept, None if factors is None else [factors[index] for index in kept])
        gradients = [torch.zeros_like(values) for values in step.log_probs]
        for index, gradient in zip(kept, found, strict=True):
            gradients[index] = gradient
        return loss, gradients

    def error(self, case: RowCase, step: Step | None = None, **by: Any) -> float:
        step = step or self.step(case)
        return largest_error(self.run(case, step, **by), *self.truth(case, step))

    def errors(self, cases: Sequence[RowCase], pool: Callable[[], Any]) -> dict[str, float]:
        return {str(case): self.error(case) for case in cases}

    def below(self, case: RowCase) -> Step:
        samples, log_probs = samples_of(case)
        gaps = [[value - SAMPLER_GAP for value in sample.old_log_probs or []] for sample in samples]
        return self.step(case, [replace(one, rollout_log_probs=gap) for one, gap in zip(samples, gaps, strict=True)], log_probs)


def adapters() -> dict[str, Adapter]:
    return {name: import_module(f"{name}_cases").ADAPTER for name in SETTINGS_NAMES}


def emulated(code: str, *paths: str) -> dict[str, ModuleType]:
    """Modules of a host by these paths, each with all of the code, and the packages that they are in."""
    modules: dict[str, ModuleType] = {}
    for path in paths:
        for name in accumulate(path.split("."), "{}.{}".format):
            modules.setdefault(name, ModuleType(name)).__path__ = []
        exec(code, vars(modules[path]))
    return modules


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
    (TIS | OF_SEQUENCES | bounds(1.05), 1.05),
    (ICEPOP | bounds(1.05, 0.5), 0.0),
    (MASK | bounds(1.2, 0.5), 1.0),
    (MASK | OF_SEQUENCES | bounds(1.05, 0.5), 0.0),
    ({"off_policy_sequence_delta": 10.0}, 1.0),
)
