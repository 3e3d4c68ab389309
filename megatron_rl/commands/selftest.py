"""`torchrun ... -m megatron_rl selftest`: is a step's gradient the right one on these ranks? PASS or FAIL, with the ratio found.

It shows what megatron_rl.testing.selftest measures and must never decide what is right.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.errors import ConfigError
from megatron_rl.testing.model_shapes import SHAPES

if TYPE_CHECKING:
    from megatron_rl.testing.selftest import RowResult, WholeSteps

EXIT_FAILED = 1
# A field of Layout -> its flag and what it means.
SIZES = {
    "tensor": ("--tensor-model-parallel-size", "Ranks that share each layer. Default: 1."),
    "context": ("--context-parallel-size", "Ranks that share each sequence. Default: 1."),
    "pipeline": ("--pipeline-model-parallel-size", "Ranks that share the stack of layers. Default: 1."),
}
SIZES_OF_EXPERTS = {
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
        parser.add_argument(flag, dest=name, type=int, default=1, metavar="COUNT", help=meaning)
    for name, (flag, meaning) in SIZES_OF_EXPERTS.items():
        parser.add_argument(flag, dest=name, type=int, metavar="COUNT", help=meaning)
    for name, (flag, meaning) in SWITCHES.items():
        parser.add_argument(flag, dest=name, action="store_true", help=meaning)
    parser.add_argument("--model-like", choices=list(SHAPES), help="Two layers like a model of the field.")
    parser.add_argument(
        "--policy-loss", metavar="NAME", help="Run the rows of this loss alone; module.function: a loss of your own. Default: all."
    )
    parser.add_argument("--row", action="append", default=[], metavar="TEXT", help="Only rows with TEXT in their name. Repeatable.")


def run(args: Namespace) -> int:
    """Exit code 0 when every row passes, 1 when one fails; the same on every rank."""
    started = time.monotonic()
    register_own_loss(args.policy_loss)
    bench = bench_of(args)
    import torch.distributed as dist

    from megatron_rl.testing.selftest import run_selftest

    results, prints = [], dist.get_rank() == 0
    if prints:
        print(header(bench), flush=True)
    for result in run_selftest(bench):
        results.append(result)
        if prints:  # each row as it ends: whatever ends this process leaves the rows before
            print(row_text(result), flush=True)
    if prints:
        print(closing(bench, results, time.monotonic() - started), flush=True)
    dist.destroy_process_group()
    return 0 if all(result.passed for result in results) else EXIT_FAILED


def register_own_loss(name: str | None) -> None:
    """Before megatron_rl.testing makes its tables. Raises ConfigError for a loss that is not what it declares."""
    from megatron_rl.config import PolicyLossConfig
    from megatron_rl.validation.own_functions import loss_problems

    if name is not None and (problems := [*loss_problems(PolicyLossConfig(policy_loss=name))]):
        raise ConfigError(problems)


def bench_of(args: Namespace) -> WholeSteps:
    from megatron_rl.megatron.cpu import quiet_megatron

    quiet_megatron()
    from megatron_rl.testing.layout_step import Layout
    from megatron_rl.testing.selftest import WholeSteps, chosen, table, table_of_shape

    sizes = {name: vars(args)[name] for name in (*SIZES, *SWITCHES)}
    if args.model_like or args.expert or args.expert_tensor:
        sizes |= {"expert": args.expert or 1, "expert_tensor": args.expert_tensor or args.tensor}
        sizes["sequence_parallel"] |= args.tensor > 1  # Megatron's routers need it; the first line says that it is on
    cases = chosen(table_of_shape() if args.model_like else table(), args.policy_loss, args.row)
    return WholeSteps(Layout(**sizes), int(os.environ.get("WORLD_SIZE", "1")), cases, SHAPES.get(args.model_like))


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
