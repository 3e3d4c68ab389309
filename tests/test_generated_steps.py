"""Generated steps against the dense oracle: loss, gradient, metrics and log-probabilities, whatever the split and the entry.

Ranks are threads here (simulated_ranks.py). tests/test_layouts.py has real ranks and models of Megatron-Core.
STEPS=FOLDER compares the bits of each step with those that an earlier run has left there, and leaves what is not there: for a
change that must move none.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from generated_steps import (
    CASES,
    CORRECTIONS_AND_LEVELS,
    DEALS,
    FLOAT64,
    KEPT,
    SHAPES,
    Case,
    DenseResult,
    Split,
    Step,
    dense_step,
    distillation_of,
    step_of,
)
from helpers import KERNEL_DEVICE
from loss_backends import HAS_TRITON
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.errors import DataError, EmptyStep
from megatron_rl.layout.agreement import MESSAGE_BYTES
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.megatron.samples import PolicySample, weigh_samples
from megatron_rl.megatron.schedule import backward_factor, scale_for_schedule
from megatron_rl.metrics.step import report_pairs, step_metrics
from megatron_rl.ops.distribution import HeadTeacher, LogitsTeacher, TopKTeacher
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.policy_loss import linear_policy_loss, policy_loss
from megatron_rl.policy_loss.api import PolicyLossOutput, loss_of_log_probs
from megatron_rl.weights import get_loss_aggregation


@dataclass(frozen=True)
class Tolerance:
    loss: float  # relative to the largest term, or to 1
    gradient: float  # relative to the largest element of the gradient
    log_probs: float
    metrics: float


# float64: the weights of tokens are float32. float32: a log-probability near -3 is good to 3e-7, and so is its ratio; that of e^20
# to 20 times as much. bfloat16: the gradient is rounded once, to 8 bits, and the interpreter cuts them off.
DOUBLE_PRECISION = Tolerance(2e-7, 2e-7, 1e-12, 1e-9)
SINGLE_PRECISION = Tolerance(2e-5, 1e-5, 3e-6, 2e-5)
HALF_PRECISION = Tolerance(2e-5, 2**-7, 3e-6, 2e-5)
TOLERANCES = {torch.float64: DOUBLE_PRECISION, torch.float32: SINGLE_PRECISION, torch.bfloat16: HALF_PRECISION}


def config_of(case: Case) -> PolicyLossConfig:
    settings = case.settings
    return PolicyLossConfig(
        policy_loss=case.loss,
        loss_aggregation=settings.aggregation,
        loss_aggregation_divisor=settings.divisor if get_loss_aggregation(settings.aggregation).takes_divisor else None,
        importance_correction=settings.correction,
        importance_correction_level=settings.level,
        importance_correction_low=settings.bounds[0],
        importance_correction_high=settings.bounds[1],
        off_policy_sequence_delta=settings.sequence_delta,
        kl_coefficient=settings.kl_coefficient,
        entropy_coefficient=settings.entropy_coefficient,
    )


@dataclass
class Microbatch:
    """Some samples of a step on one cp rank: the places of its tokens, and what a loss is given for them."""

    case: Case
    step: Step
    samples: list[int]  # numbers of the step's samples
    weighed: list[PolicySample]
    groups: ParallelGroups
    totals: StepTotals | None  # None: a step without a token

    def __post_init__(self) -> None:
        deal, cp = DEALS[self.case.split.deal], self.groups.cp
        documents = [list(range(len(self.step.samples[i].labels))) for i in self.samples]
        self.slices = [deal(document, cp.rank(), cp.size()) for document in documents]
        self.own = [(i, t) for i, tokens in zip(self.samples, self.slices, strict=True) for t in tokens]
        self.rows = torch.tensor([self.step.starts[i] + t for i, t in self.own], dtype=torch.int64)
        # A tail of junk: to a multiple of tp, which sequence parallelism needs.
        tp = self.groups.tp.size()
        self.tail = 2 * tp + -len(self.own) % tp if self.case.number % 3 == 0 else -len(self.own) % tp
        self.is_live = torch.tensor([self.step.samples[i].mask[t] for i, t in self.own], dtype=torch.bool)

    def padded(self, values: list | Tensor, junk: float) -> Tensor:
        tensor = torch.as_tensor(values)
        return torch.cat([tensor, torch.full((self.tail, *tensor.shape[1:]), junk, dtype=tensor.dtype)])

    def vector(self, name: str) -> Tensor:
        """NaN wherever nothing may be read (FB-56)."""
        values = torch.tensor([getattr(self.step.samples[i], name)[t] for i, t in self.own], dtype=torch.float64)
        return self.padded(torch.where(self.is_live, values, math.nan), math.nan).to(KERNEL_DEVICE)

    def support(self) -> SamplingSupport:
        """Of masked tokens and of padding anything: nothing, an id that no vocabulary has, one twice."""
        junk = itertools.cycle(([], [-1, 10**9], [3, 3]))
        sets = [self.step.samples[i].kept[t] if live else next(junk) for (i, t), live in zip(self.own, self.is_live, strict=True)]
        support = SamplingSupport.from_lists(sets + [next(junk) for _ in range(self.tail)])
        return support.to(KERNEL_DEVICE)

    def teacher(self) -> dict:
        """Masked rows have ids that no vocabulary has, and NaN."""
        kind, teacher, dtype = self.case.teacher, self.step.teacher, self.case.entry.dtype
        if kind == "sampled":
            return {"teacher_log_probs": self.vector("teacher")}
        if kind in ("top 3", "all ids"):
            found = teacher.topk(min(3, teacher.shape[1]) if kind == "top 3" else teacher.shape[1])
            ids = self.padded(torch.where(self.is_live[:, None], found.indices[self.rows], -5), 10**9)
            return {"teacher": TopKTeacher(ids.to(KERNEL_DEVICE), self.rows_of(found.values).to(KERNEL_DEVICE))}
        first, last, width = columns_of(self.case, self.step, self.groups)
        weight = torch.full((width, 3), 0.3, dtype=torch.float64)
        weight[: last - first] = self.step.teacher_weight[first:last]
        if kind == "logits":
            return {"teacher": LogitsTeacher(self.rows_of(self.step.teacher_hidden @ weight.T).to(KERNEL_DEVICE, FLOAT64))}
        hidden, weight = (x.to(KERNEL_DEVICE, dtype) for x in (self.rows_of(self.step.teacher_hidden), weight))
        return {"teacher": HeadTeacher(hidden, weight)}

    def rows_of(self, matrix: Tensor) -> Tensor:
        rows = matrix[self.rows]
        rows[~self.is_live] = math.nan
        return self.padded(rows, math.nan)

    def arguments(self) -> tuple:
        """The positional arguments of a loss after its logits."""
        labels = [self.step.samples[i].labels[t] if live else -100 for (i, t), live in zip(self.own, self.is_live, strict=True)]
        bounds = torch.tensor([0, *map(len, self.slices)]).cumsum(0).int()
        name = "given" if self.case.teacher == "sampled" else "advantages"
        of_samples = [getattr(self.step.samples[i], name) for i in self.samples]
        advantages = torch.tensor([next(iter(values), 0.0) for values in of_samples], dtype=torch.float64)
        is_per_token = self.case.per == "token"
        old = None if self.case.is_on_policy else self.vector("old")
        if get_policy_loss(self.case.loss).anchor == "rollout" and old is not None:
            old = old - 0.5  # numbers that must not be read
        return (
            self.padded(torch.tensor(labels, dtype=torch.int64), -100).to(KERNEL_DEVICE),
            old,
            self.vector(name) if is_per_token else advantages.to(KERNEL_DEVICE),
            self.padded(self.is_live, True).to(KERNEL_DEVICE),
            bounds,
            torch.tensor([sample.token_weight for sample in self.weighed], dtype=torch.float64),
        )

    def options(self) -> dict:
        case, settings = self.case, self.case.settings
        loss = get_policy_loss(case.loss)
        correction = CorrectionSettings.of(config_of(case))
        options = {
            "loss_parameters": {name: value for name, value in settings.parameters.items() if value < math.inf},
            "tp_group": self.groups.tp,
            "cp_group": self.groups.cp,
            "metrics": case.metrics,
            "backend": case.entry.backend,
            "advantages_per": case.per,
            "kl_coefficient": settings.kl_coefficient,
            "kl_estimator": settings.kl_estimator,
            "entropy_coefficient": settings.entropy_coefficient,
            "regularizer_weights": torch.tensor([s.regularizer_weight for s in self.weighed], dtype=torch.float64),
        }
        if loss.clip_ratios is not None:
            options |= {"clip_ratio_low": settings.low, "clip_ratio_high": settings.high}
        if case.has_importance:
            options["importance_weights"] = self.vector("importance")
        if settings.kl_coefficient:
            options["ref_log_probs"] = self.vector("ref")
        if correction is not None or loss.anchor == "rollout":
            options |= {"rollout_log_probs": self.vector("rollout"), "correction": correction}
        if case.counts_given:
            options["token_counts"] = torch.tensor([sum(self.step.samples[i].mask) for i in self.samples], dtype=torch.int64)
        if case.kept != "all":
            options["sampling_support"] = self.support()
        if case.teacher != "none":
            options |= {"distillation": distillation_of(case)} | self.teacher()
        if case.entry.head != "log_probs":
            options |= {"temperature": settings.temperature, "vocab_size": self.step.weight.shape[0]}
        return options


@dataclass
class Answer:
    """What one rank has: sums over its micro-batches, and its part of each gradient, put into the place of the whole."""

    parts: dict[str, float]
    logits: Tensor | None  # [all tokens, V]
    hidden: Tensor | None  # [all tokens, H]
    weight: Tensor | None  # [V, H]
    log_probs: Tensor  # [all tokens]
    num_tokens: int  # unmasked
    metrics: dict[str, float]
    pairs: dict[str, Tensor]


@contextlib.contextmanager
def small_kernels():
    """Each shape of a kernel fits, and documents of a few tokens have several blocks."""
    if not HAS_TRITON:
        yield
        return
    from megatron_rl.ops import rows_triton
    from megatron_rl.policy_loss.reduce_triton import reduce_triton

    configuration = rows_triton.OneReadConfiguration(lanes=4, tiles=2, block=32, num_warps=1)
    with (
        mock.patch.object(rows_triton, "one_read_configuration", lambda *sizes: configuration),
        mock.patch.dict(reduce_triton.__wrapped__.__kwdefaults__, block=4),
    ):
        yield


def columns_of(case: Case, step: Step, groups: ParallelGroups) -> tuple[int, int, int]:
    """(first, last, width): the real columns of this tp rank, and its stored ones. Padding lies behind the real ones."""
    real, tp = step.weight.shape[0], groups.tp.size()
    width = -(-(real + case.num_padded_columns) // tp)
    width = width if (tp - 1) * width < real else -(-real // tp)  # each rank has a real column, where there are enough
    first = min(groups.tp.rank() * width, real)
    return first, min(first + width, real), width


def groups_of(split: Split) -> tuple[list[ParallelGroups], dict[int, list[ParallelGroups]]]:
    """(the groups of each rank in a step, those of its micro-batches by the id of the former)."""
    shared = {"tp": split.tp, "pp": split.pp}
    static, ranks = groups_of_ranks(cp=split.cp, dp=split.dp, **shared), split.cp * split.dp
    by_size = {size: groups_of_ranks(cp=size, dp=ranks // size, **shared) for sizes in split.contexts for size in sizes}

    def of_microbatch(number: int, sizes: tuple[int, ...]) -> ParallelGroups:
        of_place = [size for size in sizes for _ in range(size)]
        return by_size[of_place[number // split.tp % ranks]][number]

    own = {id(groups): [of_microbatch(n, sizes) for sizes in split.contexts] for n, groups in enumerate(static)}
    return static, own


def run_rank(case: Case, step: Step, groups: ParallelGroups, *of_microbatches: ParallelGroups) -> Answer:
    size, (first, last, width) = step.logits.shape[0], columns_of(case, step, groups)
    mine = list(range(len(step.samples)))[groups.dp.rank() :: groups.dp.size()]
    is_last_stage = groups.pp.rank() == groups.pp.size() - 1
    try:
        weighed, totals = weigh_samples(config_of(case), [unweighed(step, i) for i in mine], groups)
    except EmptyStep as error:
        if "the correction keeps" in str(error):
            raise
        weighed, totals = [without_weight(step, i) for i in mine], None
    number = case.split.microbatches
    parts = [(groups, mine[part::number], weighed[part::number]) for part in range(number)]
    if of_microbatches:
        of_ranks = [dict(zip(mine, weighed, strict=True))]
        of_ranks = of_ranks if groups.dp.size() == 1 else groups.dp.exchange("weighed samples", of_ranks[0])
        moved = {number: sample for of_rank in of_ranks for number, sample in of_rank.items()}
        parts = []
        for part, (own, sizes) in enumerate(zip(of_microbatches, case.split.contexts, strict=True)):
            ends = list(itertools.accumulate(sizes))
            chosen = sorted(moved)[part::number][bisect.bisect_right(ends, groups.dp_cp.rank()) :: len(sizes)]
            parts.append((own, chosen, [moved[i] for i in chosen]))
    model = SimpleNamespace(calculate_per_token_loss=case.is_per_token, grad_scale_func=None, num_moe_experts=None)
    context = {"totals": totals, "config": model, "groups": groups}
    factor = 1.0 if totals is None else backward_factor(number, **context)
    answer = Answer({}, None, None, None, torch.zeros(size, dtype=torch.float64), 0, {}, {})
    statistics = []
    for own, chosen, samples in parts if is_last_stage else ():
        batch = Microbatch(case, step, chosen, samples, own, totals)
        begins = num_calls(own.cp, own.tp)
        output, leaves = through_the_entry(batch, width, factor)
        check_collectives(batch, begins)
        ends = num_calls(own.cp, own.tp)
        loss = output.loss
        if totals is not None:
            num_live = int(batch.is_live.sum())
            loss, num_tokens, report = scale_for_schedule(output.loss, number, num_local_tokens=num_live, **context)
            loss = loss / num_tokens / number if not case.is_per_token else loss  # as Megatron's schedule
            answer.num_tokens += num_live
        loss.backward()
        assert num_calls(own.cp, own.tp) == ends, "no collective in a backward"
        collect(answer, batch, output, leaves, (first, last))
        if output.metrics is not None:
            statistics.append(output.metrics)
    if case.metrics != "none":
        begins = num_calls(groups.dp_cp, groups.pp)
        answer.metrics = step_metrics(statistics, groups, has_entropy=case.metrics == "with_entropy")
        ends = num_calls(groups.dp_cp, groups.pp)
        wanted = [groups.dp_cp.size() > 1 and is_last_stage, groups.pp.size() > 1]
        assert [end - begin for begin, end in zip(begins, ends, strict=True)] == wanted, "the last stage gathers, once"
        num_parts = number * groups.dp_cp.size()
        for part in statistics:
            for name, pair in report_pairs(part, num_parts).items():
                answer.pairs[name] = answer.pairs.get(name, 0.0) + pair.double()
    return answer


def num_calls(*groups) -> list[int]:
    return [len(group.calls) if group.size() > 1 else 0 for group in groups]


def check_collectives(batch: Microbatch, begins: list[int]) -> None:
    """FB-27: one all-reduce of [N, k <= 7] over cp, before it one of [N, k <= 3] for the sums of a correction, after it one of [N]
    where results of means are counted; one all-gather over tp, and with sets of ids one for the entropy."""
    case, size = batch.case, len(batch.samples)
    over_cp, over_tp = (
        [call for call in (group.calls[first:] if group.size() > 1 else []) if call[1] != (MESSAGE_BYTES,)]
        for group, first in zip((batch.groups.cp, batch.groups.tp), begins, strict=True)
    )
    if case.entry.head == "hidden":  # one a bin of documents, and a gather of [rows, 3 or 4] a chunk, with one reduction of dX
        assert all(shape[0] == size and math.prod(shape[1:]) <= 7 for _, shape in over_cp), over_cp
        kinds = [kind for kind, _ in over_tp]
        is_parallel = case.entry.option == "sequence parallel"
        assert kinds.count("reduce_scatter") == is_parallel and kinds.count("all_reduce") <= len(kinds) // 2 * (not is_parallel)
        return
    correction, reads_means = CorrectionSettings.of(config_of(case)), "mean_log_ratio" in get_policy_loss(case.loss).needs
    reads_sums = correction is not None and (correction.level != "token" or correction.sequence_delta is not None)
    widths = ([3] * reads_sums + [7] + [1] * reads_means) * (batch.groups.cp.size() > 1)
    assert [kind for kind, _ in over_cp] == ["all_reduce"] * len(widths), over_cp
    for (_, shape), width in zip(over_cp, widths, strict=True):
        assert shape[0] == size and math.prod(shape[1:]) <= width, over_cp
    has_entropy = case.metrics == "with_entropy" or case.settings.entropy_coefficient > 0
    of_teacher = case.teacher in ("top 3", "all ids", "logits")
    num_gathers = (1 + (case.kept != "all" and has_entropy) + of_teacher) * (batch.groups.tp.size() > 1)
    assert [kind for kind, _ in over_tp] == ["all_gather"] * num_gathers, over_tp
    if case.kept == "all" and over_tp:
        # An entropy costs a column, and the normaliser of a teacher's logits.
        assert over_tp[0][1][1] == 3 + has_entropy + (case.teacher == "logits")


def unweighed(step: Step, number: int) -> SimpleNamespace:
    sample = step.samples[number]
    vectors = {"old_log_probs": sample.old, "ref_log_probs": None, "rollout_log_probs": sample.rollout}
    vectors = {name: None if v is None else torch.tensor(v, dtype=torch.float64) for name, v in vectors.items()}
    mask = [int(bit) for bit in sample.mask]
    others = {
        "policy_version": None,
        "routes": None,
        "kept_ids": None,
        "kept_mass": None,
        **dict.fromkeys(("teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs")),
        "advantage": 0.0,
        "tokens": [0, *sample.labels],
    }
    return SimpleNamespace(loss_mask=mask, prompt_id=sample.prompt, rollout_id=sample.rollout_id, **vectors, **others)


def without_weight(step: Step, number: int) -> SimpleNamespace:
    """Of a step without a token, which has no weights: any number may stand there."""
    return SimpleNamespace(token_weight=0.7, regularizer_weight=0.3)


def through_the_entry(batch: Microbatch, width: int, factor: float) -> tuple[PolicyLossOutput, dict[str, Tensor]]:
    case, step, options = batch.case, batch.step, batch.options()
    entry, tp = case.entry, batch.groups.tp
    first = tp.rank() * width
    if entry.option == "declared factor":
        options["loss_scale"] = factor
    if entry.head == "log_probs":
        log_softmax = torch.log_softmax(step.logits, -1)[batch.rows]
        labels = batch.arguments()[0].cpu()
        taken = log_softmax.gather(1, labels[: len(batch.own), None].clamp(min=0))[:, 0]
        leaf = batch.padded(torch.where(batch.is_live, taken, math.nan), math.nan).to(KERNEL_DEVICE, entry.dtype).requires_grad_()
        options.pop("regularizer_weights") if not case.settings.kl_coefficient else None
        return loss_of_log_probs(case.loss, leaf, *batch.arguments()[1:], **options), {"log_probs": leaf}
    if entry.head == "logits":
        padding = torch.full((step.logits.shape[0], width * tp.size() - step.logits.shape[1]), 7.0, dtype=torch.float64)
        shard = torch.cat([step.logits, padding], 1)[:, first : first + width]
        leaf = batch.rows_of(shard).to(KERNEL_DEVICE, entry.dtype).requires_grad_()
        logits = leaf * 1 if entry.option == "in place" else leaf
        output = policy_loss(case.loss, logits, *batch.arguments(), inplace=entry.option == "in place", **options)
        return output, {"logits": leaf}
    padding = torch.full((width * tp.size() - step.weight.shape[0], step.weight.shape[1]), 0.3, dtype=torch.float64)
    weight = torch.cat([step.weight, padding])[first : first + width].to(KERNEL_DEVICE, entry.dtype).requires_grad_()
    hidden = batch.rows_of(step.hidden).to(KERNEL_DEVICE, entry.dtype)
    is_parallel = entry.option == "sequence parallel"
    if is_parallel:
        hidden = hidden.chunk(tp.size())[tp.rank()]
    hidden = hidden.clone().requires_grad_()
    num_rows = 1000 if entry.option == "one chunk" else 3
    head = {
        "max_logits_bytes": (num_rows + -(-num_rows // 32)) * width * weight.element_size(),  # a row in 33 is for moving others
        "sequence_parallel": is_parallel,
    }
    output = linear_policy_loss(
        case.loss,
        hidden,
        weight,
        *batch.arguments(),
        **head,
        **options,
    )
    shared = {name: options[name] for name in ("temperature", "vocab_size", "tp_group", "backend")} | head
    shared["sampling_support"] = options.get("sampling_support")
    with torch.no_grad():
        mask = batch.padded(batch.is_live, False)
        alone = linear_log_probs(hidden, weight, batch.arguments()[0], loss_mask=mask, **shared)
    torch.testing.assert_close(alone, output.log_probs, rtol=0, atol=TOLERANCES[entry.dtype].log_probs)
    return output, {"hidden": hidden, "weight": weight}


def collect(
    answer: Answer, batch: Microbatch, output: PolicyLossOutput, leaves: dict[str, Tensor], columns: tuple[int, int]
) -> None:
    """Adds a micro-batch to the answer, and checks what must be 0."""
    step, (first, last), size = batch.step, columns, batch.step.logits.shape[0]
    is_double = batch.case.entry.dtype == torch.float64
    assert output.loss.dtype == (torch.float64 if is_double else torch.float32), "numbers of 16 bits are float32 inside"
    assert output.num_nonfinite.dtype == torch.int32 and (output.metrics is None) == (batch.case.metrics == "none")
    assert output.num_nonfinite.tolist() == [0] * len(batch.samples)
    for name in ("loss", "policy_loss", "kl_loss", "entropy", "distillation"):
        value = getattr(output, name)
        if value is not None:
            answer.parts[name] = answer.parts.get(name, 0.0) + float(value.detach())
    if output.log_probs is not None:
        answer.log_probs[batch.rows] += torch.where(batch.is_live, output.log_probs[: len(batch.own)].double().cpu(), 0.0)
    tp, live = batch.groups.tp, batch.padded(batch.is_live, False)
    for name, leaf in leaves.items():
        gradient = leaf.grad.double().cpu()
        if name == "weight":
            answer.weight = torch.zeros_like(step.weight) if answer.weight is None else answer.weight
            answer.weight[first:last] += gradient[: last - first]
            assert not gradient[last - first :].any(), "padded columns have no gradient"
            continue
        is_part = name == "hidden" and gradient.shape[0] < len(live)
        own = slice(tp.rank() * len(gradient), (tp.rank() + 1) * len(gradient)) if is_part else slice(None)
        assert not gradient[~live[own]].any(), "masked tokens and padding have no gradient"
        places = torch.cat([batch.rows, torch.zeros(batch.tail, dtype=torch.int64)])[own]
        if name == "logits":
            assert not gradient[:, last - first :].any(), "padded columns have no gradient"
            answer.logits = torch.zeros(size, step.logits.shape[1], dtype=torch.float64) if answer.logits is None else answer.logits
            answer.logits[:, first:last].index_add_(0, places, gradient[:, : last - first])
        elif name == "hidden":
            answer.hidden = torch.zeros_like(step.hidden) if answer.hidden is None else answer.hidden
            answer.hidden.index_add_(0, places, gradient if is_part or tp.rank() == 0 else 0.0 * gradient)
        else:
            log_softmax = torch.log_softmax(step.logits, -1)
            labels = torch.tensor([step.samples[i].labels[t] for i, t in batch.own], dtype=torch.int64)
            by_logits = torch.nn.functional.one_hot(labels, step.logits.shape[1]) - log_softmax[batch.rows].exp()
            answer.logits = torch.zeros_like(step.logits) if answer.logits is None else answer.logits
            answer.logits.index_add_(0, batch.rows, gradient[: len(batch.own), None] * by_logits)


def needs_triton(case: Case):
    is_kernel = case.entry.backend == "triton"
    marks = [pytest.mark.kernel, pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")] if is_kernel else []
    return pytest.param(case, id=str(case), marks=marks)


def gradient_of(answers: list[Answer], name: str, case: Case) -> Tensor | None:
    """The sum over ranks, divided as DDP and finalize_model_grads do."""
    parts = [getattr(answer, name) for answer in answers if getattr(answer, name) is not None]
    if not parts:
        return None
    replicas, num_tokens = case.split.cp * case.split.dp, sum(answer.num_tokens for answer in answers) // case.split.tp
    return sum(parts) / (num_tokens or 1) if case.is_per_token else sum(parts) / (replicas if num_tokens else 1)


def assert_near(got: float | Tensor, want: float | Tensor, tolerance: float, what: str, scale: float | None = None) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-3) if scale is None else scale
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * scale, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("case", [needs_triton(case) for case in CASES])
def test_a_step_is_that_of_the_dense_oracle(case):
    """Values: FB-19, FB-47, FB-65, FB-117, FB-118, FB-119. Ranks: FB-22, FB-23, FB-25, FB-28, FB-44, FB-45, FB-46,
    FB-49, FB-51, FB-122. Shapes: FB-10, FB-55, FB-56, FB-59, FB-60, FB-64. Options and kernels: FB-39, FB-63, FB-80, FB-93."""
    step, split = step_of(case), case.split
    truth = dense_step(step.samples, step.logits, case.settings, case, step.teacher)
    groups, own = groups_of(split)
    others = [of_one for of_rank in own.values() for of_one in of_rank]

    def work(of_rank: ParallelGroups) -> Answer:
        return run_rank(case, step, of_rank, *own[id(of_rank)])

    if any(first == last for first, last, _ in (columns_of(case, step, of_rank) for of_rank in groups)):
        with pytest.raises(DataError, match="the columns of the last rank begin at .*, and none is real"):
            on_simulated_ranks(work, groups, others)
        return
    with small_kernels() if case.entry.backend == "triton" else contextlib.nullcontext():
        answers = on_simulated_ranks(work, groups, others)
    check(case, step, answers, truth)
    if "STEPS" in os.environ:
        compare_bits(Path(os.environ["STEPS"], f"{case.loss} {case.number}.pt"), answers)


def compare_bits(path: Path, answers: list[Answer]) -> None:
    found = []
    for answer in answers:
        tensors = (answer.logits, answer.hidden, answer.weight, answer.log_probs)
        for value in (*tensors, *answer.parts.values(), *answer.metrics.values()):
            found.append(torch.as_tensor(0.0 if value is None else value, dtype=torch.float64).flatten())
    values = torch.cat(found)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(values, path)
    assert torch.equal(torch.load(path), values), f"not the bits of {path}"


def check(case: Case, step: Step, answers: list[Answer], truth: DenseResult) -> None:
    tolerance = TOLERANCES[case.entry.dtype]
    is_empty = sum(answer.num_tokens for answer in answers) == 0
    assert is_empty == (not any(any(sample.mask) for sample in step.samples)), "a step without a token has no weights"
    on_last_stage = answers[-len(answers) // case.split.pp :]
    of_first_tp = on_last_stage[:: case.split.tp]
    for group in range(0, len(on_last_stage), case.split.tp):
        peers = on_last_stage[group : group + case.split.tp]
        assert all(peer.parts == peers[0].parts for peer in peers), "tp ranks hold the same bits"
    wanted = {"loss": truth.loss, "policy_loss": truth.policy_loss}
    wanted |= {"kl_loss": truth.kl_loss} if case.settings.kl_coefficient else {}
    wanted |= {"entropy": truth.entropy} if case.settings.entropy_coefficient else {}
    wanted |= {"distillation": truth.distillation} if case.teacher not in ("none", "sampled") else {}
    scale = max(1.0, float(truth.gradient.abs().max()) if truth.gradient.numel() else 0.0, *map(abs, wanted.values()))
    for name, want in wanted.items():
        assert_near(sum(answer.parts[name] for answer in of_first_tp), want, tolerance.loss, name, scale)
    assert all(set(answer.parts) == set(wanted) for answer in of_first_tp), "what is off is None"
    assert_near(sum(answer.log_probs for answer in of_first_tp), truth.log_probs, tolerance.log_probs, "log_probs", 1.0)
    gradients = {"logits": truth.gradient, "hidden": truth.gradient @ step.weight, "weight": truth.gradient.T @ step.hidden}
    names = ("hidden", "weight") if case.entry.head == "hidden" else ("logits",)
    for name in names:
        assert_near(gradient_of(on_last_stage, name, case), gradients[name], tolerance.gradient, f"gradient of {name}")
    if case.metrics == "none":
        return
    wanted = {f"policy/{name}": value for name, value in truth.metrics.items()}
    if case.metrics != "with_entropy":
        wanted.pop("policy/entropy", None)
    for answer in answers:
        assert answer.metrics == pytest.approx(wanted, rel=tolerance.metrics, abs=tolerance.metrics)
    pairs = {name: sum(answer.pairs[name] for answer in of_first_tp) for name in of_first_tp[0].pairs}
    for name in pairs.keys() & wanted.keys():
        assert float(pairs[name][0] / pairs[name][1]) == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name


def test_the_steps_are_worth_their_time():
    """Each loss meets each shape and kind of entry, and each bound has ratios on both sides of it."""
    for name in POLICY_LOSSES.names():
        of_loss = [case for case in CASES if case.loss == name]
        assert {case.shape for case in of_loss} == set(SHAPES), name
        assert {case.entry.head for case in of_loss} == {"logits", "hidden", "log_probs"}, name
        truths = [dense_step(step_of(case).samples, step_of(case).logits, case.settings) for case in of_loss]
        shares = [truth.metrics["clipped_ratio_fraction"] for truth in truths if truth.metrics]
        has_clip = get_policy_loss(name).clip_ratios is not None
        assert not has_clip or sum(0 < share < 1 for share in shares) >= len(shares) // 4, name
    with_sets = [case for case in CASES if case.kept != "all"]
    assert {(case.loss, case.kept) for case in with_sets} == set(itertools.product(POLICY_LOSSES.names(), KEPT))
    assert {(case.settings.correction, case.settings.level) for case in with_sets} == set(CORRECTIONS_AND_LEVELS)
