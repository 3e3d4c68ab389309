"""`torchrun ... -m megatron_rl selftest`: is a step's gradient the right one on these ranks? PASS or FAIL, with the ratio found.

It shows what megatron_rl.testing.selftest measures and must never decide what is right.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from megatron_rl.errors import ConfigError
from megatron_rl.testing.model_shapes import SHAPES, shape_of

if TYPE_CHECKING:
    from megatron_rl.testing.selftest import Row, RowResult, WholeSteps

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
    parser.add_argument("--model-like", metavar="NAME", help=f"Two layers like a model of the field: {', '.join(SHAPES)}.")
    parser.add_argument(
        "--policy-loss", metavar="NAME", help="Run the rows of this loss alone; module.function: a loss of your own. Default: all."
    )
    aggregation_help = "Run the rows of this aggregation alone; module.function: one of your own. Default: all."
    parser.add_argument("--loss-aggregation", metavar="NAME", help=aggregation_help)
    kl_help = "Run each loss and aggregation with this KL term, and no other row; module.function: one of your own."
    parser.add_argument("--kl-estimator", metavar="NAME", help=kl_help)
    parser.add_argument("--row", action="append", default=[], metavar="TEXT", help="Only rows with TEXT in their name. Repeatable.")
    parser.add_argument(
        "--json", action="store_true", help="Print JSON lines: the setting, each row's name and result, the verdict."
    )


def run(args: Namespace) -> int:
    """Exit code 0 when every row passes, 1 when one fails; the same on every rank."""
    started = time.monotonic()
    screen = Screen(as_json=args.json, shows=os.environ.get("RANK", "0") == "0")
    settle_names(args)
    bench = bench_of(args)

    from megatron_rl.testing.selftest import run_selftest

    rows = bench.prepare(rows_of(args))
    screen.start(bench)
    for result in run_selftest(bench, rows, screen.on_row):
        screen.show(result)
    passed = screen.close(time.monotonic() - started)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if passed else EXIT_FAILED


class Screen:
    """Shows each row as it ends, on rank 0: whatever ends this process leaves the rows before, and with --json the name of the row
    that ran. JSON lines: {"setting": ...}, then {"running": name} and {"row": ...} in turn, then {"result": ...}."""

    def __init__(self, *, as_json: bool, shows: bool):
        self.as_json, self.shows = as_json, shows
        self.bench: WholeSteps
        """From the start of the rows on."""
        self.results: list[RowResult] = []

    def line(self, key: str, value: object, text: str | None) -> None:
        if not self.shows or (text is None and not self.as_json):
            return
        print(json.dumps({key: value}) if self.as_json else text, flush=True)

    def start(self, bench: WholeSteps) -> None:
        import torch.distributed as dist

        self.bench = bench
        setting = {"layout": asdict(bench.layout), "device": bench.device.type, "process_group_backend": dist.get_backend()}
        setting |= {"megatron_version": bench.megatron_version, "left_out": bench.left_out, "model": bench.model}
        self.line("setting", setting, header(bench))

    def on_row(self, name: str) -> None:
        self.line("running", name, None)

    def show(self, result: RowResult) -> None:
        self.results.append(result)
        self.line("row", asdict(result), row_text(result))

    def close(self, seconds: float) -> bool:
        failed = sum(not result.passed for result in self.results)
        verdict = {"passed": not failed, "seconds": round(seconds, 3), "rows": len(self.results), "failed": failed}
        self.line("result", verdict, closing(self.bench, self.results, seconds))
        return not failed


def settle_names(args: Namespace) -> None:
    """Registers a loss, an aggregation and a KL term of a user's own, before megatron_rl.testing makes its tables, and leaves their
    names in the rows in args. Raises ConfigError for one that is not what it declares, or has no rows."""
    from megatron_rl.config import PolicyLossConfig
    from megatron_rl.loss_hub import PASSED_INPUTS, get_loss_aggregation, get_policy_loss
    from megatron_rl.registries.kl_estimators import KL_ESTIMATORS, get_kl_estimator
    from megatron_rl.validation.own_functions import estimator_problems, loss_problems

    problems: list[str] = []
    if args.policy_loss is not None:
        problems += loss_problems(PolicyLossConfig(policy_loss=args.policy_loss))
        if needs := [need for need in get_policy_loss(args.policy_loss).needs if need in PASSED_INPUTS]:
            problems.append(
                f"--policy-loss {args.policy_loss} needs {', '.join(needs)}, which the samples of the selftest have not: test it "
                "with the pytest fixture assert_layout_invariant, as docs/testing.md shows"
            )
    if args.loss_aggregation is not None:
        aggregation = get_loss_aggregation(args.loss_aggregation)
        if aggregation.formula is None:
            problems.append(f"--loss-aggregation {args.loss_aggregation} declares no formula, which its rows need: declare one")
        args.loss_aggregation = aggregation.name
    if args.kl_estimator is not None:
        estimator = get_kl_estimator(args.kl_estimator)
        problems += [] if KL_ESTIMATORS.is_built_in(estimator.name) else estimator_problems(estimator)
        args.kl_estimator = estimator.name
    if args.model_like is not None and (args.loss_aggregation is not None or args.kl_estimator is not None):
        problems.append(f"--model-like {args.model_like} has rows of its own: remove it, or --loss-aggregation and --kl-estimator")
    if problems:
        raise ConfigError(problems)


def rows_of(args: Namespace) -> list[Row]:
    from megatron_rl.testing.selftest import chosen, table, table_of_shape

    rows = table(args.kl_estimator) if args.model_like is None else table_of_shape(args.policy_loss)
    return chosen(rows, args.policy_loss, args.loss_aggregation, args.row)


def bench_of(args: Namespace) -> WholeSteps:
    from megatron_rl.megatron.cpu import quiet_megatron

    quiet_megatron()
    from megatron_rl.testing.layout_step import Layout
    from megatron_rl.testing.selftest import WholeSteps

    sizes = {name: vars(args)[name] for name in (*SIZES, *SWITCHES)}
    of_experts = {name: size for name in SIZES_OF_EXPERTS if (size := vars(args)[name]) is not None}
    shape = None if args.model_like is None else shape_of(args.model_like)
    if (of_experts or shape is not None) and args.tensor > 1:
        sizes["sequence_parallel"] = True  # Megatron's routers need it; the first line says that it is on
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return WholeSteps(Layout(**sizes | of_experts), world_size, has_experts=bool(of_experts), shape=shape)


def header(bench: WholeSteps) -> str:
    import torch
    import torch.distributed as dist

    from megatron_rl.testing.comparison import named_sizes

    layout, sizes = bench.layout, named_sizes(bench.layout, bench.samples)
    switches = "".join(f", {name.replace('_', ' ')}" for name in SWITCHES if getattr(layout, name))
    experts = "" if layout.expert_tensor is None else f" x EP {layout.expert} x ETP {layout.expert_tensor}"
    layout_shown = f"TP {layout.tensor} x CP {layout.context} x PP {layout.pipeline} x DP {layout.data}{experts}{switches}"
    model = f"{bench.model}\n" if bench.model else ""
    return (
        f"megatron_rl selftest: {layout_shown} | "
        f"{bench.device.type}, {dist.get_backend()} | {layout.num_microbatches} micro-batches a rank, "
        f"{sizes['samples']} samples of {sizes['prompts']} prompts, {sizes['tokens']} tokens\n"
        f"torch {torch.__version__}, megatron-core {bench.megatron_version}\n{model}"
        f"{'':{NAME_WIDTH + 6}s}{'gradient':>11s}{'off by':>9s}{'loss by':>9s}{'norm by':>9s}"
    )


def row_text(row: RowResult) -> str:
    figures = "" if row.ratio is None else f"x {row.ratio:9.6f}"
    errors = (row.gradient_error, row.loss_error, row.norm_error)
    figures += "".join(f"{error:9.0e}" for error in errors if error is not None)
    # A name that is too long for its column has a line of its own.
    gap = f"\n{'':{NAME_WIDTH + 6}s}" if len(row.name) >= NAME_WIDTH else " "
    line = f"{'PASS' if row.passed else 'FAIL'}  {row.name:{NAME_WIDTH - 1}s}{gap}{figures}".rstrip()
    return line if row.passed else f"{line}\n      {row.cause}"


def closing(bench: WholeSteps, results: Sequence[RowResult], seconds: float) -> str:
    lines = kinds_text(results) + [f"left out: {what}" for what in bench.left_out]
    total, failed = len(results), sum(not result.passed for result in results)
    verdict = f"FAIL: {failed} of {total} rows fail" if failed else f"PASS: {total} of {total} rows"
    return "\n".join([*lines, f"{verdict}, {seconds:.1f} s"])


def kinds_text(results: Sequence[RowResult]) -> list[str]:
    """The largest error of each kind of parameter over the rows."""
    worst: dict[str, float] = {}
    for row in results:
        worst |= {kind: max(error, worst.get(kind, 0.0)) for kind, error in row.parts.items()}
    return [f"off by at most: {', '.join(f'{kind} {error:.0e}' for kind, error in worst.items())}"] if worst else []
