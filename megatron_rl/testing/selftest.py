"""Tests the losses on the ranks and devices that are there: steps of a tiny GPT, row after row, against one process in float64.

A loss, an aggregation, a KL estimator and a correction has its rows by its registration. No factor is undone by hand.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import count, cycle, islice
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import (
    Backend,
    CorrectionLevel,
    GradientDivisor,
    PolicyLossConfig,
)
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import all_gather_objects
from megatron_rl.loss_hub import get_loss_aggregation, loss_aggregation_names
from megatron_rl.megatron.context_groups import own_group_problems_of, packed_params_name_groups
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.megatron.installed import expert_replicas_drift
from megatron_rl.megatron.probe import megatron_version, probe_schedule, reduces_experts_apart
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.ops.backends import why_triton_is_missing
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.registries.corrections import correction_names, get_correction
from megatron_rl.registries.kl_estimators import kl_estimator_names
from megatron_rl.testing.comparison import Comparison, Truth, compare, compare_part, named_sizes
from megatron_rl.testing.layout_step import Layout, LayoutModel, StepSample, TinyGPT, row_length, tiny_like
from megatron_rl.testing.model_shapes import ModelShape, parameter_kind
from megatron_rl.testing.oracle import Scores
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
    loss_by_hand,
    model_logits,
    mtp_loss_by_hand,
    old_log_probs_off_the_edges,
    ragged_samples,
    sampler_off_the_bounds,
    scale_of_terms,
    scores_of,
    with_anchors,
)
from megatron_rl.validation.experts import drift_problem

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
WITHOUT_TRANSFORMER_ENGINE = "Transformer Engine's layers: the model is built of Megatron's own, in float32"


def _correction(kind: str, level: str = CorrectionLevel.TOKEN, **others: object) -> dict[str, object]:
    low, high = BOUNDS[level]
    of_kind = {"importance_correction": kind, "importance_correction_level": level}
    return {**of_kind, "importance_correction_low": low, "importance_correction_high": high, **others}


# The registered ones whose weights follow from a formula.
AGGREGATIONS = tuple(name for name in loss_aggregation_names() if get_loss_aggregation(name).formula is not None)
LOGITS, FUSED = "logits", "fused head"
ALL_TERMS, DUAL_CLIP, DIVIDED, ROLLOUTS = (
    "KL + entropy + temperature",
    "dual clip",
    "gradient / samples",
    "rollouts of several samples",
)
# A term -> its fields of PolicyLossConfig.
TERMS: Mapping[str, Mapping[str, object]] = {
    "": {},
    **{f"KL {estimator}": {"kl_coefficient": 0.1, "kl_estimator": estimator} for estimator in kl_estimator_names()},
    "entropy": {"entropy_coefficient": 0.1},
    "temperature": {"policy_temperature": 0.7},
    **{name: _correction(name, levels[0]) for name in correction_names() if (levels := get_correction(name).levels)},
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


def config_of(policy_loss: str, aggregation: str, term: str, **others: object) -> PolicyLossConfig:
    low, high = CLIPS[policy_loss] or (None, None)
    parameters = dict(PARAMETERS.get(policy_loss, {}))
    if term == DUAL_CLIP:
        assert high is not None, "the dual clip is one of losses with a clip"
        parameters["clip_ratio_c"] = 1.0 + 0.5 * high  # where A < 0, ratios lie on both sides of it
    return PolicyLossConfig(
        policy_loss=policy_loss,
        loss_aggregation=aggregation,
        loss_aggregation_divisor=DIVISOR if get_loss_aggregation(aggregation).takes_divisor else None,
        clip_ratio_low=low,
        clip_ratio_high=high,
        loss_parameters=parameters,
        **TERMS[term],  # type: ignore[arg-type]
        **others,  # type: ignore[arg-type]
    )


def term_pairs() -> Iterator[tuple[str, str, str]]:
    """(loss, aggregation, term) of each row. The aggregations take turns."""
    terms = [term for term in TERMS if term not in ("", ALL_TERMS)]
    alone = [(loss, term) for term in terms for loss in (OF_TOKENS, OF_SAMPLES)]
    for place, (loss, term) in enumerate([*alone, *((loss, ALL_TERMS) for loss in CLIPS)]):
        yield loss, AGGREGATIONS[(place + place // len(AGGREGATIONS)) % len(AGGREGATIONS)], term


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

    @property
    def of_truth(self) -> tuple[str, str, str]:
        """What decides the right gradient."""
        return self.policy_loss, self.aggregation, self.term

    def __str__(self) -> str:
        contract = ", per-token" if self.is_per_token else ""
        term = f", {self.term}" if self.term else ""
        own_groups = ", own cp groups" if self.has_own_groups else ""
        return f"{self.policy_loss} {self.aggregation}, {self.head}, {self.backend}{contract}{term}{own_groups}"

    @property
    def config(self) -> PolicyLossConfig:
        return config_of(
            self.policy_loss,
            self.aggregation,
            self.term,
            policy_loss_backend=self.backend,
            fused_lm_head_loss=self.head == FUSED,
            policy_metrics="none",
        )


Truths = dict[tuple[str, str], LossTruth]  # by loss and term


def truth_of_terms(
    samples: Sequence[StepSample],
    logits: Sequence[Tensor],  # of each sample, [response_length, V] float64 with graph
    leaves: Mapping[str, Tensor],  # what the gradient is taken by
    rows: Iterable[tuple[str, str, str]],  # (loss, aggregation, term)
    beside: Tensor | None = None,  # 0-d, a loss whose gradient is in each row's too
) -> Truths:
    """The step and its truth of each (loss, term)."""
    truths: Truths = {}
    grad = partial(torch.autograd.grad, inputs=[*leaves.values()], retain_graph=True, materialize_grads=True)
    others: Sequence[Tensor | float] = [0.0] * len(leaves) if beside is None else grad(beside)
    for policy_loss, aggregation, term in dict.fromkeys(rows):
        config = config_of(policy_loss, aggregation, term)
        scores = scores_of(samples, logits, config.policy_temperature)
        given = in_rollouts(samples) if term == ROLLOUTS else samples
        step = step_of_term(given, scores, policy_loss, config)
        loss = loss_by_hand(step, scores, config)
        divisor = len(step) if config.gradient_divisor == GradientDivisor.NUM_SAMPLES else 1  # of the gradient alone
        parts = zip(leaves, grad(loss), others, strict=True)
        gradient = {name: (part / divisor + other).cpu() for name, part, other in parts}
        known = truths.setdefault((policy_loss, term), LossTruth(step, {}))
        known.by_aggregation[aggregation] = Truth(float(loss.detach()), scale_of_terms(step, aggregation), gradient)
    return truths


def step_of_term(
    samples: Sequence[StepSample], scores: Sequence[Scores], policy_loss: str, config: PolicyLossConfig
) -> list[StepSample]:
    """The samples with old log-probabilities, and with the reference's and the sampler's where the term needs them."""
    new = [of_sample.log_probs.tolist() for of_sample in scores]
    bounds = [bound for name, bound in config.loss_parameters.items() if name == "clip_ratio_c"]
    step = with_anchors(samples, old_log_probs_off_the_edges(samples, new, policy_loss, bounds=bounds), policy_loss)
    numbers, level = random.Random(2), config.importance_correction_level
    if config.kl_coefficient:
        references = [[value - numbers.gauss(0.0, 0.3) for value in values] for values in new]
        step = [replace(sample, ref_log_probs=values) for sample, values in zip(step, references, strict=True)]
    if CorrectionSettings.of(config).has_factor:
        sampled = [sampler_off_the_bounds(sample, level, BOUNDS[level], numbers) for sample in step]
        step = [replace(sample, rollout_log_probs=values) for sample, values in zip(step, sampled, strict=True)]
    if config.off_policy_sequence_delta is not None:  # twice or half the bound in the mean
        gaps = [SEQUENCE_DELTA * (2.0, 0.5)[place % 2] for place in range(len(step))]
        diverged = [[one + gap + 0.04 * math.sin(t) for t, one in enumerate(row)] for row, gap in zip(new, gaps, strict=True)]
        step = [replace(sample, rollout_log_probs=values) for sample, values in zip(step, diverged, strict=True)]
    return step


@dataclass(frozen=True, slots=True)
class Row:
    """A step of a case; without one, the probe of the schedule by these gradients, "dense" or of "experts"."""

    name: str
    case: Case | None = None
    gradients: str = ""


PROBES = (Row("schedule probe", gradients="dense"), Row("schedule probe, experts", gradients="experts"))


def table(kl_estimator: str | None = None) -> list[Row]:
    """All rows, in the order of the report. kl_estimator: of this one alone, with each loss, aggregation and head."""
    if kl_estimator is not None:
        every = itertools.product((Backend.TORCH, Backend.TRITON), (LOGITS, FUSED), CLIPS, AGGREGATIONS)
        return rows_of([Case(loss, name, head, backend, term=f"KL {kl_estimator}") for backend, head, loss, name in every])
    return rows_of([*cases_of(Backend.TORCH), *own_group_cases(), *cases_of(Backend.TRITON), *per_token_cases()])


def table_of_shape(policy_loss: str | None = None) -> list[Row]:
    """The rows of a model of the field: what depends on its parameters, and no table of losses. policy_loss: of this one alone."""
    losses = ("grpo", "gspo") if policy_loss is None else (policy_loss,)
    steps = (("sample_mean", LOGITS), ("prompt_mean", FUSED), ("token_mean", LOGITS))
    cases = [Case(loss, *step, backend) for backend in (Backend.TORCH, Backend.TRITON) for step in steps for loss in losses]
    cases.append(Case(losses[0], "token_mean", FUSED, has_own_groups=True))
    return rows_of([*cases, *(Case(loss, "token_mean", head, is_per_token=True) for head in (LOGITS, FUSED) for loss in losses)])


def rows_of(cases: Iterable[Case]) -> list[Row]:
    return [*PROBES, *(Row(str(case), case) for case in cases)]


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


def chosen(
    rows: Sequence[Row], policy_loss: str | None = None, aggregation: str | None = None, texts: Sequence[str] = ()
) -> list[Row]:
    """The rows of a loss, of an aggregation, and with one of the texts in their names, where these are given; and those of a probe.
    Raises ConfigError where a text chooses no row."""
    if texts and not any(text in row.name for row in rows for text in texts):
        shown = " ".join(f"--row {text!r}" for text in texts)
        raise ConfigError(f"{shown}: no row has that in its name; without --row the rows are listed as they run")

    def is_chosen(case: Case) -> bool:
        is_of_text = not texts or any(text in str(case) for text in texts)
        return is_of_text and policy_loss in (None, case.policy_loss) and aggregation in (None, case.aggregation)

    return [row for row in rows if row.case is None or is_chosen(row.case)]


# What a row measures: "" compares the whole gradient, the others a part of the parameters. A probe gives a ratio.
Measured = float | dict[str, Comparison]


class WholeSteps:
    """What the rows run on: the installed Megatron's schedule, DDP and optimiser. data and num_microbatches of the layout that is
    asked for follow from the rest. It replaces parallel_state, and initialises torch.distributed from the environment where needed.
    Raises ConfigError for a layout that does not fit these ranks."""

    def __init__(self, asked: Layout, world_size: int, *, has_experts: bool = False, shape: ModelShape | None = None):
        has_experts = has_experts or shape is not None
        self.layout = complete_layout(asked, world_size, has_experts=has_experts)
        check_megatron()
        self.megatron_version = megatron_version()
        self.shape, self.model = shape, ""
        self.tiny = model_for(self.layout, has_experts=has_experts) if shape is None else self._model_like(shape)
        self.samples = ragged_samples(num_samples=max(len(SHAPES), self.layout.data * self.layout.num_microbatches))
        self.device = _set_layout(Layout())  # where the truths are computed
        refuse_tf32(self.device)
        if has_experts and expert_replicas_drift():
            if problem := drift_problem(self.layout.model_parallel | self.tiny.expert_options):
                raise ConfigError(problem)
        without_groups = [] if packed_params_name_groups() else ["this Megatron-Core's PackedSeqParams has no cp_group"]
        without_groups += own_group_problems_of(self.tiny.expert_options)
        has_groups = self.layout.data * self.layout.context > 1
        self.has_own_groups = has_groups and not without_groups
        self.why_no_triton = without_triton(self.device)
        self.left_out = (
            WITHOUT_TRANSFORMER_ENGINE,
            *(f"own cp groups: {problem}" for problem in without_groups if has_groups),
            *([f"Triton: {self.why_no_triton}"] if self.why_no_triton else []),
        )
        self._models: dict[tuple[bool, bool], LayoutModel] = {}

    def _model_like(self, shape: ModelShape) -> TinyGPT:
        size = self.layout.expert_tensor or 1
        if size > 1 and shape.options.get("add_bias_linear"):
            raise ConfigError(
                f"--model-like {shape.name} with --expert-tensor-parallel-size {size}: its experts have biases, which each rank "
                "would add; give --expert-tensor-parallel-size 1"
            )
        tiny = tiny_like(shape, self.layout)
        self.model = f"{tiny.num_layers} layers like {shape.name} ({shape.source}): {shape.contains}"
        return tiny

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that run here. Communication: the truths, from rank 0. Then the ranks have the layout that was asked for."""
        cases = [row.case for row in rows if row.case is not None and self._runs(row.case)]
        box = [truths_of(self.samples, self.tiny, cases) if dist.get_rank() == 0 else {}]
        dist.broadcast_object_list(box, src=0, group=dist.group.WORLD)
        (self.truths,) = box
        _set_layout(self.layout)
        probes = ("dense", "experts") if reduces_experts_apart() else ("dense",)
        return [row for row in rows if row.gradients in probes or row.case in cases]

    def _runs(self, case: Case) -> bool:
        return not (case.has_own_groups and not self.has_own_groups) and not (case.backend == Backend.TRITON and self.why_no_triton)

    def measure(self, row: Row) -> Measured:
        if row.case is None:
            probed = probe_schedule()
            ratio = probed.ratio if row.gradients == "dense" else probed.expert_ratio
            assert ratio is not None, "it has a ratio where experts are reduced apart"
            return ratio
        case, model = row.case, self._model(row.case.is_per_token, row.case.has_own_groups)
        of_loss = self.truths[case.policy_loss, case.term]
        found, truth = model.step(case.config, of_loss.samples), of_loss.by_aggregation[case.aggregation]
        kinds = [] if self.shape is None else list(dict.fromkeys(map(parameter_kind, truth.gradient)))
        parts = {kind: compare_part(found, truth, model.groups, partial(_is_of_kind, kind)) for kind in kinds}
        return {"": compare(found, truth, model.groups), **parts}

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
            self._models[key].announces_factor = False  # a row says how large a wrong factor is
        return self._models[key]


