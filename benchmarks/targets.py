"""The targets of the benchmarks, and by how much a run meets or misses them; each is judged by its worst case.

A target is met if it is met on each of its cases. A void case, or a missing peer, is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import peers
from benchmarks.measure import OK
from benchmarks.problems import GRADIENT, HEAD_MEMORY, STATISTICS
from benchmarks.providers import CPU_OURS, EAGER, FORWARD, FUSED, FUSED_SMALL, ONE_READ, OURS, OURS_ENTROPY, SHIPPED, UNFUSED

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
GIB = 2.0**30

Values = Callable[[list[dict]], Iterator[tuple[str, float]]]  # of all cases: the title of a case, its value


@dataclass(frozen=True, slots=True)
class Target:
    """`values(cases)` gives a number for each case of the target."""

    name: str
    direction: str  # ">=" or "<="
    limit: float
    values: Values


def judge(target: Target, cases: list[dict]) -> dict:
    """worst and best of the cases; margin: the worst against the limit, above 0 where it is met, as a share of the limit."""
    found = {"name": target.name, "direction": target.direction, "limit": target.limit, "verdict": NOT_MEASURED}
    found |= {"worst": None, "worst_case": None, "best": None, "margin": None, "num_cases": 0}
    values = sorted(target.values([case for case in cases if not case["is_void"]]), key=lambda pair: pair[1])
    if not values:
        return found
    (worst_case, worst), (_, best) = (values[0], values[-1]) if target.direction == ">=" else (values[-1], values[0])
    margin = (worst - target.limit) / target.limit * (1 if target.direction == ">=" else -1)
    found |= {"verdict": MET if margin >= 0 else MISSED, "worst": worst, "worst_case": worst_case, "best": best}
    return found | {"margin": margin, "num_cases": len(values)}


def judge_all(kind: str, device_kind: str, cases: list[dict]) -> list[dict]:
    return [judge(target, cases) for target in TARGETS.get((kind, device_kind), ())]


def number(case: dict, provider: str, key: str) -> float | None:
    """The number in the row of a provider, or of the shipped configuration. None if it did not run."""
    is_it = lambda name: name.endswith(SHIPPED) if provider == SHIPPED else name == provider  # noqa: E731
    return next((row[key] for row in case["rows"] if row["status"] == OK and is_it(row["provider"])), None)


def each(provider: str, key: str, shape: dict, over: str | None = None, unit: float = 1.0) -> Values:
    """A number of a provider on each case with this in its shape; `over`: divided by that of another provider there."""

    def values(cases: list[dict]) -> Iterator[tuple[str, float]]:
        for case in cases:
            if shape.items() <= case["shape"].items():
                value, base = number(case, provider, key), unit if over is None else number(case, over, key)
                if value is not None and base is not None:
                    yield case["title"], value / base

    return values


def time_over(provider: str, base: str, shape: dict) -> Values:
    return each(provider, "median_ms", shape, over=base)


def work_over(provider: str, base: str, shape: dict) -> Values:
    """On a CPU: the least CPU time of the process. Other work on a shared machine moves wall times and medians too much."""
    return each(provider, "least_host_ms", shape, over=base)


LOSS = {"kind": "loss", "size": "large"}
DENSE, HALF, FEW_ROWS = LOSS | {"is_dense": True}, LOSS | {"masked": 0.5}, {"kind": "loss", "size": "few rows"}
GRPO, GSPO = DENSE | {"loss": "grpo"}, DENSE | {"loss": "gspo"}
KERNEL = {"kind": "kernel", "size": "large"}
# Every row is in every matmul, and a document shares its chunk with others.
HEAD = {"kind": "head", "size": "large", "is_dense": True, "documents": 8}
MEMORY = HEAD | {name: getattr(HEAD_MEMORY, name) for name in ("num_tokens", "hidden_size", "vocab_size")}
THREE, EXTRA = "over_three_matmuls", "peak_extra_bytes"

LOSS_TARGETS = (
    Target(
        "statistics kernel, share of copy bandwidth", ">=", 0.90, each(SHIPPED, "copy_fraction", KERNEL | {"kernel": STATISTICS})
    ),
    Target("gradient kernel, share of copy bandwidth", ">=", 0.92, each(SHIPPED, "copy_fraction", KERNEL | {"kernel": GRADIENT})),
    Target("loss, time over 6 bytes a logit at copy bandwidth", "<=", 1.12, each(OURS, "floor_ratio", DENSE)),
    Target("loss with one read, time over 6 bytes a logit", "<=", 0.80, each(ONE_READ, "floor_ratio", DENSE)),
    Target("loss with entropy, time over without", "<=", 1.05, time_over(OURS_ENTROPY, OURS, DENSE)),
    Target("extra memory over the logits' size", "<=", 0.05, each(OURS, "memory_over_logits", LOSS)),
    # At sequence level Liger reads its logits once more than at token level: 8 bytes and not 6.
    Target("Liger's time over ours, sequence level", ">=", 1.35, time_over(peers.LIGER, OURS, GSPO)),
    Target("Liger's time over ours with one read, token level", ">=", 1.3, time_over(peers.LIGER, ONE_READ, GRPO)),
    Target("Fast-LLM's time over ours", ">=", 1.0, time_over(peers.FAST_LLM, OURS, DENSE)),
    Target("Fast-LLM's time over ours, half of the rows masked", ">=", 1.3, time_over(peers.FAST_LLM, OURS, HALF)),
    Target("Fast-LLM's time over ours, at most 128 rows", ">=", 2.0, time_over(peers.FAST_LLM, OURS, FEW_ROWS)),
    # Half the memory. The limit leaves one part in a hundred for the [T] vectors beside the logits.
    Target("our peak memory with the logits over Fast-LLM's", "<=", 0.505, each(OURS, "peak_bytes", LOSS, over=peers.FAST_LLM)),
    Target("Megatron's fused CE and torch, time over ours", ">=", 5.0, time_over(peers.MEGATRON, OURS, LOSS)),
)
HEAD_TARGETS = (
    *(
        Target(f"head over three matmuls, H {size}", "<=", limit, each(FUSED, THREE, HEAD | {"hidden_size": size}))
        for size, limit in ((2048, 1.20), (4096, 1.15), (8192, 1.12))
    ),
    Target("forward only over one matmul", "<=", 1.10, each(FORWARD, "over_one_matmul", HEAD)),
    Target("verl's time over ours", ">=", 1.8, time_over(peers.VERL_HEAD, FUSED, HEAD)),
    Target("Liger's fused scaled CE and torch, time over ours", ">=", 1.15, time_over(peers.LIGER_SCALED, FUSED, HEAD)),
    Target("extra memory at T 16384, H 4096, V 128256, GiB", "<=", 4.2, each(FUSED, EXTRA, MEMORY, unit=GIB)),
    Target("extra memory there into main_grad, 4096 rows, GiB", "<=", 2.3, each(FUSED_SMALL, EXTRA, MEMORY, unit=GIB)),
)
CPU_HEAD_TARGETS = (
    Target("time over the unfused path", "<=", 1.1, work_over(FUSED, UNFUSED, {})),
    Target("extra memory over the unfused path's", "<=", 0.5, each(FUSED, "memory_over_unfused", {})),
)
CPU_TARGETS = tuple(
    target
    for what, shape in (("log-probabilities", {"kind": "cpu"}), ("the loss", {"kind": "loss"}))
    for target in (
        Target(f"{what}: time over eager's", "<=", 0.65, work_over(CPU_OURS, EAGER, shape)),
        Target(f"{what}: Megatron's time over ours", ">=", 1.0, work_over(peers.MEGATRON_UNFUSED, CPU_OURS, shape)),
        Target(f"{what}: slime's time over ours", ">=", 1.0, work_over(peers.SLIME, CPU_OURS, shape)),
        Target(f"{what}: extra memory over the logits' size", "<=", 1.05, each(CPU_OURS, "memory_over_logits", shape)),
    )
)
TARGETS = {
    ("losses", "cuda"): LOSS_TARGETS,
    ("losses", "cpu"): LOSS_TARGETS,
    ("head", "cuda"): HEAD_TARGETS,
    ("head", "cpu"): CPU_HEAD_TARGETS,
    ("cpu", "cpu"): CPU_TARGETS,
}
