"""Draws whole steps for tests/test_generated_steps.py: what is computed, how it is split over ranks, by which entry, and the truth.

Names come from the registries. A loss has decks of its own, each a shuffled repetition of an axis: it meets each value of an axis
about equally often, and another loss in the registry changes no case of it. GENERATED_STEPS=200 draws so many steps of each loss.
"""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from helpers import PARAMETERS, last_rank_alone, zigzag
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.losses.corrections import CORRECTIONS
from megatron_rl.losses.distillation import DIVERGENCES, DistillationSettings
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.testing.oracle import (
    LEVELS,
    ONE_RATIO_A_SAMPLE,
    USUAL_BOUNDS,
    DenseSample,
    DenseSettings,
    Scores,
    StepTerms,
    bounded_exp,
    k3,
    scores_of,
    token_weights,
)
from megatron_rl.weights import AGGREGATIONS, get_loss_aggregation

STEPS_OF_A_LOSS = int(os.environ.get("GENERATED_STEPS", "24"))
CLIP = (0.1, 0.15)  # low and high differ, so that swapping them shows
# A loss that is not named keeps its defaults.
NUMBERS: dict[str, list[dict[str, float]]] = {
    **dict.fromkeys(("grpo", "gspo", "gspo_token"), [{}, {"clip_ratio_c": 1.2}]),
    **{name: [values] for name, values in PARAMETERS.items()},
}