def without_triton(device: torch.device) -> str | None:
    """Why its rows do not run on this device; None: they do."""
    if device.type != "cuda":
        return "its kernels need CUDA, and the ranks are on the CPU"
    return why_triton_is_missing() if torch.version.hip is None else "its kernels need CUDA, and this torch is built for ROCm"


def complete_layout(asked: Layout, world_size: int, *, has_experts: bool = False) -> Layout:
    """Adds the data-parallel size that is left, and a number of micro-batches that no other size has: so a factor has one name."""
    pipeline = {"--pipeline-model-parallel-size": asked.pipeline}
    dense = {"--tensor-model-parallel-size": asked.tensor, "--context-parallel-size": asked.context, **pipeline}
    if has_experts:
        asked = replace(asked, expert_tensor=asked.tensor if asked.expert_tensor is None else asked.expert_tensor)
    of_experts = {
        "--expert-model-parallel-size": asked.expert,
        "--expert-tensor-parallel-size": asked.expert_tensor or 1,
        **pipeline,
    }
    problems = [problem for sizes in (dense, of_experts) for problem in replica_problems(sizes, world_size)]
    if asked.sequence_parallel and asked.tensor == 1:
        problems.append("--sequence-parallel does nothing with --tensor-model-parallel-size 1: remove it, or set a size above 1")
    if problems:
        raise ConfigError(problems)
    data = world_size // prod(dense.values())
    taken = {asked.tensor, asked.context, asked.pipeline, asked.expert, data, data * asked.context, SAMPLES_PER_PROMPT}
    return replace(asked, data=data, num_microbatches=next(number for number in count(2) if number not in taken))


