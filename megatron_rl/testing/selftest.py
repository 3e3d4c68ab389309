"""The promise on the ranks, devices and backends that are there: a tiny step for each loss, aggregation, head and backend.

Each row is a step through the installed Megatron's schedule, DDP and optimiser, held against a float64 reference that one process
computed before the layout was set up. It must never undo a factor by hand, and never pass a row that did not run.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import prod

import torch
import torch.distributed as dist

from megatron_rl.config import Backend, LossAggregation, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.megatron.probe import megatron_version, probe_schedule
from megatron_rl.megatron.trainer import initialize_ranks
from megatron_rl.ops.backends import why_triton_is_missing
from megatron_rl.testing.comparison import compare
from megatron_rl.testing.layout_step import Layout, LayoutModel, TinyGPT, row_length
from megatron_rl.testing.reference import CLIPS, DIVISOR, SAMPLES_PER_PROMPT, SHAPES, LossTruth, ragged_samples, truth_of_losses

# A float32 gradient of this model lies 3e-7 to 7e-7 from the float64 truth on any layout; the smallest wrong factor there is, one
# token too many of a hundred, moves it by 9e-3.
TOLERANCE = 1e-5
# A row takes 0.1 s, and the first on CUDA compiles its kernels. A rank that is busy after this hangs: it says where, and ends.
SECONDS_FOR_A_ROW = 180.0
# Where this rank has failed, others may wait for it in a collective: it then ends, and torchrun ends them.
SECONDS_FOR_THE_OTHERS = 20.0
LOGITS, FUSED = "logits", "fused head"
WITHOUT_TRANSFORMER_ENGINE = "Transformer Engine's layers: the model is built of Megatron's own, in float32"


@dataclass(frozen=True, slots=True)
class Case:
    """One row. is_per_token: under Megatron's calculate_per_token_loss, which is for token_mean alone."""

    policy_loss: str
    aggregation: str
    head: str = LOGITS
    backend: str = Backend.TORCH
    is_per_token: bool = False

    def __str__(self) -> str:
        contract = ", per-token" if self.is_per_token else ""
        return f"{self.policy_loss} {self.aggregation}, {self.head}, {self.backend}{contract}"

    @property
    def config(self) -> PolicyLossConfig:
        low, high = CLIPS[self.policy_loss]
        return PolicyLossConfig(
            policy_loss=self.policy_loss,
            loss_aggregation=self.aggregation,
            loss_aggregation_divisor=DIVISOR if self.aggregation == LossAggregation.CONSTANT else None,
            clip_ratio_low=low,
            clip_ratio_high=high,
            policy_loss_backend=self.backend,
            fused_lm_head_loss=self.head == FUSED,
            policy_metrics="none",
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Equal on all ranks. ratio: the gradient along the expected one, 1 when exact; None where the row ended with an error."""

    name: str
    passed: bool
    ratio: float | None = None
    gradient_error: float | None = None
    loss_error: float | None = None
    norm_error: float | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the rows run on; equal on all ranks."""

    layout: Layout
    device: str
    process_group_backend: str
    megatron_version: str
    sizes: dict[str, int]
    left_out: tuple[str, ...]


def run_selftest(asked: Layout, world_size: int, on_start: Callable[[Setting], None] = lambda setting: None) -> Iterator[Row]:
    """Every rank calls it and gets the same rows, as they come. data and num_microbatches of `asked` follow from the rest.

    Takes over parallel_state; initialises torch.distributed from the environment where it is not. Raises ConfigError for a layout
    that these ranks do not give.
    """
    layout = complete_layout(asked, world_size)
    tiny = model_for(layout)
    samples = ragged_samples(num_samples=max(len(SHAPES), layout.data * layout.num_microbatches))
    device = _set_layout(Layout())
    _refuse_tf32(device)
    everyone = dist.new_group(backend="gloo") if world_size > 1 else None
    truth = _from_rank_0(lambda: truth_of_losses(samples, tiny), everyone)
    _set_layout(layout)
    sizes = _named_sizes(layout, samples)
    why_not = why_not_triton(device)
    left_out = (*([f"Triton: {why_not}"] if why_not else []), WITHOUT_TRANSFORMER_ENGINE)
    on_start(Setting(layout, device.type, dist.get_backend(), megatron_version(), sizes, left_out))
    yield _guarded("schedule probe", everyone, lambda name: Row(name, True, probe_schedule().ratio))
    for is_per_token in (False, True):
        model = LayoutModel(replace(layout, calculate_per_token_loss=is_per_token), row_length(samples, layout), tiny)
        for case in cases(has_triton=why_not is None):
            if case.is_per_token == is_per_token:
                yield _guarded(str(case), everyone, partial(measured, case=case, model=model, truth=truth, sizes=sizes))


def cases(*, has_triton: bool) -> list[Case]:
    backends = [Backend.TORCH, Backend.TRITON] if has_triton else [Backend.TORCH]
    rows = [
        Case(policy_loss, str(aggregation), head, backend)
        for backend in backends
        for head in (LOGITS, FUSED)
        for policy_loss in CLIPS
        for aggregation in LossAggregation
    ]
    token_mean = str(LossAggregation.TOKEN_MEAN)
    return rows + [Case(policy_loss, token_mean, head, is_per_token=True) for head in (LOGITS, FUSED) for policy_loss in CLIPS]


def measured(name: str, case: Case, model: LayoutModel, truth: Mapping[str, LossTruth], sizes: Mapping[str, int]) -> Row:
    of_loss = truth[case.policy_loss]
    found = model.step(case.config, of_loss.samples)
    comparison = compare(found, of_loss.by_aggregation[case.aggregation], model.groups)
    return Row(
        name,
        comparison.is_within(TOLERANCE),
        comparison.ratio,
        comparison.gradient_error,
        comparison.loss_error,
        comparison.norm_error,
        comparison.cause(TOLERANCE, sizes),
    )


def complete_layout(asked: Layout, world_size: int) -> Layout:
    """With the data-parallel size that is left, and micro-batches whose number is no other size's: a wrong factor has one name."""
    sizes = {
        "--tensor-model-parallel-size": asked.tensor,
        "--context-parallel-size": asked.context,
        "--pipeline-model-parallel-size": asked.pipeline,
    }
    problems = [f"{flag} {size} must be at least 1" for flag, size in sizes.items() if size < 1]
    replica = prod(sizes.values())
    if not problems and world_size % replica:
        shown = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        problems.append(
            f"{world_size} ranks do not divide into model replicas of {replica} ({shown}); start a multiple of {replica}: torchrun "
            f"--nproc-per-node {replica} -m megatron_rl selftest ..."
        )
    if asked.sequence_parallel and asked.tensor == 1:
        problems.append("--sequence-parallel does nothing with --tensor-model-parallel-size 1: remove it, or set a size above 1")
    if problems:
        raise ConfigError(problems)
    data = world_size // replica
    taken = {asked.tensor, asked.context, asked.pipeline, data, data * asked.context, SAMPLES_PER_PROMPT}
    return replace(asked, data=data, num_microbatches=next(number for number in count(2) if number not in taken))


def model_for(layout: Layout) -> TinyGPT:
    """Heads for each tensor rank, layers for each stage, and padded columns on the last shard of the vocabulary."""
    heads = layout.tensor * -(-4 // layout.tensor)
    return TinyGPT(
        num_layers=layout.pipeline * -(-4 // layout.pipeline),
        hidden_size=8 * heads,
        num_attention_heads=heads,
        vocab_size=layout.tensor * -(-64 // layout.tensor),
        use_transformer_engine=False,
    )


def why_not_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its kernels need CUDA, and the ranks are on the CPU"
    return why_triton_is_missing()


def _named_sizes(layout: Layout, samples) -> dict[str, int]:
    sizes = {"cp": layout.context, "dp": layout.data}
    if min(sizes.values()) > 1:
        sizes["dp x cp"] = layout.data * layout.context
    return {
        **sizes,
        "micro-batches": layout.num_microbatches,
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "samples": len(samples),
        "prompts": len({sample.prompt_id for sample in samples}),
        "tokens": sum(sum(sample.loss_mask) for sample in samples),
    }


def _set_layout(layout: Layout) -> torch.device:
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return initialize_ranks(**layout.model_parallel)


def _refuse_tf32(device: torch.device) -> None:
    """Its 10 bits would be the error that is looked for."""
    if device.type != "cuda":
        return
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # some containers set it
    torch.set_float32_matmul_precision("highest")
    if torch.backends.cuda.matmul.allow_tf32:
        raise ConfigError("float32 products run in TF32 here: start with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE unset")


def _from_rank_0(make: Callable[[], object], everyone):
    if everyone is None:
        return make()
    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=everyone)
    return box[0]


def _guarded(name: str, everyone, make: Callable[[str], Row]) -> Row:
    """make(name), or a failed row with what some rank raised. A rank that hangs, or waits in vain for the others, ends its process.

    Communication: the ranks' errors, over all of them.
    """
    faulthandler.dump_traceback_later(SECONDS_FOR_A_ROW, exit=True, file=sys.__stderr__)
    row, error, last_words = None, "", None
    try:
        row = make(name)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        last_words = threading.Timer(SECONDS_FOR_THE_OTHERS, _end, [f"rank {dist.get_rank()}: {name}: {error}"])
        last_words.start()
    try:
        errors = [error]
        if everyone is not None:
            errors = [""] * everyone.size()
            dist.all_gather_object(errors, error, group=everyone)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if last_words is not None:
            last_words.cancel()
    failed = {rank: text for rank, text in enumerate(errors) if text}
    if not failed:
        return row
    ranks = "all ranks" if len(failed) == len(errors) else f"ranks {', '.join(map(str, failed))}"
    return Row(name, False, cause=f"{ranks}: {next(iter(failed.values()))}")


def _end(message: str) -> None:
    print(f"megatron_rl selftest: FAIL: {message}; the other ranks wait for this one", file=sys.__stderr__, flush=True)
    os._exit(1)
