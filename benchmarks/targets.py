"""The targets of the benchmarks, and by how much a run meets or misses them; each is judged by its worst case.

A target is met if it is met on each of its cases. A void case, or a missing peer, is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.measure import OK
from benchmarks.peers import (
    FAST_LLM,
    LIGER,
    LIGER_HEAD,
    LIGER_PARALLEL,
    LIGER_SCALED,
    LIGER_VOCAB_PARALLEL,
    MEGATRON,
    MEGATRON_UNFUSED,
    QUACK,
    SLIME,
    VERL_HEAD,
)
from benchmarks.problems import GRADIENT, HEAD_MEMORY, STATISTICS
from benchmarks.providers import (
    CPU_OURS,
    EAGER,
    FORWARD,
    FUSED,
    FUSED_APART,
    FUSED_SCALED,
    FUSED_SMALL,
    ONE_READ,
    OURS,
    OURS_ENTROPY,
    SHIPPED,
    UNFUSED,
)

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
GIB = 2.0**30

Values = Callable[[list[dict]], Iterator[tuple[str, float]]]  # of all cases: the title of a case, its value


@dataclass(frozen=True, slots=True)
class Target:
    """`values(cases)` gives a number for each case of the target.

    predicted: the worst case on an H200, by the model of docs/benchmarks/README.md; None: the target has been measured.
    """

    name: str
    direction: str  # ">=" or "<="
    limit: float
    values: Values
    predicted: float | None = None


def judge(target: Target, cases: list[dict]) -> dict:
    """worst and best of the cases; margin: the worst against the limit, above 0 where it is met, as a share of the limit."""
    verdict = {"name": target.name, "direction": target.direction, "limit": target.limit, "predicted": target.predicted}
    verdict |= {"verdict": NOT_MEASURED}
    verdict |= {"worst": None, "worst_case": None, "best": None, "margin": None, "num_cases": 0}
    values = sorted(target.values([case for case in cases if not case["is_void"]]), key=lambda pair: pair[1])
    if not values:
        return verdict
    (worst_case, worst), (_, best) = (values[0], values[-1]) if target.direction == ">=" else (values[-1], values[0])
    margin = (worst - target.limit) / target.limit * (1 if target.direction == ">=" else -1)
    verdict |= {"verdict": MET if margin >= 0 else MISSED, "worst": worst, "worst_case": worst_case, "best": best}
    return verdict | {"margin": margin, "num_cases": len(values)}


def judge_all(kind: str, device_kind: str, cases: list[dict]) -> list[dict]:
    return [judge(target, cases) for target in TARGETS[kind][device_kind]]


def number(case: dict, provider: str, key: str) -> float | None:
    """The number in the row of a provider, or of the shipped configuration. None if it did not run."""
    is_it = lambda name: name.endswith(SHIPPED) if provider == SHIPPED else name == provider  # noqa: E731
    return next((row[key] for row in case["rows"] if row["status"] == OK and is_it(row["provider"])), None)


def chosen(cases: list[dict], shape: dict) -> Iterator[dict]:
    """The cases with these values in their shape. A tuple means one of its values."""
    return (case for case in cases if all(case["shape"][k] in (v if isinstance(v, tuple) else (v,)) for k, v in shape.items()))


def each(provider: str, key: str, shape: dict, over: str | None = None, unit: float = 1.0) -> Values:
    """A number of a provider on each chosen case; `over`: divided by that of another provider there."""

    def values(cases: list[dict]) -> Iterator[tuple[str, float]]:
        for case in chosen(cases, shape):
            value, base = number(case, provider, key), unit if over is None else number(case, over, key)
            if value is not None and base is not None:
                yield case["title"], value / base

    return values


def time_over(provider: str, base: str, shape: dict) -> Values:
    return each(provider, "median_ms", shape, over=base)


def work_over(provider: str, base: str, shape: dict) -> Values:
    """On a CPU: the least CPU time of the process. Other work on a shared machine moves wall times and medians too much."""
    return each(provider, "least_host_ms", shape, over=base)


def across(provider: str, shape: dict, base_shape: dict, same: tuple[str, ...]) -> Values:
    """A provider's time on each chosen case over its time on the base case that has the `same` in its shape."""

    def values(cases: list[dict]) -> Iterator[tuple[str, float]]:
        key_of = lambda case: tuple(case["shape"][name] for name in same)  # noqa: E731
        bases = {key_of(case): number(case, provider, "median_ms") for case in chosen(cases, base_shape)}
        for case in chosen(cases, shape):
            value, base = number(case, provider, "median_ms"), bases.get(key_of(case))
            if value is not None and base is not None:
                yield case["title"], value / base

    return values


