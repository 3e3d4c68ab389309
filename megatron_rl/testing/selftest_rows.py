"""What both selftests share: their rows, the choice of the rest of a layout, and a guard around each row."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from math import prod

import torch
import torch.distributed as dist

from megatron_rl.config import Backend, LossAggregation, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import all_gather_stack
from megatron_rl.ops.backends import is_interpreted, why_triton_is_missing
from megatron_rl.testing.comparison import Comparison
from megatron_rl.testing.layout_step import Layout, StepSample
from megatron_rl.testing.reference import CLIPS, SAMPLES_PER_PROMPT
from megatron_rl.testing.selftest_terms import ALL_TERMS, OF_TOKENS, config_of, term_pairs

# On any layout a float32 gradient of the tiny models is 3e-7 to 7e-7 from the float64 truth; the smallest wrong factor, one token
# too many of a hundred, moves it by 9e-3.
TOLERANCE = 1e-5
# A row takes 0.1 s, and the first on CUDA compiles its kernels. A rank that is still busy then hangs: it prints its stack and ends.
SECONDS_FOR_A_ROW = 180.0
# After this rank has failed, others may wait for it in a collective: then it ends, and torchrun ends them.
SECONDS_FOR_THE_OTHERS = 20.0
# A collective's message about a lost rank is long; its beginning is enough.
LONGEST_LAST_WORDS = 200
LOGITS, FUSED = "logits", "fused head"
# Interpreted kernels take seconds a row: so one row of each loss, on each head.
INTERPRETED = tuple(zip(CLIPS, islice(cycle(LossAggregation), len(CLIPS)), strict=True))


@dataclass(frozen=True, slots=True)
class Case:
    """What a row runs. is_per_token: under Megatron's calculate_per_token_loss, for token_mean alone. term: of TERMS."""

    policy_loss: str
    aggregation: str
    head: str = LOGITS
    backend: str = Backend.TORCH
    is_per_token: bool = False
    term: str = ""

    @property
    def of_truth(self) -> tuple[str, str, str]:
        """What decides the right gradient."""
        return self.policy_loss, self.aggregation, self.term

    def __str__(self) -> str:
        contract = ", per-token" if self.is_per_token else ""
        term = f", {self.term}" if self.term else ""
        return f"{self.policy_loss} {self.aggregation}, {self.head}, {self.backend}{contract}{term}"

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


@dataclass(frozen=True, slots=True)
class SelftestRow:
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
    """What the rows run on; equal on all ranks. megatron_version: None where the losses run alone. cuts: what the layout's cut into
    micro-batches does to an auxiliary loss that is defined by them, as in RouterTruth; this is no fault."""

    layout: Layout
    device: str
    process_group_backend: str
    megatron_version: str | None
    sizes: dict[str, int]
    left_out: tuple[str, ...]
    cuts: dict[str, tuple[float, float]] = field(default_factory=dict)


def row_of(name: str, comparison: Comparison, sizes: dict[str, int]) -> SelftestRow:
    return SelftestRow(
        name,
        comparison.is_within(TOLERANCE),
        comparison.ratio,
        comparison.gradient_error,
        comparison.loss_error,
        comparison.norm_error,
        comparison.cause(TOLERANCE, sizes),
    )


def cases_here(device: torch.device, *, interprets: bool = False) -> tuple[list[Case], list[str]]:
    """(the rows that can run on this device, without those under the per-token contract; what of Triton is left out and why).

    interprets: on a CPU, run a few rows in Triton's interpreter; TRITON_INTERPRET is set. Raises ConfigError on CUDA.
    """
    rows, missing = cases_of(Backend.TORCH), why_triton_is_missing()
    if device.type == "cuda":
        if interprets:
            raise ConfigError("--interpret-triton is for ranks without CUDA: here kernels run compiled; remove it")
        if torch.version.hip is not None:
            return rows, ["Triton: its kernels need CUDA, and this torch is built for ROCm"]
        return (rows, [f"Triton: {missing}"]) if missing else (rows + cases_of(Backend.TRITON), [])
    if not interprets:
        hint = "" if missing else "; --interpret-triton runs a few rows in its interpreter"
        return rows, [f"Triton: its kernels need CUDA, and the ranks are on the CPU{hint}"]
    if not is_interpreted():
        return rows, [f"Triton: {missing or 'it was imported before --interpret-triton could ask for its interpreter'}"]
    few = [case for case in cases_of(Backend.TRITON) if is_interpreted_too(case)]
    return rows + few, [f"Triton: all but {len(few)} of {len(rows)} rows, which its interpreter ran; compiled kernels need CUDA"]


def cases_of(backend: Backend) -> list[Case]:
    return [
        Case(policy_loss, str(aggregation), head, backend)
        for head in (LOGITS, FUSED)
        for policy_loss in CLIPS
        for aggregation in LossAggregation
    ] + [Case(loss, aggregation, head, backend, term=term) for head in (LOGITS, FUSED) for loss, aggregation, term in term_pairs()]


@dataclass(frozen=True, slots=True)
class Choice:
    """Of the rows. A loss of a user's own is registered before this package's tables are made, on import."""

    policy_loss: str | None = None
    """The rows of this loss alone; None: of all."""
    texts: tuple[str, ...] = ()
    """The rows with one of these in their names; none: all."""

    def has(self, name: str) -> bool:
        return not self.texts or any(text in name for text in self.texts)

    def of(self, cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if self.policy_loss in (None, case.policy_loss) and self.has(str(case))]

    def check(self, names: Sequence[object]) -> None:
        """Raises ConfigError where a text chooses no row."""
        if self.texts and not names:
            texts = " ".join(f"--row {text!r}" for text in self.texts)
            raise ConfigError(f"{texts}: no row has that in its name; without --row the rows are listed as they run")


