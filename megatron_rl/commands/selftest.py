"""`torchrun ... -m megatron_rl selftest`: is a step's gradient the right one on these ranks? PASS or FAIL, with the ratio found.

It shows what megatron_rl.testing.selftest measures and must never decide what is right.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.errors import ConfigError
from megatron_rl.testing.model_shapes import SHAPES

if TYPE_CHECKING:
    from megatron_rl.testing.selftest import RowResult, WholeSteps

# A field of Layout -> its flag and what it means.
SIZES = {
    "tensor": ("--tensor-model-parallel-size", "Ranks that share each layer. Default: 1."),
    "context": ("--context-parallel-size", "Ranks that share each sequence. Default: 1."),
    "pipeline": ("--pipeline-model-parallel-size", "Ranks that share the stack of layers. Default: 1."),
    "expert": ("--expert-model-parallel-size", "Ranks that share the experts of a layer; makes the model a mixture of experts."),
    "expert_tensor": ("--expert-tensor-parallel-size", "Ranks that share each expert. Default: as --tensor-model-parallel-size."),
}
SWITCHES = {
    "sequence_parallel": ("--sequence-parallel", "Share norms and embeddings over the tensor-parallel ranks too."),
    "distributed_optimizer": ("--use-distributed-optimizer", "Megatron's distributed optimiser."),
    "packed": ("--packed", "Samples in one row (thd) instead of one sample a row."),
}
NAME_WIDTH = 72


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    for name, (flag, meaning) in SIZES.items():
        parser.add_argument(flag, dest=name, type=int, metavar="COUNT", help=meaning)
    for name, (flag, meaning) in SWITCHES.items():
        parser.add_argument(flag, dest=name, action="store_true", help=meaning)
    parser.add_argument("--model-like", choices=list(SHAPES), help="Two layers like a model of the field.")
    parser.add_argument(
        "--policy-loss", metavar="NAME", help="Run only the rows of this loss; module.function: a loss of your own. Default: all."
    )
    parser.add_argument("--row", action="append", default=[], metavar="TEXT", help="Only rows with TEXT in their name. Repeatable.")


def run(args: Namespace) -> int:
    """Exit code 0 when every row passes, 1 when one fails; the same on every rank."""
    started = time.monotonic()
    bench = bench_of(args)
    import torch.distributed as dist

    from megatron_rl.testing.selftest import run_selftest

    def show(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    show(header(bench))
    results = []
    for result in run_selftest(bench):
        results.append(result)
        show(row_text(result))
    show(closing(bench, results, time.monotonic() - started))
    dist.destroy_process_group()
    return 0 if all(result.passed for result in results) else 1


def bench_of(args: Namespace) -> WholeSteps:
    from megatron_rl.config import PolicyLossConfig
    from megatron_rl.declare import get_policy_loss
    from megatron_rl.validation.own_functions import loss_problems

    # A loss of one's own is registered here, before megatron_rl.testing makes its tables.
    if args.policy_loss is not None:
        get_policy_loss(args.policy_loss)
        if problems := [*loss_problems(PolicyLossConfig(policy_loss=args.policy_loss))]:
            raise ConfigError(problems)
    from megatron_rl.testing.layout_step import Layout
    from megatron_rl.testing.selftest import WholeSteps, chosen, table, table_of_shape

    layout = Layout(**{name: value for name in (*SIZES, *SWITCHES) if (value := vars(args)[name]) is not None})
    if args.model_like or args.expert or args.expert_tensor:
        # Megatron's routers need sequence parallelism; the first line says that it is on.
        is_shared = layout.sequence_parallel or layout.tensor > 1
        layout = replace(layout, expert_tensor=layout.expert_tensor or layout.tensor, sequence_parallel=is_shared)
    cases = chosen(table_of_shape() if args.model_like else table(), args.policy_loss, args.row)
    return WholeSteps(layout, int(os.environ.get("WORLD_SIZE", "1")), cases, SHAPES.get(args.model_like))


def header(bench: WholeSteps) -> str:
    import torch
    import torch.distributed as dist

    from megatron_rl.megatron.probe import megatron_version

    layout, sizes = bench.layout, bench.sizes
    switches = "".join(f", {name.replace('_', ' ')}" for name in SWITCHES if getattr(layout, name))
    experts = "" if layout.expert_tensor is None else f" x EP {layout.expert} x ETP {layout.expert_tensor}"
    layout_shown = f"TP {layout.tensor} x CP {layout.context} x PP {layout.pipeline} x DP {layout.data}{experts}{switches}"
    model = f"{bench.model}\n" if bench.model else ""
    return (
        f"megatron_rl selftest: {layout_shown} | "
        f"{bench.device.type}, {dist.get_backend()} | {layout.num_microbatches} micro-batches a rank, "
        f"{sizes['samples']} samples of {sizes['prompts']} prompts, {sizes['tokens']} tokens\n"
        f"torch {torch.__version__}, megatron-core {megatron_version()}\n{model}"
        f"{'':{NAME_WIDTH + 6}s}{'gradient':>11s}{'off by':>9s}{'loss by':>9s}{'norm by':>9s}"
    )


def row_text(row: RowResult) -> str:
    figures = "" if row.ratio is None else f"x {row.ratio:9.6f}"
    errors = (row.gradient_error, row.loss_error, row.norm_error)
    figures += "".join(f"{error:9.0e}" for error in errors if error is not None)
    line = f"{'PASS' if row.passed else 'FAIL'}  {row.name:{NAME_WIDTH - 1}s} {figures}".rstrip()
    return line if row.passed else f"{line}\n      {row.cause}"


def closing(bench: WholeSteps, results: Sequence[RowResult], seconds: float) -> str:
    lines = [f"left out: {what}" for what in bench.left_out]
    total, failed = len(results), sum(not result.passed for result in results)
    verdict = f"FAIL: {failed} of {total} rows fail" if failed else f"PASS: {total} of {total} rows"
    return "\n".join([*lines, f"{verdict}, {seconds:.1f} s"])
