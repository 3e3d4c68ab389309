"""`megatron-rl bench KIND`: ours beside what it replaces, in one run; it must never time a wrong result."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_rl.commands.bench import cpu, head, losses

KINDS = {
    "cpu": (cpu, "Log-probabilities forward and backward on this CPU against eager log_softmax + gather."),
    "head": (
        head,
        "The loss from hidden states: ours beside bare matmuls, the unfused path and peers; CUDA or CPU.",
    ),
    "losses": (losses, "Losses and their kernels from given logits, beside every peer that is here. Made for CUDA."),
}


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (kind, line) in KINDS.items():
        kind.add_arguments(kinds.add_parser(name, help=line, description=line, allow_abbrev=False))


def run(args: Namespace) -> int:
    kind, _ = KINDS[args.kind]
    return kind.run(args)
