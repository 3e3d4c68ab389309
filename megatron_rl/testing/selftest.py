"""Tests the losses on the ranks and devices that are there: steps of a tiny GPT, row after row, against one process in float64.

A loss, an aggregation, a KL estimator and a correction has its rows by its registration. No factor is undone by hand.
"""

from __future__ import annotations

import faulthandler
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import NO_CORRECTION, Backend, CorrectionLevel, GradientDivisor, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import all_gather_objects
from megatron_rl.losses.corrections import CORRECTIONS
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.megatron.context_groups import own_group_problems
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.ops.backends import why_triton_is_missing
from megatron_rl.testing import oracle
from megatron_rl.testing.comparison import Truth, compare, compare_part, named_sizes
from megatron_rl.testing.layout_step import Layout, LayoutModel, StepSample, TinyGPT, row_length
from megatron_rl.testing.model_shapes import ModelShape, tiny_like
from megatron_rl.testing.reference import (
    CLIPS,
    DIVISOR,
    PARAMETERS,
    SAMPLES_PER_PROMPT,
    SHAPES,
    LossTruth,
    double_model,
    global_parameters,
    in_rollouts,
    log_ratios_off,
    loss_by_hand,
    model_logits,
    mtp_loss_by_hand,
    ragged_samples,
    scale_of_terms,
    scores_of,
    with_anchors,
)
from megatron_rl.weights import AGGREGATIONS as REGISTERED
from megatron_rl.weights import get_loss_aggregation

# The bounds of the corrections' ratios.
BOUNDS: Mapping[str, tuple[float, float]] = {
    CorrectionLevel.TOKEN: (0.75, 1.35),
    CorrectionLevel.SEQUENCE_MEAN: (0.9, 1.1),
    CorrectionLevel.SEQUENCE_SUM: (0.6, 1.7),
}
# Nats per token, amid the samples' divergences.
SEQUENCE_DELTA = 0.2
# On any layout a float32 gradient of the tiny models is 3e-7 to 7e-7 from the float64 truth; the smallest wrong factor, one token
# too many of a hundred, moves it by 9e-3.
BOUND = 1e-5
# A row takes 0.1 s, and the first on CUDA compiles its kernels. A rank that is still busy then hangs: it prints its stack and ends.
SECONDS_FOR_A_ROW = 180.0


def _correction(kind: str, level: str = CorrectionLevel.TOKEN, **others: object) -> dict[str, object]:
    low, high = BOUNDS[level]
    correction = {"importance_correction": kind, "importance_correction_level": level}
    return {**correction, "importance_correction_low": low, "importance_correction_high": high, **others}


AGGREGATIONS = tuple(name for name in REGISTERED.names() if name in oracle.AGGREGATIONS)
PROBE = "schedule probe"
LOGITS, FUSED = "logits", "fused head"
ALL_TERMS = "KL + entropy + temperature"
DUAL_CLIP, DIVIDED, ROLLOUTS = "dual clip", "gradient / samples", "rollouts of several samples"
# A term -> its fields of PolicyLossConfig.
TERMS: Mapping[str, Mapping[str, object]] = {
    "": {},
    **{f"KL {estimator}": {"kl_coefficient": 0.1, "kl_estimator": estimator} for estimator in KL_ESTIMATORS.names()},
    "entropy": {"entropy_coefficient": 0.1},
    "temperature": {"policy_temperature": 0.7},
    **{name: _correction(name, next(iter(CORRECTIONS[name].bounds))) for name in CORRECTIONS.names()},
    "tis of sequences": _correction("tis", CorrectionLevel.SEQUENCE_MEAN),
    "tis of sequence sums": _correction("tis", CorrectionLevel.SEQUENCE_SUM),
    "OPSM": {"off_policy_sequence_delta": SEQUENCE_DELTA},
    DUAL_CLIP: {},  # its bound follows from the loss's clip
    DIVIDED: {"gradient_divisor": str(GradientDivisor.NUM_SAMPLES)},
    ROLLOUTS: {},  # of the samples
    ALL_TERMS: {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "policy_temperature": 0.7},
}
# A ratio of a token and one of a sample meet each term alone. Every loss meets three at once.
OF_TOKENS, OF_SAMPLES = "grpo", "gspo"


