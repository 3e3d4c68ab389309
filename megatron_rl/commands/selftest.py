"""`torchrun ... -m megatron_rl selftest`: is a step's gradient the right one on these ranks? PASS or FAIL, with the ratio found.

It shows what megatron_rl.testing.selftest measures and must never decide what is right.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron_rl.errors import ConfigError
from megatron_rl.testing.model_shapes import SHAPES, shape_of

if TYPE_CHECKING:
    from megatron_rl.testing.selftest import RowResult, Setting
    from megatron_rl.testing.selftest_bench import Bench

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
    interpreted = "Without CUDA: run a few rows in Triton's interpreter too, some seconds each."
    parser.add_argument("--interpret-triton", action="store_true", help=interpreted)
    parser.add_argument(
        "--json", action="store_true", help="Print JSON lines: the setting, each row's name and result, the verdict."
    )


def run(args: Namespace) -> int:
    """Exit code 0 when every row passes, 1 when one fails; the same on every rank."""
    started = time.monotonic()
    screen = Screen(as_json=args.json, shows=os.environ.get("RANK", "0") == "0")
    settle_names(args)
    if args.interpret_triton:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton looks where a kernel is defined, which is later
    for result in results(args, screen):
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
        self.setting: Setting
        """From the start of the rows on."""
        self.results: list[RowResult] = []

    def line(self, key: str, value: object, text: str | None) -> None:
        if not self.shows or (text is None and not self.as_json):
            return
        print(json.dumps({key: value}) if self.as_json else text, flush=True)

    def on_start(self, setting: Setting) -> None:
        self.setting = setting
        self.line("setting", asdict(setting), header(setting))

    def on_row(self, name: str) -> None:
        self.line("running", name, None)

    def show(self, result: RowResult) -> None:
        self.results.append(result)
        self.line("row", asdict(result), row_text(result))

    def close(self, seconds: float) -> bool:
        failed = sum(not result.passed for result in self.results)
        verdict = {"passed": not failed, "seconds": round(seconds, 3), "rows": len(self.results), "failed": failed}
        self.line("result", verdict, closing(self.setting, self.results, seconds))
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


def results(args: Namespace, screen: Screen) -> Iterator[RowResult]:
    from megatron_rl.testing.selftest import run_selftest
    from megatron_rl.testing.selftest_table import Choice

    return run_selftest(
        bench_of(args),
        screen.on_start,
        interprets_triton=args.interpret_triton,
        choice=Choice(args.policy_loss, tuple(args.row), args.loss_aggregation, args.kl_estimator),
        on_row=screen.on_row,
    )


def bench_of(args: Namespace) -> Bench:
    """Whole steps where there is a Megatron-Core, else the losses alone."""
    from megatron_rl.testing.layout_step import Layout

    sizes = {name: vars(args)[name] for name in (*SIZES, *SWITCHES)}
    of_experts = {name: size for name in SIZES_OF_EXPERTS if (size := vars(args)[name]) is not None}
    shape = None if args.model_like is None else shape_of(args.model_like)
    if (of_experts or shape is not None) and args.tensor > 1:
        sizes["sequence_parallel"] = True  # Megatron's routers need it; the first line says that it is on
    bench: Callable[..., Bench]
    if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        from megatron_rl.megatron.cpu import quiet_megatron

        quiet_megatron()
        from megatron_rl.testing.selftest_steps import WholeSteps as bench
    else:
        from megatron_rl.testing.selftest_losses import LossesAlone as bench
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return bench(Layout(**sizes | of_experts), world_size, has_experts=bool(of_experts), shape=shape)


def header(setting: Setting) -> str:
    import torch

    layout, sizes = setting.layout, setting.sizes
    is_whole = setting.megatron_version is not None
    versions = f"megatron-core {setting.megatron_version}" if is_whole else "without megatron-core: the losses alone"
    switches = "".join(f", {name.replace('_', ' ')}" for name in SWITCHES if getattr(layout, name))
    experts = "" if layout.expert_tensor is None else f" x EP {layout.expert} x ETP {layout.expert_tensor}"
    layout_shown = f"TP {layout.tensor} x CP {layout.context} x PP {layout.pipeline} x DP {layout.data}{experts}{switches}"
    model = f"{setting.model}\n" if setting.model else ""
    return (
        f"megatron_rl selftest: {layout_shown} | "
        f"{setting.device}, {setting.process_group_backend} | {layout.num_microbatches} micro-batches a rank, "
        f"{sizes['samples']} samples of {sizes['prompts']} prompts, {sizes['tokens']} tokens\n"
        f"torch {torch.__version__}, {versions}\n{model}"
        f"{'':{NAME_WIDTH + 6}s}{'gradient':>11s}{'off by':>9s}{'loss by':>9s}{'norm by' if is_whole else '':>9s}".rstrip()
    )


def row_text(row: RowResult) -> str:
    figures = "" if row.ratio is None else f"x {row.ratio:9.6f}"
    errors = (row.gradient_error, row.loss_error, row.norm_error)
    figures += "".join(f"{error:9.0e}" for error in errors if error is not None)
    # A name that is too long for its column has a line of its own.
    gap = f"\n{'':{NAME_WIDTH + 6}s}" if len(row.name) >= NAME_WIDTH else " "
    line = f"{'PASS' if row.passed else 'FAIL'}  {row.name:{NAME_WIDTH - 1}s}{gap}{figures}".rstrip()
    return line if row.passed else f"{line}\n      {row.cause}"


def closing(setting: Setting, results: Sequence[RowResult], seconds: float) -> str:
    lines = [cut_text(setting, name, *change) for name, change in setting.cuts.items()]
    if setting.model:
        lines += kinds_text(results)
    lines += [f"left out: {what}" for what in setting.left_out]
    total, failed = len(results), sum(not result.passed for result in results)
    of_what = "rows" if setting.megatron_version is not None else "rows of the losses alone"
    verdict = f"FAIL: {failed} of {total} {of_what} fail" if failed else f"PASS: {total} of {total} {of_what}"
    return "\n".join([*lines, f"{verdict}, {seconds:.1f} s"])


def kinds_text(results: Sequence[RowResult]) -> list[str]:
    """The largest error of each kind of parameter over the rows."""
    worst: dict[str, float] = {}
    for row in results:
        worst |= {kind: max(error, worst.get(kind, 0.0)) for kind, error in row.parts.items()}
    return [f"off by at most: {', '.join(f'{kind} {error:.0e}' for kind, error in worst.items())}"] if worst else []


def cut_text(setting: Setting, name: str, length: float, distance: float) -> str:
    """A figure without a verdict: the definition of this loss holds the micro-batch."""
    layout = setting.layout
    ranks = f" on each of {layout.data} data-parallel ranks" if layout.data > 1 else ""
    return (
        f"cut: the gradient of {name} in {layout.num_microbatches} micro-batches{ranks} is x {length:.4g} as long as in one, "
        f"and off by {distance:.2g}"
    )
