"""Cases of golden_core.py, which stores what the package computes for them. The package is not called here.

Inputs are made from a hash of the case's key: no generator of a library decides them, and no case depends on another one.
Logits and hidden states are multiples of 1/32, so that their products are exact in float32.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from helpers import zigzag
from torch import Tensor

# ------------------------------------------------------------------------------------------------------------------ Cases

CLIPS = {"grpo": (0.1, 0.15), "gspo": (0.02, 0.03), "gspo_token": (0.02, 0.03), "cispo": (0.1, 0.15), "gmpo": (0.1, 0.15)}
# Numbers at which the batches lie on both sides of each bound.
PARAMETERS: dict[str, dict[str, float]] = {
    **dict.fromkeys(("grpo", "gspo", "gspo_token"), {"clip_ratio_c": 1.2}),
    **dict.fromkeys(("cispo", "gmpo", "reinforce", "topr"), {}),
    "sapo": {"sapo_temperature_positive": 1.4, "sapo_temperature_negative": 2.3},
    "dppo_tv": {"divergence_low": 0.01, "divergence_high": 0.015, "ratio_truncation": 1.2},
    "dppo_kl": {"divergence_low": 1e-3, "divergence_high": 2e-3, "ratio_truncation": 1.2},
    "dro": {"log_ratio_penalty": 0.3},
    "vespo": {
        **{"vespo_power_positive": 1.5, "vespo_decay_positive": 0.5},
        **{"vespo_power_negative": 0.7, "vespo_decay_negative": 1.2},
    },
}
OF_SAMPLES, OF_SAMPLER = (
    ("gspo", "gmpo", "vespo"),
    ("dppo_tv", "dppo_kl"),
)  # one ratio a sample; the ratio is to the sampler's policy
BOUNDS_OF_LEVEL = {"token": (0.8, 1.25), "sequence_mean": (0.9, 1.1), "sequence_sum": (0.6, 1.7)}
OPSM = "OPSM"  # samples of negative advantage that have become unlikely are dropped
CORRECTIONS = (
    *("none", OPSM, f"tis token {OPSM}"),
    *(f"{kind} {level}" for kind in ("tis", "icepop", "mask", "seq_mask_tis") for level in BOUNDS_OF_LEVEL),
)
# Unmasked and masked tokens of each document; the largest distance of log-probabilities; rows of padding behind them.
SHAPES = {
    "ragged": ((5, 1, 9, 3, 2, 4), 0.4, 0),
    "padded": ((8, 3, 6), 0.4, 4),
    "empty documents": ((0, 4, 0, 7, 0), 0.4, 2),
    "one-token responses": ((1, 1, 1, 1, 1), 0.4, 0),
    "a masked document": ((4, 3, 5), 0.4, 0),
    "ratios far from 1": ((6, 2, 7), 1.5, 0),
    "ratios beyond the bound": ((4, 1, 6), 24.0, 0),
}
RANKS = {"one rank": (1, 1), "tp 2": (2, 1), "cp 2": (1, 2), "cp 4": (1, 4), "tp 2, cp 2": (2, 2)}
HEADS = ("one chunk", "chunks", "chunks and main_grad", "chunks and main_grad in forward")
AXES: dict[str, Sequence[str]] = {
    "correction": [name for name in CORRECTIONS if name != "seq_mask_tis token"],
    "loss": list(PARAMETERS),
    "route": ["logits", "logits in place", "announced factor", "log-probabilities", *HEADS],
    "shape": list(SHAPES),
    "kl": ["no KL", "k1", "k2", "k3", "k3+", "unbiased"],
    "extra": ["plain", "advantages of tokens", "importance weights", "temperature", "padded vocabulary"],
    "aggregation": ["sample_mean", "row_mean", "prompt_mean", "token_mean", "constant"],
    "ranks": list(RANKS),
    "metrics": ["none", "basic", "with_entropy"],
    "entropy": ["no entropy", "entropy"],
    "policy": ["off-policy", "on-policy"],
    "dtype": ["float32", "float64"],
    "backend": ["torch"],
    "kept": ["all ids"],
}
OF_KEPT = {
    "route": ["logits", "logits in place", "one chunk", "chunks"],
    "extra": ["plain", "temperature", "padded vocabulary"],
    "ranks": ["one rank", "tp 2", "cp 2"],
    "kept": ["the label", "few", "many"],
}


@dataclass(frozen=True)
class Case:
    """A value of each axis. Its key is their names, and `Case.of` reads it."""

    loss: str
    aggregation: str
    correction: str
    kl: str
    entropy: str
    route: str
    shape: str
    extra: str
    ranks: str
    policy: str
    metrics: str
    dtype: str
    backend: str
    kept: str

    def __str__(self) -> str:
        return " | ".join(["loss", *(getattr(self, field.name) for field in fields(self))])

    @classmethod
    def of(cls, key: str) -> Case:
        return cls(*key.split(" | ")[1:])

    def possible(self) -> Case:
        """Without what its loss or its route refuses."""
        found = self
        if self.loss in OF_SAMPLER and self.correction != OPSM:
            found = replace(found, correction="none")
        if self.route == "log-probabilities":
            extra = found.extra if found.extra not in ("temperature", "padded vocabulary") else "plain"
            ranks = found.ranks.replace("tp 2, ", "") if found.ranks != "tp 2" else "one rank"
            metrics = "basic" if found.metrics == "with_entropy" else found.metrics
            found = replace(found, entropy="no entropy", extra=extra, ranks=ranks, metrics=metrics)
        return found


def numbers(key: str) -> Iterator[int]:
    """An endless row of 64-bit numbers: SplitMix64, from a hash of the key."""
    state = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = state
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
        yield mixed ^ (mixed >> 31)


def covering(axes: Mapping[str, Sequence[str]], salt: str) -> list[Case]:
    """Few cases in which each possible pair of values of two axes appears. A case is the one of 20 with most new pairs."""
    drawn, covered, found = numbers(salt), set(), []

    def pairs(case: Case) -> set:
        return {*itertools.combinations([(name, getattr(case, name)) for name in axes], 2)}

    for first, second in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[first], axes[second]):
            wanted = tuple(zip((first, second), pair, strict=True))
            if wanted in covered:
                continue
            tries = [{name: values[next(drawn) % len(values)] for name, values in axes.items()} for _ in range(20)]
            cases = [Case(**{**one, **dict(wanted)}).possible() for one in tries]
            cases = [case for case in cases if wanted in pairs(case)]
            if cases:
                found.append(max(cases, key=lambda case: len(pairs(case) - covered)))
                covered |= pairs(found[-1])
    return list(dict.fromkeys(found))


def keys_of_losses() -> list[str]:
    """Two covers; a quarter of one with kept ids; and in Triton's interpreter a tenth of each loss."""
    cases = [*covering(AXES, "first"), *covering(AXES, "second"), *covering(AXES | OF_KEPT, "kept ids")[::4]]
    in_triton = [case for loss in PARAMETERS for case in [case for case in cases if case.loss == loss][::10]]
    in_triton = [replace(case, backend="triton", dtype="float32") for case in in_triton]
    return list(dict.fromkeys(map(str, [*cases, *in_triton])))