@dataclass(frozen=True, slots=True)
class Case:
    """A step of one loss. is_per_token: under Megatron's calculate_per_token_loss, for token_mean alone. term: of TERMS.
    has_own_groups: each micro-batch is cut over context-parallel groups of another size."""

    policy_loss: str
    aggregation: str
    head: str = LOGITS
    backend: str = Backend.TORCH
    is_per_token: bool = False
    term: str = ""
    has_own_groups: bool = False

    def __str__(self) -> str:
        contract = ", per-token" if self.is_per_token else ""
        term = f", {self.term}" if self.term else ""
        own_groups = ", own cp groups" if self.has_own_groups else ""
        return f"{self.policy_loss} {self.aggregation}, {self.head}, {self.backend}{contract}{term}{own_groups}"

    @property
    def config(self) -> PolicyLossConfig:
        low, high = CLIPS[self.policy_loss] or (None, None)
        parameters = dict(PARAMETERS.get(self.policy_loss, {}))
        if self.term == DUAL_CLIP and high is not None:
            parameters["clip_ratio_c"] = 1.0 + 0.5 * high  # where A < 0, ratios lie on both sides of it
        return PolicyLossConfig(
            policy_loss=self.policy_loss,
            loss_aggregation=self.aggregation,
            loss_aggregation_divisor=DIVISOR if get_loss_aggregation(self.aggregation).takes_divisor else None,
            clip_ratio_low=low,
            clip_ratio_high=high,
            loss_parameters=parameters,
            policy_loss_backend=self.backend,
            fused_lm_head_loss=self.head == FUSED,
            policy_metrics="none",
            **TERMS[self.term],  # type: ignore[arg-type]
        )


