"""The shapes of `bench losses`, their inputs, and what is right for them in float64. It must never time or choose a provider.

No document is clipped and no advantage is 0: a clipped row needs no gradient, and which provider skips it is another question.
Under a vocabulary shard every label lies in the shard that is measured: the other ranks' partials are synthetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.commands.bench.harness import Check
from megatron_rl.loss_hub import get_policy_loss

ONE, EIGHT, LOG_NORMAL = "one document", "eight equal documents", "log-normal documents"
NUM_LOG_NORMAL = 16
GATE_ROWS = 64
# log-prob: absolute, from bf16 logits in float32; the worst that a loss should see. Gradient: relative Frobenius norm over sampled
# rows; one rounding to bfloat16 is 2^-9 for each element. Loss: relative to the sum of the tokens' absolute losses.
LOG_PROB_LIMIT, LOSS_LIMIT = 2e-3, 1e-4
GRADIENT_LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
BYTES_PER_ELEMENT_OF_LOGITS = 3  # read in forward; read and written in backward
CHUNK_ELEMENTS = 2**25  # of float64 work: a quarter of a gigabyte at a time
# The mean log-ratio of a GSPO document, well inside its clip of 3e-4 and 4e-4; a GRPO token's standard deviation, inside 0.2.
GSPO_LOG_RATIO, GRPO_LOG_RATIO = 1e-4, 0.02


@dataclass(frozen=True, slots=True)
class LossCase:
    num_tokens: int
    vocab_size: int
    shards: int = 1
    packing: str = EIGHT
    masked: float = 0.0
    loss: str = "gspo"
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_columns(self) -> int:
        return self.vocab_size // self.shards

    @property
    def title(self) -> str:
        shard = "" if self.shards == 1 else f", one of {self.shards} shards"
        masked = "" if not self.masked else f", {self.masked:.0%} masked"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.loss} T {self.num_tokens}, V {self.vocab_size}{shard}, {dtype}, {self.packing}{masked}"

    def as_dict(self) -> dict:
        names = ("num_tokens", "vocab_size", "shards", "num_columns", "packing", "masked", "loss")
        return {name: getattr(self, name) for name in names} | {"dtype": str(self.dtype).removeprefix("torch.")}


MAIN = LossCase(16384, 128256)
QUICK = (
    MAIN,
    LossCase(16384, 128256, masked=0.5),
    LossCase(16384, 128256, shards=8),
    LossCase(4096, 32768),
    LossCase(16384, 151936, packing=LOG_NORMAL),
    LossCase(4096, 50257),
    LossCase(128, 128256),
)
FULL = (
    *QUICK,
    LossCase(16384, 128256, packing=ONE),
    LossCase(16384, 128256, packing=LOG_NORMAL, masked=0.5),
    LossCase(16384, 128256, loss="grpo"),
    LossCase(16384, 128264),  # v % 16 == 8
    LossCase(4096, 128256),
    LossCase(4096, 151936),
    LossCase(16384, 32768),
    LossCase(65536, 32768),
    *(LossCase(num_tokens, 151936, shards=8) for num_tokens in (4096, 16384)),
    *(LossCase(num_tokens, 32768, shards=8) for num_tokens in (4096, 16384, 65536)),
    LossCase(4096, 128256, shards=8),
    LossCase(16384, 151936),
    LossCase(4096, 128256, dtype=torch.float32),
    LossCase(16, 128256, packing=ONE),
)
CPU = (
    LossCase(96, 1000),
    LossCase(64, 1024, shards=8, masked=0.5),
    LossCase(96, 257, packing=LOG_NORMAL, masked=0.5),
    LossCase(64, 512, packing=ONE, loss="grpo", dtype=torch.float32),
)
PRESETS = {"quick": QUICK, "full": FULL, "cpu": CPU}


@dataclass(frozen=True, slots=True)
class InputSet:
    """One micro-batch and its truth. `pristine` is never written to."""

    pristine: Tensor  # [T, v]
    labels: Tensor  # [T] int64
    old_log_probs: Tensor  # [T] float32
    advantages: Tensor  # [N] float32
    log_probs: Tensor  # [T] float64, of these columns alone


class LossProblem:
    """num_sets micro-batches of one shape, and one buffer `logits` that a step may overwrite; load(index) restores it."""

    def __init__(self, case: LossCase, device: torch.device, *, num_sets: int = 3, seed: int = 0):
        self.case, self.device, self.num_sets = case, device, num_sets
        num_tokens = case.num_tokens
        self.lengths = document_lengths(case.packing, num_tokens)
        bounds = torch.tensor([0, *self.lengths]).cumsum(0)
        self.cu_seqlens = bounds.to(torch.int32).to(device)
        documents = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        # The prompt: the first part of each document.
        mask = torch.cat([torch.arange(length) >= round(case.masked * length) for length in self.lengths])
        self.documents, self.loss_mask = documents.to(device), mask.to(device)
        counts = torch.bincount(documents[mask], minlength=len(self.lengths))
        self.token_counts = counts.to(device)
        self.num_unmasked = int(counts.sum())
        # Token mean: the one aggregation that every peer has.
        self.token_weights = torch.full((len(self.lengths),), 1.0 / self.num_unmasked, device=device)
        self.regularizer_weights = (1.0 / (len(self.lengths) * self.token_counts)).float()
        self.clip_low, self.clip_high = get_policy_loss(case.loss).clip_ratios
        self.logits = torch.empty(num_tokens, case.num_columns, dtype=case.dtype, device=device)
        self.sets = [self._draw(seed * 1000 + index) for index in range(num_sets)]
        self.current = self.sets[0]
        self.rows = torch.linspace(0, num_tokens - 1, min(GATE_ROWS, num_tokens)).long().unique().to(device)
        element_bytes = case.dtype.itemsize
        self.logits_bytes = float(num_tokens * case.num_columns * element_bytes)
        self.nominal_bytes = BYTES_PER_ELEMENT_OF_LOGITS * self.logits_bytes
        # A masked row is not read, but its gradient is written.
        masked_bytes = (num_tokens - self.num_unmasked) * case.num_columns * element_bytes
        self.floor_bytes = self.nominal_bytes - (BYTES_PER_ELEMENT_OF_LOGITS - 1) * masked_bytes

    def load(self, index: int) -> None:
        self.current = self.sets[index]
        self.logits.copy_(self.current.pristine)

    def _draw(self, seed: int) -> InputSet:
        case, generator = self.case, torch.Generator(self.device).manual_seed(seed)
        pristine = torch.empty_like(self.logits).normal_(0.0, 2.0, generator=generator)
        labels = torch.randint(case.num_columns, (case.num_tokens,), generator=generator, device=self.device)
        log_probs = float64_log_probs(pristine, labels)[0]
        noise = GRPO_LOG_RATIO * torch.randn(case.num_tokens, generator=generator, device=self.device, dtype=torch.float64)
        if case.loss == "gspo":
            noise = noise - (self._mean(noise) - GSPO_LOG_RATIO)[self.documents]
        signs = 1.0 - 2.0 * (torch.arange(len(self.lengths), device=self.device) % 4 == 3)
        sizes = 0.5 + torch.rand(len(self.lengths), generator=generator, device=self.device)
        return InputSet(pristine, labels, (log_probs - noise).float(), signs * sizes, log_probs)

    def _mean(self, values: Tensor) -> Tensor:  # [T] -> [N]
        values = torch.where(self.loss_mask, values, 0.0)
        return torch.zeros_like(self.token_counts, dtype=values.dtype).index_add_(0, self.documents, values) / self.token_counts

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """loss, sum of the tokens' absolute losses, and d loss / d log_prob [T], in float64, of the loaded set."""
        inputs = self.current
        log_ratio = inputs.log_probs - inputs.old_log_probs.double()
        log_ratio = self._mean(log_ratio)[self.documents] if self.case.loss == "gspo" else log_ratio
        ratio, advantages = log_ratio.exp(), inputs.advantages.double()[self.documents]
        is_clipped = self.loss_mask & ((ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high))
        assert not bool(is_clipped.any()), "the inputs were drawn so that nothing is clipped"
        values = torch.where(self.loss_mask, -ratio * advantages, 0.0) / self.num_unmasked
        return values.sum(), values.abs().sum(), values

    def check_loss(
        self,
        loss: Tensor,  # 0-d
        log_probs: Tensor | None,  # [T]; None: the provider keeps them
        *,
        entropy_coefficient: float = 0.0,
        num_replicas: int = 1,
    ) -> list[Check]:
        """num_replicas: as many ranks as hold this shard's partials too, so that each probability is divided by it."""
        true_loss, scale, _ = self.truth()
        if entropy_coefficient:
            true_loss = true_loss - (self.entropy_weights(entropy_coefficient) * self.true_entropy(num_replicas)).sum()
        checks = [Check("loss", float((loss.double() - true_loss).abs() / scale), LOSS_LIMIT)]
        return checks if log_probs is None else [*checks, self.check_log_probs(log_probs, num_replicas)]

    def check_log_probs(self, log_probs: Tensor, num_replicas: int = 1) -> Check:  # [T]
        difference = log_probs[self.rows].double() - (self.current.log_probs[self.rows] - math.log(num_replicas))
        return Check("log_prob", _largest(difference, self.loss_mask[self.rows]), LOG_PROB_LIMIT)

    def check_gradient(
        self,
        gradient: Tensor,  # [*, v] of d loss / d logits
        *,
        row_index: Tensor | None = None,  # [T] where the provider keeps a token's row; None: in order
        entropy_coefficient: float = 0.0,
        num_replicas: int = 1,
    ) -> list[Check]:
        """Sampled rows against float64; all rows for elements that are not finite."""
        inputs, rows = self.current, self.rows
        x = inputs.pristine[rows].double()
        log_probabilities = torch.log_softmax(x, -1) - math.log(num_replicas)
        probabilities = log_probabilities.exp()
        delta = torch.zeros_like(x).scatter_(1, inputs.labels[rows, None], 1.0)
        expected = self.truth()[2][rows, None] * (delta - probabilities)
        if entropy_coefficient:
            # d(-e H) / d x_j = e p_j (ln p_j + H)
            weights, entropy = self.entropy_weights(entropy_coefficient), self.true_entropy(num_replicas)
            expected += weights[rows, None] * probabilities * (log_probabilities + entropy[rows, None])
        flat = gradient.reshape(-1, x.shape[1])
        found = flat[rows if row_index is None else row_index[rows]].double()
        # Of all rows: an element that nobody wrote is NaN here (Device.poison).
        non_finite = sum(int((~torch.isfinite(part)).sum()) for part in flat.split(1024))
        limit = GRADIENT_LIMITS[self.case.dtype]
        checks = [Check("gradient", _relative(found, expected), limit)]
        # The label's element is as large as all others together are small: a wrong softmax would hide behind it.
        found, expected = (torch.where(delta == 1, 0.0, values) for values in (found, expected))
        return [
            *checks,
            Check("gradient off the label", _relative(found, expected), limit),
            Check("non-finite elements", float(non_finite), 0.0),
        ]

    def entropy_weights(self, entropy_coefficient: float) -> Tensor:  # [T] float64
        weights = entropy_coefficient * self.regularizer_weights.double()[self.documents]
        return torch.where(self.loss_mask, weights, 0.0)

    def true_entropy(self, num_replicas: int = 1) -> Tensor:  # [T] float64
        return float64_log_probs(self.current.pristine, self.current.labels)[1] + math.log(num_replicas)


