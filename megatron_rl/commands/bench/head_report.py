"""What `bench head` writes about its cases: ratios to bare matmuls and to the unfused path, and its targets.

It must never judge a case whose times are void, nor compare a row with one of another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_rl.commands.bench.chart import Look
from megatron_rl.commands.bench.harness import Row
from megatron_rl.commands.bench.head_cases import MEMORY
from megatron_rl.commands.bench.head_peers import LIGER, LIGER_SCALED, VERL
from megatron_rl.commands.bench.head_problem import HeadProblem
from megatron_rl.commands.bench.head_providers import (
    LOGITS_MATMUL,
    ONE_MATMUL,
    OURS,
    OURS_FORWARD,
    OURS_SMALL,
    THREE_MATMULS,
    UNFUSED,
)
from megatron_rl.commands.bench.report import Style
from megatron_rl.commands.bench.targets import AT_LEAST, AT_MOST, Target, Value, row_of

GIB = 2.0**30
# Shapes on which the matmuls fill a GPU.
FEWEST_TOKENS, FEWEST_COLUMNS = 4096, 100_000

STYLE = Style(
    name="head",
    columns=(
        ("ms", "median_ms", "{:.2f}", 1.0),
        ("p20", "p20_ms", "{:.2f}", 1.0),
        ("p80", "p80_ms", "{:.2f}", 1.0),
        ("TF 2TvH", "teraflops_2", "{:.4g}", 1.0),
        ("TF 6TvH", "teraflops_6", "{:.4g}", 1.0),
        ("TF 8TvH", "teraflops_8", "{:.4g}", 1.0),
        ("x 1 mm", "over_one_matmul", "{:.2f}", 1.0),
        ("x 3 mm", "over_three_matmuls", "{:.2f}", 1.0),
        ("x 4 mm", "over_four_matmuls", "{:.2f}", 1.0),
        ("x unfused", "over_unfused", "{:.2f}", 1.0),
        ("peak MB", "peak_bytes", "{:.1f}", 1e-6),
        ("extra MB", "peak_extra_bytes", "{:.1f}", 1e-6),
        ("x unf. MB", "memory_over_unfused", "{:.2f}", 1.0),
        ("host ms", "host_ms", "{:.2f}", 1.0),
    ),
    notes=(
        "ms: median of the step from hidden states to both gradients (forward only: to log-probabilities); p20 and p80 beside it.",
        "TF 6TvH: TFLOP/s if the work is three matmuls of 2 T V H, what has to be done; TF 8TvH: if it is four, what a head does "
        "that computes its logits twice; TF 2TvH: of what needs one matmul. All T rows count, masked and clipped ones too.",
        "x 1, 3, 4 mm: time over bare matmuls of this shape in this run, in chunks of up to as many rows as ours; four: three and "
        "the logits once more. Masked and clipped rows are in them.",
        "x unfused: time over all logits at once and policy_loss in place; x unf. MB: extra memory over its.",
        "extra MB: peak memory above the inputs, results included; peak MB: with one set of hidden states and the weight.",
        "host ms: until the host had queued the step; on CUDA ours waits once a chunk to learn which rows stay.",
        "One GPU, one rank: no collective runs. V 16032 is what one of 8 ranks has of 128256, alone.",
        "Token mean throughout. Documents have equal lengths; labels are drawn evenly, advantages are never 0.",
    ),
    sections=(("From hidden states, forward and backward", "head"),),
    cpu_heading="CPU: wall clock of a machine that may be busy; read the ratios",
    look=Look(
        case_kind="head",
        ratio="over_three_matmuls",
        title="Loss from hidden states, forward and backward: time over three bare matmuls",
        axis="time over three bare matmuls (dashed)",
        cpu_warning=" (CPU: not a statement about GPUs)",
    ),
)


def add_head_ratios(rows: list[Row], problem: HeadProblem) -> list[dict]:
    """The rows as dictionaries with what this kind of bench says about them; None where there is nothing to compare with."""
    found = [row.as_dict() for row in rows]
    times = {row["provider"]: row["median_ms"] for row in found if row["median_ms"] is not None}
    three, one, unfused = times.get(THREE_MATMULS), times.get(LOGITS_MATMUL), times.get(UNFUSED)
    four = None if three is None or one is None else three + one
    for row in found:
        milliseconds, is_one = row["median_ms"], row["provider"] in ONE_MATMUL
        for number in (2, 6, 8):
            counts = milliseconds is not None and is_one == (number == 2)
            row[f"teraflops_{number}"] = number / 2 * problem.matmul_flops / milliseconds / 1e9 if counts else None
        row["over_one_matmul"] = _ratio(milliseconds if is_one else None, one)
        row["over_three_matmuls"] = _ratio(None if is_one else milliseconds, three)
        row["over_four_matmuls"] = _ratio(None if is_one else milliseconds, four)
        row["over_unfused"] = _ratio(None if is_one else milliseconds, unfused)
        row["peak_bytes"], row["memory_over_unfused"] = None, None
    add_memory_ratios(found, problem.input_bytes)
    return found


def add_memory_ratios(rows: list[dict], input_bytes: float) -> None:
    base = next((row["peak_extra_bytes"] for row in rows if row["provider"] == UNFUSED), None)
    for row in rows:
        if row["peak_extra_bytes"] is not None:
            row["peak_bytes"] = input_bytes + row["peak_extra_bytes"]
            row["memory_over_unfused"] = _ratio(row["peak_extra_bytes"], base)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _cases(cases: list[dict], device: str, choose: Callable[[dict], bool]) -> Iterator[tuple[dict, dict]]:
    """(case, its shape) of a device that are chosen by shape."""
    for case in cases:
        if case["device"] == device and choose(case["shape"]):
            yield case, case["shape"]


def _key(provider: str, key: str, choose: Callable[[dict], bool], device: str = "cuda") -> Callable[[list[dict]], Iterator[Value]]:
    """A number of a provider's row on the chosen cases."""

    def values(cases: list[dict]) -> Iterator[Value]:
        for case, _ in _cases(cases, device, choose):
            row = row_of(case, provider)
            if row is not None and row[key] is not None:
                yield case["title"], row[key]

    return values