def term_pairs() -> Iterator[tuple[str, str, str]]:
    """(loss, aggregation, term) of each row. The aggregations take turns."""
    terms = [term for term in TERMS if term not in ("", ALL_TERMS)]
    alone = [(loss, term) for term in terms for loss in (OF_TOKENS, OF_SAMPLES)]
    for place, (loss, term) in enumerate([*alone, *((loss, ALL_TERMS) for loss in CLIPS)]):
        yield loss, AGGREGATIONS[(place + place // len(AGGREGATIONS)) % len(AGGREGATIONS)], term


def truth_of_terms(
    samples: Sequence[StepSample],
    logits: Sequence[Tensor],  # of each sample, [response_length, V] float64 with graph
    leaves: Mapping[str, Tensor],  # what the gradient is taken by
    rows: Iterable[tuple[str, str, str]],  # (loss, aggregation, term)
    beside: Tensor | None = None,  # 0-d, a loss whose gradient is in each row's too
) -> dict[tuple[str, str], LossTruth]:
    """The step and its truth of each (loss, term)."""
    truths: dict[tuple[str, str], LossTruth] = {}
    grad = partial(torch.autograd.grad, inputs=[*leaves.values()], retain_graph=True, materialize_grads=True)
    others: Sequence[Tensor | float] = [0.0] * len(leaves) if beside is None else grad(beside)
    for policy_loss, aggregation, term in dict.fromkeys(rows):
        config = Case(policy_loss, aggregation, term=term).config
        scores = scores_of(samples, logits, config.policy_temperature)
        step = step_of_term(in_rollouts(samples) if term == ROLLOUTS else samples, scores, config)
        loss = loss_by_hand(step, scores, config)
        divisor = len(step) if config.gradient_divisor == GradientDivisor.NUM_SAMPLES else 1  # of the gradient alone
        parts = zip(leaves, grad(loss), others, strict=True)
        gradient = {name: (part / divisor + other).cpu() for name, part, other in parts}
        known = truths.setdefault((policy_loss, term), LossTruth(step, {}))
        known.by_aggregation[aggregation] = Truth(float(loss.detach()), scale_of_terms(step, aggregation), gradient)
    return truths


def step_of_term(samples: Sequence[StepSample], scores: Sequence[oracle.Scores], config: PolicyLossConfig) -> list[StepSample]:
    """The samples with old log-probabilities, and with the reference's and the sampler's where the term needs them."""
    new = [one.log_probs.tolist() for one in scores]
    bounds = [bound for name, bound in config.loss_parameters.items() if name == "clip_ratio_c"]
    step = with_anchors(samples, new, config.policy_loss, bounds)
    numbers, level, given = random.Random(2), config.importance_correction_level, []
    for place, sample in enumerate(step):
        values: dict[str, Any] = {}
        if config.kl_coefficient:
            values["ref_log_probs"] = [one - numbers.gauss(0.0, 0.3) for one in new[place]]
        if config.importance_correction != NO_CORRECTION:
            gaps = log_ratios_off(sample, [math.log(bound) for bound in BOUNDS[level]], numbers, level)
            values["rollout_log_probs"] = [one - gap for one, gap in zip(sample.old_log_probs or [], gaps, strict=True)]
        if config.off_policy_sequence_delta is not None:  # twice or half the bound in the mean
            gap = SEQUENCE_DELTA * (2.0, 0.5)[place % 2]
            values["rollout_log_probs"] = [one + gap + 0.04 * math.sin(t) for t, one in enumerate(new[place])]
        given.append(replace(sample, **values))
    return given


def table() -> list[Case]:
    """All cases, in the order of the report."""
    return [*cases_of(Backend.TORCH), *own_group_cases(), *cases_of(Backend.TRITON), *per_token_cases()]


def table_of_shape() -> list[Case]:
    """The cases of a model of the field: what depends on its parameters, and no table of losses and terms."""
    return [case for case in table() if not case.term and case.policy_loss in (OF_TOKENS, OF_SAMPLES)]


def cases_of(backend: Backend) -> list[Case]:
    heads = (LOGITS, FUSED)
    plain = [
        Case(policy_loss, aggregation, head, backend) for head in heads for policy_loss in CLIPS for aggregation in AGGREGATIONS
    ]
    return plain + [Case(loss, aggregation, head, backend, term=term) for head in heads for loss, aggregation, term in term_pairs()]


def own_group_cases() -> list[Case]:
    """A loss of tokens and one of whole samples, whose sums go over the micro-batch's group."""
    pairs = (("grpo", "token_mean"), ("gspo", "sample_mean"))
    return [Case(*pair, head, has_own_groups=True) for head in (LOGITS, FUSED) for pair in pairs]


def per_token_cases() -> list[Case]:
    """Of token_mean, which is what the contract divides by."""
    return [Case(policy_loss, "token_mean", head, is_per_token=True) for head in (LOGITS, FUSED) for policy_loss in CLIPS]


def chosen(cases: Sequence[Case], policy_loss: str | None = None, texts: Sequence[str] = ()) -> list[Case]:
    """The cases of a loss, and with one of the texts in their names, where these are given. Raises ConfigError for none."""
    loss_cases = [case for case in cases if policy_loss in (None, case.policy_loss)]
    found = [case for case in loss_cases if not texts or any(text in str(case) for text in texts)]
    if not found:
        text = " or ".join(map(repr, texts)) or "any text"
        raise ConfigError(f"no row is of {policy_loss or 'any loss'}, with {text} in its name: without flags all rows run")
    return found


class WholeSteps:
    """What the rows run on: the installed Megatron's schedule, DDP and optimiser. data and num_microbatches of the layout that is
    asked for follow from the rest; one with expert_tensor has experts. It initialises parallel_state, and torch.distributed from
    the environment where needed. Raises ConfigError for a layout that does not fit these ranks.

    Communication: the truths, from rank 0."""

    def __init__(self, asked: Layout, world_size: int, cases: Sequence[Case], shape: ModelShape | None = None):
        self.layout = complete_layout(asked, world_size)
        self.tiny = model_for(self.layout) if shape is None else tiny_like(shape, self.layout)
        self.model = "" if shape is None else f"{self.tiny.num_layers} layers like {shape.source}"
        self.samples = ragged_samples(num_samples=max(len(SHAPES), self.layout.data * self.layout.num_microbatches))
        os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # some containers set it
        torch.set_float32_matmul_precision("highest")  # TF32's 10-bit mantissa is as large as the errors that the selftest finds
        self.device = initialize_ranks(**Layout().model_parallel)  # where the truths are computed
        why_no_own_groups = [*own_group_problems(self.tiny.expert_options)]
        if self.layout.data * self.layout.context == 1:
            why_no_own_groups.append("one rank has the whole of each micro-batch")
        on_cpu = "its kernels need CUDA, and the ranks are on the CPU"
        why_no_triton = why_triton_is_missing() if self.device.type == "cuda" else on_cpu
        self.left_out = [f"own cp groups: {problem}" for problem in why_no_own_groups]
        self.left_out += [f"Triton: {why_no_triton}"] if why_no_triton else []
        if why_no_own_groups:
            cases = [case for case in cases if not case.has_own_groups]
        if why_no_triton:
            cases = [case for case in cases if case.backend != Backend.TRITON]
        self.cases = cases
        box = [truths_of(self.samples, self.tiny, cases) if dist.get_rank() == 0 else {}]
        dist.broadcast_object_list(box, src=0, group=dist.group.WORLD)
        (self.truths,) = box
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        initialize_ranks(**self.layout.model_parallel)
        self.sizes = named_sizes(self.layout, self.samples)
        self._models: dict[tuple[bool, bool], LayoutModel] = {}

    def measure(self, case: Case) -> RowResult:
        """Where some parameters are wrong and others are right, with their names, and the figures of the first."""
        model, truths = self._model(case.is_per_token, case.has_own_groups), self.truths[case.policy_loss, case.term]
        step, truth = model.step(case.config, truths.samples), truths.by_aggregation[case.aggregation]
        found, names = compare(step, truth, model.groups), ""
        if not found.gradient_error < BOUND:
            trained = [name for name, gradient in truth.gradient.items() if gradient.any()]
            comparisons = {name: compare_part(step, truth, model.groups, [name]) for name in trained}
            wrong = [name for name, one in comparisons.items() if not one.gradient_error < BOUND]
            if 0 < len(wrong) < len(trained):
                found, names = comparisons[wrong[0]], f"{', '.join(wrong)}: "
        cause = found.cause(BOUND, self.sizes)
        figures = (found.ratio, found.gradient_error, found.loss_error, found.norm_error)
        return RowResult(str(case), not cause, *figures, cause and names + cause)

    def _model(self, is_per_token: bool, has_own_groups: bool) -> LayoutModel:
        """Under one contract, built for its first row."""
        key = is_per_token, has_own_groups
        if key not in self._models:
            layout = replace(self.layout, calculate_per_token_loss=is_per_token)
            if has_own_groups:  # micro-batches over all ranks of dp x cp, then over fewer, down to one
                ranks = layout.data * layout.context
                sizes = [size for size in range(ranks, 0, -1) if ranks % size == 0]
                layout = replace(layout, context_sizes=tuple(islice(cycle(sizes), layout.num_microbatches)))
            self._models[key] = LayoutModel(layout, row_length(self.samples, layout), self.tiny)
            self._models[key].declares_factor = False  # a row says how large a wrong factor is
        return self._models[key]


def complete_layout(asked: Layout, world_size: int) -> Layout:
    """Adds the data-parallel size that is left, and a number of micro-batches that no other size has: so a factor has one name."""
    ranks_of_a_model = asked.tensor * asked.context * asked.pipeline
    data, rest = divmod(world_size, ranks_of_a_model)
    if rest or not data:
        raise ConfigError(f"the sizes need a multiple of {ranks_of_a_model} ranks, and torchrun started {world_size}")
    taken = {asked.tensor, asked.context, asked.pipeline, asked.expert, data, data * asked.context, SAMPLES_PER_PROMPT}
    return replace(asked, data=data, num_microbatches=next(number for number in count(2) if number not in taken))


def truths_of(samples: list[StepSample], tiny: TinyGPT, cases: Sequence[Case]) -> dict[tuple[str, str], LossTruth]:
    model = double_model(tiny, samples)
    rows = [(case.policy_loss, case.aggregation, case.term) for case in cases]
    mtp_loss = mtp_loss_by_hand(model, samples, tiny)
    return truth_of_terms(samples, model_logits(model, samples, tiny), global_parameters(model), rows, mtp_loss)


def model_for(layout: Layout) -> TinyGPT:
    """Heads for each tensor rank, a layer for each stage, padded columns on the last shard, two experts a rank or more."""
    experts = {
        "num_moe_experts": max(4, 2 * layout.expert),  # with two a token has no choice, and losses that balance are constant
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 8 * (layout.expert_tensor or 1),
    }
    heads = layout.tensor * -(-4 // layout.tensor)
    return TinyGPT(
        num_layers=layout.pipeline,
        hidden_size=8 * heads,
        num_attention_heads=heads,
        vocab_size=layout.tensor * -(-64 // layout.tensor),
        use_transformer_engine=False,
        experts=() if layout.expert_tensor is None else tuple(experts.items()),
    )


@dataclass(frozen=True, slots=True)
class RowResult:
    """Equal on all ranks. ratio: the gradient along the expected one, 1 when exact; None where the row ended with an error."""

    name: str
    passed: bool
    ratio: float | None = None
    gradient_error: float | None = None
    loss_error: float | None = None
    norm_error: float | None = None
    cause: str = ""


def run_selftest(bench: WholeSteps) -> Iterator[RowResult]:
    """Each rank calls it and gets the same results, one after another: of the schedule, then of the cases."""
    yield guarded(PROBE, lambda: RowResult(PROBE, True, probe_schedule().ratio))  # raises for a wrong ratio of experts too
    for case in bench.cases:
        yield guarded(str(case), partial(bench.measure, case))


def guarded(name: str, measure: Callable[[], RowResult]) -> RowResult:
    """The result, or a failed row with what a rank raised. A rank that hangs, or waits for one that hangs, says where and ends.

    Communication: the ranks' errors, over all of them.
    """
    faulthandler.dump_traceback_later(SECONDS_FOR_A_ROW, exit=True, file=sys.__stderr__ or sys.stderr)
    result, error = None, ""
    try:
        result = measure()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        # Others may wait for this rank in a collective: then nobody gathers what it says.
        print(f"rank {dist.get_rank()}: {name}: {error}", file=sys.__stderr__, flush=True)
    errors = all_gather_objects(error)
    faulthandler.cancel_dump_traceback_later()
    failed = {rank: text for rank, text in enumerate(errors) if text}
    if result is not None and not failed:
        return result
    ranks = "all ranks" if len(failed) == len(errors) else f"ranks {', '.join(map(str, failed))}"
    return RowResult(name, False, cause=f"{ranks}: {next(iter(failed.values()))}")
