"""The shapes of `bench head`, and their inputs: hidden states, a head, documents. It must never time or judge a provider.

Logits are below 1, so that 16-bit ones are off by some 2e-4; rows of the head share a part, which cancels in the gradient of
hidden states where probabilities add up to 1, and shows where they do not. Advantages are never 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.commands.bench.harness import takes_part
from megatron_rl.errors import ConfigError
from megatron_rl.layout.packing import spread
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.ops.linear_schedule import Plan, document_bins, schedule_documents, schedule_rows

NUM_SETS = 3
# Standard deviation of a logit, of its own and of what the row has in common.
LOGIT_SIZE = 0.1
# Of float32 work at a time; on a CPU less than any provider takes.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**26}
# A GSPO document's mean log-ratio, in the middle of its clip of 3e-4 and 4e-4, which the rounding of 16-bit logits does not leave.
GSPO_LOG_RATIO, GRPO_LOG_RATIO = 5e-5, 0.02
BEYOND_THE_CLIP = 0.01
KL_COEFFICIENT = 0.1


@dataclass(frozen=True, slots=True)
class HeadCase:
    num_tokens: int
    hidden_size: int
    vocab_size: int  # columns here
    loss: str = "gspo"
    documents: int = 8
    masked: float = 0.0  # of each document's tokens, its first
    clipped: float = 0.0  # of the documents (GSPO) or tokens (GRPO)
    with_kl: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_tokens, self.hidden_size, self.vocab_size

    @property
    def title(self) -> str:
        extras = [f"{self.masked:.0%} masked"] if self.masked else []
        extras += [f"{self.clipped:.0%} clipped"] if self.clipped else []
        extras += ["KL"] if self.with_kl else []
        dtype = str(self.dtype).removeprefix("torch.")
        packing = "one document" if self.documents == 1 else f"{self.documents} documents"
        shape = f"T {self.num_tokens}, H {self.hidden_size}, V {self.vocab_size}"
        return ", ".join([f"{self.loss} {shape}", dtype, packing, *extras])

    @property
    def is_dense(self) -> bool:
        return not (self.masked or self.clipped)

    @property
    def lengths(self) -> list[int]:
        """Nearly equal."""
        bounds = [self.num_tokens * number // self.documents for number in range(self.documents + 1)]
        return [stop - start for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]

    def as_dict(self) -> dict:
        names = ("num_tokens", "hidden_size", "vocab_size", "loss", "documents", "masked", "clipped", "with_kl")
        return {name: getattr(self, name) for name in names} | {"dtype": str(self.dtype).removeprefix("torch.")}


def variants(case: HeadCase) -> tuple[HeadCase, ...]:
    """One shape, eight documents: long ones, KL, a token-level loss, masked and clipped rows."""
    return (
        case,
        replace(case, loss="grpo"),
        replace(case, masked=0.3),
        replace(case, clipped=0.3, documents=10),
        replace(case, loss="grpo", clipped=0.3),
        replace(case, documents=1),
        replace(case, documents=1, with_kl=True),
    )


MAIN = HeadCase(8192, 4096, 131072)
MEMORY = HeadCase(16384, 4096, 128256)
QUICK = (
    *variants(MAIN),
    MEMORY,
    HeadCase(16384, 2048, 151936),
    HeadCase(8192, 8192, 128256),
    HeadCase(4096, 4096, 128256),
    HeadCase(16384, 4096, 16032),  # one of 8 shards of 128256, alone
)
FULL = (
    *QUICK,
    replace(MAIN, loss="grpo", masked=0.3),
    replace(MAIN, with_kl=True),
    replace(MEMORY, documents=1),
    HeadCase(16384, 2048, 151936, loss="grpo"),
    HeadCase(8192, 8192, 128256, documents=1),
    HeadCase(2048, 4096, 131072),
    HeadCase(128, 4096, 128256, documents=1),
)
CPU_MAIN = HeadCase(4096, 512, 32000, dtype=torch.float32)
PRESETS = {"cuda": {"quick": QUICK, "full": FULL}, "cpu": {"quick": (CPU_MAIN,), "full": variants(CPU_MAIN)}}


def cases_of(device_kind: str, preset: str, shape: str | None) -> list[HeadCase]:
    """shape: T,H,V in place of the preset's first, whose variants stay. Raises ConfigError."""
    cases = list(PRESETS[device_kind][preset])
    if shape is None:
        return cases
    try:
        num_tokens, hidden_size, vocab_size = (int(number) for number in shape.split(","))
    except ValueError:
        raise ConfigError(f"--shape {shape} must be T,H,V: three whole numbers, such as 8192,4096,131072") from None
    if min(hidden_size, vocab_size - 1) < 1 or num_tokens < 20:
        raise ConfigError(f"--shape {shape}: at least 20 tokens, so that 10 documents hold two each, and 2 columns")
    chosen = [case for case in cases if case.shape == cases[0].shape]
    return [replace(case, num_tokens=num_tokens, hidden_size=hidden_size, vocab_size=vocab_size) for case in chosen]


