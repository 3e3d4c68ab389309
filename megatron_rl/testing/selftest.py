"""Tests the losses on the ranks and devices that are there: runs the table of rows on a bench, one row after another.

A row compares a step of these ranks with a float64 reference that one process computed before. No factor is undone by hand, and a
row that did not run does not pass.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl.config import Backend
from megatron_rl.layout.groups import Group, all_gather_stack
from megatron_rl.testing.comparison import named_sizes
from megatron_rl.testing.layout_step import Layout
from megatron_rl.testing.selftest_bench import Bench, Measured, refuse_tf32
from megatron_rl.testing.selftest_table import Choice, Row, table, table_of_kl, table_of_shape, triton_here
from megatron_rl.testing.selftest_terms import Case

# A row takes 0.1 s, and the first on CUDA compiles its kernels. A rank that is still busy then hangs: it prints its stack and ends.
SECONDS_FOR_A_ROW = 180.0
# After this rank has failed, others may wait for it in a collective: then it ends, and torchrun ends them.
SECONDS_FOR_THE_OTHERS = 20.0
# A collective's message about a lost rank is long; its beginning is enough.
LONGEST_LAST_WORDS = 200


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
    parts: dict[str, float] = field(default_factory=dict)
    """The error of the gradient of each part of the parameters that is compared by itself."""


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
    model: str = ""  # as in Bench


def run_selftest(
    bench: Bench,
    on_start: Callable[[Setting], None] = lambda setting: None,
    *,
    interprets_triton: bool = False,
    choice: Choice = Choice(),  # noqa: B008  # frozen
    on_row: Callable[[str], None] = lambda name: None,
    rows: Sequence[Row] | None = None,
) -> Iterator[RowResult]:
    """Each rank calls it and gets the same results, one after another. on_row gets the name of each row before it runs. rows: those
    to run where the bench can; None: the table. Raises ConfigError for a choice without a row."""
    refuse_tf32(bench.device)
    declared: Callable[[Callable[[Case], bool]], list[Row]] = table
    if bench.model:
        declared = partial(table_of_shape, policy_loss=choice.policy_loss)
    elif choice.kl_estimator is not None:
        declared = partial(table_of_kl, estimator=choice.kl_estimator)
    of_triton = [row.case for row in declared(lambda case: True) if row.case is not None and row.case.backend == Backend.TRITON]
    runs_triton, without_triton = triton_here(bench.device, interprets=interprets_triton, cases=of_triton)
    if rows is None:
        rows = declared(runs_triton)
    chosen = choice.of(rows)
    bench.prepare([row.case for row in chosen if row.case is not None])
    here = choice.of([row for row in chosen if row.runs_when(bench)])
    sizes = named_sizes(bench.layout, bench.samples)
    left_out = (*bench.left_out, *([without_triton] if without_triton else []))
    backend = dist.get_backend()
    on_start(Setting(bench.layout, bench.device.type, backend, bench.megatron_version, sizes, left_out, bench.cuts, bench.model))
    for row in here:
        on_row(row.name)
        yield guarded(row.name, bench.everyone, partial(measured_row, row, bench, sizes))


def measured_row(row: Row, bench: Bench, sizes: Mapping[str, int]) -> RowResult:
    return result_of(row, row.run(bench), sizes)


def result_of(row: Row, measured: Measured, sizes: Mapping[str, int]) -> RowResult:
    """The result of the whole gradient. Where some parts of the parameters are wrong and others are right, their names, and the
    result of the first."""
    if isinstance(measured, float):
        return RowResult(row.name, True, measured)
    wrong = [part for part, comparison in measured.items() if not comparison.is_within(row.bound)]
    leaves = [part for part in wrong if part]
    if "" in wrong and len(wrong) == len(measured):  # all of them, as by a wrong factor
        leaves = []
    found = measured[leaves[0] if leaves else ""]
    cause = found.cause(row.bound, sizes)
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


def guarded(name: str, everyone: Group | None, run: Callable[[], RowResult]) -> RowResult:
    """run(), or a failed row with what a rank raised. A rank that hangs, or waits too long for the others, ends its process.

    Communication: the ranks' errors, over all of them.
    """
    faulthandler.dump_traceback_later(SECONDS_FOR_A_ROW, exit=True, file=sys.__stderr__ or sys.stderr)
    result, error, last_words = None, "", None
    try:
        result = run()
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
    if result is not None and not failed:
        return result
    ranks = "all ranks" if len(failed) == len(errors) else f"ranks {', '.join(map(str, failed))}"
    return RowResult(name, False, cause=f"{ranks}: {next(iter(failed.values()))}")


def gather_texts(text: str, group: Group) -> list[str]:
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