LOSS = {"kind": "loss", "size": "large"}
DENSE, HALF, FEW_ROWS = LOSS | {"is_dense": True}, LOSS | {"masked": 0.5}, {"kind": "loss", "size": "few rows"}
PLAIN_KERNEL = {"kind": "kernel", "size": "large", "with_entropy": False}
K1, K1_ENTROPY = PLAIN_KERNEL | {"kernel": STATISTICS}, PLAIN_KERNEL | {"kernel": STATISTICS, "with_entropy": True}
K4 = PLAIN_KERNEL | {"kernel": GRADIENT}
HEAD = {"kind": "head", "size": "large"}
DENSE_HEAD = HEAD | {"is_dense": True, "computes_twice": False}
# Every row is in every matmul, and a document shares its chunk with others.
PLAIN = HEAD | {"is_dense": True, "with_kl": False, "documents": 8}
MEMORY = PLAIN | {name: getattr(HEAD_MEMORY, name) for name in ("num_tokens", "hidden_size", "vocab_size")}
H_2048, H_4096, H_8192, H_4096_8192 = (DENSE_HEAD | {"hidden_size": size} for size in (2048, 4096, 8192, (4096, 8192)))
MASKED, CLIPPED, SAME = (
    HEAD | {"masked": 0.3},
    HEAD | {"clipped": 0.3},
    ("num_tokens", "hidden_size", "vocab_size", "loss", "dtype"),
)
THREE, FOUR, EXTRA = "over_three_matmuls", "over_four_matmuls", "peak_extra_bytes"