def keys_of_scores() -> list[str]:
    shared = {"loss": "grpo", "correction": "none", "kl": "no KL", "policy": "off-policy", "metrics": "none", "route": "logits"}
    shared |= {"aggregation": "sample_mean", "entropy": "entropy"}
    axes = {name: OF_KEPT[name] for name in ("kept", "extra")} | {"shape": ["ragged", "padded"], "ranks": ["one rank", "tp 2"]}
    precisions = (("torch", "float32"), ("torch", "float64"), ("triton", "float32"))
    cases = [
        Case(**shared, **dict(zip(axes, drawn, strict=True)), backend=backend, dtype=dtype)
        for drawn in itertools.product(*axes.values())
        for backend, dtype in precisions
    ]
    return [f"scores{str(case).removeprefix('loss')}" for case in cases]


def keys_of_counts() -> list[str]:
    """500 steps in all."""
    return [
        f"counts | {aggregation} | {rollouts} | dp {dp}"
        for aggregation in AXES["aggregation"]
        for rollouts in ("samples", "rollouts")
        for dp in (1, 2, 4)
    ]


# ----------------------------------------------------------------------------------------------------------------- Inputs

VOCABULARY, HIDDEN_SIZE = 10, 4


@dataclass(frozen=True)
class Step:
    """The documents of a case, whole, in float64."""

    lengths: Sequence[int]
    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    vectors: dict[str, Tensor]  # [T] each
    labels: Tensor  # [T]
    mask: Tensor  # [T] bool
    advantages: list[float]  # of each document
    kept: list[list[int]]  # of each row, the label among them