def replica_problems(sizes: Mapping[str, int], world_size: int) -> Iterator[str]:
    product = prod(sizes.values())
    if product < 1 or world_size % product:
        shown = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        yield (
            f"{shown} must divide {world_size} rank{'s' * (world_size > 1)}: start a multiple of {product}, as in torchrun "
            f"--nproc-per-node {product} -m megatron_rl selftest ..."
        )


def refuse_tf32(device: torch.device) -> None:
    """Turns TF32 off: its 10-bit mantissa is as large as the errors that the selftest finds. ConfigError where it stays on."""
    if device.type != "cuda":
        return
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # some containers set it
    torch.set_float32_matmul_precision("highest")
    if torch.backends.cuda.matmul.allow_tf32:
        raise ConfigError("float32 products run in TF32 here: start with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE unset")


def _is_of_kind(kind: str, name: str) -> bool:
    return parameter_kind(name) == kind


def truths_of(samples: list[StepSample], tiny: TinyGPT, cases: Sequence[Case]) -> Truths:
    model = double_model(tiny, samples)
    logits, rows = model_logits(model, samples, tiny), (case.of_truth for case in cases)
    return truth_of_terms(samples, logits, global_parameters(model), rows, mtp_loss_by_hand(model, samples, tiny))


def check_megatron() -> None:
    """Raises ConfigError where Megatron-Core is not there or cannot be imported: another package of its name may raise anything."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ConfigError(
            "selftest needs Megatron-Core, which is not installed: pip install '/path/to/megatron_rl[megatron]', or test a loss by"
            " the pytest fixture assert_layout_invariant, as docs/testing.md shows"
        )
    try:
        import_megatron()
    except Exception as error:
        raise ConfigError(
            f"the installed Megatron-Core cannot be imported ({type(error).__name__}: {error}): megatron-rl doctor says why"
        ) from error


def model_for(layout: Layout, *, has_experts: bool = False) -> TinyGPT:
    """Heads for each tensor rank, a layer for each stage, padded columns on the last shard, two experts a rank or more."""
    experts = {
        "num_moe_experts": max(4, 2 * layout.expert),  # with two a token has no choice, and losses that balance are constant
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 8 * (layout.expert_tensor or 1),
        "moe_layer_freq": (0, 1) * layout.pipeline,  # of the two layers of a stage the second has experts
    }
    heads = layout.tensor * -(-4 // layout.tensor)
    return TinyGPT(
        num_layers=2 * layout.pipeline if has_experts else layout.pipeline,
        hidden_size=8 * heads,
        num_attention_heads=heads,
        vocab_size=layout.tensor * -(-64 // layout.tensor),
        use_transformer_engine=False,
        experts=tuple(experts.items()) if has_experts else (),
    )


def _set_layout(layout: Layout) -> torch.device:
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        groups = getattr(parallel_state, "_global_process_group_list", None) or []
        parallel_state.destroy_model_parallel()
        for group in groups:  # else each lives on, with its threads or its buffers on the device
            with contextlib.suppress(ValueError):  # Megatron has destroyed some
                if group is not None:  # the whole world, which stays
                    dist.destroy_process_group(group)
    return initialize_ranks(**layout.model_parallel)


@dataclass(frozen=True, slots=True)
class RowResult:
    """Equal on all ranks. ratio: the gradient along the expected one, 1 when exact; None where the row ended with an error. parts:
    the error of the gradient of each part of the parameters that is compared by itself."""

    name: str
    passed: bool
    ratio: float | None = None
    gradient_error: float | None = None
    loss_error: float | None = None
    norm_error: float | None = None
    cause: str = ""
    parts: dict[str, float] = field(default_factory=dict)


def run_selftest(bench: WholeSteps, rows: Sequence[Row], on_row: Callable[[str], None] = lambda name: None) -> Iterator[RowResult]:
    """Each rank calls it and gets the same results, one after another. rows: what bench.prepare returned. on_row gets the name of
    each before it runs."""
    sizes = named_sizes(bench.layout, bench.samples)
    for row in rows:
        on_row(row.name)
        yield guarded(row, bench, sizes)


def result_of(row: Row, measured: Measured, sizes: Mapping[str, int]) -> RowResult:
    """The result of the whole gradient. Where some parts of the parameters are wrong and others are right, their names, and the
    result of the first."""
    if isinstance(measured, float):
        return RowResult(row.name, True, measured)
    wrong = [part for part, comparison in measured.items() if not comparison.is_within(BOUND)]
    leaves = [part for part in wrong if part]
    if "" in wrong and len(wrong) == len(measured):  # all of them, as by a wrong factor
        leaves = []
    found = measured[leaves[0] if leaves else ""]
    cause = found.cause(BOUND, sizes)
    return RowResult(
        row.name,
        not wrong,
        found.ratio,
        found.gradient_error,
        found.loss_error,
        found.norm_error,
        f"leaves of {', '.join(leaves)}: {cause}" if leaves else cause,
        {part: comparison.gradient_error for part, comparison in measured.items() if part},
    )


def guarded(row: Row, bench: WholeSteps, sizes: Mapping[str, int]) -> RowResult:
    """The result, or a failed row with what a rank raised. A rank that hangs, or waits for one that hangs, says where and ends.

    Communication: the ranks' errors, over all of them.
    """
    faulthandler.dump_traceback_later(SECONDS_FOR_A_ROW, exit=True, file=sys.__stderr__ or sys.stderr)
    result, error = None, ""
    try:
        result = result_of(row, bench.measure(row), sizes)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        # Others may wait for this rank in a collective: then nobody gathers what it says.
        print(f"rank {dist.get_rank()}: {row.name}: {error}", file=sys.__stderr__, flush=True)
    errors = all_gather_objects(error)
    faulthandler.cancel_dump_traceback_later()
    failed = {rank: text for rank, text in enumerate(errors) if text}
    if result is not None and not failed:
        return result
    ranks = "all ranks" if len(failed) == len(errors) else f"ranks {', '.join(map(str, failed))}"
    return RowResult(row.name, False, cause=f"{ranks}: {next(iter(failed.values()))}")