def _over_ours(peer: str, choose: Callable[[dict], bool]) -> Callable[[list[dict]], Iterator[Value]]:
    def values(cases: list[dict]) -> Iterator[Value]:
        for case, _ in _cases(cases, "cuda", choose):
            row, base = row_of(case, peer), row_of(case, OURS)
            if row is not None and base is not None:
                yield case["title"], row["median_ms"] / base["median_ms"]

    return values


def _over_dense(name: str) -> Callable[[list[dict]], Iterator[Value]]:
    """Time with 30 % of the rows `name` over that with none, of the same loss and shape."""

    def values(cases: list[dict]) -> Iterator[Value]:
        same = ("num_tokens", "hidden_size", "vocab_size", "loss", "dtype")
        dense = {tuple(shape[key] for key in same): case for case, shape in _cases(cases, "cuda", _is_plain)}
        for case, shape in _cases(cases, "cuda", lambda shape: shape[name] == 0.3 and is_large(shape)):
            base = dense.get(tuple(shape[key] for key in same))
            row, of_base = row_of(case, OURS), None if base is None else row_of(base, OURS)
            if row is not None and of_base is not None:
                yield case["title"], row["median_ms"] / of_base["median_ms"]

    return values


def is_large(shape: dict) -> bool:
    """Whether the matmuls fill a GPU."""
    return shape["num_tokens"] >= FEWEST_TOKENS and shape["vocab_size"] >= FEWEST_COLUMNS


def _is_dense(shape: dict) -> bool:
    return is_large(shape) and not (shape["masked"] or shape["clipped"])


def _is_plain(shape: dict) -> bool:
    """Every row in every matmul, and a document shares its chunk with others."""
    return _is_dense(shape) and not shape["with_kl"] and shape["documents"] > 1


def _in_three(*sizes: int) -> Callable[[dict], bool]:
    """What three matmuls are enough for: all but a long document with KL (plan C)."""
    return lambda shape: _is_dense(shape) and shape["hidden_size"] in sizes and not (shape["with_kl"] and shape["documents"] == 1)


def _of_memory(shape: dict) -> bool:
    wanted: dict[str, Any] = MEMORY.as_dict()
    return _is_plain(shape) and all(shape[key] == wanted[key] for key in ("num_tokens", "hidden_size", "vocab_size", "dtype"))


def _gibibytes(provider: str) -> Callable[[list[dict]], Iterator[Value]]:
    values = _key(provider, "peak_extra_bytes", _of_memory)
    return lambda cases: ((title, value / GIB) for title, value in values(cases))


def _any(shape: dict) -> bool:
    return True


def _plain_on_cpu(shape: dict) -> bool:
    return not (shape["masked"] or shape["clipped"])


CUDA_TARGETS = (
    Target("forward and backward over three matmuls, H 4096", AT_MOST, 1.15, _key(OURS, "over_three_matmuls", _in_three(4096))),
    Target("forward and backward over three matmuls, H 2048", AT_MOST, 1.20, _key(OURS, "over_three_matmuls", _in_three(2048))),
    Target("forward and backward over three matmuls, H 8192", AT_MOST, 1.12, _key(OURS, "over_three_matmuls", _in_three(8192))),
    Target("forward and backward over four matmuls", AT_MOST, 0.90, _key(OURS, "over_four_matmuls", _in_three(4096, 8192))),
    Target("forward only over one matmul", AT_MOST, 1.10, _key(OURS_FORWARD, "over_one_matmul", _is_plain)),
    Target("30 % of the rows masked, time over dense", AT_MOST, 0.78, _over_dense("masked")),
    Target("30 % of the rows clipped, time over dense", AT_MOST, 0.86, _over_dense("clipped")),
    Target("verl's time over ours", AT_LEAST, 1.8, _over_ours(VERL, _is_plain)),
    Target("Liger's fused linear GRPO, time over ours", AT_LEAST, 4.0, _over_ours(LIGER, _is_plain)),
    Target("Liger's fused scaled CE and torch, time over ours", AT_LEAST, 1.15, _over_ours(LIGER_SCALED, _is_plain)),
    Target("extra memory at T 16384, H 4096, V 128256, GiB", AT_MOST, 4.2, _gibibytes(OURS)),
    Target("extra memory there into main_grad, 4096 rows, GiB", AT_MOST, 2.3, _gibibytes(OURS_SMALL)),
)
CPU_TARGETS = (
    Target("CPU: time over the unfused path", AT_MOST, 1.1, _key(OURS, "over_unfused", _plain_on_cpu, "cpu")),
    Target("CPU: extra memory over the unfused path's", AT_MOST, 0.5, _key(OURS, "memory_over_unfused", _any, "cpu")),
)
TARGETS = {"cuda": CUDA_TARGETS, "cpu": CPU_TARGETS}