@dataclass(frozen=True)
class Split:
    """The sizes of the groups, and the micro-batches of each data-parallel rank."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    microbatches: int = 1
    pp: int = 1
    deal: str = "zigzag"  # which tokens of a document a cp rank holds
    contexts: tuple[tuple[int, ...], ...] = ()  # of each micro-batch the sizes of its cp groups, over neighbours in dp; (): cp


def uneven(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    """The first rank takes half, the second half of the rest, and so on: unlike counts, empty slices."""
    for _ in range(cp_rank):
        document = document[len(document) // 2 :]
    return document if cp_rank == cp_size - 1 else document[: len(document) // 2]


DEALS = {"zigzag": zigzag, "uneven": uneven, "last rank alone": last_rank_alone}
SPLITS = [
    Split(),
    Split(microbatches=3),
    Split(tp=2),
    Split(tp=4, microbatches=2),
    Split(cp=2),
    Split(cp=4, deal="uneven"),
    Split(cp=2, microbatches=2, deal="last rank alone"),
    Split(dp=2, microbatches=2),
    Split(dp=4),
    Split(tp=2, cp=2, deal="uneven"),
    Split(cp=2, dp=2, microbatches=2),
    Split(tp=2, cp=2, dp=2),
    Split(dp=2, pp=2),
    Split(dp=4, microbatches=3, contexts=((4,), (2, 1, 1), (2, 2)), deal="uneven"),
    Split(dp=2, microbatches=2, contexts=((2,), (1, 1))),
]


@dataclass(frozen=True)
class Shape:
    """Unmasked and masked tokens of each document, and the real columns of the vocabulary."""

    lengths: tuple[int, ...]
    masked: str = "some"
    vocabulary: int = 7
    log_ratios: tuple[float, ...] = (-0.4, -0.2, -0.05, 0.02, 0.12, 0.3)
    is_rejected: bool = False


SHAPES = {
    "ragged": Shape((5, 1, 9, 3, 2, 4)),
    "one-token responses": Shape((1, 1, 1, 1, 1), "none"),
    "one document": Shape((8,)),
    "a long document": Shape((21, 2, 3)),
    "empty documents": Shape((0, 4, 0, 0, 3, 0), "none"),
    "a masked document": Shape((4, 3, 5), "the second"),
    "all masked": Shape((3, 2), "all"),
    "all rejected": Shape((3, 2, 4), is_rejected=True),
    "no token": Shape((0, 0), "none"),
    "no document": Shape(()),
    "a vocabulary of one": Shape((3, 2, 1), vocabulary=1),
    "ratios far from 1": Shape((5, 2, 7), log_ratios=(-1.5, -0.8, -0.1, 0.5, 0.8, 1.25)),
    "ratios beyond the bound": Shape((4, 1, 6), log_ratios=(-23.0, -0.3, 0.2, 24.0)),
}
USUAL_SHAPES = ["ragged", "a long document", "a masked document", "one document"]

FLOAT64, FLOAT32, BFLOAT16 = torch.float64, torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Entry:
    """How the loss is called: from logits, hidden states or log-probabilities; by which kernels, in which precision."""

    head: str
    backend: str
    dtype: torch.dtype
    option: str = ""  # what the entry has besides

    def __str__(self) -> str:
        return " ".join(filter(None, [self.head, self.backend, str(self.dtype).removeprefix("torch."), self.option]))


ENTRIES = [
    Entry("logits", "torch", FLOAT64),
    Entry("logits", "torch", FLOAT64, "in place"),
    Entry("logits", "torch", FLOAT32, "declared factor"),
    Entry("logits", "torch", BFLOAT16),
    Entry("logits", "triton", FLOAT32),
    Entry("logits", "triton", BFLOAT16, "in place"),
    Entry("logits", "triton", FLOAT32, "declared factor"),
    Entry("hidden", "torch", FLOAT64, "small chunks"),
    Entry("hidden", "torch", FLOAT64, "one chunk"),
    Entry("hidden", "torch", FLOAT64, "sequence parallel"),
    Entry("hidden", "torch", FLOAT32, "declared factor"),
    Entry("hidden", "triton", FLOAT32, "small chunks"),
    Entry("hidden", "triton", FLOAT32, "one chunk"),
    Entry("log_probs", "torch", FLOAT64),
    Entry("log_probs", "triton", FLOAT32),
]
CORRECTIONS_AND_LEVELS = [
    *((name, level) for name in CORRECTIONS.names() for level in map(str, CORRECTIONS[name].bounds)),
    *(("none", "token") for _ in range(5)),
]
# Aggregations that count the rows of a rollout: drawn in the place of sample_mean where a rollout has several.
OF_ROWS = [name for name in AGGREGATIONS.names() if get_loss_aggregation(name).needs_rows]
BOUNDS = {"token": (0.8, 1.25), "sequence_mean": (0.9, 1.1), "sequence_sum": (0.6, 1.7)}


@dataclass(frozen=True)
class Case:
    number: int  # of the loss
    shape: str
    split: Split
    entry: Entry
    settings: DenseSettings
    per: str  # what advantages are given for: "sample" or "token"
    has_importance: bool
    is_on_policy: bool
    metrics: str
    counts_given: bool
    num_padded_columns: int
    is_per_token: bool  # Megatron's calculate_per_token_loss
    kept: str  # the ids that the sampler draws from
    rollouts: str  # of which samples a rollout is
    teacher: str = "none"
    divergence: str = "reverse_kl"

    @property
    def loss(self) -> str:
        return self.settings.loss

    def __str__(self) -> str:
        """Names the terms, so that `pytest -k` finds the cases of a new one."""
        settings = self.settings
        sizes = [f"{name}{size}" for name, size in vars(self.split).items() if isinstance(size, int) and size > 1]
        sizes += ["as " + " and ".join("+".join(map(str, of_one)) for of_one in self.split.contexts)] if self.split.contexts else []
        terms = [settings.aggregation]
        if settings.correction != "none":
            terms += [settings.correction, settings.level]
        if settings.kl_coefficient:
            terms += [settings.kl_estimator]
        if self.kept != "all":
            terms += [f"kept {self.kept}"]
        if self.rollouts != "samples":
            terms += [f"rollouts: {self.rollouts}"]
        if self.teacher != "none":
            terms += [f"teacher: {self.teacher}, {self.divergence}"]
        return f"{self.loss} {self.number}: {self.shape}, {' '.join(terms)}, {' '.join(sizes) or 'one rank'}, {self.entry}"


class Decks:
    """An endless shuffled repetition of each axis."""

    def __init__(self, seed: str):
        self.random, self.rests = random.Random(seed), {}

    def draw(self, axis: str, values: Sequence):
        rest = self.rests.setdefault(axis, [])
        if not rest:
            rest += values
            self.random.shuffle(rest)
        return rest.pop()


def cases_of(name: str, number: int = STEPS_OF_A_LOSS) -> list[Case]:
    decks, teachers = Decks(f"{name}, step"), Decks(f"{name}, teacher")
    return [taught(possible(drawn(name, index, decks)), teachers) for index in range(number)]


def drawn(name: str, number: int, decks: Decks) -> Case:
    loss = get_policy_loss(name)
    kind, level = decks.draw("correction", CORRECTIONS_AND_LEVELS)
    usual = decks.draw("has usual bounds", [True, False, False])
    has_usual = usual and (kind, level) in USUAL_BOUNDS
    low, high = (math.nan, math.nan) if loss.clip_ratios is None else CLIP
    rollouts = decks.draw("rollouts", [*ROLLOUTS])
    aggregation = decks.draw("aggregation", [one for one in AGGREGATIONS.names() if one not in OF_ROWS])
    if rollouts != "samples" and aggregation == "sample_mean" and decks.draw("counts rows", [False, True]):
        aggregation = decks.draw("of rows", OF_ROWS)
    settings = DenseSettings(
        loss=name,
        low=low,
        high=high,
        parameters=loss.resolve_parameters(decks.draw("parameters", NUMBERS.get(name, [{}]))),
        aggregation=aggregation,
        divisor=8.0,
        correction=kind,
        level=level,
        bounds=(None, None) if has_usual or kind == "none" else BOUNDS[level],
        sequence_delta=decks.draw("sequence delta", [None, None, 0.02]),
        kl_estimator=decks.draw("estimator", KL_ESTIMATORS.names()),
        kl_coefficient=decks.draw("kl", [0.0, 0.7]),
        entropy_coefficient=decks.draw("entropy", [0.0, 0.3, 0.0]),
        temperature=decks.draw("temperature", [1.0, 0.7]),
    )
    return Case(
        number=number,
        shape=decks.draw("shape", [*SHAPES, *USUAL_SHAPES]),
        split=decks.draw("split", SPLITS),
        entry=decks.draw("entry", ENTRIES),
        settings=settings,
        per=decks.draw("per", ["sample", "token"]),
        has_importance=decks.draw("importance", [False, True]),
        is_on_policy=decks.draw("on-policy", [False, False, False, True]),
        metrics=decks.draw("metrics", [str(level) for level in PolicyMetrics]),
        counts_given=decks.draw("counts given", [False, True]),
        num_padded_columns=decks.draw("padded columns", [0, 3]),
        is_per_token=decks.draw("per-token contract", [False, False, True]),
        kept=decks.draw("kept", ["all", *KEPT]),
        rollouts=rollouts,
    )


def possible(case: Case) -> Case:
    """The case without what its loss or its entry refuses; other tests see the refusals."""
    loss, settings, split, entry = get_policy_loss(case.loss), case.settings, case.split, case.entry
    if loss.anchor == "rollout":
        settings = replace(settings, correction="none", level="token", bounds=(None, None))
    if SHAPES[case.shape].is_rejected and loss.anchor == "old":
        settings = replace(settings, correction="mask", level="token", bounds=(0.9, 1.1))
    metrics = case.metrics
    if entry.head == "log_probs":
        settings = replace(settings, temperature=1.0, entropy_coefficient=0.0)
        metrics = "basic" if metrics == "with_entropy" else metrics
        split = replace(split, tp=1)
    if entry.option == "sequence parallel" and split.tp == 1:
        split = replace(split, tp=2)
    if entry.backend == "triton" and split.dp * split.microbatches > 2:  # interpreted kernels take time with each launch
        split = replace(split, microbatches=1, contexts=split.contexts[:1])
    kept = "all" if entry.head == "log_probs" else case.kept
    return replace(case, settings=settings, split=split, metrics=metrics, kept=kept)


# What of a teacher a loss can get, by what it is called with; a sampled one changes the advantages of tokens.
TEACHERS = {
    "logits": ["none", "sampled", "top 3", "all ids", "logits"],
    "hidden": ["none", "sampled", "top 3", "all ids", "hidden states", "logits"],
    "log_probs": ["none", "sampled"],
}
DISTILLATION = DistillationSettings(coefficient=0.6, teacher_temperature=1.3)
BETA = 0.3  # of jsd


def taught(case: Case, decks: Decks) -> Case:
    """Kept ids have no teacher, and a sequence-level loss has one advantage a sample."""
    teacher, divergence = decks.draw(case.entry.head, TEACHERS[case.entry.head]), decks.draw("divergence", [*DIVERGENCES])
    is_possible = case.kept == "all" and not (teacher == "sampled" and get_policy_loss(case.loss).level == "sequence")
    return replace(
        case, teacher=teacher if is_possible else "none", divergence="reverse_kl" if teacher == "sampled" else divergence
    )


def distillation_of(case: Case) -> DistillationSettings:
    beta = {"beta": BETA} if case.divergence == "jsd" else {}
    has_logits = case.teacher in ("logits", "hidden states")
    return replace(DISTILLATION, divergence=case.divergence, **beta, **({} if has_logits else {"teacher_temperature": 1.0}))


# The truth: loss, gradient and metrics from the terms of megatron_rl.testing.oracle; docs/metrics.md defines the metrics


@dataclass(frozen=True, kw_only=True)
class SetSample(DenseSample):
    """kept: the ids that the sampler drew from; None: all."""

    kept: list[list[int]] | None = None
    given: list[float] | None = None  # advantages without a teacher's part
    teacher: list[float] | None = None  # its log-probabilities of the labels


def over_kept(row: Tensor, kept: Sequence[int], label: int) -> Tensor:  # [V], any logits or log-probabilities -> 0-d
    """log pi(label) where the sampler draws from the kept ids alone: -log sum_{k kept} exp(x_k - x_label)."""
    return -torch.logsumexp(torch.stack([row[k] - row[label] for k in kept]), 0)


def scores_over(
    logits: Tensor,  # [T, V], of the unmasked tokens
    labels: Sequence[int],
    settings: DenseSettings,
    kept: Sequence[Sequence[int]],  # empty: all ids
) -> Scores:
    scores = scores_of(logits, labels, settings)
    if not kept:
        return scores
    rows = torch.log_softmax(logits.double() / settings.temperature, -1)
    new = torch.stack([over_kept(*of_token) for of_token in zip(rows, kept, labels, strict=True)])
    return Scores(new, scores.entropy)


@dataclass(frozen=True)
class DenseResult:
    loss: float
    gradient: Tensor  # [all tokens, V]
    policy_loss: float
    kl_loss: float
    entropy: float
    metrics: dict[str, float]
    log_probs: Tensor  # [all tokens], 0 where masked
    num_unmasked: int
    distillation: float = 0.0


def divergences(log_p: Tensor, log_q: Tensor, ids: Tensor | None, name: str) -> Tensor:  # [T, V], [T, V], [T, K] -> [T]
    """By the definition, of the columns or, with ids, of these columns and all others together."""
    p, q = log_p.exp(), log_q.exp()
    if ids is not None and ids.shape[1] < p.shape[1]:
        is_other = torch.ones_like(p, dtype=torch.bool).scatter_(1, ids, False)
        p, q = (torch.cat([x.gather(1, ids), (x * is_other).sum(-1, keepdim=True)], 1) for x in (p, q))
    m = BETA * q + (1 - BETA) * p
    kl = {"reverse_kl": p * (p / q).log(), "forward_kl": q * (q / p).log()}
    kl["jsd"] = BETA * q * (q / m).log() + (1 - BETA) * p * (p / m).log()
    return kl[name].sum(-1)


def dense_step(
    samples: Sequence[SetSample],
    logits: Tensor,
    settings: DenseSettings,
    case: Case | None = None,  # with a teacher
    teacher: Tensor | None = None,  # [all tokens, V] its log-probabilities
) -> DenseResult:
    """logits: [all tokens of all samples, V], in order."""
    leaf = logits.double().detach().requires_grad_()
    is_live = torch.tensor([is_live for sample in samples for is_live in sample.mask], dtype=torch.bool)
    tokens = [(sample, t) for sample in samples for t, is_live in enumerate(sample.mask) if is_live]
    kept = [sample.kept[t] for sample, t in tokens if sample.kept is not None]
    scores = scores_over(leaf[is_live], [sample.labels[t] for sample, t in tokens], settings, kept)
    terms = StepTerms(samples, scores, settings)
    loss, distillation, metrics = terms.loss() + 0.0 * leaf.sum(), leaf.new_zeros(()), dense_metrics(terms)
    if case is not None and teacher is not None and case.teacher not in ("none", "sampled"):
        log_q = teacher[is_live]
        ids = log_q.topk(min(3, log_q.shape[1]) if case.teacher == "top 3" else log_q.shape[1]).indices
        ids = ids if case.teacher in ("top 3", "all ids") else None
        found = divergences(torch.log_softmax(leaf[is_live] / settings.temperature, -1), log_q, ids, case.divergence)
        weights = token_weights(samples, [len(tokens) for tokens in terms.of_samples], settings)
        distillation = DISTILLATION.coefficient * (found.new_tensor([weights[i] for i in terms.owners]) * found).sum()
        loss = loss + distillation
        mass = torch.ones_like(found) if ids is None else log_q.gather(1, ids).exp().sum(-1)
        for name, values in (("distillation", found.detach()), ("teacher_mass", mass)):
            means = [float(values[tokens].mean()) for tokens in terms.of_samples if tokens]
            metrics |= {name: sum(means) / len(means)} if means else {}
    (gradient,) = torch.autograd.grad(loss, leaf)
    log_probs = torch.zeros(len(leaf), dtype=torch.float64)
    log_probs[is_live] = terms.new.detach()
    return DenseResult(
        loss=float(loss.detach()),
        gradient=gradient,
        policy_loss=float(terms.policy.detach()),
        kl_loss=float(terms.kl.detach()),
        entropy=float(terms.entropy.detach()),
        metrics=metrics,
        log_probs=log_probs,
        num_unmasked=len(terms.owners),
        distillation=float(distillation.detach()),
    )


def dense_metrics(terms: StepTerms) -> dict[str, float]:
    """Means over samples of means over tokens, sums and extremes over tokens; {} for a step without a token."""
    if not terms.owners:
        return {}
    settings, advantages = terms.settings, terms.advantages
    of_samples = [tokens for tokens in terms.of_samples if tokens]

    def mean(values: Tensor) -> float:
        return sum(float(values.detach().double()[tokens].mean()) for tokens in of_samples) / len(of_samples)

    def sample_size(values: Tensor) -> float:
        return float(values.sum() ** 2 / (values**2).sum() / len(values)) if values.any() else 0.0

    log_ratio = terms.log_ratio.detach()
    of_each, shared = [log_ratio[tokens] for tokens in of_samples], ONE_RATIO_A_SAMPLE.get(settings.loss)
    if shared is not None:
        of_each = [shared(one, advantages[tokens], settings) for one, tokens in zip(of_each, of_samples, strict=True)]
        of_each = [LEVELS["sequence_mean"](one) for one in of_each]
    ratio = bounded_exp(torch.cat(of_each))
    seen = bounded_exp(torch.cat(of_each if shared is None else [one[:1] for one in of_each]))
    found = {
        "num_documents": len(terms.samples),
        "num_tokens": len(terms.owners),
        "old_logprobs": mean(terms.anchor),
        "new_logprobs": mean(terms.new),
        "ratio_new_old": mean(ratio),
        "ratio_new_old_sum": float(seen.sum()),
        "ratio_new_old_squared_sum": float((seen**2).sum()),
        "effective_sample_size": sample_size(seen),
        "kl_new_old": mean(k3(-log_ratio)),
        "clipped_ratio_fraction": mean(terms.is_clipped),
        "clipped_low": mean(terms.is_clipped & (advantages < 0)),
        "clipped_high": mean(terms.is_clipped & (advantages > 0)),
        "advantage": mean(advantages),
        "max_advantage": float(advantages.max()),
        "min_advantage": float(advantages.min()),
        "entropy": mean(terms.scores.entropy),
    }
    kept = [sample.kept for sample in terms.samples if isinstance(sample, SetSample) and sample.kept is not None]
    if kept:
        num_kept = [len(kept[i][t]) for i, t in zip(terms.owners, terms.places, strict=True)]
        found |= {"kept_ids": mean(torch.tensor(num_kept)), "outside_support": 0}
    if settings.correction == "none" and settings.sequence_delta is None:
        return found
    low, high = terms.bounds
    is_kept = (terms.factors != 0).double()
    return found | {
        "correction_kept_tokens": float(is_kept.mean()),
        "correction_off_policy": mean(terms.is_off_policy),
        "correction_weight": mean(terms.factors),
        "correction_at_low": float((terms.ratios < low).double().mean()),
        "correction_at_high": float((terms.ratios > high).double().mean()),
        "correction_largest_ratio": float(terms.ratios.max()),
        "correction_effective_sample_size": sample_size(terms.factors),
    }


# What a step has


@dataclass(frozen=True)
class Step:
    """The samples of a case with their logits, and the head that makes them."""

    samples: list[SetSample]
    hidden: Tensor  # [all tokens, H] float64
    weight: Tensor  # [V, H] float64; real columns alone
    logits: Tensor  # [all tokens, V] float64
    teacher_hidden: Tensor  # [all tokens, 3] float64
    teacher_weight: Tensor  # [V, 3] float64

    @property
    def teacher(self) -> Tensor:  # [all tokens, V] its log-probabilities
        return torch.log_softmax(self.teacher_hidden @ self.teacher_weight.T / DISTILLATION.teacher_temperature, -1)

    @functools.cached_property
    def starts(self) -> list[int]:
        starts = [0]
        for sample in self.samples:
            starts.append(starts[-1] + len(sample.labels))
        return starts


HIDDEN_SIZE = 4


def step_of(case: Case) -> Step:
    shape, numbers = SHAPES[case.shape], random.Random(f"{case.loss} {case.number}")
    generator = torch.Generator().manual_seed(numbers.randrange(2**31))
    size = sum(shape.lengths)
    hidden = torch.randn(size, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    weight = 0.6 * torch.randn(shape.vocabulary, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    # What a entry in a low precision is given is what the oracle is given.
    hidden, weight = (x.to(case.entry.dtype).double() for x in (hidden, weight))
    logits = (hidden @ weight.T).to(case.entry.dtype).double()
    log_softmax = torch.log_softmax(logits / case.settings.temperature, -1)
    teacher = torch.Generator().manual_seed(random.Random(f"{case.loss} {case.number} teacher").randrange(2**31))
    teacher_hidden = torch.randn(size, 3, generator=teacher, dtype=torch.float64)
    teacher_weight = torch.randn(shape.vocabulary, 3, generator=teacher, dtype=torch.float64)
    samples, start = [], 0
    for index, length in enumerate(shape.lengths):
        rows, start = log_softmax[start : start + length], start + length
        samples.append(sample_of(case, shape, index, rows, numbers))
    step = Step(samples, hidden, weight, logits, teacher_hidden, teacher_weight)
    return taught_advantages(case, step, log_softmax) if case.teacher == "sampled" else step


def taught_advantages(case: Case, step: Step, log_softmax: Tensor) -> Step:
    """What the oracle gets in place of a sampled teacher. `given` keeps the advantages that a loss gets beside it."""
    samples = []
    for start, sample in zip(step.starts, step.samples, strict=False):
        labels = torch.tensor(sample.labels, dtype=torch.int64)[:, None]
        own, teacher = (x[start : start + len(labels)].gather(1, labels)[:, 0].tolist() for x in (log_softmax, step.teacher))
        anchor = sample.rollout if get_policy_loss(case.loss).anchor == "rollout" else sample.old or own
        gaps = [DISTILLATION.coefficient * (a - b) for a, b in zip(teacher, anchor, strict=True)]
        advantages = [a + b for a, b in zip(sample.advantages, gaps, strict=True)]
        samples.append(replace(sample, given=sample.advantages, teacher=teacher, advantages=advantages))
    return replace(step, samples=samples)


def sample_of(case: Case, shape: Shape, index: int, log_softmax: Tensor, numbers: random.Random) -> SetSample:
    length, loss = log_softmax.shape[0], get_policy_loss(case.loss)
    labels = [numbers.randrange(shape.vocabulary) for _ in range(length)]
    kept = kept_ids(case, shape, index, labels)
    new = [float(log_softmax[t, label]) for t, label in enumerate(labels)]
    if kept is not None:
        new = [float(over_kept(log_softmax[t], kept[t], label)) for t, label in enumerate(labels)]
    # Log-ratios off the edges of every bound, so that rounding decides none; a sample's mean lies anywhere.
    drift = numbers.choice((-0.15, 0.0, 0.18))
    old = [below_0(x - numbers.choice(shape.log_ratios) * numbers.uniform(0.9, 1.1) - drift) for x in new]
    gap = 3.0 if shape.is_rejected else 0.0
    of_old = new if case.is_on_policy else old
    rollout = [below_0(x - gap + numbers.choice((-0.3, -0.1, 0.04, 0.35)) * numbers.uniform(0.9, 1.1)) for x in of_old]
    if loss.anchor == "rollout":
        rollout = old
    advantage = 0.0 if index == 3 else numbers.gauss(0.0, 1.0)
    varies = case.per == "token" and loss.level != "sequence"
    return SetSample(
        labels=labels,
        mask=[is_live(shape.masked, index, numbers) for _ in range(length)],
        advantages=[numbers.choice((advantage, 0.0, -advantage)) if varies else advantage for _ in range(length)],
        old=None if case.is_on_policy else old,
        rollout=rollout,
        ref=[below_0(x + numbers.gauss(0.0, 0.3)) for x in new],
        importance=[numbers.uniform(0.5, 1.5) if case.has_importance else 1.0 for _ in range(length)],
        prompt=f"prompt {index // 4}",
        kept=kept,
        rollout_id=ROLLOUTS[case.rollouts](index),
    )


# The rollout of a sample, by its number; of a prompt's samples. Ranks and micro-batches take samples in turn, so rows lie apart.
ROLLOUTS = {
    "samples": lambda index: None,
    "pairs": lambda index: f"rollout {index // 2}",
    "prompts": lambda index: f"rollout {index // 4}",
    "uneven": lambda index: f"rollout {index // 4}, {index % 4 == 1}",
}


# How many ids beside the label, of a vocabulary of V.
KEPT = {
    "one": lambda numbers, V: 0,
    "few": lambda numbers, V: numbers.choice((0, 1, 2)),
    "mixed": lambda numbers, V: numbers.randrange(V),
}


def kept_ids(case: Case, shape: Shape, index: int, labels: list[int]) -> list[list[int]] | None:
    """In any order, the label among them; from "mixed" sometimes the whole vocabulary."""
    if case.kept == "all":
        return None
    numbers = random.Random(f"{case.loss} {case.number} {index} kept")
    ids = range(shape.vocabulary)
    sets = []
    for label in labels:
        others = numbers.sample([i for i in ids if i != label], min(KEPT[case.kept](numbers, len(ids)), len(ids) - 1))
        sets.append(numbers.sample([label, *others], 1 + len(others)))
    return sets


def below_0(log_prob: float) -> float:
    return min(log_prob, -1e-3)


def is_live(masked: str, index: int, numbers: random.Random) -> bool:
    if masked == "some":
        return numbers.random() < 0.7
    return masked == "none" or (masked == "the second" and index != 1)


CASES = [case for name in POLICY_LOSSES.names() for case in cases_of(name)]