def _largest(difference: Tensor, mask: Tensor) -> float:  # both [R]
    return float(torch.where(mask, difference.abs(), 0.0).max())


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def document_lengths(packing: str, num_tokens: int) -> list[int]:
    """Lengths that add up to num_tokens; log-normal ones are the same in every run, at least 2 and sigma 1."""
    if packing == ONE:
        return [num_tokens]
    if packing == EIGHT:
        return [num_tokens // 8] * 8
    draws = torch.randn(NUM_LOG_NORMAL, generator=torch.Generator().manual_seed(0)).exp()
    lengths = [max(2, int(share * num_tokens)) for share in (draws / draws.sum()).tolist()]
    longest = lengths.index(max(lengths))
    lengths[longest] += num_tokens - sum(lengths)
    return lengths


def float64_log_probs(
    logits: Tensor,  # [T, v]
    labels: Tensor,  # [T]
) -> tuple[Tensor, Tensor]:  # log_probs [T], entropy [T], float64
    """A few rows at a time, straight from the definition."""
    num_rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    log_probs, entropy = [], []
    for x, label in zip(logits.split(num_rows), labels.split(num_rows), strict=True):
        row = torch.log_softmax(x.double(), -1)
        log_probs.append(row.gather(1, label[:, None])[:, 0])
        entropy.append(-(row.exp() * row).sum(-1))
    return torch.cat(log_probs), torch.cat(entropy)