LOSS_TARGETS = (
    Target(
        "statistics kernel, share of the measured copy bandwidth", ">=", 0.90, each(SHIPPED, "copy_fraction", K1), predicted=0.93
    ),
    Target(
        "statistics kernel with entropy, time over without",
        "<=",
        1.05,
        across(SHIPPED, K1_ENTROPY, K1, ("num_tokens", "num_columns")),
        predicted=1.02,
    ),
    Target(
        "gradient kernel in place, share of the measured copy bandwidth",
        ">=",
        0.92,
        each(SHIPPED, "copy_fraction", K4),
        predicted=0.95,
    ),
    Target(
        "loss forward and backward, time over 6 bytes a logit at copy bandwidth",
        "<=",
        1.12,
        each(OURS, "floor_ratio", DENSE),
        predicted=1.21,
    ),
    Target(
        "token-level loss with one read, time over 6 bytes a logit at copy bandwidth",
        "<=",
        0.80,
        each(ONE_READ, "floor_ratio", DENSE),
        predicted=0.91,
    ),
    Target("loss with entropy, time over without", "<=", 1.05, time_over(OURS_ENTROPY, OURS, DENSE), predicted=1.01),
    Target("extra memory over the logits' size", "<=", 0.05, each(OURS, "memory_over_logits", LOSS), predicted=0.01),
    # At sequence level Liger reads its logits once more than at token level: 8 bytes and not 6.
    Target("Liger's time over ours, sequence level", ">=", 1.35, time_over(LIGER, OURS, DENSE | {"loss": "gspo"}), predicted=1.5),
    Target("Liger's time over ours, token level", ">=", 1.0, time_over(LIGER, OURS, DENSE | {"loss": "grpo"}), predicted=1.1),
    Target(
        "Liger's time over ours with one read, token level",
        ">=",
        1.3,
        time_over(LIGER, ONE_READ, DENSE | {"loss": "grpo"}),
        predicted=1.53,
    ),
    Target("Fast-LLM's time over ours", ">=", 1.0, time_over(FAST_LLM, OURS, DENSE), predicted=1.07),
    Target("Fast-LLM's time over ours, half of the rows masked", ">=", 1.3, time_over(FAST_LLM, OURS, HALF), predicted=1.8),
    Target("Fast-LLM's time over ours, at most 128 rows", ">=", 2.0, time_over(FAST_LLM, OURS, FEW_ROWS), predicted=2.0),
    # Half the memory. The limit leaves one part in a hundred for the [T] vectors beside the logits.
    Target(
        "our peak memory with the logits over Fast-LLM's",
        "<=",
        0.505,
        each(OURS, "peak_bytes", LOSS, over=FAST_LLM),
        predicted=0.502,
    ),
    Target(
        "Liger vocab-parallel CE and torch, time over ours", ">=", 2.5, time_over(LIGER_VOCAB_PARALLEL, OURS, LOSS), predicted=3.0
    ),
    Target("Megatron fused CE and torch, time over ours", ">=", 5.0, time_over(MEGATRON, OURS, LOSS), predicted=8.8),
)
HEAD_TARGETS = (
    Target("forward and backward over three matmuls, H 4096", "<=", 1.15, each(FUSED, THREE, H_4096), predicted=1.04),
    Target("forward and backward over three matmuls, H 2048", "<=", 1.20, each(FUSED, THREE, H_2048), predicted=1.07),
    Target("forward and backward over three matmuls, H 8192", "<=", 1.12, each(FUSED, THREE, H_8192), predicted=1.02),
    Target(
        "statistics and gradient apart, time over one kernel", ">=", 1.0, time_over(FUSED_APART, FUSED, DENSE_HEAD), predicted=1.005
    ),
    Target("forward and backward over four matmuls", "<=", 0.90, each(FUSED, FOUR, H_4096_8192), predicted=0.78),
    Target("forward only over one matmul", "<=", 1.10, each(FORWARD, "over_one_matmul", PLAIN), predicted=1.1),
    Target("30 % of the rows masked, time over dense", "<=", 0.78, across(FUSED, MASKED, PLAIN, SAME), predicted=0.71),
    Target("30 % of the rows clipped, time over dense", "<=", 0.86, across(FUSED, CLIPPED, PLAIN, SAME), predicted=0.81),
    Target("verl's time over ours", ">=", 1.8, time_over(VERL_HEAD, FUSED, PLAIN), predicted=2.1),
    Target("Liger's fused linear GRPO, time over ours", ">=", 4.0, time_over(LIGER_HEAD, FUSED, PLAIN), predicted=7),
    Target("Liger's fused scaled CE and torch, time over ours", ">=", 1.15, time_over(LIGER_SCALED, FUSED, PLAIN), predicted=1.3),
    Target("QuACK's linear cross-entropy, time over ours", ">=", 0.92, time_over(QUACK, FUSED, PLAIN), predicted=0.88),
    Target(
        "QuACK's linear cross-entropy, time over ours with scaled exp",
        ">=",
        0.92,
        time_over(QUACK, FUSED_SCALED, PLAIN),
        predicted=0.87,
    ),
    Target(
        "Liger's tensor-parallel scaled CE and torch, time over ours",
        ">=",
        1.15,
        time_over(LIGER_PARALLEL, FUSED, PLAIN),
        predicted=1.3,
    ),
    Target("extra memory at T 16384, H 4096, V 128256, GiB", "<=", 4.2, each(FUSED, EXTRA, MEMORY, unit=GIB), predicted=4.1),
    Target(
        "extra memory there into main_grad, 4096 rows, GiB", "<=", 2.3, each(FUSED_SMALL, EXTRA, MEMORY, unit=GIB), predicted=1.2
    ),
)
CPU_HEAD_TARGETS = (
    Target("CPU: time over the unfused path", "<=", 1.1, work_over(FUSED, UNFUSED, {"is_dense": True})),
    Target("CPU: extra memory over the unfused path's", "<=", 0.5, each(FUSED, "memory_over_unfused", {})),
)
CPU_TARGETS = tuple(
    target
    for what, shape in (("log-probabilities", {"kind": "cpu"}), ("the loss", {"kind": "loss"}))
    for target in (
        Target(f"{what}: time over eager's", "<=", 0.65, work_over(CPU_OURS, EAGER, shape)),
        Target(f"{what}: Megatron's time over ours", ">=", 1.0, work_over(MEGATRON_UNFUSED, CPU_OURS, shape)),
        Target(f"{what}: slime's time over ours", ">=", 1.0, work_over(SLIME, CPU_OURS, shape)),
        Target(f"{what}: extra memory over the logits' size", "<=", 1.05, each(CPU_OURS, "memory_over_logits", shape)),
    )
)
TARGETS = {
    "cpu": {"cpu": CPU_TARGETS},
    "losses": {"cuda": LOSS_TARGETS, "cpu": LOSS_TARGETS},
    "head": {"cuda": HEAD_TARGETS, "cpu": CPU_HEAD_TARGETS},
}