def is_interpreted_too(case: Case) -> bool:
    """Of each loss a row, and one row with three terms, on each head."""
    if case.term:
        return (case.policy_loss, case.term) == (OF_TOKENS, ALL_TERMS)
    return (case.policy_loss, case.aggregation) in INTERPRETED


def per_token_cases() -> list[Case]:
    token_mean = str(LossAggregation.TOKEN_MEAN)
    return [Case(policy_loss, token_mean, head, is_per_token=True) for head in (LOGITS, FUSED) for policy_loss in CLIPS]


def complete_layout(asked: Layout, world_size: int, *, has_experts: bool = False) -> Layout:
    """Adds the data-parallel size that is left, and a number of micro-batches that no other size has: so a factor has one name."""
    sizes = {
        "--tensor-model-parallel-size": asked.tensor,
        "--context-parallel-size": asked.context,
        "--pipeline-model-parallel-size": asked.pipeline,
    }
    problems = [f"{flag} {size} must be at least 1" for flag, size in sizes.items() if size < 1]
    replica = prod(sizes.values())
    if not problems and world_size % replica:
        shown = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        ranks = f"{world_size} ranks do" if world_size > 1 else "1 rank does"
        problems.append(
            f"{ranks} not divide into model replicas of {replica} ({shown}); start a multiple of {replica}: torchrun "
            f"--nproc-per-node {replica} -m megatron_rl selftest ..."
        )
    if asked.sequence_parallel and asked.tensor == 1:
        problems.append("--sequence-parallel does nothing with --tensor-model-parallel-size 1: remove it, or set a size above 1")
    if has_experts and not problems:
        asked = replace(asked, expert_tensor=asked.tensor if asked.expert_tensor is None else asked.expert_tensor)
        problems += expert_layout_problems(asked, world_size)
    if problems:
        raise ConfigError(problems)
    data = world_size // replica
    taken = {asked.tensor, asked.context, asked.pipeline, asked.expert, data, data * asked.context, SAMPLES_PER_PROMPT}
    return replace(asked, data=data, num_microbatches=next(number for number in count(2) if number not in taken))


def expert_layout_problems(asked: Layout, world_size: int) -> Iterator[str]:
    sizes = {"--expert-model-parallel-size": asked.expert, "--expert-tensor-parallel-size": asked.expert_tensor or 1}
    product = prod(sizes.values()) * asked.pipeline
    if min(sizes.values()) < 1 or world_size % product:
        shown = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        whole = f"{shown} x --pipeline-model-parallel-size {asked.pipeline}"
        yield f"{whole} must divide {world_size} ranks: start a multiple of {product}"


def named_sizes(layout: Layout, samples: Sequence[StepSample]) -> dict[str, int]:
    sizes = {"cp": layout.context, "dp": layout.data}
    if min(sizes.values()) > 1:
        sizes["dp x cp"] = layout.data * layout.context
    return {
        **sizes,
        "micro-batches": layout.num_microbatches,
        "tp": layout.tensor,
        "pp": layout.pipeline,
        **({"ep": layout.expert} if layout.expert > 1 else {}),
        "samples": len(samples),
        "prompts": len({sample.prompt_id for sample in samples}),
        "tokens": sum(sum(sample.loss_mask) for sample in samples),
    }


def refuse_tf32(device: torch.device) -> None:
    """Turns TF32 off: its 10-bit mantissa is as large as the errors that the selftest finds. ConfigError where it stays on."""
    if device.type != "cuda":
        return
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # some containers set it
    torch.set_float32_matmul_precision("highest")
    if torch.backends.cuda.matmul.allow_tf32:
        raise ConfigError("float32 products run in TF32 here: start with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE unset")


def guarded(
    name: str, everyone, make: Callable[[str], SelftestRow], on_row: Callable[[str], None] = lambda name: None
) -> SelftestRow:
    """on_row(name), then make(name), or a failed row with what a rank raised. A rank that hangs, or waits too long for the others,
    ends its process.

    Communication: the ranks' errors, over all of them.
    """
    faulthandler.dump_traceback_later(SECONDS_FOR_A_ROW, exit=True, file=sys.__stderr__ or sys.stderr)
    row, error, last_words = None, "", None
    on_row(name)
    try:
        row = make(name)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        text = f"rank {dist.get_rank()}: {name}: {error}; the other ranks wait for this one"
        last_words = threading.Timer(SECONDS_FOR_THE_OTHERS, _end, [text])
        last_words.start()
    try:
        errors = [error] if everyone is None else gather_texts(error, everyone)
    except RuntimeError as lost:  # a rank that is gone has closed its connections
        _end(f"rank {dist.get_rank()}: {name}: {(error or str(lost))[:LONGEST_LAST_WORDS]}; another rank has ended")
    finally:
        faulthandler.cancel_dump_traceback_later()
        if last_words is not None:
            last_words.cancel()
    failed = {rank: text for rank, text in enumerate(errors) if text}
    if row is not None and not failed:
        return row
    ranks = "all ranks" if len(failed) == len(errors) else f"ranks {', '.join(map(str, failed))}"
    return SelftestRow(name, False, cause=f"{ranks}: {next(iter(failed.values()))}")


def gather_texts(text: str, group) -> list[str]:
    """Each rank's text, on all of them; all_gather_object would need numpy. Communication: two all-gathers over a gloo group."""
    words = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = all_gather_stack(torch.tensor([words.numel()]), group)[:, 0].tolist()
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    padded[: words.numel()] = words
    rows = all_gather_stack(padded, group)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def _end(message: str) -> None:
    print(f"megatron_rl selftest: FAIL: {message}", file=sys.__stderr__, flush=True)
    os._exit(1)
