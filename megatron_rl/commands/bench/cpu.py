"""`megatron-rl bench cpu`: time and extra memory of log-probabilities, forward and backward, against eager torch, side by side.

Times are interleaved in one process and reported as ratios: absolute times of a shared machine mean little. Memory is the peak
resident size above inputs, each implementation in a process of its own, because a process never gives memory back.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.commands.bench.memory import peak_above_inputs
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops.log_probs import vocab_parallel_log_probs

Implementation = Callable[[Tensor, Tensor], Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Gate: relative Frobenius error of the gradient on sampled rows. float32 sums of 32 000 exponentials are exact to 1e-6; one
# rounding of each gradient element to bfloat16 is 2^-9 at most.
GATE = {"float32": 1e-5, "bfloat16": 4e-3}
GATE_ROWS = 64


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2048, help="Tokens. Default: 2048.")
    parser.add_argument("--vocab-size", type=int, default=32000, help="Columns. Default: 32000.")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="Of the logits. Default: float32.")
    parser.add_argument("--rounds", type=int, default=9, help="Interleaved repetitions; the median counts. Default: 9.")
    parser.add_argument("--threads", type=int, default=1, help="Threads of torch. Default: 1.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")


def run(args: Namespace) -> int:
    """Exit code 0, or 1 when an implementation fails the gate."""
    for name in ("rows", "vocab_size", "rounds", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    torch.set_num_threads(args.threads)
    errors = {name: gradient_error(function, args) for name, function in IMPLEMENTATIONS.items()}
    passed = {name: error <= GATE[args.dtype] for name, error in errors.items()}
    timings = measure_time({name: IMPLEMENTATIONS[name] for name, good in passed.items() if good}, args)
    rows = {}
    for name in IMPLEMENTATIONS:
        rows[name] = {"gradient_error": errors[name], "gate": "PASS" if passed[name] else "FAIL"}
        if passed[name]:
            rows[name] |= timings[name] | {"extra_megabytes": extra_memory(name, args) / 1e6}
    add_ratios(rows)
    result = {"rows": args.rows, "vocab_size": args.vocab_size, "dtype": args.dtype, "threads": args.threads, **versions()}
    print(json.dumps({**result, "results": rows}) if args.json else table(result, rows))
    return 0 if all(passed.values()) else 1


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1, dtype=torch.float32).gather(1, labels[:, None])[:, 0]


def ours(logits: Tensor, labels: Tensor) -> Tensor:
    return vocab_parallel_log_probs(logits, labels, tp_group=SINGLE)


def ours_inplace(logits: Tensor, labels: Tensor) -> Tensor:
    return vocab_parallel_log_probs(logits, labels, tp_group=SINGLE, inplace=True)


IMPLEMENTATIONS: dict[str, Implementation] = {"eager": eager, "ours": ours, "ours, inplace": ours_inplace}


def make_inputs(args: Namespace) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(args.rows, args.vocab_size, dtype=DTYPES[args.dtype]).normal_(generator=generator)
    return logits, torch.randint(0, args.vocab_size, (args.rows,), generator=generator)


def step(function: Implementation, logits: Tensor, labels: Tensor) -> tuple[float, float, Tensor]:
    """Seconds of forward and of backward, and the gradient of the summed log-probabilities.

    The logits are an operator's output, as in a model: a leaf's gradient would be kept beside them.
    """
    head_output = logits.detach().requires_grad_().view_as(logits)
    started = time.perf_counter()
    loss = function(head_output, labels).sum()
    forward = time.perf_counter() - started
    (gradient,) = torch.autograd.grad(loss, head_output)
    return forward, time.perf_counter() - started - forward, gradient


def gradient_error(function: Implementation, args: Namespace) -> float:
    """Against float64 softmax on sampled rows."""
    logits, labels = make_inputs(args)
    rows = torch.linspace(0, args.rows - 1, min(GATE_ROWS, args.rows)).long()
    expected = -torch.softmax(logits[rows].double(), -1)
    expected[torch.arange(rows.numel()), labels[rows]] += 1.0
    gradient = step(function, logits, labels)[2][rows].double()
    return float((gradient - expected).norm() / expected.norm())


def measure_time(implementations: dict[str, Implementation], args: Namespace) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, after one that is not counted."""
    logits, labels = make_inputs(args)
    pristine = logits.clone()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in implementations}
    for number in range(args.rounds + 1):
        for name, function in implementations.items():
            logits.copy_(pristine)  # the in-place form leaves its gradient there
            forward, backward, _ = step(function, logits, labels)
            if number:
                times[name].append((forward, backward))
    return {
        name: {
            "forward_seconds": statistics.median(forward for forward, _ in pairs),
            "backward_seconds": statistics.median(backward for _, backward in pairs),
            "total_seconds": statistics.median(forward + backward for forward, backward in pairs),
        }
        for name, pairs in times.items()
    }


def extra_memory(name: str, args: Namespace) -> float:
    """Bytes of peak resident memory above what the process held with its inputs, in a fresh process."""
    return peak_above_inputs(_prepare_step, name, args)


def _prepare_step(name: str, args: Namespace) -> Callable[[], object]:
    torch.set_num_threads(args.threads)
    logits, labels = make_inputs(args)
    step(IMPLEMENTATIONS[name], logits[:2, :8].clone(), labels[:2].clamp(max=7))
    return lambda: step(IMPLEMENTATIONS[name], logits, labels)


def add_ratios(rows: dict[str, dict]) -> None:
    base = rows["eager"]
    for row in rows.values():
        if "total_seconds" in row and "total_seconds" in base:
            row["time_ratio"] = row["total_seconds"] / base["total_seconds"]
            row["memory_ratio"] = row["extra_megabytes"] / base["extra_megabytes"]


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}


def table(result: dict, rows: dict[str, dict]) -> str:
    lines = [
        f"log-probabilities of [{result['rows']}, {result['vocab_size']}] {result['dtype']}, forward + backward, "
        f"{result['threads']} thread(s), torch {result['torch']}; ratios are to eager log_softmax + gather in this run",
        f"{'':14s} {'gate':>5s} {'gradient error':>15s} {'forward ms':>11s} {'backward ms':>12s} {'time':>6s} "
        f"{'extra MB':>9s} {'memory':>7s}",
    ]
    for name, row in rows.items():
        line = f"{name:14s} {row['gate']:>5s} {row['gradient_error']:15.1e}"
        if "total_seconds" in row:
            line += (
                f" {row['forward_seconds'] * 1e3:11.1f} {row['backward_seconds'] * 1e3:12.1f} {row['time_ratio']:5.2f}x"
                f" {row['extra_megabytes']:9.0f} {row['memory_ratio']:6.2f}x"
            )
        lines.append(line)
    return "\n".join(lines)
