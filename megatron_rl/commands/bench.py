"""`megatron-rl bench KIND`: ours beside what it replaces, in one run; it must never time a wrong result."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_rl.commands import bench_cpu


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    line = "Log-probabilities forward and backward on this CPU against eager log_softmax + gather."
    bench_cpu.add_arguments(kinds.add_parser("cpu", help=line, description=line, allow_abbrev=False))


def run(args: Namespace) -> int:
    return bench_cpu.run(args)