def plan_of(case: HeadCase, rows: int) -> tuple[str, int]:
    """(the plans that ours takes with chunks of up to `rows` rows, number of chunks)."""
    counts = [length - round(case.masked * length) for length in case.lengths]
    if case.loss == "grpo":
        items = schedule_rows(torch.arange(sum(counts)), rows)
    else:
        numbers = torch.arange(sum(counts)).split(counts)
        idle = [False] * len(counts)
        items = schedule_documents(document_bins(counts, rows), numbers, rows, has_row_terms=case.with_kl, is_idle=idle)
    used = {item.plan for item in items}
    return "+".join(plan for plan in Plan if plan in used), sum(len(item.chunks) for item in items)


@dataclass(frozen=True, slots=True)
class HiddenSet:
    """One micro-batch of a shape. `log_probs` is None in a process that is not to compute anything before its step."""

    hidden: Tensor  # [T, H]
    labels: Tensor  # [T] int64
    log_probs: Tensor | None  # [T] float64, from float32 logits


class HeadInputs:
    """What cases of one shape share: the head and num_sets hidden states."""

    def __init__(self, case: HeadCase, device: torch.device, *, num_sets: int = NUM_SETS, seed: int = 0, with_truth: bool = True):
        self.device = device
        generator = torch.Generator(device).manual_seed(seed)
        normal = lambda *shape: torch.empty(*shape, dtype=case.dtype, device=device).normal_(generator=generator)  # noqa: E731
        self.weight = normal(case.vocab_size, case.hidden_size)
        self.weight.add_(normal(1, case.hidden_size)).mul_(LOGIT_SIZE / math.sqrt(case.hidden_size))
        self.sets = []
        for _ in range(num_sets):
            hidden = normal(case.num_tokens, case.hidden_size)
            labels = torch.randint(case.vocab_size, (case.num_tokens,), generator=generator, device=device)
            self.sets.append(HiddenSet(hidden, labels, self._log_probs(hidden, labels) if with_truth else None))

    def _log_probs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight = self.weight.float()
        found = []
        for rows, label in zip(hidden.split(self.chunk_rows), labels.split(self.chunk_rows), strict=True):
            logits = rows.float() @ weight.t()
            found.append((logits.gather(1, label[:, None])[:, 0].double()) - logits.logsumexp(-1).double())
        return torch.cat(found)

    @property
    def chunk_rows(self) -> int:
        return max(1, CHUNK_BYTES[self.device.type] // (4 * self.weight.shape[0]))


@dataclass(frozen=True, slots=True)
class InputSet:
    hidden: Tensor  # [T, H]
    labels: Tensor  # [T]
    old_log_probs: Tensor  # [T] float32
    ref_log_probs: Tensor  # [T] float32
    advantages: Tensor  # [N] float32
    log_probs: Tensor | None  # [T] float64


@dataclass(slots=True)
class Vectors:
    """[T] numbers of one input set as lists, for a process that does not compute them."""

    old_log_probs: list[float]
    ref_log_probs: list[float]


class HeadBatch:
    """Documents, weights and old log-probabilities of a case over the inputs of its shape; load(index) chooses a set."""

    def __init__(self, case: HeadCase, inputs: HeadInputs, *, seed: int = 0, vectors: Vectors | None = None):
        self.case, self.inputs, self.device = case, inputs, inputs.device
        self.num_sets, self.weight, self.lengths = len(inputs.sets), inputs.weight, case.lengths
        lengths = torch.tensor(self.lengths)
        self.host_cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)
        self.host_loss_mask = torch.cat([torch.arange(length) >= round(case.masked * length) for length in self.lengths])
        documents = torch.repeat_interleave(torch.arange(case.documents), lengths)
        counts = torch.bincount(documents[self.host_loss_mask], minlength=case.documents)
        self.num_unmasked = int(counts.sum())
        on_device = lambda tensor: tensor.to(self.device)  # noqa: E731
        self.documents, self.token_counts = on_device(documents), on_device(counts)
        self.loss_mask, self.cu_seqlens = on_device(self.host_loss_mask), on_device(self.host_cu_seqlens)
        # Token mean, of the policy's term and of the KL term: the one aggregation that every peer has.
        self.token_weights = torch.full((case.documents,), 1.0 / self.num_unmasked, device=self.device)
        self.clip_low, self.clip_high = get_policy_loss(case.loss).clip_ratios
        self.sets = [self._draw(seed * 1000 + index, index, vectors) for index in range(self.num_sets)]
        self.current = self.sets[0]

    def load(self, index: int) -> None:
        self.current = self.sets[index]

    def _draw(self, seed: int, index: int, vectors: Vectors | None) -> InputSet:
        case, shared, generator = self.case, self.inputs.sets[index], torch.Generator(self.device).manual_seed(seed)
        signs = 1.0 - 2.0 * (torch.arange(case.documents, device=self.device) % 4 == 3)
        advantages = signs * (0.5 + torch.rand(case.documents, generator=generator, device=self.device))
        if vectors is not None:
            old, ref = (torch.tensor(numbers, device=self.device) for numbers in (vectors.old_log_probs, vectors.ref_log_probs))
        else:
            old = shared.log_probs - self._log_ratios(advantages, generator)
            ref = old + 0.05 * torch.randn(old.shape, generator=generator, device=self.device)
        return InputSet(shared.hidden, shared.labels, old.float(), ref.float(), advantages, shared.log_probs)

    def _log_ratios(self, advantages: Tensor, generator: torch.Generator) -> Tensor:  # [T] float64
        """Inside the clip, but for the share of the case: those lie beyond it on the side where their gradient ends."""
        case = self.case
        noise = GRPO_LOG_RATIO * torch.randn(case.num_tokens, generator=generator, device=self.device, dtype=torch.float64)
        beyond = torch.where(
            advantages > 0, math.log1p(self.clip_high) + BEYOND_THE_CLIP, math.log1p(-self.clip_low) - BEYOND_THE_CLIP
        ).double()  # [N]
        if case.loss == "grpo":
            order = torch.randperm(case.num_tokens, generator=generator, device=self.device)
            is_clipped = order < round(case.clipped * case.num_tokens)
            return torch.where(is_clipped, spread(beyond, self.documents), noise)
        num_clipped = round(case.clipped * case.documents)
        is_clipped = torch.tensor([takes_part(number, num_clipped, case.documents) for number in range(case.documents)])
        targets = torch.where(is_clipped.to(self.device), beyond, GSPO_LOG_RATIO)
        return noise + spread(targets - self.mean(noise), self.documents)

    def mean(self, values: Tensor) -> Tensor:  # [T] -> [N], over unmasked tokens
        values = torch.where(self.loss_mask, values, 0.0)
        return torch.zeros_like(self.token_counts, dtype=values.dtype).index_add_(0, self.documents, values) / self.token_counts