def step_of(case: Case) -> Step:
    (lengths, gap, _), drawn = SHAPES[case.shape], numbers(str(case))
    size = sum(lengths)

    def grid(*shape: int, largest: float = 2.0, steps: int = 32) -> Tensor:
        """Multiples of 1 / steps from -largest to largest."""
        count, most = math.prod(shape), round(largest * steps)
        return torch.tensor([next(drawn) % (2 * most + 1) - most for _ in range(count)], dtype=torch.float64).view(shape) / steps

    hidden, weight = grid(size, HIDDEN_SIZE), grid(VOCABULARY, HIDDEN_SIZE, largest=1.0)
    labels = torch.tensor([next(drawn) % VOCABULARY for _ in range(size)], dtype=torch.int64)
    mask = torch.tensor([next(drawn) % 4 > 0 or "one-token" in case.shape for _ in range(size)], dtype=torch.bool)
    if case.shape == "a masked document":
        mask[lengths[0] : lengths[0] + lengths[1]] = False
    kept = []
    for label in labels.tolist():
        most = {"the label": 1, "few": 3}.get(case.kept, VOCABULARY)
        kept.append(sorted({label, *(next(drawn) % VOCABULARY for _ in range(next(drawn) % most))}))
    logits = hidden @ weight.T / temperature_of(case)
    if case.kept != "all ids":
        outside = torch.tensor([[i not in ids for i in range(VOCABULARY)] for ids in kept], dtype=torch.bool)
        logits = logits.masked_fill(outside.view(logits.shape), -math.inf)
    new = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    new = (new * 4096).round() / 4096  # the last bits of torch's logarithm decide no input
    old = (new + grid(size, largest=gap, steps=4096)).clamp(max=-1 / 4096)
    vectors = {
        "new": new,
        "old": old,
        "ref": (new + grid(size, largest=0.5, steps=4096)).clamp(max=-1 / 4096),
        "rollout": ((new if case.policy == "on-policy" else old) + grid(size, largest=0.4, steps=4096)).clamp(max=-1 / 4096),
        "importance": 1 + grid(size, largest=0.5),
        "factors": grid(size, largest=1.0, steps=1),
    }
    return Step(lengths, hidden, weight, vectors, labels, mask, grid(len(lengths)).tolist(), kept)


def temperature_of(case: Case) -> float:
    return 0.5 if case.extra == "temperature" else 1.0


@dataclass(frozen=True)
class Given:
    """What one rank hands to a loss: its slices of the documents, NaN wherever nothing may be read, padding behind them."""

    case: Case
    columns: tuple[int, int]  # of the vocabulary
    rows: Tensor  # [T] int64 in the step, then padding
    live: Tensor  # [T] bool: neither masked nor padding
    hidden: Tensor  # [T, H]
    weight: Tensor  # [columns, H]
    labels: Tensor  # [T]
    mask: Tensor  # [T]: True on padding
    cu_seqlens: Tensor
    advantages: Tensor  # [N] or [T]
    vectors: dict[str, Tensor]  # [T]
    kept: list[list[int]]


def given_to(case: Case, step: Step, tp: tuple[int, int], cp: tuple[int, int]) -> Given:  # (rank, size) each
    starts, dtype = [0, *itertools.accumulate(step.lengths)], getattr(torch, case.dtype)
    documents = [list(range(first, last)) for first, last in itertools.pairwise(starts)]
    slices = [zigzag(document, *cp) for document in documents]
    own, tail = [row for part in slices for row in part], SHAPES[case.shape][2]
    rows = torch.tensor([*own, *[0] * tail], dtype=torch.int64)
    is_own = torch.arange(len(rows)) < len(own)
    live = is_own & step.mask[rows] if len(own) else torch.zeros(len(rows), dtype=torch.bool)

    def of_rows(values: Tensor) -> Tensor:
        taken = values[rows].to(dtype) if len(values) else values.new_zeros(len(rows), *values.shape[1:], dtype=dtype)
        return torch.where(live if taken.dim() == 1 else live[:, None], taken, math.nan)

    vectors = {name: of_rows(values) for name, values in step.vectors.items()}
    advantages = torch.tensor(step.advantages, dtype=dtype)
    if case.extra == "advantages of tokens":
        number = torch.tensor([i for i, part in enumerate(slices) for _ in part] + [0] * tail, dtype=torch.int64)
        factors = 1.0 if case.loss in OF_SAMPLES else vectors["factors"]
        advantages = torch.where(live, advantages[number] * factors, math.nan)
    stored = -(-(VOCABULARY + 3 * (case.extra == "padded vocabulary")) // tp[1])
    columns = (min(tp[0] * stored, VOCABULARY), min((tp[0] + 1) * stored, VOCABULARY))
    weight = torch.full((stored, HIDDEN_SIZE), 0.5, dtype=torch.float64)
    weight[: columns[1] - columns[0]] = step.weight[columns[0] : columns[1]]
    return Given(
        case,
        columns,
        rows,
        live,
        of_rows(step.hidden),
        weight.to(dtype),
        torch.where(live, step.labels[rows], -100) if len(own) else torch.full((len(rows),), -100),
        live | ~is_own,
        torch.tensor([0, *itertools.accumulate(map(len, slices))], dtype=torch.int32),
        advantages,
        vectors,
        [step.kept[row] if is_live else [] for row, is_live in zip(rows.tolist(), live.tolist(), strict=True)],
    )
