"""What is right for a case of `bench head`, in float64 on sampled rows and in float32 as a whole; it must never call ours.

Equations: docs/losses.md. With the coefficient c_t = dL / dlog_prob_t,

    dX_t = c_t (W_label - sum_j p_tj W_j)        dW_j = sum_t c_t (delta_tj - p_tj) X_t
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.commands.bench.harness import Check
from megatron_rl.commands.bench.head_cases import KL_COEFFICIENT, HeadBatch
from megatron_rl.layout.packing import spread

# "policy": the case's loss. "cross-entropy": the mean of -log_prob over unmasked tokens, all that some peers have.
POLICY, CROSS_ENTROPY = "policy", "cross-entropy"
GATE_ROWS = 64
# Relative Frobenius norm. bfloat16: the logits' gradient and the result are rounded to 2^-9 each; float32: 2^-24 and sums.
GRADIENT_LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
# Absolute. A bfloat16 logit between 0.5 and 1 is off by up to 2^-9; float32: sums of 150 k exponentials.
LOG_PROB_LIMITS = {torch.bfloat16: 4e-3, torch.float32: 5e-5}
# Relative to the sum of the tokens' absolute losses.
LOSS_LIMIT = 1e-4
MATMUL_LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
COLUMNS_AT_A_TIME = 8192


@dataclass(frozen=True, slots=True)
class Result:
    """What a step found. A gradient may have more rows than the case: see row_index in HeadProblem.check."""

    loss: Tensor | None  # 0-d
    log_probs: Tensor | None  # [T]; None: the provider keeps them
    hidden_gradient: Tensor | None  # [*, H]
    weight_gradient: Tensor | None  # [V, H]
    logits: Tensor | None = None  # [C, V] of the last C rows: what a bare matmul leaves


@dataclass(frozen=True, slots=True)
class Truth:
    loss: Tensor  # 0-d float64
    scale: Tensor  # 0-d float64: sum of the tokens' absolute losses
    coefficients: Tensor  # [T] float64


class HeadProblem(HeadBatch):
    """A batch that can judge. `logits_bytes`: of all logits at once, which only the unfused path holds."""

    @property
    def logits_bytes(self) -> float:
        return float(self.case.num_tokens * self.case.vocab_size * self.case.dtype.itemsize)

    @property
    def input_bytes(self) -> float:
        """Weight and one set of hidden states."""
        case = self.case
        return float((case.num_tokens + case.vocab_size) * case.hidden_size * case.dtype.itemsize)

    @property
    def matmul_flops(self) -> float:
        """Of one of the head's matmuls over all rows, masked ones too."""
        return 2.0 * math.prod(self.case.shape)

    @functools.cached_property
    def rows(self) -> Tensor:
        """Sampled rows, ascending."""
        return torch.linspace(0, self.case.num_tokens - 1, min(GATE_ROWS, self.case.num_tokens)).long().unique().to(self.device)

    def truth(self, kind: str) -> Truth:
        """Of the loaded set."""
        inputs, weights = self.current, torch.where(self.loss_mask, 1.0 / self.num_unmasked, 0.0).double()
        if kind == CROSS_ENTROPY:
            values = -weights * inputs.log_probs
            return Truth(values.sum(), values.abs().sum(), -weights)
        log_ratio = inputs.log_probs - inputs.old_log_probs.double()
        log_ratio = spread(self.mean(log_ratio), self.documents) if self.case.loss == "gspo" else log_ratio
        ratio, advantages = log_ratio.exp(), spread(inputs.advantages.double(), self.documents)
        values = -torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages) * weights
        is_clipped = torch.where(advantages > 0, ratio > 1 + self.clip_high, ratio < 1 - self.clip_low)
        coefficients = torch.where(is_clipped, 0.0, -weights * ratio * advantages)
        if self.case.with_kl:
            difference = inputs.ref_log_probs.double() - inputs.log_probs
            values = values + KL_COEFFICIENT * weights * (difference.exp() - difference - 1)
            coefficients = coefficients + KL_COEFFICIENT * weights * (1 - difference.exp())
        return Truth(values.sum(), values.abs().sum(), coefficients)

    def check(
        self,
        result: Result,
        *,
        kind: str = POLICY,
        precision: torch.dtype | None = None,  # of the logits; None: the case's
        row_index: Tensor | None = None,  # [T] where hidden_gradient keeps a token's row; None: in order
    ) -> list[Check]:
        """Of the first set, whose whole gradients are kept."""
        precision, checks, case = precision or self.case.dtype, [], self.case
        truth, log_probs, rows_gradient = self.truth(kind), *self._rows_in_float64(kind)
        mask = self.loss_mask[self.rows]
        if result.logits is not None:
            checks.append(self._check_logits(result.logits))
        if result.loss is not None:
            checks.append(Check("loss", float((result.loss.double() - truth.loss).abs() / truth.scale), LOSS_LIMIT))
        if result.log_probs is not None:
            difference = torch.where(mask, result.log_probs[self.rows].double() - log_probs, 0.0)
            checks.append(Check("log_prob", float(difference.abs().max()), LOG_PROB_LIMITS[precision]))
        if result.hidden_gradient is None or result.weight_gradient is None:
            return checks
        limit, hidden = GRADIENT_LIMITS[case.dtype], result.hidden_gradient.reshape(-1, case.hidden_size)
        hidden = hidden[: case.num_tokens] if row_index is None else hidden[row_index]
        whole_hidden, whole_weight = self.whole_gradients(kind)
        is_label = torch.zeros(case.vocab_size, dtype=torch.bool, device=self.device)
        is_label[self.current.labels] = True
        weight = result.weight_gradient
        return [
            *checks,
            Check("dX, rows in float64", relative(hidden[self.rows], rows_gradient), limit),
            Check("dX", relative(hidden, whole_hidden), limit),
            Check("dW", relative(weight, whole_weight), limit),
            # Labels' rows are as large as all others are small: wrong probabilities would hide behind them.
            Check("dW off the labels", relative(weight, whole_weight, ~is_label), limit),
            Check("non-finite elements", float(sum(num_nonfinite(tensor) for tensor in (hidden, weight))), 0.0),
        ]

    def _check_logits(self, logits: Tensor) -> Check:  # [C, V] of the last C rows
        rows = self.rows[self.rows >= self.case.num_tokens - logits.shape[0]]
        exact = self.current.hidden[rows].double() @ self.weight[:COLUMNS_AT_A_TIME].double().t()
        found = logits[rows - (self.case.num_tokens - logits.shape[0]), : exact.shape[1]]
        return Check("logits", relative(found, exact), MATMUL_LIMITS[self.case.dtype])

    def _rows_in_float64(self, kind: str) -> tuple[Tensor, Tensor]:  # log_probs [R], dX [R, H] of the sampled rows
        inputs, rows = self.current, self.rows
        hidden, labels = inputs.hidden[rows].double(), inputs.labels[rows]
        blocks = self.weight.split(COLUMNS_AT_A_TIME)
        logits = torch.cat([hidden @ block.double().t() for block in blocks], 1)
        log_probabilities = torch.log_softmax(logits, -1)
        parts = log_probabilities.exp().split(COLUMNS_AT_A_TIME, 1)
        expected = sum(part @ block.double() for part, block in zip(parts, blocks, strict=True))
        gradient = self.truth(kind).coefficients[rows, None] * (self.weight[labels].double() - expected)
        return log_probabilities.gather(1, labels[:, None])[:, 0], gradient

    def whole_gradients(self, kind: str) -> tuple[Tensor, Tensor]:
        """dX [T, H] and dW [V, H] of the first set, products and sums in float32; kept for all providers."""
        if kind not in self._whole:
            self._whole[kind] = self._compute_gradients(kind)
        return self._whole[kind]

    @functools.cached_property
    def _whole(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {}

    def _compute_gradients(self, kind: str) -> tuple[Tensor, Tensor]:
        inputs, weight = self.sets[0], self.weight.float()
        assert self.current is inputs, "the gate looks at the first set"
        coefficients = self.truth(kind).coefficients.float()
        of_hidden = torch.zeros_like(inputs.hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight)
        for rows in coefficients.nonzero()[:, 0].split(self.inputs.chunk_rows):
            hidden = inputs.hidden[rows].float()
            gradient = torch.softmax(hidden @ weight.t(), -1).neg_()
            gradient[torch.arange(rows.numel(), device=self.device), inputs.labels[rows]] += 1.0
            gradient *= coefficients[rows, None]
            of_hidden[rows] = gradient @ weight
            of_weight.addmm_(gradient.t(), hidden)
        return of_hidden, of_weight


def relative(found: Tensor, expected: Tensor, chosen: Tensor | None = None) -> float:  # [n, H] each; chosen [n] bool
    """|found - expected| / |expected| over the chosen rows, in float64 sums of a few rows at a time."""
    squares = torch.zeros(2, dtype=torch.float64, device=expected.device)
    for rows in torch.arange(expected.shape[0], device=expected.device).split(COLUMNS_AT_A_TIME):
        rows = rows if chosen is None else rows[chosen[rows]]
        wanted = expected[rows]
        difference = found[rows].to(wanted.dtype) - wanted
        squares += torch.stack([difference.square().sum(dtype=torch.float64), wanted.square().sum(dtype=torch.float64)])
    return float((squares[0] / squares[1]).sqrt())


def num_nonfinite(tensor: Tensor) -> int:
    return sum(int((~torch.isfinite(part)).sum()) for part in tensor.split(COLUMNS_AT_A_TIME))
